"""The native codec against the base: the same bytes, of any rows, widths, seeds and messages."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._measurement.gradients import worker_gradient
from dynamiq_jax.methods import Axis, Call
from dynamiq_jax.topologies import Ring
from pallas_kernels import _native
from pallas_kernels.codec import MAX_WIDTH, WIDTHS, Layout, LocalRows, Places, make_places
from pallas_kernels.codec.bit_planes import UNIT
from pallas_kernels.differences import compare
from pallas_kernels.registry import BACKENDS, BASE
from pallas_kernels.trial import HARD
from tests.support.kernel_cases import small_layout
from tests.support.native_calls import with_and_without

pytestmark = [
    # The base then rounds products and sums once.
    pytest.mark.optimized,
    pytest.mark.skipif(_native.why_not() is not None, reason=str(_native.why_not())),
]

NATIVE = BACKENDS["native"]
CHUNKS, ROWS = 2, 20
NORM_ERROR = 2.0**-21  # relative, of sums in another order
KINDS = ("usual", *HARD)

# Group size, gap ratio, rounding, dtype. Each of them has a program of the base of its own.
CASES: dict[str, tuple[int, float, Any, Any]] = {
    "default": (32, 2.7, "correlated", np.float32),
    "groups of 16": (16, 1.3, "independent", jnp.bfloat16),
    "groups of 8": (8, 2.0, "nearest", np.float16),
    "uniform": (32, 1.0, "correlated", jnp.bfloat16),
    "uniform, groups of 8": (8, 1.0, "independent", np.float32),
    "widest gaps": (16, 2.9, "nearest", np.float32),
}
cases = pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in list(CASES)[:2] else pytest.mark.slow) for c in CASES]
)


def layout_of(case: str) -> Layout:
    group_size, gap_ratio, rounding, _ = CASES[case]
    quantizer = {"group_size": group_size, "gap_ratio": gap_ratio, "rounding": rounding}
    layout = small_layout(ROWS, WIDTHS, float(MAX_WIDTH), **quantizer)  # room for any widths
    return dataclasses.replace(layout, size=layout.size - 3)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Everything that the operations take, which is data of one program."""

    widths: list[int]
    kinds: list[str]  # of rows
    octave: int  # of all rows
    stream: int
    seed: tuple[int, int]
    chunk: int
    turn: int

    @property
    def ordered(self) -> np.ndarray:
        return np.sort(np.asarray(self.widths, np.int32))[::-1]

    def places(self) -> Places:
        order = np.random.default_rng(self.stream).permutation(CHUNKS * ROWS).astype(np.int32)
        planes = (self.ordered[:, None] > np.arange(MAX_WIDTH)).sum(axis=0)
        rows_of_planes = jnp.tile(jnp.asarray(planes, jnp.int32), (CHUNKS, 1))
        return make_places(jnp.asarray(order.reshape(CHUNKS, ROWS)), rows_of_planes)

    def rows(self, worker: int, dtype: Any) -> np.ndarray:
        rng = np.random.default_rng((self.stream, worker))
        made = rng.standard_t(3, (CHUNKS * ROWS, 256)) * np.exp2(2.0 * rng.standard_normal(256))
        rows = np.ldexp(made, self.octave).astype(np.float32)
        for row, kind in zip(rows, self.kinds[worker:] + self.kinds[:worker], strict=True):
            if kind != "usual":
                row[:] = HARD[kind](row)
        with np.errstate(over="ignore"):
            return rows.astype(dtype)

    def messages(self, layout: Layout) -> np.ndarray:
        """Any bytes: every one of them decodes to something."""
        rng = np.random.default_rng((self.stream, 2))
        return rng.integers(0, 256, (CHUNKS, layout.payload_bytes), np.uint8)


inputs = st.builds(
    Inputs,
    widths=st.lists(st.sampled_from(WIDTHS), min_size=ROWS, max_size=ROWS),
    kinds=st.lists(st.sampled_from(KINDS), min_size=CHUNKS * ROWS, max_size=CHUNKS * ROWS),
    octave=st.sampled_from([0, 0, 0, -40, 40, -110, 100, -130]),
    stream=st.integers(0, 2**32 - 1),
    seed=st.tuples(*[st.integers(0, 2**32 - 1)] * 2),
    chunk=st.integers(0, CHUNKS - 1),
    turn=st.integers(0, 2**16),
)


