"""Tensors of many kinds to measure the error of an all-reduce on, float32 [workers, size] each:
gradients, weights and their changes in two trained models, noise, and a sparse embedding gradient;
or gradients of a real language model, of all tensors and by kind.

recipe = Recipe()
folder = make(recipe, Path("tensors"), names_of(recipe))
for name in names_of(recipe):
    values = load(folder, name, workers=8)

Training takes minutes, so tensors are made once and kept in files. The same machine and software
make the same ones again. The first workers of a tensor do not depend on their number.
"""

import dataclasses
import hashlib
import platform
from collections.abc import Callable, Container, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from numpy.typing import NDArray

from benchmarks.real_lm.gradients import kind_of, worker_gradients
from benchmarks.training.small_lm.corpora import Corpora, load_corpora, random_windows
from benchmarks.training.small_lm.gradients import gradient_snapshots
from benchmarks.training.small_lm.model import ModelConfig
from benchmarks.training.small_lm.pretraining import Params, loss_of, pretrain
from benchmarks.training.small_lm.training import new_model
from dynamiq_jax._measurement.gradient_files import LARGE
from examples.tools.small_decoder import new_decoder, small_config

ROW = 256  # coordinates that are taken or left together, as the rows of most weights are as long
_BATCH, _CONTEXT = 2, 128  # windows of a worker and step, tokens of a window
_LOCAL_RATE = 1e-3  # learning rate of local steps
_SEED = 0
_PARTS = ("gradient", "embedding", "attention", "mlp")  # of a real model; the first is all of it

Tensor = NDArray[np.float32]  # [workers, size]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that tensors depend on."""

    workers: int = 64
    size: int = 2**19  # coordinates, a multiple of 256
    steps: tuple[int, ...] = (20, 100, 200)  # training steps whose gradients are taken
    pretrain_steps: int = 240  # steps of pre-training before
    local_steps: int = 20  # steps that a worker takes alone before its weights are taken
    model: Path | None = None  # folder of a real language model, whose gradients are all there is

    def __post_init__(self):
        if self.size < ROW or self.size % ROW:
            raise ValueError(f"size={self.size!r} is not possible. Give a multiple of {ROW}.")
        trained = (self.steps, self.pretrain_steps, self.local_steps)
        defaults = (Recipe.steps, Recipe.pretrain_steps, Recipe.local_steps)
        if self.model and trained != defaults:
            raise ValueError(
                f"model={str(self.model)!r} is not trained. Leave out steps, pretrain_steps and "
                "local_steps."
            )


def names_of(recipe: Recipe) -> list[str]:
    """Return the names of all tensors, in the order of tables."""
    return [name for made, _ in _sources(recipe) for name in made]


def make(
    recipe: Recipe,
    folder: Path,
    chosen: Container[str],
    on_source: Callable[[str], None] = lambda name: None,
) -> Path:
    """Write tensors to files, except those that an earlier call has written.

    Args:
      recipe: how to make them.
      folder: where the tensors of all recipes are kept.
      chosen: names of tensors; those that are made together with them are written too.
      on_source: called with a name before tensors are made.

    Returns:
      The folder of this recipe, for `load`.
    """
    versions = (platform.python_version(), jax.__version__, np.__version__)
    digest = hashlib.sha256(repr((recipe, _weights_of(recipe), versions)).encode()).hexdigest()
    own = folder / digest[:16]
    own.mkdir(parents=True, exist_ok=True)
    for made, source in _sources(recipe):
        if all(name not in chosen or _file(own, name).exists() for name in made):
            continue
        on_source(made[0])
        for name, values in zip(made, source(), strict=True):
            partial = own / "partial.npy"
            np.save(partial, values)
            partial.replace(_file(own, name))  # a file that is there is complete
    return own


def load(folder: Path, name: str, workers: int) -> Tensor:
    """Read the first workers of a tensor from the folder that `make` returned."""
    return np.array(np.load(_file(folder, name), mmap_mode="r")[:workers])


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '-')}.npy"


def _weights_of(recipe: Recipe) -> list[tuple[str, int]]:
    """Tell a real model from another one in the same folder."""
    if recipe.model is None:
        return []
    return sorted((path.name, path.stat().st_mtime_ns) for path in recipe.model.iterdir())


def _sources(recipe: Recipe) -> list[tuple[tuple[str, ...], Callable[[], Iterator[Tensor]]]]:
    """List the names of tensors that are made together, and the function that makes them."""
    if model := recipe.model:
        names = tuple(f"{model.name} {part}" for part in _PARTS)
        return [(names, lambda: _of_real_model(recipe, model))]
    transformer, decoder = (
        tuple(f"{model} gradient {step}" for step in sorted(recipe.steps))
        for model in ("transformer", "decoder")
    )
    return [
        ((*transformer, "local weights", "local changes"), lambda: _of_transformer(recipe)),
        (decoder, lambda: _of_decoder(recipe)),
        (("white noise",), lambda: _drawn(recipe, _white_noise)),
        (("student t noise",), lambda: _drawn(recipe, _student_t_noise)),
        (("sparse embedding",), lambda: _drawn(recipe, _sparse_embedding)),
    ]


# ---------------------------------------------------------------------------------------- trained


def _of_transformer(recipe: Recipe) -> Iterator[Tensor]:
    corpora = load_corpora()
    structure, params = new_model(ModelConfig(corpora.vocabulary), _SEED)
    params = pretrain(structure, params, corpora.source_code, steps=recipe.pretrain_steps)
    yield from _gradients(recipe, corpora, structure, params)
    yield from _local_training(recipe, corpora, structure, params)


