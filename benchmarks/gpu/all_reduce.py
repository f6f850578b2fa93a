"""Section `all_reduce`: the error of a whole all-reduce among workers simulated on one device."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from dynamiq_jax.collectives import psum
from jax import Array

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.gradients import host, key_of, make_gradient, vnmse
from benchmarks.gpu.operations import IMPLEMENTATIONS, order_of
from benchmarks.gpu.record import Results
from dynamiq_jax.methods import DynamiQ
from pallas_kernels.codec.norms import l2_norm
from pallas_kernels.operations import compress, decompress, hop, statistics


def simulate(bench: Bench, results: Results) -> None:
    """Both backends; their errors have to agree, and all replicas have to be equal."""
    options = bench.options
    workers, size, dtype = options.workers, options.worker_size, options.dtypes[0]
    gradients = jnp.stack(
        [make_gradient(key_of(8), key_of(9, w), size=size, dtype=dtype) for w in range(workers)]
    )
    total = np.sum(host(gradients), axis=0)
    errors: dict[str, float] = {}
    for name in IMPLEMENTATIONS:
        method = options.method(options.bits[0], name)
        key, how = ("all_reduce", name), "vmap"
        try:
            executable = _compile_vmap(method, gradients)
            reduced = jax.block_until_ready(executable(gradients))
            bench.executables[key] = executable
        except Exception as error:
            # Whether a kernel can be mapped is the backend's affair, not this benchmark's.
            results[f"no vmap of {name}"] = f"{type(error).__name__}: {str(error)[:500]}"
            how = "by hand"
            reduced = _ring_by_hand(method, gradients)[None]
        errors[name] = vnmse(reduced[0], total)
        same = bool(jnp.all(reduced == reduced[:1]))
        results[name] = {"how": how, "vnmse": errors[name], "replicas_are_equal": same}
        results[name] |= bench.measure(key, [[gradients]]) or {}
        print(f"{workers} workers, {size} coordinates, {name}: {results[name]}", flush=True)
        if not same:
            raise AssertionError(f"{name}: replicas differ")
    apart = abs(errors["triton"] / errors["xla"] - 1)
    results["vnmse_apart"] = apart
    if not apart <= 0.01:
        raise AssertionError(f"vNMSE of triton and xla are {apart:.3g} apart")


def _compile_vmap(method: DynamiQ, gradients: Array) -> Callable[[Array], Array]:
    """What a user runs, mapped over workers: float [workers, size]."""

    def reduce(gradient: Array) -> Array:
        key = jax.random.key(11)
        return psum(gradient, "data", key=key, method=method, exact_below=1)

    return jax.jit(jax.vmap(reduce, axis_name="data")).lower(gradients).compile()


def _ring_by_hand(method: DynamiQ, gradients: Array) -> Array:
    """The ring, one call after the other: float [size]."""
    workers, size = gradients.shape
    name, layout = method.implementation, method.layout(size, workers)
    compress_one = jax.jit(functools.partial(compress, layout=layout, implementation=name))
    hop_one = jax.jit(functools.partial(hop, layout=layout, implementation=name))
    rows = [layout.as_rows(gradient) for gradient in gradients]
    norms = jnp.stack([statistics(r, implementation=name)[0] for r in rows])
    order = order_of(l2_norm(norms, axis=0), layout=layout)
    seed = jnp.array([3, 4], jnp.uint32)
    final = []
    for chunk in range(workers):
        index = jnp.int32(chunk)
        payload = compress_one(rows[(chunk + 1) % workers], order, index, jnp.int32(0), seed)
        for number in range(1, workers):
            local = rows[(chunk + 1 + number) % workers]
            payload = hop_one(payload[None], local, order, index, jnp.int32(number), seed)
        final.append(payload)
    return layout.as_flat(
        decompress(jnp.stack(final), order, layout=layout, implementation=name)
    ).astype(gradients.dtype)
