"""States of methods, by their names."""

from typing import Any

import dynamiq_jax as dq


def only(state: dq.AllReduceState) -> Any:
    """The state of the method in a tree of one bucket."""
    (of_bucket,) = of_buckets(state).values()
    return of_bucket


def of_buckets(state: dq.AllReduceState) -> dict[str, Any]:
    """The states of the method by name, without the record of their worker."""
    return {name: state.method[name] for name in sorted(state.method) if name != "worker"}
