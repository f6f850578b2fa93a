"""Trees of many leaves: equal kernels, and cuts of vectors into few operations; eager steps."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynamiq_jax as dq
from dynamiq_jax._buckets.cutting import cut

KEY = jax.random.key(3)


def test_each_of_few_long_pieces_is_an_operation_of_its_own():
    """XLA fuses slices with what comes before and after, and compiles many of them slowly."""

    def equations(number: int) -> int:
        rows = jax.ShapeDtypeStruct((1, number * 2**14), jnp.float32)
        return len(jax.make_jaxpr(lambda rows: cut(rows, [2**14] * number))(rows).eqns)

    assert [equations(number) for number in (2, 8, 9, 40)] == [2, 8, 1, 1]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_batches_are_cut_alike(axis):
    whole = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    moved = np.moveaxis(whole, 0, axis)
    first, second = jax.jit(jax.vmap(lambda rows: cut(rows, (1, 3)), in_axes=axis))(moved)
    np.testing.assert_array_equal(first, whole[:, :, :1])
    np.testing.assert_array_equal(second, whole[:, :, 1:])


def test_gradients_of_pieces_come_together():
    def loss(rows):
        first, second, _ = cut(rows, (2, 3, 1))
        return 2 * first.sum() + (second**2).sum()

    gradient = jax.jit(jax.grad(loss))(jnp.full((1, 6), 5.0))
    np.testing.assert_array_equal(gradient, [[2, 2, 10, 10, 10, 0]])


def mean(tree):
    return dq.pmean(tree, "data", key=KEY)


@pytest.mark.parametrize("shape", [(128,), (64, 32)], ids=["exact", "compressed"])
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only CPUs have such kernels")
def test_kernels_are_no_more_for_more_leaves(shape):
    # The compiler makes each of them once, however many leaves have it.
    assert kernels(shape, 24) <= kernels(shape, 12) + 4


def kernels(shape, leaves):
    """Count the different fusions in the compiled mean of equal leaves."""
    tree = [jax.ShapeDtypeStruct((2, *shape), jnp.float32)] * leaves
    text = jax.jit(jax.vmap(mean, axis_name="data")).lower(tree).compile().as_text()
    different = set()
    for computation in re.split(r"\n(?=%[\w.\-]+ \(.*\) -> .*\{)", text):
        if "fused_computation" in computation.split("(")[0]:
            body = re.sub(r", metadata=\{.*?\}(?=\n|$)", "", computation)
            different.add(re.sub(r"%[\w.\-]+|param[_.\d]+", "", body))
    return len(different)


@pytest.mark.slow
def test_a_step_without_jit_has_the_bits_of_one_with_it():
    gradient = jax.random.normal(KEY, (2, 64, 64))
    compiled = jax.jit(jax.vmap(mean, axis_name="data"))(gradient)
    with jax.disable_jit():
        eager = jax.vmap(mean, axis_name="data")(gradient)
    np.testing.assert_array_equal(eager, compiled)
