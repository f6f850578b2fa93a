"""The largest sums without NaN, as the page on troubleshooting has them."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynamiq_jax as dq
from dynamiq_jax.methods import METHODS
from dynamiq_jax.methods._registry import OF_RESEARCH

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "troubleshooting.md"
WORKERS = 4


@functools.cache
def limits() -> dict[str, float]:
    """Limits by method, from the table of the page."""
    section = PAGE.read_text().partition("## NaN\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \| ([\d.e]+) \|", section, re.M)
    return {name: float(limit) for names, limit in rows for name in re.findall(r"`(\w+)`", names)}


def test_the_table_has_methods_that_exist():
    assert len(limits()) == 9
    assert set(limits()) <= {*METHODS, *OF_RESEARCH}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS.own))
def test_sums_up_to_the_limit_are_finite_and_above_it_not(name):
    """Equal values, the hardest case."""
    reduce = dq.all_reduce_gradients("data", method=name)

    @jax.jit
    def mean(each):
        gradients = jnp.full((WORKERS, 128, 128), each)
        state = jax.vmap(reduce.init, axis_name="data")(gradients)
        return jax.vmap(reduce.update, axis_name="data")(gradients, state)[0]

    limit = limits().get(name, 3.3e38)
    assert np.all(np.isfinite(mean(np.float32(limit / WORKERS))))
    if name in limits():
        assert not np.all(np.isfinite(mean(np.float32(1.03 * limit / WORKERS))))
