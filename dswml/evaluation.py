"""How good a model is on data larger than memory: every metric from one read of the rows.

Each row block gives partial sums (`dswml.metrics`) out of the tiles of its scores, and the sums add
over blocks. Precision, recall, F1, losses and rankings are exact. What depends on all thresholds at
once, the AUC and the best threshold, comes from a histogram of the scores between equidistant edges,
chosen beforehand from the scores of a few rows: counts at the edges are exact, and the AUC comes with
a bound on its error. With ``exact`` a first read takes the scores of all active entries as edges, and
both are exact too.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .blocks import DEFAULT_BLOCK_BYTES, RowBlock
from .cache import check_room
from .current import current_executor
from .errors import UsageError
from .executor import Executor
from .histograms import (
    active_entry_scores,
    exact_edges,
    score_bins,
    score_histogram_block,
    uniform_edges,
)
from .matching import check_features, check_labels
from .metrics import label_block, label_scores, label_table
from .model import Model, load_model
from .progress import OnProgress, reporting
from .ranking import inverse_propensities, ranking_block, ranking_scores
from .roc import Auc, ThresholdCurve, auc_from_histogram, threshold_curve
from .scoring import Rule, Selected, score_tiles
from .selection import empty_top_k, labels_of_top_k, merge_top_k
from .sources import as_dataset
from .stored import Dataset, StoredDataset
from .sweep import Partial, combine

__all__ = ["Evaluation", "evaluate"]

Array = npt.NDArray[Any]

#: Numbers of bins of the histogram of scores: the first with which the AUC's error is as small as this.
BINS = (2**12, 2**14, 2**16)
AUC_ERROR = 2e-4
#: Share of the range of the sampled scores that the bins go beyond it on either side.
RANGE_MARGIN = 0.05
#: Rows, blocks and labels of the sample.
SAMPLE_ROWS, SAMPLE_BLOCKS, SAMPLE_LABELS = 1024, 16, 1024
#: Most active entries whose scores can all be edges: there are two for each, and every block counts by them.
MAX_EXACT = 2**18


@dataclass(frozen=True)
class Evaluation:
    """How good a model is on some data.

    Attributes
    ----------
    scores : dict of str to float
        Fractions by the names of `dswml.metrics`: "micro_f1", "hamming_loss", "P@1", "nDCG@5", ...
    auc : Auc
        Micro AUC, and the bound on its error.
    best_threshold, best_f1 : float
        The threshold among the edges with the best micro F1, and that F1, exactly.
    edges : dict
        The edges of the histogram of scores: "kind" ("uniform" or "exact"), "number", "lowest", "highest".
    curve : ThresholdCurve
        True and false positives at every edge: the threshold curve and the ROC.
    labels : dict of str to ndarray (L,)
        Precision, recall, F1, support and predictions of every label.
    rule : str
        How labels were chosen.
    p0 : float
        Weight of the weighted Hamming loss.
    propensity : dict or None
        Parameters of the propensities and where the counts are from; None where they are not known.
    n_rows, n_labels : int
    seconds : float
    """

    scores: dict[str, float]
    auc: Auc
    best_threshold: float
    best_f1: float
    edges: dict[str, Any]
    curve: ThresholdCurve = field(repr=False)
    labels: dict[str, Array] = field(repr=False)
    rule: str
    p0: float
    propensity: dict[str, Any] | None
    n_rows: int
    n_labels: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the curve and the table of labels, as JSON takes it."""
        own = ("rule", "p0", "propensity", "edges", "n_rows", "n_labels", "seconds")
        found = {
            **self.scores,
            "micro_auc": self.auc.value,
            "micro_auc_error_bound": self.auc.error_bound,
            "best_threshold": self.best_threshold,
            "best_micro_f1": self.best_f1,
            **{name: getattr(self, name) for name in own},
        }
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in found.items()
        }


