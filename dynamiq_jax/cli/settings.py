"""One setting of an all-reduce, as it is written on the command line: method, options, topology.

psum                       jax.lax.psum, float32
exact                      a method with its defaults, on a ring
bf16:ring                  a method and a topology
dynamiq:5:ring             a bare number is the method's `bits`
dynamiq:5:rounding=nearest any other field of the method or of the topology
"""

import ast
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import Array, lax

import dynamiq_jax as dq
from dynamiq_jax.buckets import Options
from dynamiq_jax.cli.errors import CommandError
from dynamiq_jax.collectives import reduce_tree
from dynamiq_jax.methods import METHODS, Method
from dynamiq_jax.topologies import TOPOLOGIES, Auto, Topology

PSUM, BF16_RING = "psum", "bf16:ring"  # what every other setting is compared with
DEFAULTS = (PSUM, BF16_RING, "dynamiq:5:ring")
_DEFAULT_TOPOLOGY = "ring"


@dataclasses.dataclass(frozen=True)
class Setting:
    """How to sum over an axis; `jax.lax.psum` where there is no method."""

    name: str  # as the user wrote it
    method: Method | None = None
    topology: Topology | Auto | None = None

    def all_reduce(self, values: Array, axis_name: str, key: Array) -> Array:
        """Sum of float32 [size] over an axis; inside shard_map. Of a method that carries state, the
        sum of a first step.
        """
        if self.method is None or self.topology is None:
            return lax.psum(values, axis_name)
        options = Options(method=self.method, topology=self.topology, exact_below=0)
        return reduce_tree(values, axis_name, key=key, options=options, mean=False, states=None)[0]

    def wire_report(self, size: int, num_workers: int) -> dq.WireReport:
        """What one all-reduce of float32 [size] sends.

        Raises:
          CommandError: the setting is not possible for so many workers.
        """
        values = jax.ShapeDtypeStruct((size,), "float32")
        options: dict[str, Any] = {"exact_below": size + 1}  # all of it
        if self.method is not None:
            options = {"method": self.method, "topology": self.topology, "exact_below": 0}
        try:
            return dq.wire_report(values, num_workers, **options)
        except ValueError as error:
            raise CommandError(
                f"--settings: {self.name!r} with {num_workers} workers: {error}"
            ) from None

    def same_as(self, other: "Setting") -> bool:
        """Whether both do the same, however they are written."""
        return (self.method, self.topology) == (other.method, other.topology)


def is_same(text: str, other: str) -> bool:
    """Whether two settings do the same, however they are written."""
    return parse_setting(text).same_as(parse_setting(other))


def grammar() -> str:
    """What can be written, for help and errors."""
    return (
        f"{PSUM}, or METHOD[:BITS][:TOPOLOGY][:FIELD=VALUE] with a method of {sorted(METHODS)} and "
        f"a topology of {sorted(TOPOLOGIES)}, such as dynamiq:5:{_DEFAULT_TOPOLOGY}"
    )


def parse_settings(texts: Sequence[str]) -> list[Setting]:
    """All settings of a run, in order.

    Raises:
      CommandError: none, an unknown one, one that chooses by itself, or the same one twice.
    """
    settings: list[Setting] = []
    for text in texts:
        setting = parse_setting(text)
        if isinstance(setting.topology, Auto):
            raise CommandError(
                f"--settings: {text!r} would choose for a network of 10 Gbit/s, not for the one "
                "that is measured. Name a topology; `dynamiq-jax advise` compares them."
            )
        twin = next((other for other in settings if setting.same_as(other)), None)
        if twin:
            raise CommandError(
                f"--settings: {text!r} does the same as {twin.name!r}. Give it once."
            )
        settings.append(setting)
    if not settings:
        raise CommandError(f"--settings: nothing to measure. Give {grammar()}.")
    return settings


def parse_setting(text: str) -> Setting:
    """One setting; see the docstring of this file.

    >>> parse_setting("dynamiq:4").method.bits
    4.0
    """
    name, *parts = text.split(":")
    if name == PSUM:
        if parts:
            raise CommandError(f"--settings: {text!r}: psum takes no options. Give {PSUM!r}.")
        return Setting(text)
    if name not in METHODS:
        raise CommandError(f"--settings: {text!r}: no method {name!r}. Give {grammar()}.")
    topology_name, named = _DEFAULT_TOPOLOGY, {}
    for part in parts:
        field, equals, value = part.partition("=")
        if equals:
            named[field] = _literal(value)
        elif part in TOPOLOGIES:
            topology_name = part
        elif isinstance(_literal(part), int | float):
            named["bits"] = float(part)
        else:
            raise CommandError(
                f"--settings: {text!r}: {part!r} is no topology, number or FIELD=VALUE. "
                f"Give {grammar()}."
            )
    method_class, topology_class = METHODS[name], TOPOLOGIES[topology_name]
    fields = {made: _field_names(made) for made in (method_class, topology_class)}
    for field in named:
        if not any(field in names for names in fields.values()):
            raise CommandError(
                f"--settings: {text!r}: neither {method_class.__name__} nor "
                f"{topology_class.__name__} has {field!r}. They have "
                f"{sorted(set().union(*fields.values())) or 'no options'}."
            )
    try:
        return Setting(text, *(_make(made, named, names) for made, names in fields.items()))
    except (TypeError, ValueError) as error:
        raise CommandError(f"--settings: {text!r}: {error}") from None


def _make(made: Any, named: dict[str, Any], names: set[str]) -> Any:
    return made(**{field: value for field, value in named.items() if field in names})


def _field_names(made: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(made) if field.init}


def _literal(text: str) -> Any:
    """A Python literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
