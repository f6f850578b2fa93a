"""The declared bytes of every method against the messages that it makes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

import dynamiq_jax as dq
from dynamiq_jax.methods import Axis, Call, WireCost
from tests.conformance.table import CHUNKED, MATRIX, NUM_WORKERS, SIZE, TRACED
from tests.support.workers import call_on

KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class CountingAxis(Axis):
    """An axis that counts the bytes that each worker sends, as its collectives are traced."""

    sent: list[float] = dataclasses.field(default_factory=list, compare=False)

    def shift(self, tree, step):
        self._count(tree, 1)
        return super().shift(tree, step)

    def exchange(self, shares, **how):
        self._count(shares, (self.size - 1) / self.size)
        return super().exchange(shares, **how)

    def gather(self, value, **how):
        self._count(value, self.size - 1)
        return super().gather(value, **how)

    def _count(self, tree, times):
        self.sent.append(times * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def traced_bytes(fn, call: Call, *shape: int) -> tuple[float, object]:
    """Return the bytes that each worker sends in `fn(flat, call)`, and the shapes of its result."""
    axis = CountingAxis("data", call.num_workers)
    call = dataclasses.replace(call, axis=axis)
    stacked = jax.ShapeDtypeStruct((call.num_workers, *shape), jnp.float32)
    result = jax.eval_shape(jax.vmap(lambda flat: fn(flat, call), axis_name="data"), stacked)
    return sum(axis.sent), result


@pytest.mark.parametrize("name", TRACED)
def test_the_wire_cost_counts_all_bytes_of_an_all_reduce(name, num_workers=5):
    """All to all, which traces each of its transfers once, at sizes that divide by nothing."""
    method = TRACED[name]
    call = call_on(math.prod(MATRIX), num_workers, "all_to_all", shapes=(MATRIX,))

    def reduce(flat, call):
        return method.all_reduce(flat, call, KEY, method.init_state(call)).total

    sent, total = traced_bytes(reduce, call, call.size)
    assert total.shape == (num_workers, call.size)
    assert sent == call.topology.bytes_sent(method.wire_cost(call), num_workers)
    tree = {"w": jax.ShapeDtypeStruct(MATRIX, jnp.float32)}
    report = dq.wire_report(tree, num_workers, method=dq.Compression(method, "all_to_all"))
    assert sent == report.bytes_per_worker - report.check_bytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("collective", ("all_reduce", "psum_scatter", "all_gather"))
def test_the_wire_cost_is_that_of_the_statistics_and_of_one_message(name, collective):
    method, n, part = TRACED[name], NUM_WORKERS, 3 * 2 * 256
    call = call_on(n * part, n, collective=collective)
    if collective == "all_reduce":
        call = call.of_size(SIZE)

    def first_message(values, call):
        codec = method.bind(values, call, KEY)
        return codec.compress(jnp.asarray(call.first_chunk, jnp.int32), 0)

    held = part if collective == "all_gather" else call.size
    statistics, message = traced_bytes(first_message, call, held)
    message_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(message))
    assert method.wire_cost(call) == WireCost(message_bytes // n, statistics)


@pytest.mark.parametrize("size", (2048, 2049, 20_001))
def test_no_compression_takes_the_path_of_every_method(size):
    """Padding to whole chunks is no reason to leave it: the baseline has to be like the others."""
    tree = {"w": jax.ShapeDtypeStruct((size,), jnp.float32)}
    (leaf,) = dq.wire_report(tree, 8, method="exact").leaves
    assert leaf.why_exact is None
