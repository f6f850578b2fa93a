"""Islands: laws of a round, of islands that are late, leave and join, and of their transports."""

import functools
import itertools
import os
import pathlib
import random
import re
import signal
import threading
import time
from collections import defaultdict, deque

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dynamiq_jax as dq
from dynamiq_jax.islands import Islands, IslandState, ObjectStore, SharedFolder, Sparse, history
from dynamiq_jax.islands._records import Decision, opened
from tests.support import island_worker, processes
from tests.support.islands import PARAMS, Memory, exchanged, joined, moved, same, together
from tests.support.workers import STOCHASTIC

OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


@pytest.fixture(params=("folder", "store"))
def transport(request, tmp_path):
    if request.param == "folder":
        return SharedFolder(tmp_path)
    return ObjectStore(fsspec.filesystem("memory"), str(tmp_path))


def test_a_name_is_stored_once(transport):
    start = threading.Barrier(8)

    def put(number):
        start.wait()
        return transport.put("folder/name", bytes([number]) * 1000)

    if isinstance(transport, SharedFolder):  # the memory of fsspec is not atomic
        stored = together([functools.partial(put, number) for number in range(8)])
    else:
        stored = [transport.put("folder/name", bytes([number]) * 1000) for number in range(8)]
    assert sum(stored) == 1
    assert transport.get("folder/name") == bytes([stored.index(True)]) * 1000
    assert transport.put("folder/other", b"")
    assert transport.names("folder") == ["name", "other"]
    assert (transport.get("folder/none"), transport.names("none")) == (None, [])


def test_a_folder_that_another_island_deletes_is_made_again(tmp_path, monkeypatch):
    """One that deletes old rounds, after this one has made the folder of a late change."""
    link, folder = os.link, SharedFolder(tmp_path)

    def after_a_deletion(*args):
        monkeypatch.setattr(os, "link", link)
        folder.delete("change/0/none")
        link(*args)

    monkeypatch.setattr(os, "link", after_a_deletion)
    assert folder.put("change/0/late", b"1") and folder.names("change/0") == ["late"]


def test_files_of_others_in_the_folders_of_a_run_are_no_rounds_and_no_islands(tmp_path):
    folder, fields = SharedFolder(tmp_path), {"keep_rounds": 2, "store_every": 1, "at_least": 1}
    (island,), (state,) = joined(folder, "a", **fields)
    for name in ("state/backup", "here/.DS_Store", "decision/notes.txt", "change/old"):
        assert folder.put(name, b"1")
    for each in range(3):
        assert folder.put(f"here/{each:08}/.nfs01", b"")
        (state,) = exchanged([island], [state], [each])
    assert [record.here for record in history(folder)] == [("a",)] * 4
    assert [record.number for record in history(folder, last=1)] == [3]
    with pytest.raises(ValueError, match="last=0"):
        history(folder, last=0)
    _, (resumed,) = joined(folder, "a", **fields)
    assert resumed.round == 3 and same(resumed.reference, state.reference)


def test_bytes_are_on_the_disk_before_they_have_a_name(tmp_path, monkeypatch):
    """Or a host that loses power leaves an empty file, which nothing can replace."""
    calls = []

    def recorded(name, function):
        monkeypatch.setattr(os, name, lambda *args: (calls.append(name), function(*args))[1])

    recorded("fsync", os.fsync)
    recorded("link", os.link)
    assert SharedFolder(tmp_path).put("a/b", b"1")
    assert calls == ["fsync", "link"]


class Flaky:
    """A file system in memory whose calls fail some times before they answer.

    Args:
      errors: those that are raised, the last one first.
      every: number of calls between two errors.
    """

    def __init__(self, errors, every=1):
        self.memory, self.errors = fsspec.filesystem("memory"), list(errors)
        self.calls = itertools.cycle(range(every))

    def __getattr__(self, name):
        def call(*args, **options):
            result = getattr(self.memory, name)(*args, **options)
            if name == "invalidate_cache":
                return result
            if self.errors and not next(self.calls):  # the answer is lost
                raise self.errors.pop()
            return result

        return call


DOWN = (TimeoutError("slow"), OSError(16, "SlowDown: 503"), ConnectionError("gone"), Exception("x"))


