"""The rest of a step: its buffers, effects, scopes and checkpoints are those that it had."""

import gc
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.compress.forms import FORMS, PARAMS, X, Y, loss_fn, mapped, mean_loss, own_gradient

pytestmark = pytest.mark.frames
METHOD = "bf16"


def sgd(params, x, y):
    return jax.tree.map(jnp.subtract, params, jax.grad(mean_loss)(params, x, y))


def fresh():
    return jax.tree.map(jnp.array, PARAMS)


def test_a_step_is_traced_once_for_arguments_of_one_kind(mesh):
    traces = []

    def counted(params, x, y):
        traces.append(x.shape)
        return sgd(params, x, y)

    for fun in (mapped(counted, mesh), jax.jit(mapped(counted, mesh))):
        step = dq.compress(fun, "data", method=METHOD)
        traces.clear()
        for _ in range(3):
            step(PARAMS, X, Y)
        assert traces == [(X.shape[0] // 2, 32)]
        step(PARAMS, X[:8], Y[:8])
        assert len(traces) == 2


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_garbage_collector_is_as_it_was(is_enabled, mesh):
    """A trace pauses it, also one that ends in an error."""
    if not is_enabled:
        gc.disable()
    try:
        step = mapped(sgd, mesh)
        dq.compress(step, "data", method=METHOD).trace(PARAMS, X, Y)
        assert gc.isenabled() == is_enabled
        with pytest.raises(ValueError, match="no sum"):
            dq.compress(step, "other", method=METHOD).trace(PARAMS, X, Y)
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()


def test_effects_keep_their_order(mesh):
    """The second one needs the sum, the third one does not."""
    seen = []

    def note(value):
        seen.append(int(value))

    def step(params, x, y):
        grads = jax.grad(mean_loss)(params, x, y)
        return grads

    def whole(params, x, y):
        io_callback(note, None, jnp.int32(1), ordered=True)
        grads = mapped(step, mesh)(params, x, y)
        number = jnp.int32(2) + (0 * jnp.sum(grads["w"])).astype(jnp.int32)
        io_callback(note, None, number, ordered=True)
        io_callback(note, None, jnp.int32(3), ordered=True)
        return grads

    jax.block_until_ready(jax.jit(dq.compress(whole, "data", method=METHOD))(PARAMS, X, Y))
    jax.effects_barrier()
    assert seen == [1, 2, 3]


def test_scopes_and_lines_of_the_source_are_kept(mesh):
    def step(params, x, y):
        with jax.named_scope("chosen_by_the_author"):
            scaled = jnp.sin(x)
        return jax.grad(mean_loss)(params, scaled, y)

    text = (
        dq.compress(mapped(step, mesh), "data", method=METHOD)
        .lower(PARAMS, X, Y)
        .as_text(debug_info=True)
    )
    (line,) = [line for line in text.splitlines() if "stablehlo.sine" in line]
    (name,) = re.findall(r"loc\((#loc\d+)\)", line)
    (named,) = [line for line in text.splitlines() if line.startswith(f"{name} = ")]
    assert "chosen_by_the_author/sin" in named
    assert "test_programs.py" in text


def test_what_a_checkpoint_computes_again_is_computed_again(mesh):
    form = FORMS["layers_in_a_scan_with_checkpoint"](mesh)

    def marks(step):
        text = str(jax.make_jaxpr(step)(*form.args))
        return text.count("differentiated=True"), text.count("prevent_cse=True")

    assert marks(form.step)[0] > 0
    assert marks(dq.compress(form.step, "data", method=METHOD)) == marks(form.step)


def test_a_step_that_is_compressed_already_stays_as_it_is(mesh):
    """A part of a collective of the library is no sum of the step."""
    small = {f"b{number}": jnp.ones((512,)) for number in range(4)}

    def step(params, x, y):
        own = lax.pcast((params, small), "data", to="varying")
        return dq.pmean(own, "data", key=jax.random.key(0), method=METHOD)

    with pytest.raises(ValueError, match="compressed already"):
        dq.compress(mapped(step, mesh), "data")(PARAMS, X, Y)


def test_groups_of_an_axis_stay_exact(data_mesh):
    def step(params, x, y):
        grads = jax.grad(loss_fn)(params, x, y)
        part = lax.psum(grads["w"], "data", axis_index_groups=[[0, 1], [2, 3]])
        return lax.psum(part, "data"), lax.psum(grads["v"], "data")

    fun = mapped(step, data_mesh(4), check_vma=False)
    report = dq.compress(fun, "data").report(PARAMS, X, Y)
    assert [each.why_exact for each in report.sums if each.group is None] == [
        "over groups of an axis (axis_index_groups)"
    ]
    assert len(report.compressed) == 2


@pytest.mark.parametrize("check_vma", [False, True])
def test_only_chooses_among_large_sums(check_vma, mesh):
    """Without check_vma, the sums of a tree are one equation, with it one for each leaf."""
    asked = []

    def only(each):
        asked.append(each)
        return len(asked) == 1

    gradient = own_gradient if check_vma else jax.grad(loss_fn)
    step = mapped(lambda *a: lax.pmean(gradient(*a), "data"), mesh, check_vma=check_vma)
    compressed = dq.compress(step, "data", method=METHOD, only=only)
    report = compressed.report(PARAMS, X, Y)
    assert {each.shape for each in asked} == {(32, 32)}
    assert len(report.compressed) == 1
    asked.clear()
    got, expected = compressed(PARAMS, X, Y), jax.jit(step)(PARAMS, X, Y)
    errors = [float(dq.vnmse(got[name], expected[name])) for name in "vw"]
    assert min(errors) < 1e-12 < max(errors)


def test_a_program_with_an_unknown_equation_around_a_sum_is_refused(mesh):
    around = Primitive("around")
    around.multiple_results = True
    around.def_abstract_eval(lambda *avals, jaxpr: jaxpr.out_avals)
    mlir.register_lowering(around, lambda context, *values, jaxpr: values)

    def step(params, x, y):
        inner = jax.make_jaxpr(lambda w: lax.psum(w, "data"))(params["w"])
        return around.bind(params["w"], jaxpr=inner)

    fun = mapped(step, mesh, check_vma=False)
    with pytest.raises(ValueError, match="inside of 'around'"):
        dq.compress(fun, "data", only=lambda each: True)(PARAMS, X, Y)
    left = dq.compress(fun, "data", only=lambda each: False)
    with pytest.raises(ValueError, match=r"only= returned False"):
        left(PARAMS, X, Y)


def test_mistakes_are_errors(mesh):
    step = mapped(lambda *a: jax.grad(mean_loss)(*a), mesh)
    args = (PARAMS, X, Y)
    with pytest.raises(TypeError, match="fun=3 cannot be called"):
        dq.compress(3, "data")
    with pytest.raises(ValueError, match="axis_name=3"):
        dq.compress(step, 3)
    with pytest.raises(TypeError, match=r"(?s)key=.*cannot be called"):
        dq.compress(step, "data", key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"only=.*cannot be called"):
        dq.compress(step, "data", only="w")
    with pytest.raises(TypeError, match="is one name"):
        dq.compress(step, "data", operations="psum")
    with pytest.raises(ValueError, match="operations='pmean'"):
        dq.compress(step, "data", operations=("pmean",))
    with pytest.raises(ValueError, match="all_reduce_gradients"):
        dq.compress(step, "data", method="ef+bf16")(*args)
    with pytest.raises(ValueError, match="over 'data'"):
        dq.compress(step, "model")(*args)
    with pytest.raises(TypeError, match=r"specs=\{.*is a tree"):
        dq.compress(step, "data", dq.Compression(specs={"w": P()}))
    automatic = jax.jit(lambda params, x, y: jax.grad(loss_fn)(params, x, y))
    unsplit = r"No argument is known to be split over 'data', .*\n.*eval_shape.*in_specs="
    with pytest.raises(ValueError, match=unsplit):
        dq.compress(automatic, "data")(*args)
    # Parameters on the mesh, and a batch that is not; then a name that the mesh does not have.
    placed = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    with pytest.raises(ValueError, match=unsplit):
        dq.compress(automatic, "data")(placed, *args[1:])
    with pytest.raises(ValueError, match=r"axes of the step and its arguments are \('data',\)"):
        dq.compress(automatic, "dta")(placed, *args[1:])
    with pytest.raises(ValueError, match="smaller exact_below=10000000"):
        dq.compress(step, "data", dq.Compression(exact_below=10**7))(*args)
    rows = NamedSharding(mesh, P("data"))
    with pytest.raises(ValueError, match=r"in_specs=.* has 'dta', .* axes are \('data',\)"):
        specs = P(), P("dta"), rows
        dq.compress(automatic, "data", in_specs=specs)(*args)
    with pytest.raises(
        ValueError, match=r"in_specs gives .* for an array of shape \(16, 32\), which has 2"
    ):
        dq.compress(automatic, "data", in_specs=(P(), rows, P(None, None, "data")))(*args)
    with pytest.raises(ValueError, match=r"in_specs=\(.*\) does not fit"):
        dq.compress(automatic, "data", in_specs=(P(), rows))(*args)


def test_a_step_that_reads_values_is_told_that_it_is_traced(mesh):
    step = mapped(lambda *a: lax.pmean(jax.grad(mean_loss)(*a), "data"), mesh)

    def of_host(*args):
        return float(step(*args)["w"].sum())

    with pytest.raises(jax.errors.ConcretizationTypeError) as error:
        dq.compress(of_host, "data", method=METHOD)(PARAMS, X, Y)
    assert any("dq.compress traces all of of_host" in note for note in error.value.__notes__)


def test_a_branch_of_another_platform_is_not_lowered(mesh):
    elsewhere = Primitive("elsewhere")  # no platform has a rule for it
    elsewhere.def_abstract_eval(lambda x: x)

    def step(params, x, y):
        def other(leaf):
            return lax.psum(elsewhere.bind(leaf), "data")

        gradient = own_gradient(params, x, y)["w"]
        return lax.platform_dependent(
            gradient, tpu=other, cpu=lambda leaf: lax.pmean(leaf, "data"), default=other
        )

    whole = mapped(step, mesh)
    compressed = dq.compress(whole, "data", method=METHOD)
    assert 0 < dq.vnmse(compressed(PARAMS, X, Y), jax.jit(whole)(PARAMS, X, Y)) < 1e-4
