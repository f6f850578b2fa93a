"""Which backend runs an operation."""

from typing import Literal

Implementation = Literal["xla"]


def resolve(implementation: str | None) -> Implementation:
    """The backend to run: `None` picks the fastest there is for the platform, a name is taken at
    its word or refused.

    Raises:
      ValueError: the named backend does not exist.
    """
    if implementation in (None, "xla"):
        return "xla"
    raise ValueError(
        f"implementation={implementation!r} is not a backend of this version. Use None (the "
        "fastest that there is) or 'xla'."
    )
