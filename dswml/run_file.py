"""What a run has reached, from its newest checkpoint: the model of a fit, or the grid of a search."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .checkpoint_file import CHECKPOINTS_FORMAT, Checkpoint, newest_checkpoint
from .checkpoints import ABOUT
from .errors import DataError, IncompleteStoreError, telling
from .model import Model
from .model_file import history_records
from .oracle import singular_form
from .storage import open_group

__all__ = ["SearchState", "is_run", "read_run"]

Url = str | os.PathLike[str]


@dataclass(frozen=True)
class SearchState:
    """How far a search is.

    Attributes
    ----------
    number, iteration, reads_since : int
        Of the checkpoint: its number, the iteration it is about to begin, and its reads for that.
    passes : int
        Over X so far, these included.
    seconds : float
    request : dict
        The grid and all else that was asked for.
    info : mapping
        As that of a model.
    points : tuple of dict
        Radius, weights and p0, and of every fold whether it is solved, objective, relative gap and rank; inf
        where there has been no look.
    """

    number: int
    iteration: int
    reads_since: int
    passes: int
    seconds: float
    request: dict[str, Any]
    info: Mapping[str, Any]
    points: tuple[dict[str, Any], ...]


def is_run(url: Url, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Tell whether the store is a folder of checkpoints."""
    return open_group(url, "r", storage_options).attrs.get("format") == CHECKPOINTS_FORMAT


def read_run(url: Url, storage_options: Mapping[str, Any] | None = None) -> Model | SearchState:
    """Return the model of a fit as of its newest checkpoint, or how far a search is."""
    place = os.fspath(url)
    found = newest_checkpoint(place, storage_options)
    if found is None:
        raise IncompleteStoreError(f"{place} holds no checkpoint yet: wait for the first, or begin again")
    with telling(f"the checkpoint in {place} is damaged: begin again with --overwrite (overwrite=True)"):
        about = {
            name.removeprefix(ABOUT): each for name, each in found.values.items() if name.startswith(ABOUT)
        }
        if not about:
            raise DataError(
                f"the checkpoint in {place} was written by an older dswml, and tells too little of its data: "
                "go on from it with --resume until the next one"
            )
        if found.request["verb"] == "tune":
            return _search(found, about)
        if "basis" not in found.values:
            raise IncompleteStoreError(
                f"checkpoint {found.number} in {place} holds no iteration yet, but reads of the first: "
                "go on from it with --resume"
            )
        return _model(found, about)


def _model(found: Checkpoint, about: dict[str, Any]) -> Model:
    state = found.values
    history = history_records(state["history_columns"], state["history"], "the checkpoint")
    u, m = singular_form(state["basis"], state["mt"])
    last = history[-1]
    reached = {
        "objective": last.objective,
        "gap": last.gap,
        "relative_gap": last.relative_gap,
        "certificate": state["certificate"],
        "status": "OPTIMAL" if last.certified and last.relative_gap <= state["tol"] else "CHECKPOINT",
        "checkpoint": found.number,
        "iterations": last.iteration,
        "passes": last.passes,
        "seconds": last.seconds,
    }
    return Model(u=u, m=m, info=reached | about.pop("info"), history=history, **about)


def _search(found: Checkpoint, about: dict[str, Any]) -> SearchState:
    state, request, info = found.values, found.request, about["info"]
    rows = [value for name, value in state.items() if name.startswith("read") and name.endswith("rows_read")]
    rows_read = int(state.get("rows_read", 0) + sum(rows))
    weights, n_folds = request["weights"], max(request["folds"], 1)
    points = []
    for number, (weight, p0) in enumerate(zip(weights, about["p0"], strict=True)):
        prefixes = [f"path {fold * len(weights) + number} " for fold in range(n_folds)]
        for place, radius in enumerate(request["radii"]):
            point: dict[str, Any] = {"radius": radius, "weights": weight, "p0": p0}
            solved = [bool(state.get(f"{prefix}has u", {place: False})[place]) for prefix in prefixes]
            point["solved"] = np.array(solved)
            for name in ("objective", "relative_gap"):
                values = [state.get(f"{prefix}point {name}", {place: np.inf})[place] for prefix in prefixes]
                point[name] = np.array(values, dtype=float)
            matrices = (state.get(f"{prefix}point mt") for prefix in prefixes)
            point["rank"] = np.array([0 if each is None else each[place].shape[1] for each in matrices])
            points.append(point)
    return SearchState(
        number=found.number,
        iteration=state.get("iteration", 0),
        reads_since=len(state["reads"]),
        passes=-(-rows_read // info["data"]["n_rows"]),
        seconds=state["seconds"],
        request=request,
        info=info,
        points=tuple(points),
    )
