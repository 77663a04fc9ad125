"""Whether a model and data belong together: the same features, the same labels, rows prepared alike."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from .errors import DataError

if TYPE_CHECKING:
    from .model import Model
    from .stored import Dataset

__all__ = ["check_features", "check_labels"]


def check_features(model: Model, data: Dataset) -> bool:
    """Refuse data with other features than the model's; tell whether the rows have unit norm already."""
    place = data.url or "the data"
    if data.n_features != model.n_features:
        raise DataError(
            f"{place} has {data.n_features} features, but the model was trained on {model.n_features}: "
            "give data with the features of the training data"
        )
    _check_names(place, "feature", data.feature_names, model.feature_names)
    if data.normalize == "l2" and model.normalize is None:
        warnings.warn(
            f"the rows of {place} were scaled to unit norm when they were stored, but the model was trained "
            "on rows as they are: its scores may mean little here",
            stacklevel=3,
        )
    return data.normalize == "l2"


def check_labels(model: Model, data: Dataset) -> None:
    """Refuse data with other labels than the model's."""
    place = data.url or "the data"
    if data.n_labels != model.n_labels:
        raise DataError(
            f"{place} has {data.n_labels} labels, but the model was trained on {model.n_labels}: "
            "give data with the labels of the training data"
        )
    _check_names(place, "label", data.label_names, model.label_names)


def _check_names(
    place: str, kind: str, found: tuple[str, ...] | None, wanted: tuple[str, ...] | None
) -> None:
    if found is None or wanted is None or found == wanted:
        return
    column = next(i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
    raise DataError(
        f"{kind} {column} of {place} is {found[column]!r}, but {wanted[column]!r} in the model: "
        f"give data with the {kind}s of the training data in their order"
    )
