"""Memory of states: on devices or hosts, and freed by an exchange."""

import gc

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from dynamiq_jax.islands import Islands, SharedFolder, Sparse
from tests.support.gradients import heavy_tailed
from tests.support.islands import same

SHAPE = (64, 512)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def island(folder, **fields):
    fields = {"method": Sparse(), "feedback": True, "outer": NESTEROV, "name": "a"} | fields
    return Islands(transport=SharedFolder(folder), store_every=2, **fields)


def params_on(devices: int):
    values = {"w": heavy_tailed(0, SHAPE), "b": heavy_tailed(1, (64,))}
    if devices == 1:
        return jax.device_put(values, jax.devices()[0])
    mesh = jax.make_mesh((devices,), ("data",))
    return jax.device_put(values, NamedSharding(mesh, P("data")))


def moved(params, number):
    return jax.tree.map(lambda leaf: leaf - np.float32(0.01) * (number + leaf), params)


def memories(tree):
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "sharding")]
    return {leaf.sharding.memory_kind for leaf in leaves}


def rounds(islands, params, count=5, ahead=False):
    """States after rounds, of which some repeat the steps of stored states."""
    state, exchange = islands.join(params), None
    places = jax.tree.map(lambda leaf: leaf.sharding, params)
    params = jax.device_put(state.reference, places)
    for number in range(count):
        params = moved(params, number)
        if ahead:
            state = state if exchange is None else exchange.result()
            exchange = islands.start_exchange(params, state)
            params = exchange.params
        else:
            state = islands.exchange(params, state)
            params = jax.device_put(state.reference, places)
    return state if exchange is None else exchange.result()


@pytest.mark.parametrize("ahead", (False, True))
@pytest.mark.parametrize("devices", (1, 4))
def test_states_on_hosts_have_the_same_bits_and_leave_the_devices(tmp_path, devices, ahead):
    params = params_on(devices)
    expected = rounds(island(tmp_path / "devices"), params, ahead=ahead)
    islands = island(tmp_path / "host", state_on="host", donate=True)
    state = rounds(islands, params, ahead=ahead)
    assert same(state, expected)
    assert memories(expected) == {"device"} and memories(state) == {"pinned_host"}
    joined = island(tmp_path / "host", state_on="host", name="b").join(params)
    assert memories(joined) == {"pinned_host"}
    assert same((joined.reference, joined.outer), (state.reference, state.outer))
    if devices > 1:
        trees = params, state.reference
        one, other = (jax.tree.map(lambda leaf: leaf.sharding.spec, tree) for tree in trees)
        assert one == other


def test_parameters_in_memory_of_a_host_go_on_as_others_do(tmp_path):
    expected = rounds(island(tmp_path / "device"), params_on(1), 3, ahead=True)
    islands, (device, *_) = island(tmp_path / "host"), jax.devices()
    host = SingleDeviceSharding(device, memory_kind="pinned_host")
    state, exchange = islands.join(params_on(1)), None
    params = state.reference
    for number in range(3):
        params = moved(params, number)
        state = state if exchange is None else exchange.result()
        exchange = islands.start_exchange(jax.device_put(params, host), state)
        params = jax.device_put(exchange.params, SingleDeviceSharding(device))
    assert same(exchange.result(), expected)


@pytest.mark.parametrize("place", ("device", "host"))
def test_devices_hold_three_arrays_of_a_state_or_none(tmp_path, place):
    params = params_on(1)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))

    def on_devices():
        gc.collect()
        arrays = [a for a in jax.live_arrays() if a.sharding.memory_kind == "device"]
        parts = [shard.data for a in arrays if a.size >= 64 for shard in a.addressable_shards]
        return sum({part.unsafe_buffer_pointer(): part.nbytes for part in parts}.values())

    before = on_devices()
    state = rounds(island(tmp_path, state_on=place), params)
    # Reference, momentum and residual.
    assert on_devices() - before == (3 * size if place == "device" else 0), state.round


@pytest.mark.parametrize("place", ("device", "host"))
def test_an_exchange_frees_what_it_is_given_if_asked(tmp_path, place):
    def given_and_next(donate):
        islands = island(tmp_path / str(donate), donate=donate, state_on=place)
        state = islands.join(params_on(1))
        after = islands.exchange(moved(params_on(1), 1), state)
        return state, after

    kept, _ = given_and_next(False)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(kept[1:]))
    state, after = given_and_next(True)
    freed = jax.tree.leaves((state.outer, state.residual))
    assert freed and all(leaf.is_deleted() for leaf in freed)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state.reference, after[1:])))


def test_what_the_next_state_holds_is_not_freed(tmp_path):
    """No change counts, so that the outer state stays."""
    islands = island(tmp_path, donate=True)
    state = islands.join(params_on(1))
    lost = jax.tree.map(lambda leaf: leaf * np.float32(np.nan), state.reference)
    after = islands.exchange(lost, state)
    assert after.round == 1 and same(after.outer, state.outer)
