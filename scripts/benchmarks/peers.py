"""Other classifiers on the same task: how good they are, how fast they train and predict, how large they are.

Every program is tuned on the training part alone: each of its settings is fitted to four fifths of it and
judged on the last fifth, where its threshold is chosen as well; the choice is fitted to the whole part and
then tested.
"""

from __future__ import annotations

import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from common import Goal, Result, Setting, Table, split_set
from peer import NotInstalledError, call_peer

from dswml import metrics
from dswml.executor import InProcessExecutor
from dswml.frank_wolfe import Options
from dswml.sources import as_dataset
from dswml.training import Parameters, train

KS = (1, 3, 5)
#: Settings of every program that are tried. Of dswml these are the radius, p0, the weight of one row for
#: every feature that has no label, as a share of the mean of X^T X's diagonal (such rows shrink W as Ridge's
#: penalty does), the power of the inverse document frequency that features are scaled with, and whether it
#: sees how long rows were (see `with_lengths`).
GRID: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "dswml": (
        "dswml",
        [
            {"radius": radius, "p0": p0, "shrinkage": shrinkage, "idf": idf, "lengths": lengths}
            for radius, p0, shrinkage, idf, lengths in (
                *((1e4, 0.5, *rest) for rest in product((0.1, 0.2, 0.4), (0.0, 0.5), (False, True))),
                (200.0, 0.25, 0.1, 0.0, True),
                (400.0, 0.25, 0.4, 0.0, False),
                (600.0, 0.1, 0.4, 0.0, False),
            )
        ],
    ),
    "Ridge": ("Ridge", [{"alpha": alpha} for alpha in (0.3, 1.0, 3.0)]),
    "logistic regression": ("logistic regression", [{"C": c} for c in (1.0, 10.0)]),
    "napkinXC PLT": ("napkinXC", [{"kind": "PLT", "liblinear_c": c} for c in (1.0, 10.0)]),
    "napkinXC BR": ("napkinXC", [{"kind": "BR", "liblinear_c": c} for c in (1.0, 10.0)]),
    "omikuji": ("omikuji", [{}, {"linear_c": 3.0}]),
    "PECOS XLinear": ("PECOS", [{}, {"Cp": 3.0}]),
}
#: The constant column of dswml, and the certified gap of its fits.
INTERCEPT, TOL = 1.0, 1e-2
#: Most features with which lengths are tried: X^T X of twice as many is still small.
MOST_WITH_LENGTHS = 999
#: What a setting is chosen for.
AIMS = ("f1", "f1 at 0.5", *(f"P@{k}" for k in KS))


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


