"""The scripts and the README: they run as they say, name nothing of this machine, and tell no untruth."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from dswml.cli import VERBS, cli

CHECKOUT = Path(__file__).resolve().parent.parent
SCRIPTS = [CHECKOUT / "scripts" / "_env", CHECKOUT / "scripts" / "quickstart", CHECKOUT / "scripts" / "test"]
README = (CHECKOUT / "README.md").read_text()


def bash(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=CHECKOUT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def dswml_commands() -> list[str]:
    """Every line of the README's shell blocks that begins with dswml, continued lines joined."""
    lines = "".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("dswml ")]


@pytest.mark.parametrize("script", [*SCRIPTS, CHECKOUT / ".ci" / "run"], ids=lambda path: path.name)
def test_scripts_are_bash_and_name_no_host_and_no_home(script: Path) -> None:
    assert bash(f"bash -n {shlex.quote(str(script))}").returncode == 0
    assert not re.search(r"https?://|pypi|/home/|/root", script.read_text())
    assert os.access(script, os.X_OK) == (script.name != "_env")


def test_test_tells_its_options_and_refuses_others() -> None:
    assert "--lowest" in bash("scripts/test --help").stdout
    assert bash("scripts/test --fast").returncode == 2


def test_quickstart_refuses_options_before_it_does_anything() -> None:
    told = bash("scripts/quickstart --fast")
    assert told.returncode == 1
    assert "--fast" in told.stderr


def test_an_interpreter_is_found_by_version() -> None:
    version = "{}.{}".format(*sys.version_info)
    told = bash(f"source scripts/_env; find_python {version}", PATH=f"{sys.prefix}/bin:{os.environ['PATH']}")
    assert told.returncode == 0
    found = subprocess.run([told.stdout.strip(), "--version"], capture_output=True, text=True, check=True)
    assert found.stdout.startswith(f"Python {version}.")


def test_an_interpreter_that_cannot_serve_is_told_by_name() -> None:
    told = bash("source scripts/_env; default_version", DSWML_PYTHON="/bin/false")
    assert told.returncode == 1
    assert "DSWML_PYTHON is /bin/false" in told.stderr


def test_readme_has_commands_to_check() -> None:
    assert len(dswml_commands()) >= 5


@pytest.mark.parametrize("line", dswml_commands())
def test_commands_of_the_readme_are_understood(line: str) -> None:
    verb, *arguments = shlex.split(line, comments=True)[1:]
    if verb.startswith("-"):
        return
    assert verb in VERBS
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    command.make_context(verb, arguments)


@pytest.mark.parametrize("script", sorted(set(re.findall(r"scripts/[a-z_-]+", README))))
def test_scripts_of_the_readme_exist(script: str) -> None:
    assert (CHECKOUT / script).is_file()


def test_readme_gives_the_exit_codes_of_the_errors() -> None:
    from dswml.errors import ClusterError, DataError, DswmlError, StoppedEarlyError, UsageError

    told = {int(code) for code in re.findall(r"^\| (\d) \| ", README, flags=re.MULTILINE)}
    errors = (DswmlError, UsageError, DataError, ClusterError, StoppedEarlyError)
    assert told == {0, *(error.exit_code for error in errors)}


@pytest.mark.parametrize("code", blocks("python"))
def test_python_of_the_readme_runs(code: str, tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_quickstart_runs_in_a_fresh_clone(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", CHECKOUT, clone], check=True)
    told = subprocess.run([clone / "scripts" / "quickstart"], capture_output=True, text=True, timeout=1200)
    assert told.returncode == 0, told.stderr
    assert (clone / "quickstart-output" / "synthetic.zarr" / "zarr.json").is_file()
    assert (clone / "quickstart-output" / "report.html").read_text().startswith("<!DOCTYPE html>")
    changed = subprocess.run(["git", "-C", clone, "status", "--short"], capture_output=True, text=True)
    assert changed.stdout == ""
