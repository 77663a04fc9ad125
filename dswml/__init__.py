"""Sparsity-weighted multi-label classification on data sets larger than memory, on a Dask cluster."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoints import Checkpoints
    from .dataset import create_dataset, open_dataset
    from .estimator import SparseWeightedClassifier
    from .estimator_cv import SparseWeightedClassifierCV
    from .evaluation import evaluate
    from .jobs import Job, submit
    from .model import Model, load_model
    from .prediction import predict_dataset
    from .report import write_report

__all__ = [
    "Checkpoints",
    "Job",
    "Model",
    "SparseWeightedClassifier",
    "SparseWeightedClassifierCV",
    "create_dataset",
    "evaluate",
    "load_model",
    "open_dataset",
    "predict_dataset",
    "submit",
    "write_report",
]

# Loaded when first used, so that the command line starts at once.
_HOMES = {
    "Checkpoints": "checkpoints",
    "Job": "jobs",
    "Model": "model",
    "SparseWeightedClassifier": "estimator",
    "SparseWeightedClassifierCV": "estimator_cv",
    "create_dataset": "dataset",
    "evaluate": "evaluation",
    "load_model": "model",
    "open_dataset": "dataset",
    "predict_dataset": "prediction",
    "submit": "jobs",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
