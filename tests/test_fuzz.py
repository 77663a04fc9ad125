"""Whatever is in a file: it is read, or refused in one sentence; nothing in it runs, and nothing grows."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
import zstandard
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings

from dswml import Checkpoints, SparseWeightedClassifier, create_dataset, open_dataset
from dswml.cli import cli
from dswml.driver import _run
from dswml.importers import import_dataset
from dswml.jobs import JOB_VERBS
from dswml.prediction import predict_dataset

N, D, L = 30, 4, 3
XMLREPO = "4 5 3\n0,2 0:1 3:0.5\n 2:1e-3\n1 1:2 4:-7.25\n0,1,2\n"
SVMLIGHT = "# Column indices are zero-based\n0,2 0:1 3:0.5\n1 qid:3 1:2 # note\n0 4:1\n"
ARFF = (
    "% c\n@relation r\n@attribute a real\n@attribute 'b c' {no,yes}\n@attribute l {0,1}\n@attribute k {0,1}\n"
    "@data\n1.5,yes,1,0\n-2,no,0,1\n"
)
SPARSE_ARFF = ARFF.partition("@data\n")[0] + "@data\n{0 1.5,2 1}\n{1 yes,3 1}\n"
XML = '<labels xmlns="m"><label name="l"><label name="k"/></label></labels>'
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "zst": lambda content: zstandard.ZstdCompressor().compress(content),
}


# What is read, and how


@dataclass(frozen=True)
class Kind:
    """Something on disk that the program wrote or takes, and the commands that read it from its folder."""

    make: Callable[[Path], object]
    commands: tuple[tuple[str, ...], ...]
    #: The parts of the folder to damage.
    parts: tuple[str, ...] = ("",)


def make_text(name: str, text: str, pack: str, **others: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).write_bytes(PACKERS[pack](text.encode()))
        for other, content in others.items():
            (folder / other.replace("_", ".")).write_text(content)

    return make


def matrices() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, D)).round(2), (rng.random((N, L)) < 0.4).astype(np.uint8)


def make_npy(folder: Path) -> None:
    x, y = matrices()
    np.save(folder / "X.npy", x)
    np.save(folder / "Y.npy", y)


def make_npz(folder: Path) -> None:
    x, y = matrices()
    sp.save_npz(folder / "X.npz", sp.csr_array(x))
    sp.save_npz(folder / "Y.npz", sp.csr_array(y))


def make_anndata(folder: Path) -> None:
    """What AnnData writes, with a dense X, a sparse Y and names."""
    x, y = matrices()
    root = zarr.create_group(folder / "a.zarr", attributes={"encoding-type": "anndata"})
    root.create_array("X", data=x, chunks=(10, D))
    labels = sp.csr_array(y)
    group = root.create_group("obsm/Y", attributes={"encoding-type": "csr_matrix", "shape": [N, L]})
    for name in ("data", "indices", "indptr"):
        group.create_array(name, data=getattr(labels, name))
    frame = {"encoding-type": "dataframe", "column-order": ["l", "k"]}
    table = root.create_group("obsm/table", attributes=frame)
    for number, name in enumerate(("l", "k")):
        table.create_array(name, data=y[:, number])
    root.create_group("var", attributes={"encoding-type": "dataframe", "_index": "names"})


def make_dataset(folder: Path, sparse: bool = False) -> None:
    x, y = matrices()
    create_dataset(
        folder / "data.zarr",
        sp.csr_array(x) if sparse else x,
        y,
        chunk_bytes=400,
        label_names=list("abc"),
        feature_names=list("wxyz"),
    )


def fitted(folder: Path, **options: Any) -> SparseWeightedClassifier:
    options = {"radius": 5.0, "weights": 0.3, "step": "line-search", "max_iter": 2, "tol": 0.0, **options}
    return SparseWeightedClassifier(**options, random_state=0).fit(open_dataset(folder / "data.zarr"))


def make_model(folder: Path) -> None:
    make_dataset(folder)
    fitted(folder).model_.with_threshold([0.1, 0.5, 0.6]).save(folder / "model.zarr")


def make_checkpoint(folder: Path) -> None:
    make_dataset(folder)
    fitted(folder, checkpoint=Checkpoints(folder / "checkpoint", every=1))


def make_prediction(folder: Path, interrupted: bool = False) -> None:
    make_model(folder)

    def stop(phase: str, done: int, total: int) -> None:
        if interrupted and phase == "writing":
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        predict_dataset(
            folder / "model.zarr", folder / "data.zarr", folder / "y.zarr", scores=True, on_progress=stop
        )


def make_interrupted_import(folder: Path) -> None:
    make_text("a.txt", XMLREPO, "plain")(folder)

    def stop(phase: str, done: int, total: int) -> None:
        if phase == "writing":
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        import_dataset(folder / "a.txt", folder / "out.zarr", on_progress=stop)


TRAIN = (
    *("train", "data.zarr", "--model", "new.zarr", "--checkpoint", "checkpoint", "--resume", "--radius", "5"),
    *("--weights", "0.3", "--step", "line-search", "--max-iter", "3", "--tol", "0"),
)
KINDS: dict[str, Kind] = {
    **{
        f"{name} {pack}": Kind(
            make_text(f"a.{ending}", text, pack, **others), (("import", f"a.{ending}", "out.zarr"),)
        )
        for name, ending, text, others in (
            ("xmlrepo", "txt", XMLREPO, {"a_labels_txt": "one\ntwo\nthree\n"}),
            ("svmlight", "svm", SVMLIGHT, {}),
            ("arff", "arff", ARFF, {"a_xml": XML}),
            ("sparse arff", "arff", SPARSE_ARFF, {"a_xml": XML}),
        )
        for pack in PACKERS
    },
    "npy": Kind(make_npy, (("import", "X.npy", "out.zarr"),)),
    "npz": Kind(make_npz, (("import", "X.npz", "out.zarr"),)),
    "anndata": Kind(
        make_anndata,
        (("import", "a.zarr", "out.zarr"), ("import", "a.zarr", "two.zarr", "--labels", "obsm/table")),
    ),
    "interrupted import": Kind(
        make_interrupted_import, (("import", "a.txt", "out.zarr", "--resume"),), ("out.zarr",)
    ),
    "dense data set": Kind(make_dataset, (("info", "data.zarr"), ("validate", "data.zarr"))),
    "sparse data set": Kind(
        lambda folder: make_dataset(folder, sparse=True), (("info", "data.zarr"), ("validate", "data.zarr"))
    ),
    "model": Kind(
        make_model,
        (("info", "model.zarr"), ("evaluate", "model.zarr", "data.zarr"), ("report", "model.zarr", "r.html")),
        ("model.zarr",),
    ),
    "checkpoint": Kind(make_checkpoint, (("info", "checkpoint"), TRAIN), ("checkpoint",)),
    "prediction": Kind(make_prediction, (("info", "y.zarr"),), ("y.zarr",)),
    "interrupted prediction": Kind(
        lambda folder: make_prediction(folder, interrupted=True),
        (("predict", "model.zarr", "data.zarr", "y.zarr", "--scores", "--resume"),),
        ("y.zarr",),
    ),
}


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from the name of a kind to a folder with something valid of it, made new each time.

    It is always at the same place: work that was interrupted goes on only where it was begun.
    """

    @cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp("valid")
        (folder / "used").mkdir()
        KINDS[name].make(folder / "used")
        shutil.copytree(folder / "used", folder / "kept")
        return folder

    def renewed(name: str) -> Path:
        used = made(name) / "used"
        shutil.rmtree(used)
        shutil.copytree(made(name) / "kept", used)
        return used

    return renewed


