"""One read of the data: the sums over row blocks that the algorithm asks for.

`sweep_block` is a pure function of one row block and a `Sweep` request; what it returns for
all blocks is added by `combine`. With P^2 = p0 + (p1 - p0) Y the gradient of the square loss
splits into a part with the pattern of Y, summed here, and ``p0 X^T X W``, which follows from
``X^T Z`` without the data. Neither an N x L nor a D x L array appears, except the latter
where the caller knows it to be small and asks for it (``assemble``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from . import kernels
from .blocks import RowBlock
from .executor import share_out
from .features import PIECE_ROWS, BlockSource, Features

__all__ = ["Partial", "Sweep", "combine", "light_pattern", "sweep_block", "sweep_block_together"]

Array = npt.NDArray[Any]
#: Named sums over row blocks; "rows" is concatenated in row order instead.
Partial = dict[str, Array]

#: The columns of Z are allotted in steps of this many, so that most new ones find room.
COLUMN_STEP = 64
#: Entries of the dense row pieces that the exponential loss works on.
PIECE_ENTRIES = 2**21
#: How much faster than the loop over active entries a matrix product is.
MATMUL_GAIN = 8
#: A label with so many rows in a block has its Gram matrix made by BLAS: some ten times as fast.
BLAS_ROWS = 16
#: Whoever gets the sums refuses those that overflow.
_quietly = np.errstate(over="ignore", invalid="ignore")


@dataclass(frozen=True)
class Sweep:
    """What every row block is asked for in one read, besides "loss" and "slope", which are F(W)
    and <W, grad F(W)> but for a factor and, with the square loss, the term p0 ||XW||^2.

    Attributes
    ----------
    basis : tuple of str
        Keys of the pieces of U, whose columns come as shared values in this order.
    mt : ndarray (L, r'), optional
        Transpose of M over the first r' columns of the basis; zero by default.
    assemble : bool
        Ask for "gradient": the data part of the gradient, (X^T R)^T, labels x features.
    right : ndarray (L, k), optional
        Ask for "right": X^T R right.
    left : ndarray (D, k), optional
        Ask for "left": R^T X left.
    grow : int
        How many columns of the basis are new.
    moment : bool
        Ask for "moment", X^T Z' of these.
    place : ndarray (L,), optional
        Position of a label among those summed on the workers, or -1: ask for the rest of the statistics
        too, "positives" Y^T Z' of the labels that have a place.
    grams : bool
        Ask for their "grams" and for the "rows" of all others (see `Statistics`).
    direction : ndarray (L, r), optional
        Ask for "curvature": the sum of squared scores of this direction over active entries or,
        for the exponential loss, "curve": the loss at each step length of ``alphas``.
    points : tuple of (rotation, mt, p0)
        Further matrices W = U rotation M at which to ask for "loss i", "slope i" and "gradient i".
    rights : tuple of ndarray (L, k), optional
        One for each of these, to ask for "right i", X^T R right, in place of its gradient.
    square, cross : bool
        Ask for "square", X^T X, and "cross", Y^T X: for a caller who knows them to be small.
    """

    source: BlockSource
    basis: tuple[str, ...]
    p0: float
    loss: str = "square"
    mt: Array | None = None
    assemble: bool = False
    right: Array | None = None
    left: Array | None = None
    grow: int = 0
    moment: bool = True
    place: Array | None = None
    grams: bool = True
    direction: Array | None = None
    alphas: tuple[float, ...] = ()
    points: tuple[tuple[Array, Array, float], ...] = ()
    rights: tuple[Array, ...] | None = None
    square: bool = False
    cross: bool = False


def sweep_block(block: RowBlock, request: Sweep, *basis: Array) -> Partial:
    """Return the sums of one row block, and "rows_read": how many rows of X were read for them."""
    whole = _WholeBlock(request.source, block)
    out = _sums(_Reader(whole, request.source, block), request, basis)
    out["rows_read"] = np.array(whole.rows_read)
    return out


def sweep_block_together(block: RowBlock, requests: tuple[Sweep, ...], *basis: Array) -> Partial:
    """Answer several requests, on folds of the same data, with one read of the block.

    The names of a request's sums begin with its number and a colon.
    """
    whole = _WholeBlock(requests[0].source, block)
    ends = np.cumsum([len(request.basis) for request in requests])

    def answer(number: int) -> Partial:
        request, end = requests[number], int(ends[number])
        own = basis[end - len(request.basis) : end]
        return _sums(_Reader(whole, request.source, block), request, own)

    out: Partial = {}
    for number, sums in enumerate(share_out(answer, range(len(requests)))):
        out.update({f"{number}:{name}": value for name, value in sums.items()})
    out["rows_read"] = np.array(whole.rows_read)
    return out


@_quietly
def _sums(reader: _Reader, request: Sweep, basis: tuple[Array, ...]) -> Partial:
    labels = request.source.labels(reader.block)
    z, rank, fresh = _block_scores(reader, request.basis, basis)
    residual: _SquareResidual | _ExponentialResidual
    if request.loss == "square":
        residual = _SquareResidual(labels, z, request.mt, request.p0)
    else:
        residual = _ExponentialResidual(labels, z, request.mt, request.p0)

    loss, slope = residual.sums()
    out: Partial = {"loss": np.array(loss), "slope": np.array(slope)}
    if request.assemble:
        out["gradient"] = residual.assembled(reader.features)
    if request.right is not None:
        out["right"] = reader.features.transpose_times(residual.times(request.right))
    if request.left is not None:
        out["left"] = residual.transpose_times(reader.features.times(request.left))
    if request.grow:
        new = fresh
        if new is None or new.shape[1] != request.grow:
            new = np.ascontiguousarray(z[:, rank - request.grow : rank])
        if request.moment:
            out["moment"] = reader.features.transpose_times(new)
        if request.place is not None:
            out["positives"] = _summed_positives(labels, request.place, new)
        if request.place is not None and request.grams:
            if request.place.max(initial=-1) >= 0:
                out["grams"] = _label_grams(labels, request.place, z, rank, request.grow)
            out["rows"] = new[_light_rows(labels, request.place)].astype(np.float64, copy=False)
    if request.direction is not None:
        out.update(residual.along(z, request.direction, request.alphas))
    if request.square:
        out["square"] = reader.features.square()
    if request.cross:
        out["cross"] = reader.features.transpose_times_labels(labels, np.ones(labels.nnz))[0]
    if request.points:
        out.update(_sums_at_points(reader, request, labels, z))
    return out


def _sums_at_points(reader: _Reader, request: Sweep, labels: Any, z: Array) -> Partial:
    at_points = [
        _SquareResidual(labels, *_turned(labels, z, rotation, mt), p0) for rotation, mt, p0 in request.points
    ]
    if request.rights is None:
        name = "gradient"
        values = reader.features.transpose_times_labels(labels, *(each.values for each in at_points))
    else:
        name, pairs = "right", zip(at_points, request.rights, strict=True)
        values = [reader.features.transpose_times(at_point.times(right)) for at_point, right in pairs]
    out: Partial = {}
    for number, (at_point, value) in enumerate(zip(at_points, values, strict=True)):
        loss, slope = at_point.sums()
        out[f"loss {number}"], out[f"slope {number}"] = np.array(loss), np.array(slope)
        out[f"{name} {number}"] = value
    return out


def _turned(labels: Any, z: Array, rotation: Array, mt: Array) -> tuple[Array, Array]:
    """Return Z and M^T, one of them turned so that they belong together: that which takes less time."""
    rank, own = rotation.shape
    if MATMUL_GAIN * labels.nnz * (rank - own) < (len(z) - len(mt)) * rank * own:
        return z, np.ascontiguousarray(mt @ rotation.T)
    return np.ascontiguousarray(z[:, :rank] @ rotation), mt


@_quietly
def combine(partials: list[Partial]) -> Partial:
    """Add partial sums in their order; the inputs are left as they are."""

    def total(name: str) -> Array:
        value, *rest = (partial[name] for partial in partials)
        if name.rpartition(":")[2] == "rows":
            return np.concatenate([value, *rest])
        if rest:
            value = value + rest[0]
            for other in rest[1:]:
                value += other
        return value

    names = list(partials[0])
    return dict(zip(names, share_out(total, names), strict=True))


def light_pattern(block: RowBlock, payload: tuple[BlockSource, Array]) -> tuple[Array, Array, int]:
    """Return (row, label) of the active entries of light labels, rows counted among the light rows."""
    source, place = payload
    labels = source.labels(block)
    rows = _light_rows(labels, place)
    position = np.full(labels.shape[0], -1, dtype=np.int64)
    position[rows] = np.arange(rows.size)
    entry_rows = np.repeat(np.arange(labels.shape[0]), np.diff(labels.indptr))
    light = place[labels.indices] < 0
    return position[entry_rows[light]], labels.indices[light].astype(np.int64), rows.size


def _label_grams(labels: Any, place: Array, z: Array, rank: int, width: int) -> Array:
    """Sum ``z_i[:rank] z_i[rank - width:rank]^T`` over the rows of every label that has a place."""
    positions = place[labels.indices]
    order = np.argsort(positions, kind="stable")
    starts = np.searchsorted(positions[order], np.arange(place.max() + 2))
    counts = np.diff(starts)
    grams = np.zeros((counts.size, rank, width))
    few = np.where((place >= 0) & (counts[place] < BLAS_ROWS), place, -1)
    kernels.add_label_grams(labels.indptr, labels.indices, few, z, rank, width, grams)
    rows = np.repeat(np.arange(labels.shape[0]), np.diff(labels.indptr))[order]
    for position in np.flatnonzero(counts >= BLAS_ROWS):
        for start in range(starts[position], starts[position + 1], PIECE_ROWS):
            piece = z[rows[start : min(start + PIECE_ROWS, starts[position + 1])], :rank]
            grams[position] += piece.T @ piece[:, rank - width :]
    return grams


def _summed_positives(labels: Any, place: Array, new: Array) -> Array:
    """Sum the new scores over the rows of every label that has a place."""
    positions = place[labels.indices]
    ends = np.append(0, np.cumsum(positions >= 0))[labels.indptr]
    out = np.zeros((place.max(initial=-1) + 1, new.shape[1]))
    positions, new = positions[positions >= 0], new.astype(np.float64, copy=False)
    kernels.csr_transpose_times_dense(ends[:-1], ends[1:], positions, np.ones(positions.size), new, out)
    return out


def _light_rows(labels: Any, place: Array) -> Array:
    """Rows with at least one active label whose Gram matrix is not summed on the workers."""
    before = np.append(0, np.cumsum(place[labels.indices] < 0))
    return np.flatnonzero(np.diff(before[labels.indptr]))


class _WholeBlock:
    """Reads the block's features at most once, and only if something needs them, on whichever thread."""

    def __init__(self, source: BlockSource, block: RowBlock) -> None:
        self.source, self.block = source, block
        self.rows_read = 0
        self._lock = threading.Lock()
        self._features: Features | None = None

    @property
    def features(self) -> Features:
        with self._lock:
            if self._features is None:
                self.rows_read = self.block.n_rows
                self._features = self.source.features(self.block)
            return self._features


class _Reader:
    """The rows of a block that a request trains on."""

    def __init__(self, whole: _WholeBlock, source: BlockSource, block: RowBlock) -> None:
        self.whole, self.source, self.block = whole, source, block

    @cached_property
    def features(self) -> Features:
        fold = self.source.fold
        return (
            self.whole.features
            if fold is None
            else self.whole.features.subset(fold.training_rows(self.block))
        )


def _block_scores(
    reader: _Reader, keys: tuple[str, ...], basis: tuple[Array, ...]
) -> tuple[Array, int, Array | None]:
    """Return Z_b = X_b U in a buffer with room to grow, its rank, and the last piece of it if just made.

    Each piece of U is multiplied by itself, so that a Z_b rebuilt elsewhere has the bits of one
    that grew piece by piece.
    """
    source, block = reader.source, reader.block
    kind = f"z{source.basis}" if source.fold is None else f"z{source.basis} {source.fold.held_out}"
    n_rows = block.n_rows if source.fold is None else source.fold.training_rows(block).size
    rank = sum(piece.shape[1] for piece in basis)
    known, z = source.kept(block, kind) or ((), None)
    if known != keys[: len(known)]:
        known, z = (), None
    done = sum(piece.shape[1] for piece in basis[: len(known)])
    if z is None or z.shape[1] < rank:
        room = -(-rank // COLUMN_STEP) * COLUMN_STEP
        grown = np.zeros((n_rows, room), dtype=source.dtype)
        if z is not None:
            grown[:, :done] = z[:, :done]
        z = grown
    fresh = None
    for piece in basis[len(known) :]:
        z[:, done : done + piece.shape[1]] = fresh = reader.features.times(piece)
        done += piece.shape[1]
    if known != keys:
        source.keep(block, kind, (keys, z), z.nbytes)
    return z, rank, fresh


class _SquareResidual:
    """R = -p1 + (p1 - p0) S at the active entries: the part of P^2 o (XW - Y) with the pattern of Y."""

    def __init__(self, labels: Any, z: Array, mt: Array | None, p0: float) -> None:
        self.labels, self.p0 = labels, p0
        self.scores = self._scores(z, mt)
        self.values = (1 - 2 * p0) * self.scores - (1 - p0)

    def _scores(self, z: Array, mt: Array | None) -> Array:
        scores = np.zeros(self.labels.nnz)
        if mt is not None and mt.shape[1]:
            kernels.active_scores(self.labels.indptr, self.labels.indices, z, mt, scores)
        return scores

    def sums(self) -> tuple[float, float]:
        """Sums of p1 (1 - s)^2 - p0 s^2 and of R s over active entries: N F and N <W, grad F> / 2
        but for p0 ||XW||^2."""
        missing = 1 - self.scores
        loss = (1 - self.p0) * (missing @ missing) - self.p0 * (self.scores @ self.scores)
        return float(loss), float(self.values @ self.scores)

    @property
    def _entries(self) -> tuple[Array, Array, Array, Array]:
        return self.labels.indptr[:-1], self.labels.indptr[1:], self.labels.indices, self.values

    def assembled(self, features: Features) -> Array:
        return features.transpose_times_labels(self.labels, self.values)[0]

    def times(self, right: Array) -> Array:
        out = np.empty((self.labels.shape[0], right.shape[1]))
        kernels.csr_times_dense(*self._entries, right, out)
        return out

    def transpose_times(self, dense: Array) -> Array:
        out = np.zeros((self.labels.shape[1], dense.shape[1]))
        kernels.csr_transpose_times_dense(*self._entries, dense.astype(np.float64, copy=False), out)
        return out

    def along(self, z: Array, direction: Array, alphas: tuple[float, ...]) -> Partial:
        scores = self._scores(z, direction)
        return {"curvature": np.array(scores @ scores)}


class _ExponentialResidual:
    """R = -w y exp(-y s) with y = +-1 and w = p1 or p0: dense, so worked on in pieces of rows."""

    def __init__(self, labels: Any, z: Array, mt: Array | None, p0: float) -> None:
        self.labels, self.z, self.mt, self.p0 = labels, z, mt, p0

    def _pieces(self) -> Iterator[tuple[slice, Array, Array, Array]]:
        """Yield rows, signs y, weights w and scores s."""
        n_rows, n_labels = self.labels.shape
        step = max(1, PIECE_ENTRIES // n_labels)
        for start in range(0, n_rows, step):
            rows = slice(start, min(start + step, n_rows))
            active = self.labels[rows].toarray() != 0
            signs = np.where(active, 1.0, -1.0)
            weights = np.where(active, 1 - self.p0, self.p0)
            yield rows, signs, weights, self._scores(rows, self.mt)

    def _scores(self, rows: slice, mt: Array | None) -> Array:
        if mt is None or not mt.shape[1]:
            return np.zeros((rows.stop - rows.start, self.labels.shape[1]))
        scores: Array = self.z[rows, : mt.shape[1]].astype(np.float64) @ mt.T
        return scores

    def sums(self) -> tuple[float, float]:
        """Sums of w exp(-y s) and of R s over all entries: N F and N <W, grad F>."""
        loss = slope = 0.0
        for _, y, w, s in self._pieces():
            terms = w * np.exp(-y * s)
            loss += float(np.sum(terms))
            slope -= float(np.vdot(y * terms, s))
        return loss, slope

    def assembled(self, features: Features) -> Array:
        out = np.zeros((self.labels.shape[1], features.n_features))
        for rows, y, w, s in self._pieces():
            out -= features.transpose_times(y * w * np.exp(-y * s), rows.start).T
        return out

    def times(self, right: Array) -> Array:
        return np.concatenate([-(y * w * np.exp(-y * s)) @ right for _, y, w, s in self._pieces()])

    def transpose_times(self, dense: Array) -> Array:
        out = np.zeros((self.labels.shape[1], dense.shape[1]))
        for rows, y, w, s in self._pieces():
            out -= (y * w * np.exp(-y * s)).T @ dense[rows]
        return out

    def along(self, z: Array, direction: Array, alphas: tuple[float, ...]) -> Partial:
        curve = np.zeros(len(alphas))
        for rows, y, w, s in self._pieces():
            slope = self._scores(rows, direction)
            for place, alpha in enumerate(alphas):
                curve[place] += np.sum(w * np.exp(-y * (s + alpha * slope)))
        return {"curve": curve}
