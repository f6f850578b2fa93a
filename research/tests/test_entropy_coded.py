"""Entropy-coded THC: the sums of THC in fewer bytes, and what happens where they do not fit.

`test_integer_coders.py` has the codes, `test_methods.py` what every method owes.
"""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

import dynamiq_jax as dq
from dynamiq_jax.methods import ErrorFeedback, WireCost
from dynamiq_jax.topologies import AllToAll, Butterfly, Ring
from dynamiq_research import THC, EntropyCoded
from dynamiq_research.entropy_coded.integer_coders import PatchedCoder
from dynamiq_research.entropy_coded.rans import RansCoder
from tests.support.gradients import of_workers, vnmse
from tests.support.hlo import compiled_collectives
from tests.support.workers import call_on, simulated

N, SIZE = 4, 40_000
KEY = jax.random.key(5)
SMALL = THC(block=1024)
RANS = EntropyCoded(inner=SMALL)
PATCHED = dataclasses.replace(RANS, coder="patched")
TOPOLOGIES = {
    "ring": Ring(),
    "unrolled": Ring(unroll=True),
    "butterfly": Butterfly(),
    "all_to_all": AllToAll(),
}
both = pytest.mark.parametrize("method", (RANS, PATCHED), ids=("rans", "patched"))


def normal(seed: int, num_workers: int, size: int, agreement: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(size, np.float32) * math.sqrt(agreement)
    own = rng.standard_normal((num_workers, size), np.float32)
    return own * np.float32(math.sqrt(1 - agreement)) + common.astype(np.float32)


@functools.cache
def summed(method, topology: str, feedback: bool = False):
    """Return a function of (key, values) to the sum, what was applied, and the metrics."""

    def local(key, flat):
        call = call_on(flat.size, N, TOPOLOGIES[topology], feedback=feedback)
        reduced = method.all_reduce(flat, call, key, ())
        return reduced.total, reduced.applied, dict(reduced.metrics)

    return simulated(local)


def bits(array) -> np.ndarray:
    return np.asarray(array).view(np.uint32)


# ----------------------------------------------------------------------------------- the same sums


@pytest.mark.parametrize(
    ("method", "topology"),
    [
        (PATCHED, "butterfly"),
        (RANS, "ring"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((PATCHED, "unrolled"), (PATCHED, "all_to_all"))
        ),
        pytest.param(RANS, "unrolled", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else value.coder,
)
@pytest.mark.slow
def test_sums_are_those_of_thc_bit_for_bit(method, topology):
    for g in (normal(0, N, SIZE, 0.5), of_workers(1, N, SIZE, agreement=0.3)):
        total, _, metrics = summed(method, topology)(KEY, g)
        expected, _, _ = summed(SMALL, topology)(KEY, g)
        np.testing.assert_array_equal(bits(total), bits(expected))
        assert not np.any(metrics["coarse"])
        assert np.all((metrics["filled"] > 0) & (metrics["filled"] <= 1))


@both
@pytest.mark.slow
def test_what_is_not_finite_and_zeros_are_those_of_thc(method):
    g = of_workers(2, N, SIZE)
    g[1, 300], g[3, -2], g[:, 4096:9000] = np.nan, -np.inf, 0
    total, _, _ = summed(method, "all_to_all")(KEY, g)
    expected, _, _ = summed(SMALL, "all_to_all")(KEY, g)
    np.testing.assert_array_equal(total, expected)
    assert np.isnan(total[:, 300]).all() and np.isnan(total[:, -2]).all()


@pytest.mark.slow
def test_error_feedback_keeps_what_thc_leaves_out():
    g = of_workers(4, N, SIZE)
    _, applied, _ = summed(PATCHED, "all_to_all", True)(KEY, g)
    _, expected, _ = summed(SMALL, "all_to_all", True)(KEY, g)
    np.testing.assert_array_equal(applied, expected)
    reduce = dq.all_reduce_gradients("data", method=ErrorFeedback(inner=PATCHED))
    _, state = simulated(lambda _, x: reduce.update(x, reduce.init(x)))(KEY, g)
    assert set(state.metrics) == {"coarse", "filled", "reset_states"}


# -------------------------------------------------------------------------------------- the bytes


@pytest.mark.parametrize(("method", "topology"), ((PATCHED, "unrolled"),), ids=("unrolled",))
@pytest.mark.slow
def test_the_report_is_the_compiled_program(data_mesh, method, topology):
    """Messages of each turn have a size of their own."""
    tree = {"w": jax.ShapeDtypeStruct((SIZE,), np.float32)}
    topology = TOPOLOGIES[topology]
    report = dq.wire_report(tree, N, method=dq.Compression(method, topology))
    found = compiled_collectives(data_mesh(N), tree, method, topology)
    assert sum(c.sent_bytes(N) for c in found) == report.bytes_per_worker
    hops = {c.result_bytes for c in found if c.kind == "collective-permute"}
    if isinstance(topology, Ring):
        assert len(hops) == N - 1
    loop = dq.wire_report(tree, N, method=dq.Compression(method, Ring()))
    assert report.bits < loop.bits < dq.wire_report(tree, N, method=SMALL).bits + 1e-2


def bits_of(method: EntropyCoded, num_workers: int, topology) -> float:
    tree = {"w": jax.ShapeDtypeStruct((1 << 24,), np.float32)}
    return dq.wire_report(tree, num_workers, method=dq.Compression(method, topology)).bits


def test_the_bits_of_64_workers():
    """Where THC sends 10 bits: of independent workers, and of those that have half in common."""
    independent, half = EntropyCoded(agreement=0.0), EntropyCoded(agreement=0.5)
    assert THC().wire_bits(64) == 10
    assert 6.5 < bits_of(independent, 64, Ring()) < 6.8
    assert 6.0 < bits_of(independent, 64, Ring(unroll=True)) < 6.5
    assert 8.3 < bits_of(half, 64, Ring(unroll=True)) < 8.6
    assert 6.2 < bits_of(half, 64, AllToAll()) < 6.5
    patched = EntropyCoded(agreement=0.0, coder="patched")
    assert 7.0 < bits_of(patched, 64, Ring()) < 7.3


@pytest.mark.parametrize("agreement", (0.0, 0.5))
@pytest.mark.parametrize("coder", ("rans", "patched"))
@pytest.mark.slow
def test_sums_of_64_workers_fit(coder, agreement):
    """The integers of THC, added in NumPy, in the messages that the report counts."""
    rows, largest, clamp = 64, 7, 2.5
    g = normal(6, 64, rows * 256, agreement).astype(np.float64)
    noise = np.random.default_rng(0).random(g.shape)
    integers = np.floor(np.clip(g * largest / clamp, -largest, largest) + noise).astype(int)
    method = EntropyCoded(agreement=agreement, coder=coder)
    for workers in (1, 8, 64):
        sums = integers[:workers].sum(axis=0).reshape(rows, 256).astype(np.int16)
        deviation = method._deviation(workers)
        assert sums.std() == pytest.approx(deviation, rel=0.02)
        if coder == "rans":
            code = RansCoder.of_normal(rows, 4096, deviation)
        else:
            code = PatchedCoder.of_normal(rows, deviation, THC().wire_bits(workers))
        body, filled = jax.jit(code.encode)(sums)
        assert (0.95 if coder == "rans" else -1) < filled <= 1
        np.testing.assert_array_equal(jax.jit(code.decode)(body), sums)


def test_bytes_of_messages_that_differ_by_turn_add_up():
    """As around `PowerSGD`, which sends two messages, and methods that send scores before one."""
    topology, scores = AllToAll(), WireCost(0, statistics_bytes=7)
    one, other = (PATCHED.wire_cost(call_on(size, N, topology)) for size in (SIZE, 2 * SIZE))

    def sent(cost):
        return topology.bytes_sent(cost, N)

    largest = WireCost(one.payload_bytes, one.statistics_bytes)
    assert sent(one) < sent(largest), "messages of one worker are shorter than those of the sum"
    assert sent(one + other) == sent(one) + sent(other)
    assert sent(scores + one) == sent(one + scores) == sent(one) + 7


def test_nothing_is_coded_where_that_is_no_shorter():
    """With workers that may agree, sums need as many bits as the largest."""
    method = EntropyCoded(inner=SMALL, agreement=1.0, coder="patched")
    report = dq.wire_report(np.zeros(1 << 20, np.float32), N, method=method)
    plain = dq.wire_report(np.zeros(1 << 20, np.float32), N, method=SMALL)
    assert plain.bits <= report.bits < plain.bits + 1e-3


# ------------------------------------------------------------------------------ what does not fit

TIGHT = {
    coder: EntropyCoded(inner=SMALL, agreement=0.0, coder=coder) for coder in ("rans", "patched")
}


@pytest.mark.parametrize(("coder", "topology"), (("rans", "all_to_all"), ("patched", "ring")))
@pytest.mark.slow
def test_sums_that_do_not_fit_are_coarser_and_counted(coder, topology):
    """Workers that agree, where the budget is that of independent ones."""
    g = normal(7, N, SIZE, 0.98)
    truth = g.sum(axis=0, dtype=np.float64)
    total, _, metrics = summed(TIGHT[coder], topology)(KEY, g)
    assert {replica.tobytes() for replica in np.asarray(total)} == {np.asarray(total[0]).tobytes()}
    # The values of single workers fit, and the last sums do not; on a ring some before them too.
    low, high = (1 / N, 1 / N) if topology == "all_to_all" else (1 / N, 3 / N)
    assert np.all((low <= metrics["coarse"]) & (metrics["coarse"] <= high))
    assert np.all(metrics["filled"] > 1)
    exact, _, _ = summed(SMALL, topology)(KEY, g)
    assert vnmse(exact[0], truth) < vnmse(total[0], truth) < 0.05


@pytest.mark.slow
def test_all_integers_at_the_clamp():
    """A spike of all workers: rotated, every coordinate is the largest integer or its negative."""
    g = np.zeros((16, 16 * 4096), np.float32)
    g[:, 5::1024] = -2.0
    method = dataclasses.replace(RANS, inner=THC(block=1024, clamp=1.0), agreement=0.0)

    def local(key, flat):
        reduced = method.all_reduce(flat, call_on(flat.size, 16), key, ())
        return reduced.total, dict(reduced.metrics)

    total, metrics = simulated(local)(KEY, g)
    assert np.all(metrics["coarse"] > 0.5)
    assert 0 < vnmse(total[0], g.sum(axis=0)) < 0.02


@pytest.mark.slow
def test_coarse_sums_are_unbiased():
    g, keys = normal(8, N, SIZE, 0.98), 24
    run, exact = summed(TIGHT["rans"], "all_to_all"), summed(SMALL, "all_to_all")
    errors = []
    for k in range(keys):
        total, _, metrics = run(jax.random.key(k), g)
        assert np.all(metrics["coarse"] > 0)
        errors.append(np.asarray(total[0], float) - np.asarray(exact(jax.random.key(k), g)[0][0]))
    single, mean = np.mean(np.square(errors)), np.mean(np.square(np.mean(errors, axis=0)))
    assert 0.8 / keys < mean / single < 1.25 / keys


@pytest.mark.slow
def test_a_block_of_one_message_that_does_not_fit_leaves_the_others():
    """Of four chunks, workers agree in one alone: the others are those of THC."""
    g = normal(9, N, 4 * 16_384, 0.0)
    g[:, :16_384] = g[0, :16_384]
    total, _, metrics = summed(TIGHT["rans"], "all_to_all")(KEY, g)
    expected, _, _ = summed(SMALL, "all_to_all")(KEY, g)
    np.testing.assert_array_equal(bits(total)[:, 16_384:], bits(expected)[:, 16_384:])
    assert not np.array_equal(total[:, :16_384], expected[:, :16_384])
    np.testing.assert_allclose(metrics["coarse"], 1 / 16)


# ----------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("inner", (dq.DynamiQ(), THC(sum_bits=6), "thc"))
def test_methods_whose_integers_cannot_be_coded(inner):
    with pytest.raises(ValueError, match=r"inner=.* has no sums of integers without loss\. Give a"):
        EntropyCoded(inner=inner)


@pytest.mark.parametrize("agreement", (-0.1, 1.1, float("nan"), "half"))
def test_impossible_agreement(agreement):
    with pytest.raises(ValueError, match=r"agreement=.* is out of range\. Give a share"):
        EntropyCoded(agreement=agreement)


def test_impossible_coder():
    with pytest.raises(ValueError, match=r"coder='huffman' is not possible\. Give one of \('rans'"):
        EntropyCoded(coder="huffman")
