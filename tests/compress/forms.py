"""Train steps as people write them. None knows of compression."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

WORKERS = 2
KEYS = jax.random.split(jax.random.key(0), 4)


def normal(*shape: int, scale: float = 1.0, seed: int) -> jax.Array:
    """NumPy draws them without compiling a program, which JAX would where a file is imported."""
    return jnp.asarray(np.random.default_rng(seed).normal(0, scale, shape), jnp.float32)


PARAMS = {
    "w": normal(32, 32, scale=1 / 6, seed=0),
    "v": normal(32, 32, scale=1 / 6, seed=1),
    "b": jnp.zeros((32,)),
}
X, Y = normal(8 * WORKERS, 32, seed=2), normal(8 * WORKERS, 32, seed=3)


@dataclasses.dataclass(frozen=True)
class Form:
    """Step that returns gradients, or values that change like them."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    groups: int = 1
    compressed: int = 2  # sums of all groups
    method: str = "bf16"  # that rounds
    same_sums: bool = True  # False: terms are added in another order
    source: str = "forms.py"  # file of its sums
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of `dq.compress`


FIELDS = ("groups", "compressed", "method", "same_sums")


def every_sum(each):
    """Compress what no backward pass has made, too, such as gradients that are arguments."""
    return True


Make = Callable[[Mesh], Form]
FORMS: dict[str, Make] = {}


def form(make: Make) -> Make:
    FORMS[make.__name__] = make
    return make


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["w"] + params["b"][None, :])
    return jnp.mean((hidden @ params["v"] - y) ** 2)


def mean_loss(params, x, y):
    return lax.pmean(loss_fn(params, x, y), "data")


def parts(*arrays):
    """Two parts of the rows of a worker."""
    return tuple(each.reshape(2, -1, *each.shape[1:]) for each in arrays)


def own_gradient(params, x, y):
    return jax.grad(loss_fn)(lax.pcast(params, "data", to="varying"), x, y)


def mapped(step, mesh, *, specs=(P(), P("data"), P("data")), out=P(), **options):
    return jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out, **options)


def in_map(step, mesh, args=(PARAMS, X, Y), *, options=None, **how):
    fields = {name: how.pop(name) for name in FIELDS if name in how}
    return Form(mapped(step, mesh, **how), args, options=options or {}, **fields)


@form
def summed_by_grad(mesh):
    return in_map(lambda *a: jax.grad(mean_loss)(*a), mesh)


@form
def pmean_of_a_tree(mesh):
    def step(params, x, y):
        return lax.pmean(jax.grad(loss_fn)(params, x, y), "data")

    return in_map(step, mesh, check_vma=False)


@form
def pmean_after_a_cast(mesh):
    return in_map(lambda *a: lax.pmean(own_gradient(*a), "data"), mesh)


@form
def psum_and_division(mesh):
    def step(*args):
        count = lax.psum(1, "data")
        return jax.tree.map(lambda g: lax.psum(g, "data") / count, own_gradient(*args))

    return in_map(step, mesh)


@form
def each_leaf_updated_at_once(mesh):
    """The first result is used before the next sum is there."""

    def step(params, x, y):
        grads = own_gradient(params, x, y)
        scale = jnp.float32(1)
        after = {}
        for name, grad in grads.items():
            total = lax.pmean(grad, "data")
            after[name] = total * scale + 0 * jnp.sum(total)
        return after

    return in_map(step, mesh)


@form
def jitted_and_donated(mesh):
    step = jax.jit(mapped(lambda *a: jax.grad(mean_loss)(*a), mesh), donate_argnums=0)
    return Form(step, (PARAMS, X, Y))


@form
def jitted_inside(mesh):
    @jax.jit
    def gradient(*args):
        return jax.grad(mean_loss)(*args)

    return in_map(lambda *a: jax.tree.map(lambda g: 2 * g, gradient(*a)), mesh)


@form
def static_argument(mesh):
    @functools.partial(jax.jit, static_argnames="twice")
    def step(params, x, y, twice):
        gradient = mapped(lambda *a: jax.grad(mean_loss)(*a), mesh)(params, x, y)
        return jax.tree.map(lambda g: 2 * g, gradient) if twice else gradient

    return Form(functools.partial(step, twice=True), (PARAMS, X, Y))


