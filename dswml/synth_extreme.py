"""Sparse data of extreme size: Zipf features, and a planted low-rank map to labels of power-law frequency.

A row draws distinct features by Zipf's law. Their values and factors give the row's coordinates
z = x P, one for each topic. Labels are shared out over the topics (label l belongs to topic l mod T)
and follow a power law within each. The row draws a few candidates from its two strongest topics and
takes those with the highest score z . q_l: a map of rank T, of which no row ever meets all L labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from dswml.errors import UsageError
from dswml.selection import compiled
from dswml.streams import GROUP_ROWS, generator, uniform, uniform_integers

__all__ = ["ExtremeRows"]

Array = NDArray[Any]

_STREAM_LENGTHS, _STREAM_ROWS, _STREAM_FEATURE_FACTORS, _STREAM_LABEL_FACTORS = range(16, 20)

#: Candidates that a row draws for each label it takes.
_CANDIDATES = 4
#: Draws for each distinct candidate before the most frequent unused ones are taken in order.
_PATIENCE = 16
_MAX_TOPICS = 16


def _zipf(size: int) -> NDArray[np.float64]:
    """Cumulative probabilities of Zipf's law with exponent 1 on 0 .. size - 1."""
    weights = np.cumsum(1.0 / np.arange(1, size + 1))
    return np.asarray(weights / weights[-1])


@dataclass(frozen=True, eq=False)
class _Plan:
    """What all rows share: the laws of features and labels, and the factors of the planted map."""

    feature_law: NDArray[np.float64]
    label_law: NDArray[np.float64]
    feature_factors: NDArray[np.float32]
    label_factors: NDArray[np.float32]


def _factors(seed: int, purpose: int, rows: int, rank: int) -> NDArray[np.float32]:
    integers = uniform_integers(seed, purpose, 0, rows * rank, bits=24).astype(np.float32)
    return (integers * np.float32(2.0**-23) - np.float32(1.0)).reshape(rows, rank)


