"""PowerSGD: two factors of low rank in place of each gradient matrix (arXiv 1905.13727)."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from dynamiq_jax.methods import Call, Exact, Method, Reduced, State, WireCost
from dynamiq_jax.parts import check_integer, override

# Sums a message over the axis. Several views of it may come back: the sum first, then the values
# that this worker applies.
_Send = Callable[[Array, Array], list[Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGD(Method):
    """Two low-rank products in place of each matrix M of the gradient.

    The first is M Q, whose orthonormal basis is P, and the second is M^T P. The sum of the second
    makes the result, and is the Q that the next step starts from: one step of subspace iteration
    (Vogels, Karimireddy, Jaggi, NeurIPS 2019, algorithm 1). Both are linear in M, so that any
    all-reduce can sum them.

    Biased, and far from the gradient in any one step. Put the method inside `ErrorFeedback`, as in
    the paper. A leaf of more than two dimensions is a matrix of its first dimensions by its last
    ones, cut where the factors are smallest. Vectors, and matrices too small for factors of this
    rank to save bytes, are sent whole, in the message of the first products. Where a bucket has no
    shapes (several axes, a flat vector), it is one nearly square matrix, padded with zeros. Such a
    matrix has no low rank of its own, so the error is higher.

    NaN and Inf make their whole leaf NaN, whose Q stays as it was. The state, the Q's of a bucket,
    is the same on all workers. Differences from the paper: QR instead of Gram-Schmidt; columns of Q
    are scaled to 1, which changes no basis, so that a gradient of 1e-30 does not underflow in the
    product of two of them; a matrix of more than two dimensions is not always cut after the first
    (JAX has a kernel's output dimension last: the paper's cut, from the other side).
    """

    rank: int = 4  # of each matrix: bytes grow with it, the error falls
    # Sums products, and leaves that go whole; a method without state.
    inner: Method = dataclasses.field(default_factory=Exact)

    uses_shapes = True
    is_stateful = True

    def __post_init__(self):
        check_integer("rank", self.rank, 1)
        if not isinstance(self.inner, Method):
            raise ValueError(
                f"inner={self.inner!r} is not a method. Give one, such as dq.methods.BF16()."
            )
        if self.inner.is_stateful:
            raise ValueError(
                f"inner={self.inner!r} carries state, and each step sends two messages. Give a "
                "method without, such as dq.methods.BF16()."
            )

    @property
    @override
    def state_kind(self) -> str:
        return f"PowerSGD(rank={self.rank})"

    @override
    def wire_cost(self, call: Call) -> WireCost:
        # A payload is one chunk of each of the two messages.
        pieces = _pieces(call, self.rank)
        first = sum(piece.rows * self.rank if piece.columns else piece.size for piece in pieces)
        second = sum(piece.columns * self.rank for piece in pieces)
        costs = [self.inner.wire_cost(call.of_size(size)) for size in (first, second) if size]
        return sum(costs, WireCost(0))

    @override
    def init_state(self, call: Call) -> tuple[Array, ...]:
        """Return a Q for each matrix, float32 [columns, rank], from one fixed key."""
        pieces = _pieces(call, self.rank)
        shapes = [(piece.columns, self.rank) for piece in pieces if piece.columns]
        if not shapes:
            return ()
        # Drawn at once: for many matrices, draws would be most of the program to compile.
        flat = jax.random.normal(jax.random.key(0), (sum(map(math.prod, shapes)),), jnp.float32)
        return tuple(map(_scale_columns, _split(flat, shapes)))

    @override
    def all_reduce(self, flat: Array, call: Call, key: Array, state: State) -> Reduced:
        """Sum a bucket.

        A worker applies P P^T M: the part of its own matrix that lies in the basis of all.
        """

        def send(message: Array, key: Array) -> list[Array]:
            reduced = self.inner.all_reduce(message, call.of_size(message.size), key, ())
            if call.feedback and reduced.applied is None:
                raise ValueError(
                    f"inner={self.inner!r} does not return the values that it applied, which error "
                    "feedback needs. Give one that does, such as dq.methods.BF16()."
                )
            return [reduced.total] + ([] if reduced.applied is None else [reduced.applied])

        pieces = _pieces(call, self.rank)
        (total, *applied), state = _factorize(flat, pieces, jax.random.split(key), state, send)
        return Reduced(total, token=total, state=state, applied=applied[0] if applied else None)


def _factorize(
    flat: Array, pieces: "list[_Piece]", keys: Array, state: State, send: _Send
) -> tuple[list[Array], State]:
    """Return every view that `send` has of the sum, float32 [size], and the next state."""
    parts = _split(flat.astype(jnp.float32), [(piece.size,) for piece in pieces])
    matrices = [_as_matrix(*pair) for pair in zip(parts, pieces, strict=True) if pair[1].columns]
    whole = [part for part, piece in zip(parts, pieces, strict=True) if not piece.columns]
    products = [_dot(matrix, q) for matrix, q in zip(matrices, state, strict=True)]
    message, as_parts = ravel_pytree((whole, products))
    views = send(message, keys[0])
    if not matrices:
        return views, state

    firsts = [as_parts(view) for view in views]
    bases = [_orthonormal(product) for product in firsts[0][1]]
    factors = [_dot(m.T, base) for m, base in zip(matrices, bases, strict=True)]
    message, as_factors = ravel_pytree(factors)
    seconds = [as_factors(view) for view in send(message, keys[1])]
    results = []
    for (whole, _), second in zip(firsts, seconds, strict=True):
        products = [_dot(base, q.T) for base, q in zip(bases, second, strict=True)]
        results.append(_assemble(pieces, whole, products))
    return results, tuple(map(_next_q, state, seconds[0]))


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Consecutive coordinates of a bucket. Without rows and columns they go whole."""

    size: int
    rows: int = 0
    columns: int = 0


