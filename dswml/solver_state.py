"""A run between two iterations as flat arrays and numbers, and back: what a checkpoint holds of it.

What the workers keep is not in it: scores are made again from the data and the pieces of the basis,
each multiplied by itself, which gives them the bits they had.
"""

from __future__ import annotations

import uuid
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from .checkpoint_file import Values
from .duality import GapBound
from .errors import DataError, telling
from .executor import Shared
from .model_file import history_records, history_table
from .newton import Curvature, NewtonSteps
from .oracle import Answer
from .problem import Problem
from .solution import Certificate

if TYPE_CHECKING:
    from .frank_wolfe import Run
    from .tuning import Search

__all__ = ["restore_run", "restore_search", "run_state", "search_state"]

_NUMBERS = ("iteration", "curvature", "certify_below", "floor", "estimate", "truncated")
BOUND = ("factor", "ridge")
STEPS = ("values", "vectors")
_ARRAYS = ("mt", "last_right")
_UNREADABLE = (
    "the checkpoint is not one that this version of dswml goes on from: begin again with --overwrite "
    "(overwrite=True)"
)


def problem_state(problem: Problem) -> Values:
    """Return the basis, in its pieces, and all sums that are kept of it."""
    state: Values = {
        "rows_read": problem.rows_read,
        "pieces": [int(piece.value.shape[1]) for piece in problem.pieces],
        "pending": problem.pending,
        "basis": problem.basis,
        "moment": problem.moment,
    }
    if problem.statistics is not None:
        state |= {f"statistics {name}": value for name, value in problem.statistics.state().items()}
    if problem.known is not None:
        state["known square"], state["known gradient"] = problem.known
    return state


def restore_problem(problem: Problem, state: Values) -> None:
    """Put a new problem into a state; its statistics must have been asked for."""
    n_features, n_labels = problem.n_features, problem.n_labels
    ranks = {state["basis"].shape[1], sum(state["pieces"]), state["moment"].shape[1] + state["pending"]}
    if problem.statistics is not None:
        ranks.add(state["statistics g0"].shape[1] + state["pending"])
    if len(ranks) > 1 or {len(state["basis"]), len(state["moment"])} != {n_features}:
        raise DataError(f"the parts of the checkpoint do not belong together (ranks {sorted(ranks)})")
    if "known square" in state:
        square, gradient = state["known square"], state["known gradient"]
        if square.shape != (n_features, n_features) or gradient.shape != (n_labels, n_features):
            raise DataError(f"the sums in the checkpoint are not of {n_features} features, {n_labels} labels")
        problem.known = square, gradient
    problem.rows_read, problem.pending = state["rows_read"], state["pending"]
    problem.basis, problem.moment = state["basis"], state["moment"]
    ends = np.cumsum(state["pieces"])[:-1]
    parts = np.split(problem.basis, ends, axis=1) if state["pieces"] else []
    problem.pieces = [Shared(f"basis-{uuid.uuid4().hex}", np.ascontiguousarray(part)) for part in parts]
    statistics = problem.statistics
    if statistics is not None:
        if state["statistics positives"].shape[0] != n_labels:
            raise DataError(f"the checkpoint is not of {n_labels} labels")
        statistics.restore({name: state[f"statistics {name}"] for name in statistics.state()})


def bound_state(bound: GapBound) -> Values:
    """Return what a bound of gaps is made of."""
    return {name: getattr(bound, name) for name in BOUND}


def restored_bound(problem: Problem, state: Values) -> GapBound | None:
    """Make the bound of a problem again, if the state has one."""
    if state.get("factor") is None:
        return None
    if state["factor"].shape != 2 * (problem.n_features,):
        raise DataError(f"the factor in the checkpoint is not of {problem.n_features} features")
    return GapBound.restored(problem.n_rows, **{name: state[name] for name in BOUND})


def run_state(run: Run, answer: Answer, width: int) -> Values:
    """Return the state of a run about to make a step with at most ``width`` vectors of the answer."""
    columns, history = history_table(run.history)
    return {
        **problem_state(run.problem),
        **{name: getattr(run, name) for name in (*_NUMBERS, *_ARRAYS)},
        **({} if run.bound is None else bound_state(run.bound)),
        "tol": run.options.tol,
        "certificate": None if run.certificate is None else asdict(run.certificate),
        "history": history,
        "history_columns": columns,
        "left": answer.left[:, :width],
        "values": answer.values,
        "right": answer.right[:, :width],
        "objective": answer.objective,
        "slope": answer.slope,
        "exact": answer.exact,
    }


@telling(_UNREADABLE)
def restore_run(run: Run, state: dict[str, Any]) -> Answer:
    """Put a new run into a state, and return the answer that its next step is made with."""
    restore_problem(run.problem, state)
    run.bound = restored_bound(run.problem, state)
    for name in (*_NUMBERS, *_ARRAYS):
        setattr(run, name, state[name])
    if state["tol"] != run.options.tol:
        run.certify_below = run.options.tol
    certificate = state["certificate"]
    run.certificate = None if certificate is None else Certificate(**certificate)
    run.history = list(history_records(state["history_columns"], state["history"], "the checkpoint"))
    numbers = (float(state["objective"]), float(state["slope"]), bool(state["exact"]))
    return Answer(state["left"], state["values"], state["right"], *numbers)


def search_state(search: Search, iteration: int) -> Values:
    """Return the state of a search of a grid that is about to begin an iteration."""
    state: Values = {"iteration": iteration, "rows_read": search.rows_read}
    for number, curvature in enumerate(search.curvatures):
        if curvature is not None:
            own = bound_state(curvature.bound) | {name: getattr(curvature.steps, name) for name in STEPS}
            own["square"] = curvature.square
            state |= {f"fold {number} {name}": value for name, value in own.items()}
    for number, path in enumerate(search.paths):
        own = problem_state(path.problem)
        points = [vars(point) for point in path.points]
        for name in points[0]:
            values = [point[name] for point in points]
            arrays = [value for value in values if isinstance(value, np.ndarray)]
            if arrays:
                own[f"point {name}"] = arrays
                own[f"has {name}"] = [value is not None for value in values]
            elif values != [None] * len(values):
                own[f"point {name}"] = np.array(values, dtype=float)
        state |= {f"path {number} {name}": value for name, value in own.items()}
    return state


@telling(_UNREADABLE)
def restore_search(search: Search, state: Values) -> int:
    """Put a new search into a state, and return the iteration that it begins."""
    search.rows_read = state["rows_read"]
    for number, (problem, *_) in enumerate([path.problem for path in paths] for paths in search.by_fold):
        prefix = f"fold {number} "
        bound = restored_bound(problem, {name: state.get(prefix + name) for name in BOUND})
        if bound is not None:
            square, values, vectors = (state[prefix + name] for name in ("square", *STEPS))
            if not square.shape == vectors.shape == bound.factor.shape:
                raise DataError(f"the vectors in the checkpoint are not of {problem.n_features} features")
            steps = NewtonSteps(values, vectors, problem.n_rows)
            search.give_curvature(number, Curvature(square, bound, steps))
    for number, path in enumerate(search.paths):
        prefix = f"path {number} "
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        restore_problem(path.problem, own)
        for name, value in vars(path.points[0]).items():
            found = iter(own.get(f"point {name}", ()))
            has = own.get(f"has {name}", [f"point {name}" in own] * len(path.points))
            kind = (lambda array: array) if f"has {name}" in own else type(value)
            for point, there in zip(path.points, has, strict=True):
                setattr(point, name, kind(next(found)) if there else None)
    return int(state["iteration"])
