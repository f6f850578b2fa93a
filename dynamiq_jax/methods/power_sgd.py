"""PowerSGD: two factors of low rank in place of each gradient matrix (arXiv 1905.13727)."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.chunks import WireCost
from dynamiq_jax.methods.base import Method, Reduced, State
from dynamiq_jax.methods.exact import Exact
from dynamiq_jax.topologies.base import Topology

Shapes = tuple[tuple[int, ...], ...]
# Sums a message over the axis. Several views of it may come back: the sum first, then what this
# worker applies.
_Send = Callable[[Array, Array], tuple[Array, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGD(Method):
    """Two products travel in place of each matrix M of the gradient: M Q, whose orthonormal basis
    is P, and then M^T P, whose sum makes the result and is the Q that the next step starts from:
    one step of subspace iteration (Vogels, Karimireddy, Jaggi, NeurIPS 2019, algorithm 1). Both are
    linear in M, so that any all-reduce can sum them.

    Biased, and far from the gradient in any one step: put it inside `ErrorFeedback`, as the paper
    does. A leaf of more than two dimensions is a matrix of its first dimensions by its last ones,
    cut where the factors are smallest. Vectors, and matrices too small for factors of this rank to
    save bytes, travel whole, in the message of the first products. Without shapes (several axes, a
    flat vector) the bucket is one nearly square matrix, padded with zeros, whose rank is nobody's:
    the error is higher.

    NaN and Inf make their whole leaf NaN, whose Q stays what it was. The state, the Q's of a
    bucket, is the same on all workers. Differences from the paper: QR instead of Gram-Schmidt;
    columns of Q are scaled to 1, which changes no basis, so that a gradient of 1e-30 does not
    underflow in the product of two of them; a matrix of more than two dimensions is not always cut
    after the first (JAX has a kernel's output dimension last: the paper's cut, from the other
    side).

    >>> PowerSGD(rank=2).for_leaves(((64, 32), (50,))).wire_cost(2098, 2, 2).payload_bytes
    484
    """

    rank: int = 4  # of each matrix: bytes grow with it, the error falls
    # How products, and leaves that go whole, become bytes; a method without state.
    inner: Method = dataclasses.field(default_factory=Exact)
    shapes: Shapes | None = None  # of the leaves of a bucket; filled in by `for_leaves`

    def __post_init__(self):
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"rank={self.rank!r} is not possible. Give a positive integer.")
        if not isinstance(self.inner, Method):
            raise ValueError(f"inner={self.inner!r} is not a method. Give one, such as dq.BF16().")
        if self.inner.is_stateful:
            raise ValueError(
                f"inner={self.inner!r} carries state, and each step hands it two messages. Give a "
                "method without, such as dq.BF16()."
            )

    def for_leaves(self, shapes: Shapes) -> "PowerSGD":
        """See `Method`. A copy that knows which matrices a bucket is made of."""
        return dataclasses.replace(self, shapes=shapes)

    def wire_cost(self, size: int, num_workers: int, num_chunks: int) -> WireCost:
        """See `Method`. A payload is one chunk of each of the two messages."""
        pieces = self._pieces(size)
        matrices = [piece for piece in pieces if piece.columns]
        first = sum(piece.rows * self.rank if piece.columns else piece.size for piece in pieces)
        second = sum(piece.columns * self.rank for piece in matrices)
        costs = [
            self.inner.wire_cost(message, num_workers, num_chunks)
            for message in (first, second)
            if message
        ]
        return WireCost(
            payload_bytes=sum(cost.payload_bytes for cost in costs),
            statistics_bytes=sum(cost.statistics_bytes for cost in costs),
        )

    def init_state(self, size: int, num_workers: int) -> tuple[Array, ...]:
        """See `Method`. A Q for each matrix, float32 [columns, rank], from one fixed key."""
        shapes = [(piece.columns, self.rank) for piece in self._pieces(size) if piece.columns]
        if not shapes:
            return ()
        # Drawn at once: of many matrices, draws would be most of what there is to compile.
        flat = jax.random.normal(jax.random.key(0), (sum(map(math.prod, shapes)),), jnp.float32)
        return tuple(map(_scale_columns, _split(flat, shapes)))

    def all_reduce(
        self,
        flat: Array,
        axis_name: str,
        num_workers: int,
        *,
        topology: Topology,
        key: Array,
        state: State,
    ) -> Reduced:
        """See `Method`."""

        def send(message: Array, key: Array) -> tuple[Array, ...]:
            inner = self.inner.all_reduce(
                message, axis_name, num_workers, topology=topology, key=key, state=()
            )
            return (inner.total,)

        (total,), state = self._factorize(flat, key, state, send)
        return Reduced(total, state, arrived=total)

    def all_reduce_applied(
        self,
        flat: Array,
        axis_name: str,
        num_workers: int,
        *,
        topology: Topology,
        key: Array,
        state: State,
    ) -> tuple[Reduced, Array]:
        """See `Method`. A worker applies P P^T M: the share of its own matrix that lies in the
        basis of all.
        """

        def send(message: Array, key: Array) -> tuple[Array, ...]:
            inner, applied = self.inner.all_reduce_applied(
                message, axis_name, num_workers, topology=topology, key=key, state=()
            )
            return inner.total, applied

        (total, applied), state = self._factorize(flat, key, state, send)
        return Reduced(total, state, arrived=total), applied

    def _factorize(
        self, flat: Array, key: Array, state: State, send: _Send
    ) -> tuple[list[Array], State]:
        """Every view that `send` has of the sum: float32 [size]; and the next state."""
        pieces = self._pieces(flat.size)
        parts = _split(flat.astype(jnp.float32), [(piece.size,) for piece in pieces])
        matrices = [
            _as_matrix(*pair) for pair in zip(parts, pieces, strict=True) if pair[1].columns
        ]
        whole = [part for part, piece in zip(parts, pieces, strict=True) if not piece.columns]
        products = [_dot(matrix, q) for matrix, q in zip(matrices, state, strict=True)]
        keys = jax.random.split(key)
        shapes = [array.shape for array in (*whole, *products)]
        firsts = [_split(view, shapes) for view in send(_join([*whole, *products]), keys[0])]
        if not matrices:
            return [_join(first) for first in firsts], state

        bases = [_orthonormal(product) for product in firsts[0][len(whole) :]]
        factors = [_dot(m.T, base) for m, base in zip(matrices, bases, strict=True)]
        shapes = [factor.shape for factor in factors]
        seconds = [_split(view, shapes) for view in send(_join(factors), keys[1])]
        results = []
        for first, second in zip(firsts, seconds, strict=True):
            products = [_dot(base, q.T) for base, q in zip(bases, second, strict=True)]
            results.append(_assemble(pieces, first[: len(whole)], products))
        return results, tuple(map(_next_q, state, seconds[0]))

    def _pieces(self, size: int) -> list["_Piece"]:
        """What a bucket is made of, in order."""
        if self.shapes is None:
            rows = math.isqrt(max(size - 1, 0)) + 1
            return [self._piece(size, rows, -(-size // rows))]
        sizes = [math.prod(shape) for shape in self.shapes]
        if sum(sizes) != size:
            raise ValueError(
                f"shapes={self.shapes!r} have {sum(sizes)} coordinates, not the {size} of the "
                "bucket. Leave them out: all collectives fill them in."
            )
        return [
            self._piece(size, *_fold(shape)) for size, shape in zip(sizes, self.shapes, strict=True)
        ]

    def _piece(self, size: int, rows: int, columns: int) -> "_Piece":
        """A matrix, or where that saves nothing, which no rank does that the matrix does not have
        itself, coordinates that go whole.
        """
        saves = self.rank * (rows + columns) < size
        return _Piece(size, rows, columns) if saves else _Piece(size, 0, 0)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Consecutive coordinates of a bucket. Without rows and columns they go whole."""

    size: int
    rows: int
    columns: int


