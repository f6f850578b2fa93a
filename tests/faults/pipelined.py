"""Faults of pipelined steps."""

from tests.faults import Fault

STEP, HALVES = "dynamiq_jax/training/_pipelined.py", "dynamiq_jax/_buckets/halves.py"
FILE = "tests/test_pipelined.py"
ORDINARY = f"{FILE}::test_it_is_ordinary_training_with_exact_means"
FIRST = f"{FILE}::test_nothing_happens_in_the_first_step_before_there_is_a_gradient"
NOISE = f"{FILE}::test_every_step_has_noise_of_its_own_in_both_halves"
LAWS, DEALING = "tests/test_halves.py", "dynamiq_jax/_buckets/dealing.py"
INVERSE = f"{LAWS}::test_collecting_inverts_dealing"
PERIODS = f"{LAWS}::test_every_piece_gets_its_share_of_rows_with_any_period"
ORDER = f"{FILE}::test_an_update_waits_for_its_own_bucket_and_those_before_it"

FAULTS = (
    Fault(
        "the first step applies gradients that are not there",
        STEP,
        "return jnp.where(state.is_pending, after, before)",
        "return after",
        (FIRST,),
    ),
    Fault(
        "every step gathers with the same key",
        STEP,
        "mapped(shards, exact, self._key(state.step - 1))",
        "mapped(shards, exact, self._key(0 * state.step))",
        (NOISE,),
    ),
    Fault(
        "every step scatters with the same key",
        STEP,
        "return jax.random.fold_in(jax.random.key(self.seed), step)",
        "return jax.random.fold_in(jax.random.key(self.seed), 0 * step)",
        (NOISE,),
    ),
    Fault(
        "steps are not counted",
        STEP,
        "step=updated.step + 1,",
        "step=updated.step,",
        (FIRST,),
    ),
    Fault(
        "gradients are scaled up to the limit too",
        STEP,
        "jnp.where(norm < limit, np.float32(1), limit / norm)",
        "limit / norm",
        (f"{FILE}::test_small_gradients_are_not_scaled_up",),
    ),
    Fault(
        "the norm is that of one worker's shards",
        STEP,
        "add(own, (*layout.operation.axes.names, *bucket.split_over))",
        "add(own, bucket.split_over)",
        (ORDINARY,),
    ),
    Fault(
        "the norm of a sharded model is that of one shard",
        STEP,
        "add(own, (*layout.operation.axes.names, *bucket.split_over))",
        "add(own, layout.operation.axes.names)",
        (f"{FILE}::test_shards_of_a_model_travel_alone",),
    ),
    Fault(
        "exact leaves are in no norm",
        STEP,
        "add(mean, layout.split_over[index])",
        "add(0 * mean, layout.split_over[index])",
        (ORDINARY,),
    ),
    Fault(
        "padding is part of a shard",
        HALVES,
        "jnp.where(is_padding, 0, mean), carried",
        "mean, carried",
        (f"{FILE}::test_noise_of_padding_is_in_no_norm",),
    ),
    Fault(
        "shards are sums, not means",
        HALVES,
        "scattered.values * np.float32(1 / self.divisor)",
        "scattered.values",
        (ORDINARY,),
    ),
    Fault(
        "the last buckets are gathered first",
        HALVES,
        "    last_first: ClassVar[bool] = False\n",
        "    last_first: ClassVar[bool] = True\n",
        (ORDER,),
    ),
    Fault(
        "gathers do not wait for each other",
        HALVES,
        "payload = jax.tree.map(functools.partial(after, token), payload)",
        "payload = jax.tree.map(functools.partial(after, None), payload)",
        (ORDER,),
    ),
    Fault(
        "gradients that are pending may be lost",
        STEP,
        "if not isinstance(updated, PipelinedUpdate):",
        "if False:",
        (f"{FILE}::test_halves_in_another_order_are_refused",),
    ),
    Fault(
        "shards are consecutive rows",
        DEALING,
        "return jnp.arange(self.rows, dtype=jnp.int32)[None, :] * self.pieces + place",
        "return (place + self._shifts()[None, :]) % self.pieces * self.rows + "
        "jnp.arange(self.rows, dtype=jnp.int32)[None, :]",
        (INVERSE,),
    ),
    Fault(
        "all groups of rows have the same shift",
        DEALING,
        "return ((order + (bits >> np.uint32(8))) % np.uint32(self.pieces)).astype(jnp.int32)",
        "return 0 * order.astype(jnp.int32)",
        (PERIODS,),
    ),
    Fault(
        "shifts of consecutive groups only count up",
        DEALING,
        "bits = mix(block + np.uint32(1))",
        "bits = 0 * block",
        (PERIODS,),
    ),
    Fault(
        "rows are collected with the wrong sign of the shift",
        DEALING,
        "(place[None, :] + shifts[:, None])",
        "(place[None, :] - shifts[:, None])",
        (INVERSE,),
    ),
    Fault(
        "places are those of rows, not of coordinates",
        DEALING,
        "self._rows_of(piece).reshape(-1, 1) * self.granule",
        "self._rows_of(piece).reshape(-1, 1)",
        (INVERSE,),
    ),
    Fault(
        "padding is where consecutive shards would have it",
        HALVES,
        "worker = axes.part_index * axes.slow.size + axes.slow.index",
        "worker = axes.slow.index * axes.num_fast + axes.part_index",
        (f"{LAWS}::test_three_axes",),
    ),
    Fault(
        "shards of fast axes are not dealt",
        HALVES,
        "pieces = axes.num_fast * bucket.call.num_chunks",
        "pieces = bucket.call.num_chunks",
        (f"{LAWS}::test_three_axes",),
    ),
    Fault(
        "the second half has noise of its own",
        "dynamiq_jax/methods/_dynamiq.py",
        'if self.rounding != "correlated" or',
        'if self.rounding == "correlated" or',
        (f"{LAWS}::test_errors_of_the_halves_cancel",),
    ),
    Fault(
        "the second half repeats the noise of the first turn",
        HALVES,
        "codec.compress(axes.slow.index, axes.slow.size - 1)",
        "codec.compress(axes.slow.index, 0)",
        (f"{LAWS}::test_errors_of_the_halves_cancel",),
    ),
    Fault(
        "a worker carries the norms of the first chunk",
        "dynamiq_jax/methods/_dynamiq.py",
        "codec.row_norms, call.axis.index * size, size)",
        "codec.row_norms, 0 * call.axis.index, size)",
        (f"{LAWS}::test_errors_of_the_halves_cancel",),
    ),
    Fault(
        "what the method carries is in the norm",
        STEP,
        "own = shard[: halves.shard_size(bucket)]",
        "own = shard",
        (f"{LAWS}::test_three_axes",),
    ),
)
