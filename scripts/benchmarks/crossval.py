"""Cross-validation of a grid against fits one by one, and against scikit-learn's search."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import scipy.sparse as sp
from common import Goal, Result, Setting, Table, real_sets, seconds, spread
from sklearn.model_selection import GridSearchCV, PredefinedSplit

import dswml
from dswml import evaluation, frank_wolfe, grid_scores, path, problem, small_problem, tuning
from dswml.curved import CurvedSteps
from dswml.dataset import Dataset, create_dataset, open_dataset
from dswml.evaluation import evaluate
from dswml.executor import InProcessExecutor
from dswml.folds import Fold
from dswml.frank_wolfe import Options
from dswml.newton_path import NewtonPath
from dswml.plain_path import PlainPath
from dswml.training import Parameters, train
from dswml.tuning import GridPoint, tune

RADII = (0.1, 0.5, 1.0, 10.0, *(float(radius) for radius in range(20, 201, 20)))
WEIGHTS = ("sparsity", "uniform")
TOL = 1e-3
#: Of the fits by commands one of so many is run.
SAMPLED = 5
#: What a search and fits one by one do, and the functions that do it; all but reads is work of every point.
READS = "reads of X, and sums over the rows"
WORK: dict[str, list[tuple[Any, str]]] = {
    READS: [(tuning, "sweep_block_together"), (problem, "sweep_block")],
    "statistics of the bases": [(problem.Problem, "absorb")],
    "small problems": [
        (path, "solve"),
        (frank_wolfe, "solve"),
        *(
            (small_problem.Part, name)
            for name in ("begin", "slope_and_gram", "ahead_gram", "move", "iterate")
        ),
        *((CurvedSteps, name) for name in ("__init__", "solve")),
    ],
    "uniform weights": [(PlainPath, "solve_next"), (frank_wolfe.Run, "all_directions")],
    "gaps and directions": [
        (path.Path, "begin"),
        *((kind, "look") for kind in (path.Path, NewtonPath)),
        *((frank_wolfe.Run, name) for name in ("linear_oracle", "gap")),
    ],
    "scores of held-out rows": [(grid_scores, "_score_block"), (evaluation, "_evaluate_block")],
}


@contextmanager
def accounted() -> Iterator[Counter[str]]:
    """Add up the processor time of each kind of work, whichever thread does it, and of all the rest."""
    took: Counter[str] = Counter()
    inside, lock = threading.local(), threading.Lock()

    def timed(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin, outer, inside.inner = time.thread_time(), getattr(inside, "inner", 0.0), 0.0
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time() - begin
                with lock:
                    took[kind] += spent - inside.inner
                inside.inner = outer + spent

        return call

    with ExitStack() as stack:
        for kind, functions in WORK.items():
            for owner, name in functions:
                stack.enter_context(patch.object(owner, name, timed(kind, getattr(owner, name))))
        begin = time.process_time()
        yield took
        took["all else"] = time.process_time() - begin - sum(took.values())


def parts(setting: Setting, data: Dataset, fold: Fold) -> tuple[Dataset, Dataset]:
    """Write the rows outside a fold and those of it into stores of their own."""
    x, y = sp.csr_array(data.read_x(0, data.n_rows)), sp.csr_array(data.read_y(0, data.n_rows))
    written = []
    for name, part in (("training", fold.training_rows), ("held-out", fold.held_out_rows)):
        rows = np.concatenate([block.start + part(block) for block in data.blocks])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # labels without a row
            create_dataset(setting.scratch / f"{name}.zarr", x[rows], y[rows], overwrite=True)
        written.append(open_dataset(setting.scratch / f"{name}.zarr"))
    return written[0], written[1]


def run(setting: Setting) -> Result:
    """The paper's protocol, 140 fits, on every set."""
    found = Result(
        "cross-validation",
        "Cross-validation",
        "5 folds x 14 radii x 2 weightings: how long does the search take next to 140 fits one by one, and "
        "next to scikit-learn's GridSearchCV around the same estimator?",
    )
    folds, radii = setting.pick((5, RADII), (2, (1.0, 10.0)))
    lines, commands = [], []
    for name, data in real_sets(setting).items():
        with InProcessExecutor() as executor:
            part, held_out = parts(setting, data, Fold(folds, 0, 0))
            # Both once before they are timed: that compiles what either needs.
            model, _ = train(part, Parameters(radius=10.0, options=Options(max_iter=2)), executor)
            evaluate(model, held_out, executor=executor)
            tune(data, executor, radii=radii[:1], weights=WEIGHTS, folds=folds, tol=TOL)
            searches = []
            for _ in range(setting.repeats):
                begin = time.perf_counter()
                with accounted() as work_together:
                    tuned = tune(data, executor, radii=radii, weights=WEIGHTS, folds=folds, tol=TOL)
                searches.append(time.perf_counter() - begin)
            together = spread(searches).middle
            dearest, reads, worst = 0, 0, 0.0
            fitted = scored = 0.0
            with accounted() as work_apart:
                for point in tuned.points:
                    parameters = Parameters(
                        radius=point.radius, weights=point.weights, options=Options(tol=TOL)
                    )
                    begin = time.perf_counter()
                    model, solution = train(part, parameters, executor)
                    fitted += folds * (time.perf_counter() - begin)
                    scored += folds * seconds(partial(evaluate, model, held_out, executor=executor))
                    dearest, reads = max(dearest, solution.passes), reads + folds * (solution.passes + 1)
                    worst = max(worst, abs(float(point.objective[0]) / solution.objective - 1))
            apart = fitted + scored
        lines.append(
            [
                name,
                str(spread(searches)),
                f"{fitted:.1f}",
                f"{scored:.1f}",
                f"{apart / together:.1f}",
                str(tuned.passes),
                str(reads),
                str(dearest),
                f"{worst:.1e}",
            ]
        )
        shared = work_apart[READS] / sum(work_apart.values())
        found.goals += [
            Goal(
                f"{name}: time of separate fits / of the search",
                apart / together,
                10,
                False,
                f"{apart / max(searches):.1f} to {apart / min(searches):.1f} in {len(searches)} searches, "
                f"{fitted / together:.1f} without the scores of the fits; in memory, reads of X are "
                f"{shared:.0%} of the processor's time of the fits: the rest is work of every point, which "
                "radii share only by where they begin",
            ),
            Goal(f"{name}: reads of X / those of the dearest fit", tuned.passes / dearest, 3.0),
            Goal(f"{name}: objective next to a separate fit's, relative", worst, 1e-3),
        ]
        found.tables.append(_work(name, work_together, work_apart, folds))
        searched, one_by_one = _by_commands(setting, data, part, held_out, tuned.points, folds)
        commands.append(
            [name, f"{searched:.1f}", f"{one_by_one:.0f}", f"{one_by_one / searched:.1f}"],
        )
        found.goals.append(
            Goal(f"{name}: time of separate commands / of dswml tune", one_by_one / searched, 10, False)
        )
        print(f"  {name}: {apart:.1f} s / {together:.1f} s, differences up to {worst:.1e}", flush=True)
        found.raw[name] = {
            "together": searches,
            "fits": fitted,
            "scores": scored,
            "passes": tuned.passes,
            "reads": reads,
            "dearest": dearest,
            "work": {"together": dict(work_together), "apart, one fold": dict(work_apart)},
            "tune": searched,
            "commands": one_by_one,
        }
    header = [
        "set",
        "search, s",
        "fits, s",
        "their scores, s",
        "times",
        "reads of the search",
        "of all fits",
        "of the dearest",
        "largest difference",
    ]
    points = folds * len(radii) * 2
    found.tables += [
        Table(f"{points} fits to a certified gap of {TOL:g}, in one process", header, lines),
        Table(
            f"The same by commands: dswml tune, and {points} of dswml train and dswml evaluate",
            ["set", "dswml tune, s", "commands, s", "times"],
            commands,
        ),
    ]
    found.notes.append(
        "Separate fits: all of one fold, from a store of its training rows, each evaluated on the held-out "
        f"rows as the search does; their time is taken {folds} times. The search is the median of "
        f"{setting.repeats}. By commands, every {SAMPLED}th of the fits is run, in a process of its own, and "
        "their mean taken."
    )
    _sklearn(found, setting)
    return found


