"""Faults of the collectives, the buckets, the topologies and the cost model."""

from tests.faults import Fault

_DRIVER = "dynamiq_jax/_buckets/driver.py"
_OPERATIONS = "dynamiq_jax/_buckets/operations.py"
_EXACT = "dynamiq_jax/_buckets/exact.py"
_PLAN = "dynamiq_jax/_buckets/plan.py"
_AXES = "dynamiq_jax/_buckets/axes.py"
_REPORT = "dynamiq_jax/_api/report.py"
_OPTIMIZER = "dynamiq_jax/_api/optimizer.py"
_AUTODIFF = "dynamiq_jax/_api/autodiff.py"
_AXIS = "dynamiq_jax/_core/axis.py"
_TOPOLOGY = "dynamiq_jax/topologies/_base.py"
_AUTO = "dynamiq_jax/topologies/_auto.py"
_COST = "dynamiq_jax/topologies/_cost_model.py"

_BUCKETS = ("tests/test_buckets.py",)
_PREDICTED = ("tests/test_cost_model.py",)

FAULTS = (
    # ------------------------------------------------------------------------------- driver
    Fault(
        "leaves of a bucket are joined in reversed order",
        "dynamiq_jax/_buckets/leaves.py",
        "rows = jnp.concatenate(leaves, axis=1)",
        "rows = jnp.concatenate(leaves[::-1], axis=1)",
        _BUCKETS,
    ),
    Fault(
        "rows of a bucket are padded in front",
        "dynamiq_jax/_buckets/leaves.py",
        "jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % multiple)))",
        "jnp.pad(rows, ((0, 0), (-rows.shape[1] % multiple, 0)))",
        _BUCKETS,
    ),
    Fault(
        "a mask compresses the leaves that it is to keep",
        "dynamiq_jax/_buckets/leaves.py",
        "return [bool(flag) for flag in flags]",
        "return [not flag for flag in flags]",
        ("tests/test_collectives.py::test_masked_leaves_are_exact_and_change_nothing_else",),
    ),
    Fault(
        "all buckets have the same noise",
        _DRIVER,
        "bucket_key = jax.random.fold_in(key, number)",
        "bucket_key = key",
        _BUCKETS,
    ),
    Fault(
        "leaves that vary over other axes share a bucket",
        _DRIVER,
        "kinds = [compat.varying_axes(leaf) - own for leaf in leaves]",
        "kinds = [own for _ in leaves]",
        (
            "tests/test_collectives.py::test_leaves_that_differ_along_another_axis_keep_to_themselves",
        ),
    ),
    Fault(
        "the first leaves go first in every collective",
        _DRIVER,
        "for number in reversed(numbers) if operation.last_first else numbers:",
        "for number in numbers:",
        _BUCKETS,
    ),
    Fault(
        "the last parts go first in a gather",
        _OPERATIONS,
        "last_first: ClassVar[bool] = False",
        "last_first: ClassVar[bool] = True",
        _BUCKETS,
    ),
    Fault(
        "buckets do not wait for each other",
        _DRIVER,
        "after(token, flat), bucket_key",
        "flat, bucket_key",
        _BUCKETS,
    ),
    Fault(
        "the compiler sees that the wait is a comparison which is always true",
        _DRIVER,
        "(bits & 255) >> 8 == 0",
        "bits >= 0",
        _BUCKETS,
    ),
    Fault(
        "a bucket waits for another that differs along an axis along which it does not",
        _DRIVER,
        "if token is None or not compat.varying_axes(token) <= compat.varying_axes(flat):",
        "if token is None:",
        (
            "tests/test_collectives.py::test_leaves_that_differ_along_another_axis_keep_to_themselves",
        ),
    ),
    Fault(
        "metrics are not weighted by the sizes of the buckets",
        _DRIVER,
        "totals[name] + value * np.float32(bucket.size)",
        "totals[name] + value * np.float32(2048)",
        ("tests/test_optimizer.py::test_metrics_are_means_over_buckets_by_their_coordinates",),
    ),
    Fault(
        "the state of one bucket is kept for another",
        _DRIVER,
        "token, after_step[number] = sent.token, sent.state",
        "token, after_step[len(numbers) - 1 - number] = sent.token, sent.state",
        ("tests/test_optimizer.py::test_a_state_covers_the_buckets_that_the_options_make",),
    ),
    Fault(
        "states of other buckets are not refused",
        _DRIVER,
        "if shapes[0] != shapes[1]:",
        "if len(shapes[0]) < 0:",
        ("tests/test_errors.py::test_a_state_of_other_buckets",),
    ),
    Fault(
        "a gradient passes through the rounding",
        "dynamiq_jax/_buckets/no_gradient.py",
        "return lax.squeeze(_refusing(lax.expand_dims(flat, (0,))), (0,))",
        "return flat",
        ("tests/test_collectives.py::test_a_gradient_through_it_is_refused",),
    ),
    # --------------------------------------------------------------------------- operations
    Fault(
        "a sum is cast to its dtype before it becomes a mean",
        _OPERATIONS,
        "reduced.total * np.float32(1 / self._divisor) if self.mean",
        "reduced.total.astype(bucket.dtype) / np.array(self._divisor, bucket.dtype) if self.mean",
        ("tests/test_collectives.py::test_a_mean_that_fits_comes_from_a_sum_that_does_not",),
    ),
    Fault(
        "results of half precision are gathered over fast axes in float32",
        _OPERATIONS,
        "axes.gather(total.astype(bucket.dtype), bucket.size)",
        "axes.gather(total, bucket.size)",
        ("tests/test_hierarchical.py::test_the_report_is_the_compiled_program",),
    ),
    Fault(
        "a bucket does not wait for the gathers over fast axes",
        _OPERATIONS,
        "return Sent(total, total, reduced.state, metrics)",
        "return Sent(total, reduced.token, reduced.state, metrics)",
        ("tests/test_hierarchical.py::test_a_bucket_waits_until_those_before_it_are_whole",),
    ),
    Fault(
        "metrics are those of the first part",
        _OPERATIONS,
        "{name: lax.pmean(m, axes.names[1:]) for name, m in reduced.metrics.items()}",
        "reduced.metrics",
        ("tests/test_hierarchical.py::test_metrics_are_means_over_the_parts",),
    ),
    Fault(
        "another dimension is scattered",
        _OPERATIONS,
        "jnp.moveaxis(leaf, self.dimension, 0).reshape(self.axes.num_workers, -1)",
        "leaf.reshape(self.axes.num_workers, -1)",
        ("tests/test_sharded.py::test_shapes_and_dtypes_are_those_of_lax",),
    ),
    Fault(
        "padding does not count the chunks of a worker",
        _OPERATIONS,
        "return granule * bucket.call.topology.chunks_per_worker",
        "return granule",
        ("tests/test_sharded.py::test_parts_of_the_sum_are_close_and_not_exact",),
    ),
    Fault(
        "both halves have the same noise",
        _OPERATIONS,
        "salt: ClassVar[int | None] = 0x67617468",
        "salt: ClassVar[int | None] = None",
        ("tests/test_sharded.py::test_both_halves_may_have_one_key",),
    ),
    Fault(
        "parts are gathered along a new dimension before the right one",
        _OPERATIONS,
        "return jnp.moveaxis(parts, 0, self._dimension(leaf)).reshape(self.shape(leaf))",
        "return parts.reshape(self.shape(leaf))",
        (
            "tests/test_sharded.py::test_a_gather_has_the_shapes_of_lax_and_the_same_bits_everywhere",
        ),
    ),
    # -------------------------------------------------------------------------- exact leaves
    Fault(
        "small integers are summed in their own dtype",
        _EXACT,
        "leaf.astype(jnp.int32) if integral and leaf.dtype.itemsize < 4 else leaf",
        "leaf",
        ("tests/test_collectives.py::test_leaves_that_are_not_compressed_are_exact",),
    ),
    Fault(
        "exact leaves that vary over other axes share a message",
        _EXACT,
        "floats.setdefault(varying_axes(leaf), {})[index] = leaf",
        "floats.setdefault(frozenset(), {})[index] = leaf",
        (
            "tests/test_collectives.py::test_leaves_that_differ_along_another_axis_keep_to_themselves",
        ),
    ),
    Fault(
        "a boolean is True where all workers have True",
        _EXACT,
        "lax.pmax(leaf.astype(jnp.uint8), axes.names)",
        "lax.pmin(leaf.astype(jnp.uint8), axes.names)",
        ("tests/test_collectives.py::test_leaves_that_are_not_compressed_are_exact",),
    ),
    Fault(
        "exact parts of half precision add up in half precision",
        _EXACT,
        "jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4:",
        "jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 2:",
        ("tests/test_sharded.py::test_exact_parts_follow_the_rules_of_the_exact_sum",),
    ),
    # ---------------------------------------------------------------------------------- plan
    Fault(
        "a leaf of exactly exact_below elements is exact",
        _PLAN,
        "elif size < max(how.options.exact_below, 1):",
        "elif size <= max(how.options.exact_below, 1):",
        ("tests/test_collectives.py::test_exact_below_moves_the_line",),
    ),
    Fault(
        "a leaf that fills a bucket goes into the next one",
        _PLAN,
        "if size > room or not lists:",
        "if size >= room or not lists:",
        _BUCKETS,
    ),
    Fault(
        "buckets are cut by coordinates instead of bytes",
        _PLAN,
        "_cut(members, how.options.bucket_bytes // dtype.itemsize)",
        "_cut(members, how.options.bucket_bytes)",
        _BUCKETS,
    ),
    Fault(
        "leaves that are too small to save bytes are compressed",
        _PLAN,
        "if topology.bytes_sent(cost, num_workers) > topology.bytes_sent(exact, num_workers):",
        "if num_workers < 0:",
        ("tests/test_wire_report.py::test_every_exact_leaf_is_listed_with_its_reason",),
    ),
    # ----------------------------------------------------------------------------- fast axes
    Fault(
        "parts of a bucket have the same noise",
        _AXES,
        "key = jax.random.fold_in(key, axis.index)",
        "key = key",
        ("tests/test_hierarchical.py::test_parts_have_rounding_noise_of_their_own",),
    ),
    Fault(
        "parts are scattered over the fast axes in the order in which they are gathered",
        _AXES,
        "for axis in reversed(self.fast):\n            part = lax.psum_scatter",
        "for axis in self.fast:\n            part = lax.psum_scatter",
        ("tests/test_hierarchical.py::test_three_axes",),
    ),
    Fault(
        "parts cut super-groups in two",
        _AXES,
        "return -(-size // (self.num_fast * granule)) * granule",
        "return -(-size // self.num_fast)",
        ("tests/test_hierarchical.py::test_values_that_are_not_finite_stay_in_their_super_group",),
    ),
    Fault(
        "a key is checked on the first axis only",
        "dynamiq_jax/_buckets/checks.py",
        "for axis_name in axis_names:\n        if axis_name in compat.varying_axes(key):",
        "for axis_name in axis_names[:1]:\n        if axis_name in compat.varying_axes(key):",
        ("tests/test_hierarchical.py::test_a_key_that_differs_along_any_axis_is_refused",),
    ),
    # ------------------------------------------------------------------------------- report
    Fault(
        "the gather over fast axes counts as float32",
        _REPORT,
        "item_bytes = 4 + bucket.dtype.itemsize",
        "item_bytes = 4 + 4",
        ("tests/test_hierarchical.py::test_the_report_is_the_compiled_program",),
    ),
    Fault(
        "bytes of several fast axes are counted in the wrong order",
        _REPORT,
        "for axis in reversed(axes.fast):\n        size //= axis.size\n"
        "        total += (axis.size - 1) * size * item_bytes",
        "for axis in axes.fast:\n        size //= axis.size\n"
        "        total += (axis.size - 1) * size * item_bytes",
        ("tests/test_hierarchical.py::test_three_axes",),
    ),
    Fault(
        "booleans count as four bytes",
        _REPORT,
        "1 if leaf.dtype == bool else max(leaf.dtype.itemsize, 4)",
        "max(leaf.dtype.itemsize, 4)",
        ("tests/test_wire_report.py::test_the_report_knows_the_bytes_of_every_exact_dtype",),
    ),
    # ------------------------------------------------------------------ other public functions
    Fault(
        "options are ignored in the first state",
        _OPTIMIZER,
        "driver.first_states(operation, params, how)",
        "driver.first_states(operation, params, resolve(method, topology, Options()))",
        ("tests/test_optimizer.py::test_a_state_covers_the_buckets_that_the_options_make",),
    ),
    Fault(
        "every step has the same noise",
        _OPTIMIZER,
        "jax.random.fold_in(jax.random.key(seed), state.step)",
        "jax.random.fold_in(jax.random.key(seed), start_step)",
        (
            "tests/test_optimizer.py::test_every_step_has_its_own_noise_and_the_seed_fixes_all_of_it",
        ),
    ),
    Fault(
        "metrics of a step are dropped",
        _OPTIMIZER,
        "AllReduceState(state.step + 1, after, outcome.metrics)",
        "AllReduceState(state.step + 1, after, state.metrics)",
        ("tests/test_optimizer.py::test_metrics_are_means_over_buckets_by_their_coordinates",),
    ),
    Fault(
        "value_and_grad ignores the options",
        _AUTODIFF,
        "topology=how.topology, options=how.options",
        "topology=how.topology, options=Options()",
        (
            "tests/test_value_and_grad.py::test_options_say_which_gradients_are_exact_and_how_large_buckets_are",
        ),
    ),
    Fault(
        "the loss is summed over the workers",
        _AUTODIFF,
        "lambda leaf: lax.pmean(leaf, names), value",
        "lambda leaf: lax.psum(leaf, names), value",
        ("tests/test_value_and_grad.py::test_with_compression_only_the_gradients_differ",),
    ),
    Fault(
        "replicated arguments are counted from zero",
        _AUTODIFF,
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
    # --------------------------------------------------------------------------------- axis
    Fault(
        "owners combine their own shares",
        _AXIS,
        "return self.gather(combine(self.exchange(shares)))",
        "return self.gather(combine(shares))",
        ("tests/test_topologies.py::test_numbers_that_owners_combine_are_the_same_everywhere",),
    ),
    Fault(
        "owners count bytes that they send to themselves",
        _AXIS,
        "return (self.size - 1) * (share + combined)",
        "return self.size * (share + combined)",
        ("tests/test_topologies.py::test_the_bytes_of_owners_are_those_of_the_program",),
    ),
    Fault(
        "a shift goes the other way",
        _AXIS,
        "to = [(source, (source + step) % self.size) for source in range(self.size)]",
        "to = [(source, (source - step) % self.size) for source in range(self.size)]",
        ("tests/test_topologies.py::test_an_axis_shifts_swaps_and_gathers",),
    ),
    # --------------------------------------------------------------------------- topologies
    Fault(
        "a bucket waits until the one before it is decoded",
        _TOPOLOGY,
        "return Scattered(values, _token_of([a.messages for a in arrivals]))",
        "return Scattered(values, values[:1])",
        _BUCKETS,
    ),
    Fault(
        "the token of a gather is there before the payloads",
        _TOPOLOGY,
        "return _token_of(self.payloads)",
        "return jnp.zeros(1)",
        _BUCKETS,
    ),
    Fault(
        "a report counts one pass",
        _TOPOLOGY,
        "cost.statistics_bytes + 2 * self.payloads_scattered(num_workers)",
        "cost.statistics_bytes + self.payloads_scattered(num_workers)",
        ("tests/test_wire_report.py::test_the_bits_are_those_asked_for",),
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
        "lax.fori_loop(1, forward.axis.size - 1, step, carry",
        "lax.fori_loop(2, forward.axis.size - 1, step, carry",
        (
            "tests/test_topologies.py::test_every_chunk_holds_every_worker_once_and_every_turn_is_taken_once",
        ),
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
    # --------------------------------------------------------------------------- cost model
    Fault(
        "the efficiency of a link is ignored",
        _COST,
        "rate = self.gbit_per_s * 1e9 / 8 * self.efficiency",
        "rate = self.gbit_per_s * 1e9 / 8",
        _PREDICTED,
    ),
    Fault(
        "latencies count ten times",
        _COST,
        "steps * self.latency_us * 1e-6",
        "steps * self.latency_us * 1e-5",
        _PREDICTED,
    ),
    Fault(
        "statistics take no steps",
        _COST,
        "1 + _library_steps(num_workers) if cost.statistics_bytes else 0",
        "0",
        _PREDICTED,
    ),
    Fault(
        "a crowded network slows the gather too",
        _COST,
        "wire=network.seconds(scattered * far + gathered, transfers)",
        "wire=network.seconds((scattered + gathered) * far, transfers)",
        _PREDICTED,
    ),
    Fault(
        "an exact sum takes half of its steps",
        _COST,
        "steps = 2 * _library_steps(num_workers)",
        "steps = _library_steps(num_workers)",
        _PREDICTED,
    ),
    Fault(
        "the speed of the codec that a user gives is ignored",
        _AUTO,
        "self.codec or CODEC_SPEEDS[platform]",
        "CODEC_SPEEDS[platform]",
        _PREDICTED,
    ),
    Fault(
        "every device has the speed of a GPU",
        _AUTO,
        'platform = "cpu" if jax.default_backend() == "cpu" else "gpu"',
        'platform = "gpu"',
        _PREDICTED,
    ),
    Fault(
        "a topology is chosen that does not support the axis",
        _AUTO,
        "(c for c in candidates if c.supports(num_workers))",
        "candidates",
        _PREDICTED,
    ),
    Fault(
        "the energy that workers have in common grows with their number only",
        "dynamiq_jax/_workshop/error_law.py",
        "agreement * workers**2",
        "agreement * workers",
        _PREDICTED,
    ),
)
