"""Arguments of dq.data_parallel and dq.value_and_grad: split, whole or static.

A wrapped loss and its gradients are those of the same loss on one device.
"""

import dataclasses
import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._worker_loss.fingerprint import word_of

WORKERS, ROWS, IN, CLASSES = 4, 32, 12, 8
KEY = jax.random.key(0)


def weights():
    return np.random.default_rng(0).normal(size=(IN, CLASSES)).astype(np.float32)


def batch():
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(ROWS, IN)).astype(np.float32),
        "labels": rng.integers(0, CLASSES, ROWS),
        "class_weights": np.linspace(0.1, 3, CLASSES).astype(np.float32),
    }


def in_a_dict(w, data):
    """Cross entropy with weights of classes, which are no batch: [CLASSES]."""
    log_probs = jax.nn.log_softmax(data["x"] @ w)
    own = jnp.take_along_axis(log_probs, data["labels"][:, None], axis=1)[:, 0]
    return -jnp.mean(data["class_weights"][data["labels"]] * own)


def by_position(w, x, labels, class_weights):
    return in_a_dict(w, {"x": x, "labels": labels, "class_weights": class_weights})


def by_keyword(w, x, *, labels, class_weights):
    return by_position(w, x, labels, class_weights)


def without_names(*args, **kwargs):
    return by_keyword(*args, **kwargs)


class Batch(NamedTuple):
    x: jax.Array
    labels: jax.Array
    class_weights: jax.Array


def in_a_tuple(w, data):
    return by_position(w, *data)


LAWS = {
    "leaf of a dict": (in_a_dict, lambda b: ((b,), {})),
    "leaf of a tuple": (in_a_tuple, lambda b: ((Batch(**b),), {})),
    "position": (by_position, lambda b: (tuple(b.values()), {})),
    "name of a position": (by_position, lambda b: ((b["x"],), dict(list(b.items())[1:]))),
    "keyword": (by_keyword, lambda b: ((b["x"],), dict(list(b.items())[1:]))),
    "no signature": (without_names, lambda b: ((b["x"],), dict(list(b.items())[1:]))),
}


def value_and_grads(form, loss_fn, mesh, axis_name="data", argnums=0, **arguments):
    """Return a function to the value and gradients, by either public function."""
    arguments = {"mesh": mesh, "axis_name": axis_name, "method": "exact"} | arguments
    if form == "value_and_grad":
        return functools.partial(dq.value_and_grad(loss_fn, argnums, **arguments), key=KEY)
    return jax.value_and_grad(dq.data_parallel(loss_fn, argnums, **arguments), argnums)


def same(found, expected):
    for ours, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, other, rtol=2e-5, atol=1e-6)


FORMS = pytest.mark.parametrize("form", ("data_parallel", "value_and_grad"))


@pytest.mark.sampled(2)
@FORMS
@pytest.mark.parametrize("law", LAWS)
def test_an_array_that_is_no_batch_is_refused_until_it_has_a_spec(data_mesh, form, law):
    """The specs in the error are Python code, with which the loss is that of one device."""
    loss_fn, call = LAWS[law]
    args, kwargs = call(batch())
    mesh = data_mesh(WORKERS)
    with pytest.raises(ValueError, match="different leading sizes") as refused:
        value_and_grads(form, loss_fn, mesh)(weights(), *args, **kwargs)
    message = str(refused.value)
    for words in (f"shape ({ROWS}, {IN})", f"shape ({ROWS},)", f"shape ({CLASSES},)"):
        assert words in message
    in_specs = eval(re.search("in_specs=(.*)$", message)[1])
    found = value_and_grads(form, loss_fn, mesh, in_specs=in_specs)(weights(), *args, **kwargs)
    same(found, jax.value_and_grad(loss_fn)(weights(), *args, **kwargs))


@pytest.mark.parametrize(
    "in_specs",
    (
        (None, {"x": P("data"), "labels": P("data"), "class_weights": P()}),
        (P(), {"x": None, "labels": None, "class_weights": P(None)}),
        {"data": {"x": P("data", None), "labels": None, "class_weights": P()}},
        {1: {"x": P(("data",)), "labels": None, "class_weights": P()}, "w": None},
    ),
    ids=("tuple", "None is the default", "dict", "positions"),
)
def test_forms_of_specs(data_mesh, in_specs):
    found = value_and_grads("data_parallel", in_a_dict, data_mesh(WORKERS), in_specs=in_specs)
    same(found(weights(), batch()), jax.value_and_grad(in_a_dict)(weights(), batch()))


