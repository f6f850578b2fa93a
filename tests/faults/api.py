"""Faults of the public functions around the collectives."""

from tests.faults import Fault

FAULTS = (
    Fault(
        "value_and_grad ignores the options",
        "dynamiq_jax/_api/autodiff.py",
        "            work.how,\n",
        '            resolve("bf16", "ring", Options()),\n',
        (
            "tests/test_value_and_grad.py::test_options_say_which_gradients_are_exact_and_how_large_buckets_are",
        ),
    ),
    Fault(
        "the loss is summed over the workers",
        "dynamiq_jax/_api/worker_loss.py",
        "lambda leaf: lax.pmean(leaf, self.names), (loss, aux)",
        "lambda leaf: lax.psum(leaf, self.names), (loss, aux)",
        ("tests/test_value_and_grad.py::test_with_compression_only_the_gradients_differ",),
    ),
    Fault(
        "arguments with the spec of a whole array are split",
        "dynamiq_jax/_api/arguments.py",
        "(is_module or not (spec is None or axes_of(spec)))",
        "is_module",
        ("tests/test_value_and_grad.py::test_whole_arguments_are_seen_whole",),
    ),
    Fault(
        "gradients come in the order of the arguments",
        "dynamiq_jax/_api/arguments.py",
        "tuple(by_position[position] for position in self.given)",
        "tuple(by_position[position] for position in self.argnums)",
        ("tests/test_value_and_grad.py::test_any_positions_may_be_differentiated",),
    ),
    Fault(
        "weights of workers are differentiated without the sum of all targets",
        "dynamiq_jax/_api/worker_loss.py",
        "targets * np.float32(self._num_workers) / lax.psum(targets, self.names)",
        "targets / lax.pmax(targets, self.names)",
        ("tests/test_value_and_grad.py::test_workers_are_weighted_by_their_targets",),
    ),
    Fault(
        "all workers drop the same units",
        "dynamiq_jax/_api/modules.py",
        "jax.random.fold_in(key, worker)",
        "key",
        (
            "tests/test_value_and_grad.py::test_an_nnx_module_is_differentiated_and_gets_its_state_back",
        ),
    ),
    Fault(
        "the noise of a loss ignores its batch",
        "dynamiq_jax/_api/transposed.py",
        "step_key if salt is None else jax.random.fold_in(step_key, salt.value)",
        "step_key",
        ("tests/test_data_parallel.py::test_noise_follows_parameters_and_batch",),
    ),
    Fault(
        "frozen leaves are sent",
        "dynamiq_jax/_api/transposed.py",
        "if flag and not _is_zero(leaf)",
        "if not _is_zero(leaf)",
        ("tests/test_transposed.py::test_nothing_is_sent_for_leaves_that_are_frozen_or_unused",),
    ),
    Fault(
        "counts of workers are weighted as integers",
        "dynamiq_jax/_api/worker_loss.py",
        "value = value.astype(jnp.float32)",
        "pass",
        ("tests/test_data_parallel.py::test_workers_are_weighted_by_their_targets",),
    ),
    Fault(
        "arguments behind a gap stay named",
        "dynamiq_jax/_api/arguments.py",
        "bound.apply_defaults()",
        "pass",
        ("tests/test_data_parallel.py::test_workers_are_weighted_by_their_targets",),
    ),
    Fault(
        "all layers of a module have the key of the first",
        "dynamiq_jax/_api/modules.py",
        "(keys.reshape(-1))",
        "(jnp.broadcast_to(keys.reshape(-1)[:1], (keys.size,)))",
        (
            "tests/test_data_parallel.py::test_modules_may_have_stacked_keys_and_metadata_of_any_kind",
        ),
    ),
    Fault(
        "unreduced terms are averaged",
        "dynamiq_jax/_api/collectives.py",
        "if is_unreduced(tree):",
        "if False:",
        ("tests/test_unreduced.py::test_a_mean_of_terms_is_refused",),
    ),
    Fault(
        "an axis of vmap that the mesh manages is taken",
        "dynamiq_jax/_buckets/checks.py",
        "if name in managed_axes(jax.sharding.get_abstract_mesh()):",
        "if False:",
        ("tests/test_errors.py::test_an_axis_of_vmap_that_the_mesh_has_too",),
    ),
    Fault(
        "statistics of a module are those of one worker",
        "dynamiq_jax/_api/modules.py",
        "return lax.pmean(after, axis_names)",
        "return lax.pmax(after, axis_names)",
        (
            "tests/test_value_and_grad.py::test_statistics_of_an_nnx_module_are_those_of_the_whole_batch",
        ),
    ),
    Fault(
        "a key of parameters sees their sum alone",
        "dynamiq_jax/_buckets/fingerprint.py",
        "jnp.sum(mix(bits ^ mix(places + mix(salt))), dtype=jnp.uint32)",
        "jnp.sum(bits >> 8, dtype=jnp.uint32)",
        ("tests/test_transposed.py::test_without_a_key_the_noise_follows_the_parameters",),
    ),
    Fault(
        "the transpose of a cast is not a mean",
        "dynamiq_jax/_api/transposed.py",
        "AllReduce(find_axes(axis_name), mean=mean)",
        "AllReduce(find_axes(axis_name))",
        (
            "tests/test_transposed.py::test_gradients_of_a_scan_over_layers_are_the_mean_of_the_batch",
        ),
    ),
    Fault(
        "the gradient of an invarying gather passes unnoticed",
        "dynamiq_jax/_api/collectives.py",
        'if tracked and to == "invarying":',
        "if False:",
        ("tests/test_transposed.py::test_an_invarying_gather_is_not_differentiated",),
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
        "driver.first_states(_mean(axis_name), params, how, specs=specs)",
        "driver.first_states(_mean(axis_name), params, resolve(method, topology, Options()))",
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
        "AllReduceState(state.step + 1, states, metrics)",
        "AllReduceState(state.step + 1, states, state.metrics)",
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
        "dynamiq_jax/_buckets/exact.py",
        "1 if leaf.dtype == bool else max(leaf.dtype.itemsize, 4)",
        "max(leaf.dtype.itemsize, 4)",
        ("tests/test_wire_report.py::test_the_report_knows_the_bytes_of_every_exact_dtype",),
    ),
)
