"""Metrics of an all-reduce, the estimate of its error among them, and a limit of that error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._collectives.all_reduce import AllReduce
from dynamiq_jax._collectives.measured import measured as add_estimate
from dynamiq_jax._inputs.request import resolve
from dynamiq_jax._measurement.gradients import worker_gradients
from dynamiq_jax.methods import METHODS, ErrorFeedback
from tests.support.gradients import of_workers, vnmse
from tests.support.states import SPECS, on_mesh
from tests.support.workers import mesh_of, simulated

KEY = jax.random.key(5)
SIZE = 2**20
FEW_WIDTHS = dq.DynamiQ(bits=4, widths=(2, 4, 8))  # compiles faster than eight


def noise(workers, seed=0):
    return np.random.default_rng(seed).normal(size=(workers, SIZE)).astype(np.float32)


DATA = {
    "gradients": lambda workers: worker_gradients(workers, SIZE, seed=0),
    "weights": lambda workers: 0.02 * noise(1, 1) + 1e-3 * noise(workers),
    "white noise": noise,
}


@functools.cache
def measured(method, workers, **options):
    """A compiled mean with metrics, of workers on one device."""
    mean = functools.partial(dq.pmean, axis_name="data", with_metrics=True)
    choice = dq.Compression(method, **options)
    local = lambda key, values: mean(values, method=choice, key=key)  # noqa: E731
    run = jax.jit(jax.vmap(local, axis_name="data", in_axes=(None, 0)))
    return lambda key, values: jax.tree.map(lambda leaf: np.asarray(leaf[0]), run(key, values))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("bits", "workers"), [(4, 2), (6, 2), pytest.param(5, 8, marks=pytest.mark.slow)]
)
def test_the_error_of_dynamiq_is_known_within_20_percent(bits, workers):
    for kind, data in DATA.items():
        values = data(workers)
        mean, metrics = measured(f"dynamiq:{bits}", workers)(KEY, values)
        exact = values.mean(0, dtype=np.float64)
        off = metrics["error"] / vnmse(mean, exact) - 1
        assert abs(off) < 0.2, kind
        squared, norms = (
            np.sum(rows.reshape(-1, 256) ** 2, axis=1)
            for rows in (mean - exact, mean.astype(np.float64))
        )
        off = metrics["row_error"] / np.mean(squared / norms) - 1
        assert abs(off) < 0.2, kind


class EveryOtherRow(dq.methods.Exact):
    """Sums rows of an even number, and loses the others."""

    def all_reduce(self, flat, call, key, state):
        is_kept = jnp.arange(flat.size) // 256 % 2 == 0
        return super().all_reduce(jnp.where(is_kept, flat, 0), call, key, state)


def test_rows_that_are_lost_count_as_one():
    """A row of which nothing arrives has no squared norm to divide by."""
    values = np.random.default_rng(0).normal(size=(2, SIZE // 4)).astype(np.float32)
    mean, metrics = measured(EveryOtherRow(), 2)(KEY, values)
    lost = np.mean(np.all(mean.reshape(-1, 256) == 0, axis=1))
    assert 0.3 < lost < 0.95
    assert metrics["row_error"] == pytest.approx(lost, abs=0.1)


@pytest.mark.parametrize("method", ("blockint:4:rounding=stochastic", "mxfp4"))
def test_the_norm_is_that_of_the_exact_mean_and_a_compressed_one_has_the_energy_of_its_error(
    method,
):
    """Which the gradient noise scale depends on. The rule holds for rounding without bias alone."""
    values = worker_gradients(4, SIZE, seed=0, octaves=1.0)
    truth = values.mean(0, dtype=np.float64)
    mean, metrics = measured(method, 4)(KEY, values)
    square, compressed = truth @ truth, np.sum(np.square(mean, dtype=np.float64))
    assert 0.02 < metrics["error"] < 0.2
    assert abs(metrics["norm"] ** 2 / square - 1) < 0.025
    assert abs(compressed / square - 1) > 0.03
    corrected = compressed / (1 + metrics["error"]) / square - 1
    assert corrected < -0.1 if method == "mxfp4" else abs(corrected) < 0.005


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name in METHODS.own if name not in ("exact", "dynamiq")])
def test_the_error_of_every_method_is_estimated(name, rel=0.4):
    """Of one with a state in its first step."""
    values = worker_gradients(4, SIZE // 4, seed=0)
    reduce = dq.all_reduce_gradients("data", method=name, with_metrics=True)

    def local(values):
        return reduce.update(values, reduce.init(values))

    mean, state = jax.jit(jax.vmap(local, axis_name="data"))(values)
    found, truth = float(state.metrics["error"][0]), values.mean(0, dtype=np.float64)
    assert found == pytest.approx(vnmse(mean[0], truth), rel=rel)
    method = METHODS[name]()
    of_state = {"reset_states"} if method.is_stateful else set()
    assert set(state.metrics) == {*method.metrics, *method.details, *MEASURED, *of_state}


MEASURED = {"error", "row_error", "worst_error", "worst_bucket", "norm", "non_finite", "bytes"}
MEASURED |= {"fallbacks"}


def test_the_estimate_is_unbiased():
    """The mean over keys of the sample, of one result."""
    values = worker_gradients(2, SIZE // 16, seed=1)

    def local(key, values):
        # Rounds to nearest: keys choose the sample alone.
        mean, metrics = dq.pmean(values, "data", "mxint8", key=key, with_metrics=True)
        return mean, metrics["error"]

    run = jax.jit(jax.vmap(local, axis_name="data", in_axes=(None, 0)))
    means, found = zip(*(run(jax.random.key(n), values) for n in range(80)), strict=True)
    np.testing.assert_array_equal(means[0], means[-1])
    found = np.array([each[0] for each in found])
    error = found.std() / np.sqrt(len(found))
    assert error > 0
    assert abs(found.mean() - vnmse(means[0][0], values.mean(0, dtype=np.float64))) < 5 * error


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_units_do_not_matter(scale):
    values = worker_gradients(2, SIZE // 16, seed=1)
    _, metrics = measured("mxfp8", 2)(KEY, values)
    _, scaled = measured("mxfp8", 2)(KEY, values * np.float32(scale))
    assert scaled["error"] == pytest.approx(metrics["error"], rel=1e-3)
    assert scaled["norm"] == pytest.approx(scale * metrics["norm"], rel=1e-3)
    assert metrics["norm"] == pytest.approx(
        np.linalg.norm(values.mean(0, dtype=np.float64)), rel=0.01
    )


def test_rows_that_are_not_finite_are_counted_and_do_not_hide_the_others():
    values = worker_gradients(2, SIZE // 16, seed=1)
    _, metrics = measured("bf16", 2)(KEY, values)
    values[0, 256 * 8 : 256 * 10 : 100] = np.nan
    values[1, 256 * 20] = np.inf
    _, bad = measured("bf16", 2)(KEY, values)
    assert metrics["non_finite"] == 0 and bad["non_finite"] == np.float32(3 / 256)
    assert bad["error"] == pytest.approx(metrics["error"], rel=0.2)


def test_zeros_and_equal_values_have_no_error():
    _, metrics = measured("bf16", 2)(KEY, np.zeros((2, 8192), np.float32))
    assert metrics["error"] == metrics["norm"] == 0
    _, metrics = measured("exact", 2)(KEY, np.ones((2, 8192), np.float32))
    assert metrics["error"] == 0 and metrics["norm"] == pytest.approx(8192**0.5)


TREE = {"a": of_workers(0, 4, 64 * 4096).reshape(4, 64, 4096), "b": of_workers(1, 4, 9)}


@pytest.mark.parametrize(
    "options", [{}, {"bucket_bytes": 2**18, "unrolled_buckets": 1, "bucketing": "in_order"}]
)
def test_buckets_are_counted_together_and_alone(options):
    values = {"a": TREE["a"] * np.repeat([1.0, 100.0], 32)[:, None], "b": TREE["b"]}
    mean, metrics = measured("blockint:4", 4, **options)(KEY, values)
    truth = values["a"].mean(0, dtype=np.float64)
    assert metrics["error"] == pytest.approx(vnmse(mean["a"], truth), rel=0.4)
    buckets = 4 if options else 1
    parts = (np.split(each, buckets) for each in (mean["a"], truth))
    errors = [vnmse(*pair) for pair in zip(*parts, strict=True)]
    assert metrics["worst_error"] == pytest.approx(max(errors), rel=0.4)
    one = {name: leaf[0] for name, leaf in values.items()}
    report = dq.wire_report(one, 4, dq.Compression("blockint:4", **options))
    assert [leaf.buckets for leaf in report.leaves] == [tuple(range(buckets)), ()]


def test_the_bucket_with_the_largest_error_has_a_number():
    """Noise takes the errors of 4 bits; few large values among many small ones take less."""
    even, steep = noise(2)[:, : 2**16], of_workers(0, 2, 2**16)
    options = {"bucket_bytes": 2**18, "bucketing": "in_order"}
    for tree, worst in (({"a": even, "b": steep}, 0), ({"a": steep, "b": even}, 1)):
        _, metrics = measured(FEW_WIDTHS, 2, **options)(KEY, tree)
        assert metrics["worst_bucket"] == worst


@pytest.mark.slow
def test_widths_follow_the_data():
    flat = measured("dynamiq:5", 2)(KEY, noise(2)[:, : 2**16])[1]
    assert flat["width_max"] - flat["width_min"] <= 1 and flat["width_std"] < 0.5
    values = worker_gradients(2, 2**16, seed=0)
    steep = measured("dynamiq:5", 2)(KEY, values)[1]
    assert steep["width_max"] - steep["width_min"] >= 3 and steep["width_std"] > 0.5


@pytest.mark.parametrize("axes", [("data",), ("data", "local")])
def test_metrics_have_the_bytes_of_the_report(axes):
    """With those of the sample."""
    own, sizes = jax.tree.map(lambda leaf: leaf[0], TREE), (4, 2)[: len(axes)]
    how = {"method": "bf16", "with_metrics": True}
    mean = functools.partial(dq.pmean, axis_name=axes, key=KEY, **how)
    for axis, size in zip(axes, sizes, strict=True):
        mean = jax.vmap(mean, in_axes=None, axis_name=axis, axis_size=size)
    _, metrics = jax.jit(mean)(own)
    report = dq.wire_report(own, sizes, **how)
    assert np.all(metrics["bytes"] == report.bytes_per_worker)
    assert 0 < report.sample_bytes < 0.01 * report.bytes_per_worker


def test_metrics_have_the_bytes_of_the_comparison_of_states():
    method = "ef+blockint:4"
    reduce = dq.all_reduce_gradients("data", method, with_metrics=True)
    own = jax.tree.map(lambda leaf: leaf[0], TREE)

    def step(tree):
        return reduce.update(tree, reduce.init(tree))[1].metrics["bytes"]

    over_workers = jax.vmap(step, in_axes=None, axis_name="data", axis_size=4)
    report = dq.wire_report(own, 4, method, with_metrics=True)
    assert report.check_bytes and np.all(jax.jit(over_workers)(own) == report.bytes_per_worker)


def test_metrics_are_the_same_on_all_devices_of_a_manual_mesh():
    """Under check_vma=True, which a scan and out_specs=P() need, and beside another axis."""
    mesh = mesh_of(data=2, model=2)
    steep = 10 ** np.linspace(-4, 4, 2**13, dtype=np.float32)
    values = np.stack([noise(2, 0)[:, : 2**13], noise(2, 1)[:, : 2**13] * steep], 1)
    method = dq.DynamiQ(widths=(4, 5, 8))
    reduce = dq.all_reduce_gradients("data", method, with_metrics=True)

    def update(values, state):
        def one(state, _):
            return reduce.update(values[0], state)[::-1]

        return jax.lax.scan(one, state, length=2)[0]

    mapped = jax.shard_map(update, mesh=mesh, in_specs=(P("data", "model"), SPECS), out_specs=SPECS)
    metrics = jax.jit(mapped)(values, reduce.init(values[0])).metrics
    for value in metrics.values():
        assert len({np.asarray(shard.data).tobytes() for shard in value.addressable_shards}) == 1
    alone = [measured(method, 2)(KEY, part)[1]["width_max"] for part in values.swapaxes(0, 1)]
    assert alone[0] != alone[1]
    assert metrics["width_max"] == sum(alone) / 2


def hostile(step):
    """Gradients of two workers: from step 3 to 5, white noise with spikes of one worker."""
    if not 3 <= step < 6:
        return worker_gradients(2, SIZE // 8, seed=step)
    values = noise(2, step)[:, : SIZE // 8]
    values[0, :: 100 + step] *= 50
    return values


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"bucket_bytes": 2**17, "unrolled_buckets": 1, "bucketing": "in_order"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_limit_holds_in_every_step_and_lets_go_afterwards(data_mesh, options):
    limit, buckets = 1e-2, 2 if options else 1
    choice = dq.Compression(FEW_WIDTHS, max_error=limit, **options)
    reduce = dq.all_reduce_gradients("data", choice, with_metrics=True)

    init, update = on_mesh(reduce, data_mesh(2))
    state, fallbacks = init(jnp.zeros((SIZE // 2**13, 1024))), []
    for step in range(8):
        values = hostile(step).reshape(2, -1, 1024)
        mean, state = update(values, state)
        error = vnmse(mean, values.mean(0, dtype=np.float64))
        assert error < limit
        fallbacks.append(int(state.metrics["fallbacks"]))
        assert (error < 1e-12) == (fallbacks[-1] == buckets)
        assert state.metrics["worst_error"] < limit
    assert fallbacks == [0] * 3 + [buckets] * 3 + [0] * 2


def test_what_is_sent_again_counts_as_sent():
    values = noise(2)[:, : SIZE // 16]
    calm = measured("blockint:4", 2, max_error=1.0)(KEY, values)[1]
    again = measured("blockint:4", 2, max_error=1e-6)(KEY, values)[1]
    assert (calm["fallbacks"], again["fallbacks"]) == (0, 1)
    assert again["bytes"] - calm["bytes"] == 4 * SIZE // 16


def test_without_metrics_a_limit_holds_too():
    values = noise(2)[:, : SIZE // 16]

    def local(key, values):
        return dq.psum(values, "data", key=key, method=dq.Compression("blockint:4", max_error=1e-6))

    total = simulated(local)(KEY, values)
    np.testing.assert_allclose(total[0], values.sum(0), rtol=1e-5, atol=1e-5)


def test_shards_are_counted_once():
    mesh = mesh_of(data=2, model=4)
    values = of_workers(3, 2, 256 * 512).reshape(2, 256, 512)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P(), axis_names={"data"})
    def mean_of(stacked):
        specs = {"w": P("model"), "b": P()}
        tree = {"w": stacked[0], "b": stacked[0, :8]}
        choice = dq.Compression("blockint:4", specs=specs)
        return dq.pmean(tree, "data", choice, key=KEY, with_metrics=True)

    mean, metrics = mean_of(jax.device_put(values, jax.NamedSharding(mesh, P("data", "model"))))
    truth = values.mean(0, dtype=np.float64)
    whole = np.concatenate([truth, truth[:8]])
    assert metrics["norm"] == pytest.approx(np.linalg.norm(whole), rel=0.02)
    found = vnmse(np.concatenate([mean["w"], mean["b"]]), whole)
    assert metrics["error"] == pytest.approx(found, rel=0.3)


@pytest.mark.parametrize("limit", [-1.0, float("nan"), "small", True])
def test_impossible_limits(limit):
    with pytest.raises(ValueError, match="max_error="):
        dq.Compression(max_error=limit)


@pytest.mark.parametrize("last_first", (True, False))
def test_an_estimate_changes_nothing_else_of_an_all_reduce(last_first):
    plain = AllReduce(Axes.of({"data": 2}), mean=True, last_first=last_first)
    found = add_estimate(plain, resolve("dynamiq", measures=True))
    assert type(found) is not AllReduce
    assert {name: getattr(found, name) for name in vars(plain)} == vars(plain)


@pytest.mark.parametrize("function", [dq.psum_scatter, dq.all_gather])
def test_half_an_all_reduce_has_no_limit(function):
    def local(key, values):
        return function(values, "data", key=key, method=dq.Compression(max_error=0.1))

    with pytest.raises(ValueError, match=r"max_error=0\.1 .*half of one"):
        simulated(local)(KEY, np.ones((2, 2, 4096), np.float32))


def test_a_limit_with_a_state_is_refused():
    reduce = dq.all_reduce_gradients(
        "data", method=dq.Compression(ErrorFeedback(inner=dq.methods.BF16()), max_error=0.1)
    )
    with pytest.raises(ValueError, match=r"max_error=0\.1 has no meaning.*ErrorFeedback"):
        jax.vmap(reduce.init, axis_name="data")(np.ones((2, 4096), np.float32))
