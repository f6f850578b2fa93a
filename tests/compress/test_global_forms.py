"""Steps that the compiler partitions, in the forms that people write: their sums are compressed."""

import collections
import contextlib

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._inputs.shards import over
from dynamiq_jax._inspection.collectives import collectives_of
from dynamiq_jax._inspection.devices import Devices
from tests.compress import further_global_forms, global_meshes  # noqa: F401
from tests.compress.global_forms import FORMS, Place

OPTIONS = dq.Options(exact_below=256)
KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}


pytestmark = pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")


@pytest.fixture(autouse=True)
def promotions_of_users():
    """flax and optax promote dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def placed(form, kind):
    """A form on a mesh, as the context in which it runs, the mesh, and the step."""
    mesh = form.mesh(KINDS[kind])
    around = jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext()
    with around:
        return around, mesh, form.make(Place(mesh))


CASES = [(name, kind) for name, form in FORMS.items() for kind in KINDS if form.runs_on(kind)]


def run(step, made, count=3):
    """Losses and the last state of some steps."""
    state, losses = made.state, []
    for _ in range(count):
        state, loss = step(state, *made.batch)
        # The compiler may place results otherwise than arguments, which would be another program.
        state = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), state, made.state)
        losses.append(float(loss))
    return np.array(losses), jax.tree.map(np.asarray, state)


def over_data(step, made, mesh):
    """Bytes that a device sends over the workers' axis in a step."""
    text = step.lower(made.state, *made.batch).compile().as_text()
    sent = collectives_of(text, Devices.of(mesh))
    return sum(each.bytes for each in sent if "data" in each.axes)


def of_pmean(sums, made, mesh):
    """Bytes that a device sends over the workers' axis for `dq.pmean` of sums.

    Gradients lie as parameters of their shape do, over other axes.
    """
    places = {leaf.shape: leaf.sharding.spec for leaf in jax.tree.leaves(made.state)}
    others = set(mesh.axis_names) - {"data"}
    specs = [over(places.get(each.shape, P()), others) for each in sums]

    def mean(tree):
        return dq.pmean(tree, "data", key=jax.random.key(0), specs=specs, options=OPTIONS)

    tree = [
        jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=NamedSharding(mesh, spec))
        for each, spec in zip(sums, specs, strict=True)
    ]
    mapped = jax.shard_map(
        mean, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False
    )
    sent = collectives_of(jax.jit(mapped).lower(tree).compile().as_text(), Devices.of(mesh))
    return sum(each.bytes for each in sent if "data" in each.axes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name, kind", CASES)
def test_exact_sums_are_those_of_the_compiler(name, kind):
    form = FORMS[name]
    around, _, made = placed(form, kind)
    with around:
        step = dq.compress(jax.jit(made.step), "data", method="exact", options=OPTIONS)
        losses, state = run(step, made)
        expected, wanted = run(jax.jit(made.step), made)
        report = step.report(made.state, *made.batch)
    np.testing.assert_allclose(losses, expected, rtol=form.tolerance)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=form.tolerance, atol=30 * form.tolerance)
    found = collections.Counter(each.sum.shape for each in report.compressed)
    assert found == collections.Counter(form.compressed)
    assert report.num_groups == form.groups


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", FORMS)
def test_compressed_sums_send_what_a_mean_of_the_same_tree_sends(name):
    """In place of what the compiler sends for the same sums."""
    form = FORMS[name]
    _, mesh, made = placed(form, "automatic")
    step, plain = dq.compress(jax.jit(made.step), "data", options=OPTIONS), jax.jit(made.step)
    report = step.report(made.state, *made.batch)
    losses, _ = run(step, made)
    expected, _ = run(plain, made)
    np.testing.assert_allclose(losses, expected, rtol=0.05)
    assert np.abs(losses - expected).max() > 0
    if not form.only_sums:
        return
    grouped = [each for each in report.sums if each.group is not None]
    left = over_data(plain, made, mesh) - sum(each.bytes_before for each in grouped)
    sent = over_data(step, made, mesh) - max(left, 0)
    for group in range(report.num_groups):
        sent -= of_pmean([each.sum for each in grouped if each.group == group], made, mesh)
    assert sent <= 8 * report.num_groups


def test_what_travels_as_a_gradient_beside_compressed_ones_stays_as_it_is_bit_for_bit():
    """Histories and scales of products of eight bits."""
    _, _, made = placed(FORMS["eight_bit_products"], "automatic")
    _, state = run(dq.compress(jax.jit(made.step), "data", method="exact", options=OPTIONS), made)
    _, wanted = run(jax.jit(made.step), made)
    histories = "_overwrite_with_gradient"
    jax.tree.map(np.testing.assert_array_equal, state[histories], wanted[histories])
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(state[histories]))