@FORMS
def test_another_axis_than_the_leading_one(data_mesh, form):
    """Micro-batches in front: every worker has rows of each of them."""

    def loss_fn(w, x, scale):
        assert x.shape[0] == 2
        return jax.lax.map(lambda rows: jnp.mean(jnp.tanh(rows @ w) ** 2), x).mean() * scale

    x = batch()["x"].reshape(2, ROWS // 2, IN)
    run = value_and_grads(form, loss_fn, data_mesh(WORKERS), in_specs=(None, P(None, "data")))
    same(run(weights(), x, 2.0), jax.value_and_grad(loss_fn)(weights(), x, 2.0))


def test_several_axes_of_workers():
    """One dimension over both, or two dimensions over one each."""
    mesh = jax.make_mesh((2, 4), ("hosts", "local"), axis_types=(AxisType.Auto,) * 2)

    def loss_fn(w, x, y):
        return jnp.mean(x @ w) + jnp.mean(jnp.sin(y) ** 2)

    y = np.arange(96, dtype=np.float32).reshape(4, 8, 3)
    in_specs = {"x": P(("hosts", "local")), "y": P("hosts", "local")}
    arguments = {"axis_name": ("hosts", "local"), "in_specs": in_specs}
    run = value_and_grads("value_and_grad", loss_fn, mesh, **arguments)
    same(run(weights(), batch()["x"], y), jax.value_and_grad(loss_fn)(weights(), batch()["x"], y))
    arguments["in_specs"] = {
        "data": {"x": P(("hosts", "local")), "labels": None, "class_weights": None}
    }
    with pytest.raises(ValueError, match=r'"class_weights": P.*"x": P\(\("hosts", "local"\)\)'):
        value_and_grads("value_and_grad", in_a_dict, mesh, **arguments)(weights(), batch())


def test_specs_on_an_explicit_mesh():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
    in_specs = {"data": {"x": None, "labels": P("data"), "class_weights": P()}}
    run = value_and_grads("data_parallel", in_a_dict, mesh, in_specs=in_specs)
    with jax.set_mesh(mesh):
        found = jax.jit(run)(weights(), batch())
    same(found, jax.value_and_grad(in_a_dict)(weights(), batch()))


@pytest.mark.parametrize(
    ("in_specs", "error", "words"),
    (
        (P("data"), TypeError, "neither a tuple nor a dict"),
        ([None, P("data")], TypeError, "neither a tuple nor a dict"),
        ((None, "data"), TypeError, r"in_specs\[1\] holds 'data'. Give PartitionSpecs"),
        ((None, P(P.UNCONSTRAINED)), TypeError, r"in_specs\[1\] holds"),
        ({1.5: P()}, TypeError, "has the key 1.5"),
        ((None, P("model")), ValueError, "'model' is not an axis of the workers.*'data',"),
        ((None, P("data", "data")), ValueError, "names axis 'data' twice"),
        ((P("data"),), ValueError, r"in_specs\[0\] holds .* is differentiated and not split"),
        ({"w": {"a": P()}}, ValueError, r"in_specs\['w'\]=.* does not fit"),
        ((None, None, P("data")), ValueError, r"in_specs\[2\] holds .* is static"),
        ((None, {"x": P()}), ValueError, "does not fit the argument"),
        ((None,) * 4, ValueError, "in_specs names position 3, but there are 3 arguments"),
        ({"table": P()}, ValueError, r"in_specs names 'table', but the arguments are \['w', "),
        ({1: P(), "x": P()}, ValueError, "given twice"),
        ((None, P(None, None, "data")), ValueError, r"1 has shape \(32, 12\), but in_specs gives"),
        ((None, P(None, "data")), ValueError, "whose axis 1 does not split over the 8 workers"),
    ),
)
def test_specs_that_do_not_fit(data_mesh, in_specs, error, words):
    def loss_fn(w, x, kind):
        return jnp.mean(x @ w)

    with pytest.raises(error, match=words):
        value_and_grads(
            "data_parallel", loss_fn, data_mesh(8), in_specs=in_specs, static_argnums=2
        )(weights(), batch()["x"], "mean")


def test_arrays_without_a_spec_are_as_long_as_those_with_one(data_mesh):
    """Also where only one array is left without a spec."""
    args = tuple(batch().values())
    for given in ({"x": P("data"), "labels": P("data")}, {"x": P("data"), "labels": None}):
        with pytest.raises(ValueError, match=re.escape('(P(), P("data"), P("data"), P())')):
            value_and_grads("data_parallel", by_position, data_mesh(WORKERS), in_specs=given)(
                weights(), *args
            )


def test_specs_in_an_error_keep_those_that_are_given(data_mesh):
    """A whole array stays so in a dict, and a number has the spec of the arrays around it."""

    def loss_fn(w, data, other):
        return in_a_dict(w, data)

    data = batch() | {"table": np.ones((ROWS, 2), np.float32), "factor": 0.5, "none": None}
    entry = {name: P() if name in ("table", "class_weights") else None for name in data}
    expected = (
        '(P(), {"class_weights": P(), "factor": P(), "labels": P("data"), "none": P(), '
        '"table": P(), "x": P("data")}, P())'
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        value_and_grads("data_parallel", loss_fn, data_mesh(WORKERS), in_specs=(None, entry))(
            weights(), data, np.ones(ROWS // 2, np.float32)
        )


def test_arrays_with_specs_may_have_any_sizes(data_mesh):
    """Such as two batches of different sizes, beside one without a spec."""

    def loss_fn(w, x, labeled, labels):
        assert x.shape[0] == 2 * labels.size
        own = jnp.take_along_axis(labeled @ w, labels[:, None], axis=1)
        return jnp.mean((x @ w) ** 2) + jnp.mean(own)

    args = weights(), batch()["x"], batch()["x"][::2], batch()["labels"][::2]
    in_specs = (None, P("data"), P("data"))
    run = value_and_grads("data_parallel", loss_fn, data_mesh(WORKERS), in_specs=in_specs)
    same(run(*args), jax.value_and_grad(loss_fn)(*args))


# ---------------------------------------------------------------------------------- static values


@dataclasses.dataclass(frozen=True)
class Config:
    power: object
    name: str = "relu"


class Point(NamedTuple):
    power: object


class Own:
    """Equal to all of its kind."""

    def __init__(self, power):
        self.power = power

    def __eq__(self, other):
        return isinstance(other, Own)

    def __hash__(self):
        return 0


@dataclasses.dataclass(frozen=True)
class Unhashed:
    power: object
    notes: list = dataclasses.field(default_factory=list, hash=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "wrap",
    (
        lambda x: x,
        lambda x: (x, "a"),
        lambda x: frozenset({x}),
        lambda x: frozenset({(x, 5)}),
        Config,
        Unhashed,
        lambda x: Config(Config((x,))),
        Point,
    ),
    ids=("value", "tuple", "frozenset", "nested", "dataclass", "unhashed", "dataclasses", "named"),
)
def test_static_values_that_compare_equal_have_programs_of_their_own(data_mesh, wrap):
    """As `jax.jit` has for 1, 1.0 and True; and those of a type share one."""
    traced = []

    def loss_fn(w, x, config):
        traced.append(repr(config))
        return jnp.mean(x @ w)

    mean_loss = dq.data_parallel(loss_fn, mesh=data_mesh(2), axis_name="data", static_argnums=2)
    for value in (1, True, 1.0):
        mean_loss(weights(), batch()["x"], wrap(value))
    assert list(dict.fromkeys(traced)) == [repr(wrap(value)) for value in (1, True, 1.0)]
    del traced[:]
    for value in (1, True, 1.0):
        mean_loss(weights(), batch()["x"], wrap(value))
    assert not traced
    for value in (0.0, -0.0, 0.0, 0j):
        mean_loss(weights(), batch()["x"], wrap(value))
    assert len(set(traced)) == 3


def test_values_with_an_equality_of_their_own_share_a_program(data_mesh):
    traced = []

    def loss_fn(w, x, config):
        traced.append(config.power)
        return jnp.mean(x @ w)

    mean_loss = dq.data_parallel(loss_fn, mesh=data_mesh(2), axis_name="data", static_argnums=2)
    for value in (1, 2):
        mean_loss(weights(), batch()["x"], Own(value))
    assert set(traced) == {1}


# --------------------------------------------------------------------------------- keys of a batch


@FORMS
@pytest.mark.parametrize("nested", (False, True), ids=("argument", "leaf"))
def test_a_batch_of_keys(data_mesh, form, nested):
    """One typed key for each example, split as all else."""

    def loss_fn(w, x, keys):
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, shape=(CLASSES,)))(
            keys["noise"] if nested else keys
        )
        return jnp.mean(jnp.where(kept, x @ w, 0) ** 2)

    keys = jax.random.split(jax.random.key(5), ROWS)
    args = weights(), batch()["x"], {"noise": keys, "one": jax.random.key(1)} if nested else keys
    expected = jax.value_and_grad(loss_fn)(*args)
    run = value_and_grads(form, loss_fn, data_mesh(WORKERS))
    same(run(*args), expected)
    same(jax.jit(run)(*args), expected)


def test_noise_follows_the_keys_and_the_order_of_a_batch(data_mesh):
    """Other keys, the same rows at other places of a worker, and those of other workers."""
    gradient = np.random.default_rng(2).normal(size=(64, 96)).astype(np.float32)

    def loss_fn(w, x, keys):
        return jnp.vdot(w, gradient)

    method = dq.DynamiQ(rounding="independent")
    grad_fn = jax.jit(
        jax.grad(dq.data_parallel(loss_fn, mesh=data_mesh(4), axis_name="data", method=method))
    )
    x, keys = batch()["x"], jax.random.split(KEY, ROWS)
    in_a_worker = x.copy()
    in_a_worker[[0, 1]] = x[[1, 0]]
    w = np.ones((64, 96), np.float32)
    first = np.asarray(grad_fn(w, x, keys))
    np.testing.assert_array_equal(first, grad_fn(w, x, keys))
    for changed in (
        (in_a_worker, keys),
        (np.roll(x, ROWS // 4, axis=0), keys),
        (x, keys[::-1]),
        (x, jax.random.split(jax.random.key(1), ROWS)),
    ):
        assert np.mean(first != np.asarray(grad_fn(w, *changed))) > 0.3


@pytest.mark.parametrize("dtype", ("complex64", "int64", "float64", "uint8", "bool", "bfloat16"))
def test_a_hash_reads_all_bits_and_all_places(dtype):
    with jax.enable_x64(True):
        plain = jnp.asarray([0, 1, 1, 0], dtype)
        others = [jnp.asarray(other, dtype) for other in ([1, 0, 1, 0], [0, 1, 1, 1])]
        if dtype == "complex64":
            others += [plain.at[0].set(1j), plain.conj() * 1j]
        if dtype == "int64":
            others += [plain.at[0].set(2**40)]
        if dtype == "float64":
            others += [plain.at[1].set(1 + 2.0**-50)]
        words = [int(word_of([array], ())) for array in (plain, *others)]
    assert len(set(words)) == len(words)


def test_a_hash_reads_all_bits_of_keys():
    data = jnp.asarray([[0, 1], [2, 3]], jnp.uint32)
    arrays = [data, data.at[0, 0].set(5), data.at[1, 1].set(5), data[::-1]]
    words = [int(word_of([jax.random.wrap_key_data(array)], ())) for array in arrays]
    assert len(set(words)) == len(words)


# ----------------------------------------------------------------------------- parameters and aux


def test_specs_of_several_arguments_are_in_the_order_of_argnums():
    """Each spec splits a dimension that only its own argument can split."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def loss_fn(first, second, x):
        return jnp.mean((x @ first) ** 2) + jnp.mean((second * x[:, :1]) ** 2)

    args = np.ones((IN, 6), np.float32), np.ones((1, 8), np.float32), batch()["x"]
    arguments = {"argnums": (1, 0), "specs": (P(None, "model"), P("model"))}
    run = value_and_grads("value_and_grad", loss_fn, mesh, **arguments)
    loss, grads = jax.jit(run)(*args)
    assert [grad.shape for grad in grads] == [(1, 8), (IN, 6)]
    assert [grad.sharding.spec for grad in grads] == [P(None, "model"), P("model")]
    same((loss, grads), jax.value_and_grad(loss_fn, (1, 0))(*args))


def test_parameters_on_another_mesh_are_whole():
    """Only a placement on a mesh of the same axes says how gradients are split."""
    other = jax.make_mesh((2, 4), ("data", "rows"), axis_types=(AxisType.Auto,) * 2)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    w = jax.device_put(weights(), NamedSharding(other, P("rows")))

    def loss_fn(w, x):
        return jnp.mean((x @ w) ** 2)

    found = value_and_grads("value_and_grad", loss_fn, mesh)(w, batch()["x"])
    same(found, jax.value_and_grad(loss_fn)(weights(), batch()["x"]))


def test_counts_in_aux_are_averaged_in_float32(data_mesh):
    """float16 ends at 65,504."""

    def loss_fn(w, x):
        return jnp.mean(x @ w), {"count": jnp.int32(100_001)}

    arguments = {"has_aux": True, "aux": "mean", "num_targets": lambda w, x: x.shape[0]}
    run = value_and_grads("value_and_grad", loss_fn, data_mesh(2), **arguments)
    (_, aux), _ = run(weights(), batch()["x"])
    assert aux["count"].dtype == jnp.float32 and float(aux["count"]) == 100_001
