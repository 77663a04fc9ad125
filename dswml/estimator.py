"""The classifier as a scikit-learn estimator, on one machine or on the current Dask cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from dask.utils import parse_bytes
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from .checkpoints import Checkpoints
from .current import current_executor
from .errors import DataError, UsageError
from .frank_wolfe import Options
from .model import Model
from .sources import as_dataset
from .stored import Dataset
from .training import Parameters, train

__all__ = ["SparseWeightedClassifier", "current_executor", "is_whole"]

Array = npt.NDArray[Any]


class SparseWeightedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Linear multi-label classifier in a nuclear-norm ball, fitted to a sparsity-weighted loss.

    Minimises ``1/N ||P o (Y - XW)||_F^2`` over ``||W||_* <= radius``, where entries of Y that
    are 1 weigh p1 and those that are 0 weigh p0 = 1 - p1, by Frank-Wolfe iterations that read X in row
    blocks, from Zarr and on a Dask cluster if there is one. A label is predicted where its score
    reaches the threshold.

    Parameters
    ----------
    radius : float, default=100
        Radius (lambda) of the nuclear-norm ball that W is held in.
    weights : {"sparsity", "uniform"} or float, default="sparsity"
        "sparsity": p0 = 2 K / L, with K the largest number of labels on a row. "uniform": p0 = 1/2.
        A number in (0, 1): that p0.
    step : {"corrective", "line-search", "open-loop"}, default="corrective"
        How far an iteration goes. "corrective" minimises over everything that the directions found so far
        span, and needs by far the fewest reads of X; "open-loop" is the classical 2 / (k + 2).
    loss : {"square", "exponential"}, default="square"
        "exponential" takes labels as +-1 and the sign of the score. It costs time in proportion to N L
        and has no corrective step.
    block_size : int or "auto", default="auto"
        Directions per iteration. 1 with ``step="open-loop"`` is the classical algorithm.
    tol : float, default=1e-3
        Certified duality gap, relative to the objective (but to no less than a thousandth of F(0)), at
        which the fit ends.
    max_iter : int, default=1000
    max_passes : int, optional
        Most reads of X.
    time_limit : float, optional
        Seconds after which no new iteration begins.
    fit_intercept : bool or float, default=False
        Append a constant column of 1, or of the given value, to X.
    normalize : {None, "l2"}, default=None
        Scale the rows of X to unit norm, in fitting and in predicting.
    threshold : float, optional
        Scores from here on predict a label: by default 1/2, or 0 for the exponential loss.
    random_state : int, RandomState or None, default=None
        Seeds the random vectors of the matrix-free oracle. With checkpoints None is 0.
    dtype : {"auto", "float32", "float64"}, default="auto"
        Type of the products with X; sums are kept in float64. "auto" is float64 for sparse X and X's own
        type for dense. With float32 the certified gap is exact up to the rounding of these products,
        some 1e-6 of the objective, and more for features far from the origin.
    cache : {"auto", "memory", "none"}, default="auto"
        What workers keep of the row blocks: what finds room, all of X, or nothing.
    memory_limit : int or str, default="2 GiB"
        Memory for the factors and statistics; decides how many directions are kept. The fitting process
        holds them or, where labels take half of it and there are several worker processes with room, these
        hold what belongs to the labels.
    callbacks : sequence of callable, optional
        Each is called with the record of every iteration; one that returns True ends the fit.
    checkpoint : Checkpoints, optional
        Where to write checkpoints, and whether to go on from one. A fit that meets its time limit then
        raises a `StoppedEarlyError` and can be gone on with.

    Attributes
    ----------
    model_ : Model
        The fitted model: plain arrays, saved with ``model_.save(path)``.
    history_ : tuple of Record
        One record per iteration: passes, objective, gap, rank, seconds.
    classes_ : ndarray
        Labels in the order of the columns of Y, or the classes of a one-dimensional y.
    n_iter_, n_passes_ : int
        Iterations made, and reads of X that they took.
    objective_, gap_, relative_gap_ : float
        F(W), its duality gap, and their ratio.
    certificate_ : Certificate or None
        How the gap is known, or None where it is only an estimate.
    status_ : str
        OPTIMAL, MAXITER, MAXPASSES, TIMEOUT or INTERRUPTED.
    p0_ : float
    k_hat_ : int
    n_features_in_ : int

    Notes
    -----
    A one-dimensional y is taken as one label per row, and predicted as the label of the largest score.

    Examples
    --------
    >>> import numpy as np
    >>> from dswml import SparseWeightedClassifier
    >>> X = np.eye(6)
    >>> Y = np.eye(6, dtype=int)
    >>> clf = SparseWeightedClassifier(radius=10).fit(X, Y)
    >>> clf.predict(X[:2])
    array([[1, 0, 0, 0, 0, 0],
           [0, 1, 0, 0, 0, 0]])
    >>> clf.status_
    'OPTIMAL'
    """

    def __init__(
        self,
        radius: float = 100.0,
        *,
        weights: str | float = "sparsity",
        step: str = "corrective",
        loss: str = "square",
        block_size: int | str = "auto",
        tol: float = 1e-3,
        max_iter: int = 1000,
        max_passes: int | None = None,
        time_limit: float | None = None,
        fit_intercept: bool | float = False,
        normalize: str | None = None,
        threshold: float | None = None,
        random_state: Any = None,
        dtype: str = "auto",
        cache: str = "auto",
        memory_limit: int | str = "2 GiB",
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
        checkpoint: Checkpoints | None = None,
    ) -> None:
        self.radius = radius
        self.weights = weights
        self.step = step
        self.loss = loss
        self.block_size = block_size
        self.tol = tol
        self.max_iter = max_iter
        self.max_passes = max_passes
        self.time_limit = time_limit
        self.fit_intercept = fit_intercept
        self.normalize = normalize
        self.threshold = threshold
        self.random_state = random_state
        self.dtype = dtype
        self.cache = cache
        self.memory_limit = memory_limit
        self.callbacks = callbacks
        self.checkpoint = checkpoint

    def fit(self, X: Any, Y: Any = None) -> SparseWeightedClassifier:
        """Fit the model.

        Parameters
        ----------
        X : Dataset, path, array or sparse matrix
            A data set with its labels or where it is stored; or features: NumPy, SciPy sparse, dask or
            Zarr arrays.
        Y : array or sparse matrix, optional
            Labels, zeros and ones, a column each; or one label per row in a one-dimensional array.

        Returns
        -------
        self : SparseWeightedClassifier
        """
        parameters = self.checked_parameters()
        data, classes = self._training_data(X, Y)
        with current_executor(data) as executor:
            callbacks = tuple(self.callbacks or ())
            model, solution = train(
                data, parameters, executor, callbacks=callbacks, checkpoint=self.checkpoint
            )
        self.one_label_ = classes is not None
        if classes is None:
            classes = np.arange(data.n_labels) if model.label_names is None else np.array(model.label_names)
        self.classes_ = classes
        self.model_ = model
        self.history_ = solution.history
        self.n_iter_ = solution.iterations
        self.n_passes_ = solution.passes
        self.objective_ = solution.objective
        self.gap_ = solution.gap
        self.relative_gap_ = solution.history[-1].relative_gap
        self.certificate_ = solution.certificate
        self.status_ = solution.status
        self.p0_ = model.p0
        self.k_hat_ = data.k_hat
        return self

    def predict(self, X: Any) -> Any:
        """Predict labels; what comes out follows what goes in.

        A NumPy array gives a NumPy array, a sparse matrix a CSR array, a dask array a lazy dask array with
        the same row chunks, and a data set (or its path) an iterator over CSR row blocks.
        """
        fitted = self._fitted()
        one_label, classes = fitted.one_label_, fitted.classes_
        dtype = classes.dtype if one_label else fitted.label_dtype_

        def block(model: Model, rows: Any) -> Any:
            if one_label:
                return classes[model.predict_topk(rows, 1)[0][:, 0]]
            labels = model.predict(rows).astype(dtype, copy=False)
            return labels if sp.issparse(rows) else labels.toarray()

        return self._apply(X, block, dtype)

    def decision_function(self, X: Any) -> Any:
        """Return the scores XW, dense (n, L), in the form that `predict` explains."""
        one_label = self._fitted().one_label_

        def block(model: Model, rows: Any) -> Any:
            scores = model.decision_function(rows)
            return scores[:, 1] - scores[:, 0] if one_label and scores.shape[1] == 2 else scores

        return self._apply(X, block, np.dtype(np.float64))

    def predict_proba(self, X: Any) -> Any:
        """Return P(Y = 1 | x), dense (n, L), in the form that `predict` explains."""
        one_label = self._fitted().one_label_

        def block(model: Model, rows: Any) -> Any:
            probabilities = model.predict_proba(rows)
            if one_label:  # the probabilities of one label of several add up to one
                probabilities = np.maximum(probabilities, 1e-15)
                probabilities = probabilities / probabilities.sum(axis=1, keepdims=True)
            return probabilities

        return self._apply(X, block, np.dtype(np.float64))

    def predict_topk(self, X: Any, k: int = 5) -> Any:
        """Return the k best labels of every row, (n, k) column numbers, best first; see `predict`."""
        return self._apply(X, lambda model, rows: model.predict_topk(rows, k)[0], np.dtype(np.int64))

    def _fitted(self) -> SparseWeightedClassifier:
        check_is_fitted(self, "model_")
        return self

    def _apply(
        self,
        X: Any,
        block: Callable[[Model, Any], Any],
        dtype: np.dtype[Any],
    ) -> Any:
        model = self._fitted().model_
        if isinstance(X, Dataset | str) or hasattr(X, "__fspath__"):
            data = as_dataset(X)
            self._check_columns(data.n_features)
            return _streamed(data, model, block)
        if _is_dask(X):
            self._check_columns(X.shape[1] if X.ndim == 2 else None)
            return _lazy(X, model, block, dtype)
        if _is_zarr(X):
            X = as_dataset(X).read_x(0, X.shape[0])
        rows = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)
        return block(model, rows)

    def _check_columns(self, n_features: int | None) -> None:
        if n_features != self.n_features_in_:
            raise UsageError(
                f"X has {'no' if n_features is None else n_features} features, but {type(self).__name__} is "
                f"expecting {self.n_features_in_} features as input"
            )

    def _training_data(self, X: Any, Y: Any) -> tuple[Dataset, Array | None]:
        """Return the data set, and the classes if y is one label per row."""
        self.label_dtype_ = np.dtype(np.uint8)
        if isinstance(X, Dataset | str) or hasattr(X, "__fspath__") or _is_dask(X) or _is_zarr(X):
            data = as_dataset(X, Y)
            if data.n_labels == 0:
                raise UsageError(f"{type(self).__name__} requires Y to be passed, but the target Y is None")
            self.n_features_in_ = data.n_features
            return data, None
        if Y is None:
            raise UsageError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32])
        if sp.issparse(Y):
            return as_dataset(X, Y), None
        Y = np.asarray(Y)
        if Y.ndim == 2 and Y.shape[1] == 1 and type_of_target(Y) != "binary":
            Y = Y.ravel()
        if Y.ndim != 1:
            self.label_dtype_ = Y.dtype
            return as_dataset(X, Y), None
        check_classification_targets(Y)
        if len(Y) != X.shape[0]:
            raise DataError(f"X has {X.shape[0]} rows and y has {len(Y)}: they must have the same number")
        classes, codes = np.unique(Y, return_inverse=True)
        one_hot = sp.csr_array(
            (np.ones(len(Y), dtype=np.uint8), codes, np.arange(len(Y) + 1)), shape=(len(Y), classes.size)
        )
        return as_dataset(X, one_hot), classes

    def checked_parameters(self) -> Parameters:
        """Return the parameters of a fit, or raise a sentence about the first that is wrong."""
        self._check(
            "radius", _is_real(self.radius) and 0 < self.radius < math.inf, "a float in the range (0.0, inf)"
        )
        weights = self.weights
        self._check(
            "weights",
            weights in ("sparsity", "uniform")
            if isinstance(weights, str)
            else _is_real(weights) and 0 < weights < 1,
            "'sparsity', 'uniform' or a float in the range (0.0, 1.0)",
        )
        self._check_choice("step", ("corrective", "line-search", "open-loop"))
        self._check_choice("loss", ("square", "exponential"))
        self._check_choice("normalize", (None, "l2"))
        self._check_choice("dtype", ("auto", "float32", "float64"))
        self._check_choice("cache", ("auto", "memory", "none"))
        self._check(
            "block_size",
            self.block_size == "auto" or (is_whole(self.block_size) and int(self.block_size) >= 1),
            "'auto' or an int in the range [1, inf)",
        )
        self._check("tol", _is_real(self.tol) and 0 <= self.tol < math.inf, "a float in the range [0.0, inf)")
        for name, least, optional in (("max_iter", 0, False), ("max_passes", 1, True)):
            value = getattr(self, name)
            whole = is_whole(value) and value >= least
            must = f"an int in the range [{least}, inf)" + (" or None" if optional else "")
            self._check(name, whole or (optional and value is None), must)
        limit = self.time_limit
        self._check(
            "time_limit",
            limit is None or (_is_real(limit) and 0 < limit < math.inf),
            "a float in the range (0.0, inf) or None",
        )
        intercept = self.fit_intercept
        self._check(
            "fit_intercept",
            isinstance(intercept, bool | np.bool_) or (_is_real(intercept) and math.isfinite(intercept)),
            "a bool or a finite float",
        )
        threshold = self.threshold
        self._check(
            "threshold",
            threshold is None or (_is_real(threshold) and math.isfinite(threshold)),
            "a finite float or None",
        )
        callbacks = () if self.callbacks is None else self.callbacks
        self._check(
            "callbacks",
            isinstance(callbacks, Sequence) and all(callable(item) for item in callbacks),
            "a sequence of callables or None",
        )
        try:
            memory_limit = parse_bytes(self.memory_limit)
        except (ValueError, TypeError, AttributeError, OverflowError):
            memory_limit = 0
        self._check("memory_limit", memory_limit > 0, "a number of bytes such as '2 GiB'")
        self._check(
            "checkpoint",
            self.checkpoint is None or isinstance(self.checkpoint, Checkpoints),
            "a Checkpoints or None",
        )
        seeded = self.random_state is not None or self.checkpoint is None
        try:
            random = check_random_state(self.random_state if seeded else 0)
        except ValueError:
            random = None
        self._check(
            "random_state", random is not None, "an int in the range [0, 2**32), a RandomState or None"
        )
        return Parameters(
            radius=float(self.radius),
            weights=weights if isinstance(weights, str) else float(weights),
            loss=self.loss,
            fit_intercept=float(self.fit_intercept),
            normalize=self.normalize,
            threshold=None if threshold is None else float(threshold),
            dtype=self.dtype,
            cache=self.cache,
            random_state=int(self.random_state) if isinstance(self.random_state, int | np.integer) else None,
            options=Options(
                step=self.step,
                block_size=None if self.block_size == "auto" else int(self.block_size),
                tol=float(self.tol),
                max_iter=int(self.max_iter),
                max_passes=None if self.max_passes is None else int(self.max_passes),
                time_limit=None if limit is None else float(limit),
                memory_limit=int(memory_limit),
                seed=int(random.randint(2**31 - 1)),
            ),
        )

    def _check(self, name: str, good: bool, must_be: str) -> None:
        if not good:
            raise UsageError(
                f"The {name!r} parameter of {type(self).__name__} must be {must_be}. "
                f"Got {getattr(self, name)!r} instead."
            )

    def _check_choice(self, name: str, choices: tuple[str | None, ...]) -> None:
        value = getattr(self, name)
        listed = ", ".join(repr(choice) for choice in choices)
        self._check(name, value is None or isinstance(value, str), f"one of {listed}")
        self._check(name, value in choices, f"one of {listed}")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.multi_output = True
        tags.classifier_tags.multi_label = True
        return tags


def is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return is_whole(value) or (isinstance(value, float | np.floating) and not math.isnan(value))


def _is_dask(X: Any) -> bool:
    return hasattr(X, "dask") and hasattr(X, "map_blocks")


def _is_zarr(X: Any) -> bool:
    return type(X).__module__.partition(".")[0] == "zarr"


def _streamed(data: Dataset, model: Model, block: Callable[[Model, Any], Any]) -> Iterator[Any]:
    """Yield the results of a data set's row blocks, in order."""
    for rows in data.blocks:
        yield block(model, data.read_x(rows.start, rows.stop))


def _lazy(X: Any, model: Model, block: Callable[[Model, Any], Any], dtype: np.dtype[Any]) -> Any:
    """Return a dask array of the results, with the row chunks of X; the model is one task of its graph."""
    import dask
    import dask.array as da

    X = X.rechunk({1: -1})
    shared = dask.delayed(model)
    sample = block(model, np.zeros((1, model.n_features)))
    columns = sample.shape[1:]
    pieces = [
        da.from_delayed(dask.delayed(block)(shared, rows), shape=(length, *columns), dtype=dtype)
        for length, rows in zip(X.chunks[0], X.to_delayed().ravel(), strict=True)
    ]
    return da.concatenate(pieces)
