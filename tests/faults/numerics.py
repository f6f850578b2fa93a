"""Faults of arithmetic under settings of JAX, under `jax.vmap`, and at the ends of float32."""

from tests.faults import Fault

ESTIMATE = "dynamiq_jax/_buckets/error_estimate.py"
CHECK = "dynamiq_jax/_buckets/error_check.py"
ALLOCATION = "pallas_kernels/codec/allocation.py"
SETTINGS, LIMITS = "tests/test_settings.py", "tests/test_error_limits.py"

FAULTS = (
    Fault(
        "prices of widths have the default integers",
        ALLOCATION,
        "reversed(range(rounds))], jnp.int32)",
        "reversed(range(rounds))])",
        (f"{SETTINGS}::test_every_method[dynamiq]",),
    ),
    Fault(
        "thresholds are promoted to the rank of the prices",
        ALLOCATION,
        "prices[:, None] + needed[None, :]",
        "prices[:, None] + needed",
        ("tests/test_allocation.py",),
    ),
    Fault(
        "random signs depend on the default floats",
        "dynamiq_jax/methods/_hadamard.py",
        "jax.random.bernoulli(key, np.float32(0.5), (block,))",
        "jax.random.bernoulli(key, 0.5, (block,))",
        (f"{SETTINGS}::test_every_method[thc]",),
    ),
    Fault(
        "words of a sketch depend on the default integers",
        "dynamiq_jax/methods/_count_sketch.py",
        "jax.random.bits(of_words, (stretches,), jnp.uint32)",
        "jax.random.bits(of_words, (stretches,))",
        (f"{SETTINGS}::test_every_method[split_sketch]",),
    ),
    Fault(
        "the sample depends on the default integers",
        ESTIMATE,
        "(number,), 0, SUPER_GROUP_SIZE, jnp.int32)",
        "(number,), 0, SUPER_GROUP_SIZE)",
        (f"{SETTINGS}::test_sums_with_metrics_and_a_limit",),
    ),
    Fault(
        "widths of rows are counted in the default integers",
        "pallas_kernels/codec/ordering.py",
        "widths = jnp.sum(has_bit, axis=-1, dtype=jnp.int32)",
        "widths = jnp.sum(has_bit.astype(jnp.int32), axis=-1)",
        (f"{SETTINGS}::test_every_method[dynamiq]",),
    ),
    Fault(
        "signs of a block are promoted to its rank",
        "dynamiq_jax/methods/_hadamard.py",
        "* signs[None, :]",
        "* signs",
        (f"{SETTINGS}::test_every_method[thc]",),
    ),
    Fault(
        "a branch has a constant that does not vary",
        "pallas_kernels/codec/bit_planes.py",
        "flags = match_varying(jnp.asarray(np.uint8(1) << _EIGHTHS)[None, :, None], widths)",
        "flags = (np.uint8(1) << _EIGHTHS)[None, :, None]",
        ("tests/test_vmapped.py::test_topologies",),
    ),
    Fault(
        "errors have the scale of the result alone",
        ESTIMATE,
        "jnp.maximum(rows.scale, _scale_of(exact))",
        "rows.scale",
        (f"{LIMITS}::test_a_result_that_underflows_has_its_error",),
    ),
    Fault(
        "errors have a scale whose reciprocal underflows",
        ESTIMATE,
        "np.float32(2.0**112)",
        "np.float32(2.0**126)",
        (f"{LIMITS}::test_a_limit_keeps_means_finite_that_are_finite",),
    ),
    Fault(
        "a result that is not finite is within every limit",
        CHECK,
        " | (found.bad_rows > 0)",
        "",
        (f"{LIMITS}::test_with_a_limit_only_coordinates_that_are_not_finite_are_lost",),
    ),
    Fault(
        "rows that were sent again still count as not finite",
        CHECK,
        "without_error(bucket, again), found.error",
        "found, found.error",
        (f"{LIMITS}::test_a_limit_keeps_means_finite_that_are_finite",),
    ),
    Fault(
        "a bucket is sent again one standard deviation before the limit",
        ESTIMATE,
        "np.float32(2) * jnp.sqrt(variance)",
        "jnp.sqrt(variance)",
        (f"{LIMITS}::test_a_bucket_at_the_limit_is_nearly_always_sent_again",),
    ),
    Fault(
        "small buckets have samples of eight",
        ESTIMATE,
        "_LEAST, _MOST = 64, 2**14",
        "_LEAST, _MOST = 8, 2**14",
        (f"{LIMITS}::test_the_smallest_sample_is_precise_enough",),
    ),
    Fault(
        "metrics are those of the worst shard",
        "dynamiq_jax/_buckets/driver.py",
        "lax.pmean(value, shards.axes)",
        "lax.pmax(value, shards.axes)",
        ("tests/test_optimizer.py::test_metrics_are_means_over_shards",),
    ),
    Fault(
        "only NaN leaves the residual",
        "dynamiq_jax/methods/_error_feedback.py",
        "jnp.where(jnp.isfinite(left_out), left_out, np.float32(0))",
        "jnp.where(jnp.isnan(left_out), np.float32(0), left_out)",
        ("tests/test_error_feedback.py::test_what_a_method_saturates_is_not_kept_as_infinity",),
    ),
)
