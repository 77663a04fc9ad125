"""A trained model: plain arrays that score rows anywhere, and the file they are kept in.

The file is a Zarr group that Zarr alone can read: arrays U and M with W = U M, the history, the
names, and attributes that say how the rows must be prepared and how the fit went. It holds no
code, and loading runs none.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import zarr

from .errors import DataError, IncompleteStoreError, StoreExistsError, UsageError
from .features import prepare
from .frank_wolfe import Record
from .storage import (
    DENSE_FLOAT,
    open_group,
    read_array,
    read_names,
    remove_store,
    store_exists,
    write_names,
)
from .weights import label_probability

__all__ = ["MODEL_FORMAT", "Model", "load_model"]

Array = npt.NDArray[Any]

MODEL_FORMAT = "dswml-model"
MODEL_VERSION = 1
#: Entries of the score tiles that prediction works on.
PIECE_ENTRIES = 2**22
#: Bytes of a chunk of U or M on disk.
CHUNK_BYTES = 2**25


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
        Scores from here on predict a label.
    normalize : {None, "l2"}
        Whether rows are scaled to unit norm before they are scored.
    intercept : float
        Value of the constant column appended to every row; 0 for none.
    label_names, feature_names : tuple of str or None
    info : dict
        How the fit went: parameters, objective, gap, certificate, status, data, versions.
    history : tuple of Record
        One record an iteration.
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

    def factors(self) -> tuple[Array, Array]:
        """Return U (D x r) and M (r x L) with W = U M."""
        return self.u, self.m

    def decision_function(self, X: Any) -> Array:
        """Return the scores XW of all labels, a dense (n, L) array."""
        scores: Array = self._project(X) @ self.m
        return scores

    def predict(self, X: Any, threshold: float | None = None) -> Any:
        """Return the predicted labels of some rows as a CSR array of ones."""
        theta = self.threshold if threshold is None else threshold
        projected = self._project(X)
        found = [
            (rows.start + at[0], at[1])
            for rows, scores in self._tiles(projected)
            for at in [np.nonzero(scores >= theta)]
        ]
        rows = np.concatenate([part[0] for part in found]) if found else np.zeros(0, dtype=np.int64)
        labels = np.concatenate([part[1] for part in found]) if found else np.zeros(0, dtype=np.int64)
        indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(projected)))])
        ones = np.ones(labels.size, dtype=np.uint8)
        return sp.csr_array((ones, labels, indptr), shape=(len(projected), self.n_labels))

    def predict_proba(self, X: Any) -> Array:
        """Return P(Y = 1 | x) of all labels, a dense (n, L) array."""
        return label_probability(self.decision_function(X), self.p0, self.loss)

    def predict_topk(self, X: Any, k: int = 5) -> tuple[Array, Array]:
        """Return the k best labels of every row, best first, and their scores.

        Equal scores are ordered by label.
        """
        if not 1 <= k <= self.n_labels:
            raise UsageError(f"k must be between 1 and the number of labels, {self.n_labels}; got {k!r}")
        projected = self._project(X)
        labels = np.empty((len(projected), k), dtype=np.int64)
        best = np.empty((len(projected), k))
        for rows, scores in self._tiles(projected):
            order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
            labels[rows] = order
            best[rows] = np.take_along_axis(scores, order, axis=1)
        return labels, best

    def _project(self, X: Any) -> Array:
        """Return X U for rows as the user has them."""
        matrix: Any = X if sp.issparse(X) else np.asarray(X)
        if matrix.ndim != 2 or matrix.shape[1] != self.n_features:
            raise UsageError(
                f"X has shape {matrix.shape}, but the model was trained on {self.n_features} features: "
                "give a matrix with that many columns"
            )
        if sp.issparse(matrix) and matrix.format != "csr":
            matrix = sp.csr_array(matrix)
        projected: Array = np.asarray(prepare(matrix, self.normalize, self.intercept) @ self.u)
        return projected

    def _tiles(self, projected: Array) -> Iterator[tuple[slice, Array]]:
        """Yield pieces of rows with their dense scores, of bounded size."""
        step = max(1, PIECE_ENTRIES // max(self.n_labels, 1))
        for start in range(0, len(projected), step):
            rows = slice(start, min(start + step, len(projected)))
            yield rows, projected[rows] @ self.m

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
        if store_exists(url, storage_options):
            if not overwrite:
                raise StoreExistsError(
                    f"{os.fspath(url)} exists: choose another place, or overwrite=True (--overwrite)"
                )
            remove_store(url, storage_options)
        group = open_group(url, "w", storage_options)
        group.attrs.put({"format": MODEL_FORMAT, "format_version": MODEL_VERSION, "complete": False})
        columns = [column.name for column in fields(Record)]
        history = np.array([[float(v) for v in asdict(record).values()] for record in self.history])
        arrays = {"U": self.u, "M": self.m, "history": history.reshape(-1, len(columns))}
        for name, values in arrays.items():
            _write(group, name, values)
        for name, names in (("label_names", self.label_names), ("feature_names", self.feature_names)):
            if names is not None:
                write_names(group, name, names)
        group.attrs.put(
            {
                "format": MODEL_FORMAT,
                "format_version": MODEL_VERSION,
                "sha256": {name: _digest(values) for name, values in arrays.items()},
                "history_columns": columns,
                "p0": self.p0,
                "loss": self.loss,
                "threshold": self.threshold,
                "normalize": self.normalize,
                "intercept": self.intercept,
                "info": dict(self.info),
                "complete": True,
            }
        )


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
    place = os.fspath(url)
    group = open_group(url, "r", storage_options)
    attrs = dict(group.attrs)
    if attrs.get("format") != MODEL_FORMAT:
        raise DataError(f"{place} is not a dswml model (its format attribute is {attrs.get('format')!r})")
    if attrs.get("format_version") != MODEL_VERSION:
        raise DataError(
            f"{place} has model format version {attrs.get('format_version')!r}; this program reads version "
            f"{MODEL_VERSION}: install a newer dswml"
        )
    if attrs.get("complete") is not True:
        raise IncompleteStoreError(
            f"the model {place} is incomplete: its writing was interrupted; train again"
        )
    digests: Any = attrs.get("sha256")
    if not isinstance(digests, dict):
        raise DataError(
            f"attribute sha256 of the model {place} is missing: the file was changed; train again"
        )
    u, m, history = (_read(group, name, digests, place) for name in ("U", "M", "history"))
    if u.shape[1] != m.shape[0]:
        raise DataError(f"U of {place} has shape {u.shape} and M {m.shape}: they do not belong together")
    names: Any = attrs.get("history_columns")
    known = {column.name: column.type for column in fields(Record)}
    if not isinstance(names, list) or set(names) != set(known) or history.shape[1] != len(names):
        raise DataError(f"the history of the model {place} has columns {names!r}, not {list(known)!r}")
    number = _checked_numbers(attrs, place)
    label_names = read_names(group, "label_names")
    if label_names is not None and len(label_names) != m.shape[1]:
        raise DataError(f"the model {place} has {m.shape[1]} labels and {len(label_names)} label names")
    if attrs.get("loss") not in ("square", "exponential") or attrs.get("normalize") not in (None, "l2"):
        raise DataError(
            f"the model {place} has loss {attrs.get('loss')!r} and normalize {attrs.get('normalize')!r}, "
            "which this program does not know: install a newer dswml"
        )
    info: Any = attrs.get("info")
    return Model(
        u=u,
        m=m,
        p0=number["p0"],
        loss=str(attrs["loss"]),
        threshold=number["threshold"],
        normalize="l2" if attrs["normalize"] == "l2" else None,
        intercept=number["intercept"],
        label_names=label_names,
        feature_names=read_names(group, "feature_names"),
        info=info if isinstance(info, dict) else {},
        history=tuple(_record(dict(zip(names, row, strict=True)), known) for row in history),
    )


def _record(row: dict[str, float], types: dict[str, Any]) -> Record:
    casts = {"int": int, "float": float, "bool": bool}
    return Record(**{name: casts[str(types[name])](value) for name, value in row.items()})


def _checked_numbers(attrs: Mapping[str, Any], place: str) -> dict[str, float]:
    numbers = {}
    for name in ("p0", "threshold", "intercept"):
        value = attrs.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise DataError(f"attribute {name} of the model {place} is {value!r} where a number must be")
        numbers[name] = float(value)
    return numbers


def _write(group: zarr.Group, name: str, values: Array) -> None:
    rows = max(1, min(len(values), CHUNK_BYTES // max(values[:1].nbytes, 1)))
    array = group.create_array(
        name,
        shape=values.shape,
        chunks=(rows, max(values.shape[1], 1)),
        dtype=np.dtype(np.float64),
        compressors=DENSE_FLOAT,
        fill_value=float("nan"),
    )
    if values.size:
        array[:] = values


def _read(group: zarr.Group, name: str, digests: Mapping[str, Any], place: str) -> Array:
    array = group.get(name)
    if not isinstance(array, zarr.Array) or array.ndim != 2 or array.dtype != np.float64:
        raise DataError(
            f"array {name} of the model {place} is missing or not a matrix of float64: train again"
        )
    values = np.ascontiguousarray(read_array(array, 0, array.shape[0], store=place)).reshape(array.shape)
    if _digest(values) != digests.get(name):
        raise DataError(
            f"array {name} of the model {place} does not match its checksum: it was changed; train again"
        )
    return values


def _digest(values: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, dtype="<f8").tobytes()).hexdigest()