# How it is damaged

VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from([0, 1, -1, 2, 3, 4, 30, 31, 10**12, 10**15, 2**63, 10**30]),
        st.floats(),
        st.sampled_from(
            ["", "..", "../x", "/etc/passwd", "csr_matrix", "float64", "object", "|O", "c/0", "\n"]
        ),
        st.text(max_size=5),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
PLACES = st.floats(0, 1, exclude_max=True)
DAMAGES = st.one_of(
    st.tuples(st.just("flip"), PLACES, st.integers(1, 255)),
    st.tuples(st.just("cut"), PLACES, st.none()),
    st.tuples(st.just("insert"), PLACES, st.binary(min_size=1, max_size=12)),
    st.tuples(
        st.just("text"), PLACES, st.text("0123456789-+.eE:,{}'\"@%# \n\r\tnaif", min_size=1, max_size=8)
    ),
    st.tuples(st.just("attribute"), PLACES, VALUES),
    st.tuples(st.just("attribute"), PLACES, VALUES),
    st.tuples(st.just("remove"), PLACES, st.none()),
)


def places_in(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container of a JSON text with each of its keys."""
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from places_in(node[key])


def damage(file: Path, how: str, place: float, value: Any) -> None:
    content = file.read_bytes()
    at = int(place * len(content))
    if how == "attribute":
        try:
            tree = json.loads(content) if file.name == "zarr.json" else []
        except ValueError:  # by the damage before
            return
        found = list(places_in(tree))
        if not found:
            return
        container, key = found[int(place * len(found))]
        container[key] = value
        content = json.dumps(tree).encode()
    elif how == "remove":
        file.unlink()
        return
    elif how == "flip":
        content = content[:at] + bytes([(content[at] if content else 0) ^ value]) + content[at + 1 :]
    elif how == "cut":
        content = content[:at]
    else:
        content = content[:at] + (value.encode() if isinstance(value, str) else value) + content[at:]
    file.write_bytes(content)


def tell(folder: Path, command: tuple[str, ...]) -> str:
    """Run a command in a folder: it must end well, or in one sentence that was meant for people."""
    verb, *rest = command
    arguments = [
        str(folder / word) if Path(word).suffix[1:].isalpha() or (folder / word).exists() else word
        for word in rest
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = CliRunner().invoke(cli, [verb, *arguments], prog_name="dswml")
    said = told.stderr
    assert told.exception is None or isinstance(told.exception, SystemExit), said
    if told.exit_code:
        assert "(run again with --debug" not in said, said
        assert "Traceback" not in said, said
        _, _, sentence = said.rpartition("Error: ")
        assert len(sentence.strip().splitlines()) == 1, said
    return said


def check(folder: Path, name: str, damages: list[tuple[float, tuple[str, float, Any]]]) -> None:
    files = sorted(
        file for part in KINDS[name].parts for file in (folder / part).rglob("*") if file.is_file()
    )
    for which, one in damages:
        there = [file for file in files if file.name == "zarr.json"] if one[0] == "attribute" else files
        file = (there or files)[int(which * len(there or files))]
        if file.exists():
            damage(file, *one)
    for command in KINDS[name].commands:
        tell(folder, command)


Damages = list[tuple[float, tuple[str, float, Any]]]
DAMAGE_LISTS = st.lists(st.tuples(PLACES, DAMAGES), min_size=1, max_size=2)


def fuzz(name: str, valid: Callable[[str], Path], **how: Any) -> None:
    @settings(deadline=None, suppress_health_check=list(HealthCheck), database=None, **how)
    @given(DAMAGE_LISTS)
    def damaged(damages: Damages) -> None:
        check(valid(name), name, damages)

    damaged()


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_is_read_or_refused_in_a_sentence(name: str, valid: Callable[[str], Path]) -> None:
    fuzz(name, valid, max_examples=8, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_many_damaged_files_are_too(name: str, valid: Callable[[str], Path]) -> None:
    fuzz(name, valid, max_examples=400)


def test_what_is_not_damaged_is_read(valid: Callable[[str], Path]) -> None:
    for name, kind in KINDS.items():
        folder = valid(name)
        for command in kind.commands:
            assert "Error" not in tell(folder, command), name


# What no file can do


LIMITED = """
import json, resource, sys
from click.testing import CliRunner
import dswml.cli, dswml.evaluation, dswml.importers, dswml.prediction, dswml.training
from dswml.executor import InProcessExecutor
with InProcessExecutor() as executor:
    executor.map(pow, [1, 2], 2)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 2 * 2**30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for line in sys.stdin:
    told = CliRunner().invoke(dswml.cli.cli, json.loads(line))
    print(json.dumps([told.exit_code, told.stderr]), flush=True)
"""


def limited(folder: Path, commands: list[list[str]]) -> list[tuple[int, str]]:
    """Run commands in one process that can take 2 GiB more than its code; return exit codes and errors."""
    told = subprocess.run(
        [sys.executable, "-c", LIMITED],
        input="".join(json.dumps(command) + "\n" for command in commands),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    answers = [json.loads(line) for line in told.stdout.splitlines()]
    assert len(answers) == len(commands), told.stderr
    return [(code, said) for code, said in answers]


def claim(node: Path, shape: list[int], **attributes: Any) -> None:
    """Let an array, or the attributes of a group, claim another size."""
    file = node / "zarr.json"
    tree = json.loads(file.read_text())
    if tree["node_type"] == "array":
        tree["shape"] = shape
    tree["attributes"].update(attributes)
    file.write_text(json.dumps(tree))


def test_no_small_file_takes_much_memory(tmp_path: Path) -> None:
    many = 10**15
    cases: list[tuple[list[str], str]] = []

    def case(sentence: str, *command: str) -> None:
        cases.append(([*command], sentence))

    for name, header, sentence in (
        ("rows", f"{many} 10 5", f"{many} rows are declared, but 1 rows follow"),
        ("features", f"1 {10**12} 5", f"{10**12} features and 5 labels are declared; more than"),
        ("labels", f"1 10 {10**12}", f"10 features and {10**12} labels are declared; more than"),
    ):
        (tmp_path / f"{name}.txt").write_text(f"{header}\n0 1:1\n")
        case(sentence, "import", f"{name}.txt", f"{name}.zarr")

    part = bytes(32 * 2**20)  # 128 of them, each packed on its own, are one line of 4 GiB
    for pack in ("gz", "bz2", "zst"):
        bomb = PACKERS[pack](b"1 10 5\n") + 128 * PACKERS[pack](part)
        assert len(bomb) < 10 * 2**20
        (tmp_path / f"bomb.{pack}").write_bytes(bomb)
        case("is longer than 16 MiB", "import", f"bomb.{pack}", f"{pack}.zarr")
    declared = PACKERS["gz"](b"@relation r\n") + 20 * PACKERS["gz"](10**6 * b"@attribute a real\n")
    (tmp_path / "header.arff").write_bytes(declared)
    case("declares the attribute 'a' twice", "import", "header.arff", "header.zarr")

    make_npy(tmp_path)
    content = (tmp_path / "X.npy").read_bytes()
    (tmp_path / "X.npy").write_bytes(content.replace(b"(30, 4), }            ", b"(%d, 1000), }" % many, 1))
    case("cannot be read as a NumPy array of numbers", "import", "X.npy", "npy.zarr")
    make_npz(tmp_path)
    with zipfile.ZipFile(tmp_path / "X.npz", "w") as archive:
        for name, value in (("format", np.array(b"csr")), ("shape", np.array([10**12, 4]))):
            with archive.open(f"{name}.npy", "w") as file:
                np.save(file, value)
        with archive.open("indptr.npy", "w") as file:
            about = {"descr": "<i8", "fortran_order": False, "shape": (10**12 + 1,)}
            np.lib.format.write_array_header_1_0(file, about)
    case("indptr in", "import", "X.npz", "npz.zarr")

    make_anndata(tmp_path)
    claim(tmp_path / "a.zarr/X", [many, D])
    for name in ("l", "k"):
        claim(tmp_path / f"a.zarr/obsm/table/{name}", [many])
    case("claims", "import", "a.zarr", "anndata.zarr", "--labels", "obsm/table")

    make_checkpoint(tmp_path)
    shutil.copytree(tmp_path / "data.zarr", tmp_path / "long.zarr")
    claim(tmp_path / "long.zarr", [], n_rows=many, nnz_x=many * D)
    claim(tmp_path / "long.zarr/X", [many, D])
    claim(tmp_path / "long.zarr/Y/indptr", [many + 1])
    case("long.zarr claims more than", "validate", "long.zarr")
    shutil.copytree(tmp_path / "data.zarr", tmp_path / "wide.zarr")
    claim(tmp_path / "wide.zarr", [], n_labels=10**12)
    claim(tmp_path / "wide.zarr/label_counts", [10**12])
    case("wide.zarr", "info", "wide.zarr")
    fitted(tmp_path).model_.save(tmp_path / "model.zarr")
    claim(tmp_path / "model.zarr/U", [10**12, 2])
    case("claims more than there is of it", "info", "model.zarr")

    for (command, sentence), (code, said) in zip(
        cases, limited(tmp_path, [command for command, _ in cases]), strict=True
    ):
        assert (code, sentence in said) == (3, True), (command, said)


class Payload:
    """What, unpickled, would make a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)


