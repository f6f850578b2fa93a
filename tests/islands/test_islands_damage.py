"""Islands and files that are damaged, or values that nobody can use: left out by name, by all."""

import json
import struct
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamiq_jax.islands import Islands, encode
from dynamiq_jax.islands._records import Decision, opened, sealed
from dynamiq_jax.islands.merging import too_large
from tests.support.islands import (
    PARAMS,
    PLAIN,
    Memory,
    ended,
    exchanged,
    joined,
    moved,
    near,
    same,
    together,
)

# Whoever waits for an island, waits until the test ends with an error.
FIELDS = {**PLAIN, "deadline": float("inf")}


def foreign(tree):
    """A damage: a whole change of other leaves."""
    message = encode(tree, key=jax.random.key(0)).to_bytes()
    return lambda name, data: sealed(name, struct.pack("<d", 1.0) + message)


def flipped(at):
    def flip(name, data):
        altered = bytearray(data)
        altered[int(at * (len(data) - 1))] ^= 16
        return bytes(altered)

    return flip


DAMAGES = {
    "empty": lambda name, data: b"",
    "one byte": lambda name, data: data[:1],
    "truncated": lambda name, data: data[: len(data) // 2],
    "longer": lambda name, data: data + b"\0",
    "first byte": flipped(0),
    "a byte in the middle": flipped(0.5),
    "last byte": flipped(1),
    "weight": lambda name, data: data[:36] + struct.pack("<d", 9.0) + data[44:],
    "other JSON": lambda name, data: b'{"reference": 1}',
    "no JSON": lambda name, data: b"[" * 100_000,
    "another file": lambda name, data: sealed(name + "x", opened(name, data)),
    "other leaves": foreign({"v": np.ones(3, np.float32)}),
    "other shapes": foreign({**PARAMS, "b": PARAMS["b"][:6]}),
    "larger shapes": foreign({**PARAMS, "b": np.ones(len(PARAMS["b"]) + 1, np.float32)}),
    "other dtypes": foreign({**PARAMS, "b": PARAMS["b"].astype(np.float16)}),
    "no weight": lambda name, data: sealed(name, struct.pack("<d", 0.0) + opened(name, data)[8:]),
}
OF_CHANGES = ("weight", "no weight", "other leaves", "other shapes")
OF_CHANGES += "larger shapes", "other dtypes"
every_damage = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)


def damaging(prefix, damage, suffix=""):
    """A function of names and bytes that damages those of some names."""

    def change(name, data):
        return damage(name, data) if name.startswith(prefix) and name.endswith(suffix) else data

    return change


def mean_change(seeds, of=PARAMS):
    """Parameters after an outer step with the changes of these seeds."""
    changes = [jax.tree.map(np.subtract, moved(of, seed), of) for seed in seeds]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / len(seeds), *changes)
    return jax.tree.map(np.add, of, mean)


def agree(states) -> bool:
    return all(same(state[:3], states[0][:3]) for state in states)


def standing(islands, states):
    """States after a round in which no island moves: residuals are all that is sent."""
    return ended(islands, states, [state.reference for state in states])


def is_zero(tree) -> bool:
    return not any(map(np.any, jax.tree.leaves(tree)))


@pytest.mark.parametrize("number", (0, 2))
@every_damage
def test_a_damaged_change_is_left_out_by_all_and_kept_by_its_island(damage, number, caplog):
    damage = damaging(f"change/{number:08}", damage, "/c")
    islands, states = joined(Memory(written=damage), **FIELDS)
    for earlier in range(number):
        states = exchanged(islands, states, [3 * earlier + i for i in range(3)])
    before = states[0].reference
    assert not caplog.records
    states = exchanged(islands, states, (21, 22, 23))
    assert agree(states) and near(states[0].reference, mean_change((21, 22), before))
    assert len(caplog.messages) == 3
    for warning in caplog.messages:
        assert warning.startswith(f"round {number}: the change of 'c' is left out. change/")
        assert "/c: " in warning and len(warning) < 600
    # The residual of c is its change, and the next round has it.
    assert is_zero(states[0].residual) and not is_zero(states[2].residual)
    moves = jax.tree.map(np.subtract, before, moved(before, 23))
    assert near(states[2].residual, moves)
    after = standing(islands, states)
    assert agree(after)
    wanted = jax.tree.map(np.subtract, states[0].reference, moves)
    assert near(after[0].reference, wanted) and is_zero(after[2].residual)


