"""The verbs that make and check data sets: ``import``, ``synth``, ``validate``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import click

from dswml.cli import verb_options
from dswml.cli_info import dataset_lines, describe_dataset
from dswml.cli_predict import working
from dswml.cluster import ClusterOptions, cluster_options
from dswml.errors import UsageError
from dswml.progress import format_seconds, reporting

if TYPE_CHECKING:
    from dswml.dataset import Dataset

__all__ = ["import_", "synth", "validate"]


def _show(data: Dataset, as_json: bool, **more: Any) -> None:
    found = describe_dataset(data)
    click.echo(json.dumps({**found, **more}) if as_json else "\n".join(dataset_lines(found)))


@click.command("import")
@click.argument("src")
@click.argument("dest")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["auto", "xmlrepo", "svmlight", "arff", "npz", "npy", "anndata"]),
    default="auto",
    show_default=True,
    help="Format of SRC; auto: found from its content.",
)
@click.option(
    "--labels",
    metavar="FILE",
    help="What says more about the labels: Mulan's XML, label names one a line, or the file with Y; "
    "without it a file beside SRC named after it.",
)
@click.option("--no-labels", is_flag=True, help="The rows have no labels: they are to be predicted alone.")
@click.option("--normalize", type=click.Choice(["l2"]), help="Scale the rows of X to unit norm.")
@click.option(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    show_default=True,
    help="At a malformed line: stop, or leave it out and count it.",
)
@click.option(
    "--zero-based/--one-based",
    default=None,
    help="How svmlight numbers features; without it found from the content.",
)
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32", show_default=True)
@click.option("--resume", is_flag=True, help="Go on with an import that was interrupted.")
@click.option("--overwrite", is_flag=True, help="Replace the store that is there.")
@cluster_options
@verb_options
def import_(
    src: str,
    dest: str,
    format_: str,
    labels: str | None,
    no_labels: bool,
    normalize: Literal["l2"] | None,
    on_error: Literal["raise", "skip"],
    zero_based: bool | None,
    dtype: Literal["float32", "float64"],
    resume: bool,
    overwrite: bool,
    cluster: ClusterOptions,
    storage_options: dict[str, Any],
    as_json: bool,
    quiet: bool,
) -> None:
    """Import a file into a new data set.

    SRC and DEST are paths or URLs. SRC is text in the Extreme Classification Repository's format, multi-label
    svmlight or Mulan's ARFF, plain or packed with gzip, bzip2 or zstd; a pair of .npz or .npy files; or an
    AnnData Zarr store. It is read twice: once to check and count, once to write.
    """
    if no_labels and labels is not None:
        raise UsageError(f"--no-labels and --labels {labels} exclude each other: the rows have labels or not")
    with working(cluster, quiet or as_json) as (executor, on_progress):
        from dswml.importers import import_dataset

        report = import_dataset(
            src,
            dest,
            format=format_,
            labels=False if no_labels else labels,
            normalize=normalize,
            on_error=on_error,
            overwrite=overwrite,
            resume=resume,
            zero_based="auto" if zero_based is None else zero_based,
            dtype=dtype,
            executor=executor,
            on_progress=on_progress,
            storage_options=storage_options,
        )
    from dswml.dataset import open_dataset

    _show(open_dataset(dest, storage_options=storage_options), as_json, **{"import": asdict(report)})
    if as_json:
        return
    click.echo(
        f"Imported {report.source} ({report.format}) in {format_seconds(report.seconds)}; rows without "
        f"a label: {report.rows_without_label:,}, without a feature: {report.rows_without_feature:,}"
    )
    if report.n_skipped:
        click.echo(f"Warning: skipped lines: {report.n_skipped:,}, the first: {report.skipped[0]}", err=True)


@click.command()
@click.argument("dest")
@click.option("--rows", type=click.IntRange(min=1), required=True, help="N.")
@click.option("--features", type=click.IntRange(min=1), required=True, help="D.")
@click.option("--labels", type=click.IntRange(min=1), required=True, help="L.")
@click.option(
    "--sparsity",
    type=click.IntRange(min=1),
    required=True,
    help="paper: K, rows have K/2 to K labels; extreme: mean number of labels of a row.",
)
@click.option("--seed", type=click.IntRange(min=0, max=2**64 - 1), default=0, show_default=True)
@click.option(
    "--kind",
    type=click.Choice(["paper", "extreme"]),
    default="paper",
    show_default=True,
    help="The paper's A.5 (dense), or sparse with Zipf features and a planted low-rank map.",
)
@click.option(
    "--features-per-row",
    type=click.IntRange(min=1),
    default=76,
    show_default=True,
    help="Mean number of features of a row; extreme only.",
)
@click.option("--normalize", type=click.Choice(["l2"]), help="Rows of unit norm; extreme only.")
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32", show_default=True)
@click.option("--chunk-rows", type=click.IntRange(min=1), help="Rows in a chunk; by size without it.")
@click.option("--overwrite", is_flag=True, help="Replace the store that is there.")
@cluster_options
@verb_options
def synth(
    dest: str,
    rows: int,
    features: int,
    labels: int,
    sparsity: int,
    seed: int,
    kind: Literal["paper", "extreme"],
    features_per_row: int,
    normalize: Literal["l2"] | None,
    dtype: str,
    chunk_rows: int | None,
    overwrite: bool,
    cluster: ClusterOptions,
    storage_options: dict[str, Any],
    as_json: bool,
    quiet: bool,
) -> None:
    """Generate a synthetic data set.

    DEST is a path or URL. The same options and seed give the same data whatever the chunks, the
    workers or the cluster. A run that was interrupted goes on where it stopped when the same command
    is given again.
    """
    with working(cluster, quiet or as_json) as (executor, on_progress):
        from dswml.synth import synthesize

        data = synthesize(
            dest,
            rows=rows,
            features=features,
            labels=labels,
            sparsity=sparsity,
            seed=seed,
            kind=kind,
            features_per_row=features_per_row,
            normalize=normalize,
            dtype=dtype,
            chunk_rows=chunk_rows,
            executor=executor,
            overwrite=overwrite,
            storage_options=storage_options,
            on_progress=on_progress,
        )
    _show(data, as_json)


@click.command()
@click.argument("store")
@cluster_options
@verb_options
def validate(
    store: str, cluster: ClusterOptions, storage_options: dict[str, Any], as_json: bool, quiet: bool
) -> None:
    """Read all of a data set and check it.

    STORE is a path or URL. Checked are every chunk, every number, and what is recorded about them.
    """
    from dswml.dataset import open_dataset

    data = open_dataset(store, storage_options=storage_options)
    with working(cluster, quiet or as_json, reads=[store], storage_options=storage_options) as (
        executor,
        on_progress,
    ):
        from dswml.validation import validate as check

        report = check(data, reporting(executor, "checking", on_progress))
    if as_json:
        click.echo(json.dumps({"url": data.url, "valid": True, **asdict(report)}))
        return
    click.echo(
        f"{data.url} is valid: {report.n_rows:,} rows, {report.rows_without_label:,} of them without a label "
        f"and {report.rows_without_feature:,} without a feature; {report.n_labels:,} labels, "
        f"{report.labels_without_positive:,} of them without a row"
    )
