"""What every topology owes, whatever it carries: each worker's values once, each turn once."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dynamiq_jax as dq
from dynamiq_jax.topologies import AllToAll, Butterfly, Ring, Topology
from tests.support.gradients import of_workers, vnmse
from tests.support.workers import TWO_CLASSES, on_mesh, simulated

TOPOLOGIES = {
    "ring": Ring(),
    "bidirectional": Ring(bidirectional=True),
    "unrolled": Ring(unroll=True),
    "butterfly": Butterfly(),
    "all_to_all": AllToAll(),
}
SUPPORTED = [
    (name, n)
    for name in TOPOLOGIES
    for n in (2, 3, 4, 5, 8, 16)
    if name != "butterfly" or n & (n - 1) == 0
]
every_size = pytest.mark.parametrize(("name", "n"), SUPPORTED)
KEY = jax.random.key(3)


@dataclasses.dataclass(frozen=True)
class Counted:
    """A codec that counts: which workers a partial sum holds, which turns it took, how many in a
    row, and of how many workers each compressed sum was.
    """

    n: int
    chunks: int

    def compress(self, chunk, turn):
        return self._payload(self._zero(), chunk, turn)

    def hop(self, payloads, chunk, turn):
        return self._payload(payloads, chunk, turn)

    def accumulate(self, payloads, chunk):
        workers = self._local(payloads, chunk)["workers"]
        return jnp.append(workers, chunk).astype(jnp.float32)

    def for_sums(self, num_workers):
        return self

    def decompress(self, payloads):
        names = ("workers", "turns", "chunk", "depth", "sizes")
        flat = [payloads[name] for name in names]
        return jnp.concatenate([leaf.reshape(self.chunks, -1) for leaf in flat], axis=1)

    def _zero(self):
        zeros = jnp.zeros((1, self.n), jnp.int32)
        return {
            "workers": zeros,
            "turns": zeros,
            "sizes": zeros,
            "depth": zeros[:, :1],
            "chunk": zeros[:, :1] - 1,
        }

    def _local(self, payloads, chunk):
        own = jax.nn.one_hot(lax.axis_index("data"), self.n, dtype=jnp.int32)
        received, expected = payloads["chunk"], jnp.asarray(chunk, jnp.int32)
        right = jnp.all((received == expected) | (received == -1))
        return {
            "workers": jnp.where(right, payloads["workers"].sum(0) + own, -1),
            "turns": payloads["turns"].sum(0),
            "sizes": payloads["sizes"].sum(0),
            "depth": payloads["depth"].max(0),
        }

    def _payload(self, payloads, chunk, turn):
        local = self._local(payloads, chunk)
        turns = local["turns"] + jax.nn.one_hot(turn, self.n, dtype=jnp.int32)
        sizes = local["sizes"] + jax.nn.one_hot(local["workers"].sum() - 1, self.n, dtype=jnp.int32)
        return {
            "workers": local["workers"],
            "turns": turns,
            "sizes": sizes,
            "depth": local["depth"] + 1,
            "chunk": jnp.full((1,), chunk, jnp.int32),
        }


def run_counted(topology: Topology, n: int, *, scatter: bool = False):
    codec = Counted(n, topology.num_chunks(n))

    def run(codec, axis_name, n):
        if scatter:
            return topology.reduce_scatter(codec, axis_name, n)
        return topology.all_reduce(codec, axis_name, n).decode()

    return jax.jit(
        jax.vmap(lambda _: run(codec, "data", n), axis_name="data", axis_size=n, in_axes=None)
    )(0)


@every_size
def test_every_chunk_holds_every_worker_once_and_every_turn_is_taken_once(name, n):
    topology = TOPOLOGIES[name]
    result = np.asarray(run_counted(topology, n))
    chunks = topology.num_chunks(n)
    assert result.shape == (n, chunks, 3 * n + 2)
    assert (result == result[0]).all()
    cuts = (n, 2 * n, 2 * n + 1, 2 * n + 2)
    workers, turns, owner, depth, sizes = np.split(result[0], cuts, axis=1)
    np.testing.assert_array_equal(workers, 1)
    np.testing.assert_array_equal(turns, 1)
    np.testing.assert_array_equal(owner[:, 0], np.arange(chunks))
    longest = {"butterfly": n.bit_length(), "all_to_all": 2}.get(name, n)
    np.testing.assert_array_equal(depth, longest)
    expected = np.zeros(n)
    for count, workers_in_sum in topology.compressions(n):
        expected[workers_in_sum - 1] += count
    np.testing.assert_array_equal(sizes, np.broadcast_to(expected, (chunks, n)))


class Timed:
    """A codec that notes at which turn each worker compresses a chunk, for topologies of n."""

    def __init__(self, n):
        self.n = n

    def compress(self, chunk, turn):
        return self._noted(jnp.zeros(self.n, jnp.int32), turn)

    def hop(self, payloads, chunk, turn):
        return self._noted(payloads.sum(0), turn)

    def for_sums(self, num_workers):
        return self

    def decompress(self, payloads):
        return payloads

    def _noted(self, turns, turn):
        return turns.at[lax.axis_index("data")].set(jnp.asarray(turn, jnp.int32))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_turns_are_those_of_the_wire_format(name):
    n, topology = 8, TOPOLOGIES[name]
    turns = jax.vmap(
        lambda _: topology.all_reduce(Timed(n), "data", n).decode(),
        axis_name="data",
        axis_size=n,
        in_axes=None,
    )(0)[0]
    chunk, worker = np.indices(turns.shape)
    owner = chunk // topology.chunks_per_worker
    forward, backward = (worker - owner - 1) % n, (owner - worker - 1) % n
    expected = {
        "bidirectional": np.where(chunk % 2 == 0, forward, backward),
        "butterfly": n - 1 - (worker ^ owner),
        "all_to_all": backward,
    }.get(name, forward)
    np.testing.assert_array_equal(turns, expected)


@every_size
def test_a_reduce_scatter_ends_with_the_own_chunks(name, n):
    topology = TOPOLOGIES[name]
    result = np.asarray(run_counted(topology, n, scatter=True))
    workers, chunk = np.split(result.reshape(topology.num_chunks(n), n + 1), (n,), axis=1)
    np.testing.assert_array_equal(workers, 1)
    np.testing.assert_array_equal(chunk[:, 0], np.arange(topology.num_chunks(n)))


@every_size
def test_sums_are_right_for_every_number_of_workers(name, n):
    gradients = of_workers(n, n, 3000)

    def local(key, g):
        return dq.psum(g, "data", key=key, method="exact", topology=TOPOLOGIES[name])

    result = np.asarray(simulated(local)(KEY, gradients))
    assert (result == result[0]).all()
    np.testing.assert_allclose(
        result[0], gradients.sum(axis=0, dtype=np.float64), atol=1e-6 * np.abs(gradients).max() * n
    )


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("check_vma", (True, False), ids=("vma", "no_vma"))
def test_a_mesh_gives_the_bits_of_the_simulation(data_mesh, name, check_vma):
    gradients = of_workers(0, 4, 20_000)

    def local(key, g):
        return dq.psum(g, "data", key=key, method=TWO_CLASSES, topology=TOPOLOGIES[name])

    result = on_mesh(local, data_mesh(4), check_vma=check_vma)(KEY, gradients)
    np.testing.assert_array_equal(result, simulated(local)(KEY, gradients))


@pytest.mark.parametrize("bidirectional", (False, True))
def test_an_unrolled_ring_is_the_ring_without_a_loop(bidirectional):
    n = 5

    def loops(topology):
        codec = Counted(n, topology.num_chunks(n))
        run = jax.vmap(lambda _: topology.all_reduce(codec, "data", n).decode(), axis_name="data")
        return jax.jit(run).lower(jnp.zeros(n)).as_text().count("stablehlo.while")

    assert loops(Ring(bidirectional=bidirectional)) == 1
    assert loops(Ring(bidirectional=bidirectional, unroll=True)) == 0


@pytest.mark.parametrize(("n", "sizes"), ((3, "2 or 4"), (6, "4 or 8"), (12, "8 or 16")))
def test_a_butterfly_says_which_sizes_it_supports(n, sizes):
    message = re.escape(
        f"topology=Butterfly() does not support an axis of {n} workers. Give an axis of a size "
        f"that it supports, such as {sizes}, or topology='ring' or 'all_to_all'"
    )
    with pytest.raises(ValueError, match=message):
        dq.wire_report({"w": jax.ShapeDtypeStruct((4096,), jnp.float32)}, n, topology="butterfly")
    gradients = of_workers(0, n, 2000)
    with pytest.raises(ValueError, match=message):
        simulated(lambda key, g: dq.psum(g, "data", key=key, topology="butterfly"))(KEY, gradients)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewSizes(Ring):
    """A ring that overrides `supports`, and nothing else."""

    sizes: tuple[int, ...]

    def supports(self, num_workers: int) -> bool:
        return num_workers in self.sizes


@pytest.mark.parametrize(
    ("sizes", "named"),
    (
        ((3, 20), "a size that it supports, such as 3, or topology="),
        ((4, 5, 7), "a size that it supports, such as 5 or 7, or topology="),
        ((), "6 workers. Give topology='ring' or 'all_to_all', which support every size."),
    ),
)
def test_to_override_supports_is_enough_to_refuse_a_size(sizes, named):
    """Whatever asks: `supports` and `check` cannot disagree."""
    topology = FewSizes(sizes=sizes)
    for n in range(2, 10):
        if topology.supports(n):
            topology.check(n)
            continue
        with pytest.raises(ValueError, match=rf"FewSizes\(.* does not support an axis of {n} "):
            topology.check(n)
    with pytest.raises(ValueError, match=re.escape(named)):
        simulated(lambda key, g: dq.psum(g, "data", key=key, topology=topology))(
            KEY, of_workers(0, 6, 2000)
        )


@functools.cache
def error_of(topology: str, rounding: str) -> float:
    gradients = of_workers(5, 16, 40_000)
    truth = gradients.sum(axis=0, dtype=np.float64)
    method = dataclasses.replace(TWO_CLASSES, rounding=rounding)

    def local(key, g):
        return dq.psum(g, "data", key=key, method=method, topology=TOPOLOGIES[topology])

    run = simulated(local)
    keys = [jax.random.key(i) for i in range(4)]
    return float(np.mean([vnmse(run(key, gradients)[0], truth) for key in keys]))


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ("correlated", "independent"))
def test_shorter_paths_have_smaller_errors(rounding):
    """16 workers: ring, butterfly, all-to-all take 16, 5 and 2 compressions."""
    ring, butterfly, all_to_all = (
        error_of(name, rounding) for name in ("ring", "butterfly", "all_to_all")
    )
    assert 0.15 < butterfly / ring < 0.75
    assert 0.1 < all_to_all / ring < 0.5
    assert all_to_all < butterfly
