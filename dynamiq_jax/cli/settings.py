"""One setting of an all-reduce, as it is written on the command line: method, options, topology.

psum                       jax.lax.psum, float32
exact                      a method with its defaults, on a ring
bf16:ring                  a method and a topology
dynamiq:5:ring             a bare number is the method's `bits`
dynamiq:5:rounding=nearest any other field of the method or of the topology
paper:5                    a preset of a method
ef+topk_chunked:4          a method inside dq.methods.ErrorFeedback
"""

import ast
import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from jax import Array, lax

import dynamiq_jax as dq
from dynamiq_jax.buckets import Options
from dynamiq_jax.cli.errors import CommandError
from dynamiq_jax.collectives import reduce_tree
from dynamiq_jax.methods import METHODS, PRESETS, ErrorFeedback, Method
from dynamiq_jax.topologies import TOPOLOGIES, Auto, Topology

Tree = TypeVar("Tree")

PSUM, BF16_RING = "psum", "bf16:ring"  # what every other setting is compared with
DEFAULTS = (PSUM, BF16_RING, "dynamiq:5:ring")
_DEFAULT_TOPOLOGY = "ring"
_FEEDBACK = "ef+"


@dataclasses.dataclass(frozen=True)
class Setting:
    """How to sum over an axis; `jax.lax.psum` where there is no method."""

    name: str  # as the user wrote it
    method: Method | None = None
    topology: Topology | Auto | None = None

    def all_reduce(self, tree: Tree, axis_name: str, key: Array) -> Tree:
        """Sum of float32 arrays over an axis, inside shard_map or vmap: the first step of a method
        that carries state.
        """
        if self.method is None or self.topology is None:
            return lax.psum(tree, axis_name)
        options = Options(method=self.method, topology=self.topology, exact_below=0)
        return reduce_tree(tree, axis_name, key=key, options=options, mean=False, states=None)[0]

    def wire_report(self, tree: Any, num_workers: int) -> dq.WireReport:
        """What one all-reduce sends: of a float32 vector, if given its size, or of a tree.

        Raises:
          CommandError: the setting is not possible for so many workers.
        """
        values = jax.ShapeDtypeStruct((tree,), "float32") if isinstance(tree, int) else tree
        everything = 1 + max(leaf.size for leaf in jax.tree.leaves(values))
        options: dict[str, Any] = {"exact_below": everything}
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
        f"{PSUM}, or METHOD[:BITS][:TOPOLOGY][:FIELD=VALUE] with a method of {sorted(METHODS)}, a "
        f"preset of {sorted(PRESETS)} or {_FEEDBACK}METHOD for error feedback, and a topology of "
        f"{sorted(TOPOLOGIES)}, such as dynamiq:5:{_DEFAULT_TOPOLOGY}"
    )


def parse_settings(texts: Sequence[str], option: str = "--settings") -> list[Setting]:
    """All settings of a run, in order. `option` is what errors name.

    Raises:
      CommandError: none, an unknown one, one that chooses by itself, or the same one twice.
    """
    settings: list[Setting] = []
    for text in texts:
        setting = parse_setting(text, option)
        if isinstance(setting.topology, Auto):
            raise CommandError(
                f"{option}: {text!r} would choose for a network of 10 Gbit/s, not for the one "
                "that is measured. Name a topology; `dynamiq-jax advise` compares them."
            )
        twin = next((other for other in settings if setting.same_as(other)), None)
        if twin:
            raise CommandError(f"{option}: {text!r} does the same as {twin.name!r}. Give it once.")
        settings.append(setting)
    if not settings:
        raise CommandError(f"{option}: nothing to measure. Give {grammar()}.")
    return settings


def parse_setting(text: str, option: str = "--settings") -> Setting:
    """One setting; see the docstring of this file.

    >>> parse_setting("dynamiq:4").method.bits
    4.0
    """
    name, *parts = text.removeprefix(_FEEDBACK).split(":")
    if name == PSUM:
        if parts or text != PSUM:
            takes = "no options" if parts else "no error feedback: it loses nothing"
            raise CommandError(f"{option}: {text!r}: {PSUM} takes {takes}. Give {PSUM!r}.")
        return Setting(text)
    if name not in METHODS and name not in PRESETS:
        raise CommandError(f"{option}: {text!r}: no method {name!r}. Give {grammar()}.")
    topologies, named = topologies_in(text), _named_fields(text, option)
    if len(topologies) > 1:
        raise CommandError(f"{option}: {text!r}: {topologies} are several topologies. Give one.")
    topology_name = topologies[0] if topologies else _DEFAULT_TOPOLOGY
    make_method, make_topology = PRESETS.get(name) or METHODS[name], TOPOLOGIES[topology_name]
    fields = [_field_names(type(make_method())), _field_names(make_topology)]
    for field in named:
        if not any(field in names for names in fields):
            raise CommandError(
                f"{option}: {text!r}: neither {name} nor {topology_name} has {field!r}. They "
                f"have {sorted(set().union(*fields)) or 'no options'}."
            )
    of_method, of_topology = (
        {field: value for field, value in named.items() if field in names} for names in fields
    )
    try:
        method, topology = make_method(**of_method), make_topology(**of_topology)
        if text.startswith(_FEEDBACK):
            method = ErrorFeedback(method=method)
    except (TypeError, ValueError) as error:
        raise CommandError(f"{option}: {text!r}: {error}") from None
    return Setting(text, method, topology)


def topologies_in(text: str) -> list[str]:
    """The topologies that a setting names.

    >>> topologies_in("dynamiq:4:butterfly"), topologies_in("psum")
    (['butterfly'], [])
    """
    return [part for part in text.split(":")[1:] if part in TOPOLOGIES]


def _named_fields(text: str, option: str) -> dict[str, Any]:
    """Field to value, of all that a setting gives but its method and topology."""
    named: dict[str, Any] = {}
    for part in text.split(":")[1:]:
        if part in TOPOLOGIES:
            continue
        field, equals, value = part.partition("=")
        if not equals and not _is_number(part):
            raise CommandError(
                f"{option}: {text!r}: {part!r} is no topology, number or FIELD=VALUE. "
                f"Give {grammar()}."
            )
        field, given = (field, _literal(value)) if equals else ("bits", float(part))
        if field in named:
            raise CommandError(
                f"{option}: {text!r}: {part!r} gives {field!r} a second time. Give it once."
            )
        named[field] = given
    return named


def _field_names(made: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(made) if field.init}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _literal(text: str) -> Any:
    """A Python literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, TypeError, ValueError):  # of a set of lists, TypeError
        return text
