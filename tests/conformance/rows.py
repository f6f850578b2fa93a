"""The table of methods for the conformance tests: one row a method, with the bounds of its error.

`--rows MODULE:NAME` runs the laws on the rows of another package, such as those of research:
`research.tests.rows:RESEARCH`.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Literal

import dynamiq_jax as dq
from dynamiq_jax.methods import BlockInt, ErrorFeedback, Method, resolve_method


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One method and the bounds of its laws, for sums of four workers with heavy tails."""

    method: Method
    # Least and largest vNMSE of one sum. A ring has two compressions more than all to all.
    error: tuple[float, float]
    # Use of the key: none; noise, whose mean is the sum; or a choice, which is biased.
    key: Literal["ignored", "noise", "choice"] = "ignored"
    bias: float = 0.0  # most of the vNMSE that the mean over keys keeps, beside one part in keys
    gain: tuple[float, float] = (-1e-3, 1e-3)  # least and largest of the mean over keys, less one
    reach: int | None = None  # coordinates that are NaN with one of them, where it is fixed
    most_lost: int | None = None  # most of these coordinates, where it is not fixed
    recodes: bool = False  # whether each hop decodes, adds and encodes, with errors of one kind
    stays: bool = False  # whether a value that is not finite changes nothing beyond its reach
    # False if sums of squares or products may be added in another order on a mesh.
    same_bits: bool = True
    draws: bool = False  # whether it draws, indexes or counts in a way of its own
    floats: bool = False  # whether its messages are float32, and not integers
    mesh: tuple[str, ...] = ("ring",)  # topologies of the programs that are compiled for a mesh


def blocks(name: str, *error: float, **fields) -> Row:
    """Return the row of a method of blocks of 32."""
    fields = {"reach": 32, "recodes": True, "stays": True} | fields
    return Row(method=resolve_method(name), error=error, **fields)


PRODUCT = {
    # The order of float32 additions.
    "exact": Row(method=dq.methods.Exact(), error=(0, 1e-12), reach=1, stays=True, floats=True),
    # Half a unit in the last of 8 bits.
    "bf16": Row(
        method=dq.methods.BF16(), error=(2.8e-6, 7e-6), reach=1, stays=True, mesh=("all_to_all",)
    ),
    # Half of 1/127 of the largest value in a block.
    "blockint": blocks("blockint", 5e-5, 1.1e-4),
    # Formats of one class differ in their elements alone.
    "mxfp8": blocks("mxfp8", 9e-4, 2.5e-3, mesh=()),
    "mxfp6": blocks("mxfp6", 9e-4, 2.2e-3, mesh=()),
    "mxfp4": blocks("mxfp4", 1.5e-2, 4e-2, mesh=("ring",)),
    "mxint8": blocks("mxint8", 1e-4, 2.6e-4, mesh=()),
    # On a mesh it has two widths, in `test_mesh.py`.
    "dynamiq": Row(
        method=dq.DynamiQ(), error=(9e-4, 1.9e-3), key="noise", bias=0.04, reach=256, mesh=()
    ),
    "paper": Row(
        method=dq.DynamiQ.paper(),
        error=(2.8e-3, 5.2e-3),
        key="noise",
        bias=0.04,
        reach=256,
        mesh=(),
    ),
    # The error of the method inside, in a first step.
    "error_feedback": Row(
        method=ErrorFeedback(inner=BlockInt()), error=(5e-5, 1.3e-4), reach=32, mesh=("all_to_all",)
    ),
}


_chosen = PRODUCT


def choose(name: str) -> None:
    """Run the laws on the rows of a name, MODULE:NAME, in place of those of the product."""
    global _chosen
    module, _, attribute = name.partition(":")
    _chosen = getattr(importlib.import_module(module), attribute)


def chosen() -> Mapping[str, Row]:
    """Return the rows of this run."""
    return _chosen
