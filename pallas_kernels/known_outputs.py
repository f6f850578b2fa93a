"""Digests of what the base returns for small trials, for backends that round as it does anywhere.

A backend that is the default on CPUs is checked in every process, and the base takes its compiler
seconds. So its outputs are known in advance. They are those of a base whose products and sums round
once. Codes that have no meaning are left out, and so are the bits of NaN.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.backend import Backend
from pallas_kernels.codec import Quantizer
from pallas_kernels.differences import compare, without_meaningless
from pallas_kernels.trial import Trial, make_trial

_WIDTHS = (0, *range(2, 17)) * 5  # so many that several threads take part
_FIRST = "first messages"


class Known(NamedTuple):
    """A trial and digests of its outputs."""

    quantizer: Quantizer
    dtype: DTypeLike  # of the local rows
    digests: Mapping[str, str]  # of `_FIRST`, and of every call but `statistics`

    def trial(self) -> Trial:
        """Make the trial."""
        return make_trial(self.quantizer, _WIDTHS, dtype=np.dtype(self.dtype))


def _quantizer(group_size: int, gap_ratio: float, rounding: Any) -> Quantizer:
    return Quantizer(
        group_size=group_size, spacing="quadratic", gap_ratio=gap_ratio, rounding=rounding
    )


# Every group size, rounding and dtype, and uniform levels.
KNOWN = {
    "default": Known(
        _quantizer(32, 2.7, "correlated"),
        jnp.float32,
        {
            _FIRST: "8676d57a35b92891",
            "compress": "6e191b0ec579a345",
            "decompress": "d079581d6acf01ea",
            "decompress of sums": "abeff4d9910156f3",
            "decompress_accumulate": "3a096c77ea8045ab",
            "hop": "9df9fb2cdb2a2e29",
            "hop of several": "d7df00d0e7f085e8",
            "order": "44af0d10033b6dd4",
            "scales of sums": "e5bbe3dc051458f4",
        },
    ),
    "uniform": Known(
        _quantizer(8, 1.0, "independent"),
        jnp.bfloat16,
        {
            _FIRST: "a428df3fadcfdb7b",
            "compress": "e180718a2ff10f10",
            "decompress": "66c938e45cf8fb55",
            "decompress of sums": "3925d030a0255743",
            "decompress_accumulate": "17adc9ce7aa12d03",
            "hop": "b8878b8d232206ff",
            "hop of several": "f726b62e7ea56a48",
            "order": "44af0d10033b6dd4",
            "scales of sums": "43fa717dbadd8ab0",
        },
    ),
    "narrow gaps": Known(
        _quantizer(16, 1.3, "nearest"),
        jnp.float16,
        {
            _FIRST: "5c0451c6c10ca638",
            "compress": "9a682479c8f7b080",
            "decompress": "6f5b15957086c265",
            "decompress of sums": "f325975d19063243",
            "decompress_accumulate": "ea3b4b182b1254c1",
            "hop": "a81e9b5a164dec8f",
            "hop of several": "89c385738230c5f4",
            "order": "44af0d10033b6dd4",
            "scales of sums": "633a6ba5624c93e1",
        },
    ),
}


def difference(backend: Backend) -> str | None:
    """Describe how a backend differs from the base in the trials; None if it does not.

    Messages and decoded values are compared bit for bit, and norms up to the order of their sum.
    """
    for name, known in KNOWN.items():
        trial = known.trial()
        found = outputs(backend, trial, own=backend)
        norms = found.pop("statistics")
        of_norms = compare(norms, _norms(trial), trial.layout, trial.widths)
        if not of_norms.is_rounding:
            return f"statistics of {name!r} rows: {of_norms.text}"
        for output, value in found.items():
            if digest(value, trial) != known.digests[output]:
                return f"{output} of {name!r} rows: bytes are not those of the base"
    return None


def outputs(backend: Backend, trial: Trial, *, own: Backend) -> dict[str, Any]:
    """Compute outputs of a trial, whose first messages are of the same backend.

    Args:
      backend: the backend that runs the operations.
      trial: their inputs.
      own: the backend whose own operations are run, and those that it does not make of others.
    """

    def send(other: Any) -> Any:
        return dataclasses.replace(trial, other=other).send(backend)

    def run(local: Any, messages: Any) -> dict[str, Any]:
        calls = dataclasses.replace(trial, local=local).calls(messages)
        return {n: c.by(backend) for n, c in calls.items() if not own.derives(c.operation)}

    sent = np.asarray(jax.jit(send)(trial.other))
    # With other scales, codes without a meaning would decode to something.
    messages = np.stack([without_meaningless(m, trial.layout, trial.widths) for m in sent])
    found = jax.jit(run)(trial.local, messages)
    return {_FIRST: messages, **jax.tree.map(np.asarray, found)}


def digest(output: Any, trial: Trial) -> str:
    """Return a digest of the bytes of an output that have a meaning."""
    output = np.asarray(output)
    if output.dtype == np.uint8 and output.ndim == 1:
        output = without_meaningless(output, trial.layout, trial.widths)
    elif output.dtype == np.float32:
        output = np.where(np.isnan(output), np.float32(np.nan), output)
    return hashlib.sha256(output.tobytes()).hexdigest()[:16]


def _norms(trial: Trial) -> Any:
    rows = np.asarray(trial.local.rows).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.sqrt(np.sum(rows * rows, axis=1)).astype(np.float32)
