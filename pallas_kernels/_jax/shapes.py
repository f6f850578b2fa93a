"""Types of arrays with dtypes and dimensions, such as `UInt16[Array, "rows 256"]`.

They are those of jaxtyping, which the tests check. Without it, they say nothing but `Array`.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or importlib.util.find_spec("jaxtyping") is not None:
    from jaxtyping import Float, Float32, Int32, Shaped, UInt8, UInt16, UInt32
else:

    class Shaped:
        """Array of any type."""

        def __class_getitem__(cls, item: Any) -> Any:
            array, _ = item
            return array

    Float = Float32 = Int32 = UInt8 = UInt16 = UInt32 = Shaped

__all__ = ["Float", "Float32", "Int32", "Shaped", "UInt8", "UInt16", "UInt32"]
