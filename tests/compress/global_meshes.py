"""Steps of one global program on meshes of several axes, and of parameters that are split."""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.compress.global_forms import (
    EXPERTS,
    MATRICES,
    OF_DECODER,
    OF_MATRICES,
    TOKENS,
    Step,
    X,
    Y,
    attention,
    decoder_loss,
    decoder_params,
    form,
    normal,
    on_matrices,
    squares,
    updated,
)


def decoder_on(place, specs, rows=("data",), **how):
    """The decoder, with specs of its parameters by their paths."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    params = place.put(decoder_params(), specs=specs)
    optimizer = place.put(
        tx.init(decoder_params()), specs=lambda path, leaf: specs(path, leaf) if leaf.ndim else ()
    )

    def step(state, tokens):
        params, optimizer = state
        loss, gradients = jax.value_and_grad(decoder_loss)(params, tokens, place, **how)
        return updated(tx, gradients, optimizer, params), loss

    return Step(step, (params, optimizer), (place.put(TOKENS, *rows),))


def on_split_matrices(place, w, v, rows=("data",), loss=squares, matrices=MATRICES):
    params = {"w": place.put(matrices["w"], *w), "v": place.put(matrices["v"], *v)}
    return Step(on_matrices(place, loss).step, params, place.put((X, Y), *rows))


def gathered(place, loss):
    """A loss of parameters that explicit axes gather by hand."""
    return lambda params, *batch: loss(
        jax.tree.map(lambda leaf: place.constrain(leaf, None), params)
        if place.is_explicit
        else params,
        *batch,
    )


@form(*OF_MATRICES, only_sums=False)
def fsdp(place):
    """Parameters that are split over the axis of the workers."""
    return on_split_matrices(place, (None, "data"), ("data",), loss=gathered(place, squares))


@form(*OF_MATRICES, explicit=False, only_sums=False)
def optimizer_in_shards(place):
    """Parameters that all workers have, and moments that are split over the axis of the workers."""
    tx = optax.adam(1e-3)

    def step(state, x, y):
        params, optimizer = state
        loss, gradients = jax.value_and_grad(squares)(params, x, y)
        params, optimizer = updated(tx, gradients, optimizer, params)
        return (jax.tree.map(place.constrain, params), optimizer), loss

    moments = place.put(tx.init(MATRICES), specs=lambda path, leaf: ("data",) if leaf.ndim else ())
    return Step(step, (place.put(MATRICES), moments), place.put((X, Y), "data"))


HSDP = {"data": 2, "fsdp": 2}


@form(*OF_MATRICES, axes=HSDP)
def hsdp(place):
    """Rows over both axes, parameters over the fast one: each device sends its shard."""
    rows = (("data", "fsdp"),)
    return on_split_matrices(place, (None, "fsdp"), ("fsdp",), rows, gathered(place, squares))


def by_name(path, leaf):
    """Heads and hidden features on other devices."""
    for name, spec in (
        ("qkv", (None, None, None, "model")),
        ("out", (None, "model")),
        ("up", (None, None, "model")),
        ("down", (None, "model")),
    ):
        if f"'{name}'" in path:
            return spec
    return ()


@form(*OF_DECODER, axes={"data": 2, "model": 2}, explicit=False)
def tensor_parallel_decoder(place):
    return decoder_on(place, by_name)


@form(*OF_DECODER, axes={"data": 2, "model": 2}, explicit=False)
def sequence_parallel_decoder(place):
    """Between the blocks, the length is split over the axis of the features."""
    return decoder_on(place, by_name, between=lambda x: place.constrain(x, "data", "model", None))


def over_fsdp(path, leaf):
    return (*[None] * (leaf.ndim - 1), "fsdp") if leaf.ndim > 1 else ()


def over_data(path, leaf):
    return (*[None] * (leaf.ndim - 1), "data") if leaf.ndim > 1 else ()


@form(*OF_DECODER, explicit=False)
def fsdp_decoder(place):
    return decoder_on(place, over_data)


@form(*OF_DECODER, axes={"data": 2, "fsdp": 2, "model": 2}, explicit=False, only_sums=False)
def decoder_on_three_axes(place):
    def specs(path, leaf):
        spec = by_name(path, leaf)
        return spec if spec else over_fsdp(path, leaf)

    return decoder_on(place, specs, rows=(("data", "fsdp"),))


@form((32, 32))
def experts_over_the_workers(place):
    """Rows move to the workers of their experts, whose gradients are summed by nobody."""

    def loss(params, x, y):
        x = jnp.tanh(x @ params["w"])
        gates = jax.nn.softmax(x @ params["router"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 4)
        rows = place.constrain(jnp.einsum("bd,be->ebd", x, chosen), "data")
        hidden = jax.nn.relu(jnp.einsum("ebd,edf->ebf", rows, params["up"]))
        out = place.constrain(jnp.einsum("ebf,efo->ebo", hidden, params["down"]), None, "data")
        out = jnp.einsum("ebo,be->bo", out, gates * chosen)
        return jnp.mean((out - y) ** 2)

    params = place.put(EXPERTS, specs=lambda path, leaf: ("data",) if leaf.ndim == 3 else ())
    params["w"] = place.put(MATRICES["w"])
    return Step(on_matrices(place, loss).step, params, place.put((X, Y), "data"))


def attention_in_a_map(place, names):
    """Attention as kernels have it: a map over all axes, of the part of each device."""
    spec = P("data", None, names)
    return jax.shard_map(
        attention, mesh=place.mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False
    )


@form(*OF_DECODER, axes={"data": 2, "model": 2}, explicit=False)
def attention_of_each_device(place):
    return decoder_on(place, by_name, attend=attention_in_a_map(place, "model"))


@form(*OF_MATRICES, groups=2)
def a_sum_by_hand_and_one_of_the_compiler(place):
    """The first matrix in a map with its own sum, the second in the global program."""

    def hidden(w, x):
        return jnp.tanh(x @ w)

    mapped = jax.shard_map(
        hidden, mesh=place.mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False
    )

    def loss(params, x, y):
        return jnp.mean((mapped(params["w"], x) @ params["v"] - y) ** 2)

    return on_matrices(place, loss)


def mapped_over_model(place, **options):
    """Layers that split features by hand, and leave the rows to the compiler."""

    def layers(w, v, x):
        return lax.psum(jnp.tanh(x @ w) @ v, "model")

    mapped = jax.shard_map(
        layers,
        mesh=place.mesh,
        in_specs=(P(None, "model"), P("model"), P()),
        out_specs=P(),
        axis_names={"model"},
        **options,
    )

    def loss(params, x, y):
        return jnp.mean((mapped(params["w"], params["v"], x) - y) ** 2)

    matrices = {"w": normal(32, 64, scale=1 / 6), "v": normal(64, 16, scale=1 / 8)}
    return on_split_matrices(place, (None, "model"), ("model",), ("data",), loss, matrices)


@form((32, 32), (32, 16), axes={"data": 2, "model": 2}, explicit=False)
def features_in_a_map(place):
    return mapped_over_model(place)


@form((32, 32), (32, 16), axes={"data": 2, "model": 2}, explicit=False)
def features_in_an_unchecked_map(place):
    return mapped_over_model(place, check_vma=False)
