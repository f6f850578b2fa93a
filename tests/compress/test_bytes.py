"""Messages of compressed steps: those of a collective of the same tree, as reported."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.compress.forms import every_sum
from tests.support.hlo import collectives

WORKERS = 4
TREE = {
    "w": jax.ShapeDtypeStruct((WORKERS, 64, 96), jnp.float32),
    "v": jax.ShapeDtypeStruct((WORKERS, 40, 64), jnp.float32),
    "b": jax.ShapeDtypeStruct((WORKERS, 64), jnp.float32),
}
KEY_BYTES = 4


def key_of(*args):
    return jax.random.key(0)


def text_of(step, *args):
    return jax.jit(step).lower(*args).compile().as_text()


def sent(text):
    return sum(each.sent_bytes(WORKERS) for each in collectives(text))


def on_mesh(data_mesh, local, out=P()):
    return jax.shard_map(local, mesh=data_mesh(WORKERS), in_specs=P("data"), out_specs=out)


@pytest.fixture(scope="module")
def mean_of_a_tree(data_mesh):
    def local(stacked):
        return lax.pmean(jax.tree.map(lambda leaf: leaf[0], stacked), "data")

    return on_mesh(data_mesh, local)


def test_a_step_sends_the_messages_of_a_mean_of_the_same_tree(mean_of_a_tree, data_mesh):
    def local(stacked):
        own = jax.tree.map(lambda leaf: leaf[0], stacked)
        return dq.pmean(own, "data", key=jax.random.key(0))

    by_hand = text_of(on_mesh(data_mesh, local), TREE)
    step = dq.compress(mean_of_a_tree, "data", key=key_of, only=every_sum)
    found = collectives(text_of(step, TREE))
    assert found
    assert sorted(map(str, found)) == sorted(map(str, collectives(by_hand)))


def test_without_a_key_a_group_sends_four_bytes_more_than_the_report(mean_of_a_tree):
    with_key = dq.compress(mean_of_a_tree, "data", key=key_of, only=every_sum)
    without = dq.compress(mean_of_a_tree, "data", only=every_sum)
    report = without.report(TREE)
    counted = sum(each.bytes_after for each in report.sums)
    assert sent(text_of(with_key, TREE)) == pytest.approx(counted)
    more = sent(text_of(without, TREE)) - counted
    assert more == pytest.approx(KEY_BYTES * 2 * (WORKERS - 1) / WORKERS)


def test_the_report_counts_scattered_sums_and_gathers(data_mesh):
    def scatter(stacked):
        return lax.psum_scatter(stacked["w"][0], "data", tiled=True)

    def gather(stacked):
        return lax.all_gather(stacked["w"][0], "data", tiled=True)

    operations = ("psum_scatter", "all_gather")
    size = 4 * 64 * 96
    in_full = {scatter: (WORKERS - 1) * size // WORKERS, gather: (WORKERS - 1) * size}
    for local, before in in_full.items():
        mapped = on_mesh(data_mesh, local, out=P("data"))
        unrolled = dq.topologies.Ring(unroll=True)
        options = {
            "method": dq.Compression(topology=unrolled),
            "operations": operations,
            "only": every_sum,
        }
        step = dq.compress(mapped, "data", key=key_of, **options)
        (each,) = step.report(TREE).compressed
        assert sent(text_of(step, TREE)) == pytest.approx(each.bytes_after)
        assert each.bytes_before == before
        assert each.bytes_after < 0.2 * before


def test_a_small_scattered_sum_is_reported_in_the_dtype_that_is_sent(data_mesh):
    def local(stacked):
        small = stacked["b"][0].astype(jnp.bfloat16)
        return lax.psum_scatter((stacked["w"][0], small), "data", tiled=True)

    unrolled = dq.topologies.Ring(unroll=True)
    options = {"method": dq.Compression(topology=unrolled), "only": every_sum}
    step = dq.compress(on_mesh(data_mesh, local, out=P("data")), "data", key=key_of, **options)
    large, small = step.report(TREE).sums
    others, size = WORKERS - 1, 64 // WORKERS
    assert (small.group, small.is_compressed) == (0, False)
    assert (small.bytes_before, small.bytes_after) == (2 * others * size, 4 * others * size)
    text = text_of(step, TREE)
    assert sent(text) == pytest.approx(large.bytes_after + small.bytes_after)
