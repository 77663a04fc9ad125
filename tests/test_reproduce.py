"""A fast slice of the reproduction of the paper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "reproduce-paper"


def reproduce(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments, "--out", out, "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "DSWML_WORKERS": "2"},
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_table_1_is_exact(tmp_path: Path) -> None:
    code, results = reproduce(tmp_path, "table1")
    assert code == 0
    assert results["table1"]["Hamming, p0 = 1/2"] == pytest.approx([3, 47, 3, 50])
    assert "Broken tolerances: none" in (tmp_path / "page.md").read_text()


def test_a_few_simulations_of_table_2_are_near_the_paper(tmp_path: Path) -> None:
    code, results = reproduce(tmp_path, "table2", "--simulations", "8", "--sparsities", "2,6")
    assert code == 0
    assert results["table2"]["open-loop"]["6"][1] == pytest.approx(1.0, abs=0.01)
    assert results["table2"]["corrective"]["2"][4] > 0.5  # at the optimum the classical loss recalls far more


def test_table_3_is_counted_from_the_files(tmp_path: Path, real_data: Path) -> None:
    code, results = reproduce(tmp_path, "table3", "--data", str(real_data))
    assert code == 0
    assert results["table3"]["stackex_cs"][:4] == [9270, 635, 274, 5]


def test_the_theory_checks_hold(tmp_path: Path) -> None:
    assert reproduce(tmp_path, "theory")[0] == 0


def test_figures_are_drawn_on_a_small_grid(tmp_path: Path, real_data: Path) -> None:
    pytest.importorskip("matplotlib")
    sets = ("--sets", "stackex_philosophy", "--radii", "10,30", "--tol", "0.05", "--data", str(real_data))
    code, results = reproduce(tmp_path, "figure1", *sets)
    assert code == 0
    assert results["figure1"]["stackex_philosophy"]["weighted wins"]["micro_f1"]
    assert (tmp_path / "figure1.png").stat().st_size > 10_000
