"""Request: a compression, and what one function asks of it beside."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dynamiq_jax._core.validation import check_flag
from dynamiq_jax._inputs.compression import Choice, Compression
from dynamiq_jax._inputs.schedule import Schedule
from dynamiq_jax.methods import Method

RESET_STATES = "reset_states"  # metric of methods with state: share of workers with foreign states
# Metrics that any method has, on request.
MEASURED = (
    "error",
    "row_error",
    "worst_error",
    "worst_bucket",
    "norm",
    "non_finite",
    "bytes",
    "fallbacks",
)


@dataclasses.dataclass(frozen=True)
class Request:
    """Compression of one collective, and what its function can keep, returns and compares."""

    compression: Compression
    stateless: str = ""  # name of a function that cannot keep states of methods; otherwise empty
    measures: bool = False  # whether the function returns metrics
    # Values of the caller, by name, that have to be the same in all processes; see `agreement`.
    settings: tuple[tuple[str, Any], ...] = ()

    def with_specs(self, specs: Any) -> "Request":
        """Return the request with another split of the leaves."""
        return dataclasses.replace(
            self, compression=dataclasses.replace(self.compression, specs=specs)
        )

    @property
    def estimates(self) -> bool:
        """True if errors are estimated."""
        return self.measures or self.compression.max_error is not None

    def is_stateful(self, tree: Any) -> bool:
        """Return whether a method of a leaf of a tree carries state."""
        return any(method.is_stateful for method in self.compression.policy.used(tree))

    def metrics(self, used: Sequence[Method]) -> tuple[str, ...]:
        """Return the names of the metrics of some methods."""
        names = [name for method in used for name in method.metrics]
        names += [RESET_STATES for method in used if method.is_stateful]
        if self.measures:
            names += [name for method in used for name in method.details]
            names += MEASURED
        return tuple(dict.fromkeys(names))

    def check_state(self, method: Method) -> None:
        """Raise ValueError for a method whose state the function has nowhere to keep."""
        if self.stateless and method.is_stateful:
            remedy = (
                "Use dq.all_reduce_gradients inside jax.shard_map: its optimizer state holds it."
            )
            if self.stateless.startswith("islands"):
                remedy = "Give the method alone, and Islands(feedback=True) for error feedback."
            raise ValueError(
                f"method={method!r} carries state from step to step, which dq.{self.stateless} "
                f"cannot keep. {remedy}"
            )


def resolve(
    method: Choice,
    *,
    stateless: str = "",
    measures: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Request:
    """Resolve the argument `method` of a function; for the others see `Request`.

    Raises:
      ValueError: as `Compression`; a schedule; a method whose state cannot be kept.
    """
    if isinstance(method, Schedule):
        raise ValueError(
            f"method={method!r:.200} is a schedule, which needs the step: dq.all_reduce_gradients "
            "alone takes one. Give the method of one phase, such as schedule.methods[0]."
        )
    check_flag("with_metrics", measures)
    given = tuple((settings or {}).items())
    request = Request(Compression.of(method), stateless, measures, given)
    for each in request.compression.policy.known:
        request.check_state(each)
    return request
