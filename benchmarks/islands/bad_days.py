"""What a bad day of one island costs: the loss after all rounds, and who waited how long.

    python -m benchmarks.islands.bad_days

Four islands, threads of this process, train a small model over one store. In round 10 something
happens to the island `d`. Times are those of a short run: a deadline of two seconds stands for one
of minutes.
"""

import concurrent.futures
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from dynamiq_jax.islands import Islands, IslandState, ObjectStore, SharedFolder, history
from dynamiq_jax.islands._records import opened, sealed

NAMES, ROUND, STEPS = "abcd", 10, 10
Put = Callable[[str, bytes], bool]


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    rounds: int = 50
    deadline: float = 2.0  # seconds
    down: float = 30.0  # seconds for which the store is down
    save: bool = True  # write the result to benchmarks/results/islands_bad_days.json


class Killed(Exception):
    """End of an island, as by SIGKILL."""


class Files:
    """A folder as a file system of `fsspec`, which may be down."""

    def __init__(self, folder: SharedFolder):
        self.folder, self.down_until = folder, 0.0

    def pipe_file(self, name: str, data: bytes, mode: str) -> None:
        """Store bytes; see `ObjectStore`."""
        del mode
        self._check()
        if not self.folder.put(name, data):
            raise FileExistsError(name)

    def cat_file(self, name: str) -> bytes:
        """Return bytes."""
        self._check()
        data = self.folder.get(name)
        if data is None:
            raise FileNotFoundError(name)
        return data

    def ls(self, name: str, detail: bool) -> list[str]:
        """Return names."""
        del detail
        self._check()
        return self.folder.names(name)

    def invalidate_cache(self) -> None:
        """Do nothing: it has no cache."""

    def _check(self) -> None:
        if time.monotonic() < self.down_until:
            raise ConnectionError("the store is down")


class BadStore:
    """The store as the island `d` sees it on a bad day."""

    def __init__(self, store: ObjectStore, day: "Day"):
        self.store, self.day = store, day
        self.get, self.names, self.filesystem = store.get, store.names, store.filesystem

    def put(self, name: str, data: bytes) -> bool:
        """Store bytes, or what the day makes of them."""
        if name.startswith(f"change/{ROUND:08}/") and name.endswith("/d") and self.day.write:
            return self.day.write(self.store.put, self, name, data)
        return self.store.put(name, data)


@dataclasses.dataclass(frozen=True)
class Day:
    """A kind of bad day."""

    name: str
    params: Callable[[Any, Any], Any] = lambda params, reference: params  # of `d`, in round 10
    state: Callable[[IslandState], IslandState] = lambda state: state
    write: Callable[[Put, Any, str, bytes], bool] | None = None  # of its change
    late_by: int = 0  # rounds
    down: bool = False  # the store
    twins: bool = False  # two islands of the name `d`


def killed(share: float) -> Any:
    """A write at which the island ends, once a share of the bytes is stored."""

    def write(put: Put, store: Any, name: str, data: bytes) -> bool:
        if share:
            put(name, data[: int(share * len(data))])
        store.day = dataclasses.replace(store.day, write=None)
        raise Killed

    return write


def truncated(put: Put, store: Any, name: str, data: bytes) -> bool:
    """A write of which only half arrives."""
    return put(name, data[: len(data) // 2])


def copied(put: Put, store: Any, name: str, data: bytes) -> bool:
    """A write of what another island has sent."""
    other = name[:-1] + "a"
    while (found := store.get(other)) is None:
        time.sleep(0.01)
    return put(name, sealed(name, opened(other, found)))


def other_hash(put: Put, store: Any, name: str, data: bytes) -> bool:
    """A write under the name of another reference."""
    parts = name.split("/")
    parts[2] = "0" * 16
    other = "/".join(parts)
    return put(other, sealed(other, opened(name, data)))


def scaled(params: Any, reference: Any) -> Any:
    """A change a thousand times too large."""
    return jax.tree.map(lambda now, before: before + 1000 * (now - before), params, reference)


DAYS = (
    Day("none"),
    Day("killed before the write", write=killed(0)),
    Day("killed in the write, half of it stored", write=killed(0.5)),
    Day("killed after the write", write=killed(1)),
    Day("late by a round", late_by=1),
    Day("late by all other rounds", late_by=10**9),
    Day("NaN", params=lambda params, _: jax.tree.map(lambda leaf: leaf * np.nan, params)),
    Day("a change of zero", params=lambda _, reference: reference),
    Day("a copy of another change", write=copied),
    Day("scaled by 1,000", params=scaled),
    Day("of another reference", write=other_hash),
    Day("another reference in memory", state=lambda s: s._replace(reference=_flipped(s.reference))),
    Day("truncated", write=truncated),
    Day("the store is down", down=True),
    Day("two islands of one name", twins=True),
)


def _flipped(reference: Any) -> Any:
    """A reference in which one bit is another."""
    one = np.array(reference["out"])
    one.view(np.uint32)[0, 0] ^= 1 << 20
    return reference | {"out": jnp.asarray(one)}


class Training:
    """A model, its data, and the local steps of an island."""

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0), 4)
        self.teacher = jax.random.normal(keys[0], (32, 16))
        self.params = {
            "hidden": jax.random.normal(keys[1], (32, 128)) / 32**0.5,
            "out": jax.random.normal(keys[2], (128, 16)) / 128**0.5,
        }
        self.test = jax.random.normal(keys[3], (1024, 32))
        self.loss = jax.jit(self._loss)
        self.optimizer = optax.adamw(3e-3)
        self.step = jax.jit(self._step)

    def _loss(self, params: Any, x: Any) -> Any:
        found = jnp.tanh(x @ params["hidden"]) @ params["out"]
        return jnp.mean((found - jnp.tanh(x @ self.teacher)) ** 2)

    def _step(self, params: Any, own: Any, seed: Any) -> Any:
        x = jax.random.normal(jax.random.key(seed), (32, 32))
        updates, own = self.optimizer.update(jax.grad(self._loss)(params, x), own, params)
        return optax.apply_updates(params, updates), own