@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf, 1e30, -1e30))
@pytest.mark.parametrize("names", ("ab", "abc"))
@pytest.mark.parametrize("late", ("keep", "drop"))
def test_values_that_nobody_can_use_are_left_out_and_forgotten(names, value, late, caplog):
    islands, states = joined(Memory(), names, **FIELDS, late=late)
    params = [moved(PARAMS, seed) for seed in range(len(names))]
    params[-1]["b"][3] = value
    states = ended(islands, states, params)
    assert agree(states) and near(states[0].reference, mean_change(range(len(names) - 1)))
    assert all(f"of {names[-1]!r} is left out" in message for message in caplog.messages)
    assert len(caplog.messages) == len(names)
    assert all(is_zero(state.residual) for state in states)
    seeds = [7 + i for i in range(len(names))]
    after = exchanged(islands, states, seeds)
    assert agree(after) and near(after[0].reference, mean_change(seeds, states[0].reference))


@pytest.mark.parametrize("value", (np.nan, np.inf))
def test_the_reference_stays_where_no_change_counts(value):
    """Also the outer momentum, which a mean of zero would apply again."""
    islands, states = joined(Memory(), "a", method="bf16", outer=optax.sgd(0.7, momentum=0.9))
    states = exchanged(islands, states, [1])
    params = jax.tree.map(lambda leaf: leaf + value, states[0].reference)
    after = islands[0].exchange(params, states[0])
    assert after.round == 2 and same(after[1:3], states[0][1:3])
    # Nor does a change of zero count.
    assert same(standing(islands, [after])[0].reference, after.reference)


@pytest.mark.parametrize("value", (0.0, np.nan))
def test_a_round_waits_for_whose_change_came_to_the_one_before(value):
    """Whether it counted or not, and also if its announcement is late."""

    class Silent(Memory):
        def put(self, name, data):
            return name.startswith("here/00000001") or super().put(name, data)

    store = Memory()
    views = {"a": store, "b": store, "c": Silent(store.files)}
    islands, states = joined(views, **FIELDS)
    params = [moved(PARAMS, seed) for seed in range(3)]
    params[2]["b"][3] += value
    states = ended(islands, states, params)
    assert store.names("here/00000001") == ["a", "b"]

    def later():
        while sum(name.startswith("change/00000001") for name in [*store.files]) < 2:
            time.sleep(0.005)
        time.sleep(0.2)  # in which the others would decide
        return islands[2].exchange(moved(states[2].reference, 5), states[2])

    others, last = together([lambda: exchanged(islands[:2], states[:2], (3, 4)), later])
    assert agree([*others, last])
    assert near(last.reference, mean_change((3, 4, 5), states[0].reference))


def test_a_change_of_zero_is_left_out_and_is_no_measure_of_others(caplog):
    islands, states = joined(Memory(), **FIELDS)
    params = [PARAMS, PARAMS, moved(PARAMS, 1)]
    states = ended(islands, states, params)
    assert agree(states) and near(states[0].reference, moved(PARAMS, 1))
    assert sum("its norm is 0" in message for message in caplog.messages) == 6


def test_a_limit_of_norms_can_be_lifted():
    islands, states = joined(Memory(), "ab", **FIELDS, norm_limit=float("inf"))
    params = [moved(PARAMS, 1), jax.tree.map(lambda leaf: leaf + np.float32(1e9), PARAMS)]
    assert np.all(np.asarray(ended(islands, states, params)[0].reference["w"]) > 1e8)


FACTORS = st.lists(st.sampled_from([0, 0.1, 1, 1, 1.01, 0.99]), min_size=1, max_size=9)


