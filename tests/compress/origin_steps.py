"""Steps of a few lines each: some whose every large sum is of gradients, and others whose
sums are of anything else.

Each is the part of one worker: a function of parameters, a state of the same shapes, and a batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from tests.compress.forms import PARAMS as ALL_PARAMS
from tests.compress.forms import X, Y

PARAMS = {name: ALL_PARAMS[name] for name in "wv"}
STATE = jax.tree.map(lambda p: 0.01 * p, PARAMS)
ARGS = (PARAMS, STATE, X, Y)
SIZE = 32


@dataclasses.dataclass(frozen=True)
class Step:
    """Part of one worker."""

    local: Callable[..., Any]
    check_vma: bool = False
    out: Any = P()
    compressed: int = 2  # sums
    exact: int = 0  # large sums that stay exact
    why: str = ""  # part of the reason of these, as a regular expression


GRADIENTS: dict[str, Step] = {}
OTHERS: dict[str, Step] = {}


def gradients(**fields: Any) -> Any:
    def add(local: Callable[..., Any]) -> Callable[..., Any]:
        GRADIENTS[local.__name__] = Step(local, **fields)
        return local

    return add


def others(why: str, *, exact: int = 2, compressed: int = 0, check_vma: bool = False) -> Any:
    def add(local: Callable[..., Any]) -> Callable[..., Any]:
        step = Step(local, check_vma, compressed=compressed, exact=exact, why=why)
        OTHERS[local.__name__] = step
        return local

    return add


def hidden(p, x):
    return jnp.tanh(x @ p["w"])


def loss(p, x, y):
    return jnp.mean((hidden(p, x) @ p["v"] - y) ** 2)


grad = jax.grad(loss)


def each(function, *trees):
    return jax.tree.map(function, *trees)


def mean(tree):
    return lax.pmean(tree, "data")


def parts(array):
    return array.reshape(2, -1, SIZE)


# Gradients.


@gradients()
def clipped_by_its_norm(p, s, x, y):
    g, _ = optax.clip_by_global_norm(0.01).update(grad(p, x, y), None)
    return mean(g)


@gradients()
def clipped_by_the_norms_of_units(p, s, x, y):
    tx = optax.adaptive_grad_clip(0.01)
    return mean(tx.update(grad(p, x, y), tx.init(p), p)[0])


@gradients()
def clipped_by_bounds_of_the_data(p, s, x, y):
    g = grad(p, x, y)
    high, low = (each(lambda g, q=q: jnp.quantile(g, q), g) for q in (0.9, 0.1))
    below = each(jnp.minimum, each(lambda g: jnp.clip(g, -3 * g.std(), 3 * g.std()), g), high)
    return mean(each(lambda g, low: jnp.where(g < low, low, g), below, low))


@gradients()
def masked_by_constants_of_the_loss(p, s, x, y):
    def with_masks(p):
        return loss(p, x, y), each(lambda w: (jnp.arange(w.size) % 2).astype(w.dtype), p)

    g, masks = jax.grad(with_masks, has_aux=True)(p)
    return mean(each(lambda g, mask: g * mask.reshape(g.shape), g, masks))


@gradients()
def clipped_by_example(p, s, x, y):
    """As for differential privacy, with noise: weights of all examples times their gradients."""
    g = jax.vmap(lambda x, y: grad(p, x[None], y[None]))(x, y)
    norms = jnp.sqrt(sum(jnp.sum(leaf**2, (1, 2)) for leaf in jax.tree.leaves(g)))
    weights = jnp.minimum(1, 0.01 / norms)
    noise = jax.random.normal(jax.random.key(0), (SIZE, SIZE))
    return mean(each(lambda g: jnp.einsum("b,bij->ij", weights, g) + 0.01 * noise, g))


@gradients()
def scaled_loss_in_half_precision(p, s, x, y):
    half = each(lambda p: p.astype(jnp.bfloat16), p)
    scaled = jax.grad(lambda p: 256 * loss(p, x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)))
    return each(lambda g: g.astype(jnp.float32) / 256, mean(scaled(half)))


@gradients()
def scaled_by_a_state_and_skipped(p, s, x, y):
    """A scale that is an argument, and zeros in place of gradients that are not finite."""
    scale = jnp.exp2(s["w"][0, 0])
    g = each(lambda g: g / scale, jax.grad(lambda p: scale * loss(p, x, y))(p))
    finite = jnp.isfinite(optax.tree.norm(g))
    return mean(lax.cond(finite, lambda g: g, lambda g: each(jnp.zeros_like, g), g))


@gradients()
def accumulated_in_a_scan(p, s, x, y):
    def add(total, batch):
        return each(jnp.add, total, grad(p, *batch)), None

    total, _ = lax.scan(add, each(jnp.zeros_like, p), (parts(x), parts(y)))
    return mean(total)


@gradients()
def accumulated_from_step_to_step(p, s, x, y):
    """A running mean that is an argument, as of `optax.MultiSteps`, summed at its last step."""
    acc = each(lambda a, g: a + (g - a) / 3, s, grad(p, x, y))
    is_due = lax.psum(1, "data") > 0
    return lax.cond(is_due, mean, lambda acc: acc, acc)


@gradients(compressed=1)
def flat_and_padded(p, s, x, y):
    flat, unravel = ravel_pytree(each(lambda g: g.T, grad(p, x, y)))
    total = mean(jnp.pad(flat, (0, 24)).reshape(-1, 8))
    return unravel(total.reshape(-1)[: flat.size])


@gradients(compressed=1)
def scaled_by_numbers_in_any_form(p, s, x, y):
    """Numbers are repeated, transposed and reshaped, and multiplied by one another."""
    g = grad(p, x, y)["w"]
    scale = 1 / (1 + jnp.linalg.norm(g))
    repeated = jnp.broadcast_to(jnp.broadcast_to(scale, SIZE), g.shape)
    reshaped = jnp.broadcast_to(scale, g.size).reshape(g.shape)
    rows = jnp.broadcast_to(g.mean(0), g.shape)
    return mean(reshaped * g + repeated * rows.T + scale * rows + scale * g.mean())


@gradients()
def curvature_times_a_vector(p, s, x, y):
    product = jax.grad(lambda p: optax.tree.vdot(grad(p, x, y), s))(p)
    return mean(product)


@gradients()
def updates_of_momentum_in_a_loop(p, s, x, y):
    """Each turn moves the parameters, of which the next gradients are."""

    def turn(carry, batch):
        p, m = carry
        m = each(lambda m, g: 0.9 * m + g, m, mean(grad(p, *batch)))
        return (each(lambda p, m: p - 0.1 * m, p, m), m), None

    (last, _), _ = lax.scan(turn, (p, s), (parts(x), parts(y)))
    return each(jnp.subtract, last, p)


@gradients(check_vma=True, compressed=1)
def normalized_parameters(p, s, x, y):
    """JAX sums the gradient of what the workers use, and goes on to that of the parameter."""

    def normed(p):
        w = p["w"] * lax.rsqrt(jnp.sum(p["w"] ** 2, 0, keepdims=True))
        return mean(jnp.mean((x @ w - y) ** 2))

    return jax.grad(normed)(p)["w"]


@gradients(check_vma=True, compressed=1)
def spectral_normalization(p, s, x, y):
    """The backward pass goes on with a single number of the sum, and with the sum scaled."""

    def normed(w):
        u = lax.stop_gradient(w @ jnp.ones(SIZE))
        v = lax.stop_gradient(w.T @ u)
        return mean(jnp.mean((x @ (w / (u @ (w @ v))) - y) ** 2))

    return jax.grad(normed)(p["w"])


@gradients(compressed=1, out=P("data"))
def layers_of_gathered_parts(p, s, x, y):
    """Workers hold rows of each layer, which a checkpoint gathers again: sums are scattered."""
    shard = lax.axis_index("data") * (SIZE // 2)
    layers = lax.dynamic_slice_in_dim(jnp.stack([p["w"], p["v"]]), shard, SIZE // 2, 1)

    def whole_loss(layers):
        @jax.checkpoint
        def layer(h, part):
            whole = lax.all_gather(part.astype(jnp.bfloat16), "data", axis=0, tiled=True)
            return jnp.tanh(h @ whole.astype(jnp.float32)), None

        return jnp.mean((lax.scan(layer, x, layers)[0] - y) ** 2)

    return jax.grad(whole_loss)(layers)


@gradients()
def by_hand_from_two_pullbacks(p, s, x, y):
    """A layer after the other, with a sum behind each."""
    h, first = jax.vjp(lambda w: hidden({"w": w}, x), p["w"])
    _, second = jax.vjp(lambda v, h: jnp.mean((h @ v - y) ** 2), p["v"], h)
    dv, dh = second(jnp.float32(1))
    (dw,) = first(dh)
    return {"w": mean(dw), "v": mean(dv)}


# Others.

NONE = "from no backward pass"
MIXED = "made of gradients, and are none"
FORWARD = "from a forward pass"
IN_FORWARD = "in the forward pass"
CONTINUED = "goes on with its result"


@others(FORWARD, exact=1, compressed=2)
def statistics_beside_gradients(p, s, x, y):
    def with_statistics(p):
        h = hidden(p, x)
        return loss(p, x, y), jnp.var(jnp.tile(h, (1, SIZE)), 0)

    g, statistics = jax.grad(with_statistics, has_aux=True)(p)
    return mean((g, 0.9 * jnp.ones_like(statistics) + 0.1 * statistics))


@others(MIXED, exact=1, compressed=1)
def gram_matrices_of_muon(p, s, x, y):
    g = mean(grad(p, x, y)["w"])
    g = g / jnp.linalg.norm(g)
    gram = lax.psum(g.T @ g, "data")
    return 3.4445 * g - g @ (4.775 * gram)


@others(MIXED, exact=1)
def update_of_muon(p, s, x, y):
    g = grad(p, x, y)["w"]
    return mean(1.5 * g - 0.5 * g @ (g.T @ g))


@others(f"{FORWARD}|{MIXED}", exact=2)
def factors_of_kfac(p, s, x, y):
    _, pull = jax.vjp(lambda h: jnp.sum((h @ p["v"] - y) ** 2), hidden(p, x))
    (dh,) = pull(jnp.float32(1))
    activations = jax.grad(lambda p: (jnp.sum(p["w"]), hidden(p, x)), has_aux=True)(p)[1]
    return mean((activations.T @ activations, dh.T @ dh))


@others(MIXED, exact=5)
def full_matrix_of_adagrad(p, s, x, y):
    g = grad(p, x, y)["w"]
    column = g.reshape(-1)[:, None]
    row, rows = g[0], jnp.broadcast_to(g[0], g.shape)
    by_both = g / (1 + rows**2 + rows.T**2)
    outer = jnp.outer(row, row), row[:, None] * (2 * row[None]), rows * rows.T
    return mean((*outer, by_both, column * (2 * column)))


@others(MIXED)
def changes_of_local_steps(p, s, x, y):
    def turn(p, batch):
        return each(lambda p, g: p - 0.1 * g, p, grad(p, *batch)), None

    last, _ = lax.scan(turn, p, (parts(x), parts(y)))
    return mean(each(jnp.subtract, last, p))


@others(MIXED)
def changes_of_parameters_that_the_loss_takes_in_one_vector(p, s, x, y):
    flat, unravel = ravel_pytree(p)
    g = unravel(jax.grad(lambda flat: loss(unravel(flat), x, y))(flat))
    return mean(each(lambda p, g: p - 0.2 * g, p, g))


@others(MIXED)
def changes_of_parameters_behind_a_function(p, s, x, y):
    g = grad(each(lambda p, s: jnp.where(s > 0, jnp.tanh(p), 0), p, s), x, y)
    return mean(each(lambda p, g: p - 0.1 * g, p, g))


@others(MIXED, exact=3)
def products_of_gradients_in_any_form(p, s, x, y):
    g = grad(p, x, y)["w"]
    by_rows = lax.map(lambda row: row @ g, g)
    return mean((by_rows, jnp.outer(g @ g[0], jnp.ones(SIZE)), jnp.maximum(g, -g)))


@others(MIXED)
def updates_of_adam(p, s, x, y):
    second = each(lambda s, g: 0.99 * s**2 + 0.01 * g**2, s, grad(p, x, y))
    first = each(lambda s, g: 0.9 * s + 0.1 * g, s, grad(p, x, y))
    return mean(each(lambda m, v: -0.1 * m / (jnp.sqrt(v) + 1e-8), first, second))


@others(NONE)
def gradients_that_are_arguments(p, s, x, y):
    return mean(s)


@others(NONE, exact=1)
def evolution(p, s, x, y):
    noise = jax.random.normal(jax.random.key(0), (4, SIZE, SIZE))
    losses = jax.vmap(lambda n: loss({**p, "w": p["w"] + 0.1 * n}, x, y))(noise)
    return mean(jnp.einsum("i,ijk->jk", losses, noise))


@others(f"{IN_FORWARD}|{CONTINUED}", exact=4)
def gradients_inside_of_a_loss(p, s, x, y):
    """As of meta-learning: the outer gradient is of a loss behind an inner step."""

    def outer(p):
        moved = each(lambda p, g: p - 0.1 * g, p, mean(grad(p, x, y)))
        return loss(moved, x, y)

    return jax.grad(outer)(p)


@others(CONTINUED, exact=1, compressed=1)
def logits_that_the_loss_gathers(p, s, x, y):
    def whole_loss(w):
        logits = lax.all_gather(jnp.tile(x @ w, (1, 8)), "data", axis=1, tiled=True)
        return jnp.mean(jax.nn.softmax(logits) ** 2)

    return mean(jax.grad(whole_loss)(p["w"]))


@others(CONTINUED, exact=1, check_vma=True)
def activations_that_all_workers_have(p, s, x, y):
    """JAX sums the gradient of the activations, and goes on to that of the parameter."""

    def whole_loss(w):
        h = jnp.tanh(p["v"] @ w)
        return mean(jnp.mean((x @ h - y) ** 2))

    return jax.grad(whole_loss)(p["w"])


@others(CONTINUED, exact=1)
def cotangents_between_two_pullbacks(p, s, x, y):
    wide = lambda w: jnp.tile(hidden({"w": w}, x), (1, 8))  # noqa: E731
    h, first = jax.vjp(wide, p["w"])
    return first(mean(jax.grad(lambda h: jnp.mean(h**2))(h)))


@others(f"{IN_FORWARD}|{CONTINUED}", exact=2, compressed=2)
def statistics_of_the_batch(p, s, x, y):
    def normed(p):
        h = jnp.tile(hidden(p, x), (1, SIZE))
        centered = h - jax.checkpoint(mean)(jnp.mean(h, 0, keepdims=True))
        return jnp.mean((centered[:, :SIZE] ** 2 @ p["v"] - y) ** 2)

    return mean(jax.grad(normed)(p))
