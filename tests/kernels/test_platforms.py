"""A choice by platform, of which JAX traces what it lowers."""

import collections
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels._jax import platforms
from pallas_kernels._jax.platforms import platform_dependent

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)
FACTORS = {"cpu": 2, "default": 3}


@dataclasses.dataclass(frozen=True)
class Scale:
    """The same results with a factor of its own, and the number of its traces."""

    factor: int
    traces: collections.Counter = dataclasses.field(compare=False)

    def __call__(self, tree, number):
        self.traces[self.factor] += 1
        return {"scaled": tree["x"] * np.float32(self.factor), "number": jnp.asarray(number) + 1}


@pytest.fixture
def traces():
    return collections.Counter()


def chosen(traces, expected, tree, number=1):
    functions = {name: Scale(factor, traces) for name, factor in FACTORS.items()}
    with mock.patch.object(platforms, "here", lambda: expected):
        return platform_dependent(functions, tree, number)


def lowered(function, *args, platform):
    return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(("expected", "traced"), [("cpu", {2: 1}), ("default", {2: 1, 3: 1})])
def test_one_function_alone_is_traced_if_it_is_the_expected_one(expected, traced, traces):
    got = jax.jit(functools.partial(chosen, traces, expected))({"x": VALUES})
    np.testing.assert_array_equal(got["scaled"], 2 * VALUES)
    assert got["number"] == 2
    assert traces == traced
    # One function needs no choice.
    got = platform_dependent({"default": Scale(3, traces)}, {"x": VALUES}, 0)
    np.testing.assert_array_equal(got["scaled"], 3 * VALUES)


@pytest.mark.parametrize(("platform", "factor"), [("cpu", 2), ("tpu", 3), ("cuda", 3)])
def test_programs_of_other_platforms_have_theirs(platform, factor, traces):
    text = lowered(functools.partial(chosen, traces, "cpu"), {"x": VALUES}, platform=platform)
    assert f"dense<{factor:e}>" in text


def test_calls_that_are_alike_are_lowered_once(traces):
    def twice(tree):
        first = chosen(traces, "default", tree)
        return chosen(traces, "default", {"x": first["scaled"]})

    got = jax.jit(twice)({"x": VALUES})
    np.testing.assert_array_equal(got["scaled"], 4 * VALUES)
    assert traces == {3: 2, 2: 1}


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("axes", [(0, None), (1, None), (1, 0)])
def test_a_vmap_of_a_vmap_is_that_of_each_function(axes, platform, traces):
    """With arrays in which only some have the axis."""
    other = np.arange(3, dtype=np.float32)

    def inner(row, value):
        def of_numbers(x, y):
            return chosen(traces, "default", {"x": x * y})["scaled"]

        return jax.vmap(of_numbers, (0, None))(row, value)

    way = jax.vmap(inner, axes)
    values = other[: 3 if axes[0] else 2] if axes[1] == 0 else np.float32(5)
    expected = jax.vmap(lambda row, value: 2 * row * value, axes)(VALUES, values)
    np.testing.assert_array_equal(jax.jit(way)(VALUES, values), expected)
    assert lowered(way, VALUES, values, platform=platform)


@pytest.mark.parametrize("check_vma", [True, False])
def test_values_vary_over_the_axes_of_their_arrays(check_vma, traces, data_mesh):
    @functools.partial(
        jax.shard_map,
        mesh=data_mesh(2),
        in_specs=P("data"),
        out_specs=(P("data"), P()),
        check_vma=check_vma,
    )
    def local(rows):
        got = chosen(traces, "default", {"x": rows})
        return got["scaled"], got["number"]

    scaled, number = jax.jit(local)(VALUES)
    np.testing.assert_array_equal(scaled, 2 * VALUES)
    assert number == 2


def test_derivatives_are_those_of_the_function_that_runs(traces):
    """Also of one that is traced later, beside a number that has none."""

    def total(x):
        return jnp.sum(chosen(traces, "default", {"x": x})["scaled"] ** 2)

    np.testing.assert_allclose(jax.jit(jax.grad(total))(VALUES), 8 * VALUES)
    by_row = jax.vmap(jax.grad(total))(VALUES)
    np.testing.assert_allclose(by_row, 8 * VALUES)


def test_it_runs_without_jit(traces):
    np.testing.assert_array_equal(chosen(traces, "default", {"x": VALUES})["scaled"], 2 * VALUES)
    with jax.disable_jit():
        got = chosen(traces, "default", {"x": VALUES})
    np.testing.assert_array_equal(got["scaled"], 2 * VALUES)
