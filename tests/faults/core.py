"""Faults of axes, codecs, names and checks."""

from tests.faults import Fault

FAULTS = (
    Fault(
        "owners combine their own shares",
        "dynamiq_jax/_core/axis.py",
        "return self.gather(combine(self.exchange(own)))",
        "return self.gather(combine(own))",
        ("tests/test_topologies.py::test_numbers_that_owners_combine_are_the_same_everywhere",),
    ),
    Fault(
        "owners count bytes that they send to themselves",
        "dynamiq_jax/_core/axis.py",
        "return (self.size - 1) * (share + combined)",
        "return self.size * (share + combined)",
        ("tests/test_topologies.py::test_the_bytes_of_owners_are_those_of_the_program",),
    ),
    Fault(
        "a shift goes the other way",
        "dynamiq_jax/_core/axis.py",
        "to = [(source, (source + step) % self.size) for source in range(self.size)]",
        "to = [(source, (source - step) % self.size) for source in range(self.size)]",
        ("tests/test_topologies.py::test_an_axis_shifts_swaps_and_gathers",),
    ),
    Fault(
        "one of several messages is not added",
        "dynamiq_jax/_core/codec.py",
        "for message in range(_length(payloads)):",
        "for message in range(1):",
        ("tests/test_chunk_codec.py",),
    ),
    Fault(
        "padding is decoded",
        "dynamiq_jax/_core/codec.py",
        "return self.decode(self.unpack(payloads), None)[: self.size]",
        "return self.decode(self.unpack(payloads), None)",
        ("tests/test_chunk_codec.py",),
    ),
    Fault(
        "a rounded codec carries the values that came in",
        "dynamiq_jax/_core/codec.py",
        "local = dataclasses.replace(self.local, values=values)",
        "local = self.local",
        ("tests/test_chunk_codec.py",),
    ),
    Fault(
        "local chunks are counted from the first of all",
        "dynamiq_jax/_core/codec.py",
        "take_chunk(self.encoded, chunk - self.first)",
        "take_chunk(self.encoded, chunk)",
        ("tests/test_chunk_codec.py",),
    ),
    Fault(
        "sums are added in another dtype",
        "dynamiq_jax/_core/codec.py",
        "jnp.sum(received, axis=0, dtype=received.dtype)",
        "jnp.sum(received, axis=0)",
        ("tests/test_chunk_codec.py",),
    ),
    Fault(
        "a number sets the bits of a code",
        "dynamiq_jax/_core/naming.py",
        '_BUDGETS = ("bits", "code_bits")',
        '_BUDGETS = ("code_bits", "bits")',
        ("tests/test_naming.py",),
    ),
    Fault(
        "the last of two values counts",
        "dynamiq_jax/_core/naming.py",
        "if field in given:",
        "if False:",
        ("tests/test_naming.py",),
    ),
    Fault(
        "text is not read as a number",
        "dynamiq_jax/_core/naming.py",
        "_literal(value) if number is None else number",
        "value if number is None else number",
        ("tests/test_naming.py",),
    ),
    Fault(
        "True is a number",
        "dynamiq_jax/_core/validation.py",
        "isinstance(value, numbers.Real) and not isinstance(value, bool)",
        "isinstance(value, numbers.Real)",
        ("tests/test_validation.py",),
    ),
    Fault(
        "the largest integer is not possible",
        "dynamiq_jax/_core/validation.py",
        "(high is not None and value > high)",
        "(high is not None and value >= high)",
        ("tests/test_validation.py",),
    ),
)
