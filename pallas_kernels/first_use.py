"""Check of a kernel at its first use on a kind of device, by a small message.

A compiler that nobody has tried may fail, hang or make wrong code. So before a kernel becomes part
of a program for this machine, all operations of its backend run once on a small message, on a
device of each kind that is here. Their outputs are compared with those of the base. If they differ,
the default uses the base instead, with one warning, and a backend that was named is refused. The
result is kept for the rest of the process.

A backend that rounds as the base does is the default on CPUs, so that it is checked in every
process, and the base takes its compiler seconds. So digests of outputs are known in advance: those
of a base whose products and sums round once, without what has no meaning, and the bits of NaN.

Processes decide by themselves, from devices of their own. Devices of one kind come to one result.
Where they do not, such as after a time-out on one host, `dynamiq_jax` compares the `refused`
backends of all processes before they send anything.

`DYNAMIQ_CHECK_KERNELS=0` switches the check off. Nothing is checked for the base, nor where kernels
are interpreted or compiled for another machine (`Backend.needs_check`).
"""

import dataclasses
import functools
import hashlib
import os
import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._jax.own_thread import first_line, in_own_thread
from pallas_kernels.backend import Backend
from pallas_kernels.codec import Quantizer
from pallas_kernels.differences import compare, without_meaningless
from pallas_kernels.trial import Trial, make_trial

SWITCH = "DYNAMIQ_CHECK_KERNELS"
_PATIENCE = 120.0  # seconds for the compiler and the run of one backend on one kind of device

# All widths, and four rows more of one width. What differs between correct backends is left out:
# subnormal numbers, sums of several messages, and values that another rounding of a reciprocal or a
# multiply-add could move to the next code. Wide codes are finer than such roundings, so that their
# rows have few values. A received row that is alone in its sum has its maximum at the limit between
# two scales, so that both workers are hard in the same places.
_WIDTHS = (0, *range(2, 17), 5, 5, 5, 5)
_HARD = ("zeros", "NaN", "tiny", "Inf", "many zeros")
_DENSE_WIDTH = 7

# Quantizers and dtypes of the local rows of trials whose outputs are known. There are so many rows
# that several threads take part.
_quantizer = functools.partial(Quantizer, spacing="quadratic")
KNOWN = {
    "default": (_quantizer(group_size=32, gap_ratio=2.7, rounding="correlated"), jnp.float32),
    "uniform": (_quantizer(group_size=8, gap_ratio=1.0, rounding="independent"), jnp.bfloat16),
    "narrow gaps": (_quantizer(group_size=16, gap_ratio=1.3, rounding="nearest"), jnp.float16),
}
_KNOWN_WIDTHS = (0, *range(2, 17)) * 5
_FIRST = "first messages"
# Of each of these trials.
DIGESTS = {
    _FIRST: ("8676d57a35b92891", "a428df3fadcfdb7b", "5c0451c6c10ca638"),
    "compress": ("6e191b0ec579a345", "e180718a2ff10f10", "9a682479c8f7b080"),
    "decompress": ("d079581d6acf01ea", "66c938e45cf8fb55", "6f5b15957086c265"),
    "decompress of sums": ("abeff4d9910156f3", "3925d030a0255743", "f325975d19063243"),
    "decompress_accumulate": ("3a096c77ea8045ab", "17adc9ce7aa12d03", "ea3b4b182b1254c1"),
    "hop": ("9df9fb2cdb2a2e29", "b8878b8d232206ff", "a81e9b5a164dec8f"),
    "hop of several": ("d7df00d0e7f085e8", "f726b62e7ea56a48", "89c385738230c5f4"),
    "order": ("44af0d10033b6dd4",) * len(KNOWN),
    "scales of sums": ("e5bbe3dc051458f4", "43fa717dbadd8ab0", "633a6ba5624c93e1"),
}

# Backend and kind of device to the reason why the backend is refused; None if it is right.
_reasons: dict[tuple[str, str], str | None] = {}
_lock = threading.Lock()


def reason_against(backend: Backend, base: Backend) -> str | None:
    """Check a backend on each kind of device of this process, unless that was done before.

    Returns:
      The reason why the backend is refused; None if it is right, or is not checked.
    """
    if not (backend.needs_check() and _is_on()):
        return None
    devices = {device.device_kind: device for device in jax.local_devices()}
    with _lock:
        new = {k: each for k, each in devices.items() if (backend.name, k) not in _reasons}
        for kind, device in new.items():
            _reasons[backend.name, kind] = _tried(backend, base, device)
        reasons = {kind: _reasons[backend.name, kind] for kind in devices}
    for kind, reason in reasons.items():
        if reason and kind in new:
            warnings.warn(
                f"The kernels of {backend.name!r} are not used on {kind}: {reason}. The base, "
                f"{base.name!r}, takes their place: its results are right, and it is slower. "
                "`dynamiq-jax verify` says more.",
                stacklevel=2,
            )
    return next((f"on {kind}, {reason}" for kind, reason in reasons.items() if reason), None)


