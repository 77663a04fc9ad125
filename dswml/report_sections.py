"""The sections of a report: each is written from what is known, and left out where nothing is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from .charts import Axis, Line, Series, chart
from .evaluation import Evaluation
from .evaluation_tables import percent, ranking_table, set_table, summary
from .model import Model
from .progress import format_seconds
from .report_page import Section, counted, facts, table
from .roc import Auc, ThresholdCurve
from .rules import KINDS, RULE_SCORES, direction
from .search_record import thinned
from .solution import Certificate

__all__ = [
    "convergence",
    "cross_validation",
    "data_lines",
    "metrics",
    "or_nothing",
    "spectrum",
    "status",
    "thresholds",
    "training",
    "versions_lines",
]

Array = npt.NDArray[Any]

#: Most marks of a chart, and points of a curve.
MAX_MARKS, MAX_CURVE = 800, 200
#: Why a fit ended before its tolerance was reached.
_ENDS = {
    "MAXITER": "at its most iterations",
    "MAXPASSES": "at its most passes",
    "TIMEOUT": "at its time limit",
    "INTERRUPTED": "as asked",
}


def training(model: Model) -> Section:
    """What was trained on what."""
    info = model.info
    lines = data_lines(info, model.n_features, model.n_labels)
    parameters = info.get("parameters", {})
    weights = f" ({parameters['weights']} weights)" if isinstance(parameters.get("weights"), str) else ""
    lines.append(("p0", f"{model.p0:.4g}{weights}, the weight of inactive labels"))
    rows = "as given" if model.normalize is None else f"scaled to unit {model.normalize} norm"
    intercept = f", with a constant column of {model.intercept:g}" if model.intercept else ""
    tuned = f", tuned on held-out rows {_tuned_for(model)}" if _is_tuned(model) else ""
    lines += [("Rows", rows + intercept), ("Loss", model.loss), ("Predicted", f"{model.rule}{tuned}")]
    if "radius" in parameters:
        lines.append(("Radius", f"{parameters['radius']:g}, of the nuclear-norm ball"))
    options = parameters.get("options", {})
    if "tol" in options:
        random_state = parameters.get("random_state")
        seed = "" if random_state is None else f", seed {random_state}"
        lines.append(("Asked for", f"relative gap {options['tol']:g}, step {options['step']}{seed}"))
    lines.append(("Rank of W", f"{model.rank}"))
    if "objective" in info:
        lines += _fit(info)
    if "search" in info:
        lines.append(("Search", _search(info["search"])))
    lines += [*versions_lines(info), ("Model fingerprint", model.fingerprint)]
    return Section("training", "What was trained", facts("What was trained", lines))


def data_lines(info: Mapping[str, Any], n_features: int, n_labels: int) -> list[tuple[str, str]]:
    """What it was trained on."""
    data = info.get("data", {})
    name = f"{data['name']}: " if "name" in data else ""
    rows = f"{counted(data['n_rows'], 'row')} (N), " if "n_rows" in data else ""
    each = f", {data['nnz_y'] / data['n_rows']:.3g} of them a row" if "nnz_y" in data else ""
    size = f"{counted(n_features, 'feature')} (D), {counted(n_labels, 'label')} (L)"
    lines = [("Data", f"{name}{rows}{size}{each}")]
    if "fingerprint" in data:
        lines.append(("Data fingerprint", data["fingerprint"]))
    if "k_hat" in info:
        lines.append(("K_hat", f"{counted(info['k_hat'], 'label')} on a row at most"))
    return lines


def versions_lines(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What software was at work, if that is known."""
    versions = ", ".join(f"{name} {number}" for name, number in info.get("versions", {}).items())
    return [("Versions", versions)] if versions else []


def _is_tuned(model: Model) -> bool:
    """Whether the model predicts with the rule that its search has tuned."""
    search = model.info.get("search", {})
    return search.get("threshold") in KINDS and search["rule"] == str(model.rule)


def _tuned_for(model: Model) -> str:
    score = model.info["search"]["score"]
    return f"for {_words(score if score in RULE_SCORES else 'micro_f1')}"


