"""JAX: a notebook loads a library again, and types and registered nodes exist twice."""

import sys

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, mesh_of, normal

names = [name for name in sys.modules if name.split(".")[0] in ("dynamiq_jax", "pallas_kernels")]
loaded = {name: sys.modules.pop(name) for name in names}
try:
    import dynamiq_jax as again

    assert again is not dq
    placed = NamedSharding(mesh_of(), P()), NamedSharding(mesh_of(), P("data"))
    step = jax.jit(jax.grad(loss_fn), in_shardings=placed)
    w, x = normal(64, 32), normal(8, 64, seed=1)
    assert again.vnmse(again.compress(step, "data", method="bf16")(w, x), step(w, x)) < 1e-4
finally:
    for name in [
        name for name in sys.modules if name.split(".")[0] in ("dynamiq_jax", "pallas_kernels")
    ]:
        del sys.modules[name]
    sys.modules.update(loaded)