@functools.cache
def program(case: str, backend: Any) -> Any:
    """Return a program of all operations, by name."""
    layout = layout_of(case)

    def call(name: str) -> Any:
        return functools.partial(getattr(backend, name), layout=layout)

    def run(rows, received, messages, places, seed, chunk, turn):
        local = LocalRows(rows, places, seed)
        table = places.order % ROWS
        total, of_sums = call("scaled_sums")(received[:1], local, chunk)
        return {
            "statistics": backend.statistics(rows),
            "compress": call("hop")(received[:0], local, chunk, turn),
            "hop": call("hop")(received[:1], local, chunk, turn),
            "hop of several": call("hop")(received, local, chunk, turn),
            "accumulate": call("decompress_accumulate")(received, local, chunk),
            "scaled sums": total,
            "scales of sums": of_sums,
            "decompress": call("decompress")(messages, places),
            "decompress of sums": call("decompress_sums")(messages, places, table),
        }

    return jax.jit(run)


@pytest.mark.sampled(2)
@cases
@given(inputs)
def test_every_operation_returns_the_bytes_of_the_base(case, given_inputs):
    layout, dtype = layout_of(case), CASES[case][-1]
    places, seed = given_inputs.places(), jnp.asarray(given_inputs.seed, jnp.uint32)
    chunk, turn = jnp.int32(given_inputs.chunk), jnp.int32(given_inputs.turn)
    of_others = [
        program(case, BASE)(
            given_inputs.rows(worker, dtype),
            jnp.zeros((2, layout.payload_bytes), jnp.uint8),
            jnp.zeros((CHUNKS, layout.payload_bytes), jnp.uint8),
            *(places, seed, chunk, jnp.int32(worker)),
        )["compress"]
        for worker in range(1, 3)
    ]
    arguments = (
        *(given_inputs.rows(0, dtype), jnp.stack(of_others), given_inputs.messages(layout)),
        *(places, seed, chunk, turn),
    )
    ours, base = (program(case, backend)(*arguments) for backend in (NATIVE, BASE))
    for name in base:
        if name == "statistics":
            check_norms(ours[name], base[name])
        else:
            found = compare(ours[name], base[name], layout, given_inputs.ordered)
            assert found.differing == 0, f"{name}: {found.text}"
    # What no row uses is zero.
    used = UNIT * int(given_inputs.ordered.sum())
    for name in ("compress", "hop", "hop of several"):
        assert not np.any(ours[name][used : layout.group_scales_start])
        assert not np.any(ours[name][layout.padding_start :])


def check_norms(ours, base) -> None:
    finite = np.isfinite(base)
    np.testing.assert_array_equal(np.isfinite(ours), finite)
    np.testing.assert_allclose(
        np.where(finite, ours, 0), np.where(finite, base, 0), rtol=NORM_ERROR
    )


@pytest.mark.parametrize(
    ("method", "rows"),
    [
        (dq.DynamiQ(bits=3.0), 4096),
        (dq.methods.MXFP8(), 4095),
        pytest.param(dq.DynamiQ(bits=3.0), 4095, marks=pytest.mark.slow),
    ],
)
def test_large_results_have_every_row(method, rows, data_mesh, monkeypatch):
    """From 4096 rows on, those of DynamiQ are written around the caches."""
    values = jnp.asarray(worker_gradient(0, 256 * rows, seed=1))
    call = Call(size=values.size, axis=Axis("data", 1), topology=Ring())
    one_device = {"mesh": data_mesh(1), "in_specs": P(), "out_specs": P(), "check_vma": False}

    def decoded(values):
        codec = method.bind(values, call, jax.random.key(0))
        return codec.decompress(codec.compress(0, 0)[None])

    found = with_and_without(monkeypatch, jax.shard_map(decoded, **one_device), values)
    np.testing.assert_array_equal(*found)
    assert 0 < np.linalg.norm(found[0] - values) < 0.2 * np.linalg.norm(values)


@given(
    shape=st.sampled_from([(0,), (1,), (70,), (2047,), (2048,), (5000,), (3, 2500), (2, 2, 40)]),
    seed=st.integers(0, 2**32 - 1),
    few=st.booleans(),
)
def test_words_are_sorted(shape, seed, few):
    """Of every digit, and with equal ones, which `Backend.sort` does not promise."""
    drawn = np.random.default_rng(seed).integers(0, 60 if few else 2**32, shape, np.uint32)
    words = drawn * np.uint32(71_582_789) if few else drawn
    np.testing.assert_array_equal(jax.jit(NATIVE.sort)(words), np.sort(words, axis=-1))
