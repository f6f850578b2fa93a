"""Policy: the method of each leaf of a tree."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dynamiq_jax._core.naming import spelled
from dynamiq_jax.methods import Method, resolve_method
from pallas_kernels._jax.compat import override

UNCOMPRESSED = "uncompressed"  # in place of a method, for leaves that the collectives of JAX send
# Patterns of paths to methods, the first that matches counts; or a function of a path and a leaf.
Rules = Mapping[str, Method | str] | Callable[[str, Any], Method | str]


@dataclasses.dataclass(frozen=True)
class Policy:
    """Method of each leaf: one for all, the first pattern that its path matches, or a function.

    Paths have the names and numbers on the way to a leaf, joined by "/", such as
    "layers/0/attention/kernel". A pattern is a regular expression that is searched for in a path.
    """

    everywhere: Method | None = None
    patterns: tuple[tuple[str, Method | None], ...] = ()  # None for leaves that stay uncompressed
    function: Callable[[str, Any], Method | str] | None = None
    # Whether a pattern without a leaf is an error. A part of a tree may have leaves of some alone.
    all_used: bool = dataclasses.field(default=True, compare=False)

    @override
    def __repr__(self) -> str:
        if self.function is not None:
            return repr(self.function)
        if self.everywhere is not None:
            return spelled(self.everywhere)
        pairs = (
            f"{pattern!r}: {spelled(method) if method else repr(UNCOMPRESSED)}"
            for pattern, method in self.patterns
        )
        return f"{{{', '.join(pairs)}}}"

    @staticmethod
    def of(method: Method | str | Rules) -> "Policy":
        """Make the policy of an argument `method`.

        Raises:
          ValueError: an unknown name, or no valid pattern.

        >>> Policy.of({"norm": "uncompressed", ".*": "dynamiq:5"}).patterns[0]
        ('norm', None)
        """
        if isinstance(method, Mapping):
            for pattern in method:
                try:
                    if not isinstance(pattern, str):
                        raise TypeError("it is no string")
                    re.compile(pattern)
                except (re.error, TypeError) as error:
                    raise ValueError(
                        f"method={dict(method)!r:.200}: {pattern!r} is not a regular expression: "
                        f"{error}. Give one that is searched for in paths such as "
                        "'layers/0/attention/kernel'."
                    ) from None
            if [*method] == [".*"]:  # the same for all leaves
                return Policy.of(method[".*"])
            pairs = ((pattern, _method_of(each)) for pattern, each in method.items())
            return Policy(patterns=tuple(pairs))
        kind: Any = method
        if isinstance(kind, type) and issubclass(kind, Method):
            name = kind.__name__
            raise ValueError(f"method={name} is a class. Give an instance, such as {name}().")
        if not isinstance(method, Method | str) and callable(method):
            return Policy(function=method)
        if method == UNCOMPRESSED:
            return Policy(patterns=((".*", None),), all_used=False)
        return Policy(everywhere=resolve_method(method))

    @property
    def known(self) -> tuple[Method, ...]:
        """Methods that are known before there is a tree."""
        if self.everywhere is not None:
            return (self.everywhere,)
        methods = (method for _, method in self.patterns)
        return tuple(dict.fromkeys(method for method in methods if method is not None))

    def methods(self, tree: Any) -> list[Method | None]:
        """Return the method of every leaf in flattened order; None for uncompressed leaves.

        Raises:
          ValueError: a leaf without a pattern, or a pattern without a leaf in a tree that has some.
        """
        paths, leaves = paths_of(tree), jax.tree.leaves(tree)
        if self.everywhere is not None:
            return [self.everywhere] * len(paths)
        if self.function is not None:
            return [_method_of(each) for each in map(self.function, paths, leaves)]
        return self._of_patterns(paths, leaves)

    def used(self, tree: Any) -> tuple[Method, ...]:
        """Return the methods of a tree, each once."""
        return tuple(dict.fromkeys(method for method in self.methods(tree) if method is not None))

    def _of_patterns(self, paths: Sequence[str], leaves: Sequence[Any]) -> list[Method | None]:
        methods = dict(self.patterns)
        first = [next((each for each in methods if re.search(each, path)), None) for path in paths]
        for path, leaf, pattern in zip(paths, leaves, first, strict=True):
            dtype = getattr(leaf, "dtype", type(leaf))
            if pattern is None and jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(
                    f"method={self!s:.200} has no pattern for the leaf {path!r}. Add one, or "
                    "'.*' as the last one, for all leaves that are left."
                )
        unused = sorted(methods.keys() - {*first})
        if paths and unused and self.all_used:
            raise ValueError(
                f"method={self!s:.200}: no leaf is left for {unused!r:.200}. Patterns before "
                f"may match them, or there is no such leaf among {list(paths)!r:.400}. Correct the "
                "pattern, or remove it."
            )
        return [None if pattern is None else methods[pattern] for pattern in first]


def paths_of(tree: Any) -> list[str]:
    """Return the paths of all leaves, in flattened order.

    >>> paths_of({"layers": [{"kernel": 1.0}]})
    ['layers/0/kernel']
    """
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _method_of(value: Method | str) -> Method | None:
    """Return the method of a leaf, None if it stays uncompressed."""
    return None if value == UNCOMPRESSED else resolve_method(value)
