"""The optimisation problem as the algorithm sees it: sweeps over the data, and W in factors.

W = U M with U (D x r) grown piece by piece and M held as M^T (L x r). `Problem` knows the
basis, sends it to whoever runs the sweeps, counts the passes over X that they really took,
and keeps ``X^T X U``, from which everything quadratic in X follows without another read.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .checkpoints import Journal
from .errors import DataError
from .executor import Executor, Shared
from .features import BlockSource
from .label_sums import Statistics
from .shards import ShardedQuadratic, ShardedStatistics, forget_shards
from .small_problem import Quadratic
from .sweep import Partial, Sweep, combine, light_pattern, sweep_block

__all__ = ["Problem"]

Array = npt.NDArray[Any]

#: Sums from here on have squares that overflow.
LARGEST = 1e150


class Problem:
    """Minimise the weighted loss of XW over ||W||_* <= radius, on some executor.

    Parameters
    ----------
    executor : Executor
        Runs the sweeps.
    source : BlockSource
        The data and what is done to its rows.
    label_counts : ndarray (L,)
        Positives of each label.
    radius, p0 : float
        The ball and the weight of inactive labels.
    loss : {"square", "exponential"}
    on_sweep : callable, optional
        Called with the share of the current sweep that is done.
    n_rows : int, optional
        Rows that are trained on, if not all.
    journal : Journal, optional
        Keeps the reads for checkpoints, and answers those that were made before an interruption.
    """

    def __init__(
        self,
        executor: Executor,
        source: BlockSource,
        label_counts: Array,
        *,
        radius: float,
        p0: float,
        loss: str = "square",
        on_sweep: Callable[[float], None] | None = None,
        n_rows: int | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.executor, self.source, self.label_counts = executor, source, label_counts
        self.radius, self.p0, self.loss, self.on_sweep = radius, p0, loss, on_sweep
        self.journal = journal
        self.n_rows = source.data.n_rows if n_rows is None else n_rows
        self.n_features, self.n_labels = source.n_features, source.data.n_labels
        self.rows_read = 0
        self.basis = np.zeros((self.n_features, 0))
        self.moment = np.zeros((self.n_features, 0))  # X^T X U
        self.statistics: Statistics | None = None
        self._worker_place: Array | None = None
        self.pieces: list[Shared] = []
        self.pending = 0
        # X^T X and the data part of the gradient, once one read has brought all there is to know.
        self.known: tuple[Array, Array] | None = None
        # X^T X where it is kept: what follows from it is not asked for.
        self.square: Array | None = None

    @property
    def passes(self) -> int:
        """Reads of all of X so far, counted in rows by whoever read them."""
        return -(-self.rows_read // self.n_rows)

    @property
    def rank(self) -> int:
        """Number of directions in the basis."""
        return int(self.basis.shape[1])

    def keep_statistics(self, place: Array, shards: int = 0) -> None:
        """From now on hold the statistics of the corrective step; ``place`` as in `Statistics`.

        The workers hold the label side if it is given so many bytes of their memory together.
        """
        if self.p0 == 0.5:
            self._worker_place = np.arange(self.n_labels)
            nothing = np.zeros(0, dtype=np.int64)
            indptr = np.zeros(self.n_labels + 1, dtype=np.int64)
            self.statistics = Statistics(self.label_counts, self._worker_place, indptr, nothing)
            return
        blocks = self.source.data.blocks
        parts = self.executor.map(light_pattern, blocks, (self.source, place))
        offsets = np.cumsum([0, *(count for _, _, count in parts)])
        rows = np.concatenate([part[0] + offset for part, offset in zip(parts, offsets, strict=False)])
        labels = np.concatenate([part[1] for part in parts])
        order = np.argsort(labels, kind="stable")
        indptr = np.concatenate([[0], np.cumsum(np.bincount(labels, minlength=self.n_labels))])
        self._worker_place = place
        pattern = indptr.astype(np.int64), rows[order]
        if not shards:
            self.statistics = Statistics(self.label_counts, place, *pattern)
            return
        self.statistics = ShardedStatistics(self.executor, self.source.run, self.label_counts, *pattern)
        reserve = self.source.reserve + shards // max(self.executor.n_processes, 1)
        self.source = replace(self.source, reserve=reserve)

    def small_problem(self, pool: ThreadPoolExecutor | None = None) -> Quadratic:
        """F as a function of M for the basis at hand."""
        assert self.statistics is not None
        if isinstance(self.statistics, ShardedStatistics):
            return ShardedQuadratic(self.statistics, self.n_rows, self.p0)
        return Quadratic(self.statistics, self.n_rows, self.p0, pool)

    def append(self, directions: Array) -> int:
        """Add the part of ``directions`` (D x m) outside the basis; return how many were new.

        The next sweep computes their scores and statistics in passing.
        """
        largest = np.abs(directions).max(initial=0.0)
        new = directions / max(largest, 1e-300)
        for _ in range(2):
            new = new - self.basis @ (self.basis.T @ new)
            new, triangle = np.linalg.qr(new)
            new = new[:, np.abs(np.diag(triangle)) > 1e-10]
        room = self.n_features - self.rank
        new = np.ascontiguousarray(new[:, : max(room, 0)])
        if new.shape[1]:
            self.pieces.append(Shared(f"basis-{uuid.uuid4().hex}", new))
            self.basis = np.hstack([self.basis, new])
            self.pending += new.shape[1]
        return int(new.shape[1])

    def append_all(self) -> None:
        """Make the features themselves the basis, where all there is to know is known."""
        if self.rank == self.n_features:
            return
        assert self.known is not None
        assert self.statistics is not None
        self.executor.forget([piece.key for piece in self.pieces])
        self.moment, gradient = self.known
        self.basis = np.eye(self.n_features)
        self.pieces, self.pending = [Shared(f"basis-{uuid.uuid4().hex}", self.basis)], 0
        self.statistics.renew(self.moment, -2 * gradient)

    @property
    def whole(self) -> bool:
        """Whether the basis are the features themselves: orthonormal, with ones on the diagonal."""
        return self.rank == self.n_features and bool((np.diagonal(self.basis) == 1).all())

    def sweep(self, mt: Array | None, **request: Any) -> Partial:
        """Read the data once, with W = U M or 0; see `Sweep` for what can be asked for.

        With p0 = 1/2 the residual at the active entries does not depend on W, so that a gradient and X^T X
        answer all that the corrective step asks for without another read.
        """
        asked = self.request(mt, **request)
        if self.known is not None:
            result = self._answer(mt, *self.known)
        elif self.journal is None:
            result = self._read(asked)
        else:
            result = self.journal.through([asked], self.pieces, lambda: self._read(asked))
        self.rows_read += int(result["rows_read"])
        self.absorb(result)
        if self.p0 == 0.5 and asked.square and asked.assemble:
            self.known = result["square"], result["gradient"]
        return result

    def _answer(self, mt: Array | None, square: Array, gradient: Array) -> Partial:
        """What a read would bring; R is -1/2 at all active entries, so ``gradient`` is -Y^T X / 2."""
        assert self.statistics is not None
        active = 0.0 if mt is None else float(np.vdot(mt, self.statistics.positives[:, : mt.shape[1]]))
        new = self.basis[:, self.rank - self.pending :]
        return {
            "loss": np.array(float(self.label_counts.sum()) / 2 - active),
            "slope": np.array(-active / 2),
            "gradient": gradient,
            "moment": square @ new,
            "positives": -2 * (gradient @ new),
            "rows_read": np.array(0),
        }

    def _read(self, request: Sweep) -> Partial:
        blocks, on_sweep = self.source.data.blocks, self.on_sweep
        return self.executor.reduce(
            sweep_block,
            combine,
            blocks,
            request,
            self.pieces,
            on_result=None if on_sweep is None else lambda done: on_sweep(done / len(blocks)),
        )

    def request(self, mt: Array | None, **request: Any) -> Sweep:
        """Return what `sweep` asks every row block for."""
        return Sweep(
            source=self.source,
            basis=tuple(piece.key for piece in self.pieces),
            p0=self.p0,
            loss=self.loss,
            mt=None if mt is None else np.ascontiguousarray(mt),
            grow=self.pending,
            moment=self.square is None,
            place=self._worker_place,
            grams=self.p0 != 0.5,
            **request,
        )

    def absorb(self, sums: Partial) -> None:
        """Take the statistics of new directions, if there were any, from the sums of a sweep."""
        for name, values in sums.items():
            largest = max(values.max(initial=0.0), -values.min(initial=0.0))  # or NaN; no copy of the values
            if name != "curve" and not largest < LARGEST:
                raise DataError(
                    f"the numbers of the fit overflow (sums of {name!r} beyond {LARGEST:g}): scale the "
                    "features, for example with normalize='l2', or lower the radius"
                )
        if self.pending:
            self._grow(sums)

    def _grow(self, result: Partial) -> None:
        new, self.pending = self.basis[:, self.rank - self.pending :], 0
        moment = result["moment"] if self.square is None else self.square @ new
        self.moment = np.hstack([self.moment, moment])
        if self.statistics is not None:
            self.statistics.append(
                self.basis.T @ moment,
                result["positives"],
                result.get("rows"),
                result.get("grams"),
            )

    def rotate(self, rotation: Array) -> None:
        """Replace the basis by ``U @ rotation`` (orthonormal columns), to forget directions."""
        self.executor.forget([piece.key for piece in self.pieces])
        self.basis = self.basis @ rotation
        self.moment = self.moment @ rotation
        self.pieces = [Shared(f"basis-{uuid.uuid4().hex}", np.ascontiguousarray(self.basis))]
        if self.statistics is not None:
            self.statistics.rotate(rotation)

    def close(self) -> None:
        """Drop what the workers hold for this problem."""
        self.executor.forget([piece.key for piece in self.pieces])
        if isinstance(self.statistics, ShardedStatistics):
            self.executor.everywhere(forget_shards, self.source.run)

    # What follows from the sums without another read.

    def value_and_slope(self, mt: Array, sums: Partial, gradient: Array | None = None) -> tuple[float, float]:
        """F(W) and <W, grad F(W)> from the "loss" and "slope" of a sweep, and the gradient if known."""
        power = 0.0
        if gradient is not None and self.whole:
            power = float(np.vdot(gradient, mt)) / self.scale - float(sums["slope"])
        elif self.loss == "square":
            power = self.p0 * float(np.vdot(self.gram(mt.shape[1]), mt.T @ mt))
        return (float(sums["loss"]) + power) / self.n_rows, self.scale * (float(sums["slope"]) + power)

    def gram(self, rank: int) -> Array:
        """U^T X^T X U over the first directions, symmetric to the last bit."""
        gram = self.moment if self.whole else self.basis[:, :rank].T @ self.moment[:, :rank]
        return (gram + gram.T) / 2

    @property
    def scale(self) -> float:
        """Factor of the sums in the gradient."""
        return (2 if self.loss == "square" else 1) / self.n_rows

    def gradient(self, mt: Array, assembled: Array) -> Array:
        """Transpose of grad F (L x D) from the "gradient" of a sweep."""
        gradient = self.scale * assembled
        if self.loss == "square" and mt.shape[1]:
            gradient += mt @ (self.scale * self.p0 * self.moment[:, : mt.shape[1]].T)
        return gradient

    def gradient_times(self, mt: Array, right: Array, sum_right: Array) -> Array:
        """``grad F @ right`` (D x k) from the "right" of a sweep."""
        if self.loss == "square":
            sum_right = sum_right + self.p0 * (self.moment[:, : mt.shape[1]] @ (mt.T @ right))
        return self.scale * sum_right

    def gradient_transpose_times(self, mt: Array, left: Array, sum_left: Array) -> Array:
        """``grad F^T @ left`` (L x k) from the "left" of a sweep."""
        if self.loss == "square":
            sum_left = sum_left + self.p0 * (mt @ (self.moment[:, : mt.shape[1]].T @ left))
        return self.scale * sum_left
