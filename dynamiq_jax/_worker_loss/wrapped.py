"""Registry of the functions that wrap a loss, from which `check_data_parallel` finds the loss."""

import weakref
from collections.abc import Callable
from typing import Any

from dynamiq_jax._worker_loss.worker_loss import WorkerLoss

# Weak references: a function that is no longer used is forgotten with its loss.
_losses: weakref.WeakKeyDictionary[Callable[..., Any], Callable[[], WorkerLoss | None]] = (
    weakref.WeakKeyDictionary()
)


def register(wrapped: Callable[..., Any], work: WorkerLoss) -> None:
    """Record the loss that a function wraps."""
    _losses[wrapped] = weakref.ref(work)


def loss_of(wrapped: Any) -> WorkerLoss | None:
    """Return the loss that a function wraps, or None."""
    try:
        return _losses[wrapped]()
    except (KeyError, TypeError):  # an object of which no weak reference can be made
        return None
