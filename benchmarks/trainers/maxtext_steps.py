"""Short trainings with MaxText, by its own command: meshes, kernels, experts and DiLoCo."""

import dataclasses
import functools
import inspect
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.trainers.training import PackageTraining, Wrap

FRAGMENTS = 3
MODEL: dict[str, Any] = {
    "base_emb_dim": 128,
    "base_mlp_dim": 256,
    "base_num_decoder_layers": 2,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 32,
    "vocab_size": 512,
    "max_target_length": 64,
    "per_device_batch_size": 2,
    "learning_rate": 3e-4,
    "steps": 20,
}
MACHINE: dict[str, Any] = {
    "hardware": "cpu",
    "attention": "dot_product",
    "dataset_type": "synthetic",
    "enable_checkpointing": "false",
    "jax_cache_dir": "",
    "skip_jax_distributed_system": "true",
    "run_name": "benchmark",
}
_MESH = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 4}
_REPLICAS = {"ici_diloco_parallelism": 2, "ici_fsdp_parallelism": 4, "enable_diloco": "true"}
_EXPERTS = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2}


@dataclasses.dataclass(frozen=True)
class Run:
    """A way to train."""

    title: str
    options: dict[str, Any]  # of MaxText
    axis_name: str | tuple[str, ...] = "data"

    def train(self, wrap: Wrap) -> list[float]:
        """Train by the command of MaxText, and return the losses of its steps."""
        import maxtext
        from flax import nnx
        from maxtext.trainers.pre_train import train
        from maxtext.utils import maxtext_utils, train_utils

        jit_train_step = train_utils.jit_train_step
        if self.axis_name == "diloco":
            show_means_of_replicas()

        def parameters(state: Any, *_: Any) -> Any:
            if self.axis_name == "diloco":
                return state.params
            return nnx.filter_state(state["model"], nnx.Param)

        def wrapped(config: Any, *args: Any, **kwargs: Any) -> Any:
            mesh = maxtext_utils.get_mesh_from_config(config)
            # Replicas of DiLoCo are averaged after local steps, by no gradient.
            options = {"only": is_mean_of_replicas} if self.axis_name == "diloco" else {}
            step = jit_train_step(config, *args, **kwargs)
            return wrap(step, self.axis_name, mesh=mesh, parameters=parameters, **options)

        if self.options.get("attention") == "flash":
            _interpret_flash_attention()
        with tempfile.TemporaryDirectory() as folder:
            metrics = Path(folder) / "metrics.json"
            options = MACHINE | MODEL | self.options
            options |= {"base_output_directory": folder, "metrics_file": metrics}
            base = Path(inspect.getfile(maxtext)).parent / "configs" / "base.yml"
            arguments = [f"{key}={value}" for key, value in options.items()]
            with mock.patch.object(train_utils, "jit_train_step", wrapped):
                train.run(*train.initialize(["", str(base), *arguments]))
            return [mean_loss(json.loads(line)) for line in metrics.read_text().splitlines()]


def is_mean_of_replicas(each: Any) -> bool:
    """Return whether a sum of a step is one of parameters, or of their changes."""
    return bool(each.origin == "other")


def show_means_of_replicas() -> None:
    """Average the replicas of DiLoCo by `jnp.mean`, in place of a primitive of drjax."""
    from maxtext.trainers.diloco import utils

    def mean(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.mean(leaf, 0), tree)

    def synchronized(synchronize: Any, *args: Any, **kwargs: Any) -> Any:
        with mock.patch("drjax.reduce_mean", mean):
            return synchronize(*args, **kwargs)

    for name in ("synchronize_full_state", "synchronize_fragment_state"):
        setattr(utils, name, functools.partial(synchronized, getattr(utils, name)))


def mean_loss(metrics: dict[str, float]) -> float:
    """Return the loss of one step, with DiLoCo the mean over the replicas."""
    islands = [value for name, value in metrics.items() if "loss_island" in name]
    return float(np.mean(islands)) if islands else metrics["learning/loss"]


def _interpret_flash_attention() -> None:
    """Attend by the kernel that MaxText has for TPUs alone, in Pallas' interpreter."""
    from maxtext.layers import attention_op

    kernels = attention_op.splash_attention_kernel
    kernels.make_splash_mha = functools.partial(kernels.make_splash_mha, interpret=True)

    def flash(
        self: Any, query: Any, key: Any, value: Any, *, decoder_segment_ids: Any, **others: Any
    ) -> tuple[Any, None, None]:
        out, _ = self.tpu_flash_attention(query, key, value, decoder_segment_ids)
        return out, None, None

    attention_op.AttentionOp.apply_attention = flash


RUNS = {
    "data": Run("data, fsdp", _MESH),
    "fast": Run("the same at 1e-3", _MESH | {"learning_rate": 1e-3}),
    "flash": Run("flash attention", _MESH | {"attention": "flash", "max_target_length": 128}),
    "experts": Run(
        "mixture of experts, ragged dot",
        _MESH | _EXPERTS | {"base_moe_mlp_dim": 256, "sparse_matmul": "true", "megablox": "false"},
        # Its layers of experts are a `shard_map` of all axes, which sums over both.
        ("data", "fsdp"),
    ),
    "tensor": Run(
        "data, fsdp, tensor", _MESH | {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
    ),
    "accumulation": Run(
        "micro-batches", _MESH | {"gradient_accumulation_steps": 2, "per_device_batch_size": 1}
    ),
    "diloco": Run("DiLoCo", _REPLICAS | {"diloco_sync_period": 2 * FRAGMENTS}, "diloco"),
    "streaming": Run(
        "streaming DiLoCo",
        _REPLICAS
        | {"enable_streaming_diloco": "true", "num_diloco_fragments": FRAGMENTS}
        | {"diloco_sync_period": 2 * FRAGMENTS},
        "diloco",
    ),
}
TRAININGS = {
    f"maxtext_{name}": PackageTraining(
        title=f"MaxText, {run.title}",
        package="maxtext",
        module="maxtext",
        environment="maxtext",
        place="`train_utils.jit_train_step`",
        train=run.train,
        num_devices=8,
        variables={"DECOUPLE_GCLOUD": "TRUE"},
    )
    for name, run in RUNS.items()
}
