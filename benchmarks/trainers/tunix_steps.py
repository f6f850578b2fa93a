"""Short trainings with tunix: all parameters of a Llama, adapters, and pairs of answers."""

from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

from benchmarks.trainers.training import PackageTraining, Wrap

STEPS, ROWS, LENGTH, VOCABULARY, ANSWER = 20, 16, 32, 512, 16


def workers() -> Mesh:
    """Make a mesh of two workers of four devices."""
    return jax.make_mesh((2, 4, 1), ("data", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3)


def llama(mesh: Mesh) -> Any:
    """Make a Llama of two layers, split over `fsdp`."""
    from flax import nnx
    from tunix.models.llama3 import model as llama3

    config = llama3.ModelConfig(
        num_layers=2,
        vocab_size=VOCABULARY,
        embed_dim=128,
        hidden_dim=384,
        num_heads=4,
        head_dim=32,
        num_kv_heads=2,
        rope_theta=500_000,
        norm_eps=1e-5,
    )
    model = llama3.Llama3(config, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    nnx.update(model, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
    return model


def training_config(kind: Any, **options: Any) -> Any:
    """Make a configuration of a trainer that splits rows over both axes."""
    return kind(
        eval_every_n_steps=1000,
        max_steps=STEPS,
        data_sharding_axis=(("data", "fsdp"),),
        metrics_logging_options=None,
        **options,
    )


def wrap_step(trainer: Any, wrap: Wrap, kind: Any) -> list[float]:
    """Wrap the step of a trainer, and return a list that gets its losses.

    Args:
      trainer: any trainer of tunix.
      wrap: the wrap.
      kind: class of the parameters that are trained.
    """
    from flax import nnx

    train_step, eval_step = trainer.jit_train_and_eval_step()
    step = wrap(
        train_step.func, "data", mesh=workers(), parameters=lambda model, *_: nnx.state(model, kind)
    )
    losses = []

    def recorded(*args: Any) -> Any:
        results = step(*train_step.args, *args)
        losses.append(float(results[0]))
        return results

    trainer.jit_train_and_eval_step = lambda *_: (recorded, eval_step)
    return losses


def _tokens() -> Any:
    """Make rows of several lengths: workers have different numbers of targets."""
    from tunix.sft import peft_trainer

    rng = np.random.default_rng(0)
    lengths = rng.integers(8, LENGTH, size=(ROWS, 1))
    lengths[: ROWS // 2] = LENGTH
    mask = (np.arange(LENGTH) < lengths).astype(np.int32)
    tokens = rng.integers(1, VOCABULARY, (ROWS, LENGTH)).astype(np.int32) * mask
    return peft_trainer.TrainingInput(input_tokens=tokens, input_mask=mask)


def _model_input(inputs: Any) -> dict[str, Any]:
    from tunix.sft import utils

    return {
        "input_tokens": inputs.input_tokens,
        "input_mask": inputs.input_mask,
        "positions": utils.build_positions_from_mask(inputs.input_mask),
        "attention_mask": utils.make_causal_attn_mask(inputs.input_mask),
    }


def all_parameters(wrap: Wrap) -> list[float]:
    """Train all parameters by AdamW."""
    from flax import nnx

    mesh = workers()
    with mesh:
        return _tuned(llama(mesh), wrap, nnx.Param)


def adapters(wrap: Wrap) -> list[float]:
    """Train adapters of LoRA of the attention alone."""
    import qwix
    from flax import nnx

    mesh = workers()
    provider = qwix.LoraProvider(module_path=".*[qkvo]_proj", rank=64, alpha=64.0)
    with mesh:
        inputs = _model_input(_tokens())
        model = qwix.apply_lora_to_model(
            *(llama(mesh), provider, inputs["input_tokens"], inputs["positions"], None),
            inputs["attention_mask"],
        )
        return _tuned(model, wrap, nnx.LoRAParam)


def _tuned(model: Any, wrap: Wrap, kind: Any) -> list[float]:
    from tunix.sft import peft_trainer

    config = training_config(peft_trainer.TrainingConfig)
    trainer = peft_trainer.PeftTrainer(model, optax.adamw(1e-3), config)
    trainer = trainer.with_gen_model_input_fn(_model_input)
    losses = wrap_step(trainer, wrap, kind)
    trainer.train([_tokens()] * STEPS, skip_jit=True)
    return losses


def preferences(wrap: Wrap) -> list[float]:
    """Train by pairs of answers of several lengths to the same prompts: DPO."""
    from flax import nnx
    from tunix.sft.dpo import dpo_trainer as dpo

    rng = np.random.default_rng(0)

    def tokens(length: int) -> Any:
        return rng.integers(1, VOCABULARY, (ROWS, length)).astype(np.int32)

    def mask() -> Any:
        return (np.arange(ANSWER) < rng.integers(4, ANSWER + 1, (ROWS, 1))).astype(np.int32)

    pairs = dpo.TrainingInput(
        prompt_ids=tokens(8),
        prompt_mask=np.ones((ROWS, 8), np.int32),
        chosen_ids=tokens(ANSWER),
        chosen_mask=mask(),
        rejected_ids=tokens(ANSWER),
        rejected_mask=mask(),
    )
    mesh = workers()
    with mesh:
        config = training_config(dpo.DPOTrainingConfig)
        trainer = dpo.DPOTrainer(llama(mesh), llama(mesh), optax.adamw(1e-3), config)
        losses = wrap_step(trainer, wrap, nnx.Param)
        trainer.train([pairs] * STEPS, skip_jit=True)
    return losses


TRAININGS = {
    f"tunix_{name}": PackageTraining(
        title=f"tunix, {title}",
        package="google-tunix",
        module="tunix",
        environment="tunix",
        place="`trainer.jit_train_and_eval_step`",
        train=train,
        num_devices=8,
    )
    for name, title, train in (
        ("all", "all parameters", all_parameters),
        ("lora", "LoRA", adapters),
        ("dpo", "DPO", preferences),
    )
}
