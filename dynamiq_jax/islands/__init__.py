"""Training on islands: jobs that come and go, and send each other messages over a store.

Each island takes local steps, and all of them take one outer step together in each round (DiLoCo).

`messages` needs NumPy alone, for a coordinator that has no JAX.
"""

import importlib.util

if importlib.util.find_spec("jax"):
    from dynamiq_jax.islands._decode import decode
    from dynamiq_jax.islands._encode import encode
    from dynamiq_jax.islands._history import RoundRecord, history
    from dynamiq_jax.islands._islands import Islands
    from dynamiq_jax.islands._pending import PendingExchange
    from dynamiq_jax.islands._sparse import Sparse
    from dynamiq_jax.islands._state import IslandState
    from dynamiq_jax.islands._transports import ObjectStore, SharedFolder, Transport
from dynamiq_jax.islands import messages

__all__ = ["IslandState", "Islands", "ObjectStore", "PendingExchange", "SharedFolder", "Transport"]
__all__ += ["RoundRecord", "history"]
__all__ += ["Sparse", "decode", "encode", "messages"]