def refused() -> tuple[str, ...]:
    """Return the names of the backends that were refused in this process so far."""
    with _lock:
        return tuple(sorted({name for (name, _), reason in _reasons.items() if reason}))


def small_trial() -> Trial:
    """Return the message that is compared."""
    quantizer, _ = KNOWN["default"]
    return make_trial(quantizer, _WIDTHS, hard=_HARD, dense_width=_DENSE_WIDTH, apart=0)


def known_trial(name: str) -> Trial:
    """Return a trial of `KNOWN`."""
    quantizer, dtype = KNOWN[name]
    return make_trial(quantizer, _KNOWN_WIDTHS, dtype=np.dtype(dtype))


def difference(backend: Backend, base: Backend) -> str | None:
    """Describe how a backend differs from the base; None if it does not.

    Messages are compared bit for bit. Norms and decoded values may differ by a rounding, but for
    values of a backend that rounds as the base does.
    """
    if backend.rounds_as_base:
        return _difference_from_known(backend)
    trial = small_trial()
    messages = trial.send(base)
    ours, of_base = (
        _outputs(trial, messages, each, own=backend, is_short=True) for each in (backend, base)
    )
    for name in ours:
        found = compare(ours[name], of_base[name], trial.layout, trial.widths)
        may_round = ours[name].dtype != np.uint8
        if found.differing and not (may_round and found.is_rounding):
            return f"{name}: {found.text}"
    return None


def _outputs(
    trial: Trial, messages: Any, backend: Backend, *, own: Backend, is_short: bool = False
) -> dict[str, Any]:
    """Compute the outputs of the calls that a backend, `own`, does not make of others."""

    def run(local: Any, narrow: Any, messages: Any) -> dict[str, Any]:
        calls = dataclasses.replace(trial, local=local).calls(messages)
        if is_short:
            # Loads of both usual dtypes are tried. Another call takes the compiler longer, and says
            # little.
            of_narrow = dataclasses.replace(trial, local=local._replace(rows=narrow))
            calls["hop"] = of_narrow.calls(messages)["hop"]
            del calls["hop of several"]
        return {n: c.by(backend) for n, c in calls.items() if not own.derives(c.operation)}

    narrow = trial.local.rows.astype(jnp.bfloat16)
    return jax.tree.map(np.asarray, jax.jit(run)(trial.local, narrow, messages))


def _difference_from_known(backend: Backend) -> str | None:
    for number, name in enumerate(KNOWN):
        trial = known_trial(name)
        found = known_outputs(backend, trial, own=backend)
        rows = np.asarray(trial.local.rows).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.sqrt(np.sum(rows * rows, axis=1)).astype(np.float32)
        of_norms = compare(found.pop("statistics"), norms, trial.layout, trial.widths)
        if not of_norms.is_rounding:
            return f"statistics of {name!r} rows: {of_norms.text}"
        for output, value in found.items():
            if digest(value, trial) != DIGESTS[output][number]:
                return f"{output} of {name!r} rows: bytes are not those of the base"
    return None


def known_outputs(backend: Backend, trial: Trial, *, own: Backend) -> dict[str, Any]:
    """Compute the outputs of a trial whose first messages are of the same backend."""
    sent = np.asarray(trial.send(backend))
    # With other scales, codes without a meaning would decode to something.
    messages = np.stack([without_meaningless(m, trial.layout, trial.widths) for m in sent])
    return {_FIRST: messages, **_outputs(trial, messages, backend, own=own)}


def digest(output: Any, trial: Trial) -> str:
    """Return a digest of the bytes of an output that have a meaning."""
    output = np.asarray(output)
    if output.dtype == np.uint8 and output.ndim == 1:
        output = without_meaningless(output, trial.layout, trial.widths)
    elif output.dtype == np.float32:
        output = np.where(np.isnan(output), np.float32(np.nan), output)
    return hashlib.sha256(output.tobytes()).hexdigest()[:16]


def _tried(backend: Backend, base: Backend, device: jax.Device) -> str | None:
    def run() -> str | None:
        with jax.default_device(device):
            return difference(backend, base)

    try:
        return in_own_thread(run, _PATIENCE)
    except Exception as error:  # of any kind: it is that of a compiler
        return first_line(error)


def _is_on() -> bool:
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise ValueError(
            f"{SWITCH}={value!r} is not possible. Give 1 to check kernels at their first use, or 0 "
            "to use them unchecked."
        )
    return value == "1"
