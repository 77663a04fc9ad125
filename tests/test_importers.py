"""Importing: what people have goes in whole, in any pieces, or not at all."""

from __future__ import annotations

import bz2
import gzip
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import anndata
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.datasets import dump_svmlight_file, load_svmlight_file

import dswml.layout
import dswml.textfile
from dswml.dataset import Dataset, open_dataset
from dswml.errors import DataError, IncompleteStoreError, StoreExistsError, StoreNotFoundError, UsageError
from dswml.executor import Executor, InProcessExecutor
from dswml.formats import detect_format
from dswml.importers import ImportReport, import_dataset
from dswml.layout import ArrayLayout
from dswml.pieces import UnitBuffer, plan_pieces

Array = NDArray[Any]


def contents(data: Dataset | str | os.PathLike[str]) -> tuple[Array, Array]:
    data = data if isinstance(data, Dataset) else open_dataset(data)
    x = data.read_x(0, data.n_rows)
    return (x if isinstance(x, np.ndarray) else x.toarray()), data.read_y(0, data.n_rows).toarray()


def assert_same(one: tuple[Array, Array], other: tuple[Array, Array]) -> None:
    np.testing.assert_array_equal(one[0], other[0])
    np.testing.assert_array_equal(one[1], other[1])


def no_store_at(path: Path) -> bool:
    return not path.exists()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    """Cut little data into many slices, segments and chunks; return the size of a segment."""
    monkeypatch.setattr(dswml.textfile, "SLICE_BYTES", 300)
    monkeypatch.setattr(dswml.layout, "MIN_CHUNK_BYTES", 400)
    return 1000


def random_rows(n_rows: int, n_features: int, n_labels: int, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n_rows, n_features)) * (rng.random((n_rows, n_features)) < 0.2)
    y = (rng.random((n_rows, n_labels)) < 0.15).astype(np.uint8)
    x[::7] = 0
    y[::5] = 0
    return x.astype(np.float32), y


def write_xmlrepo(path: Path, x: Array, y: Array, *, newline: str = "\n") -> Path:
    lines = [f"{len(x)} {x.shape[1]} {y.shape[1]}"]
    for features, labels in zip(x, y, strict=True):
        entries = " ".join(f"{k}:{features[k]!s}" for k in np.flatnonzero(features))
        lines.append(",".join(map(str, np.flatnonzero(labels))) + " " + entries)
    path.write_text(newline.join(lines) + newline)
    return path


@pytest.fixture
def matrices() -> tuple[Array, Array]:
    return random_rows(120, 30, 12)


@pytest.fixture
def xmlrepo(tmp_path: Path, matrices: tuple[Array, Array]) -> Path:
    return write_xmlrepo(tmp_path / "rows.txt", *matrices)


# Real data, against an independent parser


def read_xmlrepo(path: Path) -> tuple[Array, Array]:
    header, *lines = path.read_text().splitlines()
    n, d, k = map(int, header.split())
    x, y = np.zeros((n, d), np.float32), np.zeros((n, k), np.uint8)
    for row, line in enumerate(lines):
        labels, _, features = line.partition(" ")
        for label in filter(None, labels.split(",")):
            y[row, int(label)] = 1
        for pair in features.split():
            column, _, value = pair.partition(":")
            x[row, int(column)] = float(value)
    return x, y


def read_arff(path: Path, xml: Path) -> tuple[Array, Array]:
    labels = [element.attrib["name"] for element in ElementTree.parse(xml).getroot()]
    text = path.read_text()
    names = [line.split()[1] for line in text.splitlines() if line.startswith("@attribute")]
    rows = [line for line in text.partition("@data")[2].splitlines() if line.strip()]
    values = np.zeros((len(rows), len(names)), np.float64)
    for row, line in enumerate(rows):
        if line.startswith("{"):
            for pair in line.strip("{} ").split(","):
                column, value = pair.split()
                values[row, int(column)] = float(value)
        else:
            values[row] = [float(value) for value in line.split(",")]
    features = [k for k, name in enumerate(names) if name not in labels]
    y = values[:, [names.index(name) for name in labels]]
    return values[:, features].astype(np.float32), y.astype(np.uint8)


@pytest.mark.parametrize(
    ("file", "xml", "expected"),
    [
        ("mulan/bibtex.arff", "mulan/bibtex.xml", (7395, 1836, 159, 28)),
        ("mulan/bibtex-train.arff", "mulan/bibtex.xml", (4880, 1836, 159, 28)),
        ("mulan/bibtex-test.arff", "mulan/bibtex.xml", (2515, 1836, 159, 17)),
        ("mulan/delicious.arff", "mulan/delicious.xml", (16105, 500, 983, 25)),
        ("mulan/delicious-train.arff", "mulan/delicious.xml", (12920, 500, 983, 25)),
        ("mulan/delicious-test.arff", "mulan/delicious.xml", (3185, 500, 983, 25)),
        ("mulan/emotions.arff", "mulan/emotions.xml", (593, 72, 6, 3)),
        ("mulan/emotions-train.arff", "mulan/emotions.xml", (391, 72, 6, 3)),
        ("mulan/emotions-test.arff", "mulan/emotions.xml", (202, 72, 6, 3)),
        ("xmlrepo/stackex_philosophy.txt", None, (3971, 842, 233, 5)),
        ("xmlrepo/stackex_cs.txt", None, (9270, 635, 274, 5)),
    ],
)
def test_real_data_come_in_as_an_independent_parser_reads_them(
    real_data: Path, tmp_path: Path, file: str, xml: str | None, expected: tuple[int, ...]
) -> None:
    report = import_dataset(real_data / file, tmp_path / "d.zarr", segment_bytes=2**19)
    assert (report.n_rows, report.n_features, report.n_labels, report.k_hat) == expected
    data = open_dataset(tmp_path / "d.zarr")
    assert (data.n_rows, data.n_features, data.n_labels, data.k_hat) == expected
    if "-" not in file:  # of the halves of a split, the numbers are enough
        x, y = read_xmlrepo(real_data / file) if xml is None else read_arff(real_data / file, real_data / xml)
        assert_same(contents(data), (x, y))
        np.testing.assert_array_equal(data.label_counts, y.sum(axis=0))
    assert data.is_sparse == ("emotions" not in file)
    assert data.label_names is not None
    assert len(data.label_names) == expected[2]


