"""Islands of several devices and processes: laws of what is sent of leaves that are split."""

import functools
import itertools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from dynamiq_jax.islands import Islands, SharedFolder, Sparse
from dynamiq_jax.islands._shards import Shard, check_cover, take_in
from dynamiq_jax.islands.merging import hash_of
from tests.support import island_shards, processes
from tests.support.islands import PARAMS, PLAIN, Memory, ended, moved, same, together

SPECS = {
    "one device": None,
    "rows": {"w": P("a"), "b": P()},
    "columns": {"w": P(None, ("a", "b")), "b": P()},
    "both": {"w": P("a", "b"), "b": P()},
    "copies": {"w": P(), "b": P()},
}


def placed(tree, specs):
    """A tree on four devices, or on one."""
    mesh = jax.make_mesh((2, 2), ("a", "b"))
    if specs is None:
        place = dict.fromkeys(tree, SingleDeviceSharding(jax.devices()[0]))
    else:
        place = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    return {name: jax.device_put(leaf, place[name]) for name, leaf in tree.items()}


def run(layouts, rounds=2, store=None, **fields):
    """States of islands after some rounds, each with leaves that are split in its own way."""
    store = Memory() if store is None else store
    own = {"count": len(layouts), "poll": 0.002, "store_every": 2, "deadline": float("inf")}
    fields = own | fields
    islands = [Islands(transport=store, name=name, **fields) for name in "abc"[: len(layouts)]]
    pairs = zip(islands, layouts, strict=True)
    states = together([functools.partial(i.join, placed(PARAMS, SPECS[of])) for i, of in pairs])
    for number in range(rounds):
        params = [
            placed(moved(state.reference, 10 * number + place), SPECS[layout])
            for place, (state, layout) in enumerate(zip(states, layouts, strict=True))
        ]
        states = ended(islands, states, params)
    return states, store


def sgd(momentum: float) -> optax.GradientTransformation:
    return optax.sgd(0.7, momentum=momentum, nesterov=bool(momentum))


@functools.cache
def whole(momentum: float, rounds: int = 2):
    """The reference of two islands of one device."""
    states, _ = run(("one device",) * 2, rounds, method="exact", outer=sgd(momentum))
    return jax.device_get(states[0].reference)


@pytest.mark.parametrize("momentum", (0.0, 0.9))
@pytest.mark.parametrize("one", SPECS)
@pytest.mark.parametrize("other", ("one device", "both"))
def test_exact_changes_do_not_depend_on_how_leaves_are_split(one, other, momentum):
    """Also not of islands that split them in other ways. No file has a leaf that is split."""
    states, store = run((one, other), method="exact", outer=sgd(momentum))
    for state, layout in zip(states, (one, other), strict=True):
        assert same(state.reference, whole(momentum))
        wanted = placed(PARAMS, SPECS[layout])
        of_outer = [leaf.trace for leaf in state.outer if hasattr(leaf, "trace") and leaf.trace]
        for tree in (state.reference, state.residual, *of_outer):
            for name, leaf in tree.items():
                assert leaf.sharding.is_equivalent_to(wanted[name].sharding, leaf.ndim)
    sizes = [len(data) for name, data in store.files.items() if name.startswith("parts/")]
    assert len(sizes) == 0 or max(sizes) < 8 * PARAMS["w"].nbytes  # of reference and momentum
    split = {"rows": 2, "columns": 4, "both": 4, "copies": 1, "one device": 0}
    own = [name for name in store.files if name.startswith("parts/00000000/") and "/a/" in name]
    assert len([name for name in own if "/state/" not in name]) == split[one]


@pytest.mark.parametrize("method", ("dynamiq:4", "mxfp4", Sparse(keep=16)), ids=str)
def test_compressed_shards_are_near_and_the_same_on_all_islands(method):
    feedback = isinstance(method, Sparse)
    states, _ = run(("both", "one device"), method=method, feedback=feedback, rounds=3)
    assert same(states[0][:3], states[1][:3])
    trees = states[0].reference, whole(0.9, 3)
    change, known = (jax.tree.map(np.subtract, tree, PARAMS) for tree in trees)
    error = sum(np.sum((change[n] - known[n]) ** 2) for n in PARAMS)
    assert 1e-6 < error / sum(np.sum(known[n] ** 2) for n in PARAMS) < (1 if feedback else 0.05)
    if feedback:
        assert all(np.any(state.residual["w"]) for state in states)


@pytest.mark.parametrize("layout", ("one device", "both"))
@pytest.mark.parametrize("is_function", (False, True))
def test_a_policy_names_whole_leaves(layout, is_function):
    """Also of leaves of which a device sends a part, or nothing."""
    method: Any = {"^b$": "uncompressed", "^w$": "dynamiq:4"}
    if is_function:
        method = lambda path, leaf: {"w": "dynamiq:4", "b": "uncompressed"}[path]  # noqa: E731
    (state, _), store = run((layout, "one device"), rounds=1, **PLAIN | {"method": method})
    expected, _ = run(("one device",) * 2, rounds=1, **PLAIN | {"method": "exact"})
    assert same(state.reference["b"], expected[0].reference["b"])
    pairs = [jax.device_get(s.reference["w"]) - PARAMS["w"] for s in (state, expected[0])]
    assert 1e-4 < np.sum((pairs[0] - pairs[1]) ** 2) / np.sum(pairs[1] ** 2) < 0.05
    sent = [len(data) for name, data in store.files.items() if "state/" not in name]
    assert max(sent) < PARAMS["w"].nbytes / 2


