"""The report of a compressed step: every sum, as its plan has it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.compress.forms import PARAMS, X, Y, every_sum, loss_fn, mapped, mean_loss
from tests.support.hlo import collectives
from tests.support.workers import STOCHASTIC

WORKERS = 4
MANY = {
    f"p{number:02}": jax.ShapeDtypeStruct((WORKERS, 64, 64), jnp.float32) for number in range(12)
}


TREE = {
    "w": jax.ShapeDtypeStruct((WORKERS, 64, 96), jnp.float32),
    "v": jax.ShapeDtypeStruct((WORKERS, 40, 64), jnp.float32),
    "b": jax.ShapeDtypeStruct((WORKERS, 64), jnp.float32),
}
KEY_BYTES = 4


def key_of(*args):
    return jax.random.key(0)


def own(stacked):
    return jax.tree.map(lambda leaf: leaf[0], stacked)


def text_of(step, *args):
    return jax.jit(step).lower(*args).compile().as_text()


def sent(step, *args):
    return sum(each.sent_bytes(WORKERS) for each in collectives(text_of(step, *args)))


def on_mesh(data_mesh, local, out=P()):
    return jax.shard_map(local, mesh=data_mesh(WORKERS), in_specs=P("data"), out_specs=out)


def mean_of(data_mesh):
    return on_mesh(data_mesh, lambda stacked: lax.pmean(own(stacked), "data"))


POLICIES = {
    "one sum is uncompressed": {"^sum_1$": "uncompressed", ".*": "bf16"},
    "one sum has more bits": {"^sum_10$": "bf16", ".*": "mxfp4"},
    "one sum has fewer bits": {"^sum_2$": "mxfp4", ".*": "bf16"},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", POLICIES)
def test_policies_of_a_sum_are_in_its_row(name, data_mesh):
    """Twelve sums: "sum_10" comes before "sum_2" in the order of names."""
    method = POLICIES[name]
    step = dq.compress(mean_of(data_mesh), "data", key=key_of, method=method, only=every_sum)
    report = step.report(MANY)
    place = int(next(iter(method)).strip("^$").removeprefix("sum_"))
    others = [each for number, each in enumerate(report.sums) if number != place]
    chosen = report.sums[place]
    assert len({each.bytes_after for each in others}) == 1
    if method[f"^sum_{place}$"] == "uncompressed":
        assert chosen.why_exact == "by the policy"
        assert chosen.bytes_after == chosen.bytes_before == report.sums[0].bytes_before
        assert len(report.compressed) == 11
    else:
        ratio = chosen.bytes_after / others[0].bytes_after
        assert 0.1 < ratio < 0.5 if "fewer" in name else 2 < ratio < 6
        assert len(report.compressed) == 12
    counted = sum(each.bytes_after for each in report.sums)
    assert sent(step, MANY) == pytest.approx(counted, rel=1e-6)


def test_a_step_sends_the_messages_of_a_mean_of_the_same_tree(data_mesh):
    def local(stacked):
        return dq.pmean(own(stacked), "data", key=jax.random.key(0))

    by_hand = text_of(on_mesh(data_mesh, local), TREE)
    step = dq.compress(mean_of(data_mesh), "data", key=key_of, only=every_sum)
    found = collectives(text_of(step, TREE))
    assert found
    assert sorted(map(str, found)) == sorted(map(str, collectives(by_hand)))


def test_without_a_key_a_group_sends_four_bytes_more_than_the_report(data_mesh):
    options = {"method": STOCHASTIC, "only": every_sum}
    with_key = dq.compress(mean_of(data_mesh), "data", key=key_of, **options)
    without = dq.compress(mean_of(data_mesh), "data", **options)
    report = without.report(TREE)
    counted = sum(each.bytes_after for each in report.sums)
    assert sent(with_key, TREE) == pytest.approx(counted)
    more = sent(without, TREE) - counted
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
            "method": dq.Compression("bf16", unrolled),
            "operations": operations,
            "only": every_sum,
        }
        step = dq.compress(mapped, "data", key=key_of, **options)
        (each,) = step.report(TREE).compressed
        assert sent(step, TREE) == pytest.approx(each.bytes_after)
        assert each.bytes_before == before
        assert each.bytes_after < 0.6 * before


def test_a_small_scattered_sum_is_reported_in_the_dtype_that_is_sent(data_mesh):
    def local(stacked):
        small = stacked["b"][0].astype(jnp.bfloat16)
        return lax.psum_scatter((stacked["w"][0], small), "data", tiled=True)

    unrolled = dq.topologies.Ring(unroll=True)
    options = {"method": dq.Compression("bf16", unrolled), "only": every_sum}
    step = dq.compress(on_mesh(data_mesh, local, out=P("data")), "data", key=key_of, **options)
    large, small = step.report(TREE).sums
    others, size = WORKERS - 1, 64 // WORKERS
    assert (small.group, small.is_compressed) == (0, False)
    assert (small.bytes_before, small.bytes_after) == (2 * others * size, 4 * others * size)
    assert sent(step, TREE) == pytest.approx(large.bytes_after + small.bytes_after)


def test_bytes_before_are_those_of_the_dtype_that_the_step_sends(data_mesh):
    """An exact sum of a group is sent in float32, and was in its own dtype before."""
    tree = {
        name: jax.ShapeDtypeStruct((WORKERS, size), dtype)
        for name, (size, dtype) in {
            "a": (4096, jnp.bfloat16),
            "b": (4096, jnp.float32),
            "c": (64, jnp.float16),
        }.items()
    }
    step = dq.compress(mean_of(data_mesh), "data", method="bf16", only=every_sum)
    large, single, small = step.report(tree).sums
    passes = 2 * (WORKERS - 1) / WORKERS
    assert large.bytes_before == large.bytes_after == passes * 2 * 4096
    assert single.bytes_before == 2 * single.bytes_after == passes * 4 * 4096
    assert (small.bytes_before, small.bytes_after) == (passes * 2 * 64, passes * 4 * 64)


def test_bytes_over_several_axes_are_those_of_the_slow_one():
    mesh = jax.make_mesh((2, 2), ("hosts", "local"), axis_types=(AxisType.Auto,) * 2)
    axes = mesh.axis_names
    leaf, small = (jax.ShapeDtypeStruct((size,), jnp.float32) for size in (4096, 64))
    step = jax.shard_map(lambda each: lax.psum(each, axes), mesh=mesh, in_specs=P(), out_specs=P())
    large, exact = dq.compress(step, axes, only=every_sum).report((leaf, small)).sums
    alone = dq.wire_report(leaf, (2, 2))
    assert large.bytes_before == 2 * 1 / 2 / 2 * 4 * 4096
    assert large.bytes_after == alone.bytes_per_worker
    assert large.bytes_before / large.bytes_after == pytest.approx(alone.ratio_f32)
    assert exact.bytes_before == exact.bytes_after == 2 * 1 / 2 / 2 * 4 * 64


def test_sums_that_are_too_small_to_save_bytes_have_the_reason_of_the_plan(data_mesh):
    tree = {"w": jax.ShapeDtypeStruct((WORKERS, 40), jnp.float32)}
    step = dq.compress(
        mean_of(data_mesh), "data", key=key_of, only=every_sum, method=dq.Compression(exact_below=0)
    )
    report = step.report(tree)
    assert ["too few to save bytes" in each.why_exact for each in report.sums] == [True]
    assert not report.compressed
    assert sent(step, tree) == report.sums[0].bytes_after == report.sums[0].bytes_before


def test_exact_sums_have_bytes_and_the_number_of_times_too():
    """In loops, behind them, over several axes, over groups of one, and over other axes alone."""
    mesh = jax.make_mesh((2, 2), ("hosts", "local"), axis_types=(AxisType.Auto,) * 2)
    axes = mesh.axis_names

    def step(w):
        def turn(total, _):
            return jnp.tanh(lax.psum(total[:3], "hosts")).sum() + total, None  # three times

        def inner(total, _):
            return lax.scan(turn, total, None, length=3)[0], None  # two times

        total = lax.scan(inner, w[:10], None, length=2)[0]
        total = lax.while_loop(lambda t: t[0] < 9, lambda t: lax.psum(t, "hosts") + 1, total)
        flags = lax.psum(total[:4].astype(jnp.int16), axes)
        halves = lax.psum(total[:5], "hosts", axis_index_groups=[[0], [1]])
        part = lax.psum_scatter(total[:8], "hosts", tiled=True)
        return lax.psum(w, axes), flags, halves, lax.psum(total[:6], "local"), part

    whole = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    options = {"method": "bf16", "only": lambda each: each.operation == "psum"}
    report = dq.compress(whole, axes, **options).report(PARAMS["w"].reshape(-1))
    assert [each.group for each in report.sums if each.is_compressed] == [0]
    alone = [each for each in report.sums if each.group is None]
    assert all(each.bytes_before == each.bytes_after for each in alone)
    found = {each.sum.shape: (each.times, each.bytes_before) for each in report.sums}
    assert found == {
        (1024,): (1, 2 * 1 / 2 * 4 * 1024 / 2),
        (3,): (6, 2 * 1 / 2 * 4 * 3),
        (10,): (None, 2 * 1 / 2 * 4 * 10),
        (4,): (1, 2 * 1 / 2 * 2 * 4 / 2),
        (5,): (1, None),
        (6,): (1, None),
        (8,): (1, 1 / 2 * 4 * 8),
    }
    rows = {line.split("[")[1].split("]")[0]: line for line in str(report).splitlines()[1:]}
    assert rows["3"].endswith(", 6 times") and rows["10"].endswith(", many times")
    assert rows["1024"].endswith(", group 0")


def test_rows_that_are_alike_are_one_row_with_their_number(data_mesh):
    step = dq.compress(mean_of(data_mesh), "data", only=every_sum)
    text = str(step.report(MANY)).splitlines()
    assert len(text) == 2
    assert text[1].startswith("12 x  psum test_report.py:")
    one = {"p00": MANY["p00"]}
    step = dq.compress(mean_of(data_mesh), "data", only=every_sum)
    alone = str(step.report(one)).splitlines()
    assert alone[1].startswith("psum test_report.py:")
    two = str(step.report(one | {"p01": MANY["p01"]})).splitlines()
    assert two[1].startswith("2 x  psum test_report.py:")


def test_a_row_names_the_cell_of_a_notebook(data_mesh):
    source = (
        "def local(stacked):\n    return lax.pmean({n: a[0] for n, a in stacked.items()}, 'data')"
    )
    names = {"lax": lax}
    exec(compile(source, "/tmp/ipykernel_7/1234567.py", "exec"), names)
    step = jax.shard_map(names["local"], mesh=data_mesh(WORKERS), in_specs=P("data"), out_specs=P())
    assert "psum cell:2:" in str(dq.compress(step, "data", only=every_sum).report(MANY))


def symbolic(*parts):
    shape = jax.export.symbolic_shape(", ".join(parts))
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_sums_of_symbolic_shapes_stay_exact(data_mesh):
    """A step that is exported for any number of rows: sums of rows have a symbolic shape."""

    def local(params, x, y):
        grads = jax.grad(mean_loss)(params, x, y)
        return (*lax.psum((x, y), "data"), grads)

    compressed = dq.compress(mapped(local, data_mesh(2), out=(P(),) * 3), "data", method="bf16")
    shape = symbolic("2*b", "32")
    report = compressed.report(PARAMS, shape, shape)
    exact = [each for each in report.sums if each.why_exact == "its shape is symbolic"]
    assert [str(each.sum.shape) for each in exact] == ["(b, 32)", "(b, 32)"]
    assert "[b,32]" in str(report)
    assert len(report.compressed) == 2
    exported = jax.export.export(jax.jit(compressed))(PARAMS, shape, shape)
    assert exported.out_avals[0].shape == exact[0].sum.shape


def test_an_exported_step_of_any_number_of_rows_runs():
    """In `jax.vmap`. JAX 0.10 cannot compile a call in `shard_map` whose sizes were symbolic."""

    def local(params, x, y):
        return lax.pmean(jax.grad(loss_fn)(params, x, y), "data")

    def over_workers(local):
        return jax.jit(jax.vmap(local, in_axes=(None, 0, 0), axis_name="data"))

    step = over_workers(dq.compress(local, "data", method="bf16"))
    shape = symbolic("2", "b", "32")
    exported = jax.export.export(step)(PARAMS, shape, shape)
    args = PARAMS, X.reshape(2, -1, 32), Y.reshape(2, -1, 32)
    assert 1e-8 < dq.vnmse(exported.call(*args), over_workers(local)(*args)) < 1e-4