def test_rows_without_labels_or_features_of_the_real_data_survive(real_data: Path, tmp_path: Path) -> None:
    expected = {"stackex_philosophy": (13, 1), "stackex_cs": (36, 3)}
    for name, counts in expected.items():
        report = import_dataset(real_data / "xmlrepo" / f"{name}.txt", tmp_path / f"{name}.zarr")
        assert (report.rows_without_label, report.rows_without_feature) == counts
    delicious = import_dataset(real_data / "mulan" / "delicious.arff", tmp_path / "d.zarr")
    assert delicious.rows_without_label == 14


def test_names_of_the_real_data_are_kept(real_data: Path, tmp_path: Path) -> None:
    import_dataset(real_data / "xmlrepo" / "stackex_cs.txt", tmp_path / "cs.zarr")
    names = open_dataset(tmp_path / "cs.zarr").label_names
    assert names is not None
    assert names[:2] == ("3-sat", "algorithm-analysis")
    import_dataset(real_data / "mulan" / "delicious-test.arff", tmp_path / "d.zarr")
    data = open_dataset(tmp_path / "d.zarr")
    assert data.label_names is not None
    assert data.feature_names is not None
    assert r"TAG_m\'usica" in data.label_names
    assert data.feature_names[0] == "_qacct"


# The same data, however they are cut, packed and read


@pytest.mark.parametrize(("threads", "newline"), [(1, "\n"), (3, "\r\n")])
def test_any_cut_gives_the_same_store(
    tmp_path: Path, matrices: tuple[Array, Array], small_pieces: int, threads: int, newline: str
) -> None:
    file = write_xmlrepo(tmp_path / "rows.txt", *matrices, newline=newline)
    fingerprints = set()
    for segment in (small_pieces, 230, 10**6):
        with InProcessExecutor(threads) as executor:
            dest = tmp_path / f"{segment}.zarr"
            import_dataset(file, dest, segment_bytes=segment, executor=executor)
        data = open_dataset(dest)
        fingerprints.add(data.fingerprint)
        assert_same(contents(data), matrices)
    assert len(fingerprints) == 1


def test_workers_of_a_cluster_import_the_same(
    xmlrepo: Path, tmp_path: Path, matrices: tuple[Array, Array], real_cluster: Executor
) -> None:
    import_dataset(xmlrepo, tmp_path / "d.zarr", segment_bytes=1500, executor=real_cluster)
    assert_same(contents(tmp_path / "d.zarr"), matrices)
    lines = xmlrepo.read_text().splitlines()
    lines[50], lines[90] = "x", "y"
    xmlrepo.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"line 51: 'x' is not a list of label numbers"):
        import_dataset(xmlrepo, tmp_path / "e.zarr", segment_bytes=1500, executor=real_cluster)
    assert no_store_at(tmp_path / "e.zarr")


@pytest.fixture
def real_cluster() -> Iterator[Executor]:
    """Two worker processes."""
    from distributed import Client, LocalCluster

    from dswml.dask_executor import DaskExecutor

    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, memory_limit=0, host="127.0.0.1"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
        DaskExecutor(client) as executor,
    ):
        yield executor


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "zst": zstandard.compress,
}


@pytest.mark.parametrize("ending", PACKERS)
def test_packed_text_is_read_directly(
    xmlrepo: Path, tmp_path: Path, matrices: tuple[Array, Array], small_pieces: int, ending: str
) -> None:
    half = len(xmlrepo.read_bytes()) // 2
    text = xmlrepo.read_bytes()
    packed = tmp_path / f"packed.txt.{ending}"
    packed.write_bytes(PACKERS[ending](text[:half]) + PACKERS[ending](text[half:]))
    (tmp_path / "packed.labels.txt").write_text("".join(f"label {k}\n" for k in range(12)))
    report = import_dataset(packed, tmp_path / "d.zarr", segment_bytes=small_pieces)
    assert report.format == "xmlrepo"
    data = open_dataset(tmp_path / "d.zarr")
    assert_same(contents(data), matrices)
    assert data.label_names == tuple(f"label {k}" for k in range(12))


