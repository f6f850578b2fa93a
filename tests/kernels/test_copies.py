"""Laws of copies of segments, as one call and as slices: NumPy's bits, transposes and batches."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from pallas_kernels import _native
from pallas_kernels._jax import compat
from pallas_kernels.copies import Segment, Table, copy, pad, slices

DTYPES = (np.bool_, np.uint8, jnp.bfloat16, np.float32, np.complex64)


@pytest.fixture(params=["call", "shared kernels", "fusible", "static"])
def way(request, monkeypatch):
    """A function like `copy`, for each way in which it runs on CPUs."""
    if request.param == "call" and (reason := _native.why_not()):
        pytest.skip(reason)
    if request.param == "shared kernels":
        monkeypatch.setattr(compat, "may_hold_custom_calls", lambda context: False)
    return {
        "fusible": lambda sources, table: copy(sources, table, fusible=True),
        "static": slices,
    }.get(request.param, copy)


@st.composite
def tables(draw):
    """Tables in which sources are cut anywhere, and pieces dropped, moved and spread."""
    segments = []
    ends = [0] * draw(st.integers(1, 4))  # of the results
    sources = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    pieces = []
    for source, columns in enumerate(sources):
        cuts = sorted(draw(st.sets(st.integers(0, columns), max_size=4)) | {0, columns})
        pieces += [(source, a, b - a) for a, b in itertools.pairwise(cuts)]
    for source, start, length in draw(st.permutations(pieces)):
        if draw(st.booleans()) or draw(st.booleans()):
            result = draw(st.integers(0, len(ends) - 1))
            at = ends[result] + draw(st.sampled_from([0, 0, 3]))
            segments.append(Segment(source, start, result, at, length))
            ends[result] = at + length
    results = [end + draw(st.sampled_from([0, 2])) for end in ends]
    return Table(tuple(segments), tuple(sources), tuple(results))


def values(columns, rows, dtype=np.float32, seed=0):
    """Arrays of random bits."""
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return [rng.integers(0, 2, (rows, n)).astype(bool) for n in columns]
    item_bytes = np.dtype(dtype).itemsize
    return [
        rng.integers(0, 256, (rows, n * item_bytes), np.uint8).view(dtype).reshape(rows, n)
        for n in columns
    ]


def in_numpy(sources, table):
    results = [np.zeros((len(sources[0]), n), sources[0].dtype) for n in table.results]
    for source, start, result, at, length in table.segments:
        results[result][:, at : at + length] = sources[source][:, start : start + length]
    return results


def assert_same_bits(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert np.asarray(one).tobytes() == other.tobytes()


# The fixture lasts for all examples, which is meant.
LAW = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


@LAW
@given(table=tables(), rows=st.integers(0, 3), dtype=st.sampled_from(DTYPES))
def test_bits_are_those_of_numpy(way, table, rows, dtype):
    sources = values(table.sources, rows, dtype)
    found = jax.jit(lambda *sources: way(sources, table))(*sources)
    assert_same_bits(found, in_numpy(sources, table))


@pytest.mark.sampled(2)
@LAW
@given(table=tables())
def test_a_table_reversed_is_the_transpose(way, table):
    sources, cotangents = (values(n, 2) for n in (table.sources, table.results))
    sources, cotangents = (
        [np.nan_to_num(v, posinf=1, neginf=1) for v in side] for side in (sources, cotangents)
    )
    expected = in_numpy(cotangents, table.reversed)

    def copied(*sources):
        return way(sources, table)

    transpose = jax.linear_transpose(copied, *sources)
    assert_same_bits(jax.jit(transpose)(cotangents), expected)
    _, pullback = jax.vjp(copied, *sources)
    assert_same_bits(pullback([jnp.asarray(c) for c in cotangents]), expected)
    _, pushed = jax.jvp(copied, sources, sources)
    assert_same_bits(pushed, in_numpy(sources, table))
    # A gradient reaches a source that varies alone.
    _, of_first = jax.vjp(lambda first: copied(first, *sources[1:]), sources[0])
    assert_same_bits(of_first([jnp.asarray(c) for c in cotangents]), expected[:1])


@LAW
@given(table=tables(), axis=st.integers(0, 2), alone=st.booleans())
def test_a_batch_is_copied_like_its_members(way, table, axis, alone):
    batches = [values(table.sources, 2, seed=seed) for seed in range(3)]
    stacked = [np.stack(members, axis) for members in zip(*batches, strict=True)]
    axes = [axis] * len(stacked)
    if alone:
        axes[0], stacked[0] = None, batches[0][0]
        batches = [[batches[0][0], *members[1:]] for members in batches]
    if alone and len(stacked) == 1:
        return
    found = jax.jit(jax.vmap(lambda *sources: way(sources, table), in_axes=axes))(*stacked)
    for number, members in enumerate(batches):
        assert_same_bits([result[number] for result in found], in_numpy(members, table))


SPREAD = Table(
    tuple(Segment(n % 3, 5 * (n // 3), n % 2, 7 * (n // 2) + 1, 4) for n in range(24)),
    (40, 41, 42),
    (84, 90),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "padded"), [(0, 3), (5, 5), (5, 8), (1000, 1024)])
def test_vectors_are_padded_with_zeros(dtype, size, padded):
    [[vector]] = values([size], 1, dtype)
    with np.errstate(invalid="ignore"):
        vector[np.isnan(vector)] = 0  # XLA:CPU may change its bits
    expected = np.concatenate([vector, np.zeros(padded - size, dtype)])
    assert_same_bits([jax.jit(pad, static_argnums=1)(vector, padded)], [expected])
    batch = np.stack([vector, vector[::-1]])
    of_batch = jax.jit(jax.vmap(lambda each: pad(each, padded)))(batch)
    assert_same_bits([np.asarray(of_batch)[0]], [expected])


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_copy_their_own(way, check_vma, data_mesh):
    sources = values(SPREAD.sources, 16)
    mapped = jax.shard_map(
        lambda first, *others: way([first, *others], SPREAD),
        mesh=data_mesh(8),
        in_specs=(P(), P("data"), P("data")),  # the first varies over fewer axes
        out_specs=P("data"),
        check_vma=check_vma,
    )
    first = sources[0][:2]
    expected = in_numpy([np.tile(first, (8, 1)), *sources[1:]], SPREAD)
    assert_same_bits(jax.jit(mapped)(first, *sources[1:]), expected)


def test_a_loop_a_call_without_jit_and_wide_numbers(way):
    sources = [jnp.asarray(source) for source in values(SPREAD.sources, 3)]
    expected = in_numpy([np.asarray(source) for source in sources], SPREAD)
    assert_same_bits(way(sources, SPREAD), expected)
    with jax.disable_jit():
        assert_same_bits(way(sources, SPREAD), expected)
    _, stacked = jax.lax.scan(lambda c, row: (c, way([r[None] for r in row], SPREAD)), 0, sources)
    assert_same_bits([result[:, 0] for result in stacked], expected)
    with jax.enable_x64(True):
        wide = values(SPREAD.sources, 3, np.float64)
        found = jax.jit(lambda *sources: way(sources, SPREAD))(*wide)
        assert_same_bits(found, in_numpy(wide, SPREAD))
    # Donated sources are read before they are written.
    table = Table((Segment(0, 0, 0, 9, 9), Segment(0, 9, 0, 0, 9)), (18,), (18,))
    [source] = values(table.sources, 4)
    swap = jax.jit(lambda source: way([source], table)[0], donate_argnums=0)
    assert_same_bits([swap(jnp.asarray(source))], in_numpy([source], table))


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([(0, 0, 0, 0, 5)], "columns 0 to 5 of source 0, which has 4 columns"),
        ([(0, -1, 0, 0, 2)], "columns -1 to 1 of source 0"),
        ([(2, 0, 0, 0, 1)], "source 2. There are 2: number"),
        ([(0, 0, 0, 4, 3)], "columns 4 to 7 of result 0, which has 6 columns"),
        ([(0, 0, 1, 0, 1)], "result 1. There are 1"),
        ([(0, 2, 0, 2, -1)], "columns 2 to 1 of source 0"),
        ([(0, 0, 0, 0, 2), (0, 1, 0, 4, 2)], "overlap in source 0, at column 1"),
        ([(0, 0, 0, 0, 3), (1, 0, 0, 2, 2)], "overlap in result 0, at column 2"),
    ],
)
def test_tables_that_are_not_possible_are_refused(segments, message):
    with pytest.raises(ValueError, match=message):
        Table(tuple(segments), (4, 4), (6,))


def test_sources_that_do_not_fit_are_refused():
    table = Table((Segment(0, 0, 0, 0, 4),), (4, 4), (6,))
    four = jnp.zeros((1, 4))
    for sources, message in (
        ([four], "There are 1 sources, and the table is of 2"),
        ([four, jnp.zeros((1, 5))], r"Source 1 is float32\[1,5\]\. .*\[rows, 4\]"),
        ([four, jnp.zeros(4)], r"Source 1 is float32\[4\]\. .*\[rows, 4\]"),
        ([four, jnp.zeros((2, 4))], r"Source 1 is float32\[2,4\]\. .*the rows and the dtype"),
        ([four, jnp.zeros((1, 4), jnp.int32)], r"Source 1 is int32.*source 0, .* float32"),
    ):
        with pytest.raises(ValueError, match=message):
            copy(sources, table)
    message = "columns 0 to 9 of result 0, which has 4 columns. Give a segment inside"
    with pytest.raises(ValueError, match=message):
        pad(jnp.zeros(9), 4)
