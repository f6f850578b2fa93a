"""Leaves that are sharded over further axes: every device compresses and sends its own shards."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from benchmarks.speed.mesh_bytes import sent_by_axes
from dynamiq_jax._inputs.shards import Shards
from dynamiq_jax.methods import ErrorFeedback
from tests.support.gradients import of_workers, vnmse
from tests.support.states import of_buckets, on_mesh
from tests.support.workers import STOCHASTIC, TWO_WIDTHS, Largest, mesh_of

KEY = jax.random.key(3)
WIDTH, HIDDEN, ROWS = 256, 1024, 16
MESHES = (
    *("data 2 x fsdp 4", "data 4 x fsdp 2", "data 2 x fsdp 2 x tensor 2"),
    *("data 2 x expert 4", "data 8 x fsdp 1"),
)


@functools.cache
def mesh_named(name: str, kind: AxisType = AxisType.Auto):
    sizes = dict(part.split() for part in name.split(" x "))
    return mesh_of(kind=kind, **{axis: int(size) for axis, size in sizes.items()})


def specs_of(mesh):
    others = [name for name in mesh.axis_names if name != "data"]
    first, last = others[0], others[-1]
    second = last if last != first else None
    return {
        "in": P(first, second),
        "out": P(second, first),
        "scale": P(),  # whole on every device
        "shift": P(first),  # exact: too small
    }


def params():
    rng = np.random.default_rng(0)
    shapes = {"in": (WIDTH, HIDDEN), "out": (HIDDEN, WIDTH), "scale": (4, 1024), "shift": (512,)}
    return {
        name: (rng.normal(size=shape) * 0.1).astype(np.float32) for name, shape in shapes.items()
    }


def batch():
    return np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)


def loss_fn(params, x):
    scale = params["scale"].reshape(-1, HIDDEN).mean(0)
    hidden = jnp.tanh(x @ params["in"]) * (1 + scale)[None, :]
    shift = jnp.concatenate([params["shift"]] * 2)
    return jnp.mean(((hidden + shift[None, :]) @ params["out"]) ** 2)


def placed(mesh):
    return {
        name: jax.device_put(leaf, NamedSharding(mesh, specs_of(mesh)[name]))
        for name, leaf in params().items()
    }


def over_data(mesh, local, *, check_vma: bool = True):
    """A map over "data" alone, of `local(params, rows, key)`."""
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P("data"), P()),
        out_specs=P(),
        axis_names={"data"},
        check_vma=check_vma,
    )


def own_gradients(params, x):
    """Gradients of the rows of this worker."""
    own = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "data", to="varying"), params)
    return jax.grad(loss_fn)(own, x)


def by_pmean(mesh, method, check_vma=True):
    choice = dq.Compression(method, specs=specs_of(mesh))

    def local(params, x, key):
        grads = own_gradients(params, x) if check_vma else jax.grad(loss_fn)(params, x)
        return dq.pmean(grads, "data", choice, key=key)

    return over_data(mesh, local, check_vma=check_vma)


def by_optimizer(mesh, method):
    reduce = dq.all_reduce_gradients("data", method=dq.Compression(method, specs=specs_of(mesh)))

    def local(params, x, key):
        del key
        return reduce.update(own_gradients(params, x), reduce.init(params))[0]

    return over_data(mesh, local)


def exact(mesh, method):
    del method
    return over_data(mesh, lambda params, x, key: jax.lax.pmean(own_gradients(params, x), "data"))


FORMS = {
    "pmean": by_pmean,
    "unchecked pmean": functools.partial(by_pmean, check_vma=False),
    "all_reduce_gradients": by_optimizer,
    "exact": exact,
}


def method_of(mesh_name: str):
    """The default's codec on one mesh; on the others one that compiles fast."""
    return TWO_WIDTHS if mesh_name == "data 4 x fsdp 2" else STOCHASTIC


@functools.cache
def compiled(form: str, mesh_name: str):
    mesh = mesh_named(mesh_name)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs_of(mesh).items()}
    split = NamedSharding(mesh, P("data"))
    step = jax.jit(
        FORMS[form](mesh, method_of(mesh_name)),
        in_shardings=(shardings, split, None),
        out_shardings=shardings,
    )
    return step.lower(params(), batch(), KEY).compile()


CASES = [
    *(("pmean", name) for name in MESHES),
    *((form, "data 2 x fsdp 4") for form in ("unchecked pmean", "all_reduce_gradients")),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("form", "mesh_name"), CASES)
