"""Cross-validation of a grid against fits one by one, and against scikit-learn's search."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import scipy.sparse as sp
from common import Goal, Result, Setting, Table, real_sets
from sklearn.model_selection import GridSearchCV, PredefinedSplit

import dswml
from dswml.dataset import Dataset
from dswml.evaluation import evaluate
from dswml.executor import InProcessExecutor
from dswml.folds import Fold
from dswml.frank_wolfe import Options
from dswml.sources import as_dataset
from dswml.training import Parameters, train
from dswml.tuning import tune

RADII = (0.1, 0.5, 1.0, 10.0, *(float(radius) for radius in range(20, 201, 20)))
WEIGHTS = ("sparsity", "uniform")
TOL = 1e-3


def parts(data: Dataset, fold: Fold) -> tuple[Dataset, Dataset]:
    """Return the rows outside a fold and those of it, in memory."""
    x, y = sp.csr_array(data.read_x(0, data.n_rows)), sp.csr_array(data.read_y(0, data.n_rows))
    rows = [
        np.concatenate([block.start + part(block) for block in data.blocks])
        for part in (fold.training_rows, fold.held_out_rows)
    ]
    return as_dataset(x[rows[0]], y[rows[0]]), as_dataset(x[rows[1]], y[rows[1]])


def run(setting: Setting) -> Result:
    """The paper's protocol, 140 fits, on every set."""
    found = Result(
        "cross-validation",
        "Cross-validation",
        "5 folds x 14 radii x 2 weightings: how long does the search take next to 140 fits one by one, and "
        "next to scikit-learn's GridSearchCV around the same estimator?",
    )
    folds, radii = setting.pick((5, RADII), (2, (1.0, 10.0)))
    lines = []
    for name, data in real_sets(setting).items():
        with InProcessExecutor() as executor:
            train(data, Parameters(radius=10.0, options=Options(max_iter=2)), executor)  # compiles
            begin = time.perf_counter()
            tuned = tune(data, executor, radii=radii, weights=WEIGHTS, folds=folds, tol=TOL)
            together = time.perf_counter() - begin
            dearest, worst = 0, 0.0
            part, held_out = parts(data, Fold(folds, 0, 0))
            begin = time.perf_counter()
            for point in tuned.points:
                parameters = Parameters(radius=point.radius, weights=point.p0, options=Options(tol=TOL))
                model, solution = train(part, parameters, executor)
                evaluate(model, held_out, executor=executor)
                dearest = max(dearest, solution.passes)
                worst = max(worst, abs(float(point.objective[0]) / solution.objective - 1))
            apart = (time.perf_counter() - begin) * folds
        lines.append(
            [
                name,
                f"{together:.1f}",
                f"{apart:.1f}",
                f"{apart / together:.1f}",
                str(tuned.passes),
                str(dearest),
                f"{worst:.1e}",
            ]
        )
        found.goals += [
            Goal(f"{name}: time of separate fits / of the search", apart / together, 10, False),
            Goal(f"{name}: reads of X / those of the dearest fit", tuned.passes / dearest, 3.0),
            Goal(f"{name}: objective next to a separate fit's, relative", worst, 1e-3),
        ]
        print(f"  {name}: {apart:.1f} s / {together:.1f} s, differences up to {worst:.1e}", flush=True)
        found.raw[name] = {"together": together, "apart": apart, "passes": tuned.passes, "dearest": dearest}
    header = ["set", "search, s", "fits, s", "times", "reads", "dearest fit", "largest difference"]
    found.tables.append(Table(f"{folds * len(radii) * 2} fits to a certified gap of {TOL:g}", header, lines))
    found.notes.append(
        "Separate fits: all of one fold, in memory, in the same process, each evaluated on the held-out rows "
        f"as the search does; their time is taken {folds} times."
    )
    _sklearn(found, setting)
    return found


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
