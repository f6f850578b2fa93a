"""Pipelined steps are the unpipelined ones, cut elsewhere: other programs with the same bits,
compiled as users do.
"""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import dynamiq_jax as dq
from research.tests.support.pipelined import BUCKETS, WORKERS, Run, batches, equal

pytestmark = pytest.mark.optimized


@pytest.fixture(scope="module")
def clipped(data_mesh) -> Run:
    return Run(data_mesh(WORKERS), clip_norm=0.5)


def test_losses_are_bit_identical_to_those_of_the_unpipelined_step(clipped, tmp_path):
    """Of a method that rounds with the key of a step; also if saved and restored on the way."""
    xs = batches(10)
    updated, expected = clipped.gather(clipped.begin()), []
    for x in xs:
        updated, loss = clipped.unpipelined_step(updated, x)
        expected.append(np.asarray(loss))
    state, losses = clipped.train(clipped.begin(), xs)
    equal(losses, expected)
    equal(clipped.gather(state), updated)
    assert losses[-1] < 0.9 * losses[0]

    half, before = clipped.train(clipped.begin(), xs[:5])
    assert all(np.any(shard != 0) for shard in half.shards.values())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "half", half)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "half", half)
    resumed, after = clipped.train(restored, xs[5:])
    equal(before + after, expected)
    equal(resumed, state)
    # What is pending matters.
    forgetful = half._replace(shards=jax.tree.map(jnp.zeros_like, half.shards))
    assert clipped.train(forgetful, xs[5:])[1][-1] != expected[-1]


def test_a_run_goes_on_from_what_gather_returned(clipped):
    xs = batches(6)
    expected, _ = clipped.train(clipped.begin(), xs)
    half, _ = clipped.train(clipped.begin(), xs[:3])
    updated = clipped.gather(half)
    equal(clipped.gather(clipped.resume(updated))[:3], updated[:3])
    equal(clipped.train(clipped.resume(updated), xs[3:])[0], expected)


def test_equal_buckets_in_a_loop_give_the_same_bits(data_mesh, clipped):
    """Those behind the first unrolled ones."""
    looped = Run(
        data_mesh(WORKERS),
        clip_norm=0.5,
        options=dq.Compression(bucket_bytes=BUCKETS.bucket_bytes, unrolled_buckets=1),
    )
    xs = batches(2)
    equal(looped.train(looped.begin(), xs)[0], clipped.train(clipped.begin(), xs)[0])
