"""What a source is and what belongs to it: the format found from content, companion files found by name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import zarr

from dswml.arff import arff_rows, parse_label_names, read_arff_header
from dswml.errors import DataError, UsageError, telling
from dswml.matrices import MatrixFile, MatrixRows, NoLabelsFile, NpyFile, NpzFile, ZarrMatrix, check_room
from dswml.rows import MAX_FEATURES, MAX_LABELS, SVMLIGHT, XMLREPO, LabelledRows
from dswml.storage import absolute_url, filesystem
from dswml.survey import RowSource
from dswml.textfile import SLICE_BYTES, TextFile, TextRows, identity

__all__ = ["FORMATS", "Prepared", "detect_format", "prepare"]

FORMATS = ("xmlrepo", "svmlight", "arff", "npz", "npy", "anndata")

#: What says more about the labels; False where there are none.
Labels = str | os.PathLike[str] | Literal[False] | None

#: Largest companion file (label names, XML), and largest header of an ARFF file.
MAX_COMPANION_BYTES = 256 * 2**20

_BOM = b"\xef\xbb\xbf"
_HEADER = re.compile(rb"\s*(\d+)[ \t]+(\d+)[ \t]+(\d+)\s*")
_FIRST_ROW = re.compile(rb"(?:\d+(?:,\d+)*)?(?:[ \t]+(?:qid:\d+|\d+:[-+.\deE]+))*[ \t]*(?:#.*)?|\d+:.*")
_SPLIT = re.compile(r"[-_.](train|test|valid|validation|dev)$")
_ZARR_ROOTS = ("zarr.json", ".zgroup", ".zarray")


@dataclass(frozen=True)
class Prepared:
    """A source ready to be read, and what is known of it beforehand.

    Attributes
    ----------
    format : str
        One of `FORMATS`.
    source : RowSource
        The rows.
    n_rows, n_features, n_labels : int or None
        Where the file itself declares them.
    label_names, feature_names : tuple of str or None
    dense : bool
        Whether X is stored dense.
    base : {0, 1, "auto"}
        Number of the first feature in svmlight text.
    companions : tuple of dict
        Which other files were used, with size and time of change.
    """

    format: str
    source: RowSource
    n_rows: int | None = None
    n_features: int | None = None
    n_labels: int | None = None
    label_names: tuple[str, ...] | None = None
    feature_names: tuple[str, ...] | None = None
    dense: bool = False
    base: int | Literal["auto"] = 0
    companions: tuple[Mapping[str, Any], ...] = field(default=())


def detect_format(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> str:
    """Tell the format of a file or store from what is in it.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "rows.txt")
    ...     _ = file.write_text("2 10 5\\n0,3 1:0.5 7:2\\n 2:1\\n")
    ...     detect_format(file)
    'xmlrepo'
    """
    place = absolute_url(url)
    fs, path = filesystem(place, storage_options)
    if fs.isdir(path):
        if any(fs.exists(f"{path}/{root}") for root in _ZARR_ROOTS):
            return "anndata"
        raise DataError(f"{place} is a folder and no Zarr store: name a file in it")
    head = TextFile.open(place, storage_options).head(SLICE_BYTES).removeprefix(_BOM)
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if head.startswith(b"PK\x03\x04"):
        return "npz"
    if head.startswith(b"\x89HDF\r\n"):
        raise DataError(f"{place} is an HDF5 file: read it with anndata and save it with write_zarr")
    lines = head.split(b"\n")
    if _HEADER.fullmatch(lines[0]):
        return "xmlrepo"
    for line in lines:
        content = line.strip()
        if re.match(rb"@(relation|attribute|data)\b", content, re.IGNORECASE):
            return "arff"
        if not content or content.startswith((b"%", b"#")):
            continue
        if _FIRST_ROW.fullmatch(line.rstrip(b"\r")):
            return "svmlight"
        shown = content[:60].decode("utf-8", "replace")
        raise DataError(
            f"the format of {place} cannot be told from its first line {shown!r}: "
            f"name it with --format (format=), one of {', '.join(FORMATS)}"
        )
    raise DataError(f"{place} holds no rows")


def prepare(
    src: str | os.PathLike[str],
    *,
    format: str = "auto",
    labels: Labels = None,
    zero_based: bool | Literal["auto"] = "auto",
    dtype: str = "float32",
    storage_options: Mapping[str, Any] | None = None,
) -> Prepared:
    """Open a source; the arguments are those of `dswml.importers.import_dataset`."""
    if format != "auto" and format not in FORMATS:
        raise UsageError(f"the format {format!r} is not known: it is auto or one of {', '.join(FORMATS)}")
    place = absolute_url(src)
    options = dict(storage_options or {})
    kind = detect_format(place, options) if format == "auto" else format
    if zero_based != "auto" and kind != "svmlight":
        raise UsageError(f"zero_based is for svmlight text, and {place} is {kind}")
    if kind in ("npz", "npy"):
        return _prepare_matrices(place, kind, labels, dtype)
    if kind == "anndata":
        with telling(f"{place} is damaged, or not what AnnData writes"):
            return _prepare_anndata(place, labels, dtype, options)
    file = TextFile.open(place, options)
    if kind == "arff":
        return _prepare_arff(file, labels, dtype)
    names, companions = (None, ()) if labels is False else _label_names(file, labels, ".labels.txt")
    if kind == "xmlrepo":
        return _prepare_xmlrepo(file, names, companions, dtype)
    return _prepare_svmlight(file, names, companions, zero_based, dtype)


# Companions


def _companion(file_url: str, suffix: str, options: Mapping[str, Any]) -> str | None:
    """Find the file of the same name with another ending, also beside the halves of a split."""
    folder, _, name = file_url.rpartition("/")
    stem = re.sub(r"\.(gz|bz2|zst)$", "", name)
    stem = stem.rpartition(".")[0] or stem
    fs, _ = filesystem(file_url, options)
    for candidate in dict.fromkeys((stem, _SPLIT.sub("", stem))):
        url = f"{folder}/{candidate}{suffix}"
        if fs.exists(filesystem(url, options)[1]):
            return url
    return None


def _read_companion(url: str, options: Mapping[str, Any]) -> tuple[bytes, Mapping[str, Any]]:
    known = identity(url, options)
    if known["size"] > MAX_COMPANION_BYTES:
        raise DataError(f"{url} has {known['size']} bytes: is it a list of label names?")
    return TextFile(url, known["size"], None, options).read(0, known["size"]), known


def _label_names(
    file: TextFile, labels: str | os.PathLike[str] | None, suffix: str
) -> tuple[tuple[str, ...] | None, tuple[Mapping[str, Any], ...]]:
    options = file.storage_options
    url = absolute_url(labels) if labels is not None else _companion(file.url, suffix, options)
    if url is None:
        return None, ()
    content, known = _read_companion(url, options)
    return parse_label_names(content, place=url), (known,)


# Text


def _prepare_xmlrepo(
    file: TextFile,
    names: tuple[str, ...] | None,
    companions: tuple[Mapping[str, Any], ...],
    dtype: str,
) -> Prepared:
    first, newline, _ = file.head(4096).partition(b"\n")
    match = _HEADER.fullmatch(first.removeprefix(_BOM))
    if match is None:
        shown = first[:60].decode("utf-8", "replace")
        raise DataError(
            f"{file.url}, line 1: {shown!r} is not a header with the numbers of rows, features and labels"
        )
    n_rows, n_features, n_labels = (int(number) for number in match.groups())
    if n_features > MAX_FEATURES or n_labels > MAX_LABELS:
        raise DataError(
            f"{file.url}, line 1: {n_features} features and {n_labels} labels are declared; "
            f"more than {MAX_FEATURES} or {MAX_LABELS} cannot be imported"
        )
    if names is not None and len(names) != n_labels:
        raise DataError(
            f"{companions[0]['path']} has {len(names)} label names, but {file.url} declares {n_labels} labels"
        )
    rows = TextRows(
        file,
        LabelledRows(XMLREPO, n_features, n_labels, 0, dtype),
        first_byte=len(first) + len(newline),
        first_line=2,
    )
    return Prepared("xmlrepo", rows, n_rows, n_features, n_labels, label_names=names, companions=companions)


def _prepare_svmlight(
    file: TextFile,
    names: tuple[str, ...] | None,
    companions: tuple[Mapping[str, Any], ...],
    zero_based: bool | Literal["auto"],
    dtype: str,
) -> Prepared:
    head = file.head(4096)
    base: int | Literal["auto"] = "auto" if zero_based == "auto" else int(not zero_based)
    said = re.match(rb"(?:#.*\n)*?#\s*Column indices are (zero|one)-based", head.removeprefix(_BOM))
    if base == "auto" and said:
        base = int(said[1] == b"one")
    rows = TextRows(
        file,
        LabelledRows(
            SVMLIGHT,
            n_labels=MAX_LABELS if names is None else len(names),
            base=0 if base == "auto" else base,
            dtype=dtype,
        ),
        first_byte=len(_BOM) if head.startswith(_BOM) else 0,
    )
    return Prepared(
        "svmlight",
        rows,
        n_labels=None if names is None else len(names),
        label_names=names,
        base=base,
        companions=companions,
    )


def _prepare_arff(file: TextFile, labels: Labels, dtype: str) -> Prepared:
    header = read_arff_header(file.lines(), place=file.url, max_bytes=MAX_COMPANION_BYTES)
    names, companions = ((), ()) if labels is False else _label_names(file, labels, ".xml")
    if names is None:
        raise UsageError(
            f"{file.url} does not say which attributes are labels, and no XML of the same name is beside it: "
            "name Mulan's XML with --labels (labels=), or say that there are none with --no-labels "
            "(labels=False)"
        )
    sparse = False
    for number, line in enumerate(file.lines()):
        content = line.strip()
        if number >= header.n_lines and content and not content.startswith(b"%"):
            sparse = content.startswith(b"{")
            break
    parser, feature_names = arff_rows(header, names, sparse=sparse, dtype=dtype, place=file.url)
    return Prepared(
        "arff",
        TextRows(file, parser, header.n_bytes, header.n_lines + 1),
        n_features=len(feature_names),
        n_labels=len(names),
        label_names=names,
        feature_names=feature_names,
        dense=not sparse,
        companions=companions,
    )


# Matrices


def _matrix_file(url: str) -> MatrixFile:
    if "://" in url:
        raise UsageError(f"{url}: .npy and .npz files are read from local disks alone; copy it here first")
    file = TextFile.open(url)
    magic = file.read(0, 6)
    if magic == b"\x93NUMPY":
        return NpyFile(url)
    if magic.startswith(b"PK"):
        return NpzFile(url)
    raise DataError(f"{url} is neither a .npy nor a .npz file")


def _prepare_matrices(place: str, kind: str, labels: Labels, dtype: str) -> Prepared:
    if labels is False:
        x = _matrix_file(place)
        return _prepared_pair(kind, x, NoLabelsFile(place, x.shape[0]), dtype)
    if labels is None:
        url = _labels_beside(place)
        if url is None:
            raise UsageError(
                f"no file with the labels was found beside {place} (its name with Y for X): "
                "name it with --labels (labels=), or say that there is none with --no-labels (labels=False)"
            )
    else:
        url = absolute_url(labels)
    x, y = _matrix_file(place), _matrix_file(url)
    return _prepared_pair(kind, x, y, dtype, (identity(url, {}),))


def _labels_beside(place: str) -> str | None:
    folder, name = os.path.split(place)
    stem, _ = os.path.splitext(name)
    for pattern, letter in ((r"(?<![A-Za-z])X(?![A-Za-z])", "Y"), (r"(?<![A-Za-z])x(?![A-Za-z])", "y")):
        other, found = re.subn(pattern, letter, stem, count=1)
        candidates = [os.path.join(folder, other + ending) for ending in (".npz", ".npy")]
        there = [path for path in candidates if found and os.path.exists(path)]
        if there:
            return there[0]
    return None


def _prepared_pair(
    kind: str,
    x: MatrixFile,
    y: MatrixFile,
    dtype: str,
    companions: tuple[Mapping[str, Any], ...] = (),
    feature_names: tuple[str, ...] | None = None,
    label_names: tuple[str, ...] | None = None,
) -> Prepared:
    (n_rows, n_features), (_, n_labels) = x.shape, y.shape
    return Prepared(
        kind,
        MatrixRows(x, y, dtype),
        n_rows,
        n_features,
        n_labels,
        label_names=label_names,
        feature_names=feature_names,
        dense=x.nnz is None,
        companions=companions,
    )


def _prepare_anndata(place: str, labels: Labels, dtype: str, options: Mapping[str, Any]) -> Prepared:
    root = _open_anndata(place, options)
    if "X" not in root:
        raise DataError(f"{place} has no X")
    x = ZarrMatrix(place, "X", options)
    feature_names = _index_names(root, "var", x.shape[1])
    if labels is False:
        return _prepared_pair("anndata", x, NoLabelsFile(place, x.shape[0]), dtype, (), feature_names)
    where = "obsm/Y" if labels is None else os.fspath(labels)
    paths = [path for path in (where, f"obsm/{where}") if path in root]
    if paths:
        y = ZarrMatrix(place, paths[0], options)
    elif labels is not None and filesystem(where, options)[0].exists(filesystem(where, options)[1]):
        y = ZarrMatrix(absolute_url(where), "", options)
    else:
        obsm = root.get("obsm")
        there = sorted(obsm.keys()) if isinstance(obsm, zarr.Group) else []
        raise UsageError(
            f"{place} has no labels at {where}; its obsm holds {', '.join(there) or 'nothing'}: "
            "say where they are with --labels (labels=), in the store or in another, or that there are none "
            "with --no-labels (labels=False)"
        )
    return _prepared_pair("anndata", x, y, dtype, (), feature_names, y.columns)


def _open_anndata(place: str, options: Mapping[str, Any]) -> zarr.Group:
    with telling(f"{place} cannot be opened as a Zarr group"):
        root = zarr.open_group(place, mode="r", storage_options=dict(options) or None)
    attrs = dict(root.attrs)
    if attrs.get("format") == "dswml-dataset":
        raise UsageError(f"{place} is a data set already: there is nothing to import")
    if attrs.get("encoding-type") != "anndata":
        raise DataError(f"{place} is a Zarr group, but not one that AnnData wrote")
    return root


def _index_names(root: zarr.Group, table: str, n_features: int) -> tuple[str, ...] | None:
    """Return the index of one of AnnData's tables, if it is of strings."""
    group = root.get(table)
    if not isinstance(group, zarr.Group):
        return None
    index = group.get(str(group.attrs.get("_index")))
    if isinstance(index, zarr.Group):  # nullable strings, as AnnData 0.13 writes them: values and a mask
        index = index.get("values")
    if not isinstance(index, zarr.Array) or index.shape != (n_features,):
        return None
    check_room(index.nbytes, f"the names in {table} of {root.store}")
    values: Sequence[Any] = np.asarray(index[:]).tolist()
    return tuple(values) if all(isinstance(value, str) for value in values) else None