@pytest.mark.parametrize("ending", PACKERS)
def test_a_damaged_archive_is_named(xmlrepo: Path, tmp_path: Path, ending: str) -> None:
    packed = tmp_path / f"cut.txt.{ending}"
    content = bytearray(PACKERS[ending](os.urandom(1000).hex().encode() * 50))
    packed.write_bytes(PACKERS[ending](xmlrepo.read_bytes())[:-20])
    with pytest.raises(DataError, match=r"cut off|cannot be unpacked"):
        import_dataset(packed, tmp_path / "d.zarr")
    content[len(content) // 2] ^= 0xFF
    packed.write_bytes(content)
    with pytest.raises(DataError):
        import_dataset(packed, tmp_path / "d.zarr", format="xmlrepo")
    assert no_store_at(tmp_path / "d.zarr")


def test_without_zstandard_the_extra_is_named(
    xmlrepo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "rows.txt.zst"
    packed.write_bytes(zstandard.compress(xmlrepo.read_bytes()))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match=re.escape("pip install 'dswml[zstd]'")):
        import_dataset(packed, tmp_path / "d.zarr")


def test_sources_and_stores_may_be_urls(xmlrepo: Path, matrices: tuple[Array, Array]) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe_file("/import/rows.txt", xmlrepo.read_bytes())
    fs.pipe_file("/import/rows.labels.txt", "\n".join("abcdefghijkl").encode())
    import_dataset("memory://import/rows.txt", "memory://import/d.zarr", segment_bytes=1000)
    data = open_dataset("memory://import/d.zarr")
    assert_same(contents(data), matrices)
    assert data.label_names == tuple("abcdefghijkl")


# Pieces

_layouts = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))


@settings(max_examples=200, deadline=None)
@given(
    batches=st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)), min_size=1
    ),
    units=_layouts,
    span=st.integers(1, 60),
)
def test_every_element_belongs_to_one_piece_that_reads_it(
    batches: list[tuple[int, int, int, int]], units: tuple[int, int, int], span: int
) -> None:
    ends = np.cumsum([(0, 0, 0, 0), *batches], axis=0)
    marks, totals = ends[:-1], ends[-1, 1:] + (1, 0, 0)
    layouts = [ArrayLayout(int(n), unit, unit) for n, unit in zip(totals, units, strict=True)]
    pieces = plan_pieces(marks, layouts, span)
    for stream, layout in enumerate(layouts):
        ranges = [piece.ranges[stream] for piece in pieces]
        covered = [element for start, stop in ranges for element in range(start, stop)]
        assert covered == list(range(layout.length))
        assert all(start % layout.unit == 0 or start == layout.length for start, _ in ranges)
    for piece in pieces:
        assert [piece.position, *piece.before] in marks.tolist()
        for before, (start, stop) in zip(piece.before, piece.ranges, strict=True):
            assert before <= start or start == stop


@settings(max_examples=200, deadline=None)
@given(
    unit=st.integers(1, 7),
    first_unit=st.integers(0, 3),
    n_units=st.integers(0, 4),
    pushes=st.lists(st.integers(0, 9)),
    total=st.integers(0, 40),
)
def test_a_buffer_hands_on_whole_units_of_its_own(
    unit: int, first_unit: int, n_units: int, pushes: list[int], total: int
) -> None:
    start, stop = (min(total, unit * n) for n in (first_unit, first_unit + n_units))
    written: dict[int, list[int]] = {}
    buffer = UnitBuffer(
        ArrayLayout(total, unit, unit),
        start,
        stop,
        [(np.int64, ())],
        lambda first, values: written.update({first: values.tolist()}),
    )
    at = 0
    for length in [*pushes, total]:
        buffer.push(at, np.arange(at, at + length))
        at += length
    assert written == {k: list(range(k, min(k + unit, stop))) for k in range(start, stop, unit)}
    assert buffer.written == stop


# Bad input


def spoil(path: Path, *changes: tuple[int, str]) -> None:
    lines = path.read_text().split("\n")
    for number, line in changes:
        lines[number - 1] = line
    path.write_text("\n".join(lines))


@pytest.mark.parametrize("packed", [False, True])
def test_the_first_bad_line_is_named_and_nothing_is_left(
    xmlrepo: Path, tmp_path: Path, small_pieces: int, packed: bool
) -> None:
    spoil(xmlrepo, (77, "3 1:2 5:oops 7:1"), (101, "nonsense"))
    if packed:
        xmlrepo.write_bytes(gzip.compress(xmlrepo.read_bytes()))
    with InProcessExecutor(3) as executor, pytest.raises(DataError) as raised:
        import_dataset(xmlrepo, tmp_path / "d.zarr", segment_bytes=small_pieces, executor=executor)
    assert f"{xmlrepo}, line 77: '5:oops' does not give a finite float32 number" in str(raised.value)
    assert "--on-error skip" in str(raised.value)
    assert no_store_at(tmp_path / "d.zarr")


@pytest.mark.parametrize("segment", [200, 10**6])
def test_bad_lines_can_be_skipped_and_are_counted(
    xmlrepo: Path, tmp_path: Path, matrices: tuple[Array, Array], small_pieces: int, segment: int
) -> None:
    spoil(xmlrepo, (2, "?"), (77, "3 1:2 5:oops 7:1"), (101, "3,3 1:1"))
    report = import_dataset(xmlrepo, tmp_path / "d.zarr", on_error="skip", segment_bytes=segment)
    assert report.n_skipped == 3
    assert [re.search(r"line (\d+)", line)[1] for line in report.skipped] == ["2", "77", "101"]  # type: ignore[index]
    kept = np.delete(np.arange(120), [0, 75, 99])
    assert_same(contents(tmp_path / "d.zarr"), (matrices[0][kept], matrices[1][kept]))


