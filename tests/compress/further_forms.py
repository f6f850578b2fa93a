"""Further train steps as people write them: models, optimizers and loops beside those of `forms`.

None of them has the structure of a form there.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from tests.compress.forms import (
    KEYS,
    PARAMS,
    WORKERS,
    Form,
    Make,
    X,
    Y,
    in_map,
    loss_fn,
    mapped,
    mean_loss,
    own_gradient,
    parts,
)

FURTHER_FORMS: dict[str, Make] = {}
HALVES = [each.reshape(WORKERS, -1, 32) for each in (X, Y)]


def form(make: Make) -> Make:
    FURTHER_FORMS[make.__name__] = make
    return make


@form
def loss_gradients_and_aux_in_one_mean(mesh):
    def step(params, x, y):
        def loss(params):
            return loss_fn(params, x, y), {"rows": jnp.float32(x.shape[0]), "none": None}

        return lax.pmean(jax.value_and_grad(loss, has_aux=True)(params), "data")[1]

    return in_map(step, mesh, check_vma=False)


@form
def flat_vector(mesh):
    """All gradients as one vector."""

    def step(params, x, y):
        flat, unravel = ravel_pytree(own_gradient(params, x, y))
        return unravel(lax.pmean(flat, "data"))

    return in_map(step, mesh, compressed=1)


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
        lambda leaf: leaf[0],
        jax.vmap(lambda x: net().init(KEYS[0], x), axis_name="batch")(x[None]),
    )


@form
def dropout_of_each_worker(mesh):
    """Every worker has noise of its own, from its place on the axis."""

    def step(params, x, y):
        key = jax.random.fold_in(jax.random.key(7), lax.axis_index("batch"))
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return lax.pmean(jax.grad(loss_fn)(params, jnp.where(kept, x, 0), y), "batch")

    pmapped = jax.pmap(
        step, axis_name="batch", in_axes=(None, 0, 0), devices=list(mesh.devices.flat)
    )
    return Form(pmapped, (PARAMS, *HALVES), options={"axis_name": "batch"})


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
def ensemble_in_a_vmap(mesh):
    """Three models in a `vmap` inside of the map: each sum has all of them."""

    def step(params, x, y):
        def of_model(scale):
            scaled = jax.tree.map(lambda p: p * scale, params)
            return lax.pmean(jax.grad(loss_fn)(scaled, x, y), "data")

        return jax.vmap(of_model)(jnp.array([0.5, 1.0, 2.0]))

    return in_map(step, mesh, check_vma=False)


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
