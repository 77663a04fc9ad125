"""Small training problems, and the dense NumPy formulas of the paper that the solver is held against."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from dswml.blocks import RowBlock
from dswml.executor import InProcessExecutor
from dswml.features import BlockSource
from dswml.frank_wolfe import Options, Record, Solution, frank_wolfe
from dswml.problem import Problem

Array = NDArray[Any]

#: The sets of the paper.
REAL_SETS = ("bibtex", "delicious", "stackex_cs", "stackex_philosophy")


@cache
def planted(n_rows: int, n_features: int, n_labels: int, seed: int = 0, density: float = 0.1) -> Any:
    """Rows X and labels Y (dense 0/1) with a linear map between them and noise; every label occurs."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n_rows, n_features))
    scores = x @ rng.normal(size=(n_features, n_labels)) + 2 * rng.normal(size=(n_rows, n_labels))
    y = (scores > np.quantile(scores, 1 - density)).astype(np.int64)
    y[np.arange(n_labels) % n_rows, np.arange(n_labels)] = 1
    return x, y


@dataclass(frozen=True)
class Rows:
    """X and Y in memory, cut into given row blocks; notes every read of X."""

    x: Any
    y: Array
    cuts: tuple[int, ...] = ()
    reads: list[tuple[int, int]] = field(default_factory=list)

    @property
    def n_rows(self) -> int:
        return int(self.x.shape[0])

    @property
    def n_features(self) -> int:
        return int(self.x.shape[1])

    @property
    def n_labels(self) -> int:
        return int(self.y.shape[1])

    @property
    def is_sparse(self) -> bool:
        return bool(sp.issparse(self.x))

    @property
    def blocks(self) -> tuple[RowBlock, ...]:
        ends = [0, *self.cuts, self.n_rows]
        return tuple(RowBlock(i, start, stop) for i, (start, stop) in enumerate(pairwise(ends)))

    def read_x(self, start: int, stop: int) -> Any:
        self.reads.append((start, stop))
        return self.x[start:stop]

    def read_y(self, start: int, stop: int) -> Any:
        return sp.csr_array(self.y[start:stop].astype(np.uint8))


def even_cuts(n_rows: int, n_blocks: int) -> tuple[int, ...]:
    return tuple(int(end) for end in np.linspace(0, n_rows, n_blocks + 1)[1:-1])


@contextmanager
def a_problem(
    x: Any,
    y: Array,
    *,
    radius: float = 5.0,
    p0: float = 0.2,
    loss: str = "square",
    cuts: Sequence[int] = (),
    threads: int = 2,
    **source: Any,
) -> Iterator[Problem]:
    """The problem as the solver sees it, on threads of this process."""
    rows = Rows(x, y, tuple(cuts))
    with InProcessExecutor(threads=threads) as executor:
        yield Problem(
            executor,
            BlockSource(data=rows, run=uuid.uuid4().hex, **source),
            np.asarray(y.sum(axis=0)),
            radius=radius,
            p0=p0,
            loss=loss,
        )


def run(
    x: Any,
    y: Array,
    *,
    problem: dict[str, Any] | None = None,
    callbacks: Sequence[Callable[[Record], Any]] = (),
    **options: Any,
) -> Solution:
    """Solve with `Options` given by name; ``problem`` goes to `a_problem`."""
    with a_problem(x, y, **(problem or {})) as made:
        return frank_wolfe(made, Options(**options), callbacks)


# The formulas, dense.


def objective(x: Any, y: Array, w: Array, p0: float, loss: str = "square") -> float:
    """1/N of the weighted loss summed over all entries (Eq. 22 and Example 1)."""
    weights = np.where(y == 1, 1 - p0, p0)
    terms = (y - x @ w) ** 2 if loss == "square" else np.exp(-(2 * y - 1) * (x @ w))
    return float((weights * terms).sum() / x.shape[0])


def gradient(x: Any, y: Array, w: Array, p0: float, loss: str = "square") -> Array:
    """Its gradient, D x L."""
    weights = np.where(y == 1, 1 - p0, p0)
    signs = 2 * y - 1
    slopes = 2 * (x @ w - y) if loss == "square" else -signs * np.exp(-signs * (x @ w))
    result: Array = x.T @ (weights * slopes) / x.shape[0]
    return result


def exact_gap(x: Any, y: Array, w: Array, p0: float, radius: float, loss: str = "square") -> float:
    """<W, G> + radius sigma_1(G), by a full decomposition (Eq. 37)."""
    g = gradient(x, y, w, p0, loss)
    return float(np.vdot(w, g) + radius * np.linalg.svd(g, compute_uv=False)[0])


def project(w: Array, radius: float) -> Array:
    """Nearest matrix of nuclear norm at most ``radius``: singular values shifted down, by bisection."""
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    if s.sum() <= radius:
        return w
    low, high = 0.0, float(s[0])
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(s - middle, 0).sum() > radius else (low, middle)
    shifted: Array = (u * np.maximum(s - high, 0)) @ vt
    return shifted


def optimum(x: Array, y: Array, p0: float, radius: float, tol: float = 1e-9, steps: int = 20_000) -> Array:
    """W of a relative gap below ``tol``, by accelerated projected gradients with restart."""
    step = x.shape[0] / (2 * max(p0, 1 - p0) * np.linalg.norm(x, 2) ** 2)
    w = ahead = np.zeros((x.shape[1], y.shape[1]))
    t = 1.0
    for k in range(steps):
        new = project(ahead - step * gradient(x, y, ahead, p0), radius)
        if np.vdot(ahead - new, new - w) > 0:
            t = 1.0
        t_new = (1 + np.sqrt(1 + 4 * t * t)) / 2
        w, ahead, t = new, new + (t - 1) / t_new * (new - w), t_new
        if k % 50 == 0 and exact_gap(x, y, w, p0, radius) <= tol * objective(x, y, w, p0):
            return w
    raise AssertionError("the oracle itself did not converge")


def algorithm_1(
    x: Array,
    y: Array,
    p0: float,
    radius: float,
    iterations: int,
    *,
    step: str = "open-loop",
    loss: str = "square",
) -> list[tuple[float, float]]:
    """The paper's Algorithm 1 with the full gradient and numpy's SVD: objective and gap of W_0, W_1, ..."""
    w = np.zeros((x.shape[1], y.shape[1]))
    trace = []
    for k in range(iterations + 1):
        g = gradient(x, y, w, p0, loss)
        u, s, vt = np.linalg.svd(g)
        trace.append((objective(x, y, w, p0, loss), float(np.vdot(w, g) + radius * s[0])))
        towards = -radius * np.outer(u[:, 0], vt[0]) - w

        def along(a: float, w: Array = w, towards: Array = towards) -> float:
            return objective(x, y, w + a * towards, p0, loss)

        if step == "open-loop":
            a = 2 / (k + 2)
        elif loss == "square":  # three values give the parabola
            f0, fm, f1 = along(0), along(0.5), along(1)
            a = float(np.clip((3 * f0 - 4 * fm + f1) / (4 * (f0 - 2 * fm + f1)), 0, 1))
        else:
            grid = np.linspace(0, 1, 1025)
            a = float(grid[np.argmin([along(float(value)) for value in grid])])
        w = w + a * towards
    return trace