def test_a_source_of_bad_lines_alone_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "bad.txt"
    file.write_text("oops\n" * 50)
    with pytest.raises(DataError, match="holds no rows and 50 lines that were skipped"):
        import_dataset(file, tmp_path / "d.zarr", format="svmlight", on_error="skip")


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("121 30 12", "121 rows are declared, but 120 rows follow"),
        ("119 30 12", "119 rows are declared, but 120 rows follow"),
        (f"{10**15} 30 12", f"{10**15} rows are declared, but 120 rows follow"),
        (f"120 {10**15} 12", "more than 2147483647 or 33554432 cannot be imported"),
        (f"120 30 {10**15}", "more than 2147483647 or 33554432 cannot be imported"),
        ("120 29 12", "is not in 0..28"),
        ("120 30 11", "is not in 0..10"),
    ],
)
def test_a_header_must_be_true(xmlrepo: Path, tmp_path: Path, header: str, expected: str) -> None:
    spoil(xmlrepo, (1, header))
    with pytest.raises(DataError) as raised:
        import_dataset(xmlrepo, tmp_path / "d.zarr")
    assert expected in str(raised.value)
    assert no_store_at(tmp_path / "d.zarr")


@pytest.mark.parametrize("segment", [50, 10**6])
def test_empty_lines_at_the_end_are_no_rows(
    xmlrepo: Path, tmp_path: Path, matrices: tuple[Array, Array], segment: int
) -> None:
    xmlrepo.write_text(xmlrepo.read_text() + "\n\r\n\n")
    report = import_dataset(xmlrepo, tmp_path / "d.zarr", segment_bytes=segment)
    assert report.rows_without_label == int((matrices[1].sum(axis=1) == 0).sum())
    assert_same(contents(tmp_path / "d.zarr"), matrices)


@pytest.mark.parametrize("packed", [False, True])
def test_an_endless_line_is_an_error_and_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setattr(dswml.textfile, "MAX_LINE_BYTES", 2**20)
    file = tmp_path / "bomb.txt"
    start = b"2 3 4\n1 0:1\n"
    if packed:
        file.write_bytes(gzip.compress(start) + gzip.compress(bytes(50 * 2**20)))
    else:
        file.write_bytes(start)
        os.truncate(file, 2**33)
    with pytest.raises(DataError, match=r"the line that begins at byte \d+ of .* is longer than 1 MiB"):
        import_dataset(file, tmp_path / "d.zarr", format="xmlrepo", segment_bytes=2**32)
    assert no_store_at(tmp_path / "d.zarr")


def test_sources_that_hold_nothing_to_learn_are_refused(tmp_path: Path) -> None:
    cases = {
        "": "holds no rows",
        "# only\n# comments\n": "holds no rows",
        " 1:1\n 2:1\n": "no row of .* has a label",
        "1\n2,3\n": "no row of .* has a feature",
        "<html></html>\n": "cannot be told from its first line '<html></html>'",
    }
    for text, expected in cases.items():
        file = tmp_path / "empty.svm"
        file.write_text(text)
        with pytest.raises(DataError, match=expected):
            import_dataset(file, tmp_path / "d.zarr")
        assert no_store_at(tmp_path / "d.zarr")


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match=r"there is no file .*absent\.txt"):
        import_dataset(tmp_path / "absent.txt", tmp_path / "d.zarr")


