"""Sparsity-weighted multi-label classification on data sets larger than memory, on a Dask cluster."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dataset import create_dataset, open_dataset
    from .estimator import SparseWeightedClassifier
    from .model import Model, load_model

__all__ = ["Model", "SparseWeightedClassifier", "create_dataset", "load_model", "open_dataset"]

# Loaded when first used, so that the command line starts at once.
_HOMES = {
    "Model": "model",
    "SparseWeightedClassifier": "estimator",
    "create_dataset": "dataset",
    "load_model": "model",
    "open_dataset": "dataset",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