def test_a_store_that_is_down_is_asked_again(tmp_path, caplog):
    """Also where only the answer is lost: what is written then is there."""
    store = ObjectStore(Flaky(DOWN), str(tmp_path))
    assert not store.put("a/b", b"1")  # the first call has written it
    assert store.get("a/b") == b"1" and len(caplog.records) == len(DOWN)
    store.filesystem.errors = list(DOWN)
    assert store.names("a") == ["b"]
    store.filesystem.errors = [ConnectionError("gone")] * 1000
    impatient = ObjectStore(store.filesystem, store.path, patience=0.2)
    with pytest.raises(ConnectionError, match="gone"):
        impatient.get("a/b")

    class NoCredentialsError(Exception):
        """As botocore says it."""

    for error in (PermissionError("expired"), TypeError("no such option"), NoCredentialsError()):
        store.filesystem.errors = [error]
        with pytest.raises(type(error)):
            store.get("a/b")
        assert not store.filesystem.errors


def test_a_run_over_a_store_that_fails_has_the_bits_of_one_that_does_not(tmp_path):
    ends = []
    for number, errors in enumerate(((), DOWN * 3)):
        stores = {n: ObjectStore(Flaky(errors, every=2), f"{tmp_path}/{number}") for n in "ab"}
        islands, states = joined(stores, "ab", deadline=float("inf"))
        for each in range(3):
            states = exchanged(islands, states, (2 * each, 2 * each + 1))
        assert not any(store.filesystem.errors for store in stores.values())
        ends.append(states[0])
    assert same(ends[0][1:3], ends[1][1:3])


class Lagging(Memory):
    """A view of a store whose lists have what was there some lists of the folder before."""

    def __init__(self, files, lag):
        super().__init__(files)
        self.seen = defaultdict(lambda: deque([[]] * lag, lag + 1))

    def names(self, folder):
        self.seen[folder].append(super().names(folder))
        return self.seen[folder].popleft()


def test_lists_that_lag_and_clocks_that_differ_lose_no_change(monkeypatch):
    """Islands see each other late, and one of them says that it is another year at every look."""
    monkeypatch.setattr(time, "time", lambda: random.uniform(0, 2e9))
    ends = []
    for lags in ((0, 0, 0), (0, 3, 40)):
        files = {}
        stores = {name: Lagging(files, lag) for name, lag in zip("abc", lags, strict=True)}
        islands, states = joined(stores, method="exact", at_least=3, deadline=float("inf"))
        for number in range(3):
            states = exchanged(islands, states, range(3 * number, 3 * number + 3))
            file = f"decision/{number:08d}"
            decided = Decision.from_bytes(opened(file, files[file]))
            assert sorted(decided.members) == ["a", "b", "c"]
        assert all(same(state[1:3], states[0][1:3]) for state in states)
        ends.append(states[0])
    assert same(ends[0][1:3], ends[1][1:3])


def test_two_islands_of_one_name_are_told_and_lose_nothing(caplog):
    """The first change of a round counts. The other one is kept, and sent in the next round."""
    fields = {"method": "exact", "outer": optax.sgd(1.0), "deadline": 0, "count": 1}
    store = Memory()
    islands = [Islands(transport=store, name="a", poll=0.002, **fields) for _ in range(2)]
    states = [island.join(PARAMS) for island in islands]
    first = islands[0].exchange(moved(PARAMS, 1), states[0])
    assert not caplog.records
    store.files.pop("decision/00000000")  # as if it came a moment later
    second = islands[1].exchange(moved(PARAMS, 2), states[1])
    (warning,) = caplog.messages
    assert re.match(r"round 0: change/00000000/\w+/a is of another island of this name", warning)
    assert same(first.reference, second.reference) and np.any(second.residual["w"])


def rounds_of_both(transport, names, outer, count):
    """Yield the states of islands, and that of local SGD, after each round of exact changes."""
    islands, states = joined(transport, names, method="exact", outer=outer)
    local_sgd = dq.training.LocalSGD(axis_name="data", every=1, method="exact", outer=outer)
    known = jax.vmap(lambda _: local_sgd.init(PARAMS), axis_name="data")(jnp.arange(len(names)))
    update = jax.jit(jax.vmap(local_sgd.update, axis_name="data"))
    for number in range(count):
        seeds = [len(names) * number + island for island in range(len(names))]
        changed = [moved(states[0].reference, seed) for seed in seeds]
        states = exchanged(islands, states, seeds)
        _, known = update(jax.tree.map(lambda *leaves: jnp.stack(leaves), *changed), known)
        yield states, jax.tree.map(lambda leaf: leaf[0], known.reference)