def tuned(name: str, setting: Setting, x: Any, y: Any, test: Any, truth: Any) -> dict[str, Any]:
    """Tune a program on the training part for each aim, fit it to all of it, and test it."""
    program, grid = GRID[name]
    if x.shape[1] > MOST_WITH_LENGTHS:
        grid = [options for options in grid if not options.get("lengths")]
    call = own if program == "dswml" else call_peer
    held_out = np.arange(x.shape[0]) % 5 == 4
    tried = []
    for options in setting.pick(grid, grid[:1]):
        parts = {"x": x[~held_out], "y": y[~held_out], "test": x[held_out]}
        scores = call(program, setting, parts, **options)["scores"]
        threshold, _ = best_threshold(y[held_out], scores)
        tried.append((judged(y[held_out], scores, threshold), threshold, options))
    found: dict[str, Any] = {}
    runs: dict[str, dict[str, Any]] = {}
    for aim in AIMS:
        _, threshold, options = max(tried, key=lambda each, aim=aim: each[0][aim])
        if str(options) not in runs:
            reports = [
                call(program, setting, {"x": x, "y": y, "test": test}, **options)
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
        found[aim] = runs[str(options)]
    return found


def own(
    name: str,
    setting: Setting,
    matrices: dict[str, Any],
    radius: float,
    p0: float,
    shrinkage: float,
    idf: float,
    lengths: bool,
) -> dict[str, Any]:
    """Run dswml as the other programs are run."""
    n_features = (1 + lengths) * matrices["x"].shape[1]
    begin = time.perf_counter()
    counts = np.bincount(matrices["x"].indices, minlength=matrices["x"].shape[1])
    scale = np.log1p(matrices["x"].shape[0] / (1 + counts)) ** idf
    with_more = with_lengths if lengths else with_constant
    x = with_more(scaled(matrices["x"], scale))
    prepared = time.perf_counter() - begin
    y = sp.csr_array(matrices["y"])
    with InProcessExecutor() as executor:
        begin = time.perf_counter() - prepared
        weight = shrinkage * float(x[:, :n_features].power(2).sum()) / n_features
        rows = np.sqrt(weight) * sp.eye_array(n_features, x.shape[1])
        x = sp.csr_array(sp.vstack([x, rows]))
        y = sp.csr_array(sp.vstack([y, sp.csr_array((n_features, y.shape[1]), dtype=y.dtype)]))
        parameters = Parameters(radius=radius, weights=p0, options=Options(tol=TOL))
        model, _ = train(as_dataset(x, y), parameters, executor)
        trained = time.perf_counter()
        scores = np.asarray(model.decision_function(with_more(scaled(matrices["test"], scale))))
        predicted = time.perf_counter() - trained
    with tempfile.TemporaryDirectory(dir=setting.scratch) as folder:
        model.save(f"{folder}/model.zarr")
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return {"train": trained - begin, "predict": predicted, "size": size, "scores": scores}


def scaled(x: Any, scale: Any) -> Any:
    """Scale the features, and rows to length one."""
    data, rows = x.data * scale[x.indices], np.repeat(np.arange(x.shape[0]), np.diff(x.indptr))
    lengths = np.sqrt(np.bincount(rows, data**2, minlength=x.shape[0]))
    return sp.csr_array((data / lengths[rows], x.indices, x.indptr), shape=x.shape)


def with_constant(x: Any) -> Any:
    """Append the constant column."""
    return sp.csr_array(sp.hstack([x, sp.csr_array(np.full((x.shape[0], 1), INTERCEPT))]))


def with_lengths(x: Any) -> Any:
    """Append the rows as they were before they had length one, halved, and what depends on their length."""
    counts = np.maximum(np.diff(sp.csr_array(x).indptr), 1)
    ones = sp.csr_array((np.full(x.nnz, 0.5), x.indices, x.indptr), shape=x.shape)
    more = np.column_stack([np.log(counts), np.log(counts) ** 2])
    return with_constant(sp.hstack([x, ones, sp.csr_array(more)]))


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
        programs: dict[str, dict[str, Any]] = {}
        for each in GRID:
            try:
                programs[each] = tuned(each, setting, x, y, test, truth)
            except NotInstalledError as error:
                found.notes.append(str(error))
        lines = [
            [
                program,
                f"{100 * report['f1']['f1']:.1f}",
                f"{100 * report['f1 at 0.5']['f1 at 0.5']:.1f}",
                *(f"{100 * report[f'P@{k}'][f'P@{k}']:.1f}" for k in KS),
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
        found.raw[name] = dict(programs)
        mine = programs.pop("dswml")
        _goals(found, name, mine, programs, test.shape[0])
        for k in KS if programs else ():
            peer = max(programs, key=lambda each, aim=f"P@{k}": programs[each][aim][aim])
            if mine[f"P@{k}"][f"P@{k}"] < programs[peer][f"P@{k}"][f"P@{k}"]:
                options = {"dswml": mine[f"P@{k}"]["options"], peer: programs[peer][f"P@{k}"]["options"]}
                found.goals.append(_by_folds(setting, name, k, options, x, y))
    found.notes.append(
        "F1 is at the threshold chosen on the training part, F1 at 0.5 and each P@k are those of settings "
        "chosen for them; the setting, time and size shown are those chosen for F1. All are given binary "
        "features in rows of length one. dswml has a constant column and a row without labels for every "
        "feature, and may scale features by the root of their inverse document frequency; with lengths, it "
        "also sees the rows before they had length one, and the logarithm of the number of their features "
        "and its square. Training time includes all of that."
    )
    return found


def _by_folds(
    setting: Setting, name: str, k: int, options: dict[str, dict[str, Any]], x: Any, y: Any
) -> Goal:
    """Compare dswml with a peer on all rows of the training part, each held out once."""
    hits: dict[str, list[Any]] = {program: [] for program in options}
    for fold in range(5):
        held_out = np.arange(x.shape[0]) % 5 == fold
        parts, truth = {"x": x[~held_out], "y": y[~held_out], "test": x[held_out]}, y[held_out].toarray()
        for program in options:
            call = own if program == "dswml" else call_peer
            scores = call(GRID[program][0], setting, parts, **options[program])["scores"]
            top = metrics.top_k(np.ascontiguousarray(scores, dtype=np.float64), k)[0]
            hits[program].append(np.take_along_axis(truth, top, axis=1).mean(axis=1))
    (mine, theirs), (_, peer) = (np.concatenate(each) for each in hits.values()), options
    difference, error = (mine - theirs).mean(), (mine - theirs).std() / np.sqrt(mine.size)
    return Goal(
        f"{name}: P@{k} in five folds of the training part / that of the best peer",
        mine.mean() / theirs.mean(),
        1.0,
        at_most=False,
        note=f"{100 * mine.mean():.2f} and {100 * theirs.mean():.2f} ({peer}), a difference of "
        f"{100 * difference:+.2f} whose standard error is {100 * error:.2f}",
    )


def _goals(
    found: Result, name: str, own: dict[str, Any], others: dict[str, dict[str, Any]], n_rows: int
) -> None:
    if not others:
        return
    best = max(report["f1"]["f1"] for report in others.values())
    found.goals.append(
        Goal(f"{name}: micro-F1 / that of the best peer", own["f1"]["f1"] / best, 1.0, at_most=False)
    )
    for k in KS:
        mine, (first, peer) = (
            own[f"P@{k}"][f"P@{k}"],
            max((report[f"P@{k}"][f"P@{k}"], peer) for peer, report in others.items()),
        )
        error = 100 * np.sqrt(first * (1 - first) / (n_rows * k))
        note = f"{100 * mine:.2f} and {100 * first:.2f} ({peer}), of which the standard error is {error:.2f}"
        found.goals.append(
            Goal(f"{name}: P@{k} / that of the best peer", mine / first, 1.0, at_most=False, note=note)
        )
    half = max(report["f1 at 0.5"]["f1 at 0.5"] for report in others.values())
    found.goals.append(
        Goal(
            f"{name}: micro-F1 at 0.5 / that of the best peer",
            own["f1 at 0.5"]["f1 at 0.5"] / half,
            1.0,
            at_most=False,
        )
    )
    worst, note = 0.0, ""
    for peer, report in others.items():
        theirs = report["f1"]
        good = [run for run in own.values() if run["f1"] >= theirs["f1"]]
        mine = min(good, key=lambda run: run["train"], default={"train": np.inf, "f1": np.nan})
        if mine["train"] / theirs["train"] > worst:
            worst = mine["train"] / theirs["train"]
            note = (
                f"{mine['train']:.2f} s at F1 {100 * mine['f1']:.1f} next to {theirs['train']:.2f} s "
                f"at {100 * theirs['f1']:.1f} ({peer}), of the settings chosen for any of the figures"
            )
    found.goals.append(
        Goal(
            f"{name}: training time at F1 no less than a peer's / that peer's, the worst of all",
            worst,
            1.0,
            note=note,
        )
    )
