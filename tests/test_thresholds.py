"""Rules tuned on held-out folds: against brute force, without a look at the rows that are scored."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from metric_cases import TIED, bounded, csr, problems
from sklearn.metrics import f1_score, hamming_loss, precision_score, recall_score

from dswml import grid_scores, rules, tuning
from dswml.checkpoints import Checkpoints
from dswml.cli import cli
from dswml.dataset import create_dataset
from dswml.errors import UsageError
from dswml.estimator import SparseWeightedClassifier
from dswml.estimator_cv import SparseWeightedClassifierCV
from dswml.executor import InProcessExecutor
from dswml.folds import fold_of_rows
from dswml.metrics import label_block, labels_of_top_k, select_at_threshold, top_k
from dswml.model import load_model
from dswml.report import write_report
from dswml.rules import Candidates, plan_candidates
from dswml.scoring import Rule
from dswml.search_plan import RESULTS_SHARE
from dswml.search_table import Tuned
from dswml.sources import as_dataset
from dswml.tuning import tune

Array = Any
FOLDS, SEED, L = 3, 7, 12
THRESHOLDS = np.arange(-16, 81) / 64
#: A ball that does not bind: with uniform weights every fold is least squares, to the last bits.
FREE = 1e4


def problem(labels: int = L) -> tuple[Array, Array]:
    """Rows without labels, and a label that is active in one fold alone."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(240, 15)) / np.sqrt(15)
    scores = X @ rng.normal(size=(15, 4)) @ rng.normal(size=(4, labels)) + rng.normal(size=(240, labels))
    Y = (scores > np.quantile(scores, np.linspace(0.7, 0.95, labels), axis=0).diagonal()).astype(np.uint8)
    Y[:20] = 0
    Y[:, 0] *= fold_of_rows(0, 240, FOLDS, SEED) == 0
    return X, Y


X, Y = problem()


def search(X: Array = X, Y: Array = Y, **options: Any) -> Tuned:
    grid: dict[str, Any] = {"radii": (FREE,), "weights": ("uniform",), "folds": FOLDS, "seed": SEED}
    with InProcessExecutor(2) as executor:
        return tune(as_dataset(X, Y, block_bytes=4096), executor, **(grid | options))


def held_out(X: Array = X, Y: Array = Y) -> list[tuple[Array, Array]]:
    """True labels and scores of the held-out rows of every fold."""
    folds = fold_of_rows(0, len(X), FOLDS, SEED)
    found = []
    for fold in range(FOLDS):
        W = np.linalg.lstsq(X[folds != fold], Y[folds != fold].astype(float), rcond=None)[0]
        found.append((Y[folds == fold], X[folds == fold] @ W))
    return found


def predict(scores: Array, rule: tuple[str, Any]) -> Array:
    kind, value = rule
    if kind == "threshold":
        return (scores >= value).astype(np.uint8)
    out = np.zeros(scores.shape, dtype=np.uint8)
    np.put_along_axis(out, np.argsort(-scores, axis=1, kind="stable")[:, :value], 1, axis=1)
    return out


def measured(name: str, truth: Array, predicted: Array) -> float:
    if name == "hamming_loss":
        return -float(hamming_loss(truth, predicted))
    if name == "weighted_hamming_loss":
        return -float(0.5 * (truth != predicted).sum() / len(truth))
    if name == "coverage":
        return float((truth & predicted).any(axis=0).sum() / truth.any(axis=0).sum())
    average, _, kind = name.partition("_")
    score = {"f1": f1_score, "precision": precision_score, "recall": recall_score}[kind]
    return float(score(truth, predicted, average=average, zero_division=0))


