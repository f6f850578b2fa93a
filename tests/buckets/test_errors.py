"""Every error names the argument, shows its value, and says what to do."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods import METHODS, resolve_method
from dynamiq_jax.topologies import TOPOLOGIES, Ring, resolve_topology
from tests.support.workers import Decaying, mesh_of, on_mesh, simulated

KEY = jax.random.key(0)
GRADIENT = np.ones((2, 2048), np.float32)


def raises(kind: type[Exception], *fragments: str):
    """An error of that kind whose message holds the fragments in this order and ends a sentence."""
    pattern = ".*".join(re.escape(fragment) for fragment in fragments)
    return pytest.raises(kind, match=f"(?s){pattern}.*[.]$")


# ----------------------------------------------------------------------------------- dq.DynamiQ


FIELDS = (
    *(("bits", bits, ("Give 2.375 to 16",)) for bits in (2.3, 16.5, np.nan, "5", None)),
    *(
        ("widths", widths, ("is not possible", "Give integers from 2 to 16"))
        for widths in ((1,), (1, 8), (2, 4, 17), (-2,))
    ),
    *(
        ("widths", widths, ("a tuple of different widths", "Give one"))
        for widths in ((), (4, 4, 8), [4, 8])
    ),
    *(("group_size", size, ("Give one of", "16, 32")) for size in (0, 24, 128)),
    ("rounding", "stochastic", ("correlated", "nearest")),
    *(("exponent", value, ("Give",)) for value in (0, 0.05, 2.5, np.nan, "energy", True)),
    *(
        ("gap_ratio", value, ("Give 1 for uniform levels, or 1.1 to 2.9",))
        for value in (0.9, 1.05, 3.0, np.nan, "wide", None)
    ),
    ("spacing", "cubic", ("quadratic", "geometric")),
    ("implementation", "cuda", ("Use None", "'xla'")),
)


@pytest.mark.parametrize(("field", "value", "words"), FIELDS)
def test_a_field_out_of_range(field, value, words):
    with raises((TypeError, ValueError), f"{field}={value!r}", *words):
        dq.DynamiQ(**{field: value})


@pytest.mark.parametrize(("bits", "widths"), ((8.0, (2, 4)), (3.0, (4, 8))))
def test_bits_that_the_widths_cannot_reach(bits, widths):
    with raises(ValueError, f"bits={bits}", f"widths={widths!r}", "they span", "Give"):
        dq.DynamiQ(bits=bits, widths=widths)


def test_fields_are_keyword_only():
    """`DynamiQ(4)` could mean bits or a width."""
    with pytest.raises(TypeError, match="positional"):
        dq.DynamiQ(4)


# -------------------------------------------------------------------- methods, topologies, reports


@pytest.mark.parametrize("method", ("dynamic", None, 5.0, dq.DynamiQ))
def test_unknown_method(method):
    with raises(ValueError, f"method={method!r}", "dq.DynamiQ(bits=5.0)", *sorted(METHODS)):
        resolve_method(method)


@pytest.mark.parametrize("topology", ("star", None, 2))
def test_unknown_topology(topology):
    with raises(ValueError, f"topology={topology!r}", "Give one of", *sorted(TOPOLOGIES)):
        resolve_topology(topology)


def test_numbers_of_numpy_are_numbers():
    assert dq.DynamiQ(bits=np.float32(16)).bits == 16


@pytest.mark.parametrize("value", ("x", 1, None, np.bool_(True)))
def test_flags_are_true_or_false(value):
    with raises(ValueError, f"unroll={value!r}", "Give True or False"):
        Ring(unroll=value)


@pytest.mark.parametrize(
    ("name", "value"), (("method", "none"), ("topology", "tree")), ids=("method", "topology")
)
def test_every_entry_point_checks_method_and_topology(name, value):
    entries = (
        lambda **kw: dq.psum(GRADIENT, "data", key=KEY, **kw),
        lambda **kw: dq.pmean(GRADIENT, "data", key=KEY, **kw),
        lambda **kw: simulated(lambda key, g: dq.psum_scatter(g, "data", key=key, **kw))(
            KEY, GRADIENT
        ),
        lambda **kw: dq.wire_report(GRADIENT, 2, **kw),
        lambda **kw: dq.all_reduce_gradients("data", **kw),
        lambda **kw: dq.compress(jnp.sum, "data", **kw),
    )
    for entry in entries:
        with raises(ValueError, f"{name}={value!r}", "Give"):
            entry(method=value if name == "method" else dq.Compression(topology=value))
    if name == "method":
        with raises(ValueError, f"{name}={value!r}", "Give"):
            simulated(lambda key, g: dq.all_gather(g, "data", key=key, method=value))(KEY, GRADIENT)


@pytest.mark.parametrize("axis_size", (0, -1, 2.0, None, True, (2, 0)))
def test_report_for_an_impossible_number_of_workers(axis_size):
    with raises(ValueError, f"axis_size={axis_size!r}", "Give an integer of at least 1"):
        dq.wire_report(GRADIENT, axis_size)


def test_trees_of_different_structure_have_no_error_between_them():
    with raises(ValueError, "estimate has structure", "'a'", "truth has", "'b'", "Give"):
        dq.vnmse({"a": jnp.ones(2)}, {"b": jnp.ones(2)})


# --------------------------------------------------------------------------------- axes and keys


def test_an_axis_out_of_scope():
    with raises(ValueError, "axis_name='model'", "jax.shard_map", "vmap", "dq.compress"):
        simulated(lambda key, g: dq.psum(g, "model", key=key))(KEY, GRADIENT)


@pytest.mark.parametrize("key", (0, np.zeros(2)), ids=("int", "floats"))
def test_a_key_that_is_none(key):
    def local(g):
        return dq.psum(g, "data", key=key)

    with raises(TypeError, f"key={key!r}", "not a PRNG key", "jax.random.key"):
        jax.vmap(local, axis_name="data")(GRADIENT)


def test_several_keys():
    with raises(ValueError, "key has shape (3,)", "Give a single one"):
        simulated(lambda key, g: dq.psum(g, "data", key=key))(jax.random.split(KEY, 3), GRADIENT)


def test_a_key_per_worker_under_check_vma(data_mesh):
    def local(key, g):
        key = jax.random.fold_in(key, lax.axis_index("data"))
        return dq.psum(g, "data", key=key)

    with raises(ValueError, "key differs", "'data'", "do not fold in", "in_specs=P()"):
        on_mesh(local, data_mesh(2))(KEY, GRADIENT)


# --------------------------------------------------------------------------------------- leaves


@pytest.mark.parametrize(
    "leaf", ("text", object(), jax.random.key(1)), ids=("str", "object", "key")
)
def test_a_leaf_that_cannot_be_summed(leaf):
    def local(g):
        return dq.psum({"layers": [g, leaf]}, "data", key=KEY)

    with raises(TypeError, "tree['layers'][1]", type(leaf).__name__, "cannot be sent", "Give"):
        jax.vmap(local, axis_name="data")(GRADIENT)


def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def gradient_step(data_mesh, *, mark: bool, reduce=dq.pmean):
    """What a user writes: gradients of replicated parameters, then the compressed mean."""
    params = {"w": jnp.ones((2048, 2))}
    batch = np.random.default_rng(0).standard_normal((4, 2048)).astype(np.float32)

    @jax.jit
    @jax.shard_map(mesh=data_mesh(2), in_specs=(P(), P("data")), out_specs=P())
    def local(params, batch):
        if mark:
            params = jax.tree.map(lambda leaf: lax.pcast(leaf, "data", to="varying"), params)
        return reduce(jax.grad(loss)(params, batch), "data", key=KEY, method="bf16")

    return jax.grad(loss)(params, batch)["w"], local(params, batch)["w"]


@pytest.mark.parametrize("reduce", (dq.psum, dq.pmean))
def test_gradients_that_are_already_summed(data_mesh, reduce):
    """The trap: under check_vma, the gradient of replicated parameters is summed by jax.grad."""
    with raises(
        ValueError, "tree['w']", "'data'", "already summed", "jax.lax.pcast(params, 'data'"
    ):
        gradient_step(data_mesh, mark=False, reduce=reduce)


def test_complex_gradients_that_are_already_summed(data_mesh):
    """Not compressed, but n times too large all the same."""
    mapped = jax.shard_map(
        lambda g: dq.pmean(g, "data", key=KEY), mesh=data_mesh(2), in_specs=P(), out_specs=P()
    )
    with raises(ValueError, "already summed", "jax.lax.pcast"):
        mapped(jnp.ones(8, jnp.complex64))


def test_the_fix_that_the_message_names_is_one(data_mesh):
    expected, ours = gradient_step(data_mesh, mark=True)
    assert 1e-7 < dq.vnmse(ours, expected) < 2e-5


# ------------------------------------------------------------------------------ stateful methods


def test_a_stateful_method_in_a_stateless_collective():
    method = Decaying()
    for name, call in (
        ("psum", simulated(lambda key, g: dq.psum(g, "data", method, key=key))),
        ("pmean", simulated(lambda key, g: dq.pmean(g, "data", method, key=key))),
        ("compress", lambda key, g: dq.compress(loss, "data", method)),
    ):
        words = f"method={method!r}", "carries state", f"dq.{name}", "dq.all_reduce_gradients"
        with raises(ValueError, *words):
            call(KEY, GRADIENT)


def test_a_state_of_other_buckets():
    """Made for all leaves at once, and used for each by itself."""
    tree = {"a": GRADIENT, "b": GRADIENT}
    choices = (
        dq.Compression(Decaying(), bucket_bytes=size, bucketing="in_order")
        for size in (1 << 20, 1024)
    )
    wide, narrow = (dq.all_reduce_gradients("data", method) for method in choices)
    state = simulated(lambda key, g: wide.init(g))(KEY, tree)
    with raises(ValueError, "state.method", "these gradients need", "Call init", "bucket_bytes"):
        simulated(lambda key, g, state: narrow.update(g, state))(KEY, tree, state)


OVER_PARTS = {"a|c": "ef+bf16", "": "ef+mxfp8"}


@pytest.mark.parametrize(
    ("before", "after", "words"),
    (
        (OVER_PARTS, {"a|b": "ef+bf16", "": "ef+mxfp8"}, ("'ErrorFeedback-a_b-", "leaves differ")),
        ("ef+bf16", Decaying(), ("'Decaying-", "the kinds differ")),
        ("ef+bf16", "bf16", ("these gradients need no state",)),
        ("bf16", "ef+bf16", ("no state, but these gradients need",)),
        (Decaying(), Decaying(decay=0.25), ("'Decaying_decay_0_25-", "the kinds differ")),
    ),
    ids=str,
)
def test_a_state_of_another_policy(before, after, words):
    """Four equal leaves: buckets and states of one policy have the shapes of another's."""
    tree = dict.fromkeys("abcd", jnp.ones((2, 64, 48)))
    one, other = (dq.all_reduce_gradients("data", method=each) for each in (before, after))
    with raises(ValueError, "state.method has", *words, "Call init"):
        simulated(lambda key, g: other.update(g, one.init(g)))(KEY, tree)
    jax.eval_shape(simulated(lambda key, g: one.update(g, one.init(g))), KEY, tree)


