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
HALVES = [each.reshape(WORKERS, -1, 32) for each in (X, Y)]


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
def static_argument(mesh):
    @functools.partial(jax.jit, static_argnames="twice")
    def step(params, x, y, twice):
        gradient = mapped(lambda *a: jax.grad(mean_loss)(*a), mesh)(params, x, y)
        return jax.tree.map(lambda g: 2 * g, gradient) if twice else gradient

    return Form(functools.partial(step, twice=True), (PARAMS, X, Y))


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
    options = {"axis_name": "batch"}
    return Form(pmapped, (state, *HALVES), compressed=1, options=options)


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
    both = jax.make_mesh((WORKERS, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    options = {"specs": P()}
    return in_map(lambda *a: jax.grad(mean_loss)(*a), both, options=options, axis_names={"data"})


@form
def worker_in_a_vmap(mesh):
    def step(params, x, y):
        return lax.pmean(jax.grad(loss_fn)(params, x, y), "data")

    return Form(step, (PARAMS, *HALVES), options={"vmap": True}, same_sums=False)


@form
def loss_gradients_and_aux_in_one_mean(mesh):
    def step(params, x, y):
        def loss(params):
            return loss_fn(params, x, y), {"rows": jnp.float32(x.shape[0]), "none": None}

        return lax.pmean(jax.value_and_grad(loss, has_aux=True)(params), "data")[1]

    return in_map(step, mesh, check_vma=False)


@form
def layers_whose_checkpoint_keeps_products(mesh):
    def loss(params, x, y):
        policy = jax.checkpoint_policies.dots_saveable

        @functools.partial(jax.checkpoint, policy=policy)
        def layer(hidden, weights):
            return jnp.tanh(hidden @ weights)

        hidden = layer(layer(x, params["w"]), params["v"])
        return lax.pmean(jnp.mean((hidden - y) ** 2), "data")

    return in_map(lambda *a: jax.grad(loss)(*a), mesh)


@form
def convolution(mesh):
    """Four filters of 16 channels, and their biases."""
    model = nn.Sequential([nn.Conv(16, (3, 3)), nn.relu, nn.Conv(16, (3, 3))])
    images = jax.random.normal(KEYS[2], (4 * WORKERS, 6, 6, 16))
    variables = model.init(KEYS[0], images)

    def loss(variables, images):
        return lax.pmean(jnp.mean((model.apply(variables, images) - images) ** 2), "data")

    step = mapped(lambda *a: jax.grad(loss)(*a), mesh, specs=(P(), P("data")))
    return Form(step, (variables, images), source="linear.py")


@form
def normalization_of_the_batch(mesh):
    """flax sums the statistics of its BatchNorm over the workers itself."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False, axis_name="batch")(nn.Dense(64)(x))
            return nn.Dense(32)(nn.relu(x))

    model = Net()
    variables = _initial(Net, X)

    def step(variables, x, y):
        def loss(params):
            out, changed = model.apply({**variables, "params": params}, x, mutable=["batch_stats"])
            return jnp.mean((out - y) ** 2), changed

        grads, _ = jax.grad(loss, has_aux=True)(variables["params"])
        return lax.pmean(grads, "batch")

    pmapped = jax.pmap(
        step, axis_name="batch", in_axes=(None, 0, 0), devices=list(mesh.devices.flat)
    )
    options = {"axis_name": "batch"}
    return Form(pmapped, (variables, *HALVES), options=options, same_sums=False)


def _initial(net, x):
    """Return variables of a network that sums over workers, from one worker."""
    return jax.tree.map(
        lambda leaf: leaf[0], jax.vmap(lambda x: net().init(KEYS[0], x), axis_name="batch")(x[None])
    )


@form
def tied_embedding(mesh):
    """A table that is looked up at the input, and is the last layer."""
    table = jax.random.normal(KEYS[0], (64, 32))
    tokens = jax.random.randint(KEYS[1], (8 * WORKERS,), 0, 64)

    def loss(table, tokens):
        logits = jnp.tanh(table[tokens]) @ table.T
        return lax.pmean(
            optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean(), "data"
        )

    step = mapped(lambda *a: jax.grad(loss)(*a), mesh, specs=(P(), P("data")))
    return Form(step, (table, tokens), compressed=1, same_sums=False)


@form
def optimizer_with_a_state(mesh):
    """The state of the optimizer is an argument and a result, as the parameters are."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9), optax.scale(-1.0))

    def step(params, state, x, y):
        grads = lax.pmean(jax.grad(loss_fn)(params, x, y), "data")
        return tx.update(grads, state, params)

    whole = mapped(
        step, mesh, specs=(P(), P(), P("data"), P("data")), out=(P(), P()), check_vma=False
    )
    return Form(whole, (PARAMS, tx.init(PARAMS), X, Y))


@form
def actor_and_critic(mesh):
    """Two gradients that do not need each other are one group."""

    def step(params, x, y):
        actor = lax.pmean(own_gradient(params, x, y), "data")["w"]
        critic = lax.pmean(own_gradient(params, y, x), "data")["v"]
        return actor - critic, critic

    return in_map(step, mesh)


@form
def loop_around_the_map(mesh):
    """`shard_map` is inside of the loop, not around it."""
    gradient = mapped(lambda *a: jax.grad(mean_loss)(*a), mesh)

    @jax.jit
    def step(params, x, y):
        def update(params, batch):
            return jax.tree.map(jnp.subtract, params, gradient(params, *batch)), None

        final, _ = lax.scan(update, params, parts(x, y))
        return jax.tree.map(jnp.subtract, final, params)

    return Form(step, (PARAMS, X, Y), same_sums=False)


@form
def scaled_loss_of_half_precision(mesh):
    """A step that is skipped where a gradient is not finite."""

    def step(params, x, y):
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)

        def loss(params):
            return 1024 * loss_fn(params, x.astype(jnp.bfloat16), y.astype(jnp.bfloat16))

        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / 1024, jax.grad(loss)(half))
        grads = lax.pmean(grads, "data")
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        skipped = lambda g: jax.tree.map(jnp.zeros_like, g)  # noqa: E731
        return lax.cond(finite, lambda g: g, skipped, grads)

    return in_map(step, mesh, check_vma=False, same_sums=False)


@form
def parts_of_an_optimizer(mesh):
    """Each worker updates its rows of every parameter, and gathers the rest."""

    def step(params, x, y):
        grads = own_gradient(params, x, y)
        rows = {
            name: lax.psum_scatter(
                grads[name].reshape(WORKERS, -1, 32), "data", scatter_dimension=0
            )
            for name in "wv"
        }
        updates = jax.tree.map(lambda g: g / WORKERS, rows)
        return jax.tree.map(lambda u: lax.all_gather(u, "data", tiled=True), updates)

    return in_map(step, mesh, check_vma=False)