def test_every_device_sends_its_own_shards(form, mesh_name):
    """The bytes of the compiled program are those of the report, and the whole divided by the
    other axes; these carry no more than in an exact step.
    """
    mesh, specs = mesh_named(mesh_name), specs_of(mesh_named(mesh_name))
    method = method_of(mesh_name)

    def reported(names):
        choice = dq.Compression(method, specs={name: specs[name] for name in names})
        return dq.wire_report({name: params()[name] for name in names}, "data", choice, mesh=mesh)

    ours = sent_by_axes(compiled(form, mesh_name).as_text(), mesh)
    theirs = sent_by_axes(compiled("exact", mesh_name).as_text(), mesh)
    over_data = sum(size for axes, size in ours.items() if "data" in axes)
    assert abs(over_data - reported(specs).bytes_per_worker) <= 1
    sharded = {name: params()[name] for name in ("in", "out")}
    whole = dq.wire_report(sharded, mesh.shape["data"], method=method)
    others = mesh.size / mesh.shape["data"]
    assert reported(sharded).compressed_bytes * others == pytest.approx(
        whole.compressed_bytes, rel=0.03
    )
    beside = [
        sum(size for axes, size in sent.items() if "data" not in axes) for sent in (ours, theirs)
    ]
    assert beside[0] <= 1.05 * beside[1] + 64


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("form", "mesh_name"), [case for case in CASES if method_of(case[1]) is STOCHASTIC]
)
def test_a_step_needs_hardly_more_memory_than_an_exact_one(form, mesh_name):
    """Without activations, so that gradients are all that counts. `benchmarks.training.big_models`
    has the default, and activations.
    """
    ours, theirs = (
        compiled(name, mesh_name).memory_analysis().temp_size_in_bytes for name in (form, "exact")
    )
    assert ours <= 1.15 * theirs


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("form", "mesh_name"), CASES)
def test_gradients_are_those_of_the_whole_batch_and_the_same_on_all_workers(form, mesh_name):
    mesh = mesh_named(mesh_name)
    grads = compiled(form, mesh_name)(placed(mesh), batch(), KEY)
    expected = jax.grad(loss_fn)(params(), batch())
    for name, grad in grads.items():
        least, most = (0, 1e-10) if name == "shift" else (1e-7, 0.05)
        assert least <= vnmse(grad, expected[name]) <= most, name
        copies = {}
        for shard in grad.addressable_shards:
            copies.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert {len(found) for found in copies.values()} == {1}, name
        shard_shape = NamedSharding(mesh, specs_of(mesh)[name]).shard_shape(grad.shape)
        assert len(copies) == grad.size // math.prod(shard_shape)


def on_shards(mesh, method, specs):
    """Return the first state of parameters, and a step of stacked gradients, on a mesh."""
    reduce = dq.all_reduce_gradients("data", method=dq.Compression(method, specs=specs))
    return on_mesh(reduce, mesh, axis_names={"data"})


def saved(state):
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf), leaf.sharding), state)


def test_states_are_split_as_the_gradients_are():
    """Error feedback: what a step leaves out is in the next one, on every device for its shards;
    states go through a saved copy.
    """
    own = {"in": of_workers(0, 2, 256 * 512).reshape(2, 256, 512), "scale": of_workers(1, 2, 4096)}
    specs = {"in": P("fsdp"), "scale": P()}
    init, update = on_shards(mesh_named("data 2 x fsdp 4"), ErrorFeedback(inner=Largest()), specs)
    first, state = update(own, init({"in": jnp.zeros((256, 512)), "scale": jnp.zeros(4096)}))
    (second, after), (again, _) = update(own, state), update(own, saved(state))
    of_shards, whole = (bucket.residual for bucket in of_buckets(after).values())
    assert of_shards.shape == (8, 256 * 512 // 4) and whole.shape == (2, 4096)
    assert of_shards.sharding.shard_shape(of_shards.shape) == (1, 256 * 512 // 4)
    left_out = np.asarray(of_shards).reshape(2, -1).mean(axis=0)
    total = np.ravel(first["in"]) + np.ravel(second["in"]) + left_out
    assert vnmse(total, 2 * own["in"].mean(axis=0).ravel()) < 2e-5
    jax.tree.map(np.testing.assert_array_equal, second, again)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "method", ("ef+mxfp4", ErrorFeedback(inner=TWO_WIDTHS)), ids=("mxfp4", "dynamiq")
)
def test_states_of_every_kind_resume_on_shards(method):
    """Saved after a step and read again: the same bits, on all workers, in every shard."""
    own = [of_workers(step, 2, 128 * 256).reshape(2, 128, 256) for step in range(2)]
    init, update = on_shards(mesh_named("data 2 x fsdp 4"), method, P("fsdp"))
    first, state = update(own[0], init(jnp.zeros((128, 256))))
    steps = update(own[1], state), update(own[1], saved(state))
    jax.tree.map(np.testing.assert_array_equal, *steps)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(of_buckets(state))} == {8}
    second = steps[0][0]
    for shard in second.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.asarray(second)[shard.index])
    for mean, each in zip((first, second), own, strict=True):
        truth = each.mean(axis=0)
        assert np.vdot(mean, truth) > 0.2 * np.vdot(truth, truth)