def _fold(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a leaf as a matrix: of all cuts between dimensions, the one with the
    smallest factors, the first such.
    """
    cuts = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in range(1, len(shape))]
    return min(cuts, key=sum, default=(1, math.prod(shape)))


def _as_matrix(part: Array, piece: _Piece) -> Array:
    padded = jnp.pad(part, (0, piece.rows * piece.columns - piece.size))
    return padded.reshape(piece.rows, piece.columns)


def _assemble(pieces: list[_Piece], whole: list[Array], matrices: list[Array]) -> Array:
    """Inverse of the split into pieces: float32 [size]."""
    rest, products = iter(whole), iter(matrices)
    return _join(
        [
            next(products).reshape(-1)[: piece.size] if piece.columns else next(rest)
            for piece in pieces
        ]
    )


def _join(arrays: Sequence[Array]) -> Array:
    return jnp.concatenate([array.reshape(-1) for array in arrays])


def _split(flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Inverse of `_join`."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    parts = jnp.split(flat, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _dot(a: Array, b: Array) -> Array:
    # In float32: the ten bits of a GPU's tensor cores would be an error that nobody feeds back.
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _orthonormal(product: Array) -> Array:
    """Basis of the columns, float32 [rows, rank], NaN throughout if they are not all finite."""
    scaled = _scale_columns(product)
    finite = jnp.all(jnp.isfinite(scaled))
    # What QR makes of a NaN is up to the backend. Columns of zeros still get a direction, in which
    # the next step may find something.
    basis = jnp.linalg.qr(jnp.where(finite, scaled, np.float32(0)))[0]
    return jnp.where(finite, basis, np.float32(np.nan))


def _next_q(before: Array, factor: Array) -> Array:
    """What the next step starts from. One that is not finite would never be finite again."""
    scaled = _scale_columns(factor)
    return jnp.where(jnp.all(jnp.isfinite(scaled)), scaled, before)


def _scale_columns(matrix: Array) -> Array:
    """The same directions with a largest magnitude of 1; a column of zeros stays one, and NaN or
    Inf leave a NaN.
    """
    # Compared as integers: XLA:CPU's float reductions drop NaN.
    bits = jnp.max(lax.bitcast_convert_type(jnp.abs(matrix), jnp.int32), axis=0)
    largest = lax.bitcast_convert_type(bits, jnp.float32)
    is_zero = largest < np.finfo(np.float32).tiny
    return jnp.where(is_zero, np.float32(0), matrix / jnp.where(is_zero, np.float32(1), largest))