@given(factors=FACTORS, large=FACTORS, limit=st.floats(1, 1e6), scale=st.integers(-50, 50))
def test_norms_are_compared_with_their_median(factors, large, limit, scale):
    norms = dict(enumerate([*factors, *(factor * limit for factor in large)]))
    left_out = too_large(norms, limit)
    nonzero = sorted(norm for norm in norms.values() if norm)
    median = nonzero[(len(nonzero) - 1) // 2] if nonzero else 0
    assert left_out.keys() == {n for n, norm in norms.items() if norm and norm > limit * median}
    assert len(left_out) <= len(nonzero) / 2
    assert not too_large(norms, float("inf"))
    scaled = {name: norm * 2.0**scale for name, norm in norms.items()}
    assert too_large(scaled, limit).keys() == left_out.keys()


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name not in OF_CHANGES])
def test_a_damaged_decision_leaves_the_reference_and_loses_no_change(damage, caplog):
    store = Memory(written=damaging("decision/00000001", DAMAGES[damage]))
    islands, states = joined(store, **{**FIELDS, "deadline": 1.5})
    states = exchanged(islands, states, (1, 2, 3))
    same_round = exchanged(islands, states, (4, 5, 6))
    assert agree(same_round) and same_round[0].round == 2
    assert same(same_round[0][1:3], states[0][1:3])
    text = "round 1: no change counts. decision/00000001: "
    assert any(message.startswith(text) for message in caplog.messages)
    after = standing(islands, same_round)
    assert agree(after) and near(after[0].reference, mean_change((4, 5, 6), states[0].reference))
    newcomer = Islands(transport=store, name="z", **FIELDS).join(PARAMS)
    assert newcomer.round == 3 and same(newcomer[1:3], after[0][1:3])


@pytest.fixture(scope="module")
def run():
    """Files of a run of five rounds with states of rounds 0, 2 and 4, and its last state."""
    store = Memory()
    islands, states = joined(store, "ab", **FIELDS, store_every=2)
    for number in range(5):
        states = exchanged(islands, states, (2 * number, 2 * number + 1))
    return store.files, states[0]


def join(files, **fields):
    fields = {**FIELDS, "name": "z", "deadline": 0, "poll": 0, **fields}
    return Islands(transport=Memory(files), **fields).join(PARAMS)


@every_damage
@pytest.mark.parametrize("count", (1, 2))
def test_the_last_whole_state_is_used(run, damage, count, caplog):
    files, last = run
    damaged = {f"state/{number:08}": number for number in (2, 4)[-count:]}
    changed = {n: damage(n, data) if n in damaged else data for n, data in files.items()}
    state = join(changed)
    assert state.round == 5 and same(state[1:3], last[1:3])
    for warning, file in zip(caplog.messages, sorted(damaged, reverse=True), strict=True):
        assert warning.startswith(f"a state is left out. {file}: ")


def test_a_state_under_the_name_of_another_round_is_left_out(run):
    files, last = run
    state = join({**files, "state/00000004": files["state/00000002"]})
    assert state.round == 5 and same(state[1:3], last[1:3])


def test_no_run_begins_anew_where_all_states_are_damaged(run):
    files = {n: data[:-1] if n.startswith("state/") else data for n, data in run[0].items()}
    with pytest.raises(ValueError, match=r"no stored state can be read\. state/00000004: "):
        join(files)


@every_damage
def test_a_decision_that_is_damaged_later_is_read_where_islands_repeat_it(run, damage):
    files, last = run
    file = "decision/00000004"
    state = join({**files, file: damage(file, files[file])})
    assert state.round == 5 and same(state[1:3], last[1:3])


def test_what_others_have_followed_and_this_one_cannot_read_ends_this_one_by_name(run):
    files, last = run
    (file,) = (name for name in files if name.startswith("change/00000004") and name[-1] == "b")
    others = opened(file[:-1] + "a", files[file[:-1] + "a"])
    with pytest.raises(RuntimeError, match="another one than when it was decided"):
        join({**files, file: sealed(file, others)})
    with pytest.raises(RuntimeError, match=r"round 4: 'z' cannot read .*'b': .*Call join once"):
        join({**files, file: files[file][:-1]}, deadline=float("inf"))
    (file,) = (name for name in files if name.startswith("change/00000003") and name[-1] == "b")
    state = join({**files, file: files[file][:-1]})  # a later state is stored
    assert state.round == 5 and same(state[1:3], last[1:3])


