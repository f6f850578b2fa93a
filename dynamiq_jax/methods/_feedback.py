"""Base of wrappers whose state holds the values that a step left out."""

import dataclasses

from dynamiq_jax._core import WireCost
from dynamiq_jax.methods._base import Call, Method
from pallas_kernels._jax.compat import override


@dataclasses.dataclass(frozen=True, kw_only=True)
class Feedback(Method):
    """A method around another one, with the bytes of the inner method."""

    inner: Method  # the method that leaves something out

    def __post_init__(self):
        if not isinstance(self.inner, Method):
            raise ValueError(
                f"inner={self.inner!r} is not a method. Give one, such as dq.methods.BF16()."
            )
        if isinstance(self.inner, Feedback):
            raise ValueError(
                f"inner={self.inner!r} already keeps what it leaves out: nothing would be left to "
                f"keep a second time. Give {self.inner.inner!r}."
            )

    @property
    @override
    def uses_shapes(self) -> bool:
        return self.inner.uses_shapes

    @property
    @override
    def is_stateful(self) -> bool:
        return True

    @property
    @override
    def state_kind(self) -> str:
        """The class: the state is in units of the gradient, with any inner method."""
        name = type(self).__name__
        return f"{name}({self.inner.state_kind})" if self.inner.is_stateful else name

    @property
    @override
    def metrics(self) -> tuple[str, ...]:
        return self.inner.metrics

    @property
    @override
    def details(self) -> tuple[str, ...]:
        return self.inner.details

    @property
    @override
    def granule(self) -> int:
        return self.inner.granule

    @override
    def wire_cost(self, call: Call) -> WireCost:
        return self.inner.wire_cost(call)
