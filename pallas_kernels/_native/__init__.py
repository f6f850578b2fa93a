"""Operations in C++ for CPUs, as custom calls of XLA on its own threads.

From the bottom up: `build`, `library`, `backend`. `src` has the operations in C++: each file begins
with what it holds. The package works without the library, which needs a C++ compiler where the
package is built.
"""

from pallas_kernels._native.backend import Native
from pallas_kernels._native.library import instruction_set, target, why_not, why_not_here

__all__ = ["Native", "instruction_set", "target", "why_not", "why_not_here"]