def layers(*names):
    return dict.fromkeys(map(str, names), jnp.ones((2, 2048)))


@pytest.mark.parametrize(
    ("other", "words"),
    (
        ({"b": jnp.ones((2, 64, 48))}, ("'ErrorFeedback-a-", "differ")),
        ({"a": jnp.ones((2, 48, 64))}, ("'ErrorFeedback-a-", "differ")),
        # Names have every leaf, and more of them than a reader sees.
        (layers(*range(9), "other", *range(10, 30)), ("-0_", "_more-", "need", "_more-")),
    ),
    ids=("names", "shapes", "many"),
)
def test_a_state_of_other_leaves(other, words):
    reduce = dq.all_reduce_gradients("data", method="ef+bf16")
    tree = layers(*range(30)) if len(other) > 1 else {"a": jnp.ones((2, 64, 48))}
    with raises(ValueError, "state.method has ", *words, "Call init"):
        simulated(lambda key, g, h: reduce.update(h, reduce.init(g)))(KEY, tree, other)


@pytest.mark.parametrize(
    "specs",
    (
        (P("model"), P(None, "model")),
        (P("model", "other"), P("other", "model")),
        (P(("model", "other")), P(("other", "model"))),
    ),
    ids=str,
)
def test_a_state_of_leaves_that_are_split_in_another_way(specs):
    """Into shards of the same size, over the same axes, which the compiler manages."""
    one, other = (
        dq.all_reduce_gradients("data", method=dq.Compression("ef+bf16", specs=each))
        for each in specs
    )
    mapped = jax.shard_map(
        lambda g: other.update(g, one.init(g))[0],
        mesh=mesh_of(data=2, model=2, other=2),
        in_specs=P("data"),
        out_specs=P(),
        axis_names={"data"},
        check_vma=False,
    )
    with raises(ValueError, "state.method has", "shapes or shards differ", "Call init"):
        jax.eval_shape(mapped, jax.ShapeDtypeStruct((128, 64), jnp.float32))


