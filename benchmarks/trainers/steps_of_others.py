"""Short trainings of packages whose steps use `pmap` or `shard_map`, with a place for a wrap.

Each function trains with one package, as the package is. The only change is `wrap(step, axis_name)`
where the step is made; a wrap that returns `step` leaves the training as it was. Where a package
has no such place, because it calls `jax.pmap` inside of a function, `pmap_wrapped` puts the wrap
around what `jax.pmap` returns.
"""

import contextlib
import functools
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.trainers.training import PackageTraining, Wrap


@contextlib.contextmanager
def pmap_wrapped(wrap: Wrap, function_name: str) -> Iterator[None]:
    """Wrap the result of `jax.pmap` for functions of a name, for steps made inside of a library."""
    pmap = jax.pmap

    def wrapped(fun: Callable[..., Any], axis_name: str | None = None, **options: Any) -> Any:
        mapped = pmap(fun, axis_name, **options)
        is_step = getattr(fun, "__name__", "") == function_name
        return wrap(mapped, str(axis_name)) if is_step else mapped

    with mock.patch.object(jax, "pmap", wrapped):
        yield


@contextlib.contextmanager
def removed_functions() -> Iterator[None]:
    """Give back `device_put_replicated` and `device_put_sharded`, which JAX removed."""

    def sharded(shards: Sequence[Any], devices: Sequence[Any]) -> Any:
        mesh = jax.sharding.Mesh(np.array(devices), "i")
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *shards)
        return jax.device_put(stacked, sharding)

    def replicated(tree: Any, devices: Sequence[Any]) -> Any:
        return sharded([tree] * len(devices), devices)

    with (
        mock.patch.object(jax, "device_put_replicated", replicated, create=True),
        mock.patch.object(jax, "device_put_sharded", sharded, create=True),
    ):
        yield


def brax_ppo(wrap: Wrap) -> list[float]:
    """Train with PPO of brax: Adam, several minibatches in a scan in `pmap`."""
    from brax.training.agents.ppo import networks
    from brax.training.agents.ppo import train as ppo

    network = functools.partial(networks.make_ppo_networks, value_hidden_layer_sizes=(128,) * 3)
    return _brax(
        ppo.train,
        wrap,
        "training/total_loss",
        num_timesteps=20_000,
        num_envs=64,
        unroll_length=5,
        batch_size=64,
        num_minibatches=4,
        num_updates_per_batch=2,
        learning_rate=3e-4,
        run_evals=False,
        network_factory=network,
    )


def _brax(train: Callable[..., Any], wrap: Wrap, metric: str, **options: Any) -> list[float]:
    from brax import envs

    seen: list[dict[str, Any]] = []
    with pmap_wrapped(wrap, "training_epoch"):
        train(
            environment=envs.get_environment("fast"),
            episode_length=128,
            progress_fn=lambda _, metrics: seen.append(dict(metrics)),
            **options,
        )
    return [float(metrics[metric]) for metrics in seen if metric in metrics]


def jumanji_a2c(wrap: Wrap) -> list[float]:
    """Train A2C of jumanji by its script, which calls `agent.run_epoch` in `scan` in `pmap`."""
    sys.modules.setdefault("neptune", mock.MagicMock())  # a logger that is not used
    from jumanji.training import setup_train, train
    from omegaconf import OmegaConf

    configs = Path(setup_train.__file__).with_name("configs")
    env = OmegaConf.to_container(OmegaConf.load(configs / "env" / "rubiks_cube.yaml"))
    env["training"] = {"n_steps": 5, "total_batch_size": 16, "num_epochs": 4}
    env["training"]["num_learner_steps_per_epoch"] = 10
    env["evaluation"] = {"eval_total_batch_size": 2, "greedy_eval_total_batch_size": 2}
    logger = {"type": "terminal", "name": "run", "save_checkpoint": False}
    config = OmegaConf.create({"agent": "a2c", "seed": 0, "env": env, "logger": logger})
    losses = []

    def setup_agent(*args: Any) -> Any:
        agent = setup_train.setup_agent(*args)
        agent.run_epoch = wrap(agent.run_epoch, "devices")
        return agent

    def write(_: Any, data: dict[str, Any], label: str = "", **__: Any) -> None:
        if label == "train":
            losses.append(float(data["total_loss"]))

    first_from_device = train.utils.first_from_device

    def first(metrics: Any) -> Any:
        return {} if isinstance(metrics, mock.MagicMock) else first_from_device(metrics)

    # Its two evaluations before each epoch take most of the time, and have no sum of gradients.
    with (
        mock.patch.object(train, "setup_agent", setup_agent),
        mock.patch.object(train, "setup_evaluators", lambda *_: [mock.MagicMock()] * 2),
        mock.patch.object(train.utils, "first_from_device", first),
        mock.patch.object(train.TerminalLogger, "write", write),
    ):
        train.train.__wrapped__(config)
    return losses


