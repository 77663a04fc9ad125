"""The solutions of one weighting on one fold where gradients are too large to be assembled.

An iteration is the round of a matrix-free fit (see `dswml.frank_wolfe`), for all open points at once: one
read multiplies the gradient of each with a start block, and the products join the basis; the next read
takes these up. U^T grad F then follows from the small problem, and with it an estimate of each gap from
all directions there are, among them those made at that very W. Such gaps steer; they certify nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import oracle
from .path import NOTHING, Path, Point
from .problem import Problem
from .result_sizes import MAX_BLOCK, MIN_BLOCK, BlockLimit
from .sweep import Partial, Sweep

__all__ = ["FreePath"]

Array = npt.NDArray[Any]


class FreePath(Path):
    """All radii of one weighting on one fold, whose gradients are known by their products with blocks.

    Parameters
    ----------
    limit : BlockLimit
        How many directions may join the basis in one iteration; it bounds the window too.
    seed : sequence of int
        Makes the random vectors, with the iteration and the number of the point.
    """

    certified = False

    def __init__(
        self,
        problem: Problem,
        radii: Sequence[float],
        cap: int,
        window: int,
        tol: float,
        *,
        limit: BlockLimit,
        seed: Sequence[int],
    ) -> None:
        fitting = min(limit.at(cap), cap // 2) // MIN_BLOCK
        super().__init__(problem, radii, cap, min(max(fitting, 1), window), tol)
        self.limit, self.seed, self.ahead = limit, seed, self.window * MIN_BLOCK
        self.blocks: tuple[Array, ...] = ()
        self.values_and_slopes: list[tuple[float, float]] = []

    def request(self, iteration: int) -> Sweep:
        """Ask for the products of the open points' gradients with a start block each."""
        self.advance()
        self.narrow()
        compact = [point.compact() for point in self.open]
        self.blocks = tuple(
            self.start_block(point, mt, np.random.default_rng([*self.seed, iteration, number]))
            for number, (point, (_, mt)) in enumerate(zip(self.open, compact, strict=True))
        )
        points = tuple((*factors, self.problem.p0) for factors in compact)
        return self.problem.request(None, points=points, rights=self.blocks)

    def start_block(self, point: Point, mt: Array, rng: np.random.Generator) -> Array:
        """Vectors for the gradient at a point to be multiplied with: as many as all points have room for."""
        problem = self.problem
        room = self.limit.at(problem.rank)
        if self.cap < problem.n_features:
            room = min(room, self.cap - problem.rank)
        width = min(MIN_BLOCK + mt.shape[1], MAX_BLOCK, max(room // len(self.open), 2))
        return np.ascontiguousarray(oracle.warm_start(mt, point.last_right, width, rng))

    def narrow(self) -> None:
        """Forget directions where there is no more room: those that no solution uses first, oldest first.

        W stays what it is where it can, since its gap is estimated afterwards.
        """
        if not self.full:
            return
        room = self.cap - self.ahead
        for points in (self.near, self.open, self.open[:1]):
            used = self.used(points, NOTHING)
            if used.shape[1] <= room:
                break
        self.rotate(oracle.with_recent(used[:, :room], room))

    def look(self, sums: Partial) -> None:
        """Take the products: values and slopes of the open points, and directions for the basis."""
        problem = self.problem
        self.values_and_slopes, products = [], [np.zeros((problem.n_features, 0))]
        for number, (point, block) in enumerate(zip(self.open, self.blocks, strict=True)):
            found = {"loss": sums[f"loss {number}"], "slope": sums[f"slope {number}"]}
            self.values_and_slopes.append(problem.value_and_slope(point.mt, found))
            products.append(problem.gradient_times(point.mt, block, sums[f"right {number}"]))
        problem.append(np.hstack(products))

    def correct(self) -> None:
        """Estimate the gaps of the open points, settle those within the tolerance, and solve the others."""
        small = self.problem.small_problem()
        for point, block, (objective, slope) in zip(
            self.open, self.blocks, self.values_and_slopes, strict=True
        ):
            point.widen(self.problem.rank)
            _, values, right = oracle.leading_on_basis(small, point.mt, block.shape[1])
            point.last_right = right
            self.judge(point, objective, max(slope + point.radius * values.max(initial=0.0), 0.0))
        self.advance()
        super().correct()
