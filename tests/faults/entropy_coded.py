"""Faults of the codes of integers and of the methods that use them."""

from tests.faults import Fault

FAULTS = (
    Fault(
        "symbols share a slot",
        "dynamiq_jax/methods/_rans.py",
        "return ends - frequencies",
        "return ends - frequencies - (ends > 2000)",
        ("tests/test_integer_coders.py",),
    ),
    Fault(
        "coding goes forward, like decoding",
        "dynamiq_jax/methods/_rans.py",
        "lax.scan(step, first, each, reverse=True)",
        "lax.scan(step, first, each)",
        ("tests/test_integer_coders.py",),
    ),
    Fault(
        "lanes read the same word",
        "dynamiq_jax/methods/_rans.py",
        "words.at[until - 1]",
        "words.at[until[-1] - 1 + until * 0]",
        ("tests/test_integer_coders.py",),
    ),
    Fault(
        "every block has the table of the first",
        "dynamiq_jax/methods/_rans.py",
        "jnp.repeat(of_blocks, self.block // self.lanes)",
        "jnp.repeat(of_blocks[:1], self.size // self.lanes)",
        ("tests/test_integer_coders.py",),
    ),
    Fault(
        "integers beyond the symbols count as inside",
        "dynamiq_jax/methods/_rans.py",
        "fits = inside & (count <= self.words)",
        "fits = count <= self.words",
        ("tests/test_integer_coders.py::test_what_does_not_fit_is_told",),
    ),
    Fault(
        "budgets have no slack",
        "dynamiq_jax/methods/_rans.py",
        "_SLACK * mean * size + _SPREAD * spread * math.sqrt(size)",
        "mean * size",
        ("tests/test_integer_coders.py",),
    ),
    Fault(
        "patches come back in the next row",
        "dynamiq_jax/methods/_integer_coders.py",
        "return inside - counts + before[:, None], until[-1]",
        "return inside + before[:, None], until[-1]",
        ("tests/test_integer_coders.py",),
    ),
    Fault(
        "a list that is full counts as one with room",
        "dynamiq_jax/methods/_integer_coders.py",
        "jnp.where(count > self.patches, jnp.maximum(filled, np.float32(2)), filled)",
        "jnp.minimum(filled, np.float32(1))",
        ("tests/test_integer_coders.py",),
    ),
    Fault(
        "coarse integers are rounded down",
        "dynamiq_jax/methods/_integer_coders.py",
        "jnp.floor(integers.astype(jnp.float32) / step + noise)",
        "jnp.floor(integers.astype(jnp.float32) / step)",
        (
            "tests/test_integer_coders.py::test_the_coarse_code_takes_what_room_there_is",
            "tests/test_entropy_coded.py::test_coarse_sums_are_unbiased",
        ),
    ),
    Fault(
        "hops lose count of coarse messages",
        "dynamiq_jax/methods/_entropy_coded.py",
        "before = jnp.sum(coarse, dtype=jnp.int32)",
        "before = jnp.int32(0)",
        ("tests/test_entropy_coded.py",),
    ),
    Fault(
        "messages of early turns count as long as the last",
        "dynamiq_jax/methods/_entropy_coded.py",
        "saved += count * (last - codes(workers).num_bytes)",
        "saved += 0 * (last - codes(workers).num_bytes)",
        ("tests/test_entropy_coded.py::test_the_report_is_the_compiled_program",),
    ),
    Fault(
        "budgets are those of independent workers",
        "dynamiq_jax/methods/_entropy_coded.py",
        "self.agreement * workers**2",
        "self.agreement * workers",
        ("tests/test_entropy_coded.py",),
    ),
    Fault(
        "two directions save the bytes of one",
        "dynamiq_jax/methods/_entropy_coded.py",
        "saved * call.topology.chunks_per_worker",
        "saved",
        ("tests/test_entropy_coded.py::test_the_report_is_the_compiled_program",),
    ),
)
