"""From a data set to a model: what the estimator and the command line have in common."""

from __future__ import annotations

import importlib.metadata
import platform
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import numpy as np

from .cache import check_room, forget_run, task_nbytes
from .checkpoints import Checkpoints, begin, data_request, saving
from .errors import UsageError
from .executor import Executor, one_blas_thread
from .features import BlockSource
from .frank_wolfe import Options, Record, Solution, frank_wolfe
from .hiding import public_name
from .label_sums import summed_entries
from .model import Model
from .problem import Problem
from .result_sizes import has_square, result_nbytes
from .stored import Dataset
from .weights import default_threshold, resolve_p0

__all__ = ["Parameters", "data_facts", "train"]


@dataclass(frozen=True)
class Parameters:
    """Everything a fit depends on besides the data; see `dswml.SparseWeightedClassifier`."""

    radius: float
    weights: str | float = "sparsity"
    loss: str = "square"
    fit_intercept: bool | float = False
    normalize: str | None = None
    threshold: float | None = None
    dtype: str = "auto"
    cache: str = "auto"
    #: What the seed of the options was drawn with, if that is a number.
    random_state: int | None = None
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        if self.loss == "exponential" and self.options.step == "corrective":
            raise UsageError(
                "step='corrective' needs the square loss, whose statistics can be summed in advance: "
                "with loss='exponential' use step='line-search' or step='open-loop'"
            )


def train(
    data: Dataset,
    parameters: Parameters,
    executor: Executor,
    *,
    callbacks: Sequence[Callable[[Record], Any]] = (),
    on_sweep: Callable[[float], None] | None = None,
    checkpoint: Checkpoints | None = None,
    stop: Callable[[], bool] | None = None,
    announce: Callable[[str], None] | None = None,
) -> tuple[Model, Solution]:
    """Fit a model.

    Parameters
    ----------
    data : Dataset
    parameters : Parameters
    executor : Executor
        Where the sweeps run.
    callbacks : sequence of callable
        Each sees the `Record` of every iteration; one that returns True ends the fit.
    on_sweep : callable, optional
        Sees the share of the current read of the data that is done.
    checkpoint : Checkpoints, optional
        Where to write checkpoints, and whether to go on from one.
    stop : callable, optional
        Asked after every read whether to write a checkpoint and stop, with a `StoppedEarlyError`.
    announce : callable, optional
        Told, in a line for people, what the fit goes on from.

    Returns
    -------
    model : Model
    solution : Solution
    """
    data.check(executor)
    p0 = resolve_p0(parameters.weights, data.k_hat, data.n_labels)
    limit, corrective = parameters.options.memory_limit, parameters.options.step == "corrective"
    square = corrective and has_square(data.n_features, data.n_labels, data.is_sparse)
    grams = 0
    if corrective and p0 != 0.5:
        grams = summed_entries(data.n_rows, data.n_features, np.asarray(data.label_counts), limit)
    results = result_nbytes(data.n_features, data.n_labels, limit, square=square, grams=grams)
    check_room(data.block_nbytes, executor, results)
    dtype = parameters.dtype
    if dtype == "auto":
        dtype = "float64" if data.is_sparse else str(data.x_dtype)
    source = BlockSource(
        data=data,
        run=uuid.uuid4().hex,
        dtype=dtype,
        normalize=None if data.normalize == parameters.normalize else parameters.normalize,
        intercept=float(parameters.fit_intercept),
        cache=parameters.cache,
        reserve=task_nbytes(0, results),
    )
    threshold = parameters.threshold
    facts: dict[str, Any] = {
        "p0": p0,
        "loss": parameters.loss,
        "threshold": default_threshold(parameters.loss) if threshold is None else float(threshold),
        "normalize": parameters.normalize or data.normalize,
        "intercept": source.intercept,
        "label_counts": np.asarray(data.label_counts),
    }
    info = {**data_facts(data), "parameters": asdict(parameters)}
    journal = begin(
        checkpoint,
        _request(data, parameters),
        n_rows=data.n_rows,
        limit=parameters.options.memory_limit,
        stop=stop,
        time_limit=parameters.options.time_limit,
        announce=announce,
        about={**facts, "info": info},
    )
    problem = Problem(
        executor,
        source,
        np.asarray(data.label_counts),
        radius=parameters.radius,
        p0=p0,
        loss=parameters.loss,
        on_sweep=on_sweep,
        journal=journal,
    )
    try:
        with one_blas_thread(), saving(journal):
            solution = frank_wolfe(problem, parameters.options, callbacks)
    finally:
        problem.close()
        executor.everywhere(forget_run, source.run)
    model = Model(
        u=solution.u,
        m=solution.m,
        label_names=data.label_names,
        feature_names=data.feature_names,
        info=_reached(solution) | info,
        history=solution.history,
        **facts,
    )
    return model, solution


#: Parameters that may be others when work goes on from a checkpoint, or tell nothing that others do not.
CHANGEABLE = (
    "cache",
    "threshold",
    "random_state",
    "max_iter",
    "max_passes",
    "time_limit",
    "tol",
    "shard_labels",
)


def _request(data: Dataset, parameters: Parameters) -> dict[str, Any]:
    """What a checkpoint is of: only the same may go on from it."""
    asked = asdict(parameters)
    asked |= asked.pop("options")
    same = {name: value for name, value in asked.items() if name not in CHANGEABLE}
    return {"verb": "train", **data_request(data), **same}


def _reached(solution: Solution) -> dict[str, Any]:
    certificate = solution.certificate
    last = solution.history[-1]
    return {
        "objective": solution.objective,
        "gap": solution.gap,
        "relative_gap": last.relative_gap,
        "certificate": None if certificate is None else asdict(certificate),
        "status": solution.status,
        "iterations": solution.iterations,
        "passes": solution.passes,
        "seconds": solution.seconds,
    }


def data_facts(data: Dataset) -> dict[str, Any]:
    """What a model and a checkpoint remember of their data, and the software at work."""
    return {
        "k_hat": data.k_hat,
        "data": {
            **({} if data.url is None else {"name": public_name(data.url)}),
            "fingerprint": data.fingerprint,
            "n_rows": data.n_rows,
            "n_features": data.n_features,
            "n_labels": data.n_labels,
            "nnz_y": data.nnz_y,
        },
        "versions": _versions(),
    }


@cache
def _versions() -> dict[str, str]:
    names = ("dswml", "numpy", "scipy", "zarr", "dask")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}
