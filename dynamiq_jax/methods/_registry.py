"""Methods by name: the methods of this package, and further ones of installed packages."""

import collections
import functools
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint

from dynamiq_jax._core import naming
from dynamiq_jax.methods._base import Method
from dynamiq_jax.methods._baselines import BF16, Exact
from dynamiq_jax.methods._blockint import BlockInt
from dynamiq_jax.methods._dynamiq import DynamiQ
from dynamiq_jax.methods._error_feedback import ErrorFeedback
from dynamiq_jax.methods._mx import MXFP4, MXFP6, MXFP8, MXINT8
from pallas_kernels._jax.compat import override

Factory = Callable[..., Method]


class Registry(Mapping[str, Factory]):
    """Names and what they make: entries of this package, then entry points of a group, in order.

    An entry point is imported when its value is first used.
    """

    def __init__(self, own: Mapping[str, Factory], group: str) -> None:
        self.own, self.group = own, group

    @functools.cached_property
    def installed(self) -> dict[str, EntryPoint]:
        """Entry points of the group, by name.

        Raises:
          ValueError: a package uses a name that exists.
        """
        points = sorted(importlib.metadata.entry_points(group=self.group), key=lambda p: p.name)
        for point in points:
            if point.name in self.own:
                raise ValueError(
                    f"the entry point {point.value!r} in the group {self.group!r} has the name "
                    f"{point.name!r}, which dynamiq-jax has itself. Give it another name."
                )
        return {point.name: point for point in points}

    @override
    def __getitem__(self, name: str) -> Factory:
        if name in self.own:
            return self.own[name]
        factory: Factory = self.installed[name].load()
        return factory

    @override
    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self.installed

    @override
    def __iter__(self) -> Iterator[str]:
        return iter((*self.own, *self.installed))

    @override
    def __len__(self) -> int:
        return len(self.own) + len(self.installed)


# Names are those of the literature in lower case, with spaces and hyphens as underscores.
METHODS = Registry(
    {
        "dynamiq": DynamiQ,
        "exact": Exact,
        "bf16": BF16,
        "blockint": BlockInt,
        "mxfp8": MXFP8,
        "mxfp6": MXFP6,
        "mxfp4": MXFP4,
        "mxint8": MXINT8,
    },
    group="dynamiq_jax.methods",
)
# Names in the distribution of research, for the error where it is not installed.
OF_RESEARCH = {"arc_top_k", "ef21m", "entropy_coded", "flash_communication", "gc", "marsit"}
OF_RESEARCH |= {"omnireduce", "powersgd", "rand_k", "split_sketch", "thc", "top_k", "topk_chunked"}
# Methods with other defaults.
PRESETS: dict[str, Factory] = {
    "paper": DynamiQ.paper,
    "qgz": BlockInt.qgz,
    "equarx": BlockInt.equarx,
}
# Methods around another one, their field `inner`: WRAPPER+METHOD.
WRAPPERS = Registry({"ef": ErrorFeedback}, group="dynamiq_jax.wrappers")


def known_methods() -> Mapping[str, Factory]:
    """Return methods and presets by name."""
    return collections.ChainMap(PRESETS, METHODS)  # type: ignore[arg-type]  # only read


def resolve_method(method: Method | str) -> Method:
    """Return a method as given, or by its name: [WRAPPER+]METHOD[:BITS][:FIELD=VALUE]...

    BITS is the field `bits` or `code_bits`, whichever the method has.

    Args:
      method: method, or its name with fields.

    >>> resolve_method("dynamiq:4").bits
    4
    >>> resolve_method("ef+blockint:4:block=64").inner.block
    64
    """
    if isinstance(method, Method):
        return method
    known = known_methods()
    wrapper, plus, inner = method.rpartition("+") if isinstance(method, str) else ("", "", "")
    if naming.head(inner) in known and (wrapper in WRAPPERS or not plus):
        hint = " A topology is one for all leaves: dq.Compression(topology='ring')."
        made: Method = naming.make("method", inner, known, hint, {"inner": resolve_method})
        try:
            return WRAPPERS[wrapper](inner=made) if plus else made
        except ValueError as error:
            raise ValueError(f"method={method!r}: {error}") from None
    lacking = sorted({naming.head(inner), wrapper} & (OF_RESEARCH - {*known, *WRAPPERS}))
    if lacking:
        raise ValueError(
            f"method={method!r} is not installed: {lacking[0]!r} is in dynamiq-jax-research. In a "
            "checkout of dynamiq-jax, call pip install ./research."
        )
    raise ValueError(
        f"method={method!r} is not known. Give a method such as dq.DynamiQ(bits=5.0), or one of "
        f"{sorted(known)}, such as 'dynamiq:5'. One of {sorted(WRAPPERS)} and '+' before it "
        "wraps it: 'ef+' and a method is error feedback."
    )
