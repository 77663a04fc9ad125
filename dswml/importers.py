"""Takes the data sets people have into a store: read once to check and count, read again to write."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from dswml.errors import DataError, DswmlError, StoreExistsError, UsageError, telling
from dswml.executor import Executor, InProcessExecutor
from dswml.filling import fill_piece, fill_pieces
from dswml.formats import FORMATS, Labels, Prepared, prepare
from dswml.pieces import plan_pieces
from dswml.rows import LabelledRows
from dswml.storage import absolute_url, filesystem, open_group, store_exists
from dswml.survey import BadLineMet, RowSource, Survey, combine_surveys, survey_span
from dswml.textfile import TextRows, identity
from dswml.writer import DatasetWriter

__all__ = ["FORMATS", "SEGMENT_BYTES", "ImportReport", "import_dataset"]

#: Bytes of the source that one task reads: some tenths of a second of work.
SEGMENT_BYTES = 32 * 2**20

OnProgress = Callable[[str, int, int], None]
Normalize = Literal["l2"] | None


@dataclass(frozen=True)
class ImportReport:
    """What was imported.

    Attributes
    ----------
    source, url : str
        Where the data came from and where they are now.
    format : str
        Format of the source.
    n_rows, n_features, n_labels, nnz_x, nnz_y, k_hat : int
        As in the data set.
    rows_without_label, rows_without_feature : int
        Rows of zeros in Y and in X; they are kept.
    labels_without_positive : int
        Labels that no row carries.
    n_skipped : int
        Lines that were left out.
    skipped : tuple of str
        What was wrong with the first of them.
    zero_based : bool or None
        How the features of svmlight text were numbered.
    normalize : None or "l2"
        What was done to the rows of X.
    seconds : float
        Time taken.
    """

    source: str
    url: str
    format: str
    n_rows: int
    n_features: int
    n_labels: int
    nnz_x: int
    nnz_y: int
    k_hat: int
    rows_without_label: int
    rows_without_feature: int
    labels_without_positive: int
    n_skipped: int
    skipped: tuple[str, ...]
    zero_based: bool | None
    normalize: Normalize
    seconds: float


def import_dataset(
    src: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    format: str = "auto",
    labels: Labels = None,
    normalize: Normalize = None,
    on_error: Literal["raise", "skip"] = "raise",
    overwrite: bool = False,
    resume: bool = False,
    zero_based: bool | Literal["auto"] = "auto",
    dtype: Literal["float32", "float64"] = "float32",
    segment_bytes: int = SEGMENT_BYTES,
    executor: Executor | None = None,
    on_progress: OnProgress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ImportReport:
    """Import a file into a new data set.

    The source is read twice, in parallel byte ranges where it is not compressed: first every line is
    checked and counted, then the store is made and filled. So a bad line is found before anything is written.

    Parameters
    ----------
    src : str or path
        Text in the Extreme Classification Repository's format (``xmlrepo``), multi-label ``svmlight`` or
        Mulan's ``arff``, plain or packed with gzip, bzip2 or zstd, at a path or fsspec URL; or a local
        ``.npz`` (SciPy CSR) or ``.npy`` file; or an AnnData Zarr store. The workers of an executor must be
        able to open it too.
    dest : str or path
        Where the store is to be.
    format : str
        One of `FORMATS`; by default found from the content.
    labels : str, path or False, optional
        False: the rows have none, and are to be predicted alone. Otherwise what says more about the labels.
        For ``arff``: Mulan's XML, or a text with one name a line; without it the ``.xml`` of the same name
        (``name.xml`` for ``name-train.arff`` too). For ``xmlrepo`` and ``svmlight``: label names, one a
        line; without it ``name.labels.txt``, if there is one. For ``npz`` and ``npy``: the file with Y;
        without it the name with Y for X. For ``anndata``: a member of ``obsm`` (dense, CSR or data frame)
        or the path of another Zarr store; without it ``obsm/Y``.
    normalize : None or "l2"
        Scale the rows of X to unit Euclidean norm, in float64, before they are stored.
    on_error : {"raise", "skip"}
        What to do with a malformed line of text; in matrices a wrong value is always an error.
    overwrite : bool
        Replace what is at `dest`, once the source has been read without error.
    resume : bool
        Go on with an import that was interrupted; source and options must be the same.
    zero_based : bool or "auto"
        Whether svmlight features are numbered from 0. "auto" follows the comment that scikit-learn writes,
        and without it takes them to begin with 1 if no row has feature 0. Labels always count from 0.
    dtype : {"float32", "float64"}
        Type of X in the store.
    segment_bytes : int
        Bytes of the source that a task reads. Its memory is bounded by a few MiB of text and one chunk of
        each array, whatever this is; only a single line (16 MiB at most) can take more.
    executor : Executor, optional
        Who does the work; by default the threads of this process.
    on_progress : callable, optional
        ``on_progress(phase, done, total)``.
    storage_options : mapping, optional
        Passed to fsspec for whichever of `src` and `dest` is a URL.

    Returns
    -------
    ImportReport

    Notes
    -----
    A line may have up to 16 MiB, feature numbers stay below 2**31 - 1 and label numbers below 2**25, so
    that no file, whatever it claims, makes the import allocate memory for more than it holds.

    Raises
    ------
    DataError
        The source is not what its format asks for; for text with file, line and the offending text.
    StoreExistsError
        Something is at `dest`.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "tiny.txt")
    ...     _ = file.write_text("3 4 2\\n0,1 0:1 3:0.5\\n 2:1\\n1\\n")
    ...     report = import_dataset(file, f"{folder}/tiny.zarr")
    >>> report.format, report.n_rows, report.n_features, report.n_labels, report.k_hat
    ('xmlrepo', 3, 4, 2, 2)
    """
    started = time.monotonic()
    _check_arguments(normalize, on_error, dtype, overwrite, resume, segment_bytes)
    src_url, dest_url = absolute_url(src), absolute_url(dest)
    options, dest_options = (
        dict(storage_options or {}) if "://" in url else {} for url in (src_url, dest_url)
    )
    writer = _begun(dest_url, dest_options, overwrite=overwrite, resume=resume)
    prepared = prepare(
        src_url,
        format=format,
        labels=labels,
        zero_based=zero_based,
        dtype="float64" if normalize else dtype,
        storage_options=options,
    )
    origin: dict[str, Any] = {
        **_identity(src_url, options),
        "format": prepared.format,
        "labels": [dict(companion) for companion in prepared.companions],
        "options": {
            "normalize": normalize,
            "on_error": on_error,
            "zero_based": zero_based,
            "dtype": dtype,
            "segment_bytes": segment_bytes,
        },
    }
    if writer is not None:
        _compare_origin(dest_url, dest_options, origin)
    with (
        nullcontext(executor) if executor is not None else InProcessExecutor() as runner,
        nullcontext() if writer is None else _recorded(dest_url),
    ):
        survey = _survey(prepared.source, segment_bytes, on_error == "skip", runner, on_progress)
        prepared = _settle(prepared, survey, unlabelled=labels is False)
        if writer is None:
            writer = _create(prepared, survey, dest_url, dest_options, origin, overwrite)
        _write(prepared, survey, writer, normalize, segment_bytes, runner, on_progress)
        if _identity(src_url, options) != {name: origin[name] for name in ("path", "size", "modified")}:
            raise DataError(f"{src_url} changed while it was imported: import it again with --overwrite")
        counts = np.zeros(writer.n_labels, dtype=np.int64)
        counts[: len(survey.label_counts)] = survey.label_counts
        data = writer.finish(k_hat=survey.k_hat, label_counts=counts, executor=runner)
    blank = survey.n_rows - data.n_rows
    return ImportReport(
        source=src_url,
        url=data.url,
        format=prepared.format,
        n_rows=data.n_rows,
        n_features=data.n_features,
        n_labels=data.n_labels,
        nnz_x=data.nnz_x,
        nnz_y=data.nnz_y,
        k_hat=data.k_hat,
        rows_without_label=survey.rows_without_label - blank,
        rows_without_feature=survey.rows_without_feature - blank,
        labels_without_positive=int(np.count_nonzero(counts == 0)),
        n_skipped=survey.n_bad,
        skipped=tuple(_bad_lines(prepared.source, survey)),
        zero_based=prepared.base == 0 if prepared.format == "svmlight" else None,
        normalize=normalize,
        seconds=time.monotonic() - started,
    )


# Before anything is read


def _check_arguments(
    normalize: Any, on_error: Any, dtype: Any, overwrite: bool, resume: bool, segment_bytes: int
) -> None:
    choices = (
        ("normalize", normalize, (None, "l2")),
        ("on_error", on_error, ("raise", "skip")),
        ("dtype", dtype, ("float32", "float64")),
    )
    for name, value, allowed in choices:
        if value not in allowed:
            raise UsageError(f"{name} must be one of {', '.join(map(str, allowed))}, not {value!r}")
    if segment_bytes < 1:
        raise UsageError(f"segment_bytes must be at least 1, not {segment_bytes}")
    if overwrite and resume:
        raise UsageError("overwrite and resume exclude each other: start over, or go on")


def _begun(url: str, options: Mapping[str, Any], *, overwrite: bool, resume: bool) -> DatasetWriter | None:
    """Return the writer of an interrupted import to go on with; refuse what must not be touched."""
    if overwrite or not store_exists(url, options):
        return None
    if resume:
        return DatasetWriter.resume(url, storage_options=options)
    incomplete = False
    fs, path = filesystem(url, options)
    if fs.exists(f"{path}/zarr.json"):
        incomplete = open_group(url, "r", options).attrs.get("complete") is False
    if incomplete:
        raise StoreExistsError(
            f"{url} is there and incomplete: go on with --resume (resume=True), "
            "or start over with --overwrite (overwrite=True)"
        )
    raise StoreExistsError(
        f"{url} exists: choose another place, or replace it with --overwrite (overwrite=True)"
    )


def _identity(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    fs, path = filesystem(url, options)
    return {"path": url, "size": None, "modified": None} if fs.isdir(path) else identity(url, options)


def _compare_origin(url: str, options: Mapping[str, Any], origin: Mapping[str, Any]) -> None:
    """Refuse to go on with another source or other options."""
    written: Any = open_group(url, "r", options).attrs.asdict().get("source") or {}
    with telling(f"what is recorded of the source of {url} is damaged: start over with --overwrite"):
        was = {**written, **written.get("options", {})}
    now = {**origin, **origin["options"]}
    for name in now:
        if name != "options" and was.get(name) != now[name]:
            raise UsageError(
                f"{url} was begun with {name} = {was.get(name)!r}, and now it is {now[name]!r}: "
                "go on with the same source and options, or start over with --overwrite"
            )


@contextmanager
def _recorded(url: str) -> Iterator[None]:
    """Numbers in a store that was begun before may be such that none can be reckoned with."""
    try:
        yield
    except DswmlError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise DataError(
            f"what is recorded of {url} is damaged ({error}): start over with --overwrite (overwrite=True)"
        ) from error


# First reading


def _survey(
    source: RowSource,
    segment_bytes: int,
    skip: bool,
    executor: Executor,
    on_progress: OnProgress | None,
) -> Survey:
    spans = [(number, *span) for number, span in enumerate(source.spans(segment_bytes))]
    report = on_progress or (lambda phase, done, total: None)
    try:
        if source.sequential:
            return survey_span(
                spans[0], (source, skip), on_read=lambda done, total: report("reading", done, total)
            )
        report("reading", 0, len(spans))
        return executor.reduce(
            survey_span,
            combine_surveys,
            spans,
            (source, skip),
            on_result=lambda done: report("reading", done, len(spans)),
        )
    except BadLineMet as met:
        # Workers meet bad lines in any order: the first of the file is among the spans up to this one.
        until = spans[: met.span + 1]
        if source.sequential:
            survey = survey_span(until[0], (source, True))
        else:
            survey = executor.reduce(survey_span, combine_surveys, until, (source, True))
    raise DataError(
        f"{_bad_lines(source, survey)[0]}; correct the line, or leave such lines out with "
        "--on-error skip (on_error='skip')"
    )


def _bad_lines(source: RowSource, survey: Survey) -> list[str]:
    first = source.first_line if isinstance(source, TextRows) else 0
    return [f"{source.url}, line {first + bad.line}: {bad.reason}" for bad in survey.bad]


def _settle(prepared: Prepared, survey: Survey, *, unlabelled: bool) -> Prepared:
    """Complete what is known of the source by what was found in it, or say where they differ."""
    source, url = prepared.source, prepared.source.url
    skipped = f" and {survey.n_bad} lines that were skipped" if survey.n_bad else ""
    n_rows = survey.n_rows
    if prepared.format == "xmlrepo" and prepared.n_rows is not None:
        surplus = survey.n_rows + survey.n_bad - prepared.n_rows
        if not 0 <= surplus <= survey.trailing_blank:
            raise DataError(
                f"{url}, line 1: {prepared.n_rows} rows are declared, but {survey.n_rows} rows{skipped} "
                "follow: the file is cut off, or its header is wrong"
            )
        n_rows -= surplus
    if n_rows == 0:
        raise DataError(f"{url} holds no rows{skipped}")
    if survey.nnz_y == 0 and not unlabelled:
        raise DataError(
            f"no row of {url} has a label: if its rows are to be predicted alone, say so with --no-labels "
            "(labels=False)"
        )
    base, n_features = prepared.base, prepared.n_features
    if base == "auto":
        base = 1 if 0 < survey.first_feature <= survey.last_feature else 0
        n_features = survey.last_feature + 1 - base
    elif n_features is None:
        n_features = survey.last_feature + 1
    if n_features == 0:
        raise DataError(f"no row of {url} has a feature: a data set needs features")
    if isinstance(source, TextRows) and isinstance(source.parse, LabelledRows):
        source = replace(source, parse=replace(source.parse, base=base, n_features=n_features))
    n_labels = prepared.n_labels or len(survey.label_counts)
    return replace(
        prepared, source=source, n_rows=n_rows, n_features=n_features, n_labels=n_labels, base=base
    )


# Second reading


def _create(
    prepared: Prepared,
    survey: Survey,
    url: str,
    options: Mapping[str, Any],
    origin: Mapping[str, Any],
    overwrite: bool,
) -> DatasetWriter:
    assert prepared.n_rows is not None
    assert prepared.n_features is not None
    assert prepared.n_labels is not None
    return DatasetWriter.create(
        url,
        n_rows=prepared.n_rows,
        n_features=prepared.n_features,
        n_labels=prepared.n_labels,
        nnz_x=None if prepared.dense else survey.nnz_x,
        nnz_y=survey.nnz_y,
        x_dtype=origin["options"]["dtype"],
        label_names=prepared.label_names,
        feature_names=prepared.feature_names,
        normalize=origin["options"]["normalize"],
        source=origin,
        overwrite=overwrite,
        storage_options=options,
    )


def _write(
    prepared: Prepared,
    survey: Survey,
    writer: DatasetWriter,
    normalize: Normalize,
    segment_bytes: int,
    executor: Executor,
    on_progress: OnProgress | None,
) -> None:
    source = prepared.source
    layouts = (writer.layout.indptr, writer.layout.x, writer.layout.y)
    marks = survey.marks if len(survey.marks) else np.zeros((1, 4), dtype=np.int64)
    pieces = plan_pieces(marks, layouts, source.positions(segment_bytes))
    done = writer.done()
    todo = [piece for piece in pieces if piece.name not in done]
    report = on_progress or (lambda phase, done, total: None)
    report("writing", len(pieces) - len(todo), len(pieces))

    def finished(count: int) -> None:
        report("writing", len(pieces) - len(todo) + count, len(pieces))

    payload = (source, writer, normalize)
    if not source.sequential:
        count = itertools.count(1)
        executor.map(fill_piece, todo, payload, on_result=lambda index, _: finished(next(count)))
    elif todo:
        from_start = replace(todo[0], position=0, before=(0, 0, 0))
        fill_pieces([from_start, *todo[1:]], payload, on_done=finished)
