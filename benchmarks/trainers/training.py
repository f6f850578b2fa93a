"""A short training of another package, with a place for a wrap of its step."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

# Function that is called where a package makes its step, with the step and the name of an axis. It
# returns the step to run, or the same one. Keywords are options of `dq.compress`, and for a global
# step `mesh=` and `parameters=`, a function from its arguments to the arrays that it trains.
Wrap = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class PackageTraining:
    """A short training of a package."""

    title: str
    package: str  # its name in the package index
    module: str  # its name in Python
    environment: str  # of `make test-trainers`, that has it
    place: str  # where the wrap is put
    train: Callable[[Wrap], list[float]]  # returns the losses of its steps
    num_devices: int = 2
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of its process
