"""A trained model: plain arrays that score rows anywhere, without a cluster."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from .checked import array_digest
from .errors import UsageError
from .frank_wolfe import Record
from .model_file import MODEL_FORMAT, read_model, write_model
from .scoring import Rule, choose_labels, projected_pieces, rank_labels, score_tiles
from .weights import label_probability

__all__ = ["MODEL_FORMAT", "Model", "load_model"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Model:
    """W = U M, with all that prediction needs.

    Attributes
    ----------
    u : ndarray (D', r)
        Left factor with orthonormal columns; D' counts the intercept's column, if there is one.
    m : ndarray (r, L)
        Right factor; its rows carry the singular values.
    p0 : float
        Weight of inactive labels the model was trained with.
    loss : {"square", "exponential"}
    threshold : float
        Scores from here on predict a label, unless one of the two below is given.
    label_thresholds : ndarray (L,), optional
        The same label by label; inf for a label that is never predicted.
    top_k : int, optional
        Predict so many labels of every row, the best ("rcut"), whatever their scores.
    normalize : {None, "l2"}
        Whether rows are scaled to unit norm before they are scored.
    intercept : float
        Value of the constant column appended to every row; 0 for none.
    label_names, feature_names : tuple of str or None
    label_counts : ndarray of int (L,), optional
        Training rows that carry each label; the propensities of labels follow from them.
    info : dict
        How the fit went: parameters, objective, gap, certificate, status, data, versions.
    history : tuple of Record
        One record an iteration.

    Examples
    --------
    >>> model = Model(u=np.eye(2), m=np.array([[0.9, 0.1, 0.6], [0.2, 0.7, 0.6]]), p0=0.1)
    >>> model.predict([[1.0, 0.0]]).toarray().tolist()
    [[1, 0, 1]]
    >>> model.with_threshold(top_k=1).predict([[1.0, 0.0]]).toarray().tolist()
    [[1, 0, 0]]
    >>> model.predict_topk([[0.0, 1.0]], k=2)
    (array([[1, 2]]), array([[0.7, 0.6]]))
    """

    u: Array
    m: Array
    p0: float
    loss: str = "square"
    threshold: float = 0.5
    normalize: str | None = None
    intercept: float = 0.0
    label_names: tuple[str, ...] | None = None
    feature_names: tuple[str, ...] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    history: tuple[Record, ...] = ()
    label_counts: Array | None = None
    label_thresholds: Array | None = None
    top_k: int | None = None

    @property
    def n_features(self) -> int:
        """Number of features of a row, without the intercept's column."""
        return int(self.u.shape[0]) - bool(self.intercept)

    @property
    def n_labels(self) -> int:
        """Number of labels."""
        return int(self.m.shape[1])

    @property
    def rank(self) -> int:
        """Rank of W."""
        return int(self.u.shape[1])

    @property
    def rule(self) -> Rule:
        """How `predict` chooses labels from scores."""
        if self.top_k is not None:
            return Rule(top_k=self.top_k)
        return Rule(threshold=self.threshold if self.label_thresholds is None else self.label_thresholds)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all that scores depend on: not of thresholds, names and history."""
        facts = [array_digest(self.u), array_digest(self.m), self.normalize, self.intercept]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def factors(self) -> tuple[Array, Array]:
        """Return U (D x r) and M (r x L) with W = U M."""
        return self.u, self.m

    def with_threshold(self, threshold: Any = None, *, top_k: int | None = None) -> Model:
        """Return the same model with another rule to choose labels.

        Parameters
        ----------
        threshold : float or array-like (L,), optional
            Scores from here on predict a label: one number for all labels, or one for each.
        top_k : int, optional
            Predict the k best labels of every row instead.
        """
        rule = self.chosen_rule(threshold, top_k)
        if rule.top_k is not None:
            return replace(self, top_k=rule.top_k, label_thresholds=None)
        if isinstance(rule.threshold, np.ndarray):
            return replace(self, label_thresholds=rule.threshold, top_k=None)
        assert rule.threshold is not None
        if not np.isfinite(rule.threshold):
            raise UsageError(f"the threshold of a model is {rule.threshold!r}: it must be a finite number")
        return replace(self, threshold=rule.threshold, label_thresholds=None, top_k=None)

    def chosen_rule(self, threshold: Any = None, top_k: int | None = None) -> Rule:
        """Return the rule that is asked for, or the model's own where none is."""
        if threshold is None and top_k is None:
            return self.rule
        if threshold is not None:
            values = np.asarray(threshold, dtype=np.float64)
            threshold = values if values.ndim else float(values)
        return Rule(threshold, top_k).checked(self.n_labels)

    def decision_function(self, X: Any) -> Array:
        """Return the scores XW of all labels, a dense (n, L) array."""
        matrix = self._rows(X)
        scores = np.empty((matrix.shape[0], self.n_labels))
        for rows, z in self.projected(matrix):
            for first, tile in score_tiles(z, self.m):
                scores[rows, first : first + tile.shape[1]] = tile
        return scores

    def predict(self, X: Any, threshold: Any = None, *, top_k: int | None = None) -> Any:
        """Return the predicted labels of some rows as a CSR array of ones.

        Parameters
        ----------
        X : array-like or sparse matrix (n, D)
        threshold : float or array-like (L,), optional
            Instead of the model's own rule.
        top_k : int, optional
            The k best labels of every row, instead of the model's own rule.
        """
        rule = self.chosen_rule(threshold, top_k)
        pieces = self.projected(self._rows(X), k=rule.top_k or 0)
        found = [choose_labels(z, self.m, rule) for _, z in pieces]
        if not found:
            return sp.csr_array((0, self.n_labels), dtype=np.uint8)
        return found[0] if len(found) == 1 else sp.vstack(found, format="csr")

    def predict_proba(self, X: Any) -> Array:
        """Return P(Y = 1 | x) of all labels, a dense (n, L) array."""
        return label_probability(self.decision_function(X), self.p0, self.loss)

    def predict_topk(self, X: Any, k: int = 5) -> tuple[Array, Array]:
        """Return the k best labels of every row, best first, and their scores.

        Equal scores are ordered by label.
        """
        if not 1 <= k <= self.n_labels:
            raise UsageError(f"k must be between 1 and the number of labels, {self.n_labels}; got {k!r}")
        matrix = self._rows(X)
        labels = np.empty((matrix.shape[0], k), dtype=np.int64)
        scores = np.empty((matrix.shape[0], k))
        for rows, z in self.projected(matrix, k=k):
            labels[rows], scores[rows] = rank_labels(z, self.m, k)
        return labels, scores

    def projected(
        self, matrix: Any, *, normalized: bool = False, first_row: int = 0, place: str = "X", k: int = 0
    ) -> Iterator[tuple[slice, Array]]:
        """Yield pieces of rows with X U; ``normalized`` where the rows have unit norm already."""
        normalize = None if normalized else self.normalize
        return projected_pieces(matrix, self.u, self.n_labels, normalize, self.intercept, first_row, place, k)

    def _rows(self, X: Any) -> Any:
        """Return rows as the user has them as an array or CSR with the right number of columns."""
        matrix: Any = X if sp.issparse(X) else np.asarray(X)
        if matrix.ndim != 2 or matrix.shape[1] != self.n_features:
            raise UsageError(
                f"X has shape {matrix.shape}, but the model was trained on {self.n_features} features: "
                "give a matrix with that many columns"
            )
        if sp.issparse(matrix) and matrix.format != "csr":
            matrix = sp.csr_array(matrix)
        if sp.issparse(matrix) and self.normalize is not None and not matrix.has_canonical_format:
            matrix = matrix.copy()  # entries given twice count as their sum, in the norm of a row too
            matrix.sum_duplicates()
        return matrix

    def save(
        self,
        url: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the model to a local path or fsspec URL.

        Parameters
        ----------
        url : str or path
        overwrite : bool
            Replace what is there.
        storage_options : mapping, optional
            For the file system.
        """
        write_model(self, url, overwrite=overwrite, storage_options=storage_options)


def load_model(url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Model:
    """Read a model file, and refuse one that is incomplete, newer or damaged.

    Parameters
    ----------
    url : str or path
        Local path or fsspec URL.
    storage_options : mapping, optional
        For the file system.

    Returns
    -------
    Model
    """
    return Model(**read_model(url, storage_options))