def test_who_joins_reads_states_of_other_shardings():
    states, store = run(("both", "rows"), rounds=3, **PLAIN)
    for layout in SPECS:
        island = Islands(transport=store, name=f"new {layout}", deadline=0, **PLAIN)
        state = island.join(placed(jax.tree.map(np.zeros_like, PARAMS), SPECS[layout]))
        assert state.round == 3 and same(state[1:3], states[0][1:3])


@pytest.mark.parametrize("layout", ("one device", "rows"))
def test_who_joins_with_leaves_of_other_sizes_is_told(layout):
    """Also with smaller ones, of which a stored state has all elements."""
    _, store = run((layout, layout), rounds=1, **PLAIN)
    for factor in (0.5, 2):
        w = np.zeros((int(factor * len(PARAMS["w"])), *PARAMS["w"].shape[1:]), np.float32)
        island = Islands(transport=store, name="new", deadline=0, **PLAIN)
        with pytest.raises(ValueError, match="no stored state can be read"):
            island.join(placed({**PARAMS, "w": w}, SPECS[layout]))


@pytest.mark.parametrize("damage", ("gone", "cut", "another"))
def test_an_island_of_a_damaged_part_is_left_out_by_name(damage, caplog):
    def written(name, data):
        parts = name.split("/")
        if parts[:2] == ["parts", "00000001"] and parts[3] == "b" and parts[4][0] == "2":
            return {"gone": b"", "cut": data[:-1], "another": bytes(len(data))}[damage]
        return data

    states, _ = run(("rows", "both"), store=Memory(written=written), **PLAIN)
    assert same(states[0][:3], states[1][:3])
    assert np.any(states[1].residual["w"]) and not np.any(states[0].residual["w"])
    (warning,) = {*caplog.messages}
    assert "the change of 'b' is left out" in warning


def test_old_parts_are_deleted(tmp_path):
    folder = SharedFolder(tmp_path)
    run(("both", "rows"), store=folder, rounds=7, keep_rounds=4, **PLAIN)
    assert [int(n) for n in folder.names("parts")] == [int(n) for n in folder.names("change")]
    assert int(folder.names("parts")[0]) == 2


# ------------------------------------------------------------------------------------------ shards

BOUNDS = st.lists(st.integers(1, 5), min_size=0, max_size=3)


def cut(shape, places):
    """Shards of a leaf that is cut at some places of each dimension."""
    bounds = [()]
    for size, at in zip(shape, places, strict=True):
        ends = [0, *sorted({at, size} - {0})]
        pairs = list(itertools.pairwise(ends))
        bounds = [(*before, pair) for before in bounds for pair in pairs]
    return [Shard("w", each) for each in bounds]


@given(st.data(), BOUNDS)
def test_values_of_any_cut_make_those_of_any_other(data, shape):
    places = [[data.draw(st.integers(0, size)) for size in shape] for _ in range(2)]
    sources, wanted = (cut(shape, at) for at in places)
    check_cover(sources, wanted)
    leaf = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    def of(shard):
        return leaf[tuple(slice(*pair) for pair in shard.bounds)]

    found = {}
    take_in(found, [(shard, of(shard)) for shard in sources], wanted)
    assert found.keys() == {*wanted}
    assert all(np.array_equal(found[shard], of(shard)) for shard in wanted)
    assert all(Shard.named(shard.name) == shard for shard in sources)
    with pytest.raises(ValueError, match=r"it has \d+ of \d+ elements of w@"):
        check_cover(sources[1:], wanted)


@given(st.integers(0, 1279), st.integers(0, 31))
def test_a_hash_sees_each_bit_and_its_place(place, bit):
    hashes = set()
    leaf = PARAMS["w"].view(np.uint32).reshape(-1).copy()
    for change in (lambda x: x, lambda x: x ^ np.uint32(1 << bit), lambda x: x + np.uint32(1)):
        other = leaf.copy()
        other[place] = change(other[place])
        hashes.add(hash_of({"w": other.view(np.float32).reshape(40, 32)}))
    swapped = leaf.copy()
    swapped[[place, place - 1]] = swapped[[place - 1, place]]
    hashes.add(hash_of({"w": swapped.view(np.float32).reshape(40, 32)}))
    hashes.add(hash_of({"w": leaf.view(np.float32).reshape(32, 40)}))
    assert len(hashes) == (4 if bit == 0 and not leaf[place] & 1 else 5)


def test_hashes_are_those_of_other_versions():
    """Islands of several versions take part in one run, and files have hashes in their names."""
    tree = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.int32(7)}
    assert hash_of(tree) == "c2962c296f0d39ea"


# --------------------------------------------------------------------------------------- processes


def ends_of_processes(place, count, devices, ahead):
    """The hash, and all shards, of two islands of some processes after four rounds."""
    arguments = [[(place, name, 4, ahead)] * count for name in "ab"]
    one, other = (processes.running(island_shards.train, of, devices=devices) for of in arguments)
    with one as first, other as second:
        rounds, hashes, values = zip(*[p.result() for p in (*first, *second)], strict=True)
    assert {*rounds} == {4} and len({*hashes}) == 1
    return hashes[0], {key: value for each in values for key, value in each.items()}


@pytest.mark.slow
@pytest.mark.parametrize("ahead", (False, True), ids=("exchange", "start_exchange"))
def test_islands_of_processes_hold_the_bits_of_islands_of_one(tmp_path, ahead):
    """Two islands of two processes of two devices, and of one process of four."""
    runs = [(str(tmp_path / str(count)), count, 4 // count, ahead) for count in (2, 1)]
    several, one = (ends_of_processes(*run) for run in runs)
    assert several[0] == one[0] and several[1].keys() == one[1].keys()
    assert all(np.array_equal(value, one[1][key]) for key, value in several[1].items())
