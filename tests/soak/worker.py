"""One process of a round, which returns hashes of what all of its programs end with."""

import faulthandler
import functools
import hashlib
import time
from typing import Any

import jax
import numpy as np

from tests.soak.programs import random_round
from tests.soak.steps import Step, another

Hashes = dict[tuple[int, str], list[str]]  # by program and result, of each device of this process


def run(rank: int, seed: int, patience: float) -> Hashes:
    """Run the programs of a round, whose processes may be fewer than it has: with the devices of
    all, a single one gives the bits to expect.

    After `patience` seconds without a step, it writes the stacks of all threads and ends.
    """
    round_ = random_round(seed)
    is_whole = jax.process_count() == round_.processes
    goes_on = functools.partial(faulthandler.dump_traceback_later, patience, exit=True)
    found: Hashes = {}
    for number, program in enumerate(round_.programs):
        goes_on()
        if is_whole and program.alone == rank:  # as for a log
            Step(another(program), round_.processes).compile()
        step = Step(program, round_.processes)
        step.compile()
        pauses = {at: seconds for who, at, seconds in program.pauses if is_whole and who == rank}
        state = step.start(step.values, step.weights)
        for index in range(program.steps):
            goes_on()
            time.sleep(pauses.get(index, 0))
            state = step.run(state, step.values, step.weights, np.int32(index))
            if (index + 1) % program.wait_every == 0:
                jax.block_until_ready(state)
        for kind, trees in (("result", state["sums"]), ("state", state["states"])):
            for place, tree in enumerate(trees):
                found[number, f"{kind} {place}"] = _hashes(tree)
    faulthandler.cancel_dump_traceback_later()
    return found


def _hashes(tree: Any) -> list[str]:
    """Return a hash of the rows of each device, in the order of the workers."""
    digests = [hashlib.sha256() for _ in jax.local_devices()]
    for leaf in jax.tree.leaves(tree):
        shards = sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        for digest, shard in zip(digests, shards, strict=True):
            rows = np.asarray(shard.data)
            assert np.isfinite(rows.astype(np.float64)).all()
            digest.update(rows.tobytes())
    return [digest.hexdigest() for digest in digests]
