"""Names of axes: one error names the argument, shows its value and lists the axes there are."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.training import LocalSGD
from tests.compress.forms import every_sum
from tests.support.workers import mesh_of

KEY = jax.random.key(0)
ROWS = jnp.ones((4, 64, 32))
NOT_DIFFERENT = (("hosts", "hosts"), (), ("hosts", 0), ["hosts", "local"], 0, None)
MISSPELT = (("hosts", "locl"), ("host", "local"), "data")


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(hosts=2, local=2)


def inside(function):
    """Call a function of rows in a map over both axes."""

    def call(mesh, axis_name):
        specs = {"in_specs": P(("hosts", "local")), "out_specs": P()}
        mapped = jax.shard_map(
            lambda rows: function(rows, axis_name), mesh=mesh, check_vma=False, **specs
        )
        return jax.eval_shape(mapped, ROWS)

    return call


def step_of(mesh, axes=("hosts", "local")):
    return jax.shard_map(
        lambda rows: lax.pmean(rows[0], axes),
        mesh=mesh,
        in_specs=P(axes),
        out_specs=P(),
        check_vma=False,
        axis_names=set(axes),
    )


def optimizer(rows, axis_name):
    transformation = dq.all_reduce_gradients(axis_name)
    return transformation.update(rows, transformation.init(rows))[0]


def compressed(mesh, axis_name):
    return dq.compress(step_of(mesh), axis_name)


FUNCTIONS = {
    "psum": inside(lambda rows, axis: dq.psum(rows, axis, key=KEY)),
    "pmean": inside(lambda rows, axis: dq.pmean(rows, axis, key=KEY)),
    "psum_scatter": inside(lambda rows, axis: dq.psum_scatter(rows[0], axis, key=KEY)),
    "all_gather": inside(lambda rows, axis: dq.all_gather(rows, axis, key=KEY)),
    "all_reduce_gradients": inside(optimizer),
    "wire_report": lambda mesh, axis: dq.wire_report(
        ROWS, axis, mesh=mesh, method=dq.Compression(specs=P())
    ),
    "call of compress": lambda mesh, axis: compressed(mesh, axis)(ROWS),
    "report of compress": lambda mesh, axis: compressed(mesh, axis).report(ROWS),
    "lower of compress": lambda mesh, axis: compressed(mesh, axis).lower(ROWS),
    "LocalSGD": inside(
        lambda rows, axis: LocalSGD(outer=optax.sgd(0.7), every=2, axis_name=axis).init(rows)
    ),
}


@pytest.mark.parametrize("axis_name", (*NOT_DIFFERENT, *MISSPELT), ids=repr)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_axes_are_named_once_and_those_that_are_not_there_beside_those_that_are(
    function, axis_name, mesh
):
    with pytest.raises(ValueError) as caught:
        FUNCTIONS[function](mesh, axis_name)
    said = str(caught.value)
    argument = "axis_size" if function == "wire_report" else "axis_name"
    assert f"{argument}={axis_name!r}" in said
    if axis_name in NOT_DIFFERENT:
        assert "Give" in said
        assert "does not name different axes" in said or "('hosts', 'local')" in said
        return
    wrong = next(name for name in ("locl", "host", "data") if repr(name) in repr(axis_name))
    assert repr(wrong) in said
    assert re.search(r"'hosts'.*'local'", said.replace(repr(axis_name), ""))


def test_axes_here_are_those_of_maps_and_of_vmap(mesh):
    def local(rows):
        return jax.vmap(lambda row: dq.psum(row, "data", key=KEY), axis_name="rows")(rows)

    specs = {"in_specs": P("hosts"), "out_specs": P("hosts"), "axis_names": {"hosts"}}
    mapped = jax.shard_map(local, mesh=mesh, check_vma=False, **specs)
    with pytest.raises(
        ValueError, match=r"'data' is not an axis here. There are 'hosts', 'rows'\."
    ):
        jax.eval_shape(mapped, ROWS)
    with pytest.raises(ValueError, match=r"'data' is not an axis here. There is none\."):
        dq.psum(ROWS, "data", key=KEY)


# ---------------------------------------------------------------------------- axes of a step


def test_axes_of_a_step_are_those_of_all_its_maps(mesh):
    """One map over both, and one over hosts alone, whose sum has one of the axes."""
    both, one = step_of(mesh), step_of(mesh, ("hosts",))

    def step(rows):
        return both(rows) + one(rows[:2])

    options = {"method": dq.Compression("bf16", specs=P()), "only": every_sum}
    report = dq.compress(step, ("hosts", "local"), **options).report(ROWS)
    assert [each.sum.axes for each in report.compressed] == [("hosts", "local"), ("hosts",)]
    with pytest.raises(ValueError, match=r"'local' is not an axis of the step.*\('hosts',\)"):
        dq.compress(one, ("hosts", "local"), **options).report(ROWS[:2])


def test_axes_around_a_step_count_as_well(mesh):
    """One of the axes is that of a map around the step, and the other that of its own map."""
    own = jax.shard_map(
        lambda rows: lax.pmean(rows, ("hosts", "local")),
        in_specs=P("local"),
        out_specs=P(),
        axis_names={"local"},
        check_vma=False,
    )
    step = dq.compress(own, ("hosts", "local"), method="bf16", only=every_sum)
    specs = {"in_specs": P("hosts"), "out_specs": P(), "axis_names": {"hosts"}}
    mapped = jax.shard_map(step, mesh=mesh, check_vma=False, **specs)
    assert jax.eval_shape(jax.jit(mapped), ROWS).shape == (1, 64, 32)


@pytest.mark.parametrize("axis_name", [("hosts", "locl"), ("data", "locl"), "data"])
def test_a_step_that_may_lack_sums_may_lack_all_axes_but_not_one_of_several(axis_name, mesh):
    step = dq.compress(step_of(mesh), axis_name, missing_ok=True)
    if "hosts" in axis_name:
        for function in (step, step.report):
            with pytest.raises(ValueError, match="'locl' is not an axis of the step"):
                function(ROWS)
    else:
        assert not step.report(ROWS).compressed
        assert jnp.array_equal(step(ROWS), ROWS[0])
