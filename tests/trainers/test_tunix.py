"""Learners of tunix train by the lines of the recipe. Its own environment: `make test-tunix`."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tunix.rl import algo_core, rl_cluster
from tunix.rl import common as rl
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft import sharding_utils

import dynamiq_jax as dq
from benchmarks.trainers.tunix_steps import (
    ANSWER,
    ROWS,
    STEPS,
    VOCABULARY,
    llama,
    training_config,
    workers,
)
from tests.trainers.recipe import run_lines

GROUP, PROMPTS = 4, 8


@pytest.fixture(autouse=True)
def promotion_of_users():
    """That of all threads: the learner has threads of its own."""
    before = jax.config.jax_numpy_dtype_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", before)


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
        actor=llama(mesh),
        reference=llama(mesh),
        tokenizer=Numbers(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            training_config=training,
            rollout_config=rollout,
        ),
    )
    return GRPOLearner(cluster, GRPOConfig(num_generations=GROUP), reward)


def run_recipe(mesh, learner, prompts):
    """Wrap the step of a learner by the lines of the page, and let it learn."""
    names = {"dq": dq, "functools": functools, "mesh": mesh}
    run_lines(
        "tunix.md", "Reinforcement learning", names | {"learner": learner, "prompts": prompts}
    )


@pytest.mark.filterwarnings("ignore")
def test_grpo_learns_from_its_own_answers():
    mesh, rewards = workers(), {"exact": [], "compressed": []}
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, VOCABULARY - 3, (STEPS, PROMPTS, 6))
    prompts = [{"prompts": np.array([" ".join(map(str, row)) for row in rows])} for rows in numbers]
    for name, own in rewards.items():
        with mesh:
            learner = grpo_learner(mesh, own, 1e-2)
            if name == "compressed":
                run_recipe(mesh, learner, prompts)
            else:
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
    mesh, last = workers(), {}
    for name in ("exact", "compressed"):
        with mesh:
            learner = grpo_learner(mesh, [], 1e-3)
            trainer, config = learner.rl_cluster.actor_trainer, learner.algo_config
            example = sharding_utils.shard_input(
                answers(trainer.model), trainer.config.data_sharding_axis
            )
            if name == "compressed":
                cluster = SimpleNamespace(actor_trainer=trainer)
                steps = SimpleNamespace(rl_cluster=cluster, train=lambda *_, **__: None)
                run_recipe(mesh, steps, [])
            first = float(trainer.loss_fn(trainer.model, example, algo_config=config)[0])
            assert abs(first) < 1e-6  # the advantages of a group sum to zero
            trainer.train([example] * STEPS, skip_jit=name == "compressed")
            last[name] = float(trainer.loss_fn(trainer.model, example, algo_config=config)[0])
    print(f"GRPO: last loss {last}")
    assert last["exact"] < -0.1
    np.testing.assert_allclose(last["compressed"], last["exact"], rtol=0.01)
    assert last["compressed"] != last["exact"]
