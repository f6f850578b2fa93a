"""The custom call of copies: programs that hold it, errors, threads and large places."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from pallas_kernels import _native
from pallas_kernels._native.build import SWITCH
from pallas_kernels._native.library import target
from pallas_kernels.copies import Segment, Table, copy, pad
from tests.kernels.test_copies import SPREAD, assert_same_bits, in_numpy, values

pytestmark = pytest.mark.skipif(_native.why_not() is not None, reason=str(_native.why_not()))

CALL = target("copies")


def spread(*sources):
    return copy(sources, SPREAD)


def lowered(function=spread):
    """Return the text of a program; a new function is traced again."""
    new = jax.jit(lambda *sources: function(*sources))
    return new.lower(*values(SPREAD.sources, 16)).as_text()


def test_copies_and_paddings_are_one_call_and_slices_without_the_library(monkeypatch):
    def lowered_pad():
        return jax.jit(lambda vector: pad(vector, 1024)).lower(np.zeros(1000)).as_text()

    assert lowered().count(CALL) == 1 and "slice" not in lowered()
    assert lowered(jax.grad(lambda *s: sum(map(jnp.sum, spread(*s))), (0, 1, 2))).count(CALL) == 1
    assert lowered_pad().count(CALL) == 1 and "stablehlo.pad" not in lowered_pad()
    monkeypatch.setenv(SWITCH, "0")
    assert CALL not in lowered() and "dynamic_slice" in lowered()
    assert CALL not in lowered_pad() and lowered_pad().count("stablehlo.pad") == 1


def test_arrays_that_xla_has_to_partition_are_sliced(data_mesh):
    """XLA partitions no custom call. It would send all rows to all devices."""
    mesh = data_mesh(8)
    sources = jax.device_put(values(SPREAD.sources, 16), NamedSharding(mesh, P("data")))
    compiled = jax.jit(spread).lower(*sources).compile()
    assert CALL not in compiled.as_text() and "all-gather" not in compiled.as_text()
    assert_same_bits(compiled(*sources), in_numpy([np.asarray(s) for s in sources], SPREAD))


@pytest.mark.parametrize(("manual", "count"), [({"data", "rows"}, 1), ({"data"}, 0)])
def test_all_axes_of_the_mesh_have_to_be_manual(manual, count):
    mapped = jax.shard_map(
        spread,
        mesh=jax.make_mesh((4, 2), ("data", "rows"), axis_types=(AxisType.Auto,) * 2),
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names=manual,
        check_vma=False,
    )
    assert lowered(mapped).count(CALL) == count


def test_a_program_that_can_be_exported_still_can():
    tree = [jnp.full((2, 40 + n), n, jnp.float32) for n in range(20)]

    @jax.jit
    def mean(tree):
        def of_worker(tree):
            return dq.pmean(tree, "data", key=jax.random.key(0))

        return jax.vmap(of_worker, axis_name="data")(tree)

    assert CALL in mean.lower(tree).as_text()
    exported = export.export(mean)(tree)
    assert CALL not in exported.mlir_module()
    found = exported.call(tree)
    for leaf, result in zip(tree, found, strict=True):
        np.testing.assert_array_equal(leaf, result)


def call(table, *sources, result=(2, 6)):
    """Copy to an array of a shape, from two of ones if no others are given."""
    sources = sources or (jnp.ones((2, 4)),) * 2
    function = jax.ffi.ffi_call(CALL, [jax.ShapeDtypeStruct(result, np.float32)])
    return jax.block_until_ready(function(*sources, table=np.array(table, np.int64)))


@pytest.mark.parametrize(
    "table",
    [
        *([0, start, 0, 0, length] for start, length in ((0, 5), (1, 4), (-1, 2), (2**62, 2))),
        *([0, start, 0, 0, length] for start, length in ((0, 2**62), (0, -1), (2**63 - 1, 1))),
        *([source, 0, 0, 0, 1] for source in (2, -1)),
        *([0, 0, 0, at, length] for at, length in ((3, 4), (-1, 2), (2**62, 1))),
        *([0, 0, result, 0, 1] for result in (1, -1)),
        [0, 0, 0, 0, 2, 1, 0, 0, 1, 2],
        [0, 0, 0, 2, 2, 1, 0, 0, 0, 2],
    ],
)
def test_segments_that_leave_their_arrays_are_an_error(table):
    """No other memory is read or written."""
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"copies: segment \d leaves its arrays.*: -?\d+ columns"
    ):
        call(table)
    assert_same_bits(call([0, 0, 0, 0, 4, 1, 2, 0, 4, 2]), [np.ones((2, 6), np.float32)])


def test_arrays_that_do_not_fit_are_an_error():
    segment, other = [0, 0, 0, 0, 1], (jnp.ones((2, 4)), jnp.ones((2, 4), jnp.int32))
    for table, sources, result, message in (
        (segment[1:], (), (2, 6), "table has 4 numbers, and 5 are a segment"),
        (segment, other, (2, 6), r"different rows or dtypes: S32\[2, 4\] and F32"),
        (
            segment,
            (jnp.ones(2),),
            (2,),
            r"an array has the shape \[2\], not \[rows, columns\]\. Use",
        ),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            call(table, *sources, result=result)


@pytest.mark.parametrize("rows", [1, 3])
def test_large_segments_are_split_among_threads(rows, data_mesh):
    """Blocks end inside of segments, of gaps and of rows, on several devices at once."""
    segments = (0, 5, 0, 100_001, 300_000), (1, 0, 0, 1, 7), (1, 9, 1, 70_000, 70_001)
    table = Table(segments, (300_010, 100_000), (500_000, 140_003))
    sources = values(table.sources, 4 * rows)
    mapped = jax.shard_map(
        lambda *sources: copy(sources, table),
        mesh=data_mesh(4),
        in_specs=P("data"),
        out_specs=P("data"),
    )
    compiled = jax.jit(mapped).lower(*sources).compile()
    for _ in range(3):
        assert_same_bits(compiled(*sources), in_numpy(sources, table))


@pytest.mark.slow  # 2 GiB
def test_places_beyond_32_bits():
    columns = 2**31 + 4096
    source = np.zeros((1, columns), np.uint8)
    source[0, -64:] = np.arange(1, 65)
    table = Table((Segment(0, columns - 64, 0, 3, 64),), (columns,), (70,))
    compiled = jax.jit(lambda source: copy([source], table)).lower(source).compile()
    assert CALL in compiled.as_text()
    expected = np.zeros((1, 70), np.uint8)
    expected[0, 3:67] = np.arange(1, 65)
    assert_same_bits(compiled(source), [expected])
