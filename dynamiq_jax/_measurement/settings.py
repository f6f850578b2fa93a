"""A setting of an all-reduce, as the command line takes it: a method, its options, a topology.

psum                        jax.lax.psum, float32
exact                       a method with its defaults, on a ring
bf16:ring                   a method and a topology
dynamiq:5:ring              a bare number is the method's budget
dynamiq:5:rounding=nearest  any other field of the method or of the topology
paper:5                     a method with other defaults
ef+dynamiq:3                a method inside dq.methods.ErrorFeedback, or another wrapper
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
from jax import Array, lax

import dynamiq_jax as dq
from dynamiq_jax._buckets.axes import find_axes
from dynamiq_jax._collectives.all_reduce import AllReduce
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._inputs.compression import Compression, split_route
from dynamiq_jax._inputs.request import Request
from dynamiq_jax._run.driver import run
from dynamiq_jax.methods import METHODS, Method, known_methods, resolve_method
from dynamiq_jax.methods._registry import PRESETS, WRAPPERS
from dynamiq_jax.topologies import TOPOLOGIES, Topology, resolve_topology

Tree = TypeVar("Tree")

PSUM, BF16_RING = "psum", "bf16:ring"  # the settings that every other one is compared with
DEFAULTS = (PSUM, BF16_RING, "dynamiq:5:ring")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A method and a topology, or neither for `jax.lax.psum`.

    Settings that do the same are equal, however they are written.
    """

    name: str = dataclasses.field(compare=False)  # as the user wrote it
    method: Method | None = None
    topology: Topology | None = None

    @property
    def compression(self) -> Compression:
        """The setting as the functions of `dynamiq_jax` take it: of `psum`, an exact sum."""
        return Compression(self.method or "exact", self.topology or "ring", exact_below=0)

    def all_reduce(self, tree: Tree, axis_name: str, key: Array) -> Tree:
        """Sum float32 arrays over an axis, inside shard_map or vmap.

        For a method that carries state, this is its first step.
        """
        if self.method is None:
            return lax.psum(tree, axis_name)
        return run(AllReduce(find_axes(axis_name)), tree, key, Request(self.compression)).tree

    def wire_report(self, tree: Any, num_workers: int) -> dq.reports.WireReport:
        """Report the bytes of one all-reduce: of a float32 vector of some size, or of a tree.

        Raises:
          CommandError: the setting is not possible for so many workers.
        """
        values = jax.ShapeDtypeStruct((tree,), "float32") if isinstance(tree, int) else tree
        try:
            return dq.wire_report(values, num_workers, self.compression)
        except ValueError as error:
            raise CommandError(
                f"--settings: {self.name!r} with {num_workers} workers: {error}"
            ) from None


def grammar() -> str:
    """Describe settings, for errors."""
    return (
        f"{PSUM}, or [WRAPPER+]METHOD[:BITS][:TOPOLOGY][:FIELD=VALUE]... with a wrapper of "
        f"{sorted(WRAPPERS)}, a method of {sorted(METHODS)} or a preset of {sorted(PRESETS)}, and "
        f"a topology of {sorted(TOPOLOGIES)}, such as dynamiq:5:ring"
    )


def parse_settings(texts: Sequence[str], option: str = "--settings") -> list[Setting]:
    """Parse all settings of a run, in order. `option` is the option that errors name.

    Raises:
      CommandError: none, an unknown one, or the same one twice.
    """
    settings: list[Setting] = []
    for text in texts:
        setting = parse_setting(text, option)
        twin = next((other for other in settings if other == setting), None)
        if twin:
            raise CommandError(f"{option}: {text!r} does the same as {twin.name!r}. Give it once.")
        settings.append(setting)
    if not settings:
        raise CommandError(f"{option}: nothing to measure. Give {grammar()}.")
    return settings


def installed(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the settings whose methods are installed: research is another distribution."""

    def is_here(text: str) -> bool:
        *wrappers, name = text.split(":")[0].split("+")
        return name in (PSUM, *known_methods()) and all(each in WRAPPERS for each in wrappers)

    return tuple(filter(is_here, texts))


def parse_setting(text: str, option: str = "--settings") -> Setting:
    """Parse one setting; see the docstring of this file.

    >>> parse_setting("dynamiq:4").method.bits
    4
    """
    if text == PSUM:
        return Setting(text)
    try:
        method, route = split_route(text)
        return Setting(text, resolve_method(method), resolve_topology(route or "ring"))
    except ValueError as error:
        raise CommandError(f"{option}: {text!r}: {error} Settings are {grammar()}.") from None
