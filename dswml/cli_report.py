"""The verb ``report``: one HTML page about a model or a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from dswml.cli import block_bytes_option, verb_options
from dswml.cli_predict import working
from dswml.cluster import ClusterOptions, cluster_options

__all__ = ["report"]


@click.command()
@click.argument("model", metavar="MODEL_OR_RUN")
@click.argument("out")
@click.option(
    "--data", metavar="STORE", help="Score the rows of this data set, best such as the model has not seen."
)
@click.option("--k", type=click.IntRange(min=1), default=5, show_default=True, help="Length of the rankings.")
@click.option("--exact", is_flag=True, help="Read twice, for the AUC and the best threshold without error.")
@click.option("--overwrite", is_flag=True, help="Replace the file that is there.")
@block_bytes_option
@cluster_options
@verb_options
def report(
    model: str,
    out: str,
    data: str | None,
    k: int,
    exact: bool,
    overwrite: bool,
    block_bytes: int,
    cluster: ClusterOptions,
    storage_options: dict[str, Any],
    as_json: bool,
    quiet: bool,
) -> None:
    """Write a report of MODEL_OR_RUN to the HTML file OUT.

    MODEL_OR_RUN and OUT are paths or URLs: of a model, or of the checkpoints of a run that has ended, was
    stopped or goes on, whose last one is shown. The page needs no network. It tells what was trained on what,
    how the fit went, the spectrum, and the curves of 'dswml tune'; with --data also how good the model is.
    """
    with working(
        cluster, quiet or as_json, reads=[data] if data else [], storage_options=storage_options
    ) as (executor, on_progress):
        from dswml.report import write_report

        done = write_report(
            model,
            out,
            data,
            k=k,
            exact=exact,
            overwrite=overwrite,
            block_bytes=block_bytes,
            executor=executor,
            on_progress=on_progress,
            storage_options=storage_options,
        )
    if as_json:
        click.echo(json.dumps(asdict(done)))
        return
    for sentence in () if quiet else done.left_out:
        click.echo(sentence, err=True)
    click.echo(f"The report is in {done.url}")