def test_a_state_of_fast_axes_in_another_order():
    """Each worker has a residual of its part of a bucket."""
    one, other = (
        dq.all_reduce_gradients(("slow", *fast), method="ef+bf16")
        for fast in (("a", "b"), ("b", "a"))
    )

    def update(g):
        return other.update(g, one.init(g))[0]

    for name in ("slow", "a", "b"):
        update = jax.vmap(update, in_axes=None, axis_name=name, axis_size=2)
    with raises(ValueError, "state.method has", "shapes or shards differ", "Call init"):
        jax.eval_shape(update, GRADIENT[0])


def test_a_state_of_a_method_that_is_no_dictionary():
    reduce = dq.all_reduce_gradients("data", method="ef+bf16")

    def update(key, g):
        state = reduce.init(g)
        return reduce.update(g, state._replace(method=tuple(state.method.values())))

    words = "state.method is a tuple", "not a dictionary of states by their names", "Call init"
    with raises(TypeError, *words):
        simulated(update)(KEY, GRADIENT)


# ----------------------------------------------------------------------------------------- specs


def beside(specs, collective=dq.pmean, **arguments):
    """A collective over "data" beside an axis "model" of two devices, which JAX manages."""
    mesh = mesh_of(data=2, model=2)
    mapped = jax.shard_map(
        lambda g: collective(
            {"w": g}, "data", key=KEY, method=dq.Compression(specs=specs), **arguments
        ),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=False,
    )
    return jax.eval_shape(mapped, jax.ShapeDtypeStruct((128, 63), jnp.float32))


