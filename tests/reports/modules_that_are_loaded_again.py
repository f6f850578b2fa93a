"""JAX: a notebook loads a library again, and types and registered nodes exist twice."""

import sys

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, mesh_of, normal

names = [name for name in sys.modules if name.split(".")[0] in ("dynamiq_jax", "pallas_kernels")]
loaded = {name: sys.modules.pop(name) for name in names}
try:
    import dynamiq_jax as again

    assert again is not dq
    wrapped = again.data_parallel(loss_fn, mesh=mesh_of(), axis_name="data", method="bf16")
    w, x = normal(64, 32), normal(8, 64, seed=1)
    assert abs(wrapped(w, x) - loss_fn(w, x)) < 1e-4 * loss_fn(w, x)
finally:
    for name in [
        name for name in sys.modules if name.split(".")[0] in ("dynamiq_jax", "pallas_kernels")
    ]:
        del sys.modules[name]
    sys.modules.update(loaded)
