"""Parts that collectives of one's own are made of.

A `Collective` says how leaves are cut into buckets, and how one bucket is sent. `run` plans it for
a tree, checks the plan between processes, and sends the buckets one after the other:

    outcome = run(MyCollective(find_axes("data")), tree, key, resolve("dynamiq:4"))

A train step that keeps something between two collectives makes the plan itself, with `plan_tree`
and `check`, and sends each group of its buckets by `send_group`. Its transfers keep the order of
those of other calls by tokens: see `after`.
"""

from dynamiq_jax._buckets.axes import Axes, AxisName, axis_names, find_axes
from dynamiq_jax._buckets.buckets import Bucket, CutRules
from dynamiq_jax._buckets.exact import all_reduce as all_reduce_exact
from dynamiq_jax._buckets.exact import bytes_sent as exact_bytes_sent
from dynamiq_jax._buckets.order import after, last_token, remember, token_of
from dynamiq_jax._buckets.scopes import EXACT, scope
from dynamiq_jax._check.agreement import check as check_agreement
from dynamiq_jax._check.check import check, check_plan
from dynamiq_jax._collectives.collective import Collective, Leaves
from dynamiq_jax._collectives.halves import AllGather, ReduceScatter
from dynamiq_jax._core import check_optimizer
from dynamiq_jax._core.naming import spelled
from dynamiq_jax._inputs.checks import check_chunked, check_floating, check_key, named_leaves
from dynamiq_jax._inputs.compression import Choice, split_route
from dynamiq_jax._inputs.request import Request, resolve
from dynamiq_jax._inputs.shards import managed_axes
from dynamiq_jax._plan.plan import Plan, plan_tree
from dynamiq_jax._plan.recording import record
from dynamiq_jax._plan.state_names import check_names
from dynamiq_jax._plan.without_arrays import plan_without_arrays
from dynamiq_jax._run.cuts import cut, joined, pieces_of
from dynamiq_jax._run.driver import run
from dynamiq_jax._run.loop import key_of, send_group, transfer_of
from dynamiq_jax.training._params import check_like, check_shared_params
from pallas_kernels._jax.compat import varying_axes
from pallas_kernels._jax.dependencies import never

# A collective, and one call of it.
__all__ = ["AllGather", "Collective", "Leaves", "ReduceScatter", "run"]
__all__ += ["Axes", "AxisName", "Bucket", "CutRules", "axis_names", "find_axes"]
__all__ += ["managed_axes", "named_leaves"]
__all__ += ["Choice", "Request", "check_chunked", "resolve", "spelled", "split_route"]
# Exact leaves, and the names of operations in profiles.
__all__ += ["EXACT", "all_reduce_exact", "exact_bytes_sent", "scope"]
# A train step that plans, checks and sends itself.
__all__ += ["Plan", "check", "check_agreement", "check_plan", "plan_tree", "plan_without_arrays"]
__all__ += ["cut", "joined", "key_of", "pieces_of", "record", "send_group", "transfer_of"]
__all__ += ["after", "last_token", "never", "remember", "token_of"]
__all__ += ["check_like", "check_names", "check_shared_params"]
# Arguments of a function that calls collectives of JAX itself.
__all__ += ["check_floating", "check_key", "check_optimizer", "varying_axes"]
