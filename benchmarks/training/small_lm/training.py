"""Training of the small language model: data-parallel, and by local SGD."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from benchmarks.training.small_lm.corpora import Corpora
from benchmarks.training.small_lm.model import ModelConfig, Transformer
from benchmarks.training.small_lm.pretraining import Params, loss_of, pretrain
from dynamiq_jax._measurement.settings import Setting
from dynamiq_jax.training import LocalSGD

State = Any  # of the all-reduce and the optimizer


def new_model(config: ModelConfig, seed: int = 0) -> tuple[nnx.GraphDef, Params]:
    """Initialize a transformer; return its structure and its parameters (float32)."""
    return nnx.split(Transformer(config, nnx.Rngs(seed)), nnx.Param)


def pretrained(corpora: Corpora, *, steps: int, **fields: Any) -> tuple[nnx.GraphDef, Params]:
    """Make a model, and train it on source code.

    Args:
      corpora: the texts.
      steps: number of updates.
      **fields: fields of `ModelConfig`, besides the vocabulary.

    Returns:
      The structure of the model and its parameters (float32).
    """
    structure, params = new_model(ModelConfig(corpora.vocabulary, **fields))
    return structure, pretrain(structure, params, corpora.source_code, steps=steps)


def abstract_model(config: ModelConfig) -> tuple[nnx.GraphDef, Params]:
    """Return the structure of a transformer, and the shapes of its parameters."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))), nnx.Param)


@dataclasses.dataclass(frozen=True)
class CompiledTraining:
    """Training on a mesh, compiled."""

    init: Callable[[Params], State]
    # (params, state, tokens, key) to (params, state, loss). The batch of all workers is int32
    # [workers * batch, context + 1]. The typed PRNG key is a new one in every step. Parameters and
    # state are donated.
    step: Callable[[Params, State, jax.Array, jax.Array], tuple[Params, State, jax.Array]]


def data_parallel(
    structure: nnx.GraphDef, optimizer: optax.GradientTransformation, mesh: Mesh, setting: Setting
) -> CompiledTraining:
    """Build the training that a mesh runs.

    Args:
      structure: structure of the model.
      optimizer: optimizer that takes the mean gradient.
      mesh: mesh with one axis, "data".
      setting: how to average gradients.
    """
    loss_fn = loss_of(structure)
    choice = dq.Compression(setting.method or "exact", setting.topology)
    keeps_state = setting.method is not None and setting.method.is_stateful
    reduce = dq.all_reduce_gradients("data", choice) if keeps_state else None

    def init(params):
        compression = reduce.init(params) if reduce else ()
        return compression, optimizer.init(params)

    def step(params, state, tokens, key):
        compression, opt_state = state
        # The type of the parameters says that all workers hold the same: their gradients would
        # already be summed over the workers, exactly. Marked as varying, they yield the gradient of
        # this worker's own batch, which can be compressed.
        own = jax.lax.pcast(params, "data", to="varying")
        loss, grads = jax.value_and_grad(loss_fn)(own, tokens)
        if setting.method is None:
            grads = jax.lax.pmean(grads, "data")
        elif reduce:
            grads, compression = reduce.update(grads, compression)
        else:
            grads = dq.pmean(grads, "data", choice, key=key)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, (compression, opt_state), jax.lax.pmean(loss, "data")

    kept = dq.AllReduceState(step=P(), method=P("data"), metrics=P()) if reduce else ()
    specs = (kept, P())
    first = jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=specs)
    each = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs, P("data"), P()), out_specs=(P(), specs, P())
    )
    return CompiledTraining(jax.jit(first), jax.jit(each, donate_argnums=(0, 1)))


def local_sgd(
    structure: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    setting: Setting,
    every: int,
) -> CompiledTraining:
    """Build a training by local SGD, whose parameters are the reference of all workers.

    Args:
      structure: structure of the model.
      optimizer: optimizer of each worker.
      mesh: mesh with one axis, "data".
      setting: how to average changes of the parameters.
      every: local steps between two averages.
    """
    assert setting.method is not None and setting.topology is not None
    outer = LocalSGD(
        axis_name="data", every=every, method=dq.Compression(setting.method, setting.topology)
    )
    loss_fn = loss_of(structure)

    def init(params):
        own = jax.lax.pcast((params, optimizer.init(params)), "data", to="varying")
        state = outer.init(params)._replace(reference=())  # the parameters of the training
        return jax.tree.map(lambda leaf: leaf[None], own), state

    def step(reference, state, tokens, key):
        del key  # that of the outer step is of its number
        params, opt_state = jax.tree.map(lambda leaf: leaf[0], state[0])
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        params, kept = outer.update(params, state[1]._replace(reference=reference))
        workers = jax.tree.map(lambda leaf: leaf[None], (params, opt_state))
        # A mean of the loss in every step would be traffic.
        return kept.reference, (workers, kept._replace(reference=())), loss[None]

    specs = (P("data"), outer.state_specs._replace(reference=()))
    first = jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=specs)
    each = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs, P("data"), P()), out_specs=(P(), specs, P("data"))
    )
    return CompiledTraining(jax.jit(first), jax.jit(each, donate_argnums=(0, 1)))
