"""Random steps: whatever is found in them, exact sums give the results of the jitted step.

In a global view, layers move the rows of a batch, mix them, and lose them, in any order: a wrong
hint costs bytes, and never a number. Steps of a worker sum by hand, in any place and nested.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.compress.global_forms import normal
from tests.support import speed

ROWS, WIDTH = 16, 8
EXACT = dq.Compression("exact", exact_below=1)
PAIRS = jnp.arange(ROWS) ^ 1  # each row beside its neighbor


@pytest.fixture(autouse=True, scope="module")
def promotions_of_users():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def mixed(h):
    return h / (1e-2 + jnp.sqrt(jnp.mean(h**2, 0, keepdims=True)))


def of_turns(x, w):
    return lax.scan(lambda c, row: (jnp.tanh(0.5 * c + row @ w), c + row), jnp.zeros_like(x[0]), x)


# Functions of rows [16, ..., 8] and a matrix to rows of the same shape.
LAYERS = {
    "dense": lambda x, w: jnp.tanh(x @ w),
    "rows_last": lambda x, w: (w.T @ x.reshape(-1, WIDTH).T).T.reshape(x.shape),
    "split": lambda x, w: jnp.tanh(x.reshape(4, -1, *x.shape[1:]) @ w).reshape(x.shape),
    "split_behind": lambda x, w: jnp.tanh(x.reshape(-1, 2, *x.shape[1:]) @ w).reshape(x.shape),
    "joined": lambda x, w: (x.reshape(-1, WIDTH) @ w).reshape(x.shape),
    "swapped_halves": lambda x, w: jnp.concatenate(jnp.split(x @ w, 2)[::-1]),
    "halves_apart": lambda x, w: jnp.concatenate([x[: ROWS // 2] @ w, x[ROWS // 2 :]]),
    "rolled": lambda x, w: jnp.roll(x @ w, 1, axis=0),
    "flipped": lambda x, w: jnp.flip(x @ w, axis=0),
    "sorted": lambda x, w: jnp.sort(x @ w, axis=0),
    "taken": lambda x, w: (x @ w)[jnp.argsort(x.reshape(ROWS, -1).sum(1))],
    "put": lambda x, w: jnp.zeros_like(x).at[PAIRS].add(x @ w),
    "segments": lambda x, w: x + jax.ops.segment_sum(x @ w, PAIRS % 4, 4)[PAIRS % 4],
    "sums_so_far": lambda x, w: jnp.tanh(jnp.cumsum(x @ w, axis=0)),
    "scanned_sums": lambda x, w: jnp.tanh(lax.associative_scan(jnp.add, x @ w)),
    "statistics": lambda x, w: mixed(x @ w),
    "every_row_meets_every_row": lambda x, w: x @ w @ jnp.einsum("...i,...j->ij", x, x) / x.size,
    "mean_row": lambda x, w: x + x.mean(0) @ w,
    "two_factors": lambda x, w: (x @ w) * (x @ w.T),
    "a_product_of_parameters": lambda x, w: x @ (w @ w.T),
    "turns": lambda x, w: of_turns(x, w)[1],
    "mapped": lambda x, w: lax.map(lambda row: jnp.tanh(row @ w), x),
    "vmapped": lambda x, w: jax.vmap(lambda row: jnp.tanh(row @ w))(x),
    "computed_again": lambda x, w: jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w)(x, w),
    "layers_in_a_scan": lambda x, w: lax.scan(
        lambda c, w: (jnp.tanh(c @ w), None), x, jnp.stack([w, w.T])
    )[0],
    "one_branch": lambda x, w: lax.cond(x.sum() > 0, lambda: x @ w, lambda: jnp.tanh(x @ w)),
    "padded": lambda x, w: jnp.pad(x @ w, [(1, 1)] + [(0, 0)] * (x.ndim - 1))[1:-1],
    "kernel": lambda x, w: lax.conv_general_dilated(
        x.reshape(ROWS, -1, WIDTH),
        jnp.stack([w] * 3),
        (1,),
        "SAME",
        None,
        None,
        ("NWC", "WIO", "NWC"),
    ).reshape(x.shape),
    "updated": lambda x, w: lax.dynamic_update_slice_in_dim(x @ w, x[:4] @ w.T, 2, 0),
    "embedded": lambda x, w: x + w[jnp.abs(8 * x[..., 0]).astype(jnp.int32) % WIDTH],
}
LOSSES = {
    "mean": lambda h, y: jnp.mean(h**2),
    "masked": lambda h, y: jnp.sum(h**2 * (y > 0)) / jnp.sum(y > 0),
    "contrast": lambda h, y: jnp.mean(
        jax.nn.logsumexp(h.reshape(ROWS, -1) @ y.reshape(ROWS, -1).T / WIDTH, axis=1)
    ),
    "deviation": lambda h, y: jnp.mean(jnp.std(h, 0)),
    "last_row": lambda h, y: jnp.mean(h[-1] * y[0]),
    "norm": lambda h, y: jnp.linalg.norm(h),
}


def clipped(grad, ws, *batch):
    gradient = grad(ws, *batch)
    return gradient / jnp.maximum(1, jnp.linalg.norm(gradient))


def accumulated(grad, ws, *batch):
    """Micro-batches of every second row."""
    parts = [array.reshape(-1, 2, *array.shape[1:]).swapaxes(0, 1) for array in batch]
    several = [jnp.concatenate([part, part], 1) for part in parts]  # layers take 16 rows

    def add(total, part):
        return total + grad(ws, *part), None

    return lax.scan(add, jnp.zeros_like(ws), several)[0]


def orthogonal(grad, ws, *batch):
    g = grad(ws, *batch)
    g = g / (1e-6 + jnp.linalg.norm(g, axis=(1, 2), keepdims=True))
    return 1.5 * g - 0.5 * g @ g.swapaxes(1, 2) @ g


UPDATES = {
    "gradient": lambda grad, ws, *batch: grad(ws, *batch),
    "scaled": lambda grad, ws, *batch: grad(ws, *batch) / 4,
    "clipped": clipped,
    "accumulated": accumulated,
    "orthogonal": orthogonal,
    "twice": lambda grad, ws, *batch: grad(ws - 0.1 * grad(ws, *batch), *batch),
    "an_epoch": lambda grad, ws, *batch: lax.fori_loop(
        0, 2, lambda i, ws: ws - 0.1 * grad(ws, *batch), ws
    ),
}
AXES = ("data", "fsdp")


@settings(max_examples=speed.MAX_EXAMPLES // 3)
@example(["rolled", "one_branch"], "mean", "scaled", P("data"), P(), False)
@example(["sorted"], "norm", "accumulated", P(AXES), P(None, None, "fsdp"), True)
@given(
    layers=st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=3),
    loss=st.sampled_from(list(LOSSES)),
    update=st.sampled_from(list(UPDATES)),
    rows=st.sampled_from([P("data"), P(AXES)]),
    split=st.sampled_from([P(), P(None, "fsdp"), P(None, None, "fsdp"), P(None, "data")]),
    has_sequences=st.booleans(),
)
def test_results_are_those_of_the_jitted_step(layers, loss, update, rows, split, has_sequences):
    mesh = jax.make_mesh((2, 2), AXES, axis_types=(AxisType.Auto,) * 2)

    def loss_fn(ws, x, y):
        for w, name in zip(ws, layers, strict=True):
            x = LAYERS[name](x, w)
        return LOSSES[loss](x, y)

    def step(ws, x, y):
        return UPDATES[update](jax.grad(loss_fn), ws, x, y)

    shape = (ROWS, 3, WIDTH) if has_sequences else (ROWS, WIDTH)
    ws = jax.device_put(normal(len(layers), WIDTH, WIDTH, scale=0.4), NamedSharding(mesh, split))
    batch = jax.device_put((normal(*shape), normal(*shape)), NamedSharding(mesh, rows))
    jitted = jax.jit(step)
    compressed = dq.compress(jitted, "data", method=EXACT, missing_ok=True)
    found, expected = compressed(ws, *batch), jitted(ws, *batch)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * jnp.abs(expected).max())


# Functions of two values of a worker: matrices [16, 8].
EQUATIONS = {
    "added": lambda a, b: a + b,
    "subtracted": lambda a, b: a - b / 4,
    "multiplied": lambda a, b: a * b,
    "scaled": lambda a, b: 0.3 * a,
    "scaled_by_the_other": lambda a, b: a * b.mean(),
    "contracted": lambda a, b: jnp.tanh(a @ (b.T @ a)),
    "turned": lambda a, b: a.T.reshape(a.shape),
    "one_row": lambda a, b: jnp.broadcast_to(a.sum(0) / ROWS, a.shape),
    "masked": lambda a, b: jnp.where(b > 0, a, 0),
    "nothing": lambda a, b: jnp.where(b > 99, a, 0 * b),
    "shifted": lambda a, b: jnp.pad(a, [(1, 0), (0, 0)])[:-1],
    "put": lambda a, b: jnp.zeros_like(a).at[PAIRS // 2].add(a),
    "taken": lambda a, b: a.at[PAIRS + 1].get(mode="fill", fill_value=0),
    "halves": lambda a, b: jnp.concatenate([a[: ROWS // 2], b[ROWS // 2 :]]),
    "narrow": lambda a, b: (a.astype(jnp.bfloat16) + b.astype(jnp.bfloat16)).astype(a.dtype),
    "bounded": lambda a, b: jnp.tanh(a),
}
SUMS = {
    "psum": lambda a, b: lax.psum(a, "data") / 2,
    "both": lambda a, b: jnp.subtract(*lax.pmean((a, b), "data")),
    "one_number": lambda a, b: b * lax.pmean(a.mean(), "data"),
    "integers": lambda a, b: a + lax.psum((4 * b).astype(jnp.int8), "data").astype(a.dtype),
    "scattered": lambda a, b: lax.all_gather(
        lax.psum_scatter(a, "data", tiled=True) / 2, "data", tiled=True
    ),
    "gathered": lambda a, b: lax.all_gather(a, "data").mean(0),
}


def with_own_gradient(f, a, b):
    ruled = jax.custom_vjp(f)
    ruled.defvjp(lambda a, b: (f(a, b), (a, b)), lambda kept, ct: (f(ct, kept[1]), 2 * ct))
    return jax.grad(lambda a: jnp.mean(ruled(a, b) ** 2))(a)


# Equations around others.
BLOCKS = {
    "carried": lambda f, a, b, n: lax.scan(lambda c, _: (f(c, b), None), a, None, length=3)[0],
    "accumulated": lambda f, a, b, n: lax.scan(
        lambda c, x: (c + f(x, b), None), jnp.zeros_like(a), jnp.stack([a, b, a * b])
    )[0],
    "stacked": lambda f, a, b, n: lax.scan(lambda c, x: (c, f(x, c)), a, jnp.stack([a, b]))[1][1],
    "some_turns": lambda f, a, b, n: lax.fori_loop(0, n, lambda _, c: jnp.tanh(f(c, b)), a),
    "one_branch": lambda f, a, b, n: lax.cond(n > 0, f, lambda a, b: a + f(b, a), a, b),
    "jitted": lambda f, a, b, n: jax.jit(f)(a, b),
    "computed_again": lambda f, a, b, n: jax.checkpoint(f)(a, b),
    "gradient": lambda f, a, b, n: jax.grad(lambda a: jnp.mean(f(a, b) ** 2) * ROWS)(a),
    "own_gradient": lambda f, a, b, n: with_own_gradient(f, a, b),
}
NAMES = st.sampled_from([*EQUATIONS, *SUMS])
PROGRAMS = st.lists(
    st.one_of(
        NAMES, st.tuples(st.sampled_from(list(BLOCKS)), st.lists(NAMES, min_size=1, max_size=4))
    ),
    min_size=2,
    max_size=8,
)


def evaluated(program, n, a, b):
    """Each equation takes the results of the last two."""
    for each in program:
        if isinstance(each, str):
            a, b = (EQUATIONS | SUMS)[each](a, b), a
        else:
            block, body = each
            a, b = BLOCKS[block](functools.partial(evaluated, body, n), a, b, n), a
    return a


@settings(max_examples=speed.MAX_EXAMPLES // 3)
@example(["gathered", "added"], 0, True)
@example([("some_turns", ["psum", "scaled", "added"]), "both"], 0, False)
@given(program=PROGRAMS, turns=st.integers(0, 2), check_vma=st.booleans())
def test_results_of_sums_by_hand_are_those_of_the_jitted_step(program, turns, check_vma):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    step = jax.jit(
        jax.shard_map(
            functools.partial(evaluated, program),
            mesh=mesh,
            in_specs=(P(), P("data"), P()),
            out_specs=P("data"),
            check_vma=check_vma,
        )
    )
    arguments = turns, normal(2 * ROWS, WIDTH), normal(ROWS, WIDTH)
    try:
        expected = step(*arguments)
    except (TypeError, ValueError):  # of types that vary over other axes
        assume(not check_vma)
        raise
    every = {"only": lambda each: True, "operations": ("psum", "psum_scatter", "all_gather")}
    found = dq.compress(step, "data", method=EXACT, missing_ok=True, **every)(*arguments)
    tolerance = 1e-5 + 1e-3 * jnp.abs(expected).max()  # equal values may cancel out
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=tolerance)