@lru_cache(maxsize=1)
def _plan(seed: int, n_features: int, n_labels: int, features_per_row: int) -> _Plan:
    topics = max(1, min(_MAX_TOPICS, n_labels // 64))
    feature_law = _zipf(n_features)
    feature_factors = _factors(seed, _STREAM_FEATURE_FACTORS, n_features, topics)
    # A feature that nearly every row has tells nothing about the row.
    expected = features_per_row * np.diff(feature_law, prepend=0.0)
    feature_factors /= (1.0 + expected).astype(np.float32)[:, None]
    label_factors = _factors(seed, _STREAM_LABEL_FACTORS, n_labels, topics)
    label_factors *= np.float32(0.5)
    label_factors[np.arange(n_labels), np.arange(n_labels) % topics] += np.float32(1.0)
    return _Plan(feature_law, _zipf(-(-n_labels // topics)), feature_factors, label_factors)


@compiled
def _draw_features(rng: np.random.Generator, law: Array, seen: Array, stamp: int, out: Array) -> None:
    """Fill ``out`` with distinct, sorted features."""
    found = 0
    for _ in range(_PATIENCE * len(out)):
        if found == len(out):
            break
        feature = int(np.searchsorted(law, rng.random(), side="right"))
        if seen[feature] != stamp:
            seen[feature] = stamp
            out[found] = feature
            found += 1
    feature = 0
    while found < len(out):
        if seen[feature] != stamp:
            seen[feature] = stamp
            out[found] = feature
            found += 1
        feature += 1
    out.sort()


@compiled
def _draw_labels(
    rng: np.random.Generator,
    law: Array,
    factors: Array,
    z: Array,
    seen: Array,
    stamp: int,
    candidates: Array,
    scores: Array,
    out: Array,
) -> None:
    """Fill ``out`` with the distinct, sorted labels of a row with coordinates ``z``."""
    n_labels, topics = factors.shape
    first = int(np.argmax(z))
    second = first
    for topic in range(topics):
        if topic != first and (second == first or z[topic] > z[second]):
            second = topic
    wanted = _CANDIDATES * len(out)
    found = 0
    for _ in range(_PATIENCE * wanted):
        if found == wanted:
            break
        # The strongest topic gives twice as many candidates as the next.
        topic = first if rng.random() * 3.0 < 2.0 else second
        label = topic + topics * int(np.searchsorted(law, rng.random(), side="right"))
        if label < n_labels and seen[label] != stamp:
            seen[label] = stamp
            candidates[found] = label
            found += 1
    label = 0
    while found < len(out):
        if seen[label] != stamp:
            seen[label] = stamp
            candidates[found] = label
            found += 1
        label += 1
    for i in range(found):
        score = 0.0
        for topic in range(topics):
            score += z[topic] * np.float64(factors[candidates[i], topic])
        scores[i] = score
    for k in range(len(out)):
        best = k
        for i in range(k + 1, found):
            if scores[i] > scores[best] or (scores[i] == scores[best] and candidates[i] < candidates[best]):
                best = i
        out[k] = candidates[best]
        candidates[best] = candidates[k]
        scores[best] = scores[k]
    out.sort()


@compiled
def _draw_rows(
    rng: np.random.Generator,
    feature_law: Array,
    label_law: Array,
    feature_factors: Array,
    label_factors: Array,
    x_ptr: Array,
    y_ptr: Array,
    x_indices: Array,
    x_values: Array,
    y_indices: Array,
    unit: bool,
) -> None:
    n_features, topics = feature_factors.shape
    n_labels = label_factors.shape[0]
    seen_feature = np.zeros(n_features, dtype=np.int32)
    seen_label = np.zeros(n_labels, dtype=np.int32)
    most = 0
    for row in range(len(y_ptr) - 1):
        most = max(most, y_ptr[row + 1] - y_ptr[row])
    candidates = np.empty(_CANDIDATES * most, dtype=np.int64)
    scores = np.empty(_CANDIDATES * most, dtype=np.float64)
    z = np.empty(topics, dtype=np.float64)
    for row in range(len(x_ptr) - 1):
        indices = x_indices[x_ptr[row] : x_ptr[row + 1]]
        values = x_values[x_ptr[row] : x_ptr[row + 1]]
        _draw_features(rng, feature_law, seen_feature, row + 1, indices)
        z[:] = 0.0
        squares = 0.0
        for i in range(len(indices)):
            value = 0.5 + rng.random()
            squares += value * value
            values[i] = value
            for topic in range(topics):
                z[topic] += value * np.float64(feature_factors[indices[i], topic])
        if unit:
            scale = 1.0 / np.sqrt(squares)
            for i in range(len(values)):
                values[i] = values[i] * scale
        _draw_labels(
            rng,
            label_law,
            label_factors,
            z,
            seen_label,
            row + 1,
            candidates,
            scores,
            y_indices[y_ptr[row] : y_ptr[row + 1]],
        )


def _spread(mean: int) -> tuple[int, int]:
    """Smallest and largest number of entries of a row: the mean is in their middle."""
    low = max(1, mean // 2)
    return low, 2 * mean - low


@dataclass(frozen=True)
class ExtremeRows:
    """Rows of the planted map, in groups of `GROUP_ROWS`.

    Parameters
    ----------
    n_features, n_labels : int
        D and L.
    features_per_row, labels_per_row : int
        Mean numbers of entries of a row; they vary evenly between half and one and a half times the mean.
    seed : int
    normalize : None or "l2"
        "l2" scales the rows of X to unit Euclidean norm.
    dtype : str
        "float32" or "float64".

    Examples
    --------
    >>> x, y = ExtremeRows(500, 300, features_per_row=20, labels_per_row=3, seed=0).group(0)
    >>> per_row = np.diff(x.indptr), np.diff(y.indptr)
    >>> [(int(n.min()), int(n.max())) for n in per_row]
    [(10, 30), (1, 5)]
    """

    n_features: int
    n_labels: int
    features_per_row: int
    labels_per_row: int
    seed: int
    normalize: Literal["l2"] | None = None
    dtype: str = "float32"

    is_sparse: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for what, mean, most in (
            ("features", self.features_per_row, self.n_features),
            ("labels", self.labels_per_row, self.n_labels),
        ):
            if mean < 1 or _spread(mean)[1] > most:
                raise UsageError(
                    f"a row has {mean} {what} on average and up to {_spread(mean)[1]}, but there are {most}: "
                    f"ask for more {what} in all, or fewer in a row"
                )

    @property
    def bytes_per_row(self) -> float:
        """Mean size of a row of X and Y in memory."""
        return self.features_per_row * (4 + np.dtype(self.dtype).itemsize) + 5 * self.labels_per_row + 16

    def _indptr(self, group: int) -> list[NDArray[np.int64]]:
        """Row starts of X and Y."""
        draws = uniform(self.seed, _STREAM_LENGTHS, group, 2 * GROUP_ROWS).reshape(2, GROUP_ROWS)
        spreads = _spread(self.features_per_row), _spread(self.labels_per_row)
        lengths = (
            (low + draw * (high - low + 1)).astype(np.int64)
            for draw, (low, high) in zip(draws, spreads, strict=True)
        )
        return [np.concatenate([[0], np.cumsum(row)]) for row in lengths]

    def group(self, group: int) -> tuple[sp.csr_array, sp.csr_array]:
        """Return X and Y of the group's rows."""
        plan = _plan(self.seed, self.n_features, self.n_labels, self.features_per_row)
        x_ptr, y_ptr = self._indptr(group)
        features = np.empty(x_ptr[-1], dtype=np.int32)
        values = np.empty(x_ptr[-1], dtype=np.float64)
        labels = np.empty(y_ptr[-1], dtype=np.int32)
        _draw_rows(
            generator(self.seed, _STREAM_ROWS, group),
            plan.feature_law,
            plan.label_law,
            plan.feature_factors,
            plan.label_factors,
            x_ptr,
            y_ptr,
            features,
            values,
            labels,
            self.normalize == "l2",
        )
        ones = np.ones(len(labels), dtype=np.uint8)
        x = sp.csr_array((values.astype(self.dtype), features, x_ptr), shape=(GROUP_ROWS, self.n_features))
        return x, sp.csr_array((ones, labels, y_ptr), shape=(GROUP_ROWS, self.n_labels))
