"""tunix trains a Llama through a compressed mean, without a change to its training loop.

Its own environment: `make test-tunix`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tunix.models.llama3 import model as llama3
from tunix.rl import algo_core, rl_cluster
from tunix.rl import common as rl
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft import peft_trainer, sharding_utils, utils
from tunix.sft.dpo import dpo_trainer as dpo

import dynamiq_jax as dq
from benchmarks.speed.mesh_bytes import sent_by_axes
from tests.trainers.recipe import run_lines

STEPS, ROWS, LENGTH, VOCABULARY = 20, 16, 32, 512
ANSWER = 16
GROUP, PROMPTS = 4, 8
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


@pytest.fixture(autouse=True)
def promotion_of_users():
    """That of all threads: the learner has threads of its own."""
    before = jax.config.jax_numpy_dtype_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", before)


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


def training_config(kind=peft_trainer.TrainingConfig, **options):
    return kind(
        eval_every_n_steps=1000,
        max_steps=STEPS,
        data_sharding_axis=(("data", "fsdp"),),
        metrics_logging_options=None,
        **options,
    )


def trainer_of(model):
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
        with mesh:
            trainer = change(trainer_of(placed_model(mesh)), mesh)
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
    with mesh:
        trainer = trainer_of(placed_model(mesh))
        exact = float(trainer.loss_fn(trainer.model, **model_input(batch())))
        compress(trainer, mesh)
        np.testing.assert_allclose(
            trainer.loss_fn(trainer.model, **model_input(batch())), exact, rtol=1e-6
        )


def with_adapters(mesh):
    """The model with LoRA of its attention, whose adapters alone are trained."""
    model = placed_model(mesh)
    adapters = qwix.LoraProvider(module_path=".*[qkvo]_proj", rank=64, alpha=64.0)
    inputs = model_input(batch())
    tokens, positions = inputs["input_tokens"], inputs["positions"]
    return qwix.apply_lora_to_model(
        model, adapters, tokens, positions, None, inputs["attention_mask"]
    )


@pytest.mark.filterwarnings("ignore")
def test_adapters_alone_are_sent():
    mesh, losses, sent = tunix_mesh(), {}, {"data": {}, "fsdp": {}}
    for name, change in {"exact": lambda trainer, mesh: trainer, "compressed": compress}.items():
        with mesh:
            trainer = change(trainer_of(with_adapters(mesh)), mesh)
            inputs = sharding_utils.shard_input(batch(), trainer.config.data_sharding_axis)
            step = nnx.jit(trainer.create_train_step_fn())
            compiled = step.lower(trainer.model, trainer.optimizer, inputs).compile()
            by_axes = sent_by_axes(compiled.as_text(), mesh)
            for axis, sizes in sent.items():
                sizes[name] = sum(size for axes, size in by_axes.items() if axis in axes)
            first = float(trainer.loss_fn(trainer.model, **model_input(inputs)))
            if name == "compressed":
                dq.check_data_parallel(trainer.loss_fn, trainer.model, **model_input(inputs))
            trainer.train([inputs] * STEPS)
            losses[name] = float(trainer.loss_fn(trainer.model, **model_input(inputs)))
    print(f"LoRA: first loss {first}, last {losses}, bytes {sent}")
    assert losses["exact"] < 0.98 * first
    np.testing.assert_allclose(losses["compressed"], losses["exact"], rtol=0.01)
    assert sent["data"]["exact"] >= 5 * sent["data"]["compressed"] > 0
    assert sent["fsdp"]["compressed"] <= 1.05 * sent["fsdp"]["exact"]


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
        with mesh:
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


class Numbers:
    """The words are numbers, whose tokens come after those of padding, end and start."""

    def encode(self, text, **_):
        return [3 + int(word) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(str(int(token) - 3) for token in ids)

    def pad_id(self):
        return 0

    def eos_id(self):
        return 1

    def bos_id(self):
        return 2


def share_of_even_numbers(prompts, completions, **_):
    return [np.mean([int(word) % 2 == 0 for word in text.split()] or [0]) for text in completions]


def grpo_learner(mesh, rewards, learning_rate):
    """The learner with its own rollouts, whose mean rewards it appends to `rewards`."""

    def reward(prompts, completions, **options):
        own = share_of_even_numbers(prompts, completions)
        rewards.append(float(np.mean(own)))
        return own

    training = training_config(
        rl_cluster.RLTrainingConfig,
        actor_optimizer=optax.adamw(learning_rate),
        mini_batch_size=PROMPTS,
        train_micro_batch_size=PROMPTS,
    )
    rollout = RolloutConfig(
        max_tokens_to_generate=ANSWER, max_prompt_length=8, kv_cache_size=64, temperature=1.0
    )
    roles = rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT
    cluster = rl_cluster.RLCluster(
        actor=placed_model(mesh),
        reference=placed_model(mesh),
        tokenizer=Numbers(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            training_config=training,
            rollout_config=rollout,
        ),
    )
    return GRPOLearner(cluster, GRPOConfig(num_generations=GROUP), reward)


@pytest.mark.filterwarnings("ignore")
def test_grpo_learns_from_its_own_answers():
    mesh, rewards = tunix_mesh(), {"exact": [], "compressed": []}
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, VOCABULARY - 3, (STEPS, PROMPTS, 6))
    prompts = [{"prompts": np.array([" ".join(map(str, row)) for row in rows])} for rows in numbers]
    for name, own in rewards.items():
        with mesh:
            learner = grpo_learner(mesh, own, 1e-2)
            if name == "compressed":
                names = {"dq": dq, "nnx": nnx, "mesh": mesh, "learner": learner}
                run_lines("tunix.md", "GRPO", names)
            learner.train(prompts)
    print(f"GRPO: mean rewards {rewards}")
    assert rewards["exact"] != rewards["compressed"]
    for own in rewards.values():
        assert len(own) == STEPS
        assert own[0] < 0.6
        assert np.mean(own[-3:]) > 0.9


@pytest.mark.filterwarnings("ignore")
def test_grpo_has_the_same_loss_on_the_same_answers():
    """Rollouts of two runs part; this is one batch."""
    mesh, last = tunix_mesh(), {}
    for name in ("exact", "compressed"):
        with mesh:
            learner = grpo_learner(mesh, [], 1e-3)
            trainer, config = learner.rl_cluster.actor_trainer, learner.algo_config
            example = sharding_utils.shard_input(
                answers(trainer.model), trainer.config.data_sharding_axis
            )
            if name == "compressed":
                names = {"dq": dq, "nnx": nnx, "mesh": mesh, "learner": learner}
                run_lines("tunix.md", "GRPO", names)
                check = names["compressed_loss_fn"], trainer.model, example
                dq.check_data_parallel(*check, tolerance=0.03)
            first = float(trainer.loss_fn(trainer.model, example, algo_config=config)[0])
            assert abs(first) < 1e-6  # the advantages of a group sum to zero
            trainer.train([example] * STEPS)
            last[name] = float(trainer.loss_fn(trainer.model, example, algo_config=config)[0])
    assert last["exact"] < -0.1
    np.testing.assert_allclose(last["compressed"], last["exact"], rtol=0.01)
    print(f"GRPO: last loss {last}")
