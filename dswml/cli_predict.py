"""The verbs that use a model: ``predict`` and ``evaluate``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dswml.cli import block_bytes_option, verb_options
from dswml.cluster import ClusterOptions, cluster_options, executor_from_options
from dswml.errors import StoppedEarlyError, UsageError
from dswml.evaluation_tables import Table, ranking_table, set_table, summary
from dswml.progress import OnProgress, format_seconds, is_silent, show_progress
from dswml.stopping import stoppable

if TYPE_CHECKING:
    from dswml.executor import Executor
    from dswml.prediction import Prediction

__all__ = ["evaluate", "predict", "working"]


@contextmanager
def working(
    cluster: ClusterOptions, silent: bool, **stores: Any
) -> Iterator[tuple[Executor, OnProgress | None]]:
    """Yield who does the work and whom to tell about it."""

    def announce(line: str) -> None:
        if not silent:
            click.echo(line, err=True)

    with (
        executor_from_options(cluster, announce=announce, **stores) as executor,
        show_progress(quiet=silent) as on_progress,
    ):
        yield executor, on_progress


_top_k = click.option(
    "--top-k", type=click.IntRange(min=1), metavar="K", help="Predict the K best labels of every row."
)
_threshold = click.option(
    "--threshold", type=float, metavar="T", help="Predict the labels with a score of at least T."
)


@click.command()
@click.argument("model")
@click.argument("store")
@click.argument("out")
@_top_k
@_threshold
@click.option(
    "--scores", is_flag=True, help="In a Zarr store: the scores instead of ones; text always has them."
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["zarr", "csv", "jsonl", "xmlrepo"]),
    default="zarr",
    show_default=True,
    help="zarr: a sparse matrix; csv: row,label,score; jsonl: an object a row; xmlrepo: label:score.",
)
@click.option("--resume", is_flag=True, help="Go on with a prediction that was interrupted, if there is one.")
@click.option("--overwrite", is_flag=True, help="Replace what is at OUT.")
@block_bytes_option
@cluster_options
@verb_options
def predict(
    model: str,
    store: str,
    out: str,
    top_k: int | None,
    threshold: float | None,
    scores: bool,
    format_: str,
    resume: bool,
    overwrite: bool,
    block_bytes: int,
    cluster: ClusterOptions,
    storage_options: dict[str, Any],
    as_json: bool,
    quiet: bool,
) -> None:
    """Predict the labels of the data set STORE and write them to OUT.

    MODEL, STORE and OUT are paths or URLs. Without --top-k and --threshold the labels are chosen as the model
    says. Rows are numbered from 0, and csv and jsonl have the best label first.
    """
    if top_k is not None and threshold is not None:
        raise UsageError("--top-k and --threshold exclude each other: give one of them")
    there = {"reads": [store], "writes": [out], "storage_options": storage_options}
    try:
        with (
            working(cluster, is_silent(quiet, as_json), **there) as (executor, on_progress),
            stoppable(lambda line: click.echo(line, err=True)) as asked,
        ):
            from dswml.prediction import predict_dataset

            def report(phase: str, done: int, total: int) -> None:
                if asked():
                    raise KeyboardInterrupt
                if on_progress is not None:
                    on_progress(phase, done, total)

            done = predict_dataset(
                model,
                store,
                out,
                top_k=top_k,
                threshold=threshold,
                scores=scores,
                format=format_,
                resume=resume,
                overwrite=overwrite,
                block_bytes=block_bytes,
                executor=executor,
                on_progress=report,
                storage_options=storage_options,
            )
    except KeyboardInterrupt:
        raise StoppedEarlyError(
            f"the prediction to {out} was interrupted: go on with the same command and --resume"
        ) from None
    click.echo(json.dumps(asdict(done)) if as_json else _prediction_line(done))
    if done.n_predicted == 0:
        click.echo("Warning: no label was predicted: lower --threshold, or use --top-k", err=True)


def _prediction_line(done: Prediction) -> str:
    if done.n_predicted is None:
        return f"{done.url} is there already"
    found, share = f"{done.n_predicted:,} labels ({done.rule})", f"{done.n_predicted / done.n_rows:.3g} a row"
    if done.n_rows_before == done.n_rows:
        return f"{done.url} is there: all {done.n_rows:,} rows had been predicted before, {found}, {share}"
    before = f" ({done.n_rows_before:,} of them before)" if done.n_rows_before else ""
    return (
        f"Predicted {found} of {done.n_rows:,} rows{before}, {share}, in {format_seconds(done.seconds)}: "
        f"{done.url}"
    )


@click.command()
@click.argument("model")
@click.argument("store")
@click.option("--k", type=click.IntRange(min=1), default=5, show_default=True, help="Length of the rankings.")
@_top_k
@_threshold
@click.option(
    "--propensity-from",
    metavar="STORE",
    help="The training data, for PSP and PSnDCG; without it the label counts in the model.",
)
@click.option(
    "--propensity",
    type=float,
    nargs=2,
    metavar="A B",
    default=(0.55, 1.5),
    show_default=True,
    help="Parameters of the propensities: 0.5 0.4 for Wikipedia, 0.6 2.6 for Amazon.",
)
@click.option("--exact", is_flag=True, help="Read twice, for the AUC and the best threshold without error.")
@block_bytes_option
@cluster_options
@verb_options
def evaluate(
    model: str,
    store: str,
    k: int,
    top_k: int | None,
    threshold: float | None,
    propensity_from: str | None,
    propensity: tuple[float, float],
    exact: bool,
    block_bytes: int,
    cluster: ClusterOptions,
    storage_options: dict[str, Any],
    as_json: bool,
    quiet: bool,
) -> None:
    """Tell how good a model is on the data set STORE.

    MODEL and STORE are paths or URLs. Without --top-k and --threshold the labels are chosen as the model
    says. Equal scores are ranked by label.
    """
    if top_k is not None and threshold is not None:
        raise UsageError("--top-k and --threshold exclude each other: give one of them")
    there = {"reads": [store], "storage_options": storage_options}
    with working(cluster, is_silent(quiet, as_json), **there) as (executor, on_progress):
        from dswml.evaluation import evaluate as measure

        found = measure(
            model,
            store,
            k=k,
            top_k=top_k,
            threshold=threshold,
            propensity_from=propensity_from,
            propensity=propensity,
            exact=exact,
            block_bytes=block_bytes,
            executor=executor,
            on_progress=on_progress,
            storage_options=storage_options,
        )
    if as_json:
        click.echo(json.dumps({"model": model, "store": store, **found.as_dict()}))
        return
    click.echo(
        f"{store}: {found.n_rows:,} rows, {found.n_labels:,} labels; predicted: {found.rule}; figures in %"
    )
    for table in (set_table(found), ranking_table(found, k)):
        _show_table(table)
    others = summary(found, "name the training data with --propensity-from")
    click.echo("\n" + "\n".join(f"{name:<22}{value}" for name, value in others))


def _show_table(table: Table) -> None:
    """Show a table with frames on a terminal, in plain columns elsewhere."""
    header, lines = table
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table as Framed

        framed = Framed()
        for number, title in enumerate(header):
            framed.add_column(title, justify="right" if number else "left")
        for line in lines:
            framed.add_row(*line)
        Console().print(framed)
        return
    click.echo()
    for name, *cells in (header, *lines):
        click.echo(f"{name:<10}" + "".join(f"{cell:>11}" for cell in cells))
