"""Steps in the forms that people write, which stay as they are: only large sums change."""

import dataclasses

import jax
import numpy as np
import pytest

import dynamiq_jax as dq
from tests.compress.forms import FORMS, WORKERS

OPTIONS = dq.Compression(exact_below=1024)


@pytest.fixture(params=FORMS)
def form(request, data_mesh):
    return FORMS[request.param](data_mesh(WORKERS))


def compressed(form, method):
    options = {"axis_name": "data"} | form.options
    in_vmap, specs = options.pop("vmap", False), options.pop("specs", None)
    compression = dataclasses.replace(OPTIONS, method=method, specs=specs)
    step = dq.compress(form.step, method=compression, **options)
    in_map = jax.jit(jax.vmap(step, (None, 0, 0), axis_name="data")) if in_vmap else step
    return in_map, step


def original(form):
    if form.options.get("vmap"):
        return jax.jit(jax.vmap(form.step, (None, 0, 0), axis_name="data"))
    return form.step if "pmap" in repr(form.step) else jax.jit(form.step)  # XLA fuses, too


def copies(args):
    """Arguments may be donated."""
    return jax.tree.map(lambda leaf: leaf.copy() if hasattr(leaf, "copy") else leaf, args)


@pytest.mark.sampled(4)
def test_only_the_values_of_large_sums_change_and_the_report_has_them(form):
    """BF16 rounds every message. Uncompressed, two terms have one sum, whatever the message."""
    expected = jax.tree.map(np.asarray, original(form)(*copies(form.args)))
    exactly, _ = compressed(form, "uncompressed")
    for got, wanted in zip(
        jax.tree.leaves(exactly(*copies(form.args))), jax.tree.leaves(expected), strict=True
    ):
        if form.same_sums:
            np.testing.assert_array_equal(got, wanted)
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-7)
    step, reported = compressed(form, form.method)
    got = step(*copies(form.args))
    assert 1e-8 < dq.vnmse(got, expected) < (1e-4 if form.method == "bf16" else 1e-2)
    if form.options.get("vmap"):
        return
    report = reported.report(*form.args)
    assert (report.num_groups, len(report.compressed)) == (form.groups, form.compressed)
    for each in report.compressed:
        assert 0 < each.bytes_after < 0.6 * each.bytes_before
        assert form.source in each.sum.source
