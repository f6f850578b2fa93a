"""What every method owes, on two topologies. `test_topologies.py` has every topology, with a codec
that counts.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.contrib import EF21M, THC, ARCTopK, GlobalCompensation, Marsit
from dynamiq_jax.methods import (
    METHODS,
    MXFP8,
    Axis,
    Call,
    ChunkedMethod,
    ErrorFeedback,
    Exact,
    Method,
    PowerSGD,
    RecodedChunks,
    WireCost,
    resolve_method,
)
from dynamiq_jax.topologies import TOPOLOGIES, AllToAll, Butterfly, Ring, Topology
from tests.support.gradients import of_workers, vnmse
from tests.support.hlo import collectives
from tests.support.workers import TWO_WIDTHS, call_on, simulated

NUM_WORKERS, SIZE = 4, 20_001  # divides by nothing
MATRIX = (177, 113)  # of as many coordinates: a vector has no rank
KEY = jax.random.key(0)
CASES = {
    **{name: resolve_method(name) for name in METHODS},
    "error_feedback": ErrorFeedback(inner=PowerSGD()),
    "global_compensation": GlobalCompensation(inner=Marsit()),
    "ef21m": EF21M(inner=ARCTopK(inner=Exact())),
    "mxfp8_shared": MXFP8(shared_scale=True),
    "paper": dq.DynamiQ.paper(),
}
TRACED = CASES | {"dynamiq": dq.DynamiQ.paper()}  # has three widths, where the default has eight
CHUNKED = [name for name, method in CASES.items() if isinstance(method, ChunkedMethod)]
# Methods that the key does not change: name to the vNMSE that they are within, here. Sums on a ring
# have up to two compressions more than all to all.
DETERMINISTIC = {
    "exact": (0, 1e-12),  # the order of float32 additions
    "bf16": (2.8e-6, 7e-6),  # half a unit in the last of 8 bits
    "blockint": (5e-5, 1.1e-4),  # half of 1/127 of the largest value in a block
    "flash_communication": (8e-4, 2.1e-3),  # half of 1/31 of what lies between spikes
    "omnireduce": (0.06, 0.09),  # the energy of the smallest of the blocks
    "topk_chunked": (0.17, 0.25),  # and of seven of eight
    "top_k": (0.28, 0.36),  # of 8% of the coordinates of each worker
    # First steps have one key. Groups are chosen by a hash, and not by their values.
    "split_sketch": (0.8, 1.2),
    "ef21m": (0.25, 0.7),
    "mxfp8": (9e-4, 2.5e-3),
    "mxfp8_shared": (7e-4, 1.7e-3),
    "mxfp6": (9e-4, 2.2e-3),
    "mxfp4": (1.5e-2, 4e-2),
    "mxint8": (1e-4, 2.6e-4),
    # Noise has no low rank: most of it is left out.
    "powersgd": (0.7, 0.95),
    "error_feedback": (0.7, 0.95),
    "global_compensation": (0.7, 0.85),  # that of the method inside, in a first step
}
# Of the others, the vNMSE of one sum; the most of it that the mean over keys keeps beside one part
# in keys, which is the bias of correlated hops or of clamping; and the gain of the mean, less one.
RANDOM = {
    "dynamiq": ((9e-4, 1.9e-3), 0.04, (-1e-3, 1e-3)),
    "paper": ((2.8e-3, 5.2e-3), 0.04, (-1e-3, 1e-3)),
    # What lies beyond the clamp is lost.
    **dict.fromkeys(("thc", "entropy_coded"), ((8e-3, 1.2e-2), 0.02, (-0.012, -0.005))),
}
# Name to the vNMSE of one sum: the key matters, but the mean over keys is not the sum.
BIASED = {
    "arc_top_k": (0.2, 0.6),  # as topk_chunked, with estimates of norms
    "rand_k": (0.8, 0.95),  # all but one of eight
    "marsit": (0.7, 0.85),  # signs: heavy tails get the scale of most of their row
}
TOPOLOGY_NAMES = ("ring", "all_to_all")

methods = pytest.mark.parametrize("name", CASES)


def on_topologies(names) -> pytest.MarkDecorator:
    """Parametrize with methods on both topologies. The preset of the paper is on a ring only."""
    pairs = [(name, topology) for name in names for topology in TOPOLOGY_NAMES]
    pairs = [pair for pair in pairs if pair != ("paper", "all_to_all")]
    return pytest.mark.parametrize(("name", "topology"), pairs)


@functools.cache
def psum_with(name: str, topology: str):
    """`dq.psum`, or the first step of a method that carries state."""
    method = CASES[name]
    reduce = dq.all_reduce_gradients("data", method=method, topology=topology)

    def local(key, flat):
        if not method.is_stateful:
            return dq.psum(flat, "data", key=key, method=method, topology=topology)
        matrix = flat.reshape(MATRIX)
        mean, _ = reduce.update(matrix, reduce.init(matrix))
        return NUM_WORKERS * mean.reshape(-1)

    return simulated(local)


@functools.cache
def gradient() -> np.ndarray:
    return of_workers(1, NUM_WORKERS, SIZE)


# ------------------------------------------------------------------------------------ conformance


@pytest.mark.parametrize("cls", (*METHODS.values(), *TOPOLOGIES.values()))
def test_strategies_are_frozen_hashable_values(cls):
    assert issubclass(cls, Method | Topology)
    assert cls() == cls()
    assert hash(cls()) == hash(cls())
    assert all(field.kw_only for field in dataclasses.fields(cls))
    for field in dataclasses.fields(cls):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(cls(), field.name, None)


def test_every_method_has_a_window():
    assert CASES.keys() == DETERMINISTIC.keys() | RANDOM.keys() | BIASED.keys()


@on_topologies(CASES)
def test_replicas_are_identical_and_the_key_fixes_the_bits(name, topology):
    run = psum_with(name, topology)
    result = np.asarray(run(KEY, gradient()))
    assert {replica.tobytes() for replica in result} == {result[0].tobytes()}
    np.testing.assert_array_equal(run(jax.random.key(0), gradient()), result)
    other = np.asarray(run(jax.random.key(1), gradient()))
    assert np.array_equal(other, result) == (name in DETERMINISTIC)


@on_topologies(DETERMINISTIC | BIASED)
def test_the_sum_is_within_its_error(name, topology):
    truth = gradient().sum(axis=0, dtype=np.float64)
    low, high = (DETERMINISTIC | BIASED)[name]
    assert low <= vnmse(psum_with(name, topology)(KEY, gradient())[0], truth) < high


RECODED = ("blockint", "flash_communication", "mxfp8", "mxfp6", "mxfp4", "mxint8")


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


# Name to the coordinates that are NaN with one of them. (All of a bucket with low rank, and a block
# of each chunk with THC, whose own test has the rest.)
REACH = {
    **dict.fromkeys(("exact", "bf16", "omnireduce", "topk_chunked", "arc_top_k", "ef21m"), 1),
    "top_k": 1,
    "rand_k": SIZE,
    **dict.fromkeys((*RECODED, "mxfp8_shared"), 32),
    **dict.fromkeys(("dynamiq", "paper", "marsit", "global_compensation"), 256),
}


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
    if name in REACH:
        blocks = np.arange(SIZE) // REACH[name]
        np.testing.assert_array_equal(lost, np.isin(blocks, blocks[list(places)]))
    elif name in ("thc", "entropy_coded"):
        assert lost.sum() <= 2 * 1024
    if name in ("exact", "bf16", "mxfp8_shared", *RECODED):  # others choose or draw anew
        np.testing.assert_array_equal(result[:, ~lost], clean[:, ~lost])


@on_topologies(RANDOM)
def test_the_sum_is_unbiased(name, topology, keys=32):
    (low, high), bias, (least, most) = RANDOM[name]
    truth, run = gradient().sum(axis=0, dtype=np.float64), psum_with(name, topology)
    results = [np.asarray(run(jax.random.key(k), gradient())[0], float) for k in range(keys)]
    single = np.mean([vnmse(result, truth) for result in results])
    assert low < single < high
    mean = np.mean(results, axis=0)
    assert 0.8 / keys < vnmse(mean, truth) / single < 1.2 / keys + bias
    assert least < np.vdot(mean, truth) / np.vdot(truth, truth) - 1 < most


@methods
def test_shapes_and_dtypes_are_kept(name):
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float16)
    tree = {dtype.__name__: jax.ShapeDtypeStruct((NUM_WORKERS, 32, 64), dtype) for dtype in dtypes}
    reduce = dq.all_reduce_gradients("data", method=TRACED[name])

    def local(tree):
        return reduce.update(tree, reduce.init(tree))[0]

    result = jax.eval_shape(jax.vmap(local, axis_name="data"), tree)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), result) == {
        dtype.__name__: ((NUM_WORKERS, 32, 64), dtype) for dtype in dtypes
    }


@methods
def test_state_is_declared_and_stable_under_update(name):
    """One state in, and one of the same structure, shapes and dtypes out; metrics likewise."""
    method = TRACED[name]
    assert bool(jax.tree.leaves(method.init_state(matrix_call()))) == method.is_stateful
    reduce = dq.all_reduce_gradients("data", method=method)

    def local(gradient):
        tree = {"w": gradient.reshape(MATRIX)}
        state = reduce.init(tree)
        return state, *reduce.update(tree, state)

    before, updates, after = jax.eval_shape(jax.vmap(local, axis_name="data"), gradient())
    assert updates["w"].shape == (NUM_WORKERS, *MATRIX)
    assert after == before
    assert bool(jax.tree.leaves(before.method)) == method.is_stateful
    metric = jax.ShapeDtypeStruct((NUM_WORKERS,), jnp.float32)
    names = (*method.metrics, *(["reset_states"] if method.is_stateful else []))
    assert after.metrics == dict.fromkeys(names, metric)


def matrix_call() -> Call:
    return call_on(math.prod(MATRIX), NUM_WORKERS, shapes=(MATRIX,))


@functools.cache
def halves(name: str):
    """Return a function of (key, values) to a worker's part of a sum, to all parts gathered again,
    and for float32 to the sum itself.
    """
    method = TWO_WIDTHS if name == "dynamiq" else CASES[name]
    options = {"method": method, "options": dq.Options(exact_below=0)}

    def local(key, g):
        part = dq.psum_scatter(g, "data", key=key, tiled=True, topology="all_to_all", **options)
        whole = dq.all_gather(part, "data", key=key, tiled=True, **options)
        if g.dtype == jnp.bfloat16:
            return part, whole, None
        return part, whole, dq.psum(g, "data", key=key, topology="all_to_all", **options)

    return simulated(local)


# Formats of one class differ in their elements alone.
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
        low, high = RANDOM[name][0] if name in RANDOM else (DETERMINISTIC | BIASED)[name]
        assert low / 8 < scattered < 0.9 * gathered < gathered < 3 * high
    if total is not None:
        np.testing.assert_array_equal(whole, total)


@pytest.mark.parametrize("name", sorted(CASES.keys() - set(CHUNKED)))
def test_methods_that_cannot_scatter_or_gather_say_so(name):
    """Also where every leaf stays exact."""
    for function in (dq.psum_scatter, dq.all_gather):
        with pytest.raises(
            ValueError, match=rf"method=.* cannot be used in dq\.{function.__name__}\. Use"
        ):
            simulated(lambda key, x, f=function: f(x, "data", key=key, method=CASES[name]))(
                KEY, np.zeros((2, 2), np.float32)
            )


@pytest.mark.parametrize("function", (dq.psum, dq.pmean))
def test_sums_refuse_a_method_that_carries_state(function):
    with pytest.raises(ValueError, match=r"carries state .*dq\.p.* Use dq\.all_reduce_gradients"):
        simulated(lambda key, g: function(g, "data", key=key, method="powersgd"))(KEY, gradient())


def test_a_granule_is_that_of_the_method_inside():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Grained(Exact):
        granule = 96

    assert ErrorFeedback(inner=Grained()).granule == 96
    assert {method.granule for method in CASES.values()} == {256}


# ------------------------------------------------------------------------------------------ turns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns(ChunkedMethod):
    """A method whose compressions add 2 to the power of their turn."""

    def wire_cost(self, call):
        return WireCost(4)

    def bind(self, values, call, key):
        def encode(values, chunk, turn):
            return values + jnp.exp2(jnp.asarray(turn).astype(jnp.float32))

        return RecodedChunks(
            local=call.local_chunks(values), encode=encode, decode=lambda payload, _: payload
        )


@pytest.mark.parametrize("topology", (Ring(), Ring(bidirectional=True), Butterfly(), AllToAll()))
def test_no_two_compressions_of_a_chunk_share_a_turn(topology):
    """Rounding noise of the same turn would be the same: errors would add up and not cancel. Error
    feedback has one compression more, of each worker's own values.
    """
    chunks = topology.num_chunks(NUM_WORKERS)
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


# ------------------------------------------------------------------------------------------ bytes


@dataclasses.dataclass(frozen=True)
class CountingAxis(Axis):
    """An axis that counts the bytes that each worker sends, as its collectives are traced."""

    sent: list[float] = dataclasses.field(default_factory=list, compare=False)

    def shift(self, tree, step):
        self._count(tree, 1)
        return super().shift(tree, step)

    def exchange(self, shares):
        self._count(shares, (self.size - 1) / self.size)
        return super().exchange(shares)

    def exchange_parts(self, shares):
        self._count(shares, (self.size - 1) / self.size)
        return super().exchange_parts(shares)

    def gather(self, value):
        self._count(value, self.size - 1)
        return super().gather(value)

    def gather_parts(self, part):
        self._count(part, self.size - 1)
        return super().gather_parts(part)

    def _count(self, tree, times):
        self.sent.append(times * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def traced_bytes(fn, call: Call, *shape: int) -> tuple[float, object]:
    """Return the bytes that each worker sends in `fn(flat, call)`, and the shapes of its result."""
    axis = CountingAxis("data", call.num_workers)
    call = dataclasses.replace(call, axis=axis)
    stacked = jax.ShapeDtypeStruct((call.num_workers, *shape), jnp.float32)
    result = jax.eval_shape(jax.vmap(lambda flat: fn(flat, call), axis_name="data"), stacked)
    return sum(axis.sent), result


WIRE = TRACED | {
    "topk_of_thc": dq.methods.TopKChunked(inner=THC()),  # two kinds of statistics
    "powersgd_of_mx": PowerSGD(inner=MXFP8(shared_scale=True)),  # two messages with statistics
}


@pytest.mark.parametrize("name", WIRE)
def test_the_wire_cost_counts_all_bytes_of_an_all_reduce(name, num_workers=5):
    """All to all, which traces each of its transfers once, at sizes that divide by nothing."""
    method = WIRE[name]
    call = call_on(math.prod(MATRIX), num_workers, "all_to_all", shapes=(MATRIX,))

    def reduce(flat, call):
        return method.all_reduce(flat, call, KEY, method.init_state(call)).total

    sent, total = traced_bytes(reduce, call, call.size)
    assert total.shape == (num_workers, call.size)
    assert sent == call.topology.bytes_sent(method.wire_cost(call), num_workers)
    tree = {"w": jax.ShapeDtypeStruct(MATRIX, jnp.float32)}
    report = dq.wire_report(tree, num_workers, method=method, topology="all_to_all")
    assert sent == report.bytes_per_worker - report.check_bytes


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("collective", ("all_reduce", "psum_scatter", "all_gather"))
@pytest.mark.parametrize("topology", (Ring(), Ring(bidirectional=True)), ids=("ring", "two_way"))
def test_the_wire_cost_is_that_of_the_statistics_and_of_one_message(name, collective, topology):
    """With one chunk for each worker, and with two."""
    method, n, part = TRACED[name], NUM_WORKERS, 3 * 2 * 256
    call = call_on(n * part, n, topology, collective=collective)
    if collective == "all_reduce":
        call = call.of_size(SIZE)

    def first_message(values, call):
        codec = method.bind(values, call, KEY)
        return codec.compress(jnp.asarray(call.first_chunk, jnp.int32), 0)

    held = part if collective == "all_gather" else call.size
    statistics, message = traced_bytes(first_message, call, held)
    message_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(message))
    assert method.wire_cost(call) == WireCost(message_bytes // n, statistics)


@pytest.mark.parametrize(
    ("method", "collective"),
    ((TWO_WIDTHS, "psum_scatter"), (THC(block=256), "all_gather")),
    ids=("psum_scatter", "all_gather"),
)
def test_the_wire_cost_is_the_compiled_program(data_mesh, method, collective):
    n, part = 4, 4 * 256
    call = call_on(n * part, n, "all_to_all", collective=collective)

    def local(key, flat):
        options = {"key": key, "tiled": True, "method": method}
        if collective == "all_gather":
            return dq.all_gather(flat, "data", to="invarying", **options)
        return dq.psum_scatter(flat, "data", topology="all_to_all", **options)

    held = part if collective == "all_gather" else n * part
    out = P() if collective == "all_gather" else P("data")
    mapped = jax.shard_map(local, mesh=data_mesh(n), in_specs=(P(), P("data")), out_specs=out)
    lowered = jax.jit(mapped).lower(KEY, jax.ShapeDtypeStruct((n * held,), jnp.float32))
    found = collectives(lowered.compile().as_text())
    cost = method.wire_cost(call)
    expected = cost.statistics_bytes + (n - 1) * cost.payload_bytes
    assert sum(c.sent_bytes(n) for c in found) == expected


@pytest.mark.parametrize("size", (2048, 2049, 20_001))
def test_no_compression_takes_the_path_of_every_method(size):
    """Padding to whole chunks is no reason to leave it: the baseline has to be like the others."""
    tree = {"w": jax.ShapeDtypeStruct((size,), jnp.float32)}
    assert dq.wire_report(tree, 8, method="exact").exact_leaves == ()
