"""Predicted times: what they are made of, and what `topology="auto"` makes of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dynamiq_jax as dq
from dynamiq_jax._workshop.error_law import error_growth
from dynamiq_jax.topologies import AllToAll, Auto, Butterfly, CodecSpeed, Network, Ring
from dynamiq_jax.topologies._cost_model import predict, predict_exact
from tests.support.gradients import of_workers, vnmse
from tests.support.workers import TWO_CLASSES, simulated

SLOW = Network(gbit_per_s=0.2, latency_us=100.0)
FAST = Network(gbit_per_s=3200.0, latency_us=5.0)
FREE = CodecSpeed(ns_per_coordinate=0.0)
SIZE = 8 << 20


def predicted(topology, network, *, n=8, codec=FREE, size=SIZE, method=None):
    cost = (method or dq.DynamiQ()).wire_cost(size, n, topology.num_chunks(n))
    return predict(size, n, topology=topology, cost=cost, network=network, codec=codec)


def test_bytes_over_the_rate_of_the_link():
    """The time of the wire is that of the bytes which the report counts."""
    network = Network(gbit_per_s=1.0, latency_us=0.0, efficiency=1.0)
    report = dq.wire_report({"w": jax.ShapeDtypeStruct((SIZE,), jnp.float32)}, 8)
    assert predicted(Ring(), network).total == pytest.approx(8e-9 * report.bytes_per_worker)
    exact = predict_exact(SIZE, 8, network=network, codec=FREE)
    assert exact.total == pytest.approx(8e-9 * 4 * SIZE * 2 * 7 / 8)


@given(n=st.sampled_from((2, 4, 8, 64, 1024)), gbit=st.floats(0.1, 400))
def test_slower_parts_take_longer(n, gbit):
    network = Network(gbit_per_s=gbit)
    slower = dataclasses.replace(network, gbit_per_s=gbit / 2)
    farther = dataclasses.replace(network, latency_us=500.0)
    for topology in (Ring(), Butterfly(), AllToAll()):
        base = predicted(topology, network, n=n).total
        assert predicted(topology, slower, n=n).total > base
        assert predicted(topology, farther, n=n).total > base
        codec = CodecSpeed(ns_per_coordinate=1.0)
        assert predicted(topology, network, n=n, codec=codec).total == pytest.approx(
            base + 1e-9 * SIZE
        )


def test_fewer_steps_and_crowded_networks():
    times = [predicted(t, SLOW, n=64).total for t in (Ring(), Butterfly(), AllToAll())]
    assert times[0] > times[1] > times[2]
    crowded = dataclasses.replace(SLOW, oversubscription=4.0)
    assert predicted(Ring(), crowded).total == predicted(Ring(), SLOW).total
    assert predicted(AllToAll(), crowded).total > 2 * predicted(AllToAll(), SLOW).total


@pytest.mark.parametrize(
    ("network", "size", "n", "chosen"),
    (
        (SLOW, SIZE, 8, AllToAll()),
        (SLOW, SIZE, 3, AllToAll()),
        (dataclasses.replace(SLOW, oversubscription=4.0), SIZE, 8, Ring()),
        (FAST, SIZE, 8, None),
        (SLOW, 100, 8, None),
    ),
)
def test_auto_takes_the_fastest(network, size, n, chosen):
    topology, why_not = Auto(network=network).choose(dq.DynamiQ(), size, n)
    if chosen is None:
        assert "faster without compression" in why_not
    else:
        assert (topology, why_not) == (chosen, None)


def test_auto_reduces_exactly_what_does_not_pay():
    leaf = {"w": jax.ShapeDtypeStruct((1 << 20,), jnp.float32)}
    fast = dq.wire_report(leaf, 8, topology=Auto(network=FAST))
    slow = dq.wire_report(leaf, 8, topology=Auto(network=SLOW))
    assert (fast.compressed_size, slow.compressed_size) == (0, 1 << 20)
    ((path, why),) = fast.exact_leaves
    assert (path, "3200 Gbit/s" in why) == ("['w']", True)
    gradients = of_workers(0, 4, 20_000)

    def local(network):
        topology = Auto(network=network)
        return simulated(
            lambda key, g: dq.psum(g, "data", key=key, method=TWO_CLASSES, topology=topology)
        )

    exact = gradients.sum(axis=0)
    key = jax.random.key(0)
    very_slow = dataclasses.replace(SLOW, gbit_per_s=1e-3)
    np.testing.assert_allclose(
        local(FAST)(key, gradients)[0],
        exact,
        rtol=1e-4,
        atol=1e-7,
    )
    assert np.abs(local(very_slow)(key, gradients)[0] - exact).max() > 1e-4 * np.abs(exact).max()


def test_the_error_law_is_what_the_codec_does():
    """Independent roundings of gradients of known agreement: the law predicts their ratios."""
    n, agreement = 8, 0.5
    gradients = of_workers(7, n, 60_000, agreement=agreement)
    truth = gradients.sum(axis=0, dtype=np.float64)
    method = dataclasses.replace(TWO_CLASSES, rounding="independent")
    per_compression = []
    for topology in (Ring(), Butterfly(), AllToAll()):

        def local(key, g, topology=topology):
            return dq.psum(g, "data", key=key, method=method, topology=topology)

        error = vnmse(simulated(local)(jax.random.key(0), gradients)[0], truth)
        per_compression.append(error / error_growth(topology, n, agreement=agreement))
    assert max(per_compression) / min(per_compression) < 1.35


def test_errors_grow_with_the_length_of_the_path():
    for agreement in (0.0, 0.5, 1.0):
        growth = [
            error_growth(t, 64, agreement=agreement) for t in (Ring(), Butterfly(), AllToAll())
        ]
        assert growth[0] > 5 * growth[1] > 5 * growth[2] > 5
    with pytest.raises(ValueError, match="agreement=2"):
        error_growth(Ring(), 8, agreement=2)


@pytest.mark.parametrize("name", ("gbit_per_s", "latency_us", "efficiency", "oversubscription"))
@pytest.mark.parametrize("value", (-1, "10"))
def test_networks_that_cannot_be(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        Network(**{name: value})
