"""Check of a kernel at its first use on a kind of device, by a small message.

A compiler that nobody has tried may fail, hang or make wrong code. So before a kernel becomes part
of a program for this machine, all operations of its backend run once on a small message, on a
device of each kind that is here. Their outputs are compared with those of the base, or with digests
that are known in advance. If they differ, the default uses the base instead, with one warning, and
a backend that was named is refused. The result is kept for the rest of the process.

Processes decide by themselves, from devices of their own. Devices of one kind come to one result.
Where they do not, such as after a time-out on one host, `dynamiq_jax` compares the `refused`
backends of all processes before they send anything.

`DYNAMIQ_CHECK_KERNELS=0` switches the check off. Nothing is checked for the base, nor where kernels
are interpreted or compiled for another machine (`Backend.needs_check`).
"""

import dataclasses
import os
import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import known_outputs
from pallas_kernels._jax.own_thread import in_own_thread
from pallas_kernels.backend import Backend
from pallas_kernels.codec import LocalRows, Quantizer
from pallas_kernels.differences import compare
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

# Backend and kind of device to the reason why the backend is refused; None if it is right.
_reasons: dict[tuple[str, str], str | None] = {}
_lock = threading.Lock()


def reason_against(backend: Backend, base: Backend) -> str | None:
    """Check a backend on each kind of device of this process, unless that was done before.

    Args:
      backend: the backend.
      base: the base, with which it is compared.

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
    quantizer = Quantizer(group_size=32, spacing="quadratic", gap_ratio=2.7, rounding="correlated")
    return make_trial(quantizer, _WIDTHS, hard=_HARD, dense_width=_DENSE_WIDTH, apart=0)


def difference(backend: Backend, base: Backend) -> str | None:
    """Describe how a backend differs from the base in the small message; None if it does not.

    Messages are compared bit for bit. Norms and decoded values may differ by a rounding. A backend
    that rounds as the base does is compared with `known_outputs` instead.
    """
    if backend.rounds_as_base:
        return known_outputs.difference(backend)
    trial = small_trial()
    local, narrow = trial.local, trial.local.rows.astype(jnp.bfloat16)

    def send(other: LocalRows) -> Any:
        return dataclasses.replace(trial, other=other).send(base)

    messages = jax.jit(send)(trial.other)

    def outputs(of: Backend) -> dict[str, Any]:
        def run(local: LocalRows, narrow: Any, messages: Any) -> dict[str, Any]:
            calls = dataclasses.replace(trial, local=local).calls(messages)
            # Loads of both usual dtypes are tried. Another call takes the compiler longer, and
            # says little.
            of_narrow = local._replace(rows=narrow)
            calls["hop"] = dataclasses.replace(trial, local=of_narrow).calls(messages)["hop"]
            del calls["hop of several"]
            # The others are made of these.
            return {n: c.by(of) for n, c in calls.items() if not backend.derives(c.operation)}

        return jax.tree.map(np.asarray, jax.jit(run)(local, narrow, messages))

    of_base = outputs(base)
    for name, ours in outputs(backend).items():
        found = compare(ours, of_base[name], trial.layout, trial.widths)
        may_round = ours.dtype != np.uint8
        if found.differing and not (may_round and found.is_rounding):
            return f"{name}: {found.text}"
    return None


def _tried(backend: Backend, base: Backend, device: jax.Device) -> str | None:
    def run() -> str | None:
        with jax.default_device(device):
            return difference(backend, base)

    try:
        return in_own_thread(run, _PATIENCE)
    except Exception as error:  # of any kind: it is that of a compiler
        first_line = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first_line:.300}"


def _is_on() -> bool:
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise ValueError(
            f"{SWITCH}={value!r} is not possible. Give 1 to check kernels at their first use, or 0 "
            "to use them unchecked."
        )
    return value == "1"