def test_whole_leaves_beside_an_axis_that_the_compiler_manages():
    assert beside(P())["w"].shape == (128, 63)
    with raises(ValueError, "specs=None", "'model' of 2 devices", "Give specs", "specs=P()"):
        beside(None)


@pytest.mark.parametrize(
    ("specs", "error", "words"),
    (
        ({"v": P()}, ValueError, ("does not fit the tree", "Give a tree of PartitionSpecs")),
        ({"w": "model"}, TypeError, ("specs holds 'model'", "Give PartitionSpecs")),
        ({"w": P(P.UNCONSTRAINED)}, TypeError, ("specs holds", "Give PartitionSpecs")),
        ({"w": P("fsdp")}, ValueError, ("tree['w']", "no axis 'fsdp'", "('data', 'model')")),
        ({"w": P(None, "model")}, ValueError, ("tree['w']", "(64, 63)", "dimension 1", "2 shards")),
        ({"w": P(None, None, "model")}, ValueError, ("tree['w']", "2 dimensions", "Give a spec")),
    ),
)
def test_specs_that_do_not_fit(specs, error, words):
    with raises(error, *words):
        beside(specs)


@pytest.mark.parametrize(
    ("collective", "argument"),
    ((dq.psum_scatter, "scatter_dimension=0"), (dq.all_gather, "axis=0")),
)
def test_a_dimension_that_is_split_already(collective, argument):
    with raises(ValueError, argument, "tree['w']", "'model'", "Give another"):
        beside({"w": P("model")}, collective, tiled=True)


def test_a_report_needs_both_a_mesh_and_specs(data_mesh):
    with raises(ValueError, "specs=None", "mesh is given", "Give both"):
        dq.wire_report(GRADIENT, "data", mesh=data_mesh(2))
    with raises(ValueError, "mesh=None", "specs is given", "Give both"):
        dq.wire_report(GRADIENT, 2, method=dq.Compression(specs=P()))
    with raises(ValueError, "axis_size=2", "whose axes are ('data',)", "Give one of them"):
        dq.wire_report(GRADIENT, 2, mesh=data_mesh(2), method=dq.Compression(specs=P()))


def test_a_state_of_several_workers():
    reduce = dq.all_reduce_gradients("data", method="ef+bf16")
    state = jax.vmap(reduce.init, axis_name="data", axis_size=2, in_axes=None)(GRADIENT[0])
    both = state._replace(step=state.step[0], method=jax.tree.map(lambda x: x[:, 0], state.method))
    words = "state.method['ErrorFeedback-tree-", "].residual has shape (2, 2048)", "P('data')"
    with raises(ValueError, *words):
        jax.vmap(lambda g: reduce.update(g, both), axis_name="data")(GRADIENT)


def test_an_axis_of_vmap_that_the_mesh_has_too():
    """`spmd_axis_name` leaves the sum to the compiler, which knows nothing of codecs."""
    mesh = mesh_of(data=4)
    replicas = jnp.ones((4, 4096))
    mean = functools.partial(dq.pmean, axis_name="data", key=KEY)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"give the .* to dq\.compress"):
        jax.vmap(mean, axis_name="data", spmd_axis_name="data")(replicas)
