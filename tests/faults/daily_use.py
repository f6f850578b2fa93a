"""Faults of policies, schedules, metrics and the limit of the error."""

from tests.faults import Fault

POLICY = "dynamiq_jax/_buckets/policy.py"
ESTIMATE = "dynamiq_jax/_buckets/error_estimate.py"
CHECK = "dynamiq_jax/_buckets/error_check.py"
OPTIMIZER = "dynamiq_jax/_api/optimizer.py"
OF_ESTIMATE = "tests/test_error_estimate.py"

FAULTS = (
    Fault(
        "patterns have to match from the start",
        POLICY,
        "if re.search(pattern, path):",
        "if re.match(pattern, path):",
        ("tests/test_policy.py",),
    ),
    Fault(
        "patterns without a leaf are ignored",
        POLICY,
        "if unused and self.all_used:",
        "if False:",
        ("tests/test_policy.py",),
    ),
    Fault(
        "all buckets have the method of the first one",
        "dynamiq_jax/_buckets/plan.py",
        "kind = _Kind(axes, how.topology, method,",
        "kind = _Kind(axes, how.topology, methods[0] or method,",
        ("tests/test_policy.py",),
    ),
    Fault(
        "fragments need a leaf for each pattern",
        "dynamiq_jax/training/_local_sgd.py",
        "dataclasses.replace(how.policy, all_used=False)",
        "how.policy",
        ("tests/test_policy.py::test_fragments_of_local_sgd_have_the_methods_of_their_leaves",),
    ),
    Fault(
        "a phase starts a step late",
        "dynamiq_jax/_api/schedule.py",
        "jnp.sum(step >= later, dtype=jnp.int32)",
        "jnp.sum(step > later, dtype=jnp.int32)",
        ("tests/test_schedule.py",),
    ),
    Fault(
        "each phase has a state of its own",
        OPTIMIZER,
        "states = {**state.method, **outcome.states}",
        "states = {**outcome.states, **state.method}",
        ("tests/test_schedule.py::test_phases_of_like_states_share_them",),
    ),
    Fault(
        "the sample is not weighted",
        ESTIMATE,
        "np.float32(SUPER_GROUP_SIZE / number) / chances[row]",
        "np.float32(flat.size / number)",
        (f"{OF_ESTIMATE}::test_the_estimate_is_unbiased",),
    ),
    Fault(
        "the sample is a sum where the result is a mean",
        ESTIMATE,
        "axes.names) * np.float32(1 / divisor)",
        "axes.names)",
        (OF_ESTIMATE,),
    ),
    Fault(
        "shards are not added up",
        ESTIMATE,
        "error, variance, square, bad_rows, all_rows = _over_shards(lax.psum",
        "error, variance, square, bad_rows, all_rows = _over_shards(lax.pmean",
        (f"{OF_ESTIMATE}::test_shards_are_counted_once",),
    ),
    Fault(
        "rows that are not finite hide the error",
        ESTIMATE,
        "off = jnp.where(jnp.isfinite(off), off, np.float32(0))",
        "off = off + np.float32(0)",
        (f"{OF_ESTIMATE}::test_rows_that_are_not_finite_are_counted_and_do_not_hide_the_others",),
    ),
    Fault(
        "a bucket over the limit is returned as it is",
        CHECK,
        "lax.cond(is_over, exactly, lambda: (total, found))",
        "lax.cond(is_over, lambda: (total, exactly()[1]), lambda: (total, found))",
        (f"{OF_ESTIMATE}::test_a_limit_holds_in_every_step_and_lets_go_afterwards",),
    ),
    Fault(
        "bytes of the sample do not count",
        CHECK,
        "bucket.bytes_sent + sample_bytes(bucket, axes)",
        "bucket.bytes_sent",
        (f"{OF_ESTIMATE}::test_the_program_sends_the_bytes_of_the_metrics",),
    ),
    Fault(
        "half an all-reduce ignores a limit",
        "dynamiq_jax/_buckets/driver.py",
        "if not operation.can_estimate:",
        "if False:",
        (f"{OF_ESTIMATE}::test_half_an_all_reduce_has_no_limit",),
    ),
)
