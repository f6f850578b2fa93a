"""JAX: a mesh axis that is named twice ended in an error about partition specs, of no argument."""

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, mesh_of, normal

try:
    dq.data_parallel(loss_fn, mesh=mesh_of(), axis_name=("data", "data"))(
        normal(4, 4), normal(4, 4)
    )
except ValueError as error:
    assert "axis_name=('data', 'data')" in str(error) and "different" in str(error), error
else:
    raise AssertionError("an axis was taken twice")
