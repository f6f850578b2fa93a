"""Checks of annotations: dtypes and dimensions of arrays, and that all else is what it says."""

import jax
import numpy as np
from beartype import BeartypeConf, FrozenDict, beartype

# Functions of `jax.numpy` take the arrays and numbers of NumPy, too, and integers for floats.
check = beartype(
    conf=BeartypeConf(
        is_pep484_tower=True,
        hint_overrides=FrozenDict(
            {jax.Array: jax.Array | np.ndarray | np.generic, int: int | np.integer}
        ),
    )
)
