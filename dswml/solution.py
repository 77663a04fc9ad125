"""What a fit is asked for and what it returns: options, the record of every iteration, the solution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

__all__ = ["Certificate", "Options", "Record", "Solution"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Record:
    """One iteration: the state of W_k before the step from it."""

    iteration: int
    passes: int
    objective: float
    gap: float
    relative_gap: float
    certified: bool
    rank: int
    directions: int
    seconds: float


@dataclass(frozen=True)
class Certificate:
    """How the gap is known.

    "assembled" is that of Eq. 37 itself, "lanczos" a bound of it that holds with ``confidence``, and
    "curvature" the tighter one of `dswml.duality`.
    """

    method: str
    gap: float
    confidence: float

    def __str__(self) -> str:
        """In words, for people."""
        how = {"assembled": "exact", "curvature": "with the curvature of the loss"}.get(
            self.method, "Lanczos"
        )
        doubt = 1 - self.confidence
        return f"certified, {how}" + (f", confidence 1 - {doubt:.0e}" if doubt else "")


@dataclass(frozen=True)
class Options:
    """How to run; see `dswml.SparseWeightedClassifier` for the meaning of each.

    ``curvature`` allows for the gaps of `dswml.duality`; without, all are those of Eq. 37.
    """

    step: str = "corrective"
    block_size: int | None = None
    tol: float = 1e-3
    max_iter: int = 1000
    max_passes: int | None = None
    time_limit: float | None = None
    memory_limit: int = 2**31
    seed: int = 0
    assemble: bool | None = None
    shard_labels: bool | None = None
    curvature: bool = True


@dataclass(frozen=True)
class Solution:
    """W = U M in compact singular form, U (D x r), M (r x L), and how it was reached.

    ``gap`` is the certified one where there is a certificate; ``gap_estimate`` is what the oracle
    alone says, which is below the true gap unless the gradient was assembled, and the certified one
    where that follows from the curvature.
    """

    u: Array
    m: Array
    objective: float
    gap: float
    gap_estimate: float
    certificate: Certificate | None
    status: str
    iterations: int
    passes: int
    seconds: float
    history: tuple[Record, ...]