@dataclasses.dataclass
class Island:
    """An island, and how long its exchanges took."""

    training: Training
    config: Config
    day: Day
    store: Any
    name: str
    seed: int
    waits: list[float] = dataclasses.field(default_factory=list)

    def run(self) -> IslandState:
        """Train to the last round, and start again after each end."""
        while True:
            with contextlib.suppress(Killed, RuntimeError):
                return self._live()

    def _live(self) -> IslandState:
        bad = self.name == "d"
        islands = Islands(
            transport=self.store,
            name=self.name,
            count=len(NAMES),
            deadline=self.config.deadline,
            clip=True,
            poll=0.01,
        )
        state = islands.join(self.training.params)
        own = self.training.optimizer.init(state.reference)
        while state.round < self.config.rounds:
            number, params = state.round, state.reference
            for step in range(STEPS):
                seed = self.seed + len(NAMES) * (STEPS * number + step)
                params, own = self.training.step(params, own, seed)
            if bad and number == ROUND:
                if self.day.late_by:
                    last = min(ROUND + self.day.late_by, self.config.rounds) - 1
                    while self.store.get(f"decision/{last:08}") is None:
                        time.sleep(0.01)
                params = self.day.params(params, state.reference)
                state, self.day = self.day.state(state), dataclasses.replace(self.day, state=_same)
                if self.day.down:
                    self.store.filesystem.down_until = time.monotonic() + self.config.down
            start = time.monotonic()
            state = islands.exchange(params, state)
            self.waits.append(time.monotonic() - start)
        return state


def _same(state: IslandState) -> IslandState:
    return state


def lived(training: Training, config: Config, day: Day) -> dict[str, Any]:
    """Return what a run with a bad day ends in."""
    with tempfile.TemporaryDirectory() as folder:
        files = Files(SharedFolder(folder))
        islands = list[Island]()
        for seed, name in enumerate(NAMES + ("d" if day.twins else "")):
            store: Any = ObjectStore(files, "run")
            if name == "d":
                store = BadStore(store, day)
            islands.append(Island(training, config, day, store, name, seed))
        with concurrent.futures.ThreadPoolExecutor(len(islands)) as pool:
            states = [of.result() for of in [pool.submit(island.run) for island in islands]]
        rounds = history(islands[0].store)[: config.rounds]
    decisions = [each.decision for each in rounds if each.decision]
    shown = {each.left_out["d"] for each in decisions if "d" in each.left_out}
    clipped = [each.factors["d"] for each in decisions if each.factors.get("d", 1) < 0.01]
    others = [wait for island in islands if island.name != "d" for wait in island.waits]
    return {
        "day": day.name,
        "loss": float(training.loss(states[0].reference, training.test)),
        "same": all(
            np.array_equal(a, b)
            for state in states[1:]
            for a, b in zip(*map(jax.tree.leaves, (state[1:3], states[0][1:3])), strict=True)
        ),
        "without": sum("d" not in each.members for each in decisions),
        "decided": len(decisions),
        "longest": max(others),
        "waited": sum(wait for wait in others if wait > config.deadline / 2) / (len(NAMES) - 1),
        "shown": [*shown, *(f"scaled by {factor:.2g}" for factor in clipped)],
    }


COLUMNS = (
    Column("day", "day"),
    Column("loss", "loss", "{:.5f}"),
    Column("rounds without d", "without", "{:d}"),
    Column("longest exchange", "longest", "{:.1f} s"),
    Column("same bits", "same", "{}"),
    Column("shown", lambda row: "; ".join(row["shown"])[:60]),
)


@benchmark("islands_bad_days")
def main(config: Config) -> Iterator[Report]:
    """Live through every kind of day."""
    training, rows = Training(), list[dict[str, Any]]()
    lived(training, dataclasses.replace(config, rounds=12), DAYS[0])  # compiles
    for day in DAYS:
        rows.append(lived(training, config, day))
        yield Report(results=rows, shown=[table("Bad days of one island of four", COLUMNS, rows)])


if __name__ == "__main__":
    run(main, __doc__)