def lose_attribute(store: Path, *path: str) -> None:
    """Make an attribute in the metadata of a store nothing."""
    metadata = json.loads((store / "zarr.json").read_text())
    *groups, name = ("attributes", *path)
    within = metadata
    for group in groups:
        within = within[group]
    within[name] = None
    (store / "zarr.json").write_text(json.dumps(metadata))


def test_attributes_that_are_lost_are_told_with_their_place(tmp_path: Path) -> None:
    make_model(tmp_path)
    lose_attribute(tmp_path / "model.zarr", "info", "seconds")
    assert "attributes of model.zarr are damaged" in tell(tmp_path, ("report", "model.zarr", "r.html"))
    make_interrupted_import(tmp_path)
    lose_attribute(tmp_path / "out.zarr", "store_id")
    (command,) = KINDS["interrupted import"].commands
    assert "attribute store_id of" in tell(tmp_path, command)


def test_no_file_runs_code(tmp_path: Path) -> None:
    """Whatever holds arrays of NumPy may hold pickled objects in their place."""
    ran = tmp_path / "ran"
    objects = np.array([[Payload(ran)]], dtype=object)
    make_npy(tmp_path)
    np.save(tmp_path / "X.npy", objects, allow_pickle=True)
    assert "cannot be read as a NumPy array of numbers" in tell(tmp_path, ("import", "X.npy", "a.zarr"))
    make_npz(tmp_path)
    parts = dict(np.load(tmp_path / "X.npz"))
    for name in ("data", "indices", "indptr", "shape", "format"):
        np.savez(tmp_path / "X.npz", **{**parts, name: objects})
        assert "Error" in tell(tmp_path, ("import", "X.npz", "b.zarr"))
    (tmp_path / "p").mkdir()
    make_prediction(tmp_path / "p", interrupted=True)
    for file in (tmp_path / "p/y.zarr/_progress/fragments").rglob("*"):
        if file.is_file():
            content = io.BytesIO()
            np.save(content, objects, allow_pickle=True)
            file.write_bytes(content.getvalue() + zlib.crc32(content.getvalue()).to_bytes(4, "little"))
    assert "1 of 1 parts in" in tell(tmp_path / "p", KINDS["interrupted prediction"].commands[0])
    assert not ran.exists()
    with suppress(ValueError), (tmp_path / "X.npy").open("rb") as stream:
        np.load(stream, allow_pickle=True)
    assert ran.exists(), "the payload is one"


