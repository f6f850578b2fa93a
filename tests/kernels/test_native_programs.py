"""The native codec inside of programs: transformations, devices, threads and errors."""

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from pallas_kernels import _native, choice, native_blocks, operations
from pallas_kernels._native import backend, library
from pallas_kernels.backend import Backend
from pallas_kernels.codec import Places, Quantizer
from pallas_kernels.registry import BACKENDS, BASE
from pallas_kernels.trial import make_trial
from tests.support.gradients import of_workers
from tests.support.kernel_cases import QUANTIZER
from tests.support.native_calls import assert_shapes_are_checked, called
from tests.support.workers import TWO_WIDTHS

pytestmark = [
    pytest.mark.optimized,
    pytest.mark.skipif(_native.why_not() is not None, reason=str(_native.why_not())),
]

TRIAL = make_trial(Quantizer(**QUANTIZER), [0, *range(2, 17)] * 12)  # more than one block of rows
LAYOUT, LOCAL = TRIAL.layout, jax.tree.map(jnp.asarray, TRIAL.local)
hop = functools.partial(operations.by("native").hop, layout=LAYOUT)
NOTHING = np.zeros((0, LAYOUT.payload_bytes), np.uint8)
NATIVE = BACKENDS["native"]
FIRST = functools.cache(lambda: TRIAL.send(NATIVE))  # a message of each chunk


def sum_of_chunk(chunk) -> np.ndarray:
    return np.asarray(jax.jit(hop)(FIRST()[:1], LOCAL, jnp.int32(chunk), jnp.int32(1)))


@pytest.mark.parametrize(
    ("topology", "check_vma"),
    [
        ("ring", True),
        *(pytest.param("all_to_all", vma, marks=pytest.mark.slow) for vma in (True, False)),
    ],
)
def test_an_all_reduce_on_many_devices_is_that_of_the_base(topology, check_vma, data_mesh):
    """The devices share one pool of threads, and wait for each other."""
    workers = 8

    def reduce(gradient, implementation):
        method = dataclasses.replace(TWO_WIDTHS, implementation=implementation)
        key = jax.random.key(1)
        return dq.psum(gradient[0], "data", key=key, method=dq.Compression(method, topology))

    gradients = of_workers(0, workers, 256 * 300)
    native, base = (
        jax.jit(
            jax.shard_map(
                functools.partial(reduce, implementation=implementation),
                mesh=data_mesh(workers),
                in_specs=P("data"),
                out_specs=P(),
                check_vma=check_vma,
            )
        )(gradients)
        for implementation in ("native", "xla")
    )
    np.testing.assert_array_equal(native, base)


def test_a_loop_and_a_batch_return_what_single_calls_do():
    chunks = jnp.arange(LAYOUT.num_chunks, dtype=jnp.int32)
    expected = np.stack([sum_of_chunk(chunk) for chunk in chunks])
    of_chunk = functools.partial(hop, FIRST()[:1], LOCAL)
    mapped = jax.jit(jax.vmap(lambda chunk: of_chunk(chunk, 1)))(chunks)
    np.testing.assert_array_equal(mapped, expected)
    scanned = jax.lax.scan(lambda c, chunk: (c, of_chunk(chunk, 1)), 0, chunks)[1]
    np.testing.assert_array_equal(scanned, expected)
    rows = jnp.stack([LOCAL.rows, -LOCAL.rows])
    norms = jax.vmap(operations.by("native").statistics)(rows)
    np.testing.assert_array_equal(norms[0], norms[1])


def test_donated_rows_are_read_before_they_are_written():
    def add(rows, payloads):
        sums = operations.by("native").decompress_accumulate(
            payloads, LOCAL._replace(rows=rows), 0, layout=LAYOUT
        )
        return rows.at[: len(sums)].set(sums)

    rows = LOCAL.rows
    expected = jax.jit(add)(rows, FIRST()[:2])
    donated = jax.jit(add, donate_argnums=0)(jnp.array(rows), FIRST()[:2])
    np.testing.assert_array_equal(donated, expected)


def test_numbers_of_64_bits_change_nothing():
    expected = sum_of_chunk(1)
    with jax.enable_x64(True):
        turned = hop(FIRST()[:1], LOCAL, np.int64(1), np.int64(1))
    np.testing.assert_array_equal(turned, expected)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("order", lambda order: order + LAYOUT.num_rows),
        ("order", lambda order: order - 10**6),
        ("widths", lambda widths: widths + 16),
        ("widths", lambda widths: widths - 17),
        ("widths", lambda widths: jnp.maximum(widths, 9)),
        ("starts", lambda starts: starts + 4),
        ("starts", lambda starts: -starts),
        ("starts", lambda starts: starts[:, ::-1]),
    ],
)
def test_places_that_would_leave_an_array_are_an_error(name, function):
    """No other memory is read or written."""
    places = LOCAL.places._replace(**{name: function(getattr(LOCAL.places, name))})
    message = f"hop: places of chunk 0 leave its message of {LAYOUT.units} units, or are not of"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(hop(NOTHING, LOCAL._replace(places=places), 0, 0))