def _search(search: Mapping[str, Any]) -> str:
    points = counted(search.get("n_points", len(search["points"])), "point")
    passes = counted(search["passes"], "more pass over X", "more passes over X")
    return f"{points} on {counted(search['folds'], 'fold')} in {passes}, by {_words(search['score'])}"


def _fit(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    certificate = info.get("certificate")
    known = "an estimate, not certified" if certificate is None else str(Certificate(**certificate))
    return [
        ("Status", ": ".join(status(info))),
        ("Objective", f"{info['objective']:.6g}"),
        ("Relative gap", f"{info['relative_gap']:.3g} ({known})"),
        ("Work", f"{_passes(info['passes'])} over X, {counted(info['iterations'], 'iteration')}"),
        ("Time", format_seconds(info["seconds"])),
    ]


def status(info: Mapping[str, Any]) -> tuple[str, str]:
    """In one word how a fit ended, and in some more why."""
    tol = info.get("parameters", {}).get("options", {}).get("tol")
    goal = "the tolerance" if tol is None else f"the tolerance of {tol:g}"
    if info["status"] == "OPTIMAL":
        return "Optimal", f"{goal} was reached"
    reached = info.get("certificate") is None and tol is not None and info["relative_gap"] <= tol
    missed = f"{goal} was reached by an estimate only" if reached else f"{goal} was not reached"
    if info["status"] == "CHECKPOINT":
        return "Unfinished", f"stopped at checkpoint {info['checkpoint']}, {missed}"
    return "Stopped", f"{_ENDS.get(info['status'], info['status'])}, {missed}"


def convergence(model: Model) -> Section | None:
    """Objective and gap against the passes over X."""
    if len(model.history) < 2:
        return None
    kept = _spread(len(model.history), MAX_MARKS)
    records = [model.history[i] for i in kept]
    passes = np.array([record.passes for record in records])
    objective = np.array([record.objective for record in records])
    gap = np.array([record.relative_gap for record in records])
    certified = np.array([record.certified for record in records])
    titles = [
        f"iteration {record.iteration}, {_passes(record.passes)}: objective {record.objective:.6g}, "
        f"relative gap {record.relative_gap:.3g}{'' if record.certified else ' (estimate)'}, "
        f"rank {record.rank}"
        for record in records
    ]
    across, by = passes, "passes over X"
    if passes[0] == passes[-1]:
        across, by = (
            np.array([record.iteration for record in records]),
            "iterations, which need no other pass",
        )
    x = Axis.around(by, across, zero=True, whole=True)
    shown = np.zeros(len(records), dtype=bool)
    shown[_spread(len(records), MAX_CURVE // 2)] = True

    def marked(name: str, y: Array, of: Array, hollow: bool = False) -> Series:
        told = [titles[i] for i in np.flatnonzero(of)]
        return Series(name, across[of], y[of], line=False, hollow=hollow, titles=told)

    positive = objective[objective > 0]
    far = positive.size == objective.size and bool(positive.max() > 100 * positive.min())
    value = chart(
        "Objective",
        f"From {objective[0]:.4g} to {objective[-1]:.4g} in {_passes(int(passes[-1]))} over X.",
        x,
        Axis.around("objective", objective, log=far),
        [Series("", across, objective, marks=False), marked("", objective, shown)],
    )
    marks = [
        marked(name, gap, shown & of, hollow)
        for name, of, hollow in (("certified", certified, False), ("estimate", ~certified, True))
        if (shown & of).any()
    ]
    tol = model.info.get("parameters", {}).get("options", {}).get("tol") or 0.0
    goal = [Line("asked for", tol)] if tol > 0 else []
    kind = "certified" if certified[-1] else "an estimate"
    relative = chart(
        "Gap to the optimum",
        "A certified gap bounds how far the objective is above the optimum; "
        f"the last, {gap[-1]:.2g}, is {kind}.",
        x,
        Axis.around("relative gap", gap, [tol] if tol > 0 else [], log=True),
        [Series("", across, gap, marks=False), *marks],
        goal,
    )
    return Section("convergence", "Convergence", f'<div class="charts">{value}{relative}</div>')


def singular_values(model: Model) -> Array:
    """Return the singular values of W = U M, by way of a matrix of the size of its rank."""
    if not model.rank:
        return np.zeros(0)
    left: Array
    right: Array
    left, right = (np.linalg.qr(factor)[1] for factor in (model.u, model.m.T))
    values: Array = np.linalg.svd(left @ right.T, compute_uv=False)
    return values


def spectrum(model: Model) -> Section | None:
    """The singular values of W."""
    values = singular_values(model)
    values = values[values > 1e-12 * values.max(initial=0.0)]
    if not values.size:
        return None
    kept = _spread(values.size, MAX_MARKS // 2)
    place = kept + 1
    half = int(np.searchsorted(np.cumsum(values), values.sum() / 2)) + 1
    radius = model.info.get("parameters", {}).get("radius")
    most = "" if radius is None else f" of the {radius:g} allowed"
    figure = chart(
        "Singular values of W",
        f"{values.size} in all, from {values[0]:.3g} to {values[-1]:.3g}; their sum is {values.sum():.4g}"
        f"{most}, half of it in the first {half}.",
        Axis.around("number", place, zero=True, whole=True),
        Axis.around("singular value", values, log=True),
        [Series("", place, values[kept], titles=[f"number {i + 1}: {values[i]:.4g}" for i in kept],
                marks=values.size <= 100)],
    )  # fmt: skip
    return Section("spectrum", "Spectrum", f'<div class="charts">{figure}</div>')


def cross_validation(search: Mapping[str, Any]) -> Section:
    """The held-out score against the radius, a curve for every weighting."""
    points, score = search["points"], search["score"]
    best, frugal, chosen = (points[search[name]] for name in ("best", "one_standard_error", "chosen"))
    radii = np.array([point["radius"] for point in points])
    curves = [
        (str(weights), list(group)) for weights, group in groupby(points, key=lambda point: point["weights"])
    ]
    series, shifts = [], {}
    for number, (weights, group) in enumerate(curves):
        shifts[weights] = min(7.0, 24 / len(curves)) * (number - (len(curves) - 1) / 2)
        p0 = f"p0 = {group[0]['p0']:.3g}"
        name = f"{weights} weights ({p0})" if isinstance(group[0]["weights"], str) else p0
        series.append(
            Series(
                name,
                [point["radius"] for point in group],
                _floats(point["mean"] for point in group),
                colour=1 + number % 4,
                hollow=number // 4 % 2 == 1,
                errors=_floats(point["standard_error"] for point in group),
                titles=[f"{name}, radius {point['radius']:g}: {_plus_minus(point)}" for point in group],
                shift=shifts[weights],
            )
        )

    def around(name: str, point: Mapping[str, Any], colour: int) -> Series:
        shift = shifts[str(point["weights"])]
        return Series(name, [point["radius"]], [point["mean"]], colour, line=False, large=True, shift=shift)

    # Some of the three are often the same point.
    names = {id(point): _remark(point, chosen, best, frugal) for point in (chosen, best, frugal)}
    rings = [
        around(names[id(point)], point, 4 if point is chosen else 0) for point in points if id(point) in names
    ]
    means, errors = (_floats(point[name] for point in points) for name in ("mean", "standard_error"))
    sign = direction(score)
    bound = best["mean"] - sign * best["standard_error"]
    figure = chart(
        f"{_words(score)[:1].upper()}{_words(score)[1:]} on held-out rows",
        f"Mean over {search['folds']} folds with a standard error on either side; best "
        f"{_plus_minus(best)} at radius {best['radius']:g}, {best['weights']} weights.",
        Axis.around("radius", radii, log=bool(radii.max() > 10 * radii.min())),
        Axis.around(_words(score), means - errors, means + errors),
        [*series, *rings],
        [Line(f"best {'less' if sign > 0 else 'plus'} a standard error", bound)],
    )
    lines = [
        (f"{point['radius']:g}", str(point["weights"]), f"{point['p0']:.4g}", _plus_minus(point),
         or_nothing(point["best_f1"]), or_nothing(point["threshold"]), f"{point['rank']:.0f}",
         or_nothing(point["relative_gap"], ".1e"), _remark(point, chosen, best, frugal))
        for point in points
    ]  # fmt: skip
    gap = "gap" if search.get("gaps_certified", True) else "gap, estimated"
    header = ("radius", "weights", "p0", _words(score), "best F1", "at threshold", "rank", gap, "remark")
    return Section(
        "cross-validation",
        "Cross-validation",
        f'<div class="charts">{figure}</div><details><summary>All points of the grid</summary>'
        f"{table('Points of the grid', header, lines)}</details>",
    )


def _remark(point: Any, chosen: Any, best: Any, frugal: Any) -> str:
    names = {"chosen": chosen, "best": best, "one-standard-error choice": frugal}
    return ", ".join(name for name, each in names.items() if each is point)


def thresholds(model: Model, curve: ThresholdCurve, auc: Auc, rows: str) -> Section:
    """Micro F1, precision and recall against the threshold, and the ROC."""
    curve = thinned(curve, MAX_CURVE)
    theta, best_f1 = curve.best()
    recall, seen = curve.recall(), np.isfinite(curve.thresholds)
    inside = curve.thresholds[seen & (recall < 0.999) & (recall > 0.001)]
    own = [model.threshold] if model.rule.top_k is None and model.label_thresholds is None else []
    x = Axis.around("threshold", inside, [theta], own)
    tuned = bool(own) and _is_tuned(model)
    name = f"tuned {_tuned_for(model)}" if tuned else "of the model"
    lines = [Line(f"best for micro F1{f' and {name}' if own == [theta] else ''}, {theta:.3g}", theta, "x", 4)]
    lines += [Line(f"{name}, {each:.3g}", each, "x") for each in own if each != theta]
    ways = (("F1", curve.f1()), ("precision", curve.precision(np.nan)), ("recall", recall))
    by_threshold = chart(
        "F1, precision and recall by threshold",
        f"Micro averages over {rows}; F1 is best, {percent(best_f1)} %, at the threshold {theta:.4g}.",
        x,
        Axis("share", 0.0, 1.0),
        [
            Series(name, curve.thresholds[seen], values[seen], number, marks=False)
            for number, (name, values) in enumerate(ways, start=1)
        ],
        lines,
    )
    bound = "" if not auc.error_bound > 0 else f" (error at most {100 * auc.error_bound:.1g} %)"
    roc = (
        ""
        if math.isnan(auc.value)
        else chart(
            "ROC",
            f"All entries of {rows} as one: the area under the curve is {percent(auc.value)} %{bound}.",
            Axis("false positive rate", 0.0, 1.0),
            Axis("true positive rate", 0.0, 1.0),
            [Series("model", curve.false_positive_rate(), recall, marks=False)],
            [Line("chance", axis="diagonal")],
        )
    )
    return Section("thresholds", "Thresholds", f'<div class="charts">{by_threshold}{roc}</div>')


def metrics(found: Evaluation, k: int, rows: str) -> Section:
    """Everything that ``dswml evaluate`` tells."""
    sets, rankings = set_table(found), ranking_table(found, k)
    content = (
        f"<p>On {escape(rows)}. Predicted: {escape(found.rule)}. Figures in per cent.</p>"
        f'<div class="tables">{table("Predicted labels", *sets)}{table("Rankings", *rankings)}</div>'
        + facts(
            "Other figures",
            summary(found, "the model does not know how many rows it was trained on have each label"),
        )
    )
    return Section("metrics", "Metrics", content)


def _spread(size: int, most: int) -> Array:
    """Return at most so many places of a sequence, evenly, with both its ends."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(np.int64))


def _floats(values: Any) -> Array:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def or_nothing(value: float | None, form: str = ".4g") -> str:
    """Write a number, and nothing for none."""
    return "" if value is None else format(value, form)


def _plus_minus(point: Mapping[str, Any]) -> str:
    return f"{or_nothing(point['mean'], '#.4g')} ± {or_nothing(point['standard_error'], '#.2g')}"


def _passes(number: int) -> str:
    return counted(number, "pass", "passes")


def _words(score: str) -> str:
    return score.replace("_", " ").replace("f1", "F1").replace("auc", "AUC")
