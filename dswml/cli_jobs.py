"""The verbs of jobs: ``submit``, ``jobs``, ``status``, ``logs``, ``cancel`` and ``result``."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import fields, replace
from typing import Any

import click

from dswml.cli import command_of, debug_option
from dswml.cluster import ClusterOptions, client_from_options, cluster_options
from dswml.errors import DswmlError
from dswml.progress import format_seconds

__all__ = ["cancel", "jobs", "logs", "result", "status", "submit"]

SUBMITTED = ("train", "tune", "predict", "evaluate")

_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")


class _Submittable(click.Group):
    """The verbs that can be jobs: parsed as they are, but handed over."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBMITTED)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBMITTED:
            return None
        command = copy.copy(command_of(cmd_name))
        command.callback = lambda **parameters: _hand_over(cmd_name, parameters, ctx.params, ctx.obj)
        return command


@click.group(cls=_Submittable, subcommand_metavar="VERB [ARGS]...")
@click.option("--name", help="Another name for the job.")
@click.option(
    "--wait-workers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Wait for so many workers.",
)
@click.option(
    "--timeout", type=float, metavar="SECONDS", default=300.0, show_default=True, help="But not longer."
)
@cluster_options
@debug_option
@click.pass_context
def submit(ctx: click.Context, /, cluster: ClusterOptions, **options: Any) -> None:
    """Hand a verb to a running scheduler and print the job's id; the job goes on without this command.

    Paths are made absolute here and must be where all workers can open them, which is looked at first.
    """
    ctx.obj = cluster


def _hand_over(
    verb: str, parameters: dict[str, Any], options: dict[str, Any], cluster: ClusterOptions
) -> None:
    from dswml.jobs import hand_over

    as_json, quiet = parameters["as_json"], parameters["quiet"]
    given = {each.name: parameters[each.name] for each in fields(cluster) if parameters[each.name]}
    if {"scheduler", "scheduler_file"} & given.keys():
        cluster = replace(cluster, scheduler=None, scheduler_file=None)
    cluster = replace(cluster, **given)

    def announce(line: str) -> None:
        if not (quiet or as_json):
            click.echo(line, err=True)

    with client_from_options(cluster, announce=announce) as client:
        job = hand_over(
            client,
            verb,
            parameters,
            name=options["name"],
            wait_workers=options["wait_workers"],
            timeout=options["timeout"],
            announce=announce,
        )
        announce(f"Follow it with 'dswml status {job.id} --follow'.")
        click.echo(json.dumps(job.status()) if as_json else job.id)


@click.command()
@cluster_options
@_json
@debug_option
def jobs(cluster: ClusterOptions, as_json: bool) -> None:
    """List the jobs of a scheduler."""
    from dswml.jobs import all_jobs

    with client_from_options(cluster) as client:
        found = all_jobs(client)
    if as_json:
        click.echo(json.dumps({"jobs": found}))
        return
    for job in found:
        name = f"  {job['name']}" if job["name"] else ""
        click.echo(f"{job['id']:<18} {job['state']:<10} {_age(job):>12}{name}")


@click.command()
@click.argument("job")
@click.option("--follow", is_flag=True, help="Show the log until the job ends; leave with its exit code.")
@cluster_options
@_json
@debug_option
def status(job: str, follow: bool, cluster: ClusterOptions, as_json: bool) -> None:
    """Tell how the job JOB, an id or a name, stands."""
    from dswml.jobs import Job

    with client_from_options(cluster) as client:
        handle = Job(client, job)
        if follow:
            for line in handle.follow():
                click.echo(line, err=True)
        found = handle.status()
    click.echo(json.dumps(found) if as_json else "\n".join(_status_lines(found)))
    if follow and found["exit_code"]:
        raise click.exceptions.Exit(found["exit_code"])


@click.command()
@click.argument("job")
@cluster_options
@_json
@debug_option
def logs(job: str, cluster: ClusterOptions, as_json: bool) -> None:
    """Show the last lines that the job JOB wrote."""
    from dswml.jobs import Job

    with client_from_options(cluster) as client:
        lines = Job(client, job).logs()
    click.echo(json.dumps({"lines": lines}) if as_json else "\n".join(lines))


@click.command()
@click.argument("job")
@cluster_options
@_json
@debug_option
def cancel(job: str, cluster: ClusterOptions, as_json: bool) -> None:
    """Ask the job JOB to stop in good order; a second time, kill it."""
    from dswml.jobs import Job

    with client_from_options(cluster) as client:
        found = Job(client, job).cancel()
    if as_json:
        click.echo(json.dumps(found))
        return
    if found["state"] != "stopping":
        click.echo(f"Job {found['id']} is {found['state']}.")
        return
    kept = f" Its checkpoint is {found['checkpoint']}." if found["checkpoint"] else ""
    click.echo(f"Job {found['id']} stops after this iteration; 'dswml cancel' once more kills it.{kept}")


@click.command()
@click.argument("job")
@click.option("--wait", is_flag=True, help="Wait for the end of the job.")
@click.option("--timeout", type=float, metavar="SECONDS", help="Wait no longer than this.")
@cluster_options
@_json
@debug_option
def result(job: str, wait: bool, timeout: float | None, cluster: ClusterOptions, as_json: bool) -> None:
    """Show what the job JOB found, and leave with its exit code."""
    from dswml.jobs import Job

    with client_from_options(cluster) as client:
        handle = Job(client, job)
        try:
            found = handle.result(timeout if wait or timeout is not None else 0)
        except TimeoutError:
            state = handle.status()["state"]
            raise DswmlError(f"job {job} is {state} and has no result yet: wait for it with --wait") from None
    if as_json:
        click.echo(json.dumps(found))
        return
    for key, value in found.items():
        if not isinstance(value, dict | list):
            click.echo(f"{key:<16} {value}")


def _age(job: dict[str, Any]) -> str:
    begin = job["started"] or job["submitted"]
    return format_seconds((job["ended"] or time.time()) - begin)


def _status_lines(job: dict[str, Any]) -> list[str]:
    where = f" on {job['worker']}" if job["worker"] and not job["ended"] else ""
    starts = f", {job['starts']} starts" if job["starts"] > 1 else ""
    lines = [f"{job['id']}: {job['state']}{where}, {_age(job)}{starts}"]
    if job["figures"]:
        figures = (f"{name.replace('_', ' ')} {_shown(value)}" for name, value in job["figures"].items())
        lines.append(f"  {', '.join(figures)}")
    if job["error"]:
        lines.append(f"  {job['error']}")
    if job["output"] and job["state"] == "done":
        lines.append(f"  {job['output']}")
    if job["checkpoint"] and job["exit_code"]:
        lines.append(f"  Go on with the same command and --checkpoint {job['checkpoint']} --resume")
    return lines


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
