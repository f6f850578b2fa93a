"""Program of a loss averaged over workers, whose gradients are averaged compressed."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from dynamiq_jax._buckets import order
from dynamiq_jax._inputs.shards import automatic
from dynamiq_jax._worker_loss.fingerprint import salt_of_call, word_of
from dynamiq_jax._worker_loss.loss_call import LossCall
from dynamiq_jax._worker_loss.loss_plan import LossPlan, inexact_leaves
from dynamiq_jax._worker_loss.roles import DIFFERENTIATED, SPLIT, WHOLE, unwrap_single
from pallas_kernels.codec.rounding import mix

P = PartitionSpec


def mean_loss(call: LossCall) -> Any:
    """Compute the mean of the workers' losses, and aux with `has_aux`."""
    salt = jnp.uint32(salt_of_call(call.plan.called))
    ticket = order.enter(call.arrays[DIFFERENTIATED])
    loss, ticket, aux, rests = call.run(_program, salt, ticket)
    loss = order.leave(loss, ticket)
    call.update_modules(rests)
    return (loss, *aux) if call.plan.work.has_aux else loss


def _program(
    plan: LossPlan, arrays: dict[str, list[Any]], salt: Array, ticket: Array
) -> tuple[Array, Array, tuple[Any, ...], list[Any]]:
    """Compute the loss, a ticket for what is sent, aux if there is any, and the rest of modules."""

    def word(arrays: Mapping[str, list[Any]]) -> tuple[tuple[()], Array]:
        return (), word_of(arrays[SPLIT], plan.work.names) ^ word_of(arrays[WHOLE], ())

    def local(arrays: Mapping[str, list[Any]]) -> tuple[list[Array], tuple[Any, list[Any]]]:
        plan.check_gradients(arrays)
        loss, (aux, rests) = plan.loss(arrays, arrays[DIFFERENTIATED])
        rows, value = plan.value(loss, aux)
        return rows, (value, rests)

    def run(
        arrays: dict[str, list[Any]], salt: Array, ticket: Array
    ) -> tuple[Array, Array, tuple[Any, ...], list[Any]]:
        trees = plan.signature.differentiated(arrays)
        _, of_arrays = plan.over_workers(word, {**arrays, DIFFERENTIATED: []})
        stacked, passed = plan.replicas(trees).broadcast(
            unwrap_single(trees), None, mix(of_arrays) ^ salt, ticket, mean=False
        )
        assert passed is not None
        own = {**arrays, DIFFERENTIATED: inexact_leaves(stacked)}
        rows, (value, rests) = plan.over_workers(local, own)
        value = plan.with_rows(value, rows, arrays[SPLIT])
        loss, *aux = value if plan.work.has_aux else (value,)
        return loss, order.stamp(passed, [loss]), tuple(aux), rests

    out_sharding = (P(), P(), plan.work.aux_spec, P())
    return automatic(run, out_sharding=out_sharding)(arrays, salt, ticket)
