"""SplitSketch: large groups are remembered, others are found, and all workers agree.

`test_methods.py` has what every method owes, and `test_count_sketch.py` the sketch alone.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynamiq_jax as dq
from dynamiq_jax.methods import Call, ErrorFeedback
from dynamiq_research import SplitSketch
from dynamiq_research.split_sketch.count_sketch import CountSketch
from dynamiq_research.split_sketch.method import _heavy_hitters, threshold
from research.tests.support import resumed
from tests.support.gradients import of_workers, vnmse
from tests.support.workers import TWO_WIDTHS, call_on, simulated

NUM_WORKERS, GROUP, SIZE = 4, 16, 8192
KEY = jax.random.key(4)
EXACT = dq.methods.Exact()
# One half of 1024 numbers for 32 groups of 512, and 3 x 170 cells for the others.
METHOD = SplitSketch(bits=4.0, hot=0.5, inner=EXACT)
CALL = call_on(SIZE, NUM_WORKERS, "all_to_all", feedback=True)
ROOM = METHOD.split(CALL).room
MEMORY_ALONE = dataclasses.replace(METHOD, hot=1.0)


@functools.cache
def one_step(method: SplitSketch | ErrorFeedback, call: Call):
    """Return a function of the key, and of the gradient and state of each worker."""

    def local(key, gradient, state):
        reduced = method.all_reduce(gradient, call, key, state)
        return (reduced.total, reduced.metrics["kept"]), reduced.state, reduced.applied

    return simulated(local)


def run(method, gradients: np.ndarray, key=KEY, topology="all_to_all") -> "Run":
    """Run steps on gradients [n, steps, size]. All workers have to agree on all that is not theirs:
    on sums, metrics, and the state but for residuals.
    """
    num_workers, count, size = gradients.shape
    call = call_on(size, num_workers, topology, feedback=True)
    step, state = one_step(method, call), method.init_state(call)
    state = jax.tree.map(lambda leaf: np.tile(leaf, (num_workers, *[1] * leaf.ndim)), state)
    sums, kept, applied, memories = [], [], [], []
    for number, key_of_step in enumerate(jax.random.split(key, count)):
        out, state, used = step(key_of_step, gradients[:, number], state)
        replicated = getattr(state, "inner", state)
        for leaf in map(np.asarray, jax.tree.leaves((out, replicated))):
            assert {replica.tobytes() for replica in leaf} == {leaf[0].tobytes()}
        sums.append(np.asarray(out[0])[0])
        kept.append(np.asarray(out[1])[0])
        memories.append(np.asarray(replicated.memory)[0])
        applied.append(0 if used is None else np.asarray(used))
    return Run(*map(np.stack, (sums, kept, memories, applied)), state)


class Run(NamedTuple):
    """Results of steps, and the state of all workers after them."""

    sums: np.ndarray  # [steps, size]
    kept: np.ndarray  # [steps]
    memories: np.ndarray  # [steps, groups]
    applied: np.ndarray  # [steps, n, size]; zeros with error feedback
    state: Any


def share_out(seed: int, sums: np.ndarray) -> np.ndarray:
    """Return integers [n, *shape] that add up to integers."""
    parts = np.random.default_rng(seed).integers(-9, 9, (NUM_WORKERS, *sums.shape))
    parts = np.where(sums == 0, 0, parts)
    parts[0] += sums.astype(np.int64) - parts.sum(axis=0)
    return parts.astype(np.float32)


def spikes(places, size: int = SIZE, value: int = 1000) -> np.ndarray:
    """Return a vector that is zero but for some places."""
    result = np.zeros(size, np.float32)
    result[list(places)] = value
    return result


# ------------------------------------------------------------------------------ what is remembered


def test_every_group_is_measured_once_at_first_and_then_the_largest_are_sent():
    """Sums that stay: 512 groups and room for 64, so that 8 steps see all of them."""
    scales = np.repeat(np.random.default_rng(0).permutation(512) + 1, GROUP)
    gradients = share_out(0, np.tile(scales, (12, 1)))
    total, _, memory, applied, _ = run(MEMORY_ALONE, gradients)
    sent = (total.reshape(12, -1, GROUP) != 0).all(axis=2)
    room = MEMORY_ALONE.split(CALL).room
    assert room == 64 and (sent.sum(axis=1) == room).all()
    np.testing.assert_array_equal(sent[:8].sum(axis=0), 1)
    # Not the first groups, and not the last.
    assert 150 < np.flatnonzero(sent[0]).mean() < 360
    np.testing.assert_array_equal(total, np.where(np.repeat(sent, GROUP, axis=1), scales, 0))
    mine = gradients.swapaxes(0, 1)
    np.testing.assert_array_equal(
        applied, np.where(np.repeat(sent, GROUP, axis=1)[:, None], mine, 0)
    )
    expected = scales[::GROUP]
    np.testing.assert_allclose(memory[7], expected, rtol=0.3, atol=0.3 * expected.mean())
    assert (np.sort(expected[sent[8]]) > 512 - 1.3 * room).all()


def test_the_memory_of_a_group_is_a_moving_average():
    """Of a group that is always sent; one that shrinks leaves."""
    size = 4 * GROUP
    method = SplitSketch(bits=8.0, hot=1.0, inner=EXACT, decay=0.75, growth=0.0)
    assert method.split(CALL.of_size(size)).room == 1
    levels = np.array([[0, 3, 2, 1], *([[0, 3, 2, 1]] * 3), [8] * 4, [4] * 4, [4] * 4, [0] * 4])
    gradients = np.repeat(levels, GROUP, axis=1).astype(np.float32)[None].repeat(4, axis=0)
    memory = run(method, gradients).memories
    np.testing.assert_allclose(memory[3], (0, 12, 8, 4), atol=1e-30)
    ours = [32]  # measured anew: it was not sent in the step before
    for level in (16, 16, 0):
        ours.append(0.75 * ours[-1] + 0.25 * level)
    np.testing.assert_array_equal(memory[4:, 1], ours)
    np.testing.assert_allclose(memory[4:, 2], 8)


def test_groups_that_are_not_sent_are_measured_again():
    """Each within 1 / growth steps, though its sums are zero."""
    method = dataclasses.replace(MEMORY_ALONE, growth=0.05)
    sums = np.zeros((40, SIZE), np.float32)
    sums[:, : 16 * GROUP] = 1000
    sums[:, 16 * GROUP :] = np.arange(40)[:, None] == 39  # seen in the last step, if sent
    before = np.zeros_like(sums)
    before[:] = sums
    total = run(method, share_out(0, before)).sums
    assert (total[12:, : 16 * GROUP] == 1000).mean() > 0.95
    sums[9:, 16 * GROUP :] = 1
    total = run(method, share_out(1, sums)).sums
    seen = (total[9:].reshape(31, -1, GROUP) != 0).any(axis=(0, 2))
    assert seen.mean() > 0.95


def test_zeros_in_all_of_a_gradient_do_not_end_the_search():
    """After steps of zeros, something appears in the last groups: all are tried."""
    sums = np.zeros((40, SIZE), np.float32)
    sums[20:, -GROUP:] = 5
    total, _, memory, _, _ = run(MEMORY_ALONE, share_out(0, sums))
    assert np.isfinite(memory).all()
    assert (total[-5:, -GROUP:] == 5).all()
    assert not total[:, :-GROUP].any()


def test_the_support_follows_gradients_whose_support_moves():
    """20 spikes jump to other groups. The sketch finds them in the same step, and in the next step
    their groups are sent; without a sketch, most are missing for some steps.
    """
    places = np.random.default_rng(1).permutation(SIZE // GROUP)[:40] * GROUP + 5
    sums = np.stack([spikes(places[:20])] * 20 + [spikes(places[20:])] * 4)
    gradients = share_out(1, sums)
    total, kept, *_ = run(METHOD, gradients)
    errors = [vnmse(one, truth) for one, truth in zip(total, sums, strict=True)]
    assert errors[19] == 0 and kept[19] == 0
    assert kept[20] * SIZE >= 15
    assert errors[20] < 0.5 and max(errors[21:]) < 0.1
    alone = run(MEMORY_ALONE, gradients)[0]
    errors = [vnmse(one, truth) for one, truth in zip(alone, sums, strict=True)]
    assert errors[19] == 0 and min(errors[20:22]) > 0.5


# ------------------------------------------------------------------------------------ what is found

SKETCH_ALONE = SplitSketch(bits=8.0, hot=0.0, inner=EXACT)  # 3 x 682 cells of 12 coordinates


@pytest.mark.parametrize("count", (1, 10, 40))
def test_heavy_hitters_are_recovered_from_the_sketch(count):
    """Under noise of a hundredth of their magnitude, and nothing else."""
    rng = np.random.default_rng(count)
    places = rng.choice(SIZE, count, replace=False)
    noise = share_out(2, rng.integers(-10, 10, SIZE))
    gradients = (noise + share_out(3, spikes(places)))[:, None]
    truth = gradients[:, 0].sum(axis=0)
    total, kept, _, applied, _ = run(SKETCH_ALONE, gradients)
    found = np.flatnonzero(total[0])
    assert kept[0] == np.float32(found.size / SIZE)
    assert np.isin(places, found).mean() > 0.85
    assert np.isin(found, places).mean() > 0.95
    np.testing.assert_allclose(total[0, found], truth[found], rtol=0.15)
    # Each worker applies an equal part of what is kept.
    np.testing.assert_array_equal(applied[0], np.tile(total[0] / 4, (NUM_WORKERS, 1)))


def test_noise_alone_brings_in_little():
    """About 1/64 of its energy, of 96 coordinates that share a cell."""
    method = dataclasses.replace(SKETCH_ALONE, bits=1.0)
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((NUM_WORKERS, 20, SIZE)).astype(np.float32)
    total, kept, *_ = run(method, gradients)
    energy = np.sum(total.astype(np.float64) ** 2) / np.sum(gradients.sum(axis=0) ** 2)
    assert 0.5 / 64 < energy < 2 / 64
    assert 1e-5 < kept.mean() < 0.01


def test_the_threshold_grows_with_the_coordinates_that_share_a_cell():
    assert 1 <= threshold(3, 1) < 1.3
    assert 2.1 < threshold(3, 384) < threshold(3, 3000) < 2.5
    assert threshold(7, 384) < threshold(5, 384) < threshold(3, 384) < threshold(1, 384) < 5


def test_what_is_hot_is_not_in_the_sketch():
    """Beside hot groups that are far larger, a cold coordinate is found."""
    sums = np.tile(spikes(range(64), value=100_000), (18, 1))
    sums[17, 7777] = 1000
    total, kept, *_ = run(METHOD, share_out(4, sums))
    np.testing.assert_array_equal(total[17], sums[17])
    assert kept[17] == np.float32(1 / SIZE)


@pytest.mark.parametrize("rows", (1, 5))
def test_other_numbers_of_rows(rows):
    method = dataclasses.replace(SKETCH_ALONE, rows=rows)
    total = run(method, share_out(3, spikes([77]))[:, None])[0]
    found = np.flatnonzero(total[0])
    assert total[0, 77] == 1000
    assert found.size == 1 if rows > 1 else found.size <= -(-SIZE // 2048)


def test_the_key_chooses_the_hashes():
    gradients = of_workers(0, NUM_WORKERS, SIZE)[:, None]
    one = run(SKETCH_ALONE, gradients)[0]
    np.testing.assert_array_equal(one, run(SKETCH_ALONE, gradients)[0])
    assert np.any(one != run(SKETCH_ALONE, gradients, jax.random.key(5))[0])


# --------------------------------------------------------------------------- on all workers, always


@pytest.mark.parametrize("unit", (2.0**-60, 2.0**60))
def test_units_of_the_gradient_do_not_matter(unit):
    gradients = of_workers(0, NUM_WORKERS, 18 * SIZE).reshape(NUM_WORKERS, 18, SIZE)
    gradients[:, :, 99] = 0.1
    plain, scaled = run(METHOD, gradients), run(METHOD, gradients * np.float32(unit))
    assert plain.kept.any() and np.any(plain.sums[0])
    np.testing.assert_array_equal(scaled.sums, plain.sums * np.float32(unit))
    np.testing.assert_array_equal(scaled.applied, plain.applied * np.float32(unit))
    np.testing.assert_array_equal(scaled.memories[-1], plain.memories[-1] * np.float32(unit))
    np.testing.assert_array_equal(scaled.kept, plain.kept)


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_nan_and_inf_surface_and_stay_in_no_memory(bad):
    """In a hot group and in a cold one. All else is as without them."""
    gradients = share_out(0, np.tile(spikes(range(64)), (18, 1)))
    clean = run(METHOD, gradients)
    assert (clean.sums[16, :64] == 1000).all()
    with_bad = gradients.copy()
    with_bad[2, 16, 3] = with_bad[1, 16, 7777] = bad
    total, _, memory, applied, _ = run(METHOD, with_bad)
    lost = ~np.isfinite(total)
    np.testing.assert_array_equal(np.argwhere(lost), [(16, 3), (16, 7777)])
    np.testing.assert_array_equal(total[~lost], clean.sums[~lost])
    assert np.isfinite(memory).all()
    np.testing.assert_allclose(memory[17, :4], clean.memories[17, :4])
    # The others keep what has not arrived of the cold one.
    assert not applied[16, :, 7777].any()


@pytest.mark.slow
def test_a_coordinate_is_lost_only_where_no_row_has_it():
    sketch = CountSketch.draw(jax.random.key(0), size=64, rows=3, width=64)
    cells = np.array(sketch.encode(jnp.ones(64)))
    cells[[0, 2]] = np.nan
    assert np.isfinite(_heavy_hitters(sketch, jnp.asarray(cells))).all()
    cells[1] = np.nan
    assert np.isnan(_heavy_hitters(sketch, jnp.asarray(cells))).all()


def test_what_is_not_finite_spoils_few_other_coordinates():
    """Those that share a cell with it in one row: they are zero, and others are found as before."""
    gradients = share_out(3, spikes(range(0, SIZE, 256)))[:, None]
    clean = run(SKETCH_ALONE, gradients).sums[0]
    gradients[2, 0, 4001] = np.nan
    total = run(SKETCH_ALONE, gradients).sums[0]
    assert np.flatnonzero(np.isnan(total)).tolist() == [4001]
    same = total == clean
    assert 0.99 < same.mean() < 1
    assert (total != 0).sum() >= 0.85 * (clean != 0).sum() > 20


def test_a_bucket_that_is_nan_everywhere_is_nan_and_no_state_is():
    gradients = share_out(0, np.tile(spikes(range(64)), (18, 1)))
    clean = run(METHOD, gradients).sums
    gradients[3, 16] = np.nan
    total, _, memory, _, _ = run(METHOD, gradients)
    assert np.isnan(total[16]).all()
    np.testing.assert_array_equal(memory[16], memory[15])
    np.testing.assert_array_equal(total[17], clean[17])


@pytest.mark.parametrize("topology", ("ring", "butterfly"))
def test_replicas_and_their_memories_are_identical_with_rounding_at_hops(topology):
    gradients = of_workers(1, NUM_WORKERS, 3 * SIZE).reshape(NUM_WORKERS, 3, SIZE)
    result = run(SplitSketch(bits=2.0, hot=0.75), gradients, topology=topology)
    assert np.isfinite(result.memories).all()
    summed = result.applied.astype(np.float64).sum(axis=1)
    assert 1e-9 < vnmse(result.sums, summed) < 1e-4


@pytest.mark.parametrize(("size", "hot"), ((1, 0.9), (40, 0.0)))
def test_tiny_buckets(size, hot):
    """One group and one cell of each row at least; whole, where there are bytes for all."""
    method = SplitSketch(bits=0.5, hot=hot, inner=EXACT)
    split = method.split(call_on(size, NUM_WORKERS))
    assert (split.room >= 1) == (hot > 0) and (split.width >= 1) == (hot < 1)
    gradients = share_out(0, np.ones((2, size)))
    total = run(method, gradients).sums
    assert total.shape == (2, size) and np.isfinite(total).all()
    everything = dataclasses.replace(method, bits=32.0).split(call_on(16 * size, NUM_WORKERS))
    assert everything.room == size and everything.width == 0


# ------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("method", "bits"),
    (
        *((SplitSketch(bits=bits), bits) for bits in (0.25, 2.0, 8.0)),
        (SplitSketch(bits=2.0, hot=1.0), 2.0),
        (SplitSketch(bits=2.0, hot=0.0), 2.0),
        (SplitSketch(bits=2.0, inner=TWO_WIDTHS), 2.0),
    ),
)
def test_the_bits_are_those_asked_for(method, bits):
    size, n = 1 << 20, 8
    report = dq.wire_report({"w": jax.ShapeDtypeStruct((size,), jnp.float32)}, n, method=method)
    assert bits - 0.03 < report.bits <= bits
    split = method.split(call_on(size, n))
    cells, values = method.rows * split.width, method.group * split.room
    assert values == pytest.approx(method.hot * (cells + values), rel=0.02)


# --------------------------------------------------------------------------------------- over steps


FEEDBACK = ErrorFeedback(inner=dataclasses.replace(METHOD, decay=0.5))


def test_error_feedback_around_it_loses_nothing_over_time():
    """The sums so far and what is kept are what came in so far: the noise of the sketch is kept."""
    gradients = of_workers(3, NUM_WORKERS, 16 * SIZE).reshape(NUM_WORKERS, 16, SIZE)
    total, kept, _, _, state = run(FEEDBACK, gradients)
    assert kept.any()
    truth = gradients.sum(axis=(0, 1), dtype=np.float64)
    came_out = total.sum(axis=0, dtype=np.float64)
    residual = np.asarray(state.residual, np.float64).sum(axis=0)
    assert vnmse(came_out + residual, truth) < 1e-10
    assert vnmse(came_out, truth) > 0.01


def test_a_gradient_that_stays_arrives():
    """The mean of the sums comes closer as one over the number of steps."""
    gradient = of_workers(5, NUM_WORKERS, SIZE)
    total = run(FEEDBACK, np.repeat(gradient[:, None], 120, axis=1)).sums
    truth = gradient.sum(axis=0, dtype=np.float64)
    errors = [vnmse(total[:t].astype(np.float64).mean(axis=0), truth) for t in (1, 60, 120)]
    assert errors[2] < errors[1] / 2 < errors[0] / 10
    assert errors[2] < 0.005


@pytest.mark.slow
def test_a_checkpoint_resumes_the_run_bit_for_bit(data_mesh, tmp_path):
    gradients = of_workers(7, NUM_WORKERS, 4 * SIZE).reshape(NUM_WORKERS, 4, SIZE)
    methods = [ErrorFeedback(inner=METHOD)] * 4
    resumed.Run(methods, data_mesh(NUM_WORKERS), gradients).check_resumes(tmp_path)


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    (
        ("bits", 0, "more than 0"),
        ("bits", 33.0, "more than 0"),
        ("hot", -0.1, "from 0 to 1"),
        ("hot", 1.1, "from 0 to 1"),
        ("rows", 2, r"\(1, 3, 5, 7\)"),
        ("group", 0, "at least 1"),
        ("decay", 1.5, "0 to 1"),
        ("growth", -1.0, "0 to 1"),
        ("inner", SplitSketch(), r"dq\.methods\.BF16\(\)"),
    ),
)
def test_impossible_fields(field, value, remedy):
    with pytest.raises(ValueError, match=rf"{field}=.*Give .*{remedy}"):
        SplitSketch(**{field: value})
