"""The verb ``plan``: what training will take, before it is begun."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dswml.cli import block_bytes_option, number_of_bytes, verb_options
from dswml.progress import format_seconds

if TYPE_CHECKING:
    from dswml.planning import Plan

__all__ = ["plan"]

MIB = 2**20


@click.command()
@click.argument("store")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Worker processes.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Threads of each.")
@block_bytes_option
@click.option(
    "--factor-memory",
    metavar="BYTES",
    default="2 GiB",
    show_default=True,
    callback=number_of_bytes,
    help="Memory for factors and statistics.",
)
@verb_options
def plan(
    store: str,
    workers: int,
    threads: int,
    block_bytes: int,
    factor_memory: int,
    storage_options: dict[str, Any],
    as_json: bool,
    quiet: bool,
) -> None:
    """Say what training on the data set STORE will take: row blocks, memory, passes and time.

    A few row blocks are read and timed here; workers on other machines, or files that are further away from
    them, have other speeds.
    """
    from dswml.dataset import open_dataset
    from dswml.planning import plan_training

    data = open_dataset(store, block_bytes=block_bytes, storage_options=storage_options)
    found = plan_training(data, workers=workers, threads=threads, factor_memory=factor_memory)
    if as_json:
        click.echo(json.dumps({**asdict(found), "workers": workers, "threads": threads}))
    else:
        click.echo("\n".join(_lines(found, workers, threads)))


def _lines(found: Plan, workers: int, threads: int) -> list[str]:
    how = "assembled, D x L is small" if found.assembled else "matrix-free, D x L is large"
    first, last = found.passes
    shortest, longest = (format_seconds(seconds) for seconds in found.seconds)
    return [
        f"row blocks   {found.row_blocks:,} of up to {found.block_rows:,} rows, "
        f"{found.block_nbytes / MIB:,.1f} MiB",
        f"workers      {workers} x {threads} threads, with a memory limit of at least "
        f"{found.worker_nbytes / MIB:,.0f} MiB each; "
        f"with {found.keeping_nbytes / MIB:,.0f} MiB all rows stay in memory",
        f"driver       {found.driver_nbytes / MIB:,.0f} MiB for factors and statistics hold up to "
        f"{found.directions:,} directions",
        f"gradients    {how}",
        f"passes       {first} to {last} to a certified relative gap of 1e-3, by experience",
        f"time         {found.seconds_per_pass:.2g} s a pass at the speed of this process, "
        f"{shortest} to {longest} in all, reading every time",
    ]
