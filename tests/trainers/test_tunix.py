"""tunix trains a Llama through a compressed mean, without a change to its training loop.

Its own environment: `make test-tunix`.
"""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tunix.models.llama3 import model as llama3
from tunix.sft import peft_trainer, sharding_utils, utils
from tunix.sft.dpo import dpo_trainer as dpo

import dynamiq_jax as dq
from benchmarks.speed.mesh_bytes import sent_by_axes

STEPS, ROWS, LENGTH, VOCABULARY = 20, 16, 32, 512
ANSWER = 16
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


def trainer_of(mesh):
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=1000,
        max_steps=STEPS,
        data_sharding_axis=(("data", "fsdp"),),
        metrics_logging_options=None,
    )
    trainer = peft_trainer.PeftTrainer(placed_model(mesh), optax.adamw(1e-3), config)
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
            config = dpo.DPOTrainingConfig(
                eval_every_n_steps=1000,
                max_steps=STEPS,
                data_sharding_axis=(("data", "fsdp"),),
                metrics_logging_options=None,
            )
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
