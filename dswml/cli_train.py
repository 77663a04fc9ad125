"""The verb ``train``: fit a model to a data set, with progress, and write it to a store."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dswml.cli import block_bytes_option, verb_options
from dswml.cli_checkpoint import checkpoint_options, checkpoints_of, saying_how_to_resume
from dswml.cluster import ClusterOptions, cluster_options, executor_from_options
from dswml.errors import DswmlError
from dswml.progress import format_seconds, is_silent, note
from dswml.stopping import stoppable

if TYPE_CHECKING:
    from dswml.frank_wolfe import Record, Solution
    from dswml.model import Model

__all__ = ["train"]


class _Weights(click.ParamType[Any]):
    name = "sparsity|uniform|P0"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("sparsity", "uniform"):
            return value
        try:
            return float(value)
        except ValueError:
            self.fail(f"{value!r} is neither 'sparsity' nor 'uniform' nor a number", param, ctx)


@click.command()
@click.argument("store")
@click.option("--model", "output", metavar="OUT", required=True, help="Where the model is written.")
@click.option(
    "--radius", type=float, default=100.0, show_default=True, help="Radius of the nuclear-norm ball."
)
@click.option(
    "--weights", type=_Weights(), default="sparsity", show_default=True, help="Weight p0 of inactive labels."
)
@click.option(
    "--step",
    type=click.Choice(["corrective", "line-search", "open-loop"]),
    default="corrective",
    show_default=True,
)
@click.option("--loss", type=click.Choice(["square", "exponential"]), default="square", show_default=True)
@click.option(
    "--block-size", type=click.IntRange(min=1), help="Directions per iteration; adapted without it."
)
@click.option(
    "--tol", type=float, default=1e-3, show_default=True, help="Certified relative duality gap to reach."
)
@click.option("--max-iter", type=click.IntRange(min=0), default=1000, show_default=True)
@click.option("--max-passes", type=click.IntRange(min=1), help="Most reads of X.")
@click.option(
    "--time-limit",
    type=float,
    metavar="SECONDS",
    help="Begin no iteration (with --checkpoint: no read) after this time.",
)
@click.option(
    "--fit-intercept", type=float, metavar="VALUE", help="Append a constant column of this value to X."
)
@click.option("--normalize", type=click.Choice(["l2"]), help="Scale the rows of X to unit norm.")
@click.option("--threshold", type=float, help="Scores from here on predict a label; 1/2 without it.")
@click.option("--seed", type=click.IntRange(min=0, max=2**32 - 1), default=0, show_default=True)
@click.option("--dtype", type=click.Choice(["auto", "float32", "float64"]), default="auto", show_default=True)
@click.option("--cache", type=click.Choice(["auto", "memory", "none"]), default="auto", show_default=True)
@block_bytes_option
@click.option(
    "--factor-memory",
    metavar="BYTES",
    default="2 GiB",
    show_default=True,
    help="Memory for factors and statistics; decides how many directions are kept.",
)
@click.option("--overwrite", is_flag=True, help="Replace the model and the checkpoints that are there.")
@checkpoint_options
@cluster_options
@verb_options
def train(
    store: str,
    output: str,
    seed: int,
    block_size: int | None,
    fit_intercept: float | None,
    block_bytes: int,
    factor_memory: str,
    overwrite: bool,
    checkpoint: str | None,
    checkpoint_every: str,
    resume: bool,
    cluster: ClusterOptions,
    storage_options: dict[str, Any],
    as_json: bool,
    quiet: bool,
    **parameters: Any,
) -> None:
    """Train a model on the data set STORE.

    STORE, OUT and DIR are paths or URLs. Stopped by Ctrl-C, SIGTERM or the time limit, the iteration under
    way is finished and the model so far is written; with --checkpoint, only the read under way is
    finished, a checkpoint is written, and the exit code is 5.
    """
    from dswml.dataset import open_dataset
    from dswml.estimator import SparseWeightedClassifier
    from dswml.model_file import check_place
    from dswml.training import train as fit

    estimator = SparseWeightedClassifier(
        **parameters,
        block_size=block_size or "auto",
        fit_intercept=fit_intercept or False,
        random_state=seed,
        memory_limit=factor_memory,
    )
    checked = estimator.checked_parameters()
    check_place(output, overwrite=overwrite, storage_options=storage_options)
    silent = is_silent(quiet, as_json)

    def announce(line: str) -> None:
        if not silent:
            click.echo(line, err=True)

    def say(line: str) -> None:
        click.echo(line, err=True)

    place = checkpoints_of(checkpoint, checkpoint_every, resume, overwrite, storage_options)
    data = open_dataset(store, block_bytes=block_bytes, storage_options=storage_options)
    progress = _Progress(checked.options.tol, silent)
    with (
        saying_how_to_resume(place),
        executor_from_options(
            cluster, announce=announce, reads=[store], storage_options=storage_options
        ) as executor,
        stoppable(say) as asked,
    ):
        model, solution = fit(
            data,
            checked,
            executor,
            callbacks=[progress.record, *([] if place else [lambda record: asked()])],
            on_sweep=progress.sweep,
            checkpoint=place,
            stop=asked,
            announce=announce,
        )
    progress.close()
    model.save(output, overwrite=overwrite, storage_options=storage_options)
    if as_json:
        click.echo(json.dumps(describe_fit(model, solution)))
    else:
        click.echo("\n".join(_lines(model, solution, output)))
    if solution.status == "INTERRUPTED":
        raise DswmlError(
            f"training was interrupted after {solution.passes} passes: {output} holds the model so far"
        )


def describe_fit(model: Model, solution: Solution) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    certificate = solution.certificate
    last = solution.history[-1]
    return {
        "objective": solution.objective,
        "gap_estimate": solution.gap_estimate,
        "gap_certified": None if certificate is None else certificate.gap,
        "relative_gap": last.relative_gap,
        "certificate": None if certificate is None else asdict(certificate),
        "passes": solution.passes,
        "iterations": solution.iterations,
        "rank": model.rank,
        "radius": model.info["parameters"]["radius"],
        "p0": model.p0,
        "status": solution.status,
        "seconds": solution.seconds,
        "history": [asdict(record) for record in solution.history],
    }


def _lines(model: Model, solution: Solution, output: str) -> list[str]:
    last, certificate = solution.history[-1], solution.certificate
    known = "an estimate, not certified" if certificate is None else str(certificate)
    return [
        f"{solution.status}: objective {solution.objective:.6g}, gap {last.relative_gap:.2e} of it ({known})",
        f"  {solution.iterations} iterations, {solution.passes} passes over X, rank {model.rank}, "
        f"p0 {model.p0:.4g}, {format_seconds(solution.seconds)}",
        f"The model is in {output}",
    ]


class _Progress:
    """A line for every iteration and, on a terminal, how far the current read of the data has come."""

    def __init__(self, tol: float, silent: bool) -> None:
        self.tol, self.silent = tol, silent
        self.terminal = sys.stderr.isatty() and not silent
        self.before: Record | None = None

    def record(self, record: Record) -> None:
        note(
            iteration=record.iteration,
            passes=record.passes,
            objective=record.objective,
            relative_gap=record.relative_gap,
        )
        if self.silent:
            return
        kind = "" if record.certified else " (estimate)"
        left = self._seconds_left(record)
        self._clear()
        click.echo(
            f"iteration {record.iteration:3d}  passes {record.passes:3d}  objective {record.objective:.6g}  "
            f"gap {record.relative_gap:.2e}{kind}  rank {record.rank}  {format_seconds(record.seconds)}"
            + ("" if left is None else f", about {format_seconds(left)} left"),
            err=True,
        )
        self.before = record

    def sweep(self, share: float) -> None:
        if self.terminal:
            click.echo(f"\r  reading {100 * share:3.0f} %", err=True, nl=False)

    def close(self) -> None:
        self._clear()

    def _clear(self) -> None:
        if self.terminal:
            click.echo("\r" + " " * 20 + "\r", err=True, nl=False)

    def _seconds_left(self, record: Record) -> float | None:
        """Continue the decline of the gap's logarithm since the last iteration."""
        before = self.before
        if before is None or not self.tol < record.relative_gap < before.relative_gap:
            return None
        decline = math.log(before.relative_gap / record.relative_gap) / max(
            record.seconds - before.seconds, 1e-9
        )
        return math.log(record.relative_gap / self.tol) / decline if self.tol > 0 else None
