"""Random rounds: programs of two to four collectives, and pauses, all made of one seed."""

import dataclasses
import random

METHODS = (
    *("dynamiq:5", "dynamiq:4:widths=2,4,8", "dynamiq:6:widths=4,8"),
    *("bf16", "mxfp8", "mxfp4", "blockint", "exact"),
)
STATEFUL = ("ef+mxfp4", "ef+dynamiq:6:widths=4,8", "ef+blockint", "ef+bf16")
REDUCTIONS = ("psum", "pmean", "all_reduce_gradients")
HALVES = ("psum_scatter", "all_gather")
COMPRESS = "compress"  # of a global function: it stands behind the others, which share a shard_map
KINDS = (*REDUCTIONS, "pmean", "all_reduce_gradients", *HALVES)
DTYPES = ("float32", "float32", "float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a tree. The leading dimension is divided by the number of workers."""

    rows: int  # for each worker
    columns: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Collective:
    """One call of a function of `dynamiq_jax`."""

    kind: str
    axes: tuple[str, ...]
    method: str
    topology: str
    leaves: tuple[Leaf, ...]
    after: int | None  # the collective whose result changes the values of this one
    bucket_bytes: int
    bucketing: str
    unrolled_buckets: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted step of several collectives, and how often and how unevenly it runs."""

    seed: int  # of values and keys
    collectives: tuple[Collective, ...]
    mesh: tuple[str, ...]  # axes
    check_vma: bool
    steps: int
    wait_every: int  # steps that are dispatched before a process waits for their results
    # (process, step, seconds): before that step, the process sleeps.
    pauses: tuple[tuple[int, int, float], ...]
    alone: int | None  # the process that also traces another step, which none runs


@dataclasses.dataclass(frozen=True)
class Round:
    """Programs that the same processes run, one after the other."""

    seed: int
    processes: int
    devices: int  # of each process
    programs: tuple[Program, ...]

    @property
    def workers(self) -> int:
        return self.processes * self.devices


def random_round(seed: int) -> Round:
    """Make a round: the same seed gives the same round."""
    choice = random.Random(seed)
    processes = choice.choice((2, 2, 3))
    devices = choice.choice((1, 2, 2))
    programs = tuple(
        _random_program(choice, processes, devices) for _ in range(choice.randint(1, 3))
    )
    return Round(seed, processes, devices, programs)


def _random_program(choice: random.Random, processes: int, devices: int) -> Program:
    nested = devices > 1 and choice.random() < 0.4
    mesh = ("hosts", "local") if nested else ("data",)
    sizes = {"data": processes * devices, "hosts": processes, "local": devices}
    number = choice.randint(2, 4)
    kinds = [choice.choice(KINDS) for _ in range(number)]
    if choice.random() < 0.25:
        kinds[-1] = COMPRESS
    collectives = []
    for place, kind in enumerate(kinds):
        after = choice.randrange(place) if place and choice.random() < 0.4 else None
        collectives.append(_random_collective(choice, kind, mesh, sizes, after))
    steps = choice.randint(6, 40)
    pauses = [
        (choice.randrange(processes), choice.randrange(steps), choice.uniform(0.01, 0.6))
        for _ in range(choice.randint(0, 3))
    ]
    if choice.random() < 0.2:  # late for the whole program
        pauses.append((choice.randrange(processes), 0, choice.uniform(1.0, 3.0)))
    return Program(
        seed=choice.randrange(2**31),
        collectives=tuple(collectives),
        mesh=mesh,
        check_vma=choice.random() < 0.5,
        steps=steps,
        wait_every=choice.choice((1, 1, 3)),
        pauses=tuple(pauses),
        alone=choice.randrange(processes) if choice.random() < 0.05 else None,
    )


def _random_collective(
    choice: random.Random,
    kind: str,
    mesh: tuple[str, ...],
    sizes: dict[str, int],
    after: int | None,
) -> Collective:
    if len(mesh) == 1:
        axes = mesh
    elif kind in HALVES:
        axes = (choice.choice(mesh),)
    else:
        axes = mesh if kind == COMPRESS else choice.choice((mesh, mesh, mesh[:1]))
    workers = sizes[axes[0]]
    topologies = ["ring", "all_to_all", "ring:unroll=True"]
    if workers & (workers - 1) == 0:
        topologies.append("butterfly")
    keeps_states = kind == "all_reduce_gradients"
    methods = (*STATEFUL, *STATEFUL, *METHODS) if keeps_states else METHODS
    leaves = [_random_leaf(choice) for _ in range(choice.randint(1, 3))]
    leaves += [Leaf(1, choice.randint(1, 9), "float32")] * choice.randint(0, 1)  # exact
    return Collective(
        kind=kind,
        axes=axes,
        method=choice.choice(methods),
        topology=choice.choice(topologies),
        leaves=tuple(leaves),
        after=after,
        bucket_bytes=choice.choice((4096, 16384, 2**27)),
        bucketing=choice.choice(("auto", "striped", "in_order")),
        unrolled_buckets=choice.choice((0, 1, 8)),
    )


def _random_leaf(choice: random.Random) -> Leaf:
    rows, columns = choice.choice(((16, 96), (6, 200), (8, 160), (1, 1100), (32, 60)))
    return Leaf(rows, columns, choice.choice(DTYPES))