def flaxdiff(wrap: Wrap) -> list[float]:
    """Train by `GeneralDiffusionTrainer` of flaxdiff: a jitted `shard_map` with an EMA."""
    from flax import linen as nn
    from flaxdiff.inputs import DiffusionInputConfig
    from flaxdiff.predictors import KarrasPredictionTransform
    from flaxdiff.schedulers import EDMNoiseScheduler
    from flaxdiff.trainer.general_diffusion_trainer import GeneralDiffusionTrainer

    class Denoiser(nn.Module):  # type: ignore[misc]
        @nn.compact
        def __call__(self, x: Any, temb: Any) -> Any:
            shift = nn.Dense(32)(jnp.stack([jnp.cos(temb), jnp.sin(temb)], 1))
            hidden = nn.swish(nn.Conv(32, (3, 3))(x) + shift[:, None, None])
            hidden = nn.swish(nn.Conv(64, (3, 3))(hidden))
            return nn.Conv(x.shape[-1], (3, 3))(hidden)

    losses = []

    class Trainer(GeneralDiffusionTrainer):  # type: ignore[misc]
        def _define_train_step(self, **options: Any) -> Any:
            step = wrap(super()._define_train_step(**options), "data")

            def recorded(*args: Any) -> Any:
                results = step(*args)
                losses.append(float(results[1]))
                return results

            return recorded

    images = np.random.default_rng(0).uniform(0, 255, size=(16, 8, 8, 3)).astype(np.float32)
    images[:, 2:6, 2:6] /= 8
    data = {"train": lambda: itertools.repeat({"image": images}), "local_batch_size": 16}
    data["train_len"] = 20 * 16
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            Denoiser(),
            optax.adam(1e-3),
            EDMNoiseScheduler(1, sigma_max=80, rho=7, sigma_data=0.5),
            DiffusionInputConfig("image", (8, 8, 3), []),
            jax.random.PRNGKey(0),
            unconditional_prob=0.1,
            model_output_transform=KarrasPredictionTransform(sigma_data=0.5),
            checkpoint_base_path=folder,
        )
        trainer.wandb = None  # which its training loop reads, and its constructor may leave out
        trainer.fit(data, epochs=1, training_steps_per_epoch=20, val_steps_per_epoch=0)
    return losses


def diffusionjax(wrap: Wrap) -> list[float]:
    """Train the score of points on a circle by diffusionjax: a jitted step in `pmap`."""
    _put_loader_in_place_of_torch()
    import ml_collections
    from diffusionjax import run_lib
    from flax import linen as nn

    config = ml_collections.ConfigDict(
        {
            "seed": 2023,
            "training": {
                "sde": "vpsde",
                "batch_size": 64,
                "n_iters": 4,
                "n_jitted_steps": 1,
                "pmap": True,
                "likelihood_weighting": False,
                "score_scaling": True,
                "reduce_mean": True,
                "pointwise_t": False,
                "log_step_freq": 8,
                "log_epoch_freq": 1,
                "snapshot_freq": 10_000,
                "snapshot_freq_for_preemption": 10_000,
                "eval_freq": 10_000,
                "snapshot_sampling": False,
            },
            "model": {"beta_min": 0.1, "beta_max": 20.0},
            "solver": {
                "num_outer_steps": 100,
                "num_inner_steps": 1,
                "outer_solver": "EulerMaruyama",
                "inner_solver": None,
                "dt": None,
                "epsilon": None,
            },
            "optim": {
                "optimizer": "Adam",
                "lr": 1e-3,
                "warmup": False,
                "weight_decay": False,
                "grad_clip": None,
                "beta1": 0.9,
                "eps": 1e-8,
            },
        }
    )

    class MLP(nn.Module):  # type: ignore[misc]
        @nn.compact
        def __call__(self, x: Any, t: Any) -> Any:
            hidden = jnp.concatenate([x, t[:, None] - 0.5, jnp.cos(2 * jnp.pi * t)[:, None]], 1)
            for width in (128, 128):
                hidden = nn.relu(nn.Dense(width)(hidden))
            return nn.Dense(x.shape[-1])(hidden)

    class Circle(list[Any]):
        def get_data_scaler(self, config: Any) -> Any:
            return lambda x: x / 2**0.5

        def get_data_inverse_scaler(self, config: Any) -> Any:
            return lambda x: x * 2**0.5

    angles = np.linspace(0, 2 * np.pi, 512, endpoint=False)
    points = Circle(np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32))
    made = run_lib.get_step_fn

    def get_step_fn(*args: Any, train: bool, pmap: bool) -> Any:
        step = made(*args, train=train, pmap=pmap)
        return wrap(step, "batch") if train else step

    with mock.patch.object(run_lib, "get_step_fn", get_step_fn):
        losses = run_lib.train((2, 2), config, MLP(), points)[-1]
    return [float(loss) for loss in losses[1:, 0]]


def _put_loader_in_place_of_torch() -> None:
    """Make a module with the one class of torch that diffusionjax imports, its `DataLoader`."""

    class DataLoader:
        def __init__(self, rows: Any, batch_size: int, collate_fn: Any, **_: Any):
            self.rows, self.size, self.collate = rows, batch_size, collate_fn

        def __len__(self) -> int:
            return len(self.rows) // self.size

        def __iter__(self) -> Iterator[Any]:
            for first in range(0, len(self) * self.size, self.size):
                yield self.collate(self.rows[first : first + self.size])

    loader = mock.MagicMock(DataLoader=DataLoader)
    for name in ("torch", "torch.utils", "torch.utils.data"):
        sys.modules.setdefault(name, loader)


TRAININGS = {
    package: PackageTraining(
        title=title,
        package=package,
        module=package,
        environment="steps",
        place=place,
        train=removed_functions()(function),
    )
    for function, package, title, place in (
        (brax_ppo, "brax", "brax, PPO", "`jax.pmap` replaced"),
        (jumanji_a2c, "jumanji", "jumanji, A2C", "`agent.run_epoch`"),
        (flaxdiff, "flaxdiff", "flaxdiff", "`_define_train_step` of a subclass"),
        (diffusionjax, "diffusionjax", "diffusionjax", "`run_lib.get_step_fn`"),
    )
}
