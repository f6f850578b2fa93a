"""Faults of the public functions around the collectives."""

from tests.faults import Fault

FAULTS = (
    Fault(
        "value_and_grad ignores the options",
        "dynamiq_jax/_api/autodiff.py",
        "topology=how.topology, options=how.options",
        "topology=how.topology, options=Options()",
        (
            "tests/test_value_and_grad.py::test_options_say_which_gradients_are_exact_and_how_large_buckets_are",
        ),
    ),
    Fault(
        "the loss is summed over the workers",
        "dynamiq_jax/_api/autodiff.py",
        "lambda leaf: lax.pmean(leaf, names), value",
        "lambda leaf: lax.psum(leaf, names), value",
        ("tests/test_value_and_grad.py::test_with_compression_only_the_gradients_differ",),
    ),
    Fault(
        "replicated arguments are counted from zero",
        "dynamiq_jax/_api/autodiff.py",
        "for position, arg in enumerate(args, start=1):",
        "for position, arg in enumerate(args, start=0):",
        ("tests/test_value_and_grad.py::test_replicated_arguments_are_seen_whole",),
    ),
    Fault(
        "vnmse drops imaginary parts",
        "dynamiq_jax/_api/metrics.py",
        "return leaf.astype(jnp.complex64 if is_complex else jnp.float32)",
        "return leaf.real.astype(jnp.float32)",
        ("tests/test_metrics.py",),
    ),
    Fault(
        "options are ignored in the first state",
        "dynamiq_jax/_api/optimizer.py",
        "driver.first_states(operation, params, how)",
        "driver.first_states(operation, params, resolve(method, topology, Options()))",
        ("tests/test_optimizer.py::test_a_state_covers_the_buckets_that_the_options_make",),
    ),
    Fault(
        "every step has the same noise",
        "dynamiq_jax/_api/optimizer.py",
        "jax.random.fold_in(jax.random.key(seed), state.step)",
        "jax.random.fold_in(jax.random.key(seed), start_step)",
        (
            "tests/test_optimizer.py::test_every_step_has_its_own_noise_and_the_seed_fixes_all_of_it",
        ),
    ),
    Fault(
        "metrics of a step are dropped",
        "dynamiq_jax/_api/optimizer.py",
        "AllReduceState(state.step + 1, after, outcome.metrics)",
        "AllReduceState(state.step + 1, after, state.metrics)",
        ("tests/test_optimizer.py::test_metrics_are_means_over_buckets_by_their_coordinates",),
    ),
    Fault(
        "the gather over fast axes counts as float32",
        "dynamiq_jax/_api/report.py",
        "item_bytes = 4 + bucket.dtype.itemsize",
        "item_bytes = 4 + 4",
        ("tests/test_hierarchical.py::test_the_report_is_the_compiled_program",),
    ),
    Fault(
        "bytes of several fast axes are counted in the wrong order",
        "dynamiq_jax/_api/report.py",
        "for axis in reversed(axes.fast):\n"
        "        size //= axis.size\n"
        "        total += (axis.size - 1) * size * item_bytes",
        "for axis in axes.fast:\n"
        "        size //= axis.size\n"
        "        total += (axis.size - 1) * size * item_bytes",
        ("tests/test_hierarchical.py::test_three_axes",),
        equivalent="Gathers over all fast axes send (1 - 1/n) of the bucket, in any order.",
    ),
    Fault(
        "booleans count as four bytes",
        "dynamiq_jax/_api/report.py",
        "1 if leaf.dtype == bool else max(leaf.dtype.itemsize, 4)",
        "max(leaf.dtype.itemsize, 4)",
        ("tests/test_wire_report.py::test_the_report_knows_the_bytes_of_every_exact_dtype",),
    ),
)