def test_a_run_goes_on_alike_on_another_mesh_with_the_same_shards():
    """Saved on data 2 x fsdp 4 and resumed where two axes make the same parts: the same bits."""
    own, method = of_workers(0, 2, 512 * 256).reshape(2, 512, 256), ErrorFeedback(inner=STOCHASTIC)
    init, update = on_shards(mesh_named("data 2 x fsdp 4"), method, P("fsdp"))
    _, state = update(own, init(jnp.zeros((512, 256))))
    on_three = mesh_named("data 2 x fsdp 2 x tensor 2")
    _, there = on_shards(on_three, method, P(("fsdp", "tensor")))
    state = jax.tree.map(np.asarray, state)
    jax.tree.map(np.testing.assert_array_equal, update(own, state), there(own, state))


def test_types_say_how_leaves_are_split_over_explicit_axes():
    """Under JAX's default axis types no specs are needed, and results are split alike."""
    mesh = mesh_named("data 2 x fsdp 4", AxisType.Explicit)
    stacked = of_workers(0, 2, 256 * 512).reshape(2, 256, 512)
    with jax.set_mesh(mesh):
        leaf = jax.reshard(stacked, P("data", None, "fsdp"))
        mapped = jax.shard_map(
            lambda g: dq.pmean(g[0], "data", key=KEY, method=STOCHASTIC),
            in_specs=P("data"),
            out_specs=P(),
            axis_names={"data"},
        )
        compiled_step = jax.jit(mapped).lower(leaf).compile()
        mean = compiled_step(leaf)
    assert mean.sharding.shard_shape(mean.shape) == (256, 128)
    assert 1e-7 < vnmse(mean, stacked.mean(axis=0, dtype=np.float64)) < 1e-4
    # JAX gathers arguments and results of a map over "data" alone, also without us.
    sent = sent_by_axes(compiled_step.as_text(), mesh)
    part = jax.ShapeDtypeStruct((256, 128), jnp.float32)
    report = dq.wire_report(part, 2, method=STOCHASTIC)
    assert sent[("data",)] == report.bytes_per_worker


def test_axes_of_one_device_do_not_count():
    mesh = mesh_of(data=2, fsdp=1)
    how = {"mesh": mesh, "in_specs": P("data"), "out_specs": P(), "axis_names": {"data"}}
    mapped = jax.shard_map(lambda g: dq.pmean(g, "data", STOCHASTIC, key=KEY), **how)
    own = of_workers(0, 2, 4096)
    assert vnmse(jax.jit(mapped)(own.reshape(-1)), own.mean(axis=0, dtype=np.float64)) < 1e-4


def test_leaves_are_split_alike_if_and_only_if_devices_hold_the_same_parts():
    """Every way to split a matrix over three axes."""
    sizes = {"a": 2, "b": 2, "c": 2}
    cuts = [
        (order[:cut], order[cut:]) for order in itertools.permutations(sizes) for cut in range(4)
    ]
    found = []
    for rows, columns in cuts:
        shards = Shards(sizes, (P(rows, columns),))
        # Of each device, in the order of the mesh: the numbers of its rows and of its columns.
        places = [dict(zip(sizes, at, strict=True)) for at in np.ndindex(*sizes.values())]
        parts = [[[place[name] for name in names] for names in (rows, columns)] for place in places]
        found.append((shards.split_of(0), parts))
    for (split, parts), (other_split, other_parts) in itertools.combinations(found, 2):
        assert (split == other_split) == (parts == other_parts)
