"""Messages as bytes: what a worker would send in an all-gather, with a header.

`islands.encode` makes them and `islands.decode` reads them with JAX. This package reads them with
NumPy alone, for a coordinator that has no JAX: nothing here imports it.

    message     header and body, to bytes and back, and the checks of bytes from elsewhere
    formats     compressed parts of the body
    sparse      the largest coordinates of each block, which islands without JAX can write too
    decoding    leaves of messages, and weighted sums of them
"""

from dynamiq_jax.islands.messages.decoding import decode
from dynamiq_jax.islands.messages.message import Leaf, Message
from dynamiq_jax.islands.messages.sparse import SparseFormat

__all__ = ["Leaf", "Message", "SparseFormat", "decode"]
