"""Faults of bits by measured gradients, and of the metrics that show wasted bits."""

from tests.faults import Fault

BUDGET = "dynamiq_jax/_api/shared_budget.py"
CURVE = "dynamiq_jax/_api/error_curve.py"
GROUPS = "dynamiq_jax/_api/bit_groups.py"
ALLOCATION = "dynamiq_jax/_api/bit_allocation.py"
SHARING = "dynamiq_jax/_buckets/sharing.py"
FINDINGS = "dynamiq_jax/_inspection/findings.py"
TESTS = "tests/test_allocate_bits.py::test_"

FAULTS = (
    Fault(
        "pieces of a budget go by what they save, whatever they cost",
        BUDGET,
        "key=lambda piece: -piece.saved / piece.bytes)",
        "key=lambda piece: -piece.saved)",
        (f"{TESTS}the_cost_of_a_piece_counts",),
    ),
    Fault(
        "steps of large norms count more",
        BUDGET,
        "getattr(step[n], field) / s for",
        "getattr(step[n], field) * s / s for",
        (f"{TESTS}steps_count_alike_whatever_their_norms",),
    ),
    Fault(
        "what is left of a budget is not spent",
        BUDGET,
        "bits[piece.group] = self._part(piece, left)\n",
        "pass\n",
        (f"{TESTS}what_is_left_of_a_budget_is_spent",),
    ),
    Fault(
        "rows of zeros take bits before others",
        CURVE,
        "rows += zeros * (thresholds <= -needed[-1])",
        "rows += zeros",
        (f"{TESTS}the_expected_error_is_that_of_the_widths_that_the_codec_takes",),
    ),
    Fault(
        "the exponent of a method does not count",
        CURVE,
        "for values in (squares, squares**power)",
        "for values in (squares, squares)",
        (f"{TESTS}the_expected_error_is_that_of_the_widths_that_the_codec_takes",),
    ),
    Fault(
        "rows may have no bits whatever the widths are",
        CURVE,
        "thresholds[:, 0] = np.minimum(thresholds[:, 0], 1)",
        "pass",
        (f"{TESTS}the_expected_error_is_that_of_the_widths_that_the_codec_takes",),
    ),
    Fault(
        "parts of a leaf that is cut have bits of their own",
        GROUPS,
        "together.setdefault(bucket.leaves, []).append(bucket)",
        "together.setdefault((bucket.leaves, bucket.part), []).append(bucket)",
        (f"{TESTS}leaves_of_one_bucket_share_bits_and_so_do_parts_of_a_leaf",),
    ),
    Fault(
        "bytes of layers count once",
        GROUPS,
        "        return self.scope.repeats * sent\n",
        "        return sent\n",
        (f"{TESTS}layers_of_a_scan_share_bits_and_bytes",),
    ),
    Fault(
        "a policy may send more bytes",
        ALLOCATION,
        "if sent <= most and sum(",
        "if sum(",
        (f"{TESTS}leaves_that_join_a_bucket_do_not_send_more",),
    ),
    Fault(
        "exact leaves of a policy are compressed",
        ALLOCATION,
        "        if not isinstance(scope.methods[n], DynamiQ)\n",
        "        if False\n",
        (f"{TESTS}other_fields_and_other_methods_of_a_policy_stay",),
    ),
    Fault(
        "buckets give more bits than they have",
        SHARING,
        "after = jnp.minimum(last, level)",
        "after = jnp.minimum(jnp.inf, level)",
        ("tests/test_sharing.py",),
    ),
    Fault(
        "buckets that are sent exactly have bits to share",
        SHARING,
        "sizes = jnp.where(takes_part, rows, np.float32(0))",
        "sizes = rows",
        ("tests/test_sharing.py",),
    ),
    Fault(
        "a sound step wastes bits",
        FINDINGS,
        "not sharing.gain >= _WASTED",
        "not sharing.gain >= 0",
        ("tests/test_inspect.py::test_bits_that_a_bucket_wastes_show_in_metrics",),
    ),
)
