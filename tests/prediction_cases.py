"""Small models with many ties, data to predict, and the dense NumPy predictions they are held against."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from dswml import Model, create_dataset, open_dataset, predict_dataset
from dswml.executor import InProcessExecutor
from dswml.stored import Dataset

Array = NDArray[Any]

N, D, L, R = 150, 6, 23, 3
#: Small enough to cut the rows into many blocks.
BLOCK_BYTES = 2000
#: Rows that take long enough to be interrupted.
SLOW_ROWS = 2000
#: Scores of which 1.8 GiB would be needed.
MANY_ROWS, MANY_LABELS, MANY_RANK = 1200, 200_000, 8


def rows_and_labels(n_rows: int = N) -> tuple[Array, Array]:
    """Small whole numbers, so that scores are exact and equal ones abound; every label occurs."""
    rng = np.random.default_rng(3)
    x = rng.integers(0, 3, size=(n_rows, D)).astype(np.float64)
    y = (rng.random((n_rows, L)) < 0.15).astype(np.uint8)
    y[np.arange(L), np.arange(L)] = 1
    return x, y


def tied_model(**changes: Any) -> Model:
    """A model whose scores are multiples of 1/8."""
    rng = np.random.default_rng(4)
    u = rng.integers(-1, 2, size=(D, R)).astype(np.float64)
    m = rng.integers(-2, 3, size=(R, L)) / 8
    return Model(**{"u": u, "m": m, "p0": 0.125, "threshold": 0.5, **changes})


def names(kind: str, number: int) -> list[str]:
    """Names that need quoting and are not ASCII."""
    return [f'{kind} {i}, "é"' for i in range(number)]


def make_store(place: Path, *, sparse: bool, **options: Any) -> Dataset:
    """Store the rows in many chunks and open them in many row blocks."""
    x, y = rows_and_labels()
    create_dataset(place, sp.csr_array(x) if sparse else x, y, chunk_bytes=BLOCK_BYTES, **options)
    return open_dataset(place, block_bytes=BLOCK_BYTES)


def dense_scores(model: Model, x: Array) -> Array:
    """XW by the definition."""
    rows = np.asarray(x, dtype=np.float64)
    if model.normalize == "l2":
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        rows = rows / np.where(norms == 0, 1, norms)
    if model.intercept:
        rows = np.hstack([rows, np.full((len(rows), 1), model.intercept)])
    scores: Array = rows @ model.u @ model.m
    return scores


def dense_ranking(scores: Array, k: int) -> Array:
    """The k best labels of every row; of equal scores the lower label first."""
    every = range(scores.shape[1])
    return np.array([sorted(every, key=lambda label: (-row[label], label))[:k] for row in scores])


def dense_top_k(scores: Array, k: int) -> Array:
    """The k best labels of every row as zeros and ones."""
    chosen = np.zeros(scores.shape, dtype=np.int64)
    np.put_along_axis(chosen, dense_ranking(scores, k), 1, axis=1)
    return chosen


def contents(place: Path) -> dict[str, bytes]:
    """Every file below a place."""
    if place.is_file():
        return {"": place.read_bytes()}
    return {
        str(file.relative_to(place)): file.read_bytes() for file in sorted(place.rglob("*")) if file.is_file()
    }


def slow_data(place: Path) -> Dataset:
    rng = np.random.default_rng(8)
    x = rng.integers(0, 3, size=(SLOW_ROWS, D)).astype(np.float64)
    y = np.eye(SLOW_ROWS, L, dtype=np.uint8)
    return create_dataset(place, x, y, chunk_bytes=BLOCK_BYTES)


def predict_slowly(data: str, out: str, form: str) -> None:
    """Predict in many small row blocks, to be killed meanwhile."""
    with InProcessExecutor(1) as executor:
        predict_dataset(
            tied_model(),
            open_dataset(data, block_bytes=BLOCK_BYTES),
            out,
            format=form,
            scores=True,
            executor=executor,
            resume=os.path.exists(out) or os.path.exists(f"{out}.partial"),
        )


def predict_many(folder: str) -> None:
    """Predict many labels and print the growth of this process's memory in MiB."""
    rng = np.random.default_rng(0)
    u, m = rng.normal(size=(20, MANY_RANK)), rng.normal(size=(MANY_RANK, MANY_LABELS))
    model = Model(u=u, m=m, p0=1e-4)
    x = rng.normal(size=(MANY_ROWS, 20))
    with InProcessExecutor(2) as executor:
        predict_dataset(tied_model(), rows_and_labels()[0], f"{folder}/warm.zarr", executor=executor)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number, rule in enumerate(({"top_k": 5}, {"threshold": 50.0})):
            predict_dataset(model, x, f"{folder}/{number}.zarr", scores=True, executor=executor, **rule)  # type: ignore[arg-type]
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    np.save(f"{folder}/first.npy", x[:3] @ u @ m)
    print((after - before) / 1024)
