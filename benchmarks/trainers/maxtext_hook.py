"""MaxText with compressed gradients, or with a compressed DiLoCo synchronization.

Call one of the functions before MaxText trains. Options are those of the library's functions.
"""

import functools
from unittest import mock

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P
from maxtext.trainers.diloco import utils as diloco
from maxtext.trainers.pre_train import train
from maxtext.utils.sharding import nnx_construct_named_sharding as shardings_of

import dynamiq_jax as dq


def compress_gradients(**options):
    """Average gradients over the axis `data` compressed, in place of an exact mean."""
    exact_loss, constrain = train.loss_fn, jax.lax.with_sharding_constraint

    def constrain_others(x, sharding):
        """Constrain over axes besides `data`: JAX refuses manual ones, and the mesh of MaxText."""
        axes = (tuple(jax.tree.leaves(names)) for names in sharding.spec)
        return constrain(x, P(*(tuple(name for name in names if name != "data") for names in axes)))

    @functools.wraps(exact_loss)
    def worker_loss(model, config, *args):
        with mock.patch("jax.lax.with_sharding_constraint", constrain_others):
            loss, others = exact_loss(model, config, *args)
        sums = {name: others.pop(name) for name in ("xent_sum", "total_weights")}
        if config.gradient_accumulation_steps > 1:  # the loss is such a sum, not a mean
            loss = loss * model.mesh.shape["data"]
        return loss, (sums, others)

    def num_targets(model, config, data, *args):
        sums = config.gradient_accumulation_steps > 1
        return 1 if sums else (data["targets_segmentation"] != 0).sum()

    @functools.wraps(exact_loss)
    def mean_loss(model, *args, **kwargs):
        arguments = {
            "mesh": model.mesh,
            "axis_name": "data",
            "static_argnames": "is_train",
        } | options
        specs = functools.partial(shardings_of, mesh=model.mesh)
        loss = dq.data_parallel(
            worker_loss, has_aux=True, num_targets=num_targets, specs=specs, **arguments
        )
        return loss(model, *args, **kwargs)

    train.loss_fn = mean_loss


def compress_diloco(**options):
    """Average the fragments of streaming DiLoCo over the replicas compressed."""
    synchronize = diloco.synchronize_fragment_state

    def compressed(state, *args, mesh):
        params = nnx.filter_state(state.inner_state.model, nnx.Param)
        shardings = jax.tree.leaves_with_path(shardings_of(params, mesh).to_pure_dict())
        specs = {jax.tree_util.keystr(path): sharding for path, sharding in shardings}
        key = jax.random.fold_in(jax.random.key(0), state.step)

        def mean(fragment):
            own = {name: specs[name] for name in fragment}
            return dq.mean_of_replicas(fragment, "diloco", key=key, mesh=mesh, specs=own, **options)

        with mock.patch("drjax.reduce_mean", mean):
            return synchronize(state, *args, mesh=mesh)

    diloco.synchronize_fragment_state = compressed
