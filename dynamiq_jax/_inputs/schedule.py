"""Schedule: which method in which step."""

import bisect
import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax._core import check_integer
from dynamiq_jax._inputs.compression import Choice, Compression

_LAST_STEP = 2**31 - 1  # steps are counted in int32


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Methods of the steps of a run, for `all_reduce_gradients`.

    >>> schedule = Schedule({0: "exact", 1000: "dynamiq:6", 5000: "dynamiq:5"})
    >>> schedule.phase(999), schedule.phase(1000)
    (0, 1)
    """

    # First step of each phase, from 0 on, to its method, name, policy or compression.
    phases: Mapping[int, Choice]

    def __post_init__(self):
        starts = list(self.phases) if isinstance(self.phases, Mapping) else []
        for start in starts:
            check_integer(f"phases={self.phases!r:.200}: step", start, 0, _LAST_STEP)
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(
                f"phases={self.phases!r:.200} are no phases. Give the first step of each, "
                "ascending from 0, to its method: {0: 'exact', 1000: 'dynamiq:5'}."
            )
        for method in self.phases.values():
            Compression.of(method)
        object.__setattr__(self, "phases", dict(self.phases))  # the user may change theirs

    @property
    def methods(self) -> tuple[Choice, ...]:
        """Method of each phase, in order."""
        return tuple(self.phases.values())

    def phase(self, step: int) -> int:
        """Return the number of the phase of a step."""
        check_integer("step", step, 0)
        return bisect.bisect(list(self.phases), step) - 1

    def traced_phase(self, step: Array) -> Array:
        """Return the number of the phase of a step that is known at run time only."""
        later = np.array(list(self.phases)[1:], np.int32)
        return jnp.sum(step >= later, dtype=jnp.int32)
