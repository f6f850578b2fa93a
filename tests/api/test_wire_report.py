"""The report against the compiled program: every byte of every collective, and what they hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.support.gradients import of_workers
from tests.support.hlo import PRESETS, SIZE, TREE, compiled_collectives

NUM_WORKERS = 8
WHOLE = dq.Compression(specs=P())  # leaves on every device


@pytest.mark.parametrize(
    ("tree", "axes", "arguments", "error", "words"),
    (
        ({"name": "layer"}, 2, {}, TypeError, r"tree\['name'\] is a .* of dtype <U5"),
        ({"o": np.array([None])}, 2, {}, TypeError, r"tree\['o'\] is a .* of dtype object"),
        (TREE, "rows", {}, ValueError, r"axis_size='rows' is not an axis of the mesh"),
        (TREE, ("data", "data"), {}, ValueError, r"\('data', 'data'\) does not name different"),
        (TREE, 2, {"method": dq.DynamiQ}, ValueError, r"method=DynamiQ is a class.*DynamiQ\(\)"),
        (TREE, "data", {"method": WHOLE, "mesh": {"data": 2}}, TypeError, r"mesh=.* is not a mesh"),
    ),
)
def test_what_no_collective_takes_is_not_counted(data_mesh, tree, axes, arguments, error, words):
    if axes != 2 and not arguments:
        arguments = {"method": WHOLE, "mesh": data_mesh(NUM_WORKERS)}
    with pytest.raises(error, match=words):
        dq.wire_report(tree, axes, **arguments)


def test_a_spec_over_the_axis_of_the_collective_splits_no_leaf(data_mesh):
    """Each worker has terms of whole leaves, wherever their sums lie."""
    mesh, report = data_mesh(NUM_WORKERS), {}
    for spec in (P(), P("data")):
        compression = dq.Compression(specs=spec)
        report[spec] = dq.wire_report({"w": TREE["w"]}, "data", compression, mesh=mesh)
    assert report[P("data")] == report[P()]


@pytest.mark.parametrize("preset", ("default", "paper"))
def test_the_bits_are_those_asked_for(preset):
    for bits in (4.0, 5.0, 6.5):
        method = dataclasses.replace(PRESETS[preset], bits=bits)
        report = dq.wire_report({"w": TREE["w"]}, NUM_WORKERS, method=method)
        assert report.bits == pytest.approx(bits, rel=0.01)
        assert report.compressed_size == SIZE
        assert report.ratio_f32 == pytest.approx(32 / bits, rel=0.01)
        assert report.ratio_bf16 == pytest.approx(16 / bits, rel=0.01)


def test_no_compression_compresses_nothing():
    report = dq.wire_report({"w": TREE["w"]}, NUM_WORKERS, method="exact")
    assert (report.bits, report.ratio_f32, report.ratio_bf16) == (32.0, 1.0, 0.5)


def test_one_worker_sends_nothing():
    report = dq.wire_report(TREE, 1)
    assert (report.bytes_per_worker, report.compressed_size) == (0, 0)
    assert np.isnan([report.bits, report.ratio_f32, report.ratio_bf16]).all()
    assert all(leaf.why_exact for leaf in report.leaves) and len(report.leaves) == len(TREE)


def test_every_exact_leaf_is_listed_with_its_reason():
    leaves = dq.wire_report(TREE, NUM_WORKERS).leaves
    reasons = {leaf.path: leaf.why_exact for leaf in leaves if leaf.why_exact}
    assert reasons.keys() == {"bias", "norm", "steps"}
    assert "512 elements" in reasons["bias"]
    assert "int32" in reasons["steps"]
    few = {"w": jax.ShapeDtypeStruct((100,), jnp.float32)}  # one row, but a chunk for each worker
    (leaf,) = dq.wire_report(few, NUM_WORKERS, method=dq.Compression(exact_below=0)).leaves
    assert leaf.path == "w"
    assert "100 coordinates over 8 workers" in leaf.why_exact
    kept = dq.wire_report(TREE, NUM_WORKERS, method={"^w$": "uncompressed", "": "dynamiq"})
    assert {leaf.path: leaf.why_exact for leaf in kept.leaves}["w"] == "by the policy"
    assert (kept.compressed_bytes, kept.compressed_size) == (0, 0)


@given(size=st.integers(1, 5000), num_workers=st.integers(2, 64))
def test_compression_never_costs_bytes(size, num_workers):
    tree = {"w": jax.ShapeDtypeStruct((size,), jnp.float32)}
    compressed, exact = (
        dq.wire_report(tree, num_workers, method=dq.Compression(exact_below=below)).bytes_per_worker
        for below in (0, size + 1)
    )
    # Chunks are whole: up to one item for each of 2 (n - 1) messages is padding.
    assert compressed <= exact + 4 * 2 * (num_workers - 1)


def test_the_report_knows_the_bytes_of_every_exact_dtype(data_mesh):
    """Booleans travel as bytes, numbers of less than 32 bits as 32, beside what is compressed."""
    few = ("uint8", "int16", "int32", "float16", "bfloat16", "float32")
    item_bytes = {"bool": 1, "complex64": 8} | dict.fromkeys(few, 4)
    tree = {dtype: jax.ShapeDtypeStruct((7, 12), dtype) for dtype in item_bytes}
    tree["w"] = jax.ShapeDtypeStruct((4096,), jnp.float32)
    report = dq.wire_report(tree, 4, method="bf16")
    assert {leaf.path: leaf.bytes for leaf in report.leaves if leaf.why_exact} == {
        dtype: 1.5 * 84 * size for dtype, size in item_bytes.items()
    }
    assert report.compressed_bytes == report.bytes_per_worker - report.exact_bytes
    found = compiled_collectives(data_mesh(4), tree, "bf16")
    # The backend may not widen, split or convert what travels compressed.
    compressed = [c for c in found if c.dtypes == {"u16"}]
    exact = [c for c in found if c not in compressed]
    assert {c.kind for c in exact} == {"all-reduce"}
    assert [c.kind for c in compressed if c.looped] == ["collective-permute"]  # one for each hop
    assert sum(c.sent_bytes(4) for c in compressed) == report.compressed_bytes
    assert sum(c.sent_bytes(4) for c in exact) == report.exact_bytes


def test_a_report_takes_arrays_as_well_as_shapes():
    arrays = {"w": of_workers(0, 1, 5000)[0], "steps": 3, "rate": 0.5, "loss": np.float64(1)}
    shapes = dict.fromkeys(("rate", "loss"), jax.ShapeDtypeStruct((), jnp.float32))
    shapes["w"] = jax.ShapeDtypeStruct((5000,), jnp.float32)
    shapes["steps"] = jax.ShapeDtypeStruct((), jnp.int32)
    assert dq.wire_report(arrays, 4) == dq.wire_report(shapes, 4)
    assert dq.wire_report(arrays, 4).exact_bytes == 18  # 3 numbers of 32 bits, 3/4 of them twice
