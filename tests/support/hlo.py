"""Compiled programs: their collectives, and the bytes that these send.

A second parser beside that of `dynamiq_jax._inspection`, written apart from it: each is the oracle
of the other.
"""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods import Method
from dynamiq_jax.topologies import Topology
from tests.support import states
from tests.support.workers import first

SIZE = 4 << 20
ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2}
ITEM_BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8}
KINDS = ("collective-permute", "all-to-all", "all-gather", "all-reduce", "reduce-scatter")

PRESETS = {
    "default": dq.DynamiQ(),
    "paper": dq.DynamiQ.paper(),
    "bf16": dq.methods.BF16(),
    "exact": dq.methods.Exact(),
}
# One leaf that is compressed and, beside it, all that is not.
TREE = {
    "w": jax.ShapeDtypeStruct((1024, SIZE // 1024), jnp.float32),
    "bias": jax.ShapeDtypeStruct((512,), jnp.float32),
    "norm": jax.ShapeDtypeStruct((64,), jnp.bfloat16),
    "steps": jax.ShapeDtypeStruct((8,), jnp.int32),
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program."""

    kind: str
    dtypes: frozenset[str]
    result_bytes: int
    looped: bool  # inside the body of a while

    def sent_bytes(self, n: int) -> float:
        """Bytes that each of n workers sends, the whole program long."""
        share = {
            "collective-permute": 1,
            "all-to-all": (n - 1) / n,
            "all-gather": (n - 1) / n,
            "all-reduce": 2 * (n - 1) / n,
            "reduce-scatter": n - 1,
        }[self.kind]
        return self.result_bytes * share * (n - 1 if self.looped else 1)


def collectives(hlo: str) -> list[Collective]:
    """The collectives of an HLO module, with those of loop bodies marked.

    A ring's loop runs n - 1 times, and nothing else here loops over a collective.
    """
    computations, name = {}, None
    for line in hlo.splitlines():
        opening = re.match(r"\s*(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{", line)
        if opening:
            name = opening.group(1)
        computations.setdefault(name, []).append(line)
    bodies = set(re.findall(r"body=%?([\w.\-]+)", hlo))
    callers = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
    looped, frontier = set(bodies), list(bodies)
    while frontier:
        called = set(callers.findall("\n".join(computations.get(frontier.pop(), ())))) - looped
        looped |= called
        frontier += called
    found = []
    pattern = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(")
    for name, lines in computations.items():
        for match in filter(None, map(pattern.search, lines)):
            arrays = re.findall(r"(\w+)\[([\d,]*)\]", match.group(1))
            size = sum(
                ITEM_BYTES[dtype] * int(np.prod([int(d) for d in dims.split(",") if d]))
                for dtype, dims in arrays
            )
            kind, dtypes = match.group(2), frozenset(dtype for dtype, _ in arrays)
            found.append(Collective(kind, dtypes, size, name in looped))
    return found


def compiled_collectives(
    mesh, tree, method: Method, topology: Topology | str = "ring"
) -> list[Collective]:
    """The collectives of a mean over the axis "data" of a mesh."""

    def local(key, stacked):
        method_on = dq.Compression(method, topology)
        return dq.pmean(first(stacked), "data", key=key, method=method_on)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    lowered = jax.jit(mapped).lower(jax.random.key(0), _stacked(tree, mesh.size))
    return collectives(lowered.compile().as_text())


def sent_bytes(mesh, tree, method: Method, topology: str) -> float:
    """Bytes of each worker in the compiled program of a step, from a state to the next one."""
    reduce = dq.all_reduce_gradients("data", method=dq.Compression(method, topology))
    init, update = states.on_mesh(reduce, mesh)
    arguments = _stacked(tree, mesh.size), jax.eval_shape(init, tree)
    found = collectives(update.lower(*arguments).compile().as_text())
    return sum(c.sent_bytes(mesh.size) for c in found)


def _stacked(tree, num_workers: int):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((num_workers, *leaf.shape), leaf.dtype), tree
    )


def unordered(hlo: str) -> list[tuple[str, str]]:
    """Pairs of a loop or branch with collectives and another instruction with some, of which
    neither needs the other's result: XLA may run them in any order, or at once.
    """
    computations: dict[str, dict[str, set[str]]] = {}  # instruction to all words behind its name
    sending: set[str] = set()  # instructions that are collectives, or call some
    for line in hlo.splitlines():
        opening = re.match(r"\s*(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{", line)
        instruction = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)", line)
        if opening:
            body = computations.setdefault(opening.group(1), {})
        elif instruction:
            name, text = instruction.group(1), instruction.group(2).partition(", metadata={")[0]
            body[name] = set(re.findall(r"[\w.\-]+", text))
            if re.search(rf" (?:{'|'.join(KINDS)})(?:-start)?\(", text):
                sending.add(name)
    plain = frozenset(sending)
    called: set[str] = set()  # computations that hold collectives
    while grown := {n for n, body in computations.items() if sending & {*body}} - called:
        called |= grown
        sending |= {n for body in computations.values() for n in body if body[n] & called}
    pairs = []
    for body in computations.values():
        needed: dict[str, set[str]] = {}  # operands come before the instructions that use them
        for name, words in body.items():
            operands = words & needed.keys()
            needed[name] = operands.union(*(needed[operand] for operand in operands))
        pairs += [
            (first, second)
            for first, second in itertools.combinations([n for n in body if n in sending], 2)
            if first not in needed[second]
            and second not in needed[first]
            and not {first, second} <= plain
        ]
    return pairs
