"""A choice by platform, of which JAX traces what it lowers."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir


def here() -> str:
    """Return the name of the default platform, as `jax.lax.platform_dependent` has it."""
    return "cuda" if jax.default_backend() == "gpu" else jax.default_backend()


def platform_dependent(functions: Mapping[str, Callable[..., Any]], *args: Any) -> Any:
    """Choose a function by the platform, as `jax.lax.platform_dependent` does.

    That traces the functions of all platforms, and lowers one of them. This traces that of the
    default platform at once, and each of the others when a program is lowered for its platform, if
    ever. The codec in pure JAX takes several times as long to trace as the call of a kernel, and
    twice as long with the functions of all platforms.

    Args:
      functions: function of each platform, and of others under "default". All return results of the
        same types and structure. They are hashable, and do not depend on where they are traced.
      *args: pytrees of arrays that they take.
    """
    expected = here() if here() in functions else "default"
    if len(functions) == 1:
        return functions[expected](*args)
    leaves, structure = jax.tree.flatten(args)
    program, shapes = jax.make_jaxpr(functions[expected], return_shape=True)(*args)
    now = core.jaxpr_as_fun(program)

    def later(function: Callable[..., Any]) -> Callable[..., Any]:
        call = _Later(function, structure, like=program)
        return lambda *leaves: _later.bind(*leaves, call=call)

    by_platform: dict[str, Callable[..., Any]] = {
        platform: now if platform == expected else later(function)
        for platform, function in functions.items()
    }
    results = lax.platform_dependent(*leaves, **by_platform)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


@dataclasses.dataclass(frozen=True)
class _Later:
    """Function that is not traced yet, of the leaves of its arguments to those of its results."""

    function: Callable[..., Any]
    structure: Hashable  # of its arguments
    like: Any = dataclasses.field(compare=False)  # program with results of the same types
    batched: tuple[tuple[int | None, ...], ...] = ()  # axes of each `jax.vmap`, innermost first

    def __call__(self, *leaves: Any) -> Any:
        def of_leaves(*leaves: Any) -> list[Any]:
            args = jax.tree.unflatten(self.structure, leaves)
            return jax.tree.leaves(self.function(*args))

        function = of_leaves
        for axes in self.batched:
            function = jax.vmap(function, in_axes=axes)
        return function(*leaves)


def _batch(
    leaves: Sequence[Array], axes: Sequence[int | None], *, call: _Later
) -> tuple[list[Array], list[int]]:
    like = jax.make_jaxpr(jax.vmap(core.jaxpr_as_fun(call.like), in_axes=tuple(axes)))(*leaves)
    mapped = dataclasses.replace(call, like=like, batched=(*call.batched, tuple(axes)))
    results = _later.bind(*leaves, call=mapped)
    return results, [0] * len(results)


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], *, call: _Later) -> Any:
    return jax.jvp(call, list(primals), [ad.instantiate_zeros(each) for each in tangents])


_later = core.Primitive("traced_later")
_later.multiple_results = True
_later.def_impl(lambda *leaves, call: call(*leaves))
_later.def_abstract_eval(lambda *avals, call: list(call.like.out_avals))
ad.primitive_jvps[_later] = _differentiate
batching.primitive_batchers[_later] = _batch
mlir.register_lowering(
    _later, mlir.lower_fun(lambda *leaves, call: call(*leaves), multiple_results=True)
)
