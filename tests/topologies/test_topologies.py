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
from benchmarks.error import rounding_bias
from dynamiq_jax._measurement.gradients import worker_gradients
from dynamiq_jax.methods import Axis, Call, ChunkCodec
from dynamiq_jax.topologies import AllToAll, Butterfly, Ring
from tests.support.gradients import of_workers, vnmse
from tests.support.hlo import collectives
from tests.support.workers import TWO_WIDTHS, mesh_program, simulated

TOPOLOGIES = {
    "ring": Ring(),
    "unrolled": Ring(unroll=True),
    "butterfly": Butterfly(),
    "all_to_all": AllToAll(),
}
SIZES = {
    "ring": (2, 3, 4, 5, 8),
    "unrolled": (2, 5),
    "butterfly": (2, 4, 8),
    "all_to_all": (2, 3, 5, 8),
}
every_size = pytest.mark.parametrize(
    ("name", "n"), [(name, n) for name, sizes in SIZES.items() for n in sizes]
)
KEY = jax.random.key(3)
COUNTS = ("workers", "turns", "sizes")  # of each worker, of the codec that counts


@dataclasses.dataclass(frozen=True)
class Counted(ChunkCodec):
    """A codec that counts: the workers in a partial sum, the turns of their compressions, how many
    of these are in a row, and of how many workers each compressed sum was.
    """

    n: int
    chunks: int

    def compress(self, chunk, turn):
        zeros = jnp.zeros((1, self.n), jnp.int32)
        counts = dict.fromkeys(COUNTS, zeros)
        return self.hop({**counts, "depth": zeros[:, :1], "chunk": zeros[:, :1] - 1}, chunk, turn)

    def hop(self, payloads, chunk, turn):
        received, expected = payloads["chunk"], jnp.asarray(chunk, jnp.int32)
        right = jnp.all((received == expected) | (received == -1))
        own, turn = self._one_hot(lax.axis_index("data")), jnp.asarray(turn, jnp.int32)
        sums = {name: payloads[name].sum(0, dtype=jnp.int32) for name in COUNTS}
        workers = jnp.where(right, sums["workers"] + own, -1)
        return {
            "workers": workers,
            "turns": sums["turns"] + turn * own,
            "sizes": sums["sizes"] + self._one_hot(workers.sum() - 1),
            "depth": payloads["depth"].max(0) + 1,
            "chunk": jnp.full((1,), chunk, jnp.int32),
        }

    def accumulate(self, payloads, chunk):
        workers = self.hop(payloads, chunk, 0)["workers"]
        return jnp.append(workers, chunk).astype(jnp.float32)

    def decompress(self, payloads):
        flat = [payloads[name] for name in (*COUNTS, "chunk", "depth")]
        return jnp.concatenate([leaf.reshape(self.chunks, -1) for leaf in flat], axis=1)

    def rounded(self, turn):
        raise NotImplementedError("no topology asks for it")

    def _one_hot(self, place):
        return jax.nn.one_hot(place, self.n, dtype=jnp.int32)


def on_workers(n: int, fn):
    """What a function of the axis returns on each of n workers."""
    mapped = jax.vmap(lambda _: fn(Axis("data", n)), axis_name="data", axis_size=n, in_axes=None)
    return jax.jit(mapped)(0)


def turns_of(name: str, chunks: int, n: int) -> np.ndarray:
    """Turns of the wire format, [chunks, workers]."""
    chunk, worker = np.indices((chunks, n))
    return {"butterfly": n - 1 - (worker ^ chunk), "all_to_all": (chunk - worker - 1) % n}.get(
        name, (worker - chunk - 1) % n
    )


@pytest.mark.sampled(2)
@every_size
def test_every_chunk_holds_every_worker_once_and_every_turn_is_that_of_the_wire_format(name, n):
    topology = TOPOLOGIES[name]
    chunks, codec = n, Counted(n, n)

    def both(axis):
        return topology.all_reduce(codec, axis).decode(), topology.reduce_scatter(codec, axis)

    result, scattered = jax.tree.map(np.asarray, on_workers(n, both))
    assert result.shape == (n, chunks, 3 * n + 2)
    assert (result == result[0]).all()
    cuts = (n, 2 * n, 3 * n, 3 * n + 1)
    workers, turns, sizes, owner, depth = np.split(result[0], cuts, axis=1)
    np.testing.assert_array_equal(workers, 1)
    np.testing.assert_array_equal(turns, turns_of(name, chunks, n))
    np.testing.assert_array_equal(np.sort(turns, axis=1), np.tile(np.arange(n), (chunks, 1)))
    np.testing.assert_array_equal(owner[:, 0], np.arange(chunks))
    longest = {"butterfly": n.bit_length(), "all_to_all": 2}.get(name, n)
    np.testing.assert_array_equal(depth, longest)
    expected = np.zeros(n)
    for count, workers_in_sum in topology.compressions(n):
        expected[workers_in_sum - 1] += count
    np.testing.assert_array_equal(sizes, np.broadcast_to(expected, (chunks, n)))
    # A reduce-scatter ends with the own chunks.
    workers, chunk = np.split(scattered.values.reshape(chunks, n + 1), (n,), axis=1)
    np.testing.assert_array_equal(workers, 1)
    np.testing.assert_array_equal(chunk[:, 0], np.arange(chunks))
    assert (scattered.token.shape, scattered.token.dtype) == ((n, 1), np.float32)