def _work(name: str, together: Counter[str], apart: Counter[str], folds: int) -> Table:
    """Where the time goes."""
    lines = []
    for kind in [*WORK, "all else"]:
        fits = folds * apart[kind]
        lines.append(
            [kind, f"{together[kind]:.2f}", f"{fits:.2f}", f"{fits / max(together[kind], 1e-9):.1f}"]
        )
    header = ["work", "search, CPU s", "fits, CPU s", "times"]
    return Table(f"{name}: where the processor's time goes", header, lines)


def _by_commands(
    setting: Setting,
    data: Dataset,
    part: Dataset,
    held_out: Dataset,
    points: Sequence[GridPoint],
    folds: int,
) -> tuple[float, float]:
    """Seconds of the command that searches, and of two for each of the fits, as a user would type them."""
    model = str(setting.scratch / "model.zarr")

    def call(*words: object) -> float:
        command = [str(Path(sys.executable).with_name("dswml")), *map(str, words), "--quiet"]
        return seconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))

    radii = ",".join(f"{radius:g}" for radius in sorted({point.radius for point in points}))
    together = call("tune", data.url, "--radii", radii, "--folds", folds, "--tol", TOL)
    options = ("--model", model, "--overwrite", "--tol", TOL)
    apart = [
        call("train", part.url, *options, "--radius", point.radius, "--weights", point.weights)
        + call("evaluate", model, held_out.url)
        for point in points[::SAMPLED]
    ]
    return together, folds * len(points) * sum(apart) / len(apart)


