"""The soak: its rounds are those of their seeds, and it finds hashes that differ."""

import dataclasses

import pytest

from tests.soak.programs import COMPRESS, random_round
from tests.soak.rounds import REFERENCE, RunningRound, replicas

SEEDS = range(200)


def test_a_seed_gives_one_round():
    assert all(random_round(seed) == random_round(seed) for seed in SEEDS)
    assert len({str(random_round(seed).programs) for seed in SEEDS}) == len(SEEDS)


def test_rounds_have_all_that_the_soak_is_for():
    rounds = [random_round(seed) for seed in SEEDS]
    programs = [program for each in rounds for program in each.programs]
    collectives = [each for program in programs for each in program.collectives]
    assert {(each.processes, each.devices) for each in rounds} == {(2, 1), (2, 2), (3, 1), (3, 2)}
    assert {len(program.collectives) for program in programs} == {2, 3, 4}
    assert {each.topology for each in collectives} == {
        *("ring", "ring:unroll=True", "butterfly", "all_to_all")
    }
    assert {each.after is None for each in collectives} == {True, False}
    assert {each.signal for r in rounds if (each := r.kill)} == {"SIGKILL", "SIGTERM"}
    assert {each.kill is None for each in rounds} == {each.threads for each in rounds}
    assert COMPRESS in {each.kind for each in collectives}
    before = [each.kind for program in programs for each in program.collectives[:-1]]
    assert COMPRESS not in before


def ended(tmp_path) -> RunningRound:
    """Return a round whose processes have ended with the same hashes."""
    round_ = next(
        each
        for each in map(random_round, SEEDS)
        if each.devices == 2 and any(len(program.mesh) == 2 for program in each.programs)
    )
    running = RunningRound(dataclasses.replace(round_, kill=None), tmp_path, patience=1)
    for number, program in enumerate(round_.programs):
        for place in range(len(program.collectives)):
            groups = replicas(program, place, round_) or [[w] for w in range(round_.workers)]
            digest = {worker: str(n) for n, group in enumerate(groups) for worker in group}
            every = [digest[worker] for worker in range(round_.workers)]
            of_result = running.hashes.setdefault((number, f"result {place}"), {})
            of_result[REFERENCE] = every
            of_result |= {
                name: every[2 * rank : 2 * rank + 2] for rank, name in enumerate(running.names)
            }
    return running


def test_equal_hashes_are_no_problem(tmp_path):
    running = ended(tmp_path)
    running.compare()
    assert (running.problems, running.counts.differ) == ([], 0)
    assert running.counts.hashes == running.round.workers * running.counts.collectives > 0


@pytest.mark.parametrize("who", (REFERENCE, "process 1"))
def test_one_hash_that_differs_is_found(who, tmp_path):
    running = ended(tmp_path)
    running.hashes[0, "result 0"][who] = ["other"] * len(running.hashes[0, "result 0"][who])
    running.compare()
    assert running.counts.differ > 0
    assert all("program 0, result 0 differs" in problem for problem in running.problems)
