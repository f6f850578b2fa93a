"""MaxText: a mesh that a configuration left out arrives as None far from where it was forgotten."""

import dynamiq_jax as dq
from tests.reports.setup import loss_fn, normal

for wrap in (dq.data_parallel, dq.value_and_grad):
    try:
        wrap(loss_fn, mesh=None, axis_name="data")(normal(4, 4), normal(4, 4))
    except (TypeError, ValueError) as error:
        assert "mesh=None" in str(error), error
    else:
        raise AssertionError("no mesh was taken for one")