@form
def optimizer_and_statistics(mesh):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))

    def step(params, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(lax.pcast(params, "data", to="varying"), x, y)
        grads, loss = lax.pmean((grads, loss), "data")
        updates, _ = tx.update(grads, tx.init(params), params)
        return updates, jnp.isfinite(loss)

    return in_map(lambda *a: step(*a)[0], mesh)


@form
def pmap_of_flax(mesh):
    model = nn.Dense(32)
    state = TrainState.create(
        apply_fn=model.apply, params=model.init(KEYS[0], X), tx=optax.sgd(1.0)
    )

    def step(state, x, y):
        def loss(params):
            return jnp.mean((state.apply_fn(params, x) - y) ** 2)

        grads = lax.pmean(jax.grad(loss)(state.params), "batch")
        return state.apply_gradients(grads=grads).params

    pmapped = jax.pmap(step, axis_name="batch", devices=list(mesh.devices.flat))
    state = jax_utils.replicate(state, mesh.devices.flat)
    split = [each.reshape(WORKERS, -1, 32) for each in (X, Y)]
    options = {"axis_name": "batch"}
    return Form(pmapped, (state, *split), compressed=1, options=options)


@form
def every_other_step(mesh):
    """As `optax.MultiSteps` does: the sum is in a branch."""

    def step(params, x, y):
        grads = jax.grad(loss_fn)(params, x, y)
        is_due = lax.psum(jnp.sum(x) * 0, "data") == 0
        return lax.cond(is_due, lambda g: lax.pmean(g, "data"), lambda g: g, grads)

    return in_map(step, mesh, check_vma=False)


@form
def accumulated_in_a_scan(mesh):
    def step(params, x, y):
        own = lax.pcast(params, "data", to="varying")

        def add(total, batch):
            return jax.tree.map(jnp.add, total, jax.grad(loss_fn)(own, *batch)), None

        zeros = jax.tree.map(jnp.zeros_like, own)
        return lax.pmean(lax.scan(add, zeros, parts(x, y))[0], "data")

    return in_map(step, mesh)


def _deep_loss(params, x, y, checkpoint):
    def layer(hidden, weights):
        return jnp.tanh(hidden @ weights), None

    layer = jax.checkpoint(layer) if checkpoint else layer
    hidden, _ = lax.scan(layer, x @ params["w"], params["layers"])
    return lax.pmean(jnp.mean((hidden - y) ** 2), "data")


def _deep(mesh, checkpoint):
    layers = jax.random.normal(KEYS[1], (3, 32, 32)) / 6
    step = functools.partial(_deep_loss, checkpoint=checkpoint)
    args = ({"w": PARAMS["w"], "layers": layers}, X, Y)
    return in_map(lambda *a: jax.grad(step)(*a), mesh, args)


@form
def layers_in_a_scan(mesh):
    return _deep(mesh, checkpoint=False)


@form
def layers_in_a_scan_with_checkpoint(mesh):
    return _deep(mesh, checkpoint=True)


@form
def while_loop(mesh):
    def step(params, x, y):
        def turn(carry):
            count, params = carry
            grads = jax.grad(mean_loss)(params, x, y)
            return count + 1, jax.tree.map(jnp.subtract, params, grads)

        return lax.while_loop(lambda carry: carry[0] < 2, turn, (0, params))[1]

    return in_map(step, mesh)


@form
def custom_rule_around_a_sum(mesh):
    @jax.custom_vjp
    def reduced(grads):
        return lax.pmean(grads, "data")

    reduced.defvjp(lambda grads: (reduced(grads), None), lambda _, ct: (ct,))

    @jax.custom_jvp
    def again(grads):
        return lax.pmean(grads, "data")

    again.defjvp(lambda primals, tangents: (again(*primals), again(*tangents)))

    def step(params, x, y):
        grads = jax.grad(loss_fn)(params, x, y)
        return {"a": reduced(grads), "b": again(grads)}

    return in_map(step, mesh, compressed=4, check_vma=False)


@form
def two_models_one_after_the_other(mesh):
    """The second gradient needs parameters that the first one has changed."""

    def step(params, x, y):
        first = jax.grad(mean_loss)(params, x, y)
        changed = jax.tree.map(jnp.subtract, params, first)
        return first, jax.grad(mean_loss)(changed, x, y)

    return in_map(step, mesh, groups=2, compressed=4)


@form
def parameter_that_is_used_twice(mesh):
    """JAX adds two sums of its gradient, of which one is transposed."""

    def loss(params, x, y):
        hidden = jnp.tanh(x @ params["w"])
        return lax.pmean(jnp.mean((hidden @ params["w"].T - y) ** 2), "data")

    return in_map(lambda *a: jax.grad(loss)(*a)["w"], mesh, compressed=1, same_sums=False)


@form
def half_precision_and_integers(mesh):
    def step(params, x, y):
        grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), own_gradient(params, x, y))
        total, count = lax.psum((grads, jnp.sum(x > 0)), "data")
        return jax.tree.map(lambda g: g.astype(jnp.float32) / count.astype(jnp.float32), total)

    return in_map(step, mesh, method="mxfp8")


@form
def a_further_axis(mesh):
    both = Mesh(jax.devices()[: 2 * WORKERS], ("data",)).devices.reshape(WORKERS, 2)
    axes = ("data", "local")

    def step(params, x, y):
        return jax.grad(lambda p: lax.pmean(loss_fn(p, x, y), axes))(params)

    return in_map(step, Mesh(both, axes), specs=(P(), P(axes), P(axes)), same_sums=False)


@form
def partly_manual(mesh):
    both = jax.make_mesh(
        (WORKERS, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[: 2 * WORKERS],
    )  # fmt: skip
    options = {"specs": P()}
    return in_map(lambda *a: jax.grad(mean_loss)(*a), both, options=options, axis_names={"data"})


@form
def worker_in_a_vmap(mesh):
    def step(params, x, y):
        return lax.pmean(jax.grad(loss_fn)(params, x, y), "data")

    split = [each.reshape(WORKERS, -1, 32) for each in (X, Y)]
    return Form(step, (PARAMS, *split), options={"vmap": True}, same_sums=False)