def test_no_store_is_left_by_its_links_or_names(tmp_path: Path) -> None:
    """Nothing outside a store is deleted with it, and names that lead out of one are refused."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    make_dataset(tmp_path)
    (tmp_path / "data.zarr" / "folder").symlink_to(outside)
    (tmp_path / "data.zarr" / "file").symlink_to(outside / "mine")
    make_text("a.txt", XMLREPO, "plain")(tmp_path)
    tell(tmp_path, ("import", "a.txt", "data.zarr", "--overwrite"))
    assert (outside / "mine").read_text() == "mine"
    make_anndata(tmp_path)
    claim(tmp_path / "a.zarr/obsm/table", [], **{"column-order": ["../../../outside/mine"]})
    assert "Error" in tell(tmp_path, ("import", "a.zarr", "new.zarr", "--labels", "obsm/table"))


# Jobs


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from([*JOB_VERBS, "synth"]), st.dictionaries(st.text(max_size=8), VALUES, max_size=3), VALUES
)
def test_a_job_of_any_parameters_ends_with_a_code_and_a_sentence(
    verb: str, parameters: dict[str, Any], start: Any
) -> None:
    job = {"verb": verb, "parameters": parameters, "begun": False, "start": 1, "own_checkpoint": False}
    with redirect_stderr(io.StringIO()):
        code, error = _run({**job, "scheduler": start})
    assert code != 0
    assert error
