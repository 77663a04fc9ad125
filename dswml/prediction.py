"""Prediction for data larger than memory: row block by row block, put aside, then put together.

How many labels a threshold selects is known only afterwards, so every task stages the labels of its
rows (`dswml.staging`); when all are there, the lengths of the arrays are known too, and each chunk of
the result is written whole by one task. Work that was interrupted goes on with the blocks that
are not staged yet, and the result has the same bytes wherever and however often it was computed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from .blocks import DEFAULT_BLOCK_BYTES, RowBlock
from .cache import check_room
from .checked import array_digest
from .current import current_executor
from .errors import DataError, UsageError
from .executor import Executor, InProcessExecutor
from .matching import check_features
from .model import Model, load_model
from .prediction_output import Output, ZarrOutput, telling_of_full_disk
from .prediction_text import CsvOutput, JsonLinesOutput, XmlRepoOutput
from .progress import OnProgress, reporting
from .scoring import Rule, choose_labels
from .sources import as_dataset
from .staging import Part, Staging
from .storage import absolute_url
from .stored import Dataset, StoredDataset

__all__ = ["Prediction", "predict_dataset"]

Array = npt.NDArray[Any]

#: Forms of the result.
OUTPUTS: dict[str, type[Output]] = {
    "zarr": ZarrOutput,
    "csv": CsvOutput,
    "jsonl": JsonLinesOutput,
    "xmlrepo": XmlRepoOutput,
}
#: Entries after which a task puts aside what it has, so that it never holds many more.
PART_ENTRIES = 2**19


@dataclass(frozen=True)
class Prediction:
    """What was predicted, and where it is.

    Attributes
    ----------
    url, format : str
    rule : str
        How labels were chosen.
    n_rows, n_labels : int
        Shape of the result.
    n_predicted : int or None
        Number of its entries; None of text that was there already.
    n_rows_before : int
        Rows that an earlier call had predicted.
    seconds : float
    """

    url: str
    format: str
    rule: str
    n_rows: int
    n_labels: int
    n_predicted: int | None
    n_rows_before: int
    seconds: float


def predict_dataset(
    model: Model | str | os.PathLike[str],
    X: Any,
    out: str | os.PathLike[str],
    *,
    top_k: int | None = None,
    threshold: Any = None,
    scores: bool = False,
    format: str = "zarr",
    resume: bool = False,
    overwrite: bool = False,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    executor: Executor | None = None,
    on_progress: OnProgress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Prediction:
    """Predict the labels of all rows of a data set and write them.

    Memory is bounded by a row block, a few tiles of scores (`dswml.scoring`) and the model for each
    task, whatever the number of rows and labels.

    Parameters
    ----------
    model : Model, str or path
        A model or the place of one.
    X : Dataset, str, path, array or sparse matrix
        A data set or the place of one, or rows in any form that `dswml.sources.as_dataset` takes. Labels
        are not looked at.
    out : str or path
        Where the result goes: a local path or fsspec URL.
    top_k : int, optional
        Predict the k best labels of every row.
    threshold : float or array-like (L,), optional
        Predict the labels with at least this score. Without either the model's own rule is used.
    scores : bool
        With ``format="zarr"``: store the scores of the predicted labels instead of ones. Text
        always has them.
    format : {"zarr", "csv", "jsonl", "xmlrepo"}
        "zarr": a sparse matrix, rows x labels, in AnnData's ``csr_matrix`` encoding. "csv": lines of row,
        label, score. "jsonl": an object a row, with null for a score that is infinite. "xmlrepo": the sparse
        matrices of the Extreme Classification Repository, label:score. Rows count from 0; csv and jsonl name
        the labels where the model does, and have the best first; equal scores are ordered by label.
    resume : bool
        Go on with a prediction that was interrupted; model, data and options must be the same. One that is
        finished is left as it is, and so, with a warning, is text: it does not say what it is of.
    overwrite : bool
        Replace what is at `out`.
    block_bytes : int
        Largest size of a row block in memory, unless X is a `Dataset`, which has its own plan.
    executor : Executor, optional
        Who predicts; by default the cluster of the current Dask client, or this process.
    on_progress : callable, optional
        Told of the progress: ``on_progress(phase, done, total)``.
    storage_options : mapping, optional
        Passed to fsspec.

    Returns
    -------
    Prediction

    Examples
    --------
    >>> import tempfile, zarr
    >>> model = Model(u=np.eye(2), m=np.array([[0.9, 0.1, 0.6], [0.2, 0.7, 0.6]]), p0=0.1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = predict_dataset(model, np.eye(2), f"{folder}/labels.zarr", scores=True)
    ...     group = zarr.open_group(f"{folder}/labels.zarr", mode="r")
    ...     arrays = tuple(group[name][:] for name in ("data", "indices", "indptr"))
    ...     sp.csr_array(arrays, shape=group.attrs["shape"]).toarray().tolist()
    [[0.9, 0.0, 0.6], [0.0, 0.7, 0.6]]
    >>> done.n_predicted
    4
    """
    started = time.monotonic()
    if format not in OUTPUTS:
        raise UsageError(f"the format {format!r} is not known: it is one of {', '.join(OUTPUTS)}")
    if overwrite and resume:
        raise UsageError("overwrite and resume exclude each other: start over, or go on")
    read: list[str] = []
    if not isinstance(model, Model):
        read.append(os.fspath(model))
        model = load_model(model, storage_options=storage_options)
    rule = model.chosen_rule(threshold, top_k)
    if isinstance(X, str | os.PathLike):
        X = StoredDataset(X, block_bytes, storage_options)
    data = as_dataset(X, block_bytes=block_bytes)
    normalized = check_features(model, data)
    output = OUTPUTS[format](
        url=absolute_url(out),
        n_rows=data.n_rows,
        n_labels=model.n_labels,
        label_names=model.label_names,
        scores=scores or format != "zarr",
        storage_options=dict(storage_options or {}),
    )
    output.check_place(*read, data.url)
    with ExitStack() as stack:
        if executor is None:
            # Other processes cannot write to the memory of this one.
            here = output.url.startswith("memory:")
            executor = stack.enter_context(InProcessExecutor() if here else current_executor(data))
        data.check(executor)
        check_room(data.block_nbytes, executor)
        request = _request(model, data, rule, output.scores, format)
        stack.enter_context(telling_of_full_disk(output.url))
        staging = output.begin(request, str(rule), resume=resume, overwrite=overwrite)
        assembled = output.count() if staging is None else staging.group.attrs.get("assembled")
        before, nnz = data.n_rows, assembled if isinstance(assembled, int) else None
        if staging is not None and nnz is None:
            checking = reporting(executor, "checking", on_progress)
            done, undone = staging.sound_parts(data.blocks, output.part_names, checking)
            before = sum(part.stop - part.start for part in done)
            light = replace(model, history=(), feature_names=None, label_counts=None, label_names=None)
            job = _Job(data, light, rule, normalized, output, staging)
            reporting(executor, "predicting", on_progress).map(_predict_block, undone, job)
            parts = _all_parts(staging, data.blocks)
            nnz = sum(part.nnz for part in parts)
            output.assemble(staging, parts, executor, on_progress)
        if staging is not None:
            output.complete(staging)
    return Prediction(
        url=output.url,
        format=format,
        rule=str(rule),
        n_rows=data.n_rows,
        n_labels=model.n_labels,
        n_predicted=nnz,
        n_rows_before=before,
        seconds=time.monotonic() - started,
    )


def _request(model: Model, data: Dataset, rule: Rule, scores: bool, format: str) -> dict[str, Any]:
    """Return all that the result depends on, as JSON."""
    limits = rule.threshold
    cuts = zlib.crc32(np.array([block.stop for block in data.blocks], dtype="<i8").tobytes())
    names = json.dumps(model.label_names).encode()
    return {
        "model": model.fingerprint,
        "data": data.fingerprint,
        "top_k": rule.top_k,
        "threshold": array_digest(limits) if isinstance(limits, np.ndarray) else str(limits),
        "scores": scores,
        "format": format,
        "label_names": hashlib.sha256(names).hexdigest(),
        "row_blocks": f"{len(data.blocks)} ({cuts:08x})",
    }


@dataclass(frozen=True)
class _Job:
    """What a task needs besides its row block."""

    data: Dataset
    model: Model
    rule: Rule
    normalized: bool
    output: Output
    staging: Staging


def _predict_block(block: RowBlock, job: _Job) -> None:
    """Predict the rows of one block and put them aside, in parts of bounded size."""
    matrix = job.data.read_x(block.start, block.stop)
    held: list[Any] = []
    start = block.start
    place, k = job.data.url or "X", job.rule.top_k or 0
    for rows, z in job.model.projected(
        matrix, normalized=job.normalized, first_row=block.start, place=place, k=k
    ):
        held.append(choose_labels(z, job.model.m, job.rule, keep_scores=job.output.scores))
        nnz, stop = sum(found.nnz for found in held), block.start + rows.stop
        if nnz >= PART_ENTRIES or stop == block.stop:
            together = held[0] if len(held) == 1 else sp.vstack(held, format="csr")
            with telling_of_full_disk(job.output.url):
                job.staging.keep(Part(start, stop, nnz), job.output.encode(together, start))
            held, start = [], stop


def _all_parts(staging: Staging, blocks: tuple[RowBlock, ...]) -> list[Part]:
    parts, missing = staging.parts(blocks)
    if missing:
        raise DataError(
            f"what was predicted for rows {missing[0].start} to {missing[0].stop} is gone from "
            f"{staging.url}: run the same command again with --resume (resume=True)"
        )
    return parts
