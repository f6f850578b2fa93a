"""Custom calls of the native codec with arrays of any shapes."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels._native.build import SWITCH
from pallas_kernels._native.library import target

Name = str | int
Arrays = Mapping[Name, np.ndarray]  # by name or number, in the order of a call


def called(operation: str, operands: Arrays, results: Arrays, attributes: Mapping[str, int]) -> Any:
    """Run a custom call, with results of the shapes and dtypes of some arrays."""
    shapes = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results.values()]
    run = jax.ffi.ffi_call(target(operation), shapes)
    numbers = {name: np.int64(number) for name, number in attributes.items()}
    return jax.block_until_ready(run(*operands.values(), **numbers))


def with_and_without(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], *args: Any, calls: str = ""
) -> list[Any]:
    """Run a function with the native codec and without it: programs with `calls`, and without."""
    found = []
    for switch in ("1", "0"):
        monkeypatch.setenv(SWITCH, switch)
        lowered = jax.jit(lambda *given: function(*given)).lower(*args)  # traced again
        assert (target(calls) in lowered.as_text()) == (switch == "1")
        found.append(jax.tree.map(np.asarray, lowered.compile()(*args)))
    return found


def assert_shapes_are_checked(
    operation: str,
    operands: Arrays,
    results: Arrays,
    attributes: Mapping[str, int],
    is_free: Collection[tuple[Name, int]],
) -> None:
    """Change each dimension of each array, and one more: the call says which, and what to do.

    Args:
      operation: name of the call.
      operands: arrays that fit.
      results: arrays like its results.
      attributes: numbers that fit.
      is_free: names of arrays with the dimensions that may have any length.
    """
    called(operation, operands, results, attributes)
    remedy = r"\. Use implementation='xla' with DynamiQ, or set DYNAMIQ_NATIVE=0"
    message = rf"dynamiq_native_{operation}: \w+ (has the shape|have) .*{remedy}"
    for name, value in (*operands.items(), *results.items()):
        axes = [axis for axis in range(value.ndim) if (name, axis) not in is_free]
        for changed in (value[None], *(np.delete(value, -1, axis) for axis in axes)):
            given = [
                arrays | {name: changed} if name in arrays else arrays
                for arrays in (dict(operands), dict(results))
            ]
            with pytest.raises(jax.errors.JaxRuntimeError, match=message):
                called(operation, *given, attributes)
