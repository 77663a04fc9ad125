"""The command line: what each verb says, where it says it, and the exit code it ends with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from dswml import SparseWeightedClassifier
from dswml.cli import VERBS, cli
from dswml.dataset import create_dataset, open_dataset

SYNTH = ["--rows", "300", "--features", "10", "--labels", "40", "--sparsity", "4"]


def dswml(*arguments: str | os.PathLike[str]) -> Result:
    return CliRunner().invoke(cli, [os.fspath(argument) for argument in arguments], prog_name="dswml")


def command(*arguments: str | os.PathLike[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run an installed command as a user does."""
    program, *rest = arguments
    return subprocess.run(
        [Path(sys.executable).parent / program, *rest],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    place = tmp_path / "a.zarr"
    assert dswml("synth", place, *SYNTH, "--quiet").exit_code == 0
    return place


def small_store(place: Path, y: list[list[int]]) -> Path:
    create_dataset(place, np.eye(len(y), 3, dtype=np.float32), np.array(y, dtype=np.uint8))
    return place


def test_version_is_told_without_loading_anything_heavy() -> None:
    told = command("dswml", "--version")
    assert told.returncode == 0
    assert told.stdout.startswith("dswml 0.")
    heavy = {"numpy", "scipy", "zarr", "numba", "dask", "distributed", "sklearn", "rich"}
    code = (
        "import sys\nfrom dswml.cli import cli\ntry:\n    cli(['--version'], prog_name='dswml')\n"
        f"except SystemExit:\n    print(sorted({heavy!r} & set(sys.modules)))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.splitlines()[-1] == "[]"


def test_help_lists_every_verb_and_the_exit_codes() -> None:
    told = dswml("--help")
    assert told.exit_code == 0
    for verb in VERBS:
        assert f"  {verb} " in told.output
        assert dswml(verb, "--help").exit_code == 0
    assert "3 bad data" in told.output


def test_info_describes_a_data_set_as_json(store: Path) -> None:
    told = dswml("info", store, "--json")
    assert told.exit_code == 0
    found = json.loads(told.stdout)
    assert found["n_rows"] == 300
    assert found["n_features"] == 10
    assert found["n_labels"] == 40
    assert found["nnz_x"] == 3000
    assert 600 <= found["nnz_y"] <= 1200
    assert found["k_hat"] == 4
    assert found["p0"] == pytest.approx(0.2)
    assert found["p0_note"] is None
    assert found["rows_per_label"]["mean"] == pytest.approx(found["nnz_y"] / 40)
    assert found["arrays"]["X"]["shape"] == [300, 10]


def test_info_describes_a_data_set_for_people(store: Path) -> None:
    told = dswml("info", store)
    assert "300" in told.stdout
    assert "p0          0.2 = 2 K_hat / L" in told.stdout
    assert "chunks of" in told.stdout


@pytest.mark.parametrize(
    ("labels", "p0", "note"),
    [(6, 1.0, "no sparsity weights exist"), (12, 0.5, "favour zeros"), (13, 6 / 13, "")],
)
def test_info_says_where_the_weights_of_the_paper_are_of_no_use(
    tmp_path: Path, labels: int, p0: float, note: str
) -> None:
    y = [[int((label - row) % labels < 3) for label in range(labels)] for row in range(labels)]
    found = json.loads(dswml("info", small_store(tmp_path / "a.zarr", y), "--json").stdout)
    assert found["p0"] == pytest.approx(p0)
    assert note in (found["p0_note"] or "")
    assert bool(note) == (found["p0_note"] is not None)


def test_info_describes_a_model(tmp_path: Path, store: Path) -> None:
    classifier = SparseWeightedClassifier(radius=2.0, tol=0.1).fit(open_dataset(store))
    classifier.model_.save(tmp_path / "model.zarr")
    found = json.loads(dswml("info", tmp_path / "model.zarr", "--json").stdout)
    assert found["kind"] == "model"
    assert (found["n_features"], found["n_labels"]) == (10, 40)
    assert found["rank"] == classifier.model_.rank
    assert found["objective"] == pytest.approx(classifier.objective_)
    told = dswml("info", tmp_path / "model.zarr")
    assert "radius      2" in told.stdout
    assert classifier.status_ in told.stdout


def test_synth_writes_what_info_then_tells(tmp_path: Path) -> None:
    made = dswml("synth", tmp_path / "a.zarr", *SYNTH, "--json")
    assert made.exit_code == 0
    assert made.stderr == ""
    assert json.loads(made.stdout) == json.loads(dswml("info", tmp_path / "a.zarr", "--json").stdout)


def test_synth_makes_extreme_data(tmp_path: Path) -> None:
    options = ["--kind", "extreme", "--rows", "500", "--features", "2000", "--labels", "300"]
    more = ["--sparsity", "3", "--features-per-row", "9", "--normalize", "l2"]
    made = dswml("synth", tmp_path / "a.zarr", *options, *more, "--json")
    found = json.loads(made.stdout)
    assert found["x_sparse"] is True
    assert found["normalize"] == "l2"
    assert found["k_hat"] == 5


def test_synth_replaces_a_store_only_when_told_to(store: Path) -> None:
    refused = dswml("synth", store, *SYNTH)
    assert refused.exit_code == 2
    assert "--overwrite" in refused.stderr
    assert dswml("synth", store, *SYNTH, "--overwrite").exit_code == 0


def test_long_verbs_show_lines_of_progress_unless_quiet(tmp_path: Path) -> None:
    shown = dswml("synth", tmp_path / "a.zarr", *SYNTH)
    assert "writing: 1/1" in shown.stderr
    assert dswml("synth", tmp_path / "b.zarr", *SYNTH, "--quiet").stderr == ""
    assert "checking: 1/1" in dswml("validate", tmp_path / "a.zarr").stderr


def test_validate_passes_good_data_and_counts_what_is_odd(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no positive row"):
        place = small_store(tmp_path / "a.zarr", [[1, 0], [1, 0], [0, 0], [1, 0], [1, 0]])
    checked = dswml("validate", place, "--json")
    assert checked.exit_code == 0
    report = json.loads(checked.stdout)
    assert report["valid"] is True
    assert report["rows_without_label"] == 1
    assert report["rows_without_feature"] == 2
    assert report["labels_without_positive"] == 1
    assert checked.stderr.startswith("Warning: 1 of 2 labels")
    assert checked.stderr.count("\n") == 1


def test_validate_ends_with_3_at_a_damaged_chunk_and_names_it(store: Path) -> None:
    chunk = store / "X" / "c" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-9] + b"corrupted")
    checked = dswml("validate", store)
    assert checked.exit_code == 3
    assert f"chunk 0 of array X in {store}" in checked.stderr
    assert "Traceback" not in checked.stderr


def test_a_missing_store_ends_with_3(tmp_path: Path) -> None:
    told = dswml("info", tmp_path / "none.zarr")
    assert told.exit_code == 3
    assert told.stderr == f"Error: there is no store at {tmp_path / 'none.zarr'}: check the path or URL\n"


def test_a_store_that_is_something_else_ends_with_3(tmp_path: Path) -> None:
    import zarr

    zarr.create_group(tmp_path / "other.zarr").attrs["format"] = "other"
    told = dswml("info", tmp_path / "other.zarr")
    assert told.exit_code == 3
    assert "'other'" in told.stderr


@pytest.mark.parametrize(
    "arguments",
    [["fit"], ["synth", "a.zarr"], ["synth", "a.zarr", *SYNTH, "--sparsity", "41"], ["info", "a", "-o", "x"]],
    ids=["no such verb", "missing option", "impossible value", "malformed storage option"],
)
def test_wrong_usage_ends_with_2(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = dswml(*arguments)
    assert told.exit_code == 2
    assert "Error: " in told.stderr


@click.command()
def broken() -> None:
    """A verb with a fault in it."""
    raise ZeroDivisionError("one by zero")


def test_anything_else_ends_with_1_and_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERBS, "broken", f"{__name__}:broken")
    told = dswml("broken")
    assert told.exit_code == 1
    assert told.stderr == "Error: ZeroDivisionError: one by zero (run again with --debug to see where)\n"


@pytest.mark.parametrize("debug_first", [True, False])
def test_debug_shows_the_traceback_and_keeps_the_exit_code(tmp_path: Path, debug_first: bool) -> None:
    verb = ["info", os.fspath(tmp_path / "none.zarr")]
    told = dswml(*(["--debug", *verb] if debug_first else [*verb, "--debug"]))
    assert told.exit_code == 3
    assert "Traceback (most recent call last):" in told.stderr
    assert told.stderr.splitlines()[-1].startswith("Error: there is no store")


def test_urls_and_storage_options_reach_the_file_system() -> None:
    options: list[Any] = ["-o", "skip_instance_cache=false", "-o", "use_listings_cache=false"]
    assert dswml("synth", "memory://cli/a.zarr", *SYNTH, *options, "--overwrite").exit_code == 0
    assert json.loads(dswml("info", "memory://cli/a.zarr", "--json").stdout)["n_rows"] == 300


def test_dask_offers_the_same_verbs(store: Path) -> None:
    told = command("dask", "dswml", "info", store, "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["n_rows"] == 300
    assert command("dask", "dswml", "info", f"{store}.none").returncode == 3


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_verbs(shell: str) -> None:
    script = command("dswml", _DSWML_COMPLETE=f"{shell}_source")
    if shell == "bash" and "Couldn't detect Bash version" in script.stderr:
        pytest.skip("this machine has no Bash, or one too old to complete")
    assert "_DSWML_COMPLETE" in script.stdout
    words = {"COMP_WORDS": "dswml val", "COMP_CWORD": "val" if shell == "fish" else "1"}
    assert "validate" in command("dswml", _DSWML_COMPLETE=f"{shell}_complete", **words).stdout


XMLREPO = "3 4 2\n0,1 0:1 3:0.5\n 2:1\n1\n"


def test_import_takes_a_file_and_tells_what_it_was(tmp_path: Path) -> None:
    (tmp_path / "tiny.txt").write_text(XMLREPO)
    told = dswml("import", tmp_path / "tiny.txt", tmp_path / "tiny.zarr", "--normalize", "l2", "--json")
    assert told.exit_code == 0, told.stderr
    assert told.stderr == ""
    found = json.loads(told.stdout)
    assert (found["n_rows"], found["n_features"], found["n_labels"], found["k_hat"]) == (3, 4, 2, 2)
    assert found["normalize"] == "l2"
    assert found["import"]["format"] == "xmlrepo"
    assert found["import"]["rows_without_label"] == 1


def test_import_ends_with_3_at_a_malformed_line_or_skips_it_when_told_to(tmp_path: Path) -> None:
    source = tmp_path / "tiny.txt"
    source.write_text(XMLREPO.replace("3 4 2", "4 4 2") + "0 1:x\n")
    told = dswml("import", source, tmp_path / "tiny.zarr")
    assert told.exit_code == 3
    assert "line 5" in told.stderr
    assert not (tmp_path / "tiny.zarr").exists()
    told = dswml("import", source, tmp_path / "tiny.zarr", "--on-error", "skip")
    assert told.exit_code == 0, told.stderr
    assert "Warning: skipped lines: 1" in told.stderr
    assert dswml("import", source, tmp_path / "tiny.zarr").exit_code == 2


def test_import_numbers_svmlight_features_as_told(tmp_path: Path) -> None:
    (tmp_path / "a.svm").write_text("0 1:1 2:2\n1 3:1\n")
    shapes = []
    for option in ([], ["--zero-based"], ["--one-based"]):
        told = dswml("import", tmp_path / "a.svm", tmp_path / "a.zarr", "--overwrite", "--json", *option)
        shapes.append(json.loads(told.stdout)["n_features"])
    assert shapes == [3, 4, 3]


def test_info_tells_the_shape_of_the_real_data(tmp_path: Path, real_data: Path) -> None:
    told = dswml(
        "import", real_data / "mulan" / "emotions.arff", tmp_path / "emotions.zarr", "--workers", "1"
    )
    assert told.exit_code == 0, told.stderr
    found = json.loads(dswml("info", tmp_path / "emotions.zarr", "--json").stdout)
    assert (found["n_rows"], found["n_features"], found["n_labels"], found["k_hat"]) == (593, 72, 6, 3)
    assert found["p0"] >= 1
    assert "2 K_hat >= L" in found["p0_note"]