class CountedSums(Counted):
    """The codec of the sums of some number of workers."""


class WithSums(Counted):
    """A codec that has another one for sums."""

    def of_sums(self, num_workers):
        return CountedSums(num_workers, self.chunks)


@pytest.mark.parametrize("name", ("ring", "butterfly", "all_to_all"))
def test_only_an_all_to_all_has_sums_encoded_by_a_codec_of_their_own(name):
    n, codecs = 4, []

    def reduce(axis):
        topology = TOPOLOGIES[name]
        gathered = topology.all_reduce(WithSums(n, n), axis)
        codecs.append(gathered.codec)
        return gathered.decode()

    result = on_workers(n, reduce)
    np.testing.assert_array_equal(result[..., :n], 1)
    (codec,) = codecs
    assert codec.n == n and type(codec) is (CountedSums if name == "all_to_all" else WithSums)


def test_an_unrolled_ring_is_the_ring_without_a_loop():
    n = 5

    def loops(topology):
        codec, axis = Counted(n, n), Axis("data", n)
        run = jax.vmap(lambda _: topology.all_reduce(codec, axis).decode(), axis_name="data")
        return jax.jit(run).lower(jnp.zeros(n)).as_text().count("stablehlo.while")

    assert loops(Ring()) == 1
    assert loops(Ring(unroll=True)) == 0


# -------------------------------------------------------------------------- collectives of an axis


@pytest.mark.parametrize("n", (2, 5))
def test_numbers_that_owners_combine_are_the_same_everywhere_and_cost_their_bytes(data_mesh, n):
    """Whatever the order in which a backend adds up: worker w combines the w-th shares."""
    shares = np.random.default_rng(0).normal(size=(n, n, 6)).astype(np.float32)

    def local(key, own):
        def weighted(of_all):  # [workers, 6] to [3]: tells workers apart
            weights = jnp.arange(1, n + 1, dtype=jnp.float32)[:, None]
            return jnp.sum(of_all * weights, axis=0)[:3]

        return Axis("data", n).reduce_by_owners(own, weighted)

    compiled = mesh_program(local, data_mesh(n)).lower(KEY, (shares,)).compile()
    found = np.asarray(compiled(KEY, (shares,)))
    assert found.shape == (n, n, 3)
    assert (found == found[0]).all()
    expected = np.einsum("w,wos->os", np.arange(1, n + 1), shares[..., :3])
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-5)
    sent = collectives(compiled.as_text())
    assert {c.kind for c in sent} == {"all-to-all", "all-gather"}
    bytes_sent = sum(c.sent_bytes(n) for c in sent)
    assert bytes_sent == Axis("data", n).owners_bytes(4 * 6, 4 * 3) == (n - 1) * (24 + 12)


def test_an_axis_shifts_swaps_and_gathers():
    own = 10 * (1 + np.arange(4))

    def local(axis):
        worker = jnp.asarray(own)[axis.index]
        moved = axis.shift(worker, 1), axis.shift(worker, -1), axis.swap(worker, 2)
        return moved, axis.gather(worker)

    moved, gathered = on_workers(4, local)
    expected = [[40, 10, 20, 30], [20, 30, 40, 10], [30, 40, 10, 20]]
    assert [leaf.tolist() for leaf in moved] == expected
    np.testing.assert_array_equal(gathered, np.broadcast_to(own, (4, 4)))


# ------------------------------------------------------------------------------ names and choices


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("size", (4096, 5000, 2**24))
def test_buckets_of_every_size_have_the_topology_that_was_given(name, size):
    """So bytes are those of its own cost, and small buckets are exact for no other reason."""
    topology, options = TOPOLOGIES[name], dq.Compression(exact_below=0)
    leaf = {"w": jax.ShapeDtypeStruct((size,), jnp.float32)}
    report = dq.wire_report(leaf, 4, method=dataclasses.replace(options, topology=topology))
    cost = dq.DynamiQ().wire_cost(Call(size=size, axis=Axis("data", 4), topology=topology))
    assert report.compressed_size == size
    assert report.bytes_per_worker == topology.bytes_sent(cost, 4)


