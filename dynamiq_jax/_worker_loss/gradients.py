"""Program of a loss averaged over workers, with its gradients averaged compressed."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from dynamiq_jax._buckets import order
from dynamiq_jax._inputs.options import Options, resolve
from dynamiq_jax._inputs.shards import automatic
from dynamiq_jax._worker_loss.loss_call import LossCall
from dynamiq_jax._worker_loss.loss_plan import LossPlan, inexact_leaves
from dynamiq_jax._worker_loss.roles import DIFFERENTIATED, SPLIT, unwrap_single

P = PartitionSpec


def value_and_gradients(call: LossCall, key: Array) -> tuple[Any, Any, dict[str, Array]]:
    """Compute the value, gradients like the differentiated arguments, and metrics."""
    value, floating, rests, metrics, token = call.run(_program, key, order.last_token())
    order.remember(token)
    call.update_modules(rests)
    gradients = call.plan.work.roles.in_user_order(_like(call.trees, floating))
    return value, gradients, metrics


def exact_value_and_leaves(call: LossCall) -> tuple[Any, list[Array]]:
    """Compute the value, and gradients of differentiated leaves, averaged exactly.

    Modules among the arguments are left as they are.
    """
    work = dataclasses.replace(call.plan.work, compression=resolve("exact", "ring", Options()))
    exact = call._replace(plan=dataclasses.replace(call.plan, work=work))
    value, floating, *_ = exact.run(_program, jax.random.key(0), None)
    return value, floating


def _program(
    plan: LossPlan, arrays: dict[str, list[Any]], key: Array, token: Array | None
) -> tuple[Any, list[Array], list[Any], dict[str, Array], Array | None]:
    """Compute the value, gradients of differentiated leaves, the rest of modules, metrics, and a
    token of what was sent, which begins after a given one.
    """

    def local(
        arrays: Mapping[str, list[Any]],
    ) -> tuple[tuple[list[Array], list[Array]], tuple[Any, list[Any]]]:
        def loss_of(differentiated: list[Array]) -> tuple[Array, tuple[Any, list[Any]]]:
            return plan.loss(arrays, differentiated)

        plan.check_gradients(arrays)
        (loss, (aux, rests)), grads = jax.value_and_grad(loss_of, has_aux=True)(
            arrays[DIFFERENTIATED]
        )
        rows, value = plan.value(loss, aux)
        return (grads, rows), (value, rests)

    def run(
        arrays: dict[str, list[Any]], key: Array, token: Array | None
    ) -> tuple[Any, list[Array], list[Any], dict[str, Array], Array | None]:
        trees = plan.signature.differentiated(arrays)
        replicas = plan.replicas(trees)
        stacked = inexact_leaves(replicas.stack(unwrap_single(trees)))
        (own, rows), (value, rests) = plan.over_workers(local, {**arrays, DIFFERENTIATED: stacked})
        order.remember(order.token_of([token, *jax.tree.leaves((value, rests))]))
        each = unwrap_single(_like(trees, own, leading=(replicas.count,)))
        grads, metrics = replicas.all_reduce(each, key, mean=True)
        means = [leaf for leaf in jax.tree.leaves(grads) if leaf.dtype != jax.dtypes.float0]
        value = plan.with_rows(value, rows, arrays[SPLIT])
        return value, means, rests, metrics, order.last_token()

    placed = [jax.typeof(leaf).sharding.spec for leaf in arrays[DIFFERENTIATED]]
    out_sharding = (plan.work.value_spec, placed, P(), P(), P())
    return automatic(run, out_sharding=out_sharding)(arrays, key, token)


def _like(
    trees: tuple[Any, ...], floating: Sequence[Array], leading: tuple[int, ...] = ()
) -> tuple[Any, ...]:
    """Put gradients of floating leaves into trees; others are float0, with leading axes."""
    left = iter(floating)

    def gradient(leaf: Any) -> Any:
        is_floating = jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        shape = (*leading, *np.shape(leaf))
        return next(left) if is_floating else np.zeros(shape, jax.dtypes.float0)

    return jax.tree.map(gradient, trees)
