"""Other classifiers on the same task: how good they are, how fast they train and predict, how large they are.

Every program is tuned on the training part alone: each of its settings is fitted to four fifths of it and
judged on the last fifth, where its threshold is chosen as well; the choice is fitted to the whole part and
then tested. dswml chooses by cross-validation of the same part.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from common import Goal, Result, Setting, Table, split_set
from peer import NotInstalledError, call_peer
from sklearn.feature_extraction.text import TfidfTransformer

from dswml import metrics
from dswml.executor import InProcessExecutor
from dswml.frank_wolfe import Options
from dswml.sources import as_dataset
from dswml.training import Parameters, train
from dswml.tuning import tune

KS = (1, 3, 5)
#: Settings of every peer that are tried.
GRID: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "Ridge": ("Ridge", [{"alpha": alpha} for alpha in (0.3, 1.0, 3.0)]),
    "logistic regression": ("logistic regression", [{"C": c} for c in (1.0, 10.0)]),
    "napkinXC PLT": ("napkinXC", [{"kind": "PLT", "liblinear_c": c} for c in (1.0, 10.0)]),
    "napkinXC BR": ("napkinXC", [{"kind": "BR", "liblinear_c": c} for c in (1.0, 10.0)]),
    "omikuji": ("omikuji", [{}, {"linear_c": 3.0}]),
    "PECOS XLinear": ("PECOS", [{}, {"Cp": 3.0}]),
}
#: The grid of dswml.
RADII = (200.0, 300.0, 400.0, 600.0)
WEIGHTS = (0.1, 0.25, 0.5)
INTERCEPT = 0.3


def judged(truth: Any, scores: Any, threshold: float) -> dict[str, float]:
    """Micro-F1 at thresholds, and precision at k."""
    truth, scores = sp.csr_array(truth), np.ascontiguousarray(scores, dtype=np.float64)
    found = {"f1": f1_at(truth, scores, threshold), "f1 at 0.5": f1_at(truth, scores, 0.5)}
    ranked = metrics.ranking_scores(metrics.ranking_block(truth, metrics.top_k(scores, max(KS))[0]))
    return found | {f"P@{k}": float(ranked[f"P@{k}"]) for k in KS}


def f1_at(truth: Any, scores: Any, threshold: float) -> float:
    chosen = metrics.select_at_threshold(scores, threshold)
    return float(metrics.label_scores(metrics.label_block(truth, chosen))["micro_f1"])


def best_threshold(truth: Any, scores: Any) -> tuple[float, float]:
    """Return the threshold with the best micro-F1, and that."""
    truth = sp.csr_array(truth).toarray().ravel() > 0
    order = np.argsort(-np.ascontiguousarray(scores).ravel(), kind="stable")[: 4 * int(truth.sum())]
    hits = np.cumsum(truth[order])
    f1 = 2 * hits / (np.arange(1, order.size + 1) + truth.sum())
    at = int(np.argmax(f1))
    return float(np.ravel(scores)[order[at]]), float(f1[at])


def peer(name: str, setting: Setting, x: Any, y: Any, test: Any, truth: Any) -> dict[str, Any]:
    """Tune a peer on the training part, fit it to all of it, and test it."""
    program, grid = GRID[name]
    held_out = np.arange(x.shape[0]) % 5 == 4
    tried = []
    for options in setting.pick(grid, grid[:1]):
        parts = {"x": x[~held_out], "y": y[~held_out], "test": x[held_out]}
        scores = call_peer(program, setting, parts, **options)["scores"]
        threshold, f1 = best_threshold(y[held_out], scores)
        first = judged(y[held_out], scores, threshold)["P@1"]
        tried.append((f1, first, threshold, options))
    found: dict[str, Any] = {}
    runs: dict[str, dict[str, Any]] = {}
    for by, column in (("f1", 0), ("P@1", 1)):
        _, _, threshold, options = max(tried, key=lambda each, column=column: each[column])
        if str(options) not in runs:
            reports = [
                call_peer(program, setting, {"x": x, "y": y, "test": test}, **options)
                for _ in range(setting.repeats)
            ]
            runs[str(options)] = {
                **judged(truth, reports[0]["scores"], threshold),
                **{
                    key: float(np.median([each[key] for each in reports]))
                    for key in ("train", "predict", "size")
                },
                "options": options,
            }
        found[by] = runs[str(options)]
    return found


def ours(setting: Setting, x: Any, y: Any, test: Any, truth: Any) -> dict[str, Any]:
    """Tune dswml on the training part, fit the choice to all of it, and test it."""
    found: dict[str, Any] = {}
    idf = TfidfTransformer().fit(x)
    x, test = idf.transform(x).tocsr(), idf.transform(test).tocsr()
    data = as_dataset(sp.csr_array(x), sp.csr_array(y))
    with InProcessExecutor() as executor:
        grid = setting.pick((RADII, WEIGHTS), (RADII[:1], WEIGHTS[-1:]))
        begin = time.perf_counter()
        tuned = tune(
            data,
            executor,
            radii=grid[0],
            weights=grid[1],
            folds=setting.pick(5, 2),
            fit_intercept=INTERCEPT,
            tol=3e-3,
        )
        found["tuning"] = time.perf_counter() - begin
        points = {
            "f1": max(tuned.points, key=lambda point: point.mean("best_f1")),
            "P@1": max(tuned.points, key=lambda point: point.mean("P@1")),
            "at 0.5": max(tuned.points, key=lambda point: point.mean("micro_f1")),
        }
        runs: dict[tuple[float, float], dict[str, Any]] = {}
        for by, point in points.items():
            key = (point.radius, point.p0)
            if key not in runs:
                runs[key] = _fit(setting, executor, data, point, test, truth)
            found[by] = runs[key]
    return found


def _fit(setting: Setting, executor: Any, data: Any, point: Any, test: Any, truth: Any) -> dict[str, Any]:
    parameters = Parameters(
        radius=point.radius, weights=point.p0, fit_intercept=INTERCEPT, options=Options(tol=3e-3)
    )
    times = []
    for _ in range(setting.repeats):
        begin = time.perf_counter()
        model, _ = train(data, parameters, executor)
        times.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    scores = np.asarray(model.decision_function(sp.csr_array(test)))
    predicted = time.perf_counter() - begin
    with tempfile.TemporaryDirectory(dir=setting.scratch) as folder:
        model.save(f"{folder}/model.zarr")
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return {
        **judged(truth, scores, point.threshold),
        "train": float(np.median(times)),
        "predict": predicted,
        "size": size,
        "options": {"radius": point.radius, "p0": point.p0},
    }


def run(setting: Setting) -> Result:
    """All programs on both sets."""
    found = Result(
        "peers",
        "Other classifiers on the same task",
        "How good are they, how fast do they train and predict, and how large are the models?",
    )
    for name in setting.pick(("bibtex", "delicious"), ("bibtex",)):
        train_part, test_part = split_set(setting, name)
        x, test = (sp.csr_matrix(part.read_x(0, part.n_rows)) for part in (train_part, test_part))
        y, truth = (sp.csr_matrix(part.read_y(0, part.n_rows)) for part in (train_part, test_part))
        if setting.tiny:
            x, y = x[:400], y[:400]
        programs: dict[str, dict[str, Any]] = {"dswml": ours(setting, x, y, test, truth)}
        for each in GRID:
            try:
                programs[each] = peer(each, setting, x, y, test, truth)
            except NotInstalledError as error:
                found.notes.append(str(error))
        lines = [
            [
                program,
                f"{100 * report['f1']['f1']:.1f}",
                f"{100 * max(report[by]['f1 at 0.5'] for by in ('f1', 'at 0.5') if by in report):.1f}",
                *(f"{100 * report['P@1'][f'P@{k}']:.1f}" for k in KS),
                f"{report['f1']['train']:.2f}",
                f"{test.shape[0] / max(report['f1']['predict'], 1e-9):,.0f}",
                f"{report['f1']['size'] / 1e6:.2f}",
                " ".join(f"{key}={value}" for key, value in report["f1"]["options"].items()),
            ]
            for program, report in programs.items()
        ]
        header = [
            "program",
            "micro-F1",
            "at 0.5",
            "P@1",
            "P@3",
            "P@5",
            "training, s",
            "rows/s",
            "MB",
            "setting",
        ]
        found.tables.append(
            Table(f"{name}: trained on {x.shape[0]} rows, tested on {test.shape[0]}", header, lines)
        )
        own = programs.pop("dswml")
        _goals(found, name, own, programs)
        found.raw[name] = {"dswml": own, **programs}
    found.notes.append(
        "dswml weights the features by idf of the training part and adds a constant column. F1 is at the "
        "threshold chosen on the training part, and the setting is the one chosen for F1; P@k is that of the "
        "setting chosen for P@1."
    )
    return found


def _goals(found: Result, name: str, own: dict[str, Any], others: dict[str, dict[str, Any]]) -> None:
    if not others:
        return
    best = max(report["f1"]["f1"] for report in others.values())
    found.goals.append(
        Goal(f"{name}: micro-F1 / that of the best peer", own["f1"]["f1"] / best, 1.0, at_most=False)
    )
    for k in KS:
        first = max(report["P@1"][f"P@{k}"] for report in others.values())
        found.goals.append(
            Goal(f"{name}: P@{k} / that of the best peer", own["P@1"][f"P@{k}"] / first, 1.0, at_most=False)
        )
    half = max(report["f1"]["f1 at 0.5"] for report in others.values())
    found.goals.append(
        Goal(
            f"{name}: micro-F1 at 0.5 / that of the best peer",
            own["at 0.5"]["f1 at 0.5"] / half,
            1.0,
            at_most=False,
        )
    )
    rivals = {
        key: report for key, report in others.items() if report["f1"]["f1"] >= own["f1"]["f1"]
    } or others
    fastest = min(report["f1"]["train"] for report in rivals.values())
    found.goals.append(
        Goal(
            f"{name}: training time / that of the fastest peer"
            + ("" if rivals is others else " that is at least as good"),
            own["f1"]["train"] / fastest,
            1.0,
        )
    )
