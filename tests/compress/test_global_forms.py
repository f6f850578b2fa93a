"""Steps that the compiler partitions, in the forms that people write: their sums are compressed."""

import collections
import contextlib

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._inspection.collectives import collectives_of
from dynamiq_jax._inspection.devices import Devices
from tests.compress import further_global_forms, global_meshes  # noqa: F401
from tests.compress.global_forms import FORMS, Place

OPTIONS = dq.Options(exact_below=256)
KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
SUMS = ("all-reduce", "reduce-scatter")


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


def cases():
    for name, form in FORMS.items():
        yield name, "automatic"
        if form.explicit:
            yield name, "explicit"


def run(step, made, count=3):
    """Losses and the last state of some steps."""
    state, losses = made.state, []
    for _ in range(count):
        state, loss = step(state, *made.batch)
        # The compiler may place results otherwise than arguments, which would be another program.
        state = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), state, made.state)
        losses.append(float(loss))
    return np.array(losses), jax.tree.map(np.asarray, state)


def over_data(step, made, mesh, opcodes=None):
    """Bytes over the workers' axis that a device sends in a step, of all collectives or some."""
    text = step.lower(made.state, *made.batch).compile().as_text()
    return sum(
        each.bytes
        for each in collectives_of(text, Devices.of(mesh))
        if "data" in each.axes and (opcodes is None or each.opcode in opcodes)
    )


def bytes_of_pmean(report, mesh, method):
    """Bytes that `dq.pmean` of the same tree sends."""
    tree = {f"{i:03}": each for i, each in enumerate(report.sums) if each.group is not None}
    return sum(each.bytes_after * (each.times or 1) for each in tree.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name, kind", cases())
def test_exact_sums_are_those_of_the_compiler(name, kind):
    form = FORMS[name]
    around, mesh, made = placed(form, kind)
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