@pytest.mark.parametrize(("n", "sizes"), ((3, "2 or 4"), (6, "4 or 8"), (12, "8 or 16")))
def test_a_butterfly_says_which_sizes_it_supports(n, sizes):
    message = re.escape(
        f"topology=Butterfly() does not support an axis of {n} workers. Give an axis of a size "
        f"that it supports, such as {sizes}, or topology='ring' or 'all_to_all'"
    )
    gradients, how = of_workers(0, n, 2000), dq.Compression(topology="butterfly")
    with pytest.raises(ValueError, match=message):
        dq.wire_report(gradients[0], n, method=how)
    with pytest.raises(ValueError, match=message):
        simulated(lambda key, g: dq.psum(g, "data", how, key=key))(KEY, gradients)


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
    how = dq.Compression(topology=topology)
    with pytest.raises(ValueError, match=re.escape(named)):
        simulated(lambda key, g: dq.psum(g, "data", how, key=key))(KEY, of_workers(0, 6, 2000))


@functools.cache
def error_of(name: str, rounding: str, agreement: float) -> float:
    """vNMSE of sums of 8 workers."""
    gradients = of_workers(7, 8, 30_000, agreement=agreement)
    truth = gradients.sum(axis=0, dtype=np.float64)
    run = reducer(name, rounding)
    return float(np.mean([vnmse(run(jax.random.key(i), gradients)[0], truth) for i in range(8)]))


@functools.cache
def reducer(name: str, rounding: str):
    method = dataclasses.replace(TWO_WIDTHS, rounding=rounding)
    return simulated(
        lambda key, g: dq.psum(g, "data", key=key, method=dq.Compression(method, TOPOLOGIES[name]))
    )


@pytest.mark.slow
@pytest.mark.parametrize("agreement", (0.0, 0.5))
def test_the_error_law_is_what_the_codec_does(agreement):
    """Independent roundings of gradients of known agreement: the error of one compression, which
    the law asks for, is the same on paths of 8, 4 and 2 compressions.
    """
    one = [
        error_of(name, "independent", agreement)
        / TOPOLOGIES[name].error_growth(8, agreement=agreement)
        for name in ("ring", "butterfly", "all_to_all")
    ]
    assert min(one) > 1e-5
    assert max(one) / min(one) < 1.1


@pytest.mark.slow
def test_shorter_paths_have_smaller_errors():
    """Correlated roundings of neighbors cancel, the more the longer the path."""
    ring, all_to_all = (error_of(name, "correlated", 0.5) for name in ("ring", "all_to_all"))
    assert 0.4 < all_to_all / ring < 0.65
    assert 0.55 < ring / error_of("ring", "independent", 0.5) < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("name", ("ring", "butterfly"))
def test_correlated_rounding_has_a_small_bias_and_independent_rounding_has_none(name):
    """Of workers that agree, where it is largest: see docs/results/bounds.md."""
    gradients = worker_gradients(4, 2**14, 0, agreement=0.99)
    bias = {
        rounding: rounding_bias.measure(gradients, name, rounding, rounding_bias.Config(keys=60))[1]
        for rounding in ("correlated", "independent")
    }
    assert 0.01 < bias["correlated"] < 0.08
    assert abs(bias["independent"]) < 0.003


def test_bf16_on_an_all_to_all_is_one_float32_sum():
    """Bit for bit: of values that BF16 holds, whose float32 sums are exact in any order."""
    values = np.random.default_rng(0).integers(-128, 129, (8, 4096)).astype(np.float32) / 128
    exact = jnp.asarray(values.sum(axis=0))

    def both(values, topology):
        how = {"method": dq.Compression("bf16", topology), "key": KEY}
        parts = dq.psum_scatter(values, "data", tiled=True, **how)
        return dq.psum(values, "data", **how), parts

    def run(topology):
        return jax.vmap(functools.partial(both, topology=topology), axis_name="data")(values)

    total, parts = run("all_to_all")
    rounded = exact.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(total, np.broadcast_to(rounded, total.shape))
    np.testing.assert_array_equal(parts.ravel(), exact)  # not even the sum is rounded
    in_a_ring, _ = run("ring")
    assert 0.05 < np.mean(in_a_ring[0] != rounded) < 0.5