def test_label_names_must_fit(xmlrepo: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.labels.txt").write_text("one\ntwo\n")
    with pytest.raises(DataError, match=r"has 2 label names, but .* declares 12 labels"):
        import_dataset(xmlrepo, tmp_path / "d.zarr")


@pytest.mark.parametrize(
    "options",
    [
        {"format": "csv"},
        {"normalize": "l1"},
        {"on_error": "ignore"},
        {"dtype": "float16"},
        {"overwrite": True, "resume": True},
        {"zero_based": True},
        {"segment_bytes": 0},
    ],
)
def test_wrong_options_are_refused(xmlrepo: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        import_dataset(xmlrepo, tmp_path / "d.zarr", **options)


# Existing stores, interruption


def test_an_existing_store_is_kept_unless_told_otherwise(xmlrepo: Path, tmp_path: Path) -> None:
    dest = tmp_path / "d.zarr"
    import_dataset(xmlrepo, dest)
    before = open_dataset(dest).fingerprint
    with pytest.raises(StoreExistsError, match="--overwrite"):
        import_dataset(xmlrepo, dest)
    with pytest.raises(StoreExistsError, match="complete"):
        import_dataset(xmlrepo, dest, resume=True)
    spoil(xmlrepo, (9, "bad"))
    with pytest.raises(DataError, match="line 9"):
        import_dataset(xmlrepo, dest, overwrite=True)
    assert open_dataset(dest).fingerprint == before
    import_dataset(xmlrepo, dest, overwrite=True, on_error="skip")
    assert open_dataset(dest).n_rows == 119


class Interrupt(Exception):
    """Stands for whatever stops a process."""


def interrupted_import(src: Path, dest: Path, segment: int, after: int, **options: Any) -> None:
    def stop(phase: str, done: int, total: int) -> None:
        if phase == "writing":
            assert total > after + 1
            if done > after:
                raise Interrupt

    with InProcessExecutor(1) as executor, pytest.raises(Interrupt):
        import_dataset(src, dest, segment_bytes=segment, on_progress=stop, executor=executor, **options)


@pytest.mark.parametrize("packed", [False, True])
def test_an_interrupted_import_goes_on_where_it_stopped(
    xmlrepo: Path, tmp_path: Path, matrices: tuple[Array, Array], small_pieces: int, packed: bool
) -> None:
    if packed:
        xmlrepo.write_bytes(gzip.compress(xmlrepo.read_bytes()))
    dest = tmp_path / "d.zarr"
    interrupted_import(xmlrepo, dest, small_pieces, after=3)
    with pytest.raises(IncompleteStoreError):
        open_dataset(dest)
    with pytest.raises(StoreExistsError, match="--resume"):
        import_dataset(xmlrepo, dest, segment_bytes=small_pieces)
    written: list[int] = []
    import_dataset(
        xmlrepo,
        dest,
        segment_bytes=small_pieces,
        resume=True,
        on_progress=lambda phase, done, total: written.append(done) if phase == "writing" else None,
    )
    assert written[0] >= 3
    assert_same(contents(dest), matrices)


KILLED = """
import os, signal, sys
import dswml.layout, dswml.textfile
from dswml.importers import import_dataset

dswml.textfile.SLICE_BYTES, dswml.layout.MIN_CHUNK_BYTES = 300, 400

def kill(phase, done, total):
    if phase == "writing" and done > 3:
        os.kill(os.getpid(), signal.SIGKILL)

import_dataset(sys.argv[1], sys.argv[2], segment_bytes=1000, on_progress=kill)
"""


def test_an_import_whose_process_was_killed_is_refused_and_goes_on(
    xmlrepo: Path, tmp_path: Path, matrices: tuple[Array, Array], small_pieces: int
) -> None:
    dest = tmp_path / "d.zarr"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(xmlrepo), str(dest)], check=False)
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(IncompleteStoreError):
        open_dataset(dest)
    import_dataset(xmlrepo, dest, segment_bytes=small_pieces, resume=True)
    import_dataset(xmlrepo, tmp_path / "whole.zarr", segment_bytes=small_pieces)
    assert_same(contents(dest), matrices)
    assert open_dataset(dest).fingerprint == open_dataset(tmp_path / "whole.zarr").fingerprint


def test_resuming_with_another_source_or_option_is_refused(
    xmlrepo: Path, tmp_path: Path, small_pieces: int
) -> None:
    dest = tmp_path / "d.zarr"
    interrupted_import(xmlrepo, dest, small_pieces, after=1)
    with pytest.raises(UsageError, match="begun with normalize = None, and now it is 'l2'"):
        import_dataset(xmlrepo, dest, segment_bytes=small_pieces, resume=True, normalize="l2")
    with pytest.raises(UsageError, match="begun with segment_bytes = 1000"):
        import_dataset(xmlrepo, dest, resume=True)
    os.utime(xmlrepo, (1, 1))
    with pytest.raises(UsageError, match="begun with modified = "):
        import_dataset(xmlrepo, dest, segment_bytes=small_pieces, resume=True)


def test_resuming_what_was_never_begun_begins(
    xmlrepo: Path, tmp_path: Path, matrices: tuple[Array, Array]
) -> None:
    import_dataset(xmlrepo, tmp_path / "d.zarr", resume=True)
    assert_same(contents(tmp_path / "d.zarr"), matrices)


def test_a_source_that_changes_on_the_way_is_no_data_set(xmlrepo: Path, tmp_path: Path) -> None:
    def grow(phase: str, done: int, total: int) -> None:
        if phase == "writing":
            xmlrepo.write_bytes(xmlrepo.read_bytes() + b" 1:1\n")

    with pytest.raises(DataError, match="changed while it was imported"):
        import_dataset(xmlrepo, tmp_path / "d.zarr", on_progress=grow)
    with pytest.raises(IncompleteStoreError):
        open_dataset(tmp_path / "d.zarr")


def test_progress_counts_up_to_the_end(xmlrepo: Path, tmp_path: Path, small_pieces: int) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}

    def note(phase: str, done: int, total: int) -> None:
        seen.setdefault(phase, []).append((done, total))

    import_dataset(xmlrepo, tmp_path / "d.zarr", segment_bytes=small_pieces, on_progress=note)
    assert list(seen) == ["reading", "writing"]
    for counts in seen.values():
        assert counts == sorted(counts)
        assert counts[-1][0] == counts[-1][1] > 3


# What is done to the data


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_are_scaled_to_unit_norm_and_it_is_recorded(
    xmlrepo: Path, tmp_path: Path, matrices: tuple[Array, Array], dtype: Any
) -> None:
    import_dataset(xmlrepo, tmp_path / "d.zarr", normalize="l2", dtype=dtype)
    data = open_dataset(tmp_path / "d.zarr")
    # The text holds the shortest decimals of float32 values.
    x = np.array([[float(str(value)) for value in row] for row in matrices[0]])
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    expected = x / np.where(norms == 0, 1, norms)
    assert data.normalize == "l2"
    assert data.x_dtype == dtype
    np.testing.assert_allclose(contents(data)[0], expected, rtol=2 * np.finfo(dtype).eps)
    assert data.attrs["source"]["options"]["normalize"] == "l2"


