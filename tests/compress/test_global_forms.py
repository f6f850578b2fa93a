"""Steps that the compiler partitions, in the forms that people write: their sums are compressed."""

import collections
import dataclasses

import jax
import numpy as np
import pytest

import dynamiq_jax as dq
from dynamiq_jax._inspection.collectives import collectives_of
from dynamiq_jax._inspection.devices import Devices
from tests.compress.global_forms import FORMS
from tests.compress.global_runs import CASES, OPTIONS, of_pmean, over_data, placed, run
from tests.support.workers import STOCHASTIC

pytestmark = pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")


@pytest.fixture(autouse=True)
def promotions_of_users():
    """flax and optax promote dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name, kind", CASES)
def test_exact_sums_are_those_of_the_compiler(name, kind):
    form = FORMS[name]
    around, _, made = placed(form, kind)
    with around:
        step = dq.compress(
            made.jitted(), "data", method=dataclasses.replace(OPTIONS, method="exact")
        )
        losses, state = run(step, made)
        expected, wanted = run(made.jitted(), made)
        report = step.report(made.state, *made.batch)
    np.testing.assert_allclose(losses, expected, rtol=form.tolerance)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=form.tolerance, atol=30 * form.tolerance)
    found = collections.Counter(each.sum.shape for each in report.compressed)
    assert found == collections.Counter(form.compressed)
    assert report.num_groups == form.groups


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", FORMS)
def test_compressed_sums_send_what_a_mean_of_the_same_tree_sends(name):
    """In place of what the compiler sends for the same sums."""
    form = FORMS[name]
    _, mesh, made = placed(form, "automatic")
    rounding, plain = dataclasses.replace(OPTIONS, method=STOCHASTIC), made.jitted()
    step = dq.compress(made.jitted(), "data", method=rounding)
    report = step.report(made.state, *made.batch)
    losses, _ = run(step, made)
    expected, _ = run(plain, made)
    np.testing.assert_allclose(losses, expected, rtol=0.05)
    assert np.abs(losses - expected).max() > 0
    if not form.only_sums:
        return
    grouped = [each for each in report.sums if each.group is not None]
    left = over_data(plain, made, mesh) - sum(each.bytes_before for each in grouped)
    sent = over_data(step, made, mesh) - max(left, 0)
    for group in range(report.num_groups):
        sums = [each.sum for each in grouped if each.group == group]
        sent -= of_pmean(sums, made, mesh, rounding)
    assert sent <= 8 * report.num_groups


def test_what_travels_as_a_gradient_beside_compressed_ones_stays_as_it_is_bit_for_bit():
    """Histories and scales of products of eight bits."""
    _, _, made = placed(FORMS["eight_bit_products"], "automatic")
    _, state = run(
        dq.compress(made.jitted(), "data", method=dataclasses.replace(OPTIONS, method="exact")),
        made,
    )
    _, wanted = run(made.jitted(), made)
    histories = "_overwrite_with_gradient"
    jax.tree.map(np.testing.assert_array_equal, state[histories], wanted[histories])
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(state[histories]))


def messages_of(step, made, mesh):
    text = step.lower(made.state, *made.batch).compile().as_text()
    sums = [each for each in collectives_of(text, Devices.of(mesh)) if each.opcode == "all-reduce"]
    return sum(each.times for each in sums)


@pytest.mark.parametrize("name", ["cnn_with_batch_norm", "batch_norm_of_2048_channels"])
def test_sums_that_stay_are_joined_as_without_compression(name):
    """Statistics of a batch wait for each other only where they do in the step."""
    _, mesh, made = placed(FORMS[name], "automatic")
    plain = made.jitted()
    compressed = dq.compress(plain, "data", method=dataclasses.replace(OPTIONS, method="bf16"))
    assert 2 < messages_of(compressed, made, mesh) <= messages_of(plain, made, mesh)
