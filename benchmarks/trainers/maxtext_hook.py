"""MaxText with compressed gradients, or with a compressed DiLoCo synchronization.

Call one of the functions between `train.initialize` and `train.run`. Options are those of the
library's functions.
"""

import functools
from unittest import mock

import jax
from flax import nnx
from maxtext.trainers.diloco import utils as diloco
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils
from maxtext.utils.sharding import nnx_construct_named_sharding as shardings_of

import dynamiq_jax as dq

SUMS = ("xent_sum", "total_weights", "has_moe_overflow")
MEANS = ("intermediate_outputs", "z_loss", "moe_lb_loss", "indexer_loss", "mtp_loss", "batch_stats")
MEANS += ("moe_bias_updates", "mtp_moe_bias_updates")


def compress_gradients(config, **options):
    """Average gradients over the axis `data` compressed, in place of an exact mean."""
    mode, rows = config.shard_mode.value, config.per_device_batch_size
    if mode != "auto" or rows < 1 or config.using_pipeline_parallelism:
        given = f"shard_mode={mode}, per_device_batch_size={rows}"
        raise ValueError(f"{given}: give auto, at least 1, and no axis for pipelines.")
    settings, (batch, length) = config.get_keys(), config.input_data_sharding_logical_axes
    for name in ("logical_axis_rules", "logical_axis_rules_for_eval"):
        # Arrays of a worker are not split over `data`. The batch of a step is.
        axes = [(rule, jax.tree.leaves(axes)) for rule, axes in settings[name]]
        own = [(rule, tuple(axis for axis in found if axis != "data")) for rule, found in axes]
        settings[name] = (*own, ("input_batch", dict(settings[name])[batch]))
    settings["input_data_sharding_logical_axes"] = ["input_batch", length]
    mesh, exact_loss = maxtext_utils.get_mesh_from_config(config), train.loss_fn
    is_sum = config.gradient_accumulation_steps > 1  # the loss of a micro-batch

    @functools.wraps(exact_loss)
    def worker_loss(*args, **kwargs):
        loss, aux = exact_loss(*args, **kwargs)
        return loss * (mesh.shape["data"] if is_sum else 1), aux

    def num_targets(model, config, data, *others):
        return 1 if is_sum else (data["targets_segmentation"] != 0).sum()

    how = {"axis_name": "data", "transform": "vmap", "static_argnames": "is_train"} | options
    how |= {"mesh": mesh, "specs": functools.partial(shardings_of, mesh=mesh)}
    aux = dict.fromkeys(SUMS, "sum") | dict.fromkeys(MEANS, "mean")
    train.loss_fn = dq.data_parallel(
        worker_loss, has_aux=True, aux=aux, num_targets=num_targets, **how
    )


def compress_diloco(config, **options):
    """Average the replicas, or the fragments of streaming DiLoCo, compressed."""
    del config  # as `compress_gradients`

    def compressed(synchronize, state, *args, mesh):
        params = nnx.filter_state(state.inner_state.model, nnx.Param)
        found = jax.tree.leaves_with_path(shardings_of(params, mesh).to_pure_dict())
        specs = {jax.tree_util.keystr(path): sharding for path, sharding in found}
        key = jax.random.fold_in(jax.random.key(0), state.step)

        def spec(path, _):  # fragments have such paths as keys
            return specs.get(path[0].key) or specs[jax.tree_util.keystr(path)]

        def mean(tree):
            own = jax.tree.map_with_path(spec, tree)
            return dq.mean_of_replicas(tree, "diloco", key=key, mesh=mesh, specs=own, **options)

        with mock.patch("drjax.reduce_mean", mean):
            return synchronize(state, *args, mesh=mesh)

    for name in ("synchronize_full_state", "synchronize_fragment_state"):
        setattr(diloco, name, functools.partial(compressed, getattr(diloco, name)))