def test_values_beyond_float32_need_float64_or_scaling(tmp_path: Path) -> None:
    file = tmp_path / "large.svm"
    file.write_text("0 0:3e200 1:4e200\n1 0:1\n")
    with pytest.raises(DataError, match="'0:3e200' does not give a finite float32 number"):
        import_dataset(file, tmp_path / "d.zarr")
    import_dataset(file, tmp_path / "d64.zarr", dtype="float64")
    assert contents(tmp_path / "d64.zarr")[0].tolist() == [[3e200, 4e200], [1, 0]]
    import_dataset(file, tmp_path / "l2.zarr", normalize="l2")
    np.testing.assert_allclose(contents(tmp_path / "l2.zarr")[0], [[0.6, 0.8], [1.0, 0.0]], rtol=1e-6)


# Formats


@pytest.mark.parametrize("zero_based", [True, False])
@pytest.mark.parametrize("comment", [None, "made for a test"])
@pytest.mark.parametrize("query", [False, True])
def test_svmlight_is_read_as_scikit_learn_reads_it(
    tmp_path: Path, matrices: tuple[Array, Array], zero_based: bool, comment: str | None, query: bool
) -> None:
    x, y = matrices
    x = x.astype(np.float64)
    y[0, :] = x[0, :] = 0
    y[0, 3] = x[0, 0] = 1  # so that scikit-learn, too, sees the first feature
    file = tmp_path / "rows.svm"
    query_id = np.arange(len(x)) if query else None
    dump_svmlight_file(
        sp.csr_matrix(x),
        y,
        str(file),
        zero_based=zero_based,
        comment=comment,
        query_id=query_id,
        multilabel=True,
    )
    report = import_dataset(file, tmp_path / "d.zarr", dtype="float64")
    assert report.format == "svmlight"
    assert report.zero_based is zero_based
    got_x, got_y = contents(tmp_path / "d.zarr")
    np.testing.assert_allclose(got_x, x, rtol=1e-15)
    np.testing.assert_array_equal(got_y, y)
    # scikit-learn loses rows that have nothing, not even a query.
    featured = (x != 0).any(axis=1) | (y != 0).any(axis=1) | query
    theirs, labels = load_svmlight_file(str(file), multilabel=True)
    np.testing.assert_array_equal(got_x[featured], theirs.toarray())
    ours = [tuple(float(k) for k in np.flatnonzero(row)) for row in got_y[featured]]
    assert ours == labels


def test_the_numbering_of_svmlight_can_be_told(tmp_path: Path) -> None:
    file = tmp_path / "rows.svm"
    file.write_text("0 1:5 2:6\n1 2:7\n")
    assert import_dataset(file, tmp_path / "auto.zarr").n_features == 2
    assert import_dataset(file, tmp_path / "zero.zarr", zero_based=True).n_features == 3
    assert import_dataset(file, tmp_path / "one.zarr", zero_based=False).n_features == 2
    assert contents(tmp_path / "one.zarr")[0].tolist() == [[5, 6], [0, 7]]
    file.write_text("0 0:5 2:6\n1 2:7\n")
    with pytest.raises(DataError, match=r"line 1: feature 0 is not in 1\.\."):
        import_dataset(file, tmp_path / "wrong.zarr", zero_based=False)


def test_svmlight_label_names_bound_the_labels(tmp_path: Path) -> None:
    file = tmp_path / "rows-test.svm"
    file.write_text("0 1:5 2:6\n1 2:7\n")
    (tmp_path / "rows.labels.txt").write_text("a\nb\nc\n")
    report = import_dataset(file, tmp_path / "d.zarr")
    assert (report.n_labels, report.labels_without_positive) == (3, 1)
    assert open_dataset(tmp_path / "d.zarr").label_names == ("a", "b", "c")
    (tmp_path / "two.txt").write_text("a\n")
    with pytest.raises(DataError, match=r"line 2: label 1 is not in 0\.\.0"):
        import_dataset(file, tmp_path / "e.zarr", labels=tmp_path / "two.txt")


def test_arff_needs_to_be_told_its_labels(tmp_path: Path) -> None:
    file = tmp_path / "a.arff"
    file.write_text("@relation r\n@attribute x real\n@attribute 'the l' {0,1}\n@data\n0.5,1\n1.5,0\n")
    with pytest.raises(UsageError, match="--labels"):
        import_dataset(file, tmp_path / "d.zarr")
    (tmp_path / "names.txt").write_text("the l\n")
    report = import_dataset(file, tmp_path / "d.zarr", labels=tmp_path / "names.txt")
    assert (report.n_features, report.n_labels) == (1, 1)
    data = open_dataset(tmp_path / "d.zarr")
    assert data.feature_names == ("x",)
    assert not data.is_sparse
    assert_same(contents(data), (np.array([[0.5], [1.5]]), np.array([[1], [0]])))


def test_bad_lines_of_arff_are_numbered_from_the_top_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.arff"
    file.write_text("% c\n@relation r\n@attribute x real\n@attribute l {0,1}\n\n@data\n% c\n1,1\n1,?\n")
    (tmp_path / "a.xml").write_text("<labels><label name='l'/></labels>")
    with pytest.raises(DataError, match=r"a\.arff, line 9: the value of 'l' is missing"):
        import_dataset(file, tmp_path / "d.zarr")


