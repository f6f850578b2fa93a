"""Faults of ARC-Top-K, of EF21 with momentum, and of the bits that both kinds of top-k have."""

from tests.faults import Fault

ARC, EF21M = "dynamiq_jax/methods/_arc_top_k.py", "dynamiq_jax/methods/_ef21m.py"
ARC_TESTS, EF21M_TESTS = ("tests/test_arc_top_k.py",), ("tests/test_ef21m.py",)

FAULTS = (
    Fault(
        "sketches of workers are added up as squares",
        ARC,
        "l2_norm(jnp.sum(bfloat16_value(words), axis=0), axis=1)",
        "l2_norm(l2_norm(bfloat16_value(words), axis=0), axis=1)",
        ARC_TESTS,
    ),
    Fault(
        "every step has the same sketch",
        ARC,
        "jax.random.normal(key, (width, self.rank), jnp.float32)",
        "jax.random.normal(jax.random.key(0), (width, self.rank), jnp.float32)",
        ARC_TESTS,
    ),
    Fault(
        "a column of the sketch is not counted",
        ARC,
        "axis.owners_bytes(_BYTES * share * self.rank, _BYTES * share)",
        "axis.owners_bytes(_BYTES * share * (self.rank - 1), _BYTES * share)",
        (*ARC_TESTS, "tests/test_methods.py::test_the_wire_cost_counts_all_bytes_of_an_all_reduce"),
    ),
    Fault(
        "padding of sketches is not counted",
        ARC,
        "share = -(-num_blocks // axis.size)",
        "share = num_blocks // axis.size",
        ARC_TESTS,
    ),
    Fault(
        "scores are squares, which leave the range of float32",
        ARC,
        "bfloat16_bits(l2_norm(jnp.sum(bfloat16_value(words), axis=0), axis=1))",
        "bfloat16_bits(jnp.sum(jnp.sum(bfloat16_value(words), axis=0) ** 2, axis=1))",
        ARC_TESTS,
    ),
    Fault(
        "bits for scores alone are accepted",
        "dynamiq_jax/methods/_budget.py",
        "low < bits <= _MAX_BITS",
        "low <= bits <= _MAX_BITS",
        ARC_TESTS,
    ),
    Fault(
        "the momentum of the first steps is that of the others",
        EF21M,
        "jnp.maximum(np.float32(self.momentum), 1 / step.astype(jnp.float32))",
        "np.float32(self.momentum) + 0 * step.astype(jnp.float32)",
        EF21M_TESTS,
    ),
    Fault(
        "trackers are sent, and not their differences from the estimates",
        EF21M,
        "tracker - state.estimate, with_feedback",
        "tracker, with_feedback",
        EF21M_TESTS,
    ),
    Fault(
        "estimates get the mean of all workers",
        EF21M,
        "state.estimate + reduced.applied",
        "state.estimate + reduced.total / call.num_workers",
        EF21M_TESTS,
    ),
    Fault(
        "the result is the sum of one step",
        EF21M,
        "total = same_over(state.total, call.axis.name) + reduced.total",
        "total = reduced.total",
        EF21M_TESTS,
    ),
    Fault(
        "states that are not finite are kept",
        EF21M,
        "lambda new, old: jnp.where(finite, new, old)",
        "lambda new, old: new",
        EF21M_TESTS,
    ),
    Fault(
        "every worker keeps the state by its own values",
        EF21M,
        "finite = jnp.all(jnp.isfinite(total))",
        "finite = jnp.all(jnp.isfinite(tracker))",
        EF21M_TESTS,
    ),
    Fault(
        "methods whose hops round are accepted",
        EF21M,
        "if not self.inner.sums_applied:",
        "if self.inner is None:",
        EF21M_TESTS,
    ),
    Fault(
        "blocks around any method count as sums of what workers applied",
        "dynamiq_jax/methods/_sparse_blocks.py",
        "return self.inner.sums_applied",
        "return True",
        EF21M_TESTS,
    ),
    Fault(
        "factors around any method count as sums of what workers applied",
        "dynamiq_jax/methods/_powersgd.py",
        "return self.inner.sums_applied",
        "return True",
        EF21M_TESTS,
    ),
)