@given(data=st.data())
def test_any_damage_ends_in_the_same_state_or_in_an_error_with_a_name(run, data):
    files, last = run
    file = data.draw(st.sampled_from(sorted(files)))
    kind = data.draw(st.sampled_from(("flip", "cut", "swap", "gone")))
    changed = bytearray(files[file])
    if kind == "flip" and changed:
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        changed = changed[: data.draw(st.integers(0, len(changed)))]
    elif kind == "swap":
        changed = bytearray(files[data.draw(st.sampled_from(sorted(files)))])
    changed = {**files, file: bytes(changed)}
    if kind == "gone":
        del changed[file]
    try:
        state = join(changed)
    except RuntimeError as error:
        assert file.startswith("change/00000004") and "round 4: " in str(error)
    else:
        missing = kind == "gone" and file == "decision/00000004"
        assert state.round == 5 - missing
        assert missing or same(state[1:3], last[1:3])


def before_others_went_on(files):
    """The last round is decided, and no island has followed its decision yet."""
    return {name: data for name, data in files.items() if not name.startswith("here/00000005")}


@pytest.mark.parametrize("prefix", ("decision/00000004", "change/00000004"))
def test_an_island_that_reads_other_bytes_looks_again(run, prefix, caplog):
    files, last = run
    damaged = iter([DAMAGES["truncated"]] * 3)
    read = damaging(prefix, lambda name, data: next(damaged, lambda _, data: data)(name, data))
    view = Memory(before_others_went_on(files), read=read)
    state = Islands(transport=view, name="z", poll=0.005, **FIELDS).join(PARAMS)
    assert state.round == 5 and same(state[1:3], last[1:3])
    (warning,) = caplog.messages
    assert warning.startswith("round 4: decision/00000004 is read again: ")


def test_islands_that_cannot_read_a_change_follow_the_first_that_leaves_it_out(run):
    files = before_others_went_on(run[0])
    (file,) = (name for name in files if name.startswith("change/00000004") and name[-1] == "b")
    files[file] = files[file][:-1]
    one = join(files)  # the deadline is over at once
    other = join(files, name="y", deadline=float("inf"))
    assert agree([one, other]) and one.round == 5 and not same(one.reference, run[1].reference)


def test_a_change_that_is_damaged_after_the_decision_is_kept_by_its_island(caplog):
    def written(name, data):
        if name == "decision/00000001":
            (file,) = (n for n in store.files if n.startswith("change/00000001") and n[-1] == "b")
            store.files[file] = store.files[file][:-1]
        return data

    store = Memory(written=written)
    islands, states = joined(store, **{**FIELDS, "deadline": 1.5})
    before = exchanged(islands, states, (1, 2, 3))
    states = exchanged(islands, before, (4, 5, 6))
    assert agree(states) and near(states[0].reference, mean_change((4, 6), before[0].reference))
    assert [is_zero(state.residual) for state in states] == [True, False, True]
    assert any("round 1: the change of 'b' is left out" in text for text in caplog.messages)


def test_files_of_020_are_read(run):
    """Without checksums, and decisions that list names."""
    files, last = run
    old = {}
    for name, data in files.items():
        content = opened(name, data)
        if name.startswith("decision/"):
            decision = Decision.from_bytes(content)
            fields = {"reference": decision.reference, "members": [*decision.members]}
            content = json.dumps(fields).encode()
        elif name.startswith("here/"):
            content = b""
        old[name] = content
    del old["state/00000004"]
    state = join(old)
    assert state.round == 5 and same(state[1:3], last[1:3])


def test_parameters_unlike_the_reference_are_refused_before_a_change_is_sent():
    store = Memory()
    islands, states = joined(store, "a", **FIELDS)
    for other in (
        {**PARAMS, "b": PARAMS["b"][None]},
        {**PARAMS, "b": PARAMS["b"].astype(jnp.bfloat16)},
        {**PARAMS, "c": PARAMS["b"]},
        {**PARAMS, "b": 1.0},
    ):
        with pytest.raises(ValueError, match=r"params have leaves .* Give parameters like the"):
            islands[0].exchange(other, states[0])
    assert not store.names("change")
