"""tunix trains a Llama through a compressed mean, without a change to its training loop.

Its own environment: `make test-tunix`.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tunix.models.llama3 import model as llama3
from tunix.rl import algo_core
from tunix.rl import common as rl
from tunix.rl import trainer as rl_trainer
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.sft import peft_trainer, sharding_utils, utils
from tunix.sft.dpo import dpo_trainer as dpo

import dynamiq_jax as dq
from benchmarks.speed.mesh_bytes import sent_by_axes
from tests.trainers.recipe import run_lines

STEPS, ROWS, LENGTH, VOCABULARY = 20, 16, 32, 512
ANSWER = 16
GROUP = 4
CONFIG = llama3.ModelConfig(
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


def tunix_mesh():
    return jax.make_mesh((2, 4, 1), ("data", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3)


def placed_model(mesh):
    model = llama3.Llama3(CONFIG, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    nnx.update(model, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
    return model


def batch():
    """Rows of several lengths: workers have different numbers of targets."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, LENGTH, size=(ROWS, 1))
    lengths[: ROWS // 2] = LENGTH
    mask = (np.arange(LENGTH) < lengths).astype(np.int32)
    return peft_trainer.TrainingInput(
        input_tokens=rng.integers(1, VOCABULARY, (ROWS, LENGTH)).astype(np.int32) * mask,
        input_mask=mask,
    )


def model_input(inputs):
    return {
        "input_tokens": inputs.input_tokens,
        "input_mask": inputs.input_mask,
        "positions": utils.build_positions_from_mask(inputs.input_mask),
        "attention_mask": utils.make_causal_attn_mask(inputs.input_mask),
    }


def training_config(kind=peft_trainer.TrainingConfig):
    return kind(
        eval_every_n_steps=1000,
        max_steps=STEPS,
        data_sharding_axis=(("data", "fsdp"),),
        metrics_logging_options=None,
    )


def trainer_of(mesh):
    model = placed_model(mesh)
    trainer = peft_trainer.PeftTrainer(model, optax.adamw(1e-3), training_config())
    return trainer.with_gen_model_input_fn(model_input)


def compress(trainer, mesh):
    """The change to a user's script."""
    return trainer.with_loss_fn(
        dq.data_parallel(
            trainer.loss_fn,
            mesh=mesh,
            axis_name="data",
            specs=nnx.get_partition_spec,
            num_targets=lambda model, tokens, mask, *_: mask[:, 1:].sum(),
        )
    )


@pytest.mark.filterwarnings("ignore")
def test_training_goes_on_as_before_with_a_sixth_of_the_bytes():
    mesh, losses, sent = tunix_mesh(), {}, {}
    for name, change in {"exact": lambda trainer, mesh: trainer, "compressed": compress}.items():
        with mesh, jax.numpy_dtype_promotion("standard"):
            trainer = change(trainer_of(mesh), mesh)
            inputs = sharding_utils.shard_input(batch(), trainer.config.data_sharding_axis)
            step = nnx.jit(trainer.create_train_step_fn())
            compiled = step.lower(trainer.model, trainer.optimizer, inputs).compile()
            sent[name] = sent_by_axes(compiled.as_text(), mesh)
            first = float(trainer.loss_fn(trainer.model, **model_input(inputs)))
            trainer.train([inputs] * STEPS)
            losses[name] = float(trainer.loss_fn(trainer.model, **model_input(inputs)))
    assert losses["exact"] < 0.7 * first
    assert abs(losses["compressed"] - losses["exact"]) < 0.01
    assert sent["exact"][("data",)] >= 6 * sent["compressed"][("data",)]
    assert sent["compressed"][("fsdp",)] <= 1.05 * sent["exact"][("fsdp",)]
    print(f"loss {losses}, bytes {sent}")


@pytest.mark.filterwarnings("ignore")
def test_the_mean_is_that_of_all_targets():
    """Rows are of several lengths, so workers have different numbers of targets."""
    mesh = tunix_mesh()
    with mesh, jax.numpy_dtype_promotion("standard"):
        trainer = trainer_of(mesh)
        exact = float(trainer.loss_fn(trainer.model, **model_input(batch())))
        compress(trainer, mesh)
        np.testing.assert_allclose(
            trainer.loss_fn(trainer.model, **model_input(batch())), exact, rtol=1e-6
        )


def pairs():
    """Pairs of answers of several lengths to the same prompts."""
    rng = np.random.default_rng(0)

    def tokens(length):
        return rng.integers(1, VOCABULARY, (ROWS, length)).astype(np.int32)

    def mask():
        return (np.arange(ANSWER) < rng.integers(4, ANSWER + 1, (ROWS, 1))).astype(np.int32)

    return dpo.TrainingInput(
        prompt_ids=tokens(8),
        prompt_mask=np.ones((ROWS, 8), np.int32),
        chosen_ids=tokens(ANSWER),
        chosen_mask=mask(),
        rejected_ids=tokens(ANSWER),
        rejected_mask=mask(),
    )


def compressed_dpo(mesh):
    """The change to a user's script."""
    blocks = dpo.TrainExample(*["blocks:2"] * 3, None, None, "blocks:2", logits_to_keep=ANSWER)
    return dq.data_parallel(
        dpo.dpo_loss_fn,
        mesh=mesh,
        axis_name="data",
        specs=nnx.get_partition_spec,
        has_aux=True,
        aux="mean",
        in_specs={"train_example": P("data")},
        split={"train_example": blocks},
        static_argnames="algorithm",
    )


@pytest.mark.filterwarnings("ignore")
def test_pairs_stay_together():
    """The chosen rows of a DPO batch are stacked above the rejected ones."""
    mesh, first, last = tunix_mesh(), {}, {}
    options = {"algorithm": "dpo", "beta": 0.1, "label_smoothing": 0.0}
    for name in ("exact", "compressed"):
        with mesh, jax.numpy_dtype_promotion("standard"):
            config = training_config(dpo.DPOTrainingConfig)
            models = placed_model(mesh), placed_model(mesh)
            trainer = dpo.DPOTrainer(*models, optax.adamw(1e-3), config)
            inputs = sharding_utils.shard_input(pairs(), config.data_sharding_axis)
            example = trainer._prepare_inputs(inputs)
            if name == "compressed":
                loss_fn = compressed_dpo(mesh)
                dq.check_data_parallel(loss_fn, trainer.model, example, tolerance=0.03, **options)
                trainer = trainer.with_loss_fn(loss_fn, has_aux=True)
            first[name] = float(trainer.loss_fn(trainer.model, example, **options)[0])
            trainer.train([pairs()] * STEPS)
            last[name] = float(trainer.loss_fn(trainer.model, example, **options)[0])
    assert abs(first["compressed"] - np.log(2)) < 1e-5
    assert last["exact"] < 0.1 * first["exact"]
    np.testing.assert_allclose(last["compressed"], last["exact"], rtol=0.01)
    print(f"DPO: first loss {first}, last {last}")


def answers(model):
    """Groups of answers to the same prompts, with made-up rewards, of the model itself."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, VOCABULARY, (ROWS // GROUP, 8)).astype(np.int32).repeat(GROUP, axis=0)
    completions = rng.integers(1, VOCABULARY, (ROWS, ANSWER)).astype(np.int32)
    mask = (np.arange(ANSWER) < rng.integers(4, ANSWER + 1, (ROWS, 1))).astype(np.int32)
    advantages = algo_core.compute_advantages(rng.normal(size=ROWS), GROUP).astype(np.float32)
    tokens = jnp.asarray(prompts), jnp.asarray(completions)
    own = rl.compute_per_token_logps(*nnx.split(model), *tokens, pad_id=0, eos_id=1)
    return rl.TrainExample(prompts, np.ones_like(prompts), completions, mask, advantages, own, own)


@pytest.mark.filterwarnings("ignore")
def test_grpo_learns_the_same_from_groups_of_answers():
    """Its loss and its trainer; the lines are those of the recipe."""
    mesh, last = tunix_mesh(), {}
    config = GRPOConfig(num_generations=GROUP)
    config.temperature = 1.0

    def loss_fn(model, train_example, algo_config):
        return algo_core.grpo_loss_fn(model, train_example, config, pad_id=0, eos_id=1)

    for name in ("exact", "compressed"):
        with mesh, jax.numpy_dtype_promotion("standard"):
            training = training_config()
            model = placed_model(mesh)
            trainer = rl_trainer.Trainer(model, optax.adamw(1e-3), training, dict)
            trainer.with_loss_fn(loss_fn, has_aux=True)
            trainer.with_gen_model_input_fn(
                lambda example: {"train_example": example, "algo_config": config}
            )
            example = sharding_utils.shard_input(answers(model), training.data_sharding_axis)
            if name == "compressed":
                cluster = types.SimpleNamespace(actor_trainer=trainer)
                learner = types.SimpleNamespace(rl_cluster=cluster, algo_config=config)
                names = {"dq": dq, "nnx": nnx, "mesh": mesh, "learner": learner}
                run_lines("tunix.md", "GRPO", names)
                dq.check_data_parallel(names["compressed_loss_fn"], model, example, tolerance=0.03)
            first = float(trainer.loss_fn(model, example, algo_config=config)[0])
            assert abs(first) < 1e-6  # the advantages of a group sum to zero
            trainer.train([example] * STEPS)
            last[name] = float(trainer.loss_fn(model, example, algo_config=config)[0])
    assert last["exact"] < -0.1
    np.testing.assert_allclose(last["compressed"], last["exact"], rtol=0.01)
    print(f"GRPO: last loss {last}")