def save(path: Path, matrix: Array, kind: str) -> None:
    if kind == "npy":
        np.save(path, matrix)
    elif kind == "fortran":
        np.save(path, np.asfortranarray(matrix))
    else:
        sp.save_npz(path, sp.csr_array(matrix), compressed=kind == "npz")


@pytest.mark.parametrize("x_kind", ["npy", "fortran", "npz", "stored"])
@pytest.mark.parametrize("y_kind", ["npy", "npz"])
def test_pairs_of_matrices_come_in(
    tmp_path: Path,
    matrices: tuple[Array, Array],
    monkeypatch: pytest.MonkeyPatch,
    small_pieces: int,
    x_kind: str,
    y_kind: str,
) -> None:
    monkeypatch.setattr("dswml.matrices.BATCH_BYTES", 2000)
    endings = {"npy": "npy", "fortran": "npy", "npz": "npz", "stored": "npz"}
    src = tmp_path / f"X_train.{endings[x_kind]}"
    save(src, matrices[0], x_kind)
    save(tmp_path / f"Y_train.{endings[y_kind]}", matrices[1], y_kind)
    report = import_dataset(src, tmp_path / "d.zarr", segment_bytes=5000)
    assert report.format == endings[x_kind]
    data = open_dataset(tmp_path / "d.zarr")
    assert data.is_sparse == (endings[x_kind] == "npz")
    assert_same(contents(data), matrices)


def test_matrices_that_do_not_fit_are_refused(tmp_path: Path, matrices: tuple[Array, Array]) -> None:
    x, y = tmp_path / "x.npy", tmp_path / "labels.npy"
    np.save(x, matrices[0])

    def refused(match: str, error: type[Exception] = DataError) -> None:
        with pytest.raises(error, match=match):
            import_dataset(x, tmp_path / "d.zarr", labels=y if y.exists() else None)
        assert no_store_at(tmp_path / "d.zarr")

    refused("name it with --labels", UsageError)
    np.save(y, matrices[1][:-1])
    refused("has 120 rows and .* has 119")
    np.save(y, matrices[1] * 2)
    refused("every label must be 0 or 1")
    np.save(y, np.array([["a"] * 3] * 120))
    refused("a matrix of numbers must be there")
    np.save(y, matrices[1])
    np.save(x, np.where(matrices[0] == 0, np.nan, matrices[0]))
    refused("row 0, column 0 of X .* is nan")
    np.save(x, np.full((120, 2), 1e300))
    refused("1e[+]300 .* which float32 cannot hold")


def test_nothing_in_a_file_is_executed(tmp_path: Path, matrices: tuple[Array, Array]) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    objects = np.array([[Payload()]], dtype=object)
    np.save(tmp_path / "Y.npy", matrices[1])
    np.save(tmp_path / "X.npy", objects, allow_pickle=True)
    with pytest.raises(DataError, match="cannot be read as a NumPy array of numbers"):
        import_dataset(tmp_path / "X.npy", tmp_path / "d.zarr")
    np.savez(tmp_path / "X.npz", format=np.array(b"csr"), shape=[1, 1], indptr=objects, allow_pickle=True)
    with pytest.raises(DataError, match="holds objects"):
        import_dataset(tmp_path / "X.npz", tmp_path / "d.zarr")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"format": np.array(b"csc")}, "format 'csc': save it again"),
        ({"shape": np.array([10**15, 3])}, "5 row starts for 1000000000000000 rows"),
        ({"indptr": np.array([0, 2, 1, 3, 3])}, "do not rise from 0"),
        ({"indptr": np.array([0, 1, 2, 3, 9])}, r"data in .* has shape \(3,\), not \(9,\)"),
        ({"indices": np.array([0, 1, 7])}, "are no CSR matrix|outside"),
        ({"indices": np.array([0, -1, 2])}, "are no CSR matrix|outside"),
        ({"data": np.array([1.0, np.inf, 1.0])}, "every feature must be a finite number"),
    ],
)
def test_damaged_npz_files_are_refused(tmp_path: Path, members: dict[str, Array], expected: str) -> None:
    whole = sp.csr_array(np.eye(4, 3))
    parts = {"data": whole.data, "indices": whole.indices, "indptr": whole.indptr}
    parts |= {"format": np.array(b"csr"), "shape": np.array([4, 3])}
    np.savez(tmp_path / "X.npz", **(parts | members))
    np.save(tmp_path / "Y.npy", np.eye(4, 2))
    with pytest.raises(DataError, match=expected):
        import_dataset(tmp_path / "X.npz", tmp_path / "d.zarr")


def write_anndata(adata: anndata.AnnData, path: Path, zarr_format: int) -> None:
    with anndata.settings.override(zarr_write_format=zarr_format), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # AnnData's own news about its defaults
        adata.write_zarr(path)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("kind", ["dense", "csr", "frame"])
