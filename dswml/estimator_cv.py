"""The classifier that chooses its radius, weights and rule by cross-validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .checkpoints import Checkpoints
from .errors import UsageError
from .estimator import SparseWeightedClassifier, current_executor, is_whole
from .search_record import searched
from .tuning import tune

__all__ = ["SparseWeightedClassifierCV"]


class SparseWeightedClassifierCV(SparseWeightedClassifier):
    """`SparseWeightedClassifier` with radius, weights and rule chosen on held-out folds.

    All folds, radii and weights share each read of X, so the search costs the reads of about one fit.

    Parameters
    ----------
    radii : sequence of float
        Radii to try.
    weights : sequence of {"sparsity", "uniform"} or float
        Weightings to try.
    folds : int, default=5
        Number of folds; a row's fold is a hash of its number and ``random_state``.
    stratify : bool, default=False
        Give every fold about the same share of every label instead; see `dswml.stratify`.
    scoring : str, default="micro_f1"
        The metric that chooses, on held-out rows: one of `dswml.grid_scores.SCORES`, of which losses are
        minimised, or P, R, nDCG, PSP or PSnDCG at some k, as "P@3".
    rule : {"best", "one-standard-error"}, default="best"
        Take the best mean, or the smallest radius within a standard error of it.
    threshold : float or {"tuned", "per-label", "rcut"}, default=0.5
        Predict the labels with at least this score; or tune on the held-out rows one threshold for all
        labels, one for each label (for micro-F1 and macro-F1), or the number of best labels of a row. A
        scoring that does not depend on it has it tuned for micro-F1. Scores of a fold are those with what
        is best on the others.
    tol, fit_intercept, normalize, random_state, dtype, cache, memory_limit, checkpoint
        As for `SparseWeightedClassifier`.

    Attributes
    ----------
    tuned_ : Tuned
        The table of the search.
    radius_, weights_ : float, str or float
        The choice. All attributes of `SparseWeightedClassifier` are those of the fit on all rows.

    Examples
    --------
    >>> import numpy as np
    >>> from dswml import SparseWeightedClassifierCV
    >>> X = np.tile(np.eye(6), (10, 1))
    >>> clf = SparseWeightedClassifierCV(radii=(0.1, 1, 10), weights=("sparsity",), folds=3, random_state=0)
    >>> clf.fit(X, X.astype(int)).radius_
    10.0
    >>> clf.set_params(threshold="rcut").fit(X, X.astype(int)).model_.top_k
    1
    """

    def __init__(
        self,
        radii: Sequence[float] = (1.0, 10.0, 20.0, 50.0, 100.0, 200.0),
        *,
        weights: Sequence[str | float] = ("sparsity", "uniform"),
        folds: int = 5,
        stratify: bool = False,
        scoring: str = "micro_f1",
        rule: str = "best",
        threshold: float | str = 0.5,
        tol: float = 1e-3,
        fit_intercept: bool | float = False,
        normalize: str | None = None,
        random_state: Any = None,
        dtype: str = "auto",
        cache: str = "auto",
        memory_limit: int | str = "2 GiB",
        checkpoint: Checkpoints | None = None,
    ) -> None:
        super().__init__(
            weights=weights,  # type: ignore[arg-type]
            tol=tol,
            fit_intercept=fit_intercept,
            normalize=normalize,
            threshold=threshold,  # type: ignore[arg-type]
            random_state=random_state,
            dtype=dtype,
            cache=cache,
            memory_limit=memory_limit,
            checkpoint=checkpoint,
        )
        self.radii = radii
        self.folds = folds
        self.stratify = stratify
        self.scoring = scoring
        self.rule = rule

    def fit(self, X: Any, Y: Any = None) -> SparseWeightedClassifierCV:
        """Search the grid, then fit the choice on all rows.

        Parameters
        ----------
        X, Y
            As for `SparseWeightedClassifier.fit`; Y with a column per label.

        Returns
        -------
        self : SparseWeightedClassifierCV
        """
        self._check_choice("rule", ("best", "one-standard-error"))
        self._check("folds", is_whole(self.folds) and self.folds >= 2, "an int in the range [2, inf)")
        parameters = self._single(1.0, "uniform").checked_parameters()
        data, classes = self._training_data(X, Y)
        if classes is not None:
            raise UsageError("the search needs a column of zeros and ones per label; got a one-dimensional y")
        with current_executor(data) as executor:
            self.tuned_ = tune(
                data,
                executor,
                radii=self.radii,
                weights=self.weights,  # type: ignore[arg-type]
                folds=self.folds,
                seed=parameters.options.seed,
                stratify=self.stratify,
                score=self.scoring,
                threshold=self.threshold,  # type: ignore[arg-type]
                tol=parameters.options.tol,
                fit_intercept=float(self.fit_intercept),
                normalize=self.normalize,
                dtype=self.dtype,
                cache=self.cache,
                memory_limit=parameters.options.memory_limit,
                checkpoint=self.checkpoint,
            )
        chosen = self.tuned_.best if self.rule == "best" else self.tuned_.one_standard_error
        self.radius_, self.weights_ = float(chosen.radius), chosen.weights
        single = self._single(self.radius_, self.weights_)
        single.fit(X, Y)
        for name, value in vars(single).items():
            if name.endswith("_"):
                setattr(self, name, value)
        self.model_ = searched(self.model_, self.tuned_, chosen)
        return self

    def _single(self, radius: float, weights: str | float) -> SparseWeightedClassifier:
        return SparseWeightedClassifier(
            radius,
            weights=weights,
            tol=self.tol,
            fit_intercept=self.fit_intercept,
            normalize=self.normalize,
            random_state=self.random_state,
            dtype=self.dtype,
            cache=self.cache,
            memory_limit=self.memory_limit,
            checkpoint=self.checkpoint and self.checkpoint.within(f"model-{radius}-{weights}"),
        )
