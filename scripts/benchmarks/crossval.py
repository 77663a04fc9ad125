"""Cross-validation of a grid against fits one by one, and against scikit-learn's search."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from common import Goal, Result, Setting, Table, real_sets, seconds
from sklearn.model_selection import GridSearchCV, PredefinedSplit

import dswml
from dswml.dataset import Dataset, create_dataset, open_dataset
from dswml.evaluation import evaluate
from dswml.executor import InProcessExecutor
from dswml.folds import Fold
from dswml.frank_wolfe import Options
from dswml.training import Parameters, train
from dswml.tuning import GridPoint, tune

RADII = (0.1, 0.5, 1.0, 10.0, *(float(radius) for radius in range(20, 201, 20)))
WEIGHTS = ("sparsity", "uniform")
TOL = 1e-3
#: Of the fits by commands one of so many is run.
SAMPLED = 5


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
            train(data, Parameters(radius=10.0, options=Options(max_iter=2)), executor)  # compiles
            begin = time.perf_counter()
            tuned = tune(data, executor, radii=radii, weights=WEIGHTS, folds=folds, tol=TOL)
            together = time.perf_counter() - begin
            part, held_out = parts(setting, data, Fold(folds, 0, 0))
            dearest, reads, worst = 0, 0, 0.0
            begin = time.perf_counter()
            for point in tuned.points:
                parameters = Parameters(radius=point.radius, weights=point.p0, options=Options(tol=TOL))
                model, solution = train(part, parameters, executor)
                evaluate(model, held_out, executor=executor)
                dearest, reads = max(dearest, solution.passes), reads + folds * (solution.passes + 1)
                worst = max(worst, abs(float(point.objective[0]) / solution.objective - 1))
            apart = (time.perf_counter() - begin) * folds
        lines.append(
            [
                name,
                f"{together:.1f}",
                f"{apart:.1f}",
                f"{apart / together:.1f}",
                str(tuned.passes),
                str(reads),
                str(dearest),
                f"{worst:.1e}",
            ]
        )
        found.goals += [
            Goal(f"{name}: time of separate fits / of the search", apart / together, 10, False),
            Goal(f"{name}: reads of X / those of the dearest fit", tuned.passes / dearest, 3.0),
            Goal(f"{name}: objective next to a separate fit's, relative", worst, 1e-3),
        ]
        searched, one_by_one = _by_commands(setting, data, part, held_out, tuned.points, folds)
        commands.append(
            [name, f"{searched:.1f}", f"{one_by_one:.0f}", f"{one_by_one / searched:.1f}"],
        )
        found.goals.append(
            Goal(f"{name}: time of separate commands / of dswml tune", one_by_one / searched, 10, False)
        )
        print(f"  {name}: {apart:.1f} s / {together:.1f} s, differences up to {worst:.1e}", flush=True)
        found.raw[name] = {
            "together": together,
            "apart": apart,
            "passes": tuned.passes,
            "reads": reads,
            "dearest": dearest,
            "tune": searched,
            "commands": one_by_one,
        }
    header = [
        "set",
        "search, s",
        "fits, s",
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
        f"rows as the search does; their time is taken {folds} times. By commands, every {SAMPLED}th of them "
        "is run, in a process of its own, and their mean taken."
    )
    _sklearn(found, setting)
    return found


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
        call("train", part.url, *options, "--radius", point.radius, "--weights", point.p0)
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
