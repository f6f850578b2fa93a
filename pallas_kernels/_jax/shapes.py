"""Types of arrays with dtypes and dimensions, such as `UInt16[Array, "rows 256"]`.

They are those of jaxtyping, which the tests check. Without it, and for type checkers, they say
nothing but `Array`.
"""

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING or importlib.util.find_spec("jaxtyping") is None:
    from typing import Annotated as Float
    from typing import Annotated as Float32
    from typing import Annotated as Int32
    from typing import Annotated as Shaped
    from typing import Annotated as UInt8
    from typing import Annotated as UInt16
    from typing import Annotated as UInt32
else:
    from jaxtyping import Float, Float32, Int32, Shaped, UInt8, UInt16, UInt32

__all__ = ["Float", "Float32", "Int32", "Shaped", "UInt8", "UInt16", "UInt32"]
