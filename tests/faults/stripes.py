"""Faults of striped buckets."""

from tests.faults import Fault

_STRIPES = "dynamiq_jax/_buckets/stripes.py"
_PLAN = "dynamiq_jax/_buckets/plan.py"
_LOOP = "dynamiq_jax/_buckets/loop.py"
_TESTS = "tests/test_stripes.py"

FAULTS = (
    Fault(
        "what is left of leaves is cut off",
        _STRIPES,
        "return -(-self._rest // self._turn)",
        "return self._rest // self._turn",
        (f"{_TESTS}::test_every_coordinate_is_in_one_stripe",),
    ),
    Fault(
        "stripes are consecutive parts of leaves",
        _STRIPES,
        "part.reshape(len(part), -1, self.count, ROW) for part",
        "part.reshape(len(part), self.count, -1, ROW).swapaxes(1, 2) for part",
        (f"{_TESTS}::test_every_coordinate_is_in_one_stripe",),
    ),
    Fault(
        "parts of the rest come back to the first leaf",
        _STRIPES,
        "                start += left\n",
        "",
        (f"{_TESTS}::test_every_coordinate_is_in_one_stripe",),
    ),
    Fault(
        "a stripe is put where the next one belongs",
        _STRIPES,
        "update_index_in_dim(part, rows, number, 2)",
        "update_index_in_dim(part, rows, (number + 1) % self.count, 2)",
        (f"{_TESTS}::test_every_coordinate_is_in_one_stripe",),
    ),
    Fault(
        "the number of stripes divides the rows of 256 in a row of a matrix",
        _STRIPES,
        "    return min(range(fewest, fewest + _TRIED), key=coordinates_in_step)",
        "    return fewest",
        (f"{_TESTS}::test_no_stripe_has_the_same_columns_of_all_rows",),
    ),
    Fault(
        "the number of stripes is that of the last leaf alone",
        _STRIPES,
        "            for shape in shapes\n            if",
        "            for shape in shapes[-1:]\n            if",
        (f"{_TESTS}::test_no_stripe_has_the_same_columns_of_all_rows",),
    ),
    Fault(
        "buckets are striped on every topology",
        _PLAN,
        'if striped and (cuts.into == "striped" or striped[0].call.topology.is_loop):',
        "if striped:",
        (f"{_TESTS}::test_buckets_are_striped_where_nothing_runs_under_a_loop",),
    ),
    Fault(
        "a ring without a loop counts as one",
        "dynamiq_jax/topologies/_ring.py",
        "return not self.unroll",
        "return True",
        (f"{_TESTS}::test_buckets_are_striped_where_nothing_runs_under_a_loop",),
    ),
    Fault(
        "a choice of the user has no effect",
        _PLAN,
        'if cuts.into == "in_order" else kind.striped',
        "if False else kind.striped",
        (f"{_TESTS}::test_buckets_are_striped_where_nothing_runs_under_a_loop",),
    ),
    Fault(
        "changes of local SGD are sent in order",
        "dynamiq_jax/training/_local_sgd.py",
        'dataclasses.replace(options, bucketing="striped")',
        "options",
        (f"{_TESTS}::test_changes_of_local_sgd_are_striped_on_every_topology",),
    ),
    Fault(
        "methods that use shapes get stripes",
        _PLAN,
        "        if self.method.uses_shapes:\n            return ()\n",
        "",
        (f"{_TESTS}::test_methods_that_use_shapes_take_leaves_as_they_are",),
    ),
    Fault(
        "buckets are larger than asked for",
        _PLAN,
        "fewest = -(-sum(sizes) // max(limit, _LEAST_PART))",
        "fewest = max(1, sum(sizes) // max(limit, _LEAST_PART))",
        (f"{_TESTS}::test_buckets_are_alike_and_hardly_larger_than_asked_for",),
    ),
    Fault(
        "all stripes have the same noise",
        _LOOP,
        "flat = after(token, self._join(first, [stripe]))\n"
        "            sent = self._send_one(first, flat, number, state)",
        "flat = after(token, self._join(first, [stripe]))\n"
        "            sent = self._send_one(first, flat, numbers[0], state)",
        (f"{_TESTS}::test_stripes_have_rounding_noise_of_their_own",),
    ),
    Fault(
        "results need memory of their own",
        _LOOP,
        "start = dealt if in_place else",
        "start = jax.tree.map(jnp.zeros_like, dealt) if in_place else",
        (f"{_TESTS}::test_stripes_share_one_codec_and_no_memory_is_needed_for_values_and_results",),
    ),
    Fault(
        "a mean of stripes has the type of a value that varies",
        _LOOP,
        "            results = compat.same_over(results, axis)\n",
        "            pass\n",
        (f"{_TESTS}::test_a_mean_has_the_type_of_a_replicated_value",),
    ),
    Fault(
        "each stripe compiles a codec",
        _PLAN,
        "leaves=(), part=None, stripe=None)",
        "leaves=(), part=None)",
        (f"{_TESTS}::test_buckets_are_alike_and_hardly_larger_than_asked_for",),
    ),
    Fault(
        "coordinates of padding are reported as compressed",
        "dynamiq_jax/_api/report.py",
        "compressed_size = sum(sizes[index] for index in in_buckets)",
        "compressed_size = sum(bucket.size for bucket in plan.buckets)",
        (f"{_TESTS}::test_bytes_of_the_program_are_those_of_the_report",),
    ),
    Fault(
        "buckets that are alike are traced again and again",
        _LOOP,
        "return jax.jit(self._send_flat, static_argnums=0)",
        "return self._send_flat",
        ("tests/test_buckets.py::test_buckets_that_are_alike_are_traced_once",),
    ),
)