def pooled(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    return np.vstack([truth for truth, _ in parts]), np.vstack([scores for _, scores in parts])


def scanned(name: str, parts: list[tuple[Array, Array]], candidates: list[tuple[str, Any]]) -> Any:
    """The best candidate; of equals the last."""
    truth, scores = pooled(parts)
    values = [measured(name, truth, predict(scores, rule)) for rule in candidates]
    return candidates[len(values) - 1 - int(np.argmax(values[::-1]))]


ALL = {
    "tuned": [("threshold", value) for value in THRESHOLDS],
    "rcut": [("top_k", k) for k in range(int(Y.sum(axis=1).max()), 0, -1)],
}


@pytest.mark.parametrize("kind", ["tuned", "rcut"])
@pytest.mark.parametrize(
    "score",
    ["micro_f1", "macro_f1", "samples_f1", "hamming_loss", "weighted_hamming_loss", "coverage"]
    + ["micro_recall", "macro_precision", "samples_recall", "samples_precision"],
)
def test_a_fold_is_scored_with_the_rule_that_is_best_on_the_others(kind: str, score: str) -> None:
    (point,) = search(score=score, threshold=kind).points
    parts = held_out()
    for fold, (truth, scores) in enumerate(parts):
        rule = scanned(score, parts[:fold] + parts[fold + 1 :], ALL[kind])
        expected = abs(measured(score, truth, predict(scores, rule)))
        assert point.scores[score][fold] == pytest.approx(expected, rel=1e-12)
    name, value = scanned(score, parts, ALL[kind])
    assert point.rule is not None
    assert getattr(point.rule, name) == value


def label_counts(truth: Array, scores: Array) -> tuple[Array, Array]:
    """True positives and predictions of every label at all thresholds and at inf."""
    predicted = scores[:, :, None] >= np.append(THRESHOLDS, np.inf)
    return (predicted & (truth[:, :, None] == 1)).sum(axis=0), predicted.sum(axis=0)


def best_for_each_label(score: str, parts: list[tuple[Array, Array]]) -> Array:
    truth, scores = pooled(parts)
    tp, predicted = label_counts(truth, scores)
    active = truth.sum(axis=0)
    if score == "macro_f1":
        f1 = 2 * tp / np.maximum(predicted + active[:, None], 1)
        place = f1.shape[1] - 1 - np.argmax(f1[:, ::-1], axis=1)
    else:  # every combination of the thresholds of three labels
        (a, b, c), (i, j, k) = tp, predicted
        hits = a[:, None, None] + b[:, None] + c
        f1 = 2 * hits / np.maximum(i[:, None, None] + j[:, None] + k + active.sum(), 1)
        place = np.array(np.unravel_index(f1.size - 1 - np.argmax(f1.ravel()[::-1]), f1.shape))
    return np.where(active > 0, np.append(THRESHOLDS, np.inf)[place], np.inf)


@pytest.mark.parametrize(("score", "labels"), [("macro_f1", L), ("micro_f1", 3)])
def test_thresholds_label_by_label_are_the_best_on_the_others(score: str, labels: int) -> None:
    X, Y = problem(labels)
    (point,) = search(X, Y, score=score, threshold="per-label").points
    parts = held_out(X, Y)
    for fold, (truth, scores) in enumerate(parts):
        thresholds = best_for_each_label(score, parts[:fold] + parts[fold + 1 :])
        predicted = predict(scores, ("threshold", thresholds))
        for name in (score, "micro_recall", "macro_precision", "coverage"):
            assert point.scores[name][fold] == pytest.approx(measured(name, truth, predicted), rel=1e-12)
    assert point.rule is not None
    np.testing.assert_array_equal(point.rule.threshold, best_for_each_label(score, parts))
    assert not any(name.startswith("samples") for name in point.scores)


def test_points_that_the_ball_binds_are_scored_as_separate_fits_are() -> None:
    folds, Y = fold_of_rows(0, len(X), FOLDS, SEED), problem()[1][:, 1:]
    (point,) = search(X, Y, radii=(6.0,), weights=(0.2,), threshold="tuned", tol=1e-8).points
    parts = []
    for fold in range(FOLDS):
        single = SparseWeightedClassifier(6.0, weights=0.2, tol=1e-8).fit(X[folds != fold], Y[folds != fold])
        parts.append((Y[folds == fold], single.decision_function(X[folds == fold])))
    for fold, (truth, scores) in enumerate(parts):
        rule = scanned("micro_f1", parts[:fold] + parts[fold + 1 :], ALL["tuned"])
        expected = measured("micro_f1", truth, predict(scores, rule))
        assert point.scores["micro_f1"][fold] == pytest.approx(expected, abs=0.01)


def test_a_loss_is_minimised() -> None:
    radii = (0.01, 2.0, 8.0, FREE)
    tuned = search(radii=radii, weights=(0.2,), score="hamming_loss", threshold="tuned", tol=1e-2)
    means = [point.mean("hamming_loss") for point in tuned.points]
    assert len(set(means)) > 1
    assert tuned.best.mean("hamming_loss") == min(means)
    frugal = tuned.one_standard_error
    bound = min(means) + tuned.best.standard_error("hamming_loss")
    assert frugal.mean("hamming_loss") <= bound
    assert frugal.radius == min(p.radius for p in tuned.points if p.mean("hamming_loss") <= bound)


def test_a_score_that_is_unknown_is_never_the_best() -> None:
    tuned = search(radii=(2.0, 8.0), score="micro_auc")
    lost = replace(tuned.points[0], scores={"micro_auc": np.full(FOLDS, np.nan)})
    assert replace(tuned, points=(lost, tuned.points[1])).best is tuned.points[1]


def test_propensities_are_of_the_training_rows_and_the_rule_is_for_micro_f1() -> None:
    (point,) = search(score="PSP@7", threshold="tuned").points
    folds = fold_of_rows(0, len(X), FOLDS, SEED)
    for fold, (truth, scores) in enumerate(held_out()):
        rows = Y[folds != fold]
        c = (math.log(len(rows)) - 1) * 2.5**0.55
        inverse = 1 + c * (rows.sum(axis=0) + 1.5) ** -0.55
        order = np.argsort(-scores, axis=1, kind="stable")[:, :7]
        gain = (np.take_along_axis(truth, order, axis=1) * inverse[order]).sum()
        ideal = np.sort(truth * inverse, axis=1)[:, -7:].sum()
        assert point.scores["PSP@7"][fold] == pytest.approx(gain / ideal, rel=1e-12)
    assert point.rule == Rule(scanned("micro_f1", held_out(), ALL["tuned"])[1])


class Measuring(InProcessExecutor):
    """Writes down the size of what the reads of held-out rows return."""

    def __init__(self) -> None:
        super().__init__(2)
        self.sizes: list[int] = []

    def reduce(self, function: Any, *arguments: Any, **options: Any) -> Any:
        found = super().reduce(function, *arguments, **options)
        if function is grid_scores._score_block:
            self.sizes.append(sum(value.nbytes for value in found.values()))
        return found


def numbers(tuned: Tuned) -> list[Any]:
    return [
        (point.rule and point.rule.as_dict(), {name: each.tobytes() for name, each in point.scores.items()})
        for point in tuned.points
    ]


@pytest.mark.parametrize(
    ("threshold", "score"), [("tuned", "macro_f1"), ("per-label", "micro_f1"), (0.5, "P@1")]
)
def test_points_without_room_for_all_are_scored_in_groups_with_the_same_bits(
    threshold: Any, score: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 4 * 2**20
    options: dict[str, Any] = {"threshold": threshold, "score": score, "memory_limit": limit}
    options |= {"radii": (2.0, 4.0, 8.0, 16.0), "weights": (0.2, "uniform"), "folds": FOLDS, "tol": 1e-2}
    data = as_dataset(X, Y, block_bytes=4096)
    executor = Measuring()
    with executor:
        groups = tune(data, executor, **options)
        sizes = list(executor.sizes)
        plan = grid_scores.plan_scoring
        monkeypatch.setattr(tuning, "plan_scoring", lambda *a, **b: replace(plan(*a, **b), together=8))
        whole = tune(data, executor, **options)
    assert len(sizes) > 1
    assert max(sizes) <= limit * RESULTS_SHARE
    assert len(executor.sizes) == len(sizes) + 1
    assert groups.passes == whole.passes + len(sizes) - 1
    assert sum(sizes) == pytest.approx(executor.sizes[-1], rel=1e-2)
    assert numbers(groups) == numbers(whole)


def test_a_score_of_all_entries_keeps_no_counts_by_label() -> None:
    executor = Measuring()
    with executor:
        for score in ("micro_f1", "macro_f1"):
            tune(as_dataset(X, Y), executor, radii=(2.0,), weights=(0.2,), score=score, threshold="tuned")
    without, by_label = executor.sizes
    assert by_label - without == 5 * 16 * (L - 1) * (THRESHOLDS.size + 1)


def test_many_labels_have_fewer_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = plan_candidates("per-label", "micro_f1", 1000, 5)
    assert wide.edges.size == THRESHOLDS.size
    some = plan_candidates("per-label", "micro_f1", 1000, 5, room=50 * 16_000)
    assert some.edges.size == 49
    assert some.nbytes == 50 * 16_000 + 40 * 49
    assert set(some.edges) < set(wide.edges)
    assert plan_candidates("tuned", "micro_f1", 1000, 5, room=1).edges.size == THRESHOLDS.size
    assert plan_candidates("rcut", "macro_f1", 1000, 15, room=10 * 16_000).number == 9
    monkeypatch.setattr(rules, "MAX_LABEL_BINS", 30_000)
    assert plan_candidates("tuned", "coverage", 1000, 5).edges.size == 25


@given(problems(), st.booleans())
@bounded
def test_all_candidates_are_counted_as_one_prediction_each_is(
    case: tuple[Array, Array, Array], by_label: bool
) -> None:
    y_true, _, scores = case
    k = scores.shape[1]
    target = "macro_f1" if by_label else "micro_f1"
    ranking = top_k(scores, k)[0]
    for candidates, predictions in (
        (Candidates("tuned", target, k, np.array(TIED)), [select_at_threshold(scores, t) for t in TIED]),
        (
            Candidates("rcut", target, k, np.zeros(0), k),
            [labels_of_top_k(ranking[:, :each], k) for each in range(k, 0, -1)],
        ),
    ):
        found = candidates.at(candidates.count(csr(y_true), scores, ranking))
        for place, predicted in enumerate(predictions):
            for name, value in label_block(csr(y_true), predicted).items():
                own = found[name][place] if found[name].ndim else found[name]
                expected = value.sum(keepdims=True) if value.ndim and not by_label else value
                np.testing.assert_allclose(own, expected, rtol=1e-12)


# The estimator, the command line, checkpoints and the report


def test_the_classifier_predicts_with_what_was_tuned() -> None:
    options: dict[str, Any] = {"weights": (0.2,), "folds": FOLDS, "random_state": 0}
    for threshold in (0.25, "tuned", "per-label", "rcut"):
        clf = SparseWeightedClassifierCV((2.0, 8.0), threshold=threshold, **options).fit(X, Y)
        rule = clf.tuned_.best.rule
        assert rule is not None
        assert clf.model_.rule.as_dict() == rule.as_dict()
        scores = clf.decision_function(X)
        chosen = ("top_k", rule.top_k) if rule.top_k else ("threshold", rule.threshold)
        np.testing.assert_array_equal(clf.predict(X), predict(scores, chosen))
    with pytest.raises(UsageError, match="the threshold is 'best': give a number, or 'tuned'"):
        SparseWeightedClassifierCV((2.0,), threshold="best").fit(X, Y)


def dswml(*arguments: Any) -> str:
    told = CliRunner().invoke(cli, [str(each) for each in arguments], prog_name="dswml")
    assert told.exit_code == 0, told.output
    return told.stdout


@pytest.mark.parametrize("threshold", ["0.25", "tuned", "per-label", "rcut"])
def test_the_model_of_the_command_line_carries_its_rule(threshold: str, tmp_path: Path) -> None:
    store, model = tmp_path / "d.zarr", tmp_path / "m.zarr"
    create_dataset(store, X, Y)
    grid = ["tune", store, "--radii", "2,8", "--weights", "0.2", "--folds", 3, "--threshold", threshold]
    told = json.loads(dswml(*grid, "--model", model, "--json"))
    rule = load_model(model).rule
    assert told["rule"] == rule.as_dict()
    assert told["chosen"]["rule"] == str(rule)
    if threshold == "0.25":
        assert rule == Rule(0.25)
    elif threshold == "tuned":
        assert rule.threshold in THRESHOLDS
    elif threshold == "per-label":
        assert isinstance(rule.threshold, np.ndarray)
        assert len(set(rule.threshold)) > 2
    else:
        assert 1 <= (rule.top_k or 0) <= Y.sum(axis=1).max()
    assert str(rule) in dswml(*grid)
    assert json.loads(dswml("evaluate", model, store, "--json"))["rule"] == str(rule)
    assert str(rule) in dswml("predict", model, store, tmp_path / "p.zarr", "-q")
    write_report(model, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert ("tuned on held-out rows" in page) == (threshold != "0.25")
    assert (f"tuned for micro F1, {load_model(model).threshold:.3g}" in page) == (threshold == "tuned")


def test_the_report_of_a_loss_has_its_bound_above(tmp_path: Path) -> None:
    clf = SparseWeightedClassifierCV((2.0, 8.0), weights=(0.2,), folds=FOLDS, scoring="hamming_loss")
    write_report(clf.fit(X, Y).model_, tmp_path / "r.html")
    assert "best plus a standard error" in (tmp_path / "r.html").read_text()


def test_another_threshold_or_score_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    grid: dict[str, Any] = {"radii": (2.0, 8.0), "weights": (0.2,), "tol": 1e-2}
    place = Checkpoints(tmp_path / "run", resume=True)
    search(**grid, checkpoint=place)
    for other in ({"threshold": "per-label", "score": "macro_f1"}, {"threshold": "rcut", "score": "P@3"}):
        whole, resumed = search(**grid, **other), search(**grid, **other, checkpoint=place)
        assert numbers(resumed) == numbers(whole)
        assert resumed.iterations == whole.iterations


def test_another_choice_of_a_search_that_goes_on_is_fitted_from_the_start(tmp_path: Path) -> None:
    store = tmp_path / "d.zarr"
    create_dataset(store, X, Y)
    grid = ["tune", store, "--radii", "0.01,8", "--weights", "0.2", "--folds", 2, "--json"]
    grid += ["--checkpoint", tmp_path / "run", "--resume"]
    for threshold, radius in ((0.5, 8), (100, 0.01)):  # where nothing is predicted, the smaller radius
        told = dswml(*grid, "--threshold", threshold, "--model", tmp_path / f"{threshold}.zarr")
        assert json.loads(told)["chosen"]["radius"] == radius
        assert load_model(tmp_path / f"{threshold}.zarr").info["parameters"]["radius"] == radius


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "P@13"}, "there is no score 'P@13': choose one of micro_precision.*with k from 1 to 12"),
        ({"score": "P@01"}, "there is no score 'P@01'"),
        ({"threshold": "scut"}, "the threshold is 'scut': give a number, or 'tuned', 'per-label' or 'rcut'"),
        ({"threshold": math.nan}, "the threshold is nan: give a finite number"),
        ({"threshold": "per-label", "score": "samples_f1"}, "choose by 'micro_f1' or 'macro_f1'"),
        ({"score": "weighted_hamming_loss", "weights": (0.2, "uniform")}, "cannot be compared by it"),
    ],
)
def test_what_cannot_be_tuned_is_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        search(**options)
