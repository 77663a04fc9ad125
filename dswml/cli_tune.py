"""The verb ``tune``: choose radius, weights and rule by cross-validation, and fit the choice on all rows."""

from __future__ import annotations

import json
import math
import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from dswml.cli import block_bytes_option, number_of_bytes, verb_options
from dswml.cli_checkpoint import checkpoint_options, checkpoints_of, saying_how_to_resume
from dswml.cluster import ClusterOptions, cluster_options, executor_from_options
from dswml.errors import UsageError
from dswml.progress import is_silent, note
from dswml.stopping import stoppable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dswml.tuning import GridPoint, Tuned

__all__ = ["tune"]

#: The radii of the paper's experiments.
RADII = "0.1,0.5,1,10,20,40,60,80,100,120,140,160,180,200"


def _numbers(text: str, what: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{what} must be numbers separated by commas; got {text!r}") from None
    if any(not 0 < number < float("inf") for number in numbers):
        raise UsageError(f"{what} must be positive and finite; got {text!r}")
    return sorted(set(numbers))


def _weights(text: str) -> list[str | float]:
    found: list[str | float] = []
    for part in text.split(","):
        found.append(part if part in ("sparsity", "uniform") else _numbers(part, "--weights")[0])
    return found


def _threshold(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


@click.command()
@click.argument("store")
@click.option("--radii", default=RADII, show_default=True, help="Radii to try, separated by commas.")
@click.option(
    "--weights",
    default="sparsity,uniform",
    show_default=True,
    help="Weightings to try: names or p0, by commas.",
)
@click.option("--folds", type=click.IntRange(min=0), default=5, show_default=True, help="0: the path alone.")
@click.option("--stratify", is_flag=True, help="Give every fold about the same share of every label.")
@click.option(
    "--score",
    default="micro_f1",
    show_default=True,
    help="The metric that chooses: macro_f1, hamming_loss, P@3, ...; another word lists them all.",
)
@click.option("--rule", type=click.Choice(["best", "one-standard-error"]), default="best", show_default=True)
@click.option(
    "--threshold",
    metavar="T|tuned|per-label|rcut",
    default="0.5",
    show_default=True,
    help="At which labels are predicted; or tune one threshold, one a label, or the number of best labels.",
)
@click.option("--model", "output", metavar="OUT", help="Fit the choice on all rows and write the model here.")
@click.option(
    "--tol",
    type=float,
    default=1e-3,
    show_default=True,
    help="Relative gap of every point: estimated where features x labels are more than four million.",
)
@click.option("--seed", type=click.IntRange(min=0, max=2**32 - 1), default=0, show_default=True)
@click.option(
    "--fit-intercept", type=float, metavar="VALUE", help="Append a constant column of this value to X."
)
@click.option("--normalize", type=click.Choice(["l2"]), help="Scale the rows of X to unit norm.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "float64"]), default="auto", show_default=True)
@block_bytes_option
@click.option(
    "--factor-memory",
    metavar="BYTES",
    default="2 GiB",
    show_default=True,
    callback=number_of_bytes,
    help="Memory for factors and statistics of all folds and weights; decides how many directions are kept.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="With --checkpoint: begin no read after this time.",
)
@click.option("--overwrite", is_flag=True, help="Replace the model and the checkpoints that are there.")
@checkpoint_options
@cluster_options
@verb_options
def tune(
    store: str,
    radii: str,
    weights: str,
    folds: int,
    stratify: bool,
    score: str,
    rule: str,
    threshold: str,
    output: str | None,
    tol: float,
    seed: int,
    fit_intercept: float | None,
    normalize: str | None,
    dtype: str,
    block_bytes: int,
    factor_memory: int,
    time_limit: float | None,
    overwrite: bool,
    checkpoint: str | None,
    checkpoint_every: str,
    resume: bool,
    cluster: ClusterOptions,
    storage_options: dict[str, Any],
    as_json: bool,
    quiet: bool,
) -> None:
    """Cross-validate a grid of radii and weights on the data set STORE.

    All folds and points share each read of the data. The choice is fitted on all rows, if --model says
    where to write it, and predicts with the threshold as given or tuned. What is tuned is so for the score,
    or for micro-F1 where that does not depend on it, and is scored on each fold with what is best on the
    others. With --checkpoint, Ctrl-C, SIGTERM and --time-limit finish the read under way and write a
    checkpoint, and the exit code is 5.
    """
    from dswml import tuning
    from dswml.dataset import open_dataset
    from dswml.estimator import SparseWeightedClassifier
    from dswml.model_file import check_place
    from dswml.search_record import searched
    from dswml.training import train

    chosen_radii, chosen_weights = _numbers(radii, "--radii"), _weights(weights)
    if output is not None and folds == 0:
        raise UsageError("--model needs a choice, and --folds 0 makes none: use two folds or more")
    if output is not None:
        check_place(output, overwrite=overwrite, storage_options=storage_options)
    silent, started = is_silent(quiet, as_json), time.monotonic()

    def say(line: str) -> None:
        if not silent:
            click.echo(line, err=True)

    def tell(iteration: int, passes: int, solved: int, total: int) -> None:
        note(iteration=iteration, passes=passes, solved=solved, total=total)
        say(f"iteration {iteration:3d}  passes {passes:3d}  solved {solved} of {total}")

    single = partial(
        SparseWeightedClassifier,
        tol=tol,
        fit_intercept=fit_intercept or False,
        normalize=normalize,
        dtype=dtype,
        random_state=seed,
        memory_limit=factor_memory,
    )
    single().checked_parameters()
    place = checkpoints_of(checkpoint, checkpoint_every, resume, overwrite, storage_options)
    data = open_dataset(store, block_bytes=block_bytes, storage_options=storage_options)
    with (
        saying_how_to_resume(place),
        executor_from_options(
            cluster, announce=say, reads=[store], storage_options=storage_options
        ) as executor,
        nullcontext() if place is None else stoppable(lambda line: click.echo(line, err=True)) as asked,
    ):
        tuned = tuning.tune(
            data,
            executor,
            radii=chosen_radii,
            weights=chosen_weights,
            folds=folds,
            seed=seed,
            stratify=stratify,
            score=score,
            threshold=_threshold(threshold),
            tol=tol,
            fit_intercept=fit_intercept or 0.0,
            normalize=normalize,
            dtype=dtype,
            memory_limit=factor_memory,
            on_iteration=tell,
            checkpoint=place,
            time_limit=time_limit,
            stop=asked,
            announce=say,
        )
        chosen = None
        if folds:
            chosen = tuned.best if rule == "best" else tuned.one_standard_error
        if output is not None and chosen is not None:
            left = None if time_limit is None else max(started + time_limit - time.monotonic(), 1e-3)
            model, _ = train(
                data,
                single(chosen.radius, weights=chosen.weights, time_limit=left).checked_parameters(),
                executor,
                checkpoint=None if place is None else place.within(f"model-{chosen.radius}-{chosen.weights}"),
                stop=asked,
            )
            searched(model, tuned, chosen).save(output, overwrite=overwrite, storage_options=storage_options)
    if as_json:
        click.echo(json.dumps(_described(tuned, chosen)))
        return
    click.echo("\n".join(_table(tuned, chosen)))
    if output is not None:
        click.echo(f"The model is in {output}")


def _described(tuned: Tuned, chosen: GridPoint | None) -> dict[str, Any]:
    def known(values: NDArray[Any]) -> list[float | None]:
        """JSON has no NaN and no infinity."""
        return [value if math.isfinite(value) else None for value in values.tolist()]

    def point(each: GridPoint) -> dict[str, Any]:
        return {
            "radius": each.radius,
            "weights": each.weights,
            "p0": each.p0,
            "objective": known(each.objective),
            "relative_gap": known(each.relative_gap),
            "certified": each.certified,
            "rank": each.rank.tolist(),
            "scores": {name: known(values) for name, values in each.scores.items()},
            "rule": None if each.rule is None else str(each.rule),
            "threshold": None if each.threshold != each.threshold else each.threshold,
        }

    return {
        "score": tuned.score,
        "threshold": tuned.threshold,
        "passes": tuned.passes,
        "iterations": tuned.iterations,
        "points": [point(each) for each in tuned.points],
        "chosen": None if chosen is None else point(chosen),
        "one_standard_error": None if chosen is None else point(tuned.one_standard_error),
        "rule": None if chosen is None or chosen.rule is None else chosen.rule.as_dict(),
    }


def _table(tuned: Tuned, chosen: GridPoint | None) -> list[str]:
    gap = "gap" if tuned.certified else "est. gap"
    lines = [f"{'radius':>8}  {'weights':<9} {'p0':>7}  {gap:>8}  {'rank':>5}"]
    if chosen is not None:
        title = f"{tuned.score} (+- s.e.)"
        width = max(len(title), 20)
        lines[0] += f"  {title:>{width}}  {'best F1':>8}  {'at':>6}  {'P@1':>6}  predicted"
    for point in tuned.points:
        line = (
            f"{point.radius:8g}  {point.weights!s:<9} {point.p0:7.4f}  {point.relative_gap.max():8.1e}  "
            f"{point.rank.mean():5.0f}"
        )
        if chosen is not None:
            mean = f"{point.mean(tuned.score):#.4g} +- {point.standard_error(tuned.score):#.2g}"
            remarks = {"chosen": chosen, "best": tuned.best, "one standard error": tuned.one_standard_error}
            remark = ", ".join(name for name, each in remarks.items() if each is point)
            line += f"  {mean:>{width}}  {point.mean('best_f1'):8.4f}  {point.threshold:6.3f}"
            line += f"  {point.mean('P@1'):6.4f}  {point.rule}" + (f"  <- {remark}" if remark else "")
        lines.append(line)
    lines.append(f"{tuned.passes} passes over X, {tuned.iterations} iterations")
    if not tuned.certified:
        lines.append("The gaps are estimated, not certified: the gradients are too large to be assembled.")
    return lines
