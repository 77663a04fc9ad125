"""The benchmarks run: each in a tiny form that measures nothing, and the page that shows them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
BENCHMARKS = CHECKOUT / "scripts" / "benchmarks"
NAMES = (
    "limit",
    "out-of-core",
    "passes",
    "solvers",
    "peers",
    "growth",
    "extreme",
    "scheduler",
    "cross-validation",
)
#: What a machine without the other programs cannot measure.
ELSEWHERE = {"solvers": {"stackex_philosophy: time of copt / of dswml"}}


def bench(*arguments: str | Path, data: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) if data is None else {**os.environ, "DSWML_DATA": str(data)}
    return subprocess.run(
        [sys.executable, BENCHMARKS, *arguments], capture_output=True, text=True, timeout=280, env=environment
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_benchmark_runs_and_measures_every_goal(name: str, real_data: Path, tmp_path: Path) -> None:
    ran = bench(name, "--tiny", "--out", tmp_path, data=real_data)
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["goals"]
    unmeasured = {goal["text"] for goal in found["goals"] if goal["measured"] is None}
    assert unmeasured <= ELSEWHERE.get(name, set())
    assert all(goal["met"] in (True, False) for goal in found["goals"] if goal["measured"] is not None)
    assert found["tables"]
    assert found["machine"]["cores"] >= 1
    page = (tmp_path / "index.html").read_text()
    assert f'<section id="{name}">' in page
    assert page.count("<svg class=") == len(found["charts"])
    assert "<script" not in page


def test_a_goal_is_met_at_its_limit_and_missed_beyond_it() -> None:
    common = module("common")
    assert common.Goal("", 2.0, 2.0).met
    assert not common.Goal("", 2.1, 2.0).met
    assert common.Goal("", 2.0, 2.0, at_most=False).met
    assert not common.Goal("", 1.9, 2.0, at_most=False).met
    assert common.Goal("", None, 2.0).met is None


def test_medians_and_ratios_are_of_pairs() -> None:
    common = module("common")
    found = common.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])
    assert (found.middle, found.low, found.high) == (2.0, 1.0, 3.0)


def test_the_flame_graph_is_as_wide_as_the_samples() -> None:
    drawn = module("page")._flame({"a;b": 3, "a;c": 1, "d": 4})
    widths = [float(width) for width in re.findall(r'<rect[^>]* width="([0-9.]+)"', drawn)]
    assert sorted(widths, reverse=True)[:2] == [429.4, 429.4]
    assert drawn.count("<rect") == 4


def test_an_unknown_benchmark_is_refused_by_name(tmp_path: Path) -> None:
    ran = bench("speed", "--out", tmp_path / "out")
    assert ran.returncode == 2
    assert "there is no benchmark 'speed': choose from limit, " in ran.stderr
    assert not (tmp_path / "out").exists()


def module(name: str) -> Any:
    """Import a module of the benchmarks."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found
