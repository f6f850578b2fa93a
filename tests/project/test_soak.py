"""The soak: its rounds are those of their seeds, and it finds hashes that differ."""

import pytest

from tests.soak.__main__ import differences, replicas
from tests.soak.programs import COMPRESS, random_round

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
    assert COMPRESS in {each.kind for each in collectives}
    before = [each.kind for program in programs for each in program.collectives[:-1]]
    assert COMPRESS not in before


ROUND = next(
    each
    for each in map(random_round, SEEDS)
    if each.devices == 2 and any(len(program.mesh) == 2 for program in each.programs)
)


def ended() -> dict[tuple[int, str], list[str]]:
    """Return hashes of all workers in which no replicas differ."""
    hashes = {}
    for number, program in enumerate(ROUND.programs):
        for place in range(len(program.collectives)):
            groups = replicas(program, place, ROUND) or [[w] for w in range(ROUND.workers)]
            of_worker = {worker: str(n) for n, group in enumerate(groups) for worker in group}
            hashes[number, f"result {place}"] = [of_worker[w] for w in range(ROUND.workers)]
    return hashes


def of_processes() -> list[dict[tuple[int, str], list[str]]]:
    return [
        {name: digests[first : first + 2] for name, digests in ended().items()}
        for first in range(0, ROUND.workers, 2)
    ]


def test_equal_hashes_are_no_problem():
    assert list(differences(ROUND, of_processes(), ended())) == []


@pytest.mark.parametrize("who", ("one", "another"))
def test_one_hash_that_differs_is_found(who):
    found, alone = of_processes(), ended()
    (alone if who == "one" else found[1])[0, "result 0"][0] = "other"
    problems = list(differences(ROUND, found, alone))
    assert problems and all("program 0, result 0 differs" in each for each in problems)