def test_anndata_stores_come_in(
    tmp_path: Path, matrices: tuple[Array, Array], kind: str, zarr_format: int
) -> None:
    x, y = matrices
    names = [f"label {k}" for k in range(y.shape[1])]
    rows = [f"row {k}" for k in range(len(x))]
    labels: Any = {"dense": y, "csr": sp.csr_matrix(y), "frame": pd.DataFrame(y == 1, rows, names)}[kind]
    adata = anndata.AnnData(
        sp.csr_matrix(x) if kind == "csr" else x,
        obs=pd.DataFrame(index=rows),
        var=pd.DataFrame(index=[f"gene {k}" for k in range(x.shape[1])]),
        obsm={"Y": labels},
    )
    write_anndata(adata, tmp_path / "a.zarr", zarr_format)
    report = import_dataset(tmp_path / "a.zarr", tmp_path / "d.zarr", segment_bytes=5000)
    assert report.format == "anndata"
    data = open_dataset(tmp_path / "d.zarr")
    assert_same(contents(data), matrices)
    assert data.is_sparse == (kind == "csr")
    assert data.feature_names is not None
    assert data.feature_names[3] == "gene 3"
    assert data.label_names == (tuple(names) if kind == "frame" else None)


def test_the_labels_of_anndata_may_be_elsewhere(tmp_path: Path, matrices: tuple[Array, Array]) -> None:
    import zarr

    x, y = matrices
    names = pd.DataFrame(index=[str(k) for k in range(len(x))])
    write_anndata(anndata.AnnData(x, obs=names, obsm={"tags": y}), tmp_path / "a.zarr", 3)
    other = zarr.create_array(tmp_path / "y.zarr", data=y, chunks=(50, 12))
    assert other.shape == y.shape
    with pytest.raises(UsageError, match="no labels at obsm/Y; its obsm holds tags"):
        import_dataset(tmp_path / "a.zarr", tmp_path / "d.zarr")
    for number, labels in enumerate(("tags", "obsm/tags", str(tmp_path / "y.zarr"))):
        import_dataset(tmp_path / "a.zarr", tmp_path / f"{number}.zarr", labels=labels)
        assert_same(contents(tmp_path / f"{number}.zarr"), matrices)


def test_formats_are_told_from_content(tmp_path: Path) -> None:
    cases = {
        b"3 10 2\n1 2:3\n": "xmlrepo",
        b"\xef\xbb\xbf3 10 2\r\n": "xmlrepo",
        b"# comment\n1,2 3:4\n": "svmlight",
        b" 3:4.5e-3 7:1\n": "svmlight",
        b"5:1 6:1\n": "svmlight",
        b"1 qid:3 5:1 # x\n": "svmlight",
        b"% c\n\n@RELATION x\n": "arff",
    }
    for content, expected in cases.items():
        for pack in (bytes, gzip.compress):
            file = tmp_path / "some.file"
            file.write_bytes(pack(content))
            assert detect_format(file) == expected
    np.save(tmp_path / "a.npy", np.eye(2))
    sp.save_npz(tmp_path / "a.npz", sp.csr_array(np.eye(2)))
    assert detect_format(tmp_path / "a.npy") == "npy"
    assert detect_format(tmp_path / "a.npz") == "npz"


def test_what_cannot_be_imported_is_told_with_a_way_out(xmlrepo: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.h5ad").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    import_dataset(xmlrepo, tmp_path / "d.zarr")
    cases = {
        "folder": "is a folder and no Zarr store",
        "a.h5ad": "save it with write_zarr",
        "d.zarr": "is a data set already",
    }
    for name, expected in cases.items():
        with pytest.raises((DataError, UsageError), match=expected):
            import_dataset(tmp_path / name, tmp_path / "e.zarr")


def test_the_report_tells_what_is_in_the_store(xmlrepo: Path, tmp_path: Path) -> None:
    report = import_dataset(xmlrepo, tmp_path / "d.zarr")
    data = open_dataset(tmp_path / "d.zarr")
    assert isinstance(report, ImportReport)
    for name in ("n_rows", "n_features", "n_labels", "nnz_x", "nnz_y", "k_hat", "normalize", "url"):
        assert getattr(report, name) == getattr(data, name)
    assert data.attrs["source"]["path"] == str(xmlrepo)
    assert data.attrs["source"]["size"] == xmlrepo.stat().st_size


# Memory and speed

PEAK = """
import sys
from pathlib import Path
from dswml.executor import InProcessExecutor
from dswml.importers import import_dataset

def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024

with InProcessExecutor(2) as executor:
    import_dataset(sys.argv[1], sys.argv[3], executor=executor)
    before = peak()
    import_dataset(sys.argv[2], sys.argv[3], executor=executor, overwrite=True)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, matrices: tuple[Array, Array], packed: bool
) -> None:
    rows = write_xmlrepo(tmp_path / "rows.txt", *matrices).read_bytes().partition(b"\n")[2]
    files, sizes = [tmp_path / "small.svm", tmp_path / "large.svm"], (64, 400)  # both fill all buffers
    for file, mib in zip(files, sizes, strict=True):
        text = rows * (mib * 2**20 // len(rows))
        file.write_bytes(gzip.compress(text, 1) if packed else text)
    command = [sys.executable, "-c", PEAK, *map(str, files), str(tmp_path / "d.zarr")]
    growth = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    assert int(growth) < (sizes[1] - sizes[0]) / 3, "what is held of every row is small beside its text"


@pytest.mark.slow
def test_the_benchmark_runs() -> None:
    script = Path(__file__).parent.parent / "scripts" / "bench-import"
    command = [sys.executable, str(script), "--mib", "1", "--limit-mib", "0"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert output.count("| dswml import,") == 2
