"""Predicted times: the parts that they are made of, and the topologies that they favor."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import pytest

import dynamiq_jax as dq
from dynamiq_jax._prediction.cost_model import CodecSpeed, Network, predict, predict_exact
from dynamiq_jax._prediction.device_speeds import CODEC_SPEEDS, SUM_SPEEDS, DeviceKind
from dynamiq_jax.methods import Axis, Call, WireCost
from dynamiq_jax.topologies import AllToAll, Butterfly, Ring

SLOW = Network(gbit_per_s=0.2, latency_us=100.0)
FAST = Network(gbit_per_s=3200.0, latency_us=5.0)
FREE = CodecSpeed(ns_per_coordinate=0.0)
# A million bytes a second, and a second for each step.
ROUND = Network(gbit_per_s=8e-3, latency_us=1e6, efficiency=1.0, oversubscription=3.0)
CODEC = CodecSpeed(ns_per_coordinate=1e6, us_per_step=1e6)
SIZE = 8 << 20


def cost_of(topology, *, n=8, size=SIZE):
    return dq.DynamiQ().wire_cost(Call(size=size, axis=Axis("data", n), topology=topology))


# ----------------------------------------------------------------------- the model, by the number


def test_a_transfer_takes_its_bytes_over_the_rate_and_a_latency_for_each_step():
    network = Network(gbit_per_s=8.0, latency_us=100.0, efficiency=0.5)
    assert network.seconds(1e9, 0) == pytest.approx(2.0, rel=1e-12)
    assert network.seconds(0, 3) == pytest.approx(3e-4, rel=1e-12)
    assert network.seconds(1e9, 3) == pytest.approx(2.0003, rel=1e-12)
    codec = CodecSpeed(ns_per_coordinate=2.0, us_per_step=30.0)
    assert codec.seconds(10**9, 4) == pytest.approx(2 + 1.2e-4, rel=1e-12)


@pytest.mark.parametrize(
    ("topology", "seconds", "codec_seconds"),
    (
        # 7 payloads of 1000 bytes each way and 100 bytes of statistics at 10^6 bytes a second. A
        # second for each step: to scatter, 3 to gather, and 1 + 3 for the statistics.
        (Ring(), 7 + 3 + 4 + 0.0141, 7 + 2 + 0.5),
        # Sent across the whole network, which is three times slower for all at once.
        (Butterfly(), 3 + 3 + 4 + 0.0281, 3 + 2 + 0.5),
        (AllToAll(), 1 + 3 + 4 + 0.0281, 1 + 2 + 0.5),
    ),
    ids=("ring", "butterfly", "all_to_all"),
)
def test_the_time_of_an_all_reduce(topology, seconds, codec_seconds):
    with_statistics = WireCost(payload_bytes=1000, statistics_bytes=100)
    found = predict(500, 8, topology, with_statistics, ROUND, CODEC)
    assert found.wire == pytest.approx(seconds, rel=1e-12)
    assert found.codec == pytest.approx(codec_seconds, rel=1e-12)
    assert found.total == found.wire + found.codec
    # Without statistics, neither their bytes nor their steps.
    without = predict(500, 8, topology, WireCost(payload_bytes=1000), ROUND, CODEC)
    assert without.wire == pytest.approx(seconds - 4 - 1e-4, rel=1e-12)
    assert without.codec == found.codec


def test_the_time_of_an_exact_sum():
    found = predict_exact(4000, 8, network=ROUND, codec=CODEC)
    # 7/8 of 16000 bytes each way, in 3 steps each.
    assert found.wire == pytest.approx(6 + 0.028, rel=1e-12)
    assert found.codec == pytest.approx(6 + 4, rel=1e-12)
    half = predict_exact(4000, 8, network=ROUND, codec=CODEC, item_bytes=2)
    assert half.wire == pytest.approx(6 + 0.014, rel=1e-12)
    # Of workers that are no power of two, the next one up.
    assert predict_exact(0, 5, network=ROUND, codec=FREE).wire == pytest.approx(6.0)


def test_the_bytes_are_those_of_the_report():
    network = Network(gbit_per_s=1.0, latency_us=0.0, efficiency=1.0)
    report = dq.wire_report({"w": jax.ShapeDtypeStruct((SIZE,), jnp.float32)}, 8)
    ours = predict(SIZE, 8, Ring(), cost_of(Ring()), network, FREE)
    assert ours.total == pytest.approx(8e-9 * report.bytes_per_worker)
    exact = predict_exact(SIZE, 8, network=network, codec=FREE)
    assert exact.total == pytest.approx(8e-9 * 4 * SIZE * 2 * 7 / 8)


# ---------------------------------------------------------------------------- what they favor


def fastest(network, *, size=SIZE, n=8, device="cpu", codec=None):
    """Return the topology with the shortest time; None where an exact sum is as fast."""
    codec = codec or CODEC_SPEEDS[device]

    def seconds(topology):
        return predict(size, n, topology, cost_of(topology, n=n, size=size), network, codec).total

    best = min((t for t in (AllToAll(), Butterfly(), Ring()) if t.supports(n)), key=seconds)
    exact = predict_exact(size, n, network=network, codec=SUM_SPEEDS[device])
    return best if exact.total > seconds(best) else None


@pytest.mark.parametrize(
    ("network", "size", "n", "expected"),
    (
        (SLOW, SIZE, 8, AllToAll()),
        (SLOW, SIZE, 3, AllToAll()),
        (dataclasses.replace(SLOW, oversubscription=4.0), SIZE, 8, Ring()),
        (FAST, SIZE, 8, None),
        (SLOW, 100, 8, None),
    ),
)
def test_slow_links_favor_few_steps_crowded_ones_neighbors_and_fast_ones_exact_sums(
    network, size, n, expected
):
    assert fastest(network, size=size, n=n) == expected


def test_an_all_to_all_of_many_workers_orders_sums_again():
    """So another topology is faster where that costs more than further steps."""
    network = Network(gbit_per_s=25.0)
    speed = CodecSpeed(ns_per_coordinate=0.05, ns_of_order=0.2)
    times = {
        (name, n): predict(SIZE, n, topology, cost_of(topology, n=n), network, speed).codec
        for name, topology in (("ring", Ring()), ("all_to_all", AllToAll()))
        for n in (4, 8)
    }
    assert times["ring", 4] == times["all_to_all", 4] == times["ring", 8]
    assert times["all_to_all", 8] == pytest.approx(times["ring", 8] + 0.2e-9 * SIZE)
    assert fastest(network, codec=speed) == Butterfly()


def test_every_kind_of_device_has_speeds():
    """The codec of a GPU is hundreds of times faster, and so pays where that of a CPU does not."""
    assert CODEC_SPEEDS.keys() == SUM_SPEEDS.keys() == set(get_args(DeviceKind))
    network = Network(gbit_per_s=50.0)
    pays = {kind: fastest(network, device=kind) is not None for kind in get_args(DeviceKind)}
    assert pays == {kind: kind != "cpu" for kind in get_args(DeviceKind)}


# --------------------------------------------------------------------------------- the error law


@pytest.mark.parametrize(
    ("topology", "n", "agreement", "growth"),
    (
        # Squared norms of the sums that are compressed, over that of the whole sum.
        (Ring(), 2, 1.0, (1 + 4) / 4),
        (Ring(), 4, 0.0, (1 + 2 + 3 + 4) / 4),
        (Ring(), 4, 1.0, (1 + 4 + 9 + 16) / 16),
        (Ring(), 4, 0.5, (1 + 3 + 6 + 10) / 10),
        (Butterfly(), 4, 0.0, (1 + 1 + 2 + 4) / 4),
        (Butterfly(), 4, 1.0, (1 + 1 + 4 + 16) / 16),
        (AllToAll(), 4, 0.0, (1 + 1 + 1 + 4) / 4),
        (AllToAll(), 4, 1.0, (1 + 1 + 1 + 16) / 16),
    ),
)
def test_the_error_law_by_hand(topology, n, agreement, growth):
    assert topology.error_growth(n, agreement=agreement) == pytest.approx(growth, rel=1e-12)


def test_errors_grow_with_the_length_of_the_path():
    for agreement in (0.0, 0.5, 1.0):
        topologies = Ring(), Butterfly(), AllToAll()
        ring, butterfly, straight = (t.error_growth(64, agreement=agreement) for t in topologies)
        assert ring > 5 * butterfly > 5 * straight > 5
    with pytest.raises(ValueError, match="agreement=2"):
        Ring().error_growth(8, agreement=2)
