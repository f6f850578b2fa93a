"""A raw key of four numbers, of the generator "rbg", given where raw keys of two are the default.

jaxtyping#388: raw keys differ in length with the generator, which their type does not show.
"""

import jax

import dynamiq_jax as dq
from tests.reports.setup import normal, on_workers

key = jax.random.PRNGKey(0, impl="rbg")
try:
    on_workers(lambda g: dq.pmean(g, "data", key=key), normal(2, 4096))
except ValueError as error:
    assert "key has shape (4,)" in str(error) and "impl=" in str(error), error
else:
    raise AssertionError("a raw key of another generator was taken")