def _of_decoder(recipe: Recipe) -> Iterator[Tensor]:
    corpora = load_corpora()
    structure, params = new_decoder(small_config(corpora.vocabulary), _SEED)
    params = pretrain(structure, params, corpora.source_code, steps=recipe.pretrain_steps)
    yield from _gradients(recipe, corpora, structure, params)


def _gradients(
    recipe: Recipe, corpora: Corpora, structure: nnx.GraphDef, params: Params
) -> Iterator[Tensor]:
    """Yield the gradients that workers meet while fine-tuning with the exact mean."""
    snapshots = gradient_snapshots(
        structure,
        params,
        corpora.reference,
        workers=recipe.workers,
        steps=recipe.steps,
        batch=_BATCH,
        context=_CONTEXT,
        seed=_SEED,
    )
    for _, tree in snapshots:
        yield _spread_rows(tree, recipe.size)


def _local_training(
    recipe: Recipe, corpora: Corpora, structure: nnx.GraphDef, params: Params
) -> Iterator[Tensor]:
    """Yield the weights of workers after local steps of AdamW from the same weights, and the
    changes of the weights over these steps, which local SGD sums as outer gradients.
    """
    optimizer = optax.adamw(_LOCAL_RATE, b2=0.95)
    gradient = jax.grad(loss_of(structure))

    def step(state, tokens):
        weights, opt_state = state
        updates, opt_state = optimizer.update(gradient(weights, tokens), opt_state, weights)
        return (optax.apply_updates(weights, updates), opt_state), None

    @jax.jit
    def train(params, batches):
        return jax.lax.scan(step, (params, optimizer.init(params)), batches)[0][0]

    def spread(params):
        return _spread_rows(jax.tree.map(lambda leaf: leaf[None], params), recipe.size)

    weights = np.empty((recipe.workers, recipe.size), np.float32)
    for worker in range(recipe.workers):
        windows = random_windows(
            corpora.reference,
            count=recipe.local_steps * _BATCH,
            context=_CONTEXT,
            seed=_SEED,
            step=worker,
        )
        batches = windows.reshape(recipe.local_steps, _BATCH, _CONTEXT + 1)
        weights[worker] = spread(train(params, jnp.asarray(batches)))
    yield weights
    yield weights - spread(params)


def _of_real_model(recipe: Recipe, folder: Path) -> Iterator[Tensor]:
    """Yield rows of the gradients of workers that fine-tune a real model: of all its tensors, and
    of those of each kind.
    """
    each = worker_gradients(folder, "chats", workers=recipe.workers, batch=2, context=256)
    rows: dict[str, list[Tensor]] = {part: [] for part in _PARTS}
    for gradient in each:
        for part, of_worker in rows.items():
            chosen = {
                name: leaf[None]
                for name, leaf in gradient.items()
                if part in ("gradient", kind_of(name))
            }
            of_worker.append(_spread_rows(chosen, recipe.size))
    yield from (np.concatenate(of_worker) for of_worker in rows.values())


def _spread_rows(tree: Params, size: int) -> Tensor:
    """Take rows of 256 coordinates at equal distances from all large leaves, each of them
    [workers, *shape], so that all parts of a model have their share.
    """
    large = [leaf for leaf in jax.tree.leaves(tree) if leaf[0].size >= LARGE]
    flat = [np.asarray(leaf).reshape(len(leaf), -1) for leaf in large]
    # Without the last coordinates of leaves whose sizes are no multiple.
    rows = [leaf[:, : leaf[0].size // ROW * ROW].reshape(len(leaf), -1, ROW) for leaf in flat]
    ends = np.cumsum([leaf.shape[1] for leaf in rows])
    if size // ROW > ends[-1]:
        raise ValueError(f"size={size!r} is above the {ends[-1] * ROW} coordinates of the model.")
    taken = np.arange(size // ROW) * ends[-1] // (size // ROW)
    parts = []
    for leaf, end in zip(rows, ends, strict=True):
        first = end - leaf.shape[1]
        parts.append(leaf[:, taken[(taken >= first) & (taken < end)] - first])
    return np.concatenate(parts, axis=1).reshape(-1, size)


# ------------------------------------------------------------------------------------------ drawn


def _drawn(recipe: Recipe, draw: Callable[[np.random.Generator, int], NDArray]) -> Iterator[Tensor]:
    """Yield a tensor whose workers are drawn one by one."""
    result = np.empty((recipe.workers, recipe.size), np.float32)
    for worker in range(recipe.workers):
        result[worker] = draw(np.random.default_rng((_SEED, worker)), recipe.size)
    yield result


def _white_noise(random: np.random.Generator, size: int) -> NDArray:
    return random.standard_normal(size)


def _student_t_noise(random: np.random.Generator, size: int) -> NDArray:
    """Draw independent coordinates with heavy tails: Student t with 3 degrees of freedom."""
    return random.standard_t(3, size)


def _sparse_embedding(random: np.random.Generator, size: int) -> NDArray:
    """Draw the gradient of an embedding of which 95 % of the rows are zero for all workers.

    A worker draws 256 tokens among the other 5 % by Zipf's law. The norm of a row is about
    proportional to how often its token was drawn, and most workers draw no rare token.
    """
    num_rows = size // ROW
    tokens = np.random.default_rng(_SEED).permutation(num_rows)[: max(1, num_rows // 20)]
    shares = 1 / np.arange(1, 1 + len(tokens))
    counts = random.multinomial(256, shares / shares.sum())
    result = np.zeros((num_rows, ROW))
    result[tokens] = counts[:, None] * random.standard_normal((len(tokens), ROW))
    return result.reshape(-1)