def test_a_chunk_or_a_table_that_is_not_there_is_an_error():
    there_is_none = rf"hop: chunk={LAYOUT.num_chunks} of {LAYOUT.num_chunks} chunks\. Use impl"
    with pytest.raises(jax.errors.JaxRuntimeError, match=there_is_none):
        jax.block_until_ready(hop(NOTHING, LOCAL, LAYOUT.num_chunks, 0))
    decompress = functools.partial(
        operations.by("native").decompress_sums, FIRST(), Places(*LOCAL.places), layout=LAYOUT
    )
    no_place = f"table has place {LAYOUT.rows_per_chunk} of {LAYOUT.rows_per_chunk} rows"
    with pytest.raises(jax.errors.JaxRuntimeError, match=no_place):
        table = jnp.full_like(LOCAL.places.order, LAYOUT.rows_per_chunk)
        jax.block_until_ready(decompress(table))


def custom_calls() -> dict[str, tuple[dict, dict, dict]]:
    """Return the calls that the library makes: operands and results by number, and attributes."""
    found = {}

    def record(operation, results, operands, **attributes):
        made = jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), results)
        outputs = {f"result {n}": array for n, array in enumerate(jax.tree.leaves(made))}
        found[operation] = dict(enumerate(map(np.asarray, operands))), outputs, attributes
        return made

    with pytest.MonkeyPatch.context() as patch:
        for module in (backend, native_blocks):
            patch.setattr(module, "call", record)
        for call in TRIAL.calls(np.zeros((CHUNKS, LAYOUT.payload_bytes), np.uint8)).values():
            if not NATIVE.derives(call.operation):
                call.by(NATIVE)
        blocks = native_blocks.NativeBlocks(name="e4m3", width=8, rows=ROWS)
        payloads = np.zeros((CHUNKS, blocks.payload_bytes), np.uint8)
        blocks.hop(payloads, LOCAL.rows, 0, 0, 0, LOCAL.seed)
        blocks.accumulate(payloads, LOCAL.rows, 0)
        blocks.decompress(payloads)
    return found


CHUNKS, ROWS = LAYOUT.num_chunks, LAYOUT.rows_per_chunk
CALLS = custom_calls()
OF_CHUNK = ("hop", "decompress_accumulate", "scaled_sums", "block_hop", "block_accumulate")


def test_all_calls_but_those_of_other_files_are_tried():
    of_others = {"sparse_encode", "sparse_decode", "copies"}
    assert CALLS.keys() == set(library.CALLS) - of_others


@pytest.mark.parametrize("operation", CALLS)
def test_arrays_of_other_shapes_are_an_error(operation):
    """No memory is read or written that is not theirs, whatever the caller gives."""
    is_free = {(0, 0), (1, 0)} if operation in OF_CHUNK else ()  # any messages, and local rows
    assert_shapes_are_checked(operation, *CALLS[operation], is_free)


@pytest.mark.parametrize(
    ("operation", "change", "message"),
    [
        ("hop", {"units": -1}, "bytes, too few for -1 units"),
        ("hop", {"units": LAYOUT.payload_bytes // 32}, "bytes, too few for"),
        ("hop", {"units": 2**60}, f"bytes, too few for {2**60} units"),
        ("hop", {"group_size": 4}, "group_size=4, not 8, 16 or 32"),
        ("hop", {"rounding": 3}, "rounding=3, not 0 to 2"),
        *(
            (operation, *each)
            for operation in ("block_hop", "block_accumulate", "block_decompress")
            for each in (
                ({"format": 10}, "format=10 of 10 formats"),
                ({"width": 9}, "width=9, not 2 to 8"),
                ({"rows_of_chunk": 2**31}, "rows_of_chunk=2147483648, not 0 to"),
                ({"rows_of_chunk": -1}, "rows_of_chunk=-1, not 0 to"),
            )
        ),
    ],
)
def test_attributes_of_other_values_are_an_error(operation, change, message):
    operands, results, attributes = CALLS[operation]
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        called(operation, operands, results, attributes | change)


def test_rows_of_other_dtypes_are_an_error():
    operands, results, attributes = CALLS["statistics"]
    narrow = {0: operands[0].astype(jnp.float8_e5m2)}
    message = "rows are F8E5M2, not float32, bfloat16 or float16"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        called("statistics", narrow, results, attributes)


def test_layouts_without_native_code_are_left_to_the_base():
    method = dq.DynamiQ.paper()
    layout = method.layout(2560, num_chunks=1)
    assert choice.fastest(Backend.energies, layout=layout) == {"default": BASE}
    with pytest.raises(ValueError, match=r"implementation='native' cannot run this.*logarithm"):
        operations.by("native").energies(
            jnp.zeros((1, layout.payload_bytes), jnp.uint8), layout=layout
        )


SCRIPT = """
import sys
from tests.kernels import test_native_programs as programs
sys.stdout.write(programs.sum_of_chunk(1).tobytes().hex())
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("threads", [7, 1, 2])
def test_the_number_of_threads_changes_nothing(threads):
    """Also more threads than cores."""
    environment = {**os.environ, "PJRT_NPROC": str(threads), "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == sum_of_chunk(1).tobytes().hex()