def _pieces(call: Call, rank: int) -> list[_Piece]:
    """List the pieces of a bucket in order, matrices and whole coordinates.

    Coordinates are whole where a matrix saves nothing, as with a rank above that of the matrix.
    """
    side = math.isqrt(max(call.size - 1, 0)) + 1
    folded = [(call.size, side, -(-call.size // side))]
    if call.shapes is not None:
        folded = [(math.prod(shape), *_fold(shape)) for shape in call.shapes]
    return [
        _Piece(size, rows, columns) if rank * (rows + columns) < size else _Piece(size)
        for size, rows, columns in folded
    ]


def _fold(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a leaf as a matrix, cut where its factors are smallest."""
    cuts = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in range(1, len(shape))]
    return min(cuts, key=sum, default=(1, math.prod(shape)))


def _as_matrix(part: Array, piece: _Piece) -> Array:
    padded = jnp.pad(part, (0, piece.rows * piece.columns - piece.size))
    return padded.reshape(piece.rows, piece.columns)


def _assemble(pieces: list[_Piece], whole: list[Array], matrices: list[Array]) -> Array:
    """Join pieces, whole ones and matrices: float32 [size]."""
    rest, products = iter(whole), iter(matrices)
    return jnp.concatenate(
        [
            next(products).reshape(-1)[: piece.size] if piece.columns else next(rest)
            for piece in pieces
        ]
    )


def _split(flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    parts = jnp.split(flat, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _dot(a: Array, b: Array) -> Array:
    # In float32: the ten bits of a GPU's tensor cores would be an error outside of the feedback.
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _orthonormal(product: Array) -> Array:
    """Compute a basis of the columns, float32 [rows, rank], all NaN if they are not all finite."""
    scaled = _scale_columns(product)
    finite = jnp.all(jnp.isfinite(scaled))
    # The result of QR for a NaN depends on the backend. Columns of zeros still get a direction, in
    # which the next step may find something.
    basis = jnp.linalg.qr(jnp.where(finite, scaled, np.float32(0)))[0]
    return jnp.where(finite, basis, np.float32(np.nan))


def _next_q(before: Array, factor: Array) -> Array:
    """Return the Q of the next step. One that is not finite would never be finite again."""
    scaled = _scale_columns(factor)
    return jnp.where(jnp.all(jnp.isfinite(scaled)), scaled, before)


def _scale_columns(matrix: Array) -> Array:
    """Scale columns to a largest magnitude of 1; zeros stay zero, and NaN or Inf leave a NaN."""
    # Compared as integers: float reductions of XLA:CPU drop NaN.
    bits = jnp.max(lax.bitcast_convert_type(jnp.abs(matrix), jnp.int32), axis=0)
    largest = lax.bitcast_convert_type(bits, jnp.float32)
    is_zero = largest < np.finfo(np.float32).tiny
    divisor = jnp.where(is_zero, np.float32(1), largest)
    return jnp.where(is_zero[None, :], np.float32(0), matrix / divisor[None, :])