def evaluate(
    model: Model | str | os.PathLike[str],
    X: Any,
    Y: Any = None,
    *,
    k: int = 5,
    threshold: Any = None,
    top_k: int | None = None,
    propensity_from: Any = None,
    propensity: tuple[float, float] = (0.55, 1.5),
    exact: bool = False,
    zero_division: float = 0.0,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    executor: Executor | None = None,
    on_progress: OnProgress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Compare what a model predicts with the labels of a data set.

    Parameters
    ----------
    model : Model, str or path
        A model or the place of one.
    X, Y
        A data set or the place of one; or features and labels in any form that
        `dswml.sources.as_dataset` takes.
    k : int
        Length of the rankings of P@k and its relatives, but not more than there are labels.
    threshold : float or array-like (L,), optional
        Predict the labels with at least this score, instead of the model's own rule.
    top_k : int, optional
        Predict the k best labels of every row, instead of the model's own rule.
    propensity_from : Dataset, str or path, optional
        The training data, for the propensities of PSP@k and PSnDCG@k; by default the label counts in
        the model are used.
    propensity : (float, float)
        The usual A and B: (0.5, 0.4) for Wikipedia, (0.6, 2.6) for Amazon, (0.55, 1.5) for all others.
    exact : bool
        Read the data twice, for an AUC and a best threshold without error.
    zero_division : float
        Value of a ratio with denominator zero.
    block_bytes : int
        Largest size of a row block in memory, unless X is a `Dataset`, which has its own plan.
    executor : Executor, optional
        Who reads and scores; by default the cluster of the current Dask client, or this process.
    on_progress : callable, optional
        Told of the progress: ``on_progress(phase, done, total)``.
    storage_options : mapping, optional
        Passed to fsspec.

    Returns
    -------
    Evaluation

    Examples
    --------
    >>> model = Model(u=np.eye(2), m=np.array([[0.9, 0.1, 0.6], [0.2, 0.7, 0.4]]), p0=0.1)
    >>> found = evaluate(model, np.eye(2), [[1, 0, 0], [0, 1, 0]], k=1, exact=True)
    >>> found.scores["micro_precision"], found.scores["P@1"], found.auc
    (0.6666666666666666, 1.0, Auc(value=1.0, error_bound=0.0))
    """
    started = time.monotonic()
    if k < 1:
        raise UsageError(f"k is {k!r}: rankings must have at least one label")
    if not isinstance(model, Model):
        model = load_model(model, storage_options=storage_options)
    if Y is None and isinstance(X, str | os.PathLike):
        X = StoredDataset(X, block_bytes, storage_options)
    data = as_dataset(X, Y, block_bytes=block_bytes)
    normalized = check_features(model, data)
    check_labels(model, data)
    rule = model.chosen_rule(threshold, top_k)
    weights, facts = _propensities(model, propensity_from, propensity, storage_options)
    with ExitStack() as stack:
        if executor is None:
            executor = stack.enter_context(current_executor(data))
        _check(data, executor)
        light = replace(model, history=(), feature_names=None, label_names=None, label_counts=None)
        job = _Job(data, light, rule, normalized, min(k, model.n_labels), weights)
        edges, kind = _edges(job, executor, on_progress, exact=exact)
        job = replace(job, edges=edges)
        total: Partial = reporting(executor, "evaluating", on_progress).reduce(
            _evaluate_block, combine, data.blocks, job
        )
    curve = threshold_curve(total, edges)
    best_threshold, best_f1 = curve.best()
    return Evaluation(
        scores={
            **label_scores(total, p0=model.p0, zero_division=zero_division),
            **ranking_scores(total, zero_division=zero_division),
        },
        auc=auc_from_histogram(total, edges),
        best_threshold=best_threshold,
        best_f1=best_f1,
        edges={
            "kind": kind,
            "number": edges.size,
            "lowest": float(edges[0]),
            "highest": float(edges[-1]),
        },
        curve=curve,
        labels=label_table(total, zero_division=zero_division),
        rule=str(rule),
        p0=model.p0,
        propensity=facts,
        n_rows=data.n_rows,
        n_labels=data.n_labels,
        seconds=time.monotonic() - started,
    )


@dataclass(frozen=True)
class _Job:
    """What a task needs besides its row block."""

    data: Dataset
    model: Model
    rule: Rule
    normalized: bool
    k: int
    inverse_propensity: Array | None
    edges: Array | None = None

    def projected(self, block: RowBlock, matrix: Any) -> Iterator[tuple[slice, Array]]:
        """Yield pieces of the rows of a block with X U."""
        place = self.data.url or "X"
        return self.model.projected(matrix, normalized=self.normalized, first_row=block.start, place=place)


def _check(data: Dataset, executor: Executor) -> None:
    with warnings.catch_warnings():
        # Labels without a positive row cannot be learnt from, but evaluated.
        warnings.filterwarnings("ignore", message=".* have no positive row", category=UserWarning)
        data.check(executor)
        check_room(data.block_nbytes, executor)


def _evaluate_block(block: RowBlock, job: _Job) -> Partial:
    """Return the sums of one row block, added piece by piece."""
    matrix = job.data.read_x(block.start, block.stop)
    labels = job.data.read_y(block.start, block.stop)
    total: Partial | None = None
    for rows, z in job.projected(block, matrix):
        partial = _evaluate_piece(labels[rows], z, job)
        total = partial if total is None else combine([total, partial])
    assert total is not None
    return total


def _evaluate_piece(labels: Any, z: Array, job: _Job) -> Partial:
    m, rule = job.model.m, job.rule
    best_labels, best_scores = empty_top_k(len(z), max(job.k, rule.top_k or 0))
    selected = None if rule.threshold is None else Selected(rule.threshold, len(z), m.shape[1])
    assert job.edges is not None
    counts: Partial = {}
    for first, tile in score_tiles(z, m):
        merge_top_k(best_labels, best_scores, tile, first)
        if selected is not None:
            selected.add(first, tile)
        found = score_histogram_block(labels, tile, job.edges, first)
        counts = combine([counts, found]) if counts else found
    if selected is not None:
        predicted = selected.rows()
    else:
        predicted = labels_of_top_k(best_labels[:, : rule.top_k], m.shape[1])
    ranking = ranking_block(labels, best_labels[:, : job.k], job.inverse_propensity, coverage=False)
    return {**label_block(labels, predicted), **ranking, **counts}


def _edges(
    job: _Job, executor: Executor, on_progress: OnProgress | None, *, exact: bool
) -> tuple[Array, str]:
    """Choose the edges of the histogram of scores, the same for all blocks."""
    if exact:
        if job.data.nnz_y > MAX_EXACT:
            raise UsageError(
                f"exact=True (--exact) keeps the scores of all active entries, at most {MAX_EXACT}, and the "
                f"data have {job.data.nnz_y}: leave it out, the error of the AUC is bounded anyway"
            )
        active = reporting(executor, "reading active scores", on_progress).map(
            _active_scores, job.data.blocks, job
        )
        edges, kind = exact_edges(np.concatenate(active)), "exact"
    else:
        sample = executor.map(_sample_scores, _sample_blocks(job.data.blocks), job)
        seen, unseen = (np.concatenate([part[i] for part in sample]) for i in (0, 1))
        edges, kind = _uniform_edges(seen, unseen), "uniform"
    return edges, kind


def _uniform_edges(active: Array, inactive: Array) -> Array:
    """Return edges at equal distances over the range of some scores, enough for a small error of the AUC."""
    both = np.concatenate([active, inactive])
    low, high = float(both.min()), float(both.max())
    margin = RANGE_MARGIN * (high - low) or 0.5
    for bins in BINS:
        edges = uniform_edges(bins, low - margin, high + margin)
        shares = [
            np.bincount(score_bins(scores[None], edges)[0], minlength=bins + 2) / max(scores.size, 1)
            for scores in (active, inactive)
        ]
        if shares[0] @ shares[1] / 2 <= AUC_ERROR:
            break
    return edges


def _active_scores(block: RowBlock, job: _Job) -> Array:
    """Return the scores of the active entries of one row block, out of the tiles that are counted later."""
    matrix = job.data.read_x(block.start, block.stop)
    labels = job.data.read_y(block.start, block.stop)
    return np.concatenate(
        [
            active_entry_scores(labels[rows], tile, first)
            for rows, z in job.projected(block, matrix)
            for first, tile in score_tiles(z, job.model.m)
        ]
    )


def _sample_blocks(blocks: tuple[RowBlock, ...]) -> list[RowBlock]:
    """Return the first rows of some blocks, spread over all of them."""
    number = min(len(blocks), SAMPLE_BLOCKS)
    chosen = [blocks[place * len(blocks) // number] for place in range(number)]
    rows = SAMPLE_ROWS // number
    return [RowBlock(block.index, block.start, min(block.start + rows, block.stop)) for block in chosen]


def _sample_scores(block: RowBlock, job: _Job) -> tuple[Array, Array]:
    """Return the scores of all active and of some inactive entries of a few rows."""
    matrix = job.data.read_x(block.start, block.stop)
    labels = job.data.read_y(block.start, block.stop)
    m = job.model.m
    rng = np.random.default_rng(0)
    columns = np.sort(rng.choice(m.shape[1], min(m.shape[1], SAMPLE_LABELS), replace=False))
    some = np.ascontiguousarray(m[:, columns])
    active: list[Array] = []
    inactive: list[Array] = []
    for rows, z in job.projected(block, matrix):
        true = labels[rows]
        row = np.repeat(np.arange(len(z)), np.diff(true.indptr))
        active.append(np.einsum("ij,ji->i", z[row], m[:, true.indices]))
        inactive.append((z @ some)[true[:, columns].toarray() == 0])
    return np.concatenate(active), np.concatenate(inactive)


def _propensities(
    model: Model, source: Any, parameters: tuple[float, float], storage_options: Mapping[str, Any] | None
) -> tuple[Array | None, dict[str, Any] | None]:
    """Return the inverse propensities of the labels, if the counts are known, and where they are from."""
    a, b = parameters
    if source is None:
        n_rows = model.info.get("data", {}).get("n_rows")
        if model.label_counts is None or not isinstance(n_rows, int) or not 3 <= n_rows < 2**63:
            return None, None
        counts, place = model.label_counts, "the model"
    else:
        if isinstance(source, str | os.PathLike):
            source = StoredDataset(source, storage_options=storage_options)
        training = as_dataset(source)
        check_labels(model, training)
        counts, n_rows, place = training.label_counts, training.n_rows, training.url or "arrays"
    weights = inverse_propensities(counts, n_rows, a, b)
    return weights, {"a": a, "b": b, "counts_from": place, "n_rows": n_rows}
