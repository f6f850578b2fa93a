"""Faults of the topologies and the cost model."""

from tests.faults import Fault

FAULTS = (
    Fault(
        "an all-to-all encodes sums like values",
        "dynamiq_jax/topologies/_all_to_all.py",
        "sums = codec.of_sums(axis.size)",
        "sums = codec",
        (
            "tests/test_topologies.py::test_only_an_all_to_all_has_sums_encoded_by_a_codec_of_their_own",
        ),
    ),
    Fault(
        "the sum of an all-to-all repeats a turn",
        "dynamiq_jax/topologies/_all_to_all.py",
        "return (Arrival(received, worker, axis.size - 1),)",
        "return (Arrival(received, worker, axis.size - 2),)",
        ("tests/test_topologies.py::test_turns_are_those_of_the_wire_format",),
    ),
    Fault(
        "the speed of the codec that a user gives is ignored",
        "dynamiq_jax/topologies/_auto.py",
        "self.codec or CODEC_SPEEDS[platform]",
        "CODEC_SPEEDS[platform]",
        ("tests/test_cost_model.py",),
    ),
    Fault(
        "every device has the speed of a GPU",
        "dynamiq_jax/topologies/_auto.py",
        'platform = "cpu" if jax.default_backend() == "cpu" else "gpu"',
        'platform = "gpu"',
        ("tests/test_cost_model.py",),
    ),
    Fault(
        "a topology is chosen that does not support the axis",
        "dynamiq_jax/topologies/_auto.py",
        "(c for c in candidates if c.supports(num_workers))",
        "candidates",
        ("tests/test_cost_model.py",),
    ),
    Fault(
        "a bucket waits until the one before it is decoded",
        "dynamiq_jax/topologies/_base.py",
        "return Scattered(values, _token_of([a.messages for a in arrivals]))",
        "return Scattered(values, values[:1])",
        ("tests/test_buckets.py",),
    ),
    Fault(
        "the token of a gather is there before the payloads",
        "dynamiq_jax/topologies/_base.py",
        "return _token_of(self.payloads)",
        "return jnp.zeros(1)",
        ("tests/test_buckets.py",),
    ),
    Fault(
        "a report counts one pass",
        "dynamiq_jax/topologies/_base.py",
        "return cost.statistics_bytes + self.bytes_scattered(cost, num_workers) + gathered",
        "return cost.statistics_bytes + gathered",
        ("tests/test_wire_report.py::test_the_bits_are_those_asked_for",),
    ),
    Fault(
        "turns of a butterfly are counted backwards",
        "dynamiq_jax/topologies/_butterfly.py",
        "turn = axis.size - 1 - (worker ^ chunk)",
        "turn = worker ^ chunk",
        ("tests/test_topologies.py::test_turns_are_those_of_the_wire_format",),
    ),
    Fault(
        "a butterfly keeps the part that it sends",
        "dynamiq_jax/topologies/_butterfly.py",
        "kept = _part(kept, mine - block, distance)",
        "kept = _part(kept, theirs - block, distance)",
        (
            "tests/test_topologies.py::test_every_chunk_holds_every_worker_once_and_every_turn_is_taken_once",
        ),
    ),
    Fault(
        "the efficiency of a link is ignored",
        "dynamiq_jax/topologies/_cost_model.py",
        "rate = self.gbit_per_s * 1e9 / 8 * self.efficiency",
        "rate = self.gbit_per_s * 1e9 / 8",
        ("tests/test_cost_model.py",),
    ),
    Fault(
        "latencies count ten times",
        "dynamiq_jax/topologies/_cost_model.py",
        "steps * self.latency_us * 1e-6",
        "steps * self.latency_us * 1e-5",
        ("tests/test_cost_model.py",),
    ),
    Fault(
        "statistics take no steps",
        "dynamiq_jax/topologies/_cost_model.py",
        "1 + _library_steps(num_workers) if cost.statistics_bytes else 0",
        "0",
        ("tests/test_cost_model.py",),
    ),
    Fault(
        "a crowded network slows the gather too",
        "dynamiq_jax/topologies/_cost_model.py",
        "wire=network.seconds(scattered * far + gathered, transfers)",
        "wire=network.seconds((scattered + gathered) * far, transfers)",
        ("tests/test_cost_model.py",),
    ),
    Fault(
        "an exact sum takes half of its steps",
        "dynamiq_jax/topologies/_cost_model.py",
        "steps = 2 * _library_steps(num_workers)",
        "steps = _library_steps(num_workers)",
        ("tests/test_cost_model.py",),
    ),
    Fault(
        "the second direction of a ring sums the chunks of the first",
        "dynamiq_jax/topologies/_ring.py",
        "return owner * self.of + (0 if self.step == 1 else 1)",
        "return owner * self.of",
        (
            "tests/test_topologies.py::test_every_chunk_holds_every_worker_once_and_every_turn_is_taken_once",
        ),
    ),
    Fault(
        "the second direction of a ring walks a step less",
        "dynamiq_jax/topologies/_ring.py",
        "_repeat(forward.axis.size - 1, step, carry",
        "_repeat(forward.axis.size - 2, step, carry",
        (
            "tests/test_topologies.py::test_every_chunk_holds_every_worker_once_and_every_turn_is_taken_once",
        ),
    ),
)
