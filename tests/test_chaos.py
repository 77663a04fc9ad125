"""The fault programme: clusters of real processes break, and the work ends as it must."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).resolve().parent.parent / "scripts" / "chaos"


def chaos(*arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, os.fspath(CHAOS), *arguments], capture_output=True, text=True, timeout=seconds
    )


def test_a_worker_is_killed_and_the_bits_are_the_same(tmp_path: Path) -> None:
    told = chaos("--quick", "worker-killed", "--out", os.fspath(tmp_path / "table.md"), seconds=240)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "| SIGKILL of a worker | 1 | 1 | 1 |" in (tmp_path / "table.md").read_text()


def test_an_unknown_scenario_is_refused() -> None:
    told = chaos("comet", seconds=60)
    assert told.returncode == 2
    assert "there is no scenario comet: there are worker-killed," in told.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_scenario_ends_as_it_must() -> None:
    told = chaos("--runs", "1", seconds=3500)
    assert told.returncode == 0, told.stdout + told.stderr
