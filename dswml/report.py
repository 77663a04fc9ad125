"""The report of a model or a run: one HTML file that shows what was trained, how it went, how good it is."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from . import report_search
from . import report_sections as write
from .blocks import DEFAULT_BLOCK_BYTES
from .errors import DataError, StoreExistsError, UsageError, telling
from .evaluation import Evaluation, evaluate
from .evaluation_tables import percent
from .executor import Executor
from .hiding import public_name
from .model import Model, load_model
from .progress import OnProgress
from .report_labels import labels
from .report_page import Section, counted, page, tiles
from .roc import Auc
from .run_file import SearchState, is_run, read_run
from .search_record import curve_of
from .sources import as_dataset
from .storage import absolute_url, filesystem, store_exists
from .stored import Dataset, StoredDataset

__all__ = ["Report", "write_report"]


@dataclass(frozen=True)
class Report:
    """Where a report is and what is in it.

    Attributes
    ----------
    url : str
    n_bytes : int
    sections : tuple of str
        By their anchors.
    left_out : tuple of str
        A sentence for what is missing and how to get it.
    """

    url: str
    n_bytes: int
    sections: tuple[str, ...]
    left_out: tuple[str, ...]


def write_report(
    model: Model | str | os.PathLike[str],
    out: str | os.PathLike[str],
    X: Any = None,
    Y: Any = None,
    *,
    k: int = 5,
    exact: bool = False,
    overwrite: bool = False,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    executor: Executor | None = None,
    on_progress: OnProgress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Report:
    """Write the report of a model or a run: a page that needs no network and no script.

    Without data it tells how the model was trained, its spectrum and the search that chose it, if there
    was one. With data come metrics, threshold curve and ROC, and how well each label is predicted. Of a run,
    the newest checkpoint is shown: its model, or of a search how far the points of the grid are.

    Parameters
    ----------
    model : Model, str or path
        A model, the place of one, or the folder of checkpoints of a run.
    out : str or path
        The HTML file to write, a local path or fsspec URL.
    X, Y : optional
        Data to score, best such as the model has not seen: a data set or the place of one, or features and
        labels in any form that `dswml.sources.as_dataset` takes.
    k : int
        Length of the rankings.
    exact : bool
        Read the data twice, for an AUC and a best threshold without error.
    overwrite : bool
        Replace the file that is there.
    block_bytes, executor, on_progress, storage_options
        As for `dswml.evaluate`.

    Returns
    -------
    Report

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> model = Model(u=np.eye(2), m=np.array([[0.9, 0.1, 0.6], [0.2, 0.7, 0.4]]), p0=0.1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_report(model, f"{folder}/model.html", np.eye(2), [[1, 0, 0], [0, 1, 0]]).sections
    ('training', 'spectrum', 'thresholds', 'metrics', 'labels')
    """
    place = absolute_url(out)
    _check_place(place, overwrite, storage_options)
    name = "a model"
    damage: AbstractContextManager[None] = nullcontext()
    if not isinstance(model, Model):
        url, name = model, public_name(model)
        damage = telling(f"the attributes of {name} are damaged: train again")
        if is_run(url, storage_options):
            state = read_run(url, storage_options)
            if isinstance(state, SearchState):
                return _write_search(state, name, place, X, storage_options)
            model = state
        else:
            model = load_model(url, storage_options=storage_options)
    found, names, rows, seen = None, model.label_names, "", False
    if X is not None:
        if Y is None and isinstance(X, str | os.PathLike):
            X = StoredDataset(X, block_bytes, storage_options)
        data = as_dataset(X, Y, block_bytes=block_bytes)
        found = evaluate(model, data, k=k, exact=exact, executor=executor, on_progress=on_progress)
        names = names or data.label_names
        rows, seen = _rows(model, data), _has_seen(model, data)
    with damage:
        sections, left_out = _sections(model, found, names, rows, k)
        content = page(f"Report of {name}", _lead(model), _top(model, found, seen), sections, left_out)
    return _put(place, content, sections, left_out, storage_options)


def _write_search(
    state: SearchState, name: str, place: str, X: Any, storage_options: Mapping[str, Any] | None
) -> Report:
    if X is not None:
        raise UsageError(
            f"{name} is a search that has no model yet: leave out the data (--data), or report the model "
            "that 'dswml tune STORE --model MODEL' writes at its end"
        )
    grid = report_search.grid(state)
    sections = [report_search.searching(state), *([] if grid is None else [grid])]
    solved, total = (
        sum(int(count(point["solved"])) for point in state.points) for count in (np.sum, np.size)
    )
    left_out = [
        *(["No point of the grid has been looked at yet."] if grid is None else []),
        "No model, spectrum and scores: they come with the end of the search, and 'dswml tune' with --resume "
        "goes on to it.",
    ]
    top = tiles(
        [
            ("number of the last checkpoint", f"{state.number}"),
            ("solved, of points times folds", f"{solved} of {total}"),
            ("passes over X", f"{state.passes}"),
        ]
    )
    lead = (
        f"A search of {counted(len(state.points), 'point')} as of its last checkpoint, whether it goes "
        "on, was stopped or has ended since."
    )
    text = page(f"Report of {name}", lead, top, sections, left_out)
    return _put(place, text, sections, left_out, storage_options)


def _rows(model: Model, data: Dataset) -> str:
    """Say which rows were scored."""
    name = "" if data.url is None else f" of {public_name(data.url)}"
    rows = "row" if data.n_rows == 1 else f"{data.n_rows:,} rows"
    return f"the {rows}{name}" + (", which the model was trained on" if _has_seen(model, data) else "")


def _has_seen(model: Model, data: Dataset) -> bool:
    return bool(model.info.get("data", {}).get("fingerprint") == data.fingerprint)


def _sections(
    model: Model, found: Evaluation | None, names: tuple[str, ...] | None, rows: str, k: int
) -> tuple[list[Section], list[str]]:
    sections: list[Section | None] = [write.training(model), write.convergence(model), write.spectrum(model)]
    search = model.info.get("search")
    left_out = []
    if sections[1] is None:
        number = counted(len(model.history), "record")
        left_out.append(f"No convergence: the model has {number} of its iterations, and a curve needs two.")
    if sections[2] is None:
        left_out.append("No spectrum: W is zero.")
    if search is None:
        left_out.append("No cross-validation: 'dswml tune STORE --model MODEL' makes a model that has one.")
    else:
        sections.append(write.cross_validation(search))
    if found is not None:
        labelled = found.curve.n_active > 0
        sections += [write.thresholds(model, found.curve, found.auc, rows) if labelled else None]
        sections += [write.metrics(found, k, rows), labels(model, found, names) if labelled else None]
        if not labelled:
            left_out.append(f"No thresholds, ROC and labels: {rows} have no label at all.")
        elif not found.curve.n_inactive:
            left_out.append(f"No ROC: {rows} have every label.")
        return [each for each in sections if each is not None], left_out
    curve = None if search is None else curve_of(search)
    if search is not None and curve is not None:
        held_out = f"the held-out rows of {counted(search['folds'], 'fold')}"
        sections.append(write.thresholds(model, curve, Auc(*search["micro_auc"]), held_out))
    missing = "metrics and labels" if curve is not None else "thresholds, ROC, metrics and labels"
    left_out.append(f"No {missing}: '--data STORE' scores the rows of a data set.")
    return [each for each in sections if each is not None], left_out


def _lead(model: Model) -> str:
    n_rows = model.info.get("data", {}).get("n_rows")
    on = "" if n_rows is None else f" on {counted(n_rows, 'row')}"
    return (
        f"A sparsity-weighted multi-label classifier of {counted(model.n_labels, 'label')} from "
        f"{counted(model.n_features, 'feature')}, trained{on}."
    )


def _top(model: Model, found: Evaluation | None, seen: bool) -> str:
    figures = [("rank of W", f"{model.rank}")]
    info = model.info
    if "objective" in info:
        status = write.status(info)
        kind = "certified" if info.get("certificate") else "estimated"
        figures = [
            (status[1], status[0]),
            (f"relative gap, {kind}", f"{info['relative_gap']:.2g}"),
            ("pass over X" if info["passes"] == 1 else "passes over X", f"{info['passes']}"),
            *figures,
        ]
    if found is not None:
        on = ", of rows trained on" if seen else ""
        scores = found.scores | {"micro_auc": found.auc.value}
        for name, score in (("micro F1", "micro_f1"), ("P@1", "P@1"), ("micro AUC", "micro_auc")):
            value = scores[score]
            figures.append((name + on, percent(value) + (" %" if math.isfinite(value) else "")))
    return tiles(figures)


def _check_place(place: str, overwrite: bool, storage_options: Mapping[str, Any] | None) -> None:
    """Refuse a place where something is, or where no file can be written, before there is any work."""
    fs, path = filesystem(place, storage_options)
    if store_exists(place, storage_options):
        if not fs.isfile(path):
            raise StoreExistsError(f"{place} is a folder: it is not replaced by a report; name a file")
        if not overwrite:
            raise StoreExistsError(f"{place} exists: choose another place, or overwrite=True (--overwrite)")
    with _writing(place):
        folder = path.rpartition("/")[0]
        if "://" in place:
            mark = f"{folder}/.dswml-{uuid.uuid4().hex}"
            fs.pipe_file(mark, b"dswml looks whether it can write here\n")
            fs.rm_file(mark)
            return
        while not os.path.exists(folder or "/"):
            folder = os.path.dirname(folder)
        with TemporaryFile(dir=folder or "/"):
            pass


@contextmanager
def _writing(place: str) -> Iterator[None]:
    """Turn whatever a file system says into an error with a way out."""
    try:
        yield
    except Exception as error:
        raise DataError(
            f"the report {place} cannot be written ({type(error).__name__}: {error}): name a file in a "
            "folder or bucket that you may write to"
        ) from error


def _put(
    place: str,
    text: str,
    sections: Sequence[Section],
    left_out: Sequence[str],
    storage_options: Mapping[str, Any] | None,
) -> Report:
    """Write a page as a whole or not at all."""
    content = text.encode()
    done = Report(place, len(content), tuple(each.key for each in sections), tuple(left_out))
    if "://" in place:  # an object store shows a file when it is all there
        fs, path = filesystem(place, storage_options)
        with _writing(place):
            fs.pipe_file(path, content)
        return done
    aside = f"{place}.{uuid.uuid4().hex[:8]}.partial"
    with _writing(place):
        try:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            with open(aside, "wb") as file:
                file.write(content)
            os.replace(aside, place)
        except OSError:
            with suppress(OSError):
                os.remove(aside)
            raise
    return done
