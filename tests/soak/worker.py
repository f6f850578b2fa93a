"""One process of a round, by `python -m tests.soak.worker`.

Its arguments are ROUND PORT RANK PROCESSES FOLDER PROGRAM STEP. It runs the programs of a round
from PROGRAM on, the first of them from the checkpoint of STEP in FOLDER. A single process has the
devices of all, and gives the bits to expect. Each line of its standard output is a JSON object: an
event. SIGUSR1 writes the stacks of all threads to its standard error.
"""

import faulthandler
import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.emulation.processes import die_with_parent
from tests.soak.programs import Program, Round, random_round
from tests.soak.steps import Step, another

Tree = Any


class Worker:
    """A process and its part of a round."""

    def __init__(self, rank: int, round_: Round, folder: Path, is_reference: bool):
        self.rank, self.round, self.folder = rank, round_, folder
        self.is_reference = is_reference

    def tell(self, **event: Any) -> None:
        print(json.dumps(event), flush=True)

    def run(self, first: int, step: int) -> None:
        ready: dict[int, Step] = {}
        for number in range(first, len(self.round.programs)):
            program = self.round.programs[number]
            self.tell(event="program", program=number)
            if number not in ready:
                self._trace_alone(program)
                pair = self.round.threads and number == 0 and len(self.round.programs) > 1
                together = [0, 1] if pair else [number]
                ready |= self._compiled(together)
            self._run_program(number, ready.pop(number), step if number == first else 0)
        self.tell(event="end")

    def _compiled(self, numbers: list[int]) -> dict[int, Step]:
        """Trace and compile programs, each in a thread of its own if there are several."""
        steps = {n: Step(self.round.programs[n], self.round.processes) for n in numbers}
        if len(numbers) == 1:
            steps[numbers[0]].compile()
            return steps
        errors: list[BaseException] = []

        def compiled(step: Step) -> None:
            try:
                step.compile()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=compiled, args=(step,)) for step in steps.values()]
        for thread in threads[:: -1 if self.rank % 2 else 1]:  # in no order that processes share
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return steps

    def _trace_alone(self, program: Program) -> None:
        """Trace a step that no other process traces, as for a log."""
        if program.alone == self.rank and not self.is_reference:
            Step(another(program), self.round.processes).compile()

    # ------------------------------------------------------------------------------------ steps

    def _run_program(self, number: int, step: Step, first: int) -> None:
        state = step.start(step.values, step.weights)
        fresh = state
        if first:
            state = self._restored(number, first, state)
        state = self._steps(number, step, state, first, is_again=False)
        hashes = self._hashes(state)
        self.tell(event="done", program=number, hashes=hashes)
        if first:  # as if nothing had happened
            again = self._steps(number, step, fresh, 0, is_again=True)
            self.tell(event="again", program=number, hashes=self._hashes(again))

    def _steps(self, number: int, step: Step, state: Tree, first: int, *, is_again: bool) -> Tree:
        program = step.program
        pauses: dict[int, float] = {}
        if not is_again and not self.is_reference:
            pauses = {at: seconds for rank, at, seconds in program.pauses if rank == self.rank}
        for index in range(first, program.steps):
            time.sleep(pauses.get(index, 0))
            self.tell(event="step", program=number, step=index)
            state = step.run(state, step.values, step.weights, np.int32(index))
            if (index + 1) % program.wait_every == 0:
                jax.block_until_ready(state)
            if (index + 1) % program.save_every == 0 and not is_again and not self.is_reference:
                self._save(number, index + 1, state)
        return jax.block_until_ready(state)

    def _hashes(self, state: Tree) -> dict[str, list[str]]:
        """Return hashes by collective, of each device of this process."""
        named = {f"result {n}": tree for n, tree in enumerate(state["sums"])}
        named |= {f"state {n}": tree for n, tree in enumerate(state["states"])}
        found: dict[str, list[str]] = {}
        for name, tree in named.items():
            digests = [hashlib.sha256() for _ in jax.local_devices()]
            for leaf in jax.tree.leaves(tree):
                for digest, rows in zip(digests, _own_rows(leaf), strict=True):
                    if not np.isfinite(rows.astype(np.float64)).all():
                        self.tell(event="not finite", name=name)
                    digest.update(rows.tobytes())
            found[name] = [digest.hexdigest()[:16] for digest in digests]
        return found

    # ------------------------------------------------------------------------------ checkpoints

    def _path(self, number: int, step: int) -> Path:
        return self.folder / f"{number}.{step}.{self.rank}.npz"

    def _save(self, number: int, step: int, state: Tree) -> None:
        leaves = [np.stack(_own_rows(leaf)) for leaf in jax.tree.leaves(state)]
        leaves = [leaf.view(np.uint8) for leaf in leaves]
        path = self._path(number, step)
        partial = path.with_suffix(".partial")
        with open(partial, "wb") as file:
            np.savez(file, *leaves)
        partial.replace(path)  # whole or not there

    def _restored(self, number: int, step: int, like: Tree) -> Tree:
        with np.load(self._path(number, step)) as saved:
            own = [saved[name] for name in saved.files]

        def restored(leaf: jax.Array, saved: np.ndarray) -> jax.Array:
            rows = saved.view(leaf.dtype)
            return jax.make_array_from_process_local_data(leaf.sharding, rows, leaf.shape)

        leaves, structure = jax.tree.flatten(like)
        return structure.unflatten(map(restored, leaves, own))


def _own_rows(leaf: jax.Array) -> list[np.ndarray]:
    """Return the rows of the devices of this process, in the order of the workers."""
    shards = sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return [np.asarray(shard.data)[0] for shard in shards]


def main(
    number: int, port: str, rank: int, processes: int, folder: Path, program: int, step: int
) -> None:
    round_ = random_round(number)
    is_reference = processes < round_.processes
    jax.config.update("jax_num_cpu_devices", round_.workers // processes)
    # A process that restarts has the programs of the one that was killed.
    jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if not is_reference:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{port}",
            processes,
            rank,
            initialization_timeout=120,
            shutdown_timeout_seconds=10,
        )
    Worker(rank, round_, folder, is_reference).run(program, step)
    if not is_reference:
        jax.distributed.shutdown()


if __name__ == "__main__":
    if sys.platform == "linux":
        die_with_parent(os.getppid())
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    number, port, rank, processes, folder, program, step = sys.argv[1:]
    main(int(number), port, int(rank), int(processes), Path(folder), int(program), int(step))