def _sklearn(found: Result, setting: Setting) -> None:
    """A smaller grid, which scikit-learn's search can do in reasonable time."""
    (name, data), *_ = real_sets(setting, ["stackex_philosophy"]).items()
    radii = setting.pick((10.0, 40.0, 80.0, 120.0), (1.0, 10.0))
    x, y = sp.csr_array(data.read_x(0, data.n_rows)), sp.csr_array(data.read_y(0, data.n_rows))
    whole = replace(data.blocks[0], start=0, stop=data.n_rows)
    assigned = np.empty(data.n_rows, dtype=int)
    folds = setting.pick(5, 2)
    for number in range(folds):
        assigned[Fold(folds, 0, number).held_out_rows(whole)] = number
    begin = time.perf_counter()
    with InProcessExecutor() as executor:
        tune(data, executor, radii=radii, weights=WEIGHTS, folds=folds, tol=TOL)
    own = time.perf_counter() - begin
    begin = time.perf_counter()
    GridSearchCV(
        dswml.SparseWeightedClassifier(tol=TOL),
        {"radius": radii, "weights": WEIGHTS},
        cv=PredefinedSplit(assigned),
        scoring="f1_micro",
        refit=False,
        error_score="raise",
    ).fit(x, y)
    theirs = time.perf_counter() - begin
    found.tables.append(
        Table(
            f"{name}: {folds} folds x {len(radii)} radii x 2 weightings",
            ["search", "seconds"],
            [
                ["dswml tune", f"{own:.1f}"],
                ["GridSearchCV", f"{theirs:.1f}"],
                ["times", f"{theirs / own:.1f}"],
            ],
        )
    )
    found.raw["GridSearchCV"] = {"tune": own, "GridSearchCV": theirs}
