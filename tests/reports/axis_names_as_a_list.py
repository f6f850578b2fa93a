"""JAX: several axes in a list, which some functions take and others do not."""

import jax

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, mesh_of, normal

for wrap in (dq.data_parallel, dq.value_and_grad):
    try:
        wrap(loss_fn, mesh=mesh_of(), axis_name=["data"])(normal(4, 4), normal(4, 4))
    except (ValueError, TypeError) as error:
        assert "axis_name=['data']" in str(error) and "tuple" in str(error), error
    else:
        raise AssertionError("a list was taken")
try:
    dq.mean_of_replicas(normal(2, 4), ["data"], key=jax.random.key(0), mesh=mesh_of())
except ValueError as error:
    assert "axis_name=['data']" in str(error), error
else:
    raise AssertionError("a list was taken")