def test_an_island_alone_is_local_sgd(transport):
    """With exact changes and without momentum, whose product with a rate a compiler may fuse with
    a sum: bit for bit.
    """
    for states, reference in rounds_of_both(transport, "a", optax.sgd(1.0), 3):
        assert same(states[0].reference, reference)
    assert states[0].round == 3 and not same(states[0].reference, PARAMS)


def test_islands_hold_the_same_bits_and_are_near_local_sgd(tmp_path):
    """Three with exact changes and momentum. Here each change is multiplied by a third before the
    sum, there after it.
    """
    *_, (states, reference) = rounds_of_both(SharedFolder(tmp_path), "abc", OUTER, 2)
    assert all(same(state[1:3], states[0][1:3]) for state in states)
    for name in PARAMS:
        np.testing.assert_allclose(states[0].reference[name], reference[name], rtol=1e-5, atol=1e-8)


def test_four_bits_change_a_round_by_their_error(tmp_path):
    """The mean of three has a third of the squared error of each: it is independent noise."""
    islands, states = joined(SharedFolder(tmp_path), method="mxfp4", outer=optax.sgd(1.0))
    after = exchanged(islands, states, range(3))[0].reference
    exact = jax.tree.map(lambda *leaves: sum(leaves) / 3, *(moved(PARAMS, s) for s in range(3)))
    change, known = (jax.tree.map(np.subtract, tree, PARAMS) for tree in (after, exact))
    assert 1e-3 < dq.vnmse(change, known) < 3e-2


