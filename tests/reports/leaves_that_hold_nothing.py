"""optax: parameters of size 0, such as those of a layer without units, and None in their place."""

import dataclasses

import jax
import jax.numpy as jnp

import dynamiq_jax as dq
from tests.reports.setup import on_workers

tree = {
    "empty": jnp.zeros((2, 0, 128)),
    "none": None,
    "number": jnp.array([1.0, 3.0]),
    "narrow": jnp.ones((2, 3, 0), jnp.bfloat16),
}
options = dq.Compression(exact_below=0)
for method in ("dynamiq:5", "mxfp8", "exact"):
    mean = on_workers(
        lambda t, m=method: dq.pmean(
            t, "data", key=jax.random.key(0), method=dataclasses.replace(options, method=m)
        ),
        tree,
        check_vma=True,
    )
    assert jax.tree.structure(mean) == jax.tree.structure(tree), method
    assert mean["empty"].shape == (2, 0, 128) and mean["narrow"].dtype == jnp.bfloat16, method
    assert (mean["number"] == 2).all(), (method, mean["number"])
