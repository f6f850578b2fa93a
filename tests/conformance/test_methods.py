"""Laws of every method, on two topologies. One simulated program a method and topology, and one on
a mesh, serve all laws of sums.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynamiq_jax as dq
from dynamiq_jax._core import LocalChunks
from dynamiq_jax.methods import (
    METHODS,
    ChunkCodec,
    ChunkedMethod,
    ErrorFeedback,
    Exact,
    Method,
    RecodedChunks,
    SummedChunks,
    WireCost,
)
from dynamiq_jax.topologies import TOPOLOGIES, AllToAll, Butterfly, Ring, Topology
from tests.conformance.rows import PRODUCT
from tests.conformance.table import (
    CASES,
    CHUNKED,
    MATRIX,
    NUM_WORKERS,
    ROWS,
    SIZE,
    TRACED,
    gradient,
    matrix_call,
)
from tests.support.gradients import of_workers, vnmse
from tests.support.hlo import Collective, collectives
from tests.support.workers import TWO_WIDTHS, call_on, mesh_program, simulated

KEY = jax.random.key(0)
# The preset of the paper, and formats that differ from others in their elements alone.
ON_A_RING = ("paper", "mxfp6", "mxint8")
RECODED = [name for name, row in ROWS.items() if row.recodes and name not in ON_A_RING]
RANDOM = [name for name, row in ROWS.items() if row.key == "noise"]
TOPOLOGY_NAMES = ("ring", "all_to_all")

methods = pytest.mark.parametrize("name", CASES)


def on_topologies(names) -> pytest.MarkDecorator:
    """Parametrize with methods on both topologies, or on a ring."""
    pairs = [(name, topology) for name in names for topology in TOPOLOGY_NAMES]
    pairs = [(name, path) for name, path in pairs if path == "ring" or name not in ON_A_RING]
    return pytest.mark.parametrize(("name", "topology"), pairs)


def local_sum(name: str, topology: str):
    """Return `dq.psum` of a vector, or the first step of a method that carries state."""
    method = CASES[name]
    reduce = dq.all_reduce_gradients("data", method=dq.Compression(method, topology))

    def local(key, flat):
        if not method.is_stateful:
            return dq.psum(flat, "data", key=key, method=dq.Compression(method, topology))
        matrix = flat.reshape(MATRIX)
        mean, _ = reduce.update(matrix, reduce.init(matrix))
        return NUM_WORKERS * mean.reshape(-1)

    return local


@functools.cache
def psum_with(name: str, topology: str):
    """Simulate the sum: most laws are about outputs of this one program."""
    return simulated(local_sum(name, topology))


@functools.cache
def sum_on_mesh(name: str, topology: str, mesh) -> tuple[np.ndarray, list[Collective]]:
    """Return the sum on a mesh, [workers, size], and the collectives of its program."""
    program = mesh_program(local_sum(name, topology), mesh)
    compiled = program.lower(KEY, (gradient(),)).compile()
    return np.asarray(compiled(KEY, (gradient(),))), collectives(compiled.as_text())


# ------------------------------------------------------------------------------------ conformance


@pytest.mark.parametrize("cls", (*METHODS.own.values(), *TOPOLOGIES.values()))
def test_strategies_are_frozen_hashable_values(cls):
    assert issubclass(cls, Method | Topology)
    assert cls() == cls()
    assert hash(cls()) == hash(cls())
    assert all(field.kw_only for field in dataclasses.fields(cls))
    for field in dataclasses.fields(cls):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(cls(), field.name, None)


CODEC = ("compress", "hop", "accumulate", "decompress", "rounded")


@pytest.mark.parametrize("missing", CODEC)
def test_a_codec_without_one_of_its_methods_cannot_be_made(missing):
    of_codec = dict.fromkeys(CODEC, lambda self, *arguments: None)
    assert type("Complete", (ChunkCodec,), of_codec)()
    del of_codec[missing]
    with pytest.raises(TypeError, match=rf"abstract.*'?{missing}'?"):
        type("Incomplete", (ChunkCodec,), of_codec)()


def test_every_method_has_a_row():
    assert METHODS.own.keys() <= PRODUCT.keys()


@pytest.mark.sampled(4)
@on_topologies(CASES)
def test_replicas_are_identical_and_the_key_fixes_the_bits(name, topology):
    run = psum_with(name, topology)
    result = np.asarray(run(KEY, gradient()))
    assert {replica.tobytes() for replica in result} == {result[0].tobytes()}
    np.testing.assert_array_equal(run(jax.random.key(0), gradient()), result)
    other = np.asarray(run(jax.random.key(1), gradient()))
    assert np.array_equal(other, result) == (ROWS[name].key == "ignored")


@on_topologies([name for name in CASES if name not in RANDOM])
def test_the_sum_is_within_its_error(name, topology):
    truth = gradient().sum(axis=0, dtype=np.float64)
    low, high = ROWS[name].error
    assert low <= vnmse(psum_with(name, topology)(KEY, gradient())[0], truth) < high


on_meshes = pytest.mark.parametrize(
    ("name", "topology"), [(name, path) for name, row in ROWS.items() for path in row.mesh]
)


@on_meshes
def test_a_mesh_gives_the_bits_of_the_simulation(data_mesh, name, topology):
    found, _ = sum_on_mesh(name, topology, data_mesh(NUM_WORKERS))
    assert {replica.tobytes() for replica in found} == {found[0].tobytes()}
    expected = np.asarray(psum_with(name, topology)(KEY, gradient()))
    if ROWS[name].same_bits:
        np.testing.assert_array_equal(found, expected)
    else:
        assert vnmse(found[0], expected[0]) < 1e-6


@on_meshes
def test_a_mesh_sends_what_is_reported_and_nothing_but_integers(data_mesh, name, topology):
    _, sent = sum_on_mesh(name, topology, data_mesh(NUM_WORKERS))
    method = CASES[name]
    tree = {"w": jax.ShapeDtypeStruct(MATRIX if method.is_stateful else (SIZE,), jnp.float32)}
    report = dq.wire_report(tree, NUM_WORKERS, method=dq.Compression(method, topology))
    assert sum(c.sent_bytes(NUM_WORKERS) for c in sent) == report.bytes_per_worker > 0
    if not ROWS[name].floats:
        dtypes = frozenset().union(*(c.dtypes for c in sent if c.kind != "all-reduce"))
        assert dtypes <= {"u8", "u16", "u32"}


@pytest.mark.parametrize("name", RECODED)
def test_fewer_compressions_have_less_error(name):
    """Of four workers that agree by half: 1.6 times as much on a ring, where partial sums of two
    and three workers are compressed too, in place of single values.
    """
    truth = gradient().sum(axis=0, dtype=np.float64)
    ring, all_to_all = (
        vnmse(psum_with(name, topology)(KEY, gradient())[0], truth) for topology in TOPOLOGY_NAMES
    )
    assert 1.4 < ring / all_to_all < 1.75


@pytest.mark.sampled(2)
@on_topologies(CASES)
@pytest.mark.parametrize("bad", (np.nan, -np.inf))
def test_what_is_not_finite_surfaces_on_all_workers_and_goes_no_further(name, topology, bad):
    values, places = gradient().copy(), {300: 1, SIZE - 2: NUM_WORKERS - 1}
    for place, worker in places.items():
        values[worker, place] = bad
    run = psum_with(name, topology)
    result, clean = np.asarray(run(KEY, values)), np.asarray(run(KEY, gradient()))
    assert {replica.tobytes() for replica in result} == {result[0].tobytes()}
    lost = ~np.isfinite(result[0])
    assert lost[list(places)].all()
    if ROWS[name].reach is not None:
        blocks = np.arange(SIZE) // ROWS[name].reach
        np.testing.assert_array_equal(lost, np.isin(blocks, blocks[list(places)]))
    elif ROWS[name].most_lost is not None:
        assert lost.sum() <= 2 * ROWS[name].most_lost
    if ROWS[name].stays:  # others choose or draw anew
        np.testing.assert_array_equal(result[:, ~lost], clean[:, ~lost])


@on_topologies(RANDOM)
def test_the_sum_is_unbiased(name, topology, keys=32):
    row = ROWS[name]
    (low, high), (least, most) = row.error, row.gain
    truth, run = gradient().sum(axis=0, dtype=np.float64), psum_with(name, topology)
    results = [np.asarray(run(jax.random.key(k), gradient())[0], float) for k in range(keys)]
    single = np.mean([vnmse(result, truth) for result in results])
    assert low < single < high
    mean = np.mean(results, axis=0)
    assert 0.8 / keys < vnmse(mean, truth) / single < 1.2 / keys + row.bias
    assert least < np.vdot(mean, truth) / np.vdot(truth, truth) - 1 < most


@pytest.mark.sampled(2)
@methods
def test_states_shapes_and_dtypes_are_kept(name):
    """One state in, and one of the same structure, shapes and dtypes out; metrics likewise."""
    method = TRACED[name]
    assert bool(jax.tree.leaves(method.init_state(matrix_call()))) == method.is_stateful
    reduce = dq.all_reduce_gradients("data", method=method)
    dtypes = jnp.float32, jnp.bfloat16, jnp.float16
    tree = [jax.ShapeDtypeStruct((NUM_WORKERS, 32, 64), dtype) for dtype in dtypes]

    def local(tree):
        state = reduce.init(tree)
        return state, *reduce.update(tree, state)

    before, updates, after = jax.eval_shape(jax.vmap(local, axis_name="data"), tree)
    assert updates == tree
    assert after == before
    assert bool(jax.tree.leaves(before.method)) == method.is_stateful
    metric = jax.ShapeDtypeStruct((NUM_WORKERS,), jnp.float32)
    names = (*method.metrics, *(["reset_states"] if method.is_stateful else []))
    assert after.metrics == dict.fromkeys(names, metric)


@functools.cache
def halves(name: str):
    """Return a function of (key, values) to a worker's part of a sum, to all parts gathered again,
    and for float32 to the sum itself.
    """
    method = TWO_WIDTHS if name == "dynamiq" else CASES[name]
    direct = dq.Compression(method, "all_to_all", exact_below=0)

    def local(key, g):
        part = dq.psum_scatter(g, "data", direct, key=key, tiled=True)
        whole = dq.all_gather(part, "data", direct, key=key, tiled=True)
        if g.dtype == jnp.bfloat16:
            return part, whole, None
        return part, whole, dq.psum(g, "data", direct, key=key)

    return simulated(local)


# Formats of one class differ in their elements alone.
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sorted({*CHUNKED} - {"mxfp6", "mxint8", "paper"}))
def test_a_sum_is_scattered_parts_that_are_gathered(name):
    """Sums of parts are never compressed: a part has one compression less than the whole. Of
    bfloat16, most of the time: sums are float32 up to the end.
    """
    g = of_workers(2, NUM_WORKERS, NUM_WORKERS * 1024).reshape(NUM_WORKERS, 64, 64)
    dtype = jnp.float32 if name in ("blockint", "mxfp8") else jnp.bfloat16
    g = g.astype(dtype)
    exact = g.astype(np.float32).sum(axis=0)
    part, whole, total = jax.tree.map(np.asarray, halves(name)(KEY, g))
    assert part.shape == (NUM_WORKERS, 16, 64) and whole.shape == g.shape
    assert part.dtype == whole.dtype == dtype
    np.testing.assert_array_equal(whole, whole[:1].repeat(NUM_WORKERS, axis=0))
    if name in ("exact", "bf16"):
        np.testing.assert_array_equal(whole[0], exact.astype(jnp.bfloat16))
        np.testing.assert_array_equal(part.reshape(exact.shape), whole[0])
    else:
        scattered, gathered = (vnmse(x.reshape(exact.shape), exact) for x in (part, whole[0]))
        low, high = ROWS[name].error
        assert low / 8 < scattered < 0.9 * gathered < gathered < 3 * high
    if total is not None:
        np.testing.assert_array_equal(whole, total)


@pytest.mark.parametrize("name", sorted(CASES.keys() - set(CHUNKED)))
def test_methods_that_cannot_scatter_or_gather_say_so(name):
    """Also where every leaf stays exact."""
    for function in (dq.psum_scatter, dq.all_gather):
        run = simulated(lambda key, x, f=function: f(x, "data", key=key, method=CASES[name]))
        words = rf"method=.* cannot be used in dq\.{function.__name__}\. Use"
        with pytest.raises(ValueError, match=words):
            run(KEY, np.zeros((2, 2), np.float32))


@pytest.mark.parametrize("function", (dq.psum, dq.pmean))
def test_sums_refuse_a_method_that_carries_state(function):
    with pytest.raises(ValueError, match=r"carries state .*dq\.p.* Use dq\.all_reduce_gradients"):
        simulated(lambda key, g: function(g, "data", key=key, method="ef+bf16"))(KEY, gradient())


def test_a_granule_is_that_of_the_method_inside():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Grained(Exact):
        granule = 96

    assert ErrorFeedback(inner=Grained()).granule == 96
    assert {method.granule for method in CASES.values()} == {256}


def test_chunks_of_a_part_are_counted_from_its_first():
    chunks, first = jnp.arange(8.0).reshape(2, 4), 3
    summed = SummedChunks(encoded=chunks, decode=lambda sums, _: sums, size=20, first=first)
    for index, expected in enumerate(chunks):
        chunk = jnp.int32(first + index)
        np.testing.assert_array_equal(LocalChunks(chunks, 20, first).at(chunk), expected)
        np.testing.assert_array_equal(summed.compress(chunk, 0), expected)


class Packed(Exact):
    """The same sums, of numbers that travel backwards."""

    def bind(self, values, call, key):
        return dataclasses.replace(
            super().bind(values, call, key),
            pack=lambda numbers: numbers[::-1],
            unpack=lambda payloads: payloads[:, ::-1],
        )


@pytest.mark.parametrize("topology", ("ring", "all_to_all"))
def test_numbers_that_are_packed_for_the_way_have_the_same_sum(topology):
    def local(key, flat, method):
        return dq.psum(flat, "data", dq.Compression(method, topology), key=key)

    runs = [simulated(functools.partial(local, method=how)) for how in (Packed(), Exact())]
    ours, exact = (run(KEY, gradient()) for run in runs)
    np.testing.assert_array_equal(ours, exact)


# ------------------------------------------------------------------------------------------ turns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns(ChunkedMethod):
    """A method whose compressions add 2 to the power of their turn, and whose messages know their
    chunk.
    """

    def wire_cost(self, call):
        return WireCost(4)

    def bind(self, values, call, key):
        def encode(values, chunk, turn):
            return values + jnp.exp2(jnp.asarray(turn).astype(jnp.float32)), jnp.asarray(chunk)

        def decode(payload, chunk):
            return jnp.where(payload[1] == chunk, payload[0], jnp.nan)

        return RecodedChunks(local=call.local_chunks(values), encode=encode, decode=decode)


@pytest.mark.parametrize("topology", (Ring(), Butterfly(), AllToAll()))
def test_no_two_compressions_of_a_chunk_share_a_turn(topology):
    """Rounding noise of the same turn would be the same: errors would add up and not cancel. Error
    feedback has one compression more, of each worker's own values.
    """
    chunks = NUM_WORKERS
    call = call_on(chunks, NUM_WORKERS, topology, feedback=True)

    def local(values):
        reduced = Turns().all_reduce(values, call, KEY, ())
        return reduced.total, reduced.applied

    zeros = jnp.zeros((NUM_WORKERS, chunks))
    total, applied = jax.jit(jax.vmap(local, axis_name="data"))(zeros)
    turns = np.asarray(total).astype(int)
    # As many bits as compressions: none was carried.
    count = sum(count for count, _ in topology.compressions(NUM_WORKERS))
    np.testing.assert_array_equal(np.bitwise_count(turns), count + NUM_WORKERS)
    own = 2 ** (NUM_WORKERS + np.arange(NUM_WORKERS))
    np.testing.assert_array_equal(applied, own[:, None].repeat(chunks, axis=1))