def test_changes_are_weighted(tmp_path):
    islands, states = joined(SharedFolder(tmp_path), "ab", method="exact", outer=optax.sgd(1.0))
    after = exchanged(islands, states, (1, 2), weights=[30, 10])[0].reference
    one, other = moved(PARAMS, 1), moved(PARAMS, 2)
    for name in PARAMS:
        mean = 0.75 * one[name] + 0.25 * other[name]
        np.testing.assert_allclose(after[name], mean, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("late", ("keep", "drop"))
def test_a_late_change_is_kept_or_dropped(tmp_path, late):
    """An island that waits for nobody decides alone; the other one comes later."""
    fields = {"method": "exact", "outer": optax.sgd(1.0), "late": late, "count": 1}
    (quick, slow), states = joined(SharedFolder(tmp_path), "ab", **fields, deadline=0)
    first = quick.exchange(moved(PARAMS, 1), states[0])
    second = quick.exchange(moved(first.reference, 2), first)
    behind = slow.exchange(moved(PARAMS, 3), states[1])
    assert behind.round == 2 and same(behind.reference, second.reference)
    change = jax.tree.map(lambda before, now: before - now, PARAMS, moved(PARAMS, 3))
    kept = change if late == "keep" else jax.tree.map(jnp.zeros_like, PARAMS)
    assert same(behind.residual, kept)
    after = slow.exchange(behind.reference, behind)  # nothing but what was kept
    for name in PARAMS:
        wanted = behind.reference[name] - kept[name]
        np.testing.assert_allclose(after.reference[name], wanted, rtol=1e-5, atol=1e-8)
    assert not np.any(after.residual["w"])


def test_an_island_joins_with_the_reference_of_the_others(transport):
    """From the stored state, through rounds that it was not in; also with the name of one that
    was killed after it had sent its change.
    """
    fields = {"method": "bf16", "store_every": 2, "deadline": 0, "count": 1}
    (island,), (state,) = joined(transport, "a", **fields)
    for number in range(3):
        state = island.exchange(moved(state.reference, number), state)
    assert transport.names("state") == ["00000000", "00000002"]
    other = jax.tree.map(np.zeros_like, PARAMS)
    again, late = (Islands(transport=transport, name=name, **fields) for name in "az")
    for newcomer in (again, late):
        found = newcomer.join(other)
        assert found.round == 3 and same(found[1:3], state[1:3])
        assert not any(map(np.any, jax.tree.leaves(found.residual)))
    # The change of the one before counts, and the new one goes to the next round.
    sent = island.exchange(moved(state.reference, 7), state)
    behind = again.exchange(moved(state.reference, 8), found)
    assert same(behind.reference, sent.reference) and np.any(behind.residual["w"])


def test_old_rounds_are_deleted_and_the_run_goes_on(transport):
    """Decisions stay. Who joins starts at a state that is kept, and who is too late must join."""
    fields = {"store_every": 2, "keep_rounds": 4, "deadline": 0.1, "count": 1, "poll": 0.01}
    (island, late), states = joined(transport, "ab", **fields)
    state = states[0]
    for number in range(9):
        state = island.exchange(moved(state.reference, number), state)
    assert [int(name) for name in transport.names("state")] == [4, 6, 8]
    assert [int(name) for name in transport.names("change")] == [4, 5, 6, 7, 8]
    assert len(transport.names("decision")) == 9
    assert [len(record.decision.members) for record in history(transport)[:9]] == [1] * 9
    newcomer = Islands(transport=transport, name="c", **fields).join(PARAMS)
    assert newcomer.round == 9 and same(newcomer[1:3], state[1:3])
    with pytest.raises(RuntimeError, match=r"round 0: 'b' cannot read .* Call join"):
        late.exchange(moved(PARAMS, 1), states[1])
    assert same(late.join(PARAMS)[1:3], state[1:3])
    transport.delete("change/none")  # of a name that there is not, nothing


def test_old_rounds_are_deleted_only_where_it_is_possible(tmp_path):
    with pytest.raises(ValueError, match=r"keep_rounds=3 is not possible.* at least 4"):
        Islands(transport=SharedFolder(tmp_path), name="a", store_every=2, keep_rounds=3)
    with pytest.raises(TypeError, match=r"keep_rounds=20 needs .* Memory has none"):
        Islands(transport=Memory(), name="a", keep_rounds=20)


def test_nobody_waits_for_an_island_that_is_gone(tmp_path):
    """It has announced itself, and costs one deadline; in the next round it is not there."""
    islands, states = joined(SharedFolder(tmp_path), deadline=0.5, method="bf16")
    states = exchanged(islands[:2], states[:2], (1, 2))
    assert SharedFolder(tmp_path).names("here/00000001") == ["a", "b"]
    assert {state.round for state in states} == {1}
    states = exchanged(islands[:2], states, (3, 4))
    assert same(states[0].reference, states[1].reference)


def test_islands_of_other_references_are_told(tmp_path):
    fields = {"deadline": 0, "method": "bf16", "count": 1}
    (one, other), (state, foreign) = joined(SharedFolder(tmp_path), "ab", **fields)
    one.exchange(moved(PARAMS, 1), state)
    foreign = foreign._replace(reference=moved(PARAMS, 5))
    with pytest.raises(RuntimeError, match=r"round 0: 'b' holds the reference .* Call join"):
        other.exchange(foreign.reference, foreign)
    with pytest.raises(ValueError, match=r"it has 0/b@0:7, and this island"):
        Islands(transport=SharedFolder(tmp_path), name="c").join({"v": np.zeros(3, np.float32)})


@pytest.mark.parametrize("dtype", (np.int32, np.complex64, np.bool_), ids=lambda t: t.__name__)
def test_leaves_that_have_no_mean_change_are_refused_before_anything_is_stored(tmp_path, dtype):
    transport = SharedFolder(tmp_path)
    params = {"w": np.ones(3, np.float32), "count": np.ones((), dtype)}
    with pytest.raises(TypeError, match=r"params\['count'\] has dtype"):
        Islands(transport=transport, name="a").join(params)
    assert not transport.names("state")
    joined(transport, "a")


def test_feedback_keeps_what_the_others_did_not_receive(tmp_path):
    (island,), (state,) = joined(
        SharedFolder(tmp_path), "a", method="blockint:2", feedback=True, outer=optax.sgd(1.0)
    )
    total = jax.tree.map(np.zeros_like, PARAMS)
    for number in range(4):
        now = moved(state.reference, number)
        total = jax.tree.map(lambda t, a, b: t + (a - b), total, state.reference, now)
        state = island.exchange(now, state)
    applied = jax.tree.map(lambda before, after: before - after, PARAMS, state.reference)
    for name in PARAMS:
        np.testing.assert_allclose(
            applied[name] + state.residual[name], total[name], rtol=1e-3, atol=1e-6
        )
    assert np.any(state.residual["w"])


def test_islands_with_and_without_64_bits_are_in_one_run(tmp_path):
    folder, fields = SharedFolder(tmp_path), {"count": 1, "deadline": 0, "method": "exact"}
    (one, other), (state, _) = joined(folder, "ab", **fields)
    state = one.exchange(moved(PARAMS, 1), state)
    with jax.enable_x64(not jax.config.jax_enable_x64):
        again = other.join(jax.tree.map(np.zeros_like, PARAMS))
        assert again.round == 1 and same(again[1:3], state[1:3])


def test_a_loss_that_is_no_number_is_refused_before_anything_is_sent(tmp_path):
    (island,), (state,) = joined(SharedFolder(tmp_path), "a")
    with pytest.raises(TypeError, match="loss='x' is not a number"):
        island.exchange(PARAMS, state, loss="x")
    assert not SharedFolder(tmp_path).names("change")


def test_a_seed_has_32_bits():
    for seed in (-(2**31), 2**32 - 1):
        assert Islands(transport=Memory(), name="a", seed=seed).seed == seed
    for seed in (-(2**31) - 1, 2**32):
        with pytest.raises(ValueError, match=f"seed={seed} "):
            Islands(transport=Memory(), name="a", seed=seed)


def test_what_is_no_store_is_refused():
    with pytest.raises(TypeError, match=r"transport='/tmp/x' is no store.*SharedFolder"):
        Islands(transport="/tmp/x", name="a")
    with pytest.raises(TypeError, match="positional"):  # fields have names
        Islands("/tmp/x", "a")
    with pytest.raises(TypeError, match="filesystem='s3' is no file system of fsspec"):
        ObjectStore("s3", "bucket/run")


def test_fields_that_are_not_possible_are_refused(tmp_path):
    transport = SharedFolder(tmp_path)
    for field, value in (
        ("name", ""),
        ("name", "a/b"),
        ("name", ".."),
        ("name", "a\0"),
        ("name", "a" * 201),
        ("count", 0),
        ("deadline", -1),
        ("late", "later"),
        ("feedback", 1),
        ("decay", 1.5),
        ("at_least", 0),
        ("grace", -1.0),
        ("overlap", 2.0),
        ("norm_limit", 0.5),
        ("store_every", 0),
        ("state_on", "disk"),
        ("poll", -1),
        ("seed", 0.5),
    ):
        with pytest.raises(ValueError, match=re.escape(f"{field}={value!r}"[:80])):
            Islands(**{"transport": transport, "name": "a", field: value})
    Islands(transport=transport, name="a", norm_limit=1, overlap=0, decay=0, grace=0)  # the least
    with pytest.raises(ValueError, match="cannot be in a message"):
        Islands(transport=transport, name="a", method=STOCHASTIC)
    with pytest.raises(ValueError, match="loses most of each change without feedback=True"):
        Islands(transport=transport, name="a", method=Sparse())
    with pytest.raises(TypeError, match=r"outer=0\.7 is not an optax"):
        Islands(transport=transport, name="a", outer=0.7)
    for secret in ("text", b""):
        with pytest.raises(TypeError, match="secret is not bytes"):
            Islands(transport=transport, name="a", secret=secret)
    (island,), (state,) = joined(transport, "a")
    assert isinstance(state, IslandState)
    for weight in (0, -1.0, float("nan"), "1"):
        with pytest.raises(ValueError, match="weight="):
            island.exchange(PARAMS, state, weight=weight)


@pytest.mark.slow
def test_an_island_that_is_killed_again_and_again_comes_back(tmp_path, request):
    """Each time in the middle of a round, with SIGKILL: all end with the same reference."""
    rounds, kills = 8, 4

    def start(name):
        process = processes.alone(island_worker.train, str(tmp_path), name, rounds)
        request.addfinalizer(process.kill)
        return process

    jobs = {name: start(name) for name in "abc"}
    last = -1
    for _ in range(kills):
        while (now := _last_announced(tmp_path, "c")) <= last:
            assert jobs["a"].returncode is None, "the others went on without it"
            time.sleep(0.01)
        time.sleep(0.1)
        jobs["c"].kill()
        assert jobs["c"].returncode == -signal.SIGKILL
        last, jobs["c"] = now, start("c")
    outputs = {name: job.result() for name, job in jobs.items()}
    assert {output[:2] for output in outputs.values()} == {(rounds, outputs["a"][1])}
    files = [f"decision/{number:08}" for number in range(rounds)]
    transport = SharedFolder(tmp_path)
    came = [Decision.from_bytes(opened(file, transport.get(file))).members for file in files]
    assert all({"a", "b"} <= members.keys() for members in came)  # no round is lost for them
    assert sum("c" in members for members in came) >= rounds - kills
    # Ten steps a round that each leave 0.95 of the distance, and the rounding of 4 bits.
    assert 0.9 * 0.95 ** (10 * rounds) < outputs["a"][2] < 2 * 0.95 ** (10 * rounds) + 1e-3


def _last_announced(folder, name: str) -> int:
    here = pathlib.Path(folder, "here")
    return max((int(file.parent.name) for file in here.rglob(name)), default=-1)
