"""Predictions as text: for spreadsheets, for programs, for tools of the Extreme Classification Repository."""

from __future__ import annotations

import csv
import io
import json
import math
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import StoreExistsError
from .executor import Executor
from .prediction_output import Output, is_half_removed
from .progress import OnProgress
from .staging import Part, Staging
from .storage import filesystem, remove_store, store_exists

__all__ = ["CsvOutput", "JsonLinesOutput", "TextOutput", "XmlRepoOutput"]

Array = npt.NDArray[Any]
#: A row's number, its labels, best first, and their scores.
Row = tuple[int, list[int], list[float]]

#: Significant digits of the scores.
DIGITS = 7


@dataclass(frozen=True)
class TextOutput(Output):
    """Lines of text in the order of the rows."""

    @property
    def staging_url(self) -> str:
        return f"{self.url}.partial"

    @property
    def part_names(self) -> tuple[str, ...]:
        return ("text",)

    @property
    @abstractmethod
    def header(self) -> str:
        """What stands before the lines of the rows."""

    @abstractmethod
    def lines(self, rows: Iterable[Row]) -> str:
        """Write rows."""

    def encode(self, rows: Any, first_row: int) -> dict[str, Array]:
        number = np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr))
        order = np.lexsort((rows.indices, -rows.data, number))
        labels, scores, indptr = rows.indices[order], rows.data[order], rows.indptr
        lines = self.lines(
            (first_row + row, labels[start:stop].tolist(), scores[start:stop].tolist())
            for row, (start, stop) in enumerate(pairwise(indptr.tolist()))
        )
        return {"text": np.frombuffer(lines.encode(), dtype=np.uint8)}

    def assemble(
        self, staging: Staging, parts: Sequence[Part], executor: Executor, on_progress: OnProgress | None
    ) -> None:
        fs, path = filesystem(self.url, self.storage_options)
        # An object store shows a file when it is all there; a local one would show it as it grows.
        growing = path if "://" in self.url else f"{self.staging_url}/text"
        with fs.open(growing, "wb") as file:
            file.write(self.header.encode())
            for done, part in enumerate(parts, start=1):
                file.write(staging.load("text", part).data)
                if on_progress is not None:
                    on_progress("writing", done, len(parts))
        if growing != path:
            fs.mv(growing, path)

    def complete(self, staging: Staging) -> None:
        remove_store(self.staging_url, self.storage_options)

    def is_finished(self, begun: Mapping[str, Any], request: Mapping[str, Any]) -> bool:
        left = store_exists(self.staging_url, self.storage_options)
        fs, path = filesystem(self.url, self.storage_options)
        if not fs.isfile(path) or (left and not is_half_removed(begun)):
            return False
        remove_store(self.staging_url, self.storage_options)
        # A removal that was interrupted at its end leaves an empty folder.
        fs, path = filesystem(self.staging_url, self.storage_options)
        if fs.isdir(path):
            fs.rmdir(path)
        warnings.warn(
            f"{self.url} is there already, and text does not say of which model, data and options it is: if "
            "of others, replace it with --overwrite (overwrite=True)",
            stacklevel=2,
        )
        return True

    def count(self) -> None:
        return None

    def remove(self) -> None:
        fs, path = filesystem(self.url, self.storage_options)
        if fs.exists(path):
            fs.rm_file(path)
        super().remove()

    def check_place(self, *read: str | None) -> None:
        super().check_place(*read)
        fs, path = filesystem(self.url, self.storage_options)
        if fs.isdir(path):
            raise StoreExistsError(f"{self.url} is a folder: it is not replaced by text; name a file")

    def named(self, label: int) -> str | int:
        """Return the name of a label, or its number where labels have no names."""
        return label if self.label_names is None else self.label_names[label]


@dataclass(frozen=True)
class CsvOutput(TextOutput):
    """A line for every predicted label: row, label, score."""

    @property
    def header(self) -> str:
        return "row,label,score\n"

    def lines(self, rows: Iterable[Row]) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(
            (row, self.named(label), _shown(score))
            for row, labels, scores in rows
            for label, score in zip(labels, scores, strict=True)
        )
        return text.getvalue()


@dataclass(frozen=True)
class JsonLinesOutput(TextOutput):
    """A JSON object for every row: its number, and its labels with their scores, null where infinite."""

    @property
    def header(self) -> str:
        return ""

    def lines(self, rows: Iterable[Row]) -> str:
        return "".join(
            json.dumps(
                {
                    "row": row,
                    "labels": [
                        {
                            "label": self.named(label),
                            "score": float(_shown(score)) if math.isfinite(score) else None,
                        }
                        for label, score in zip(labels, scores, strict=True)
                    ],
                },
                ensure_ascii=False,
            )
            + "\n"
            for row, labels, scores in rows
        )


@dataclass(frozen=True)
class XmlRepoOutput(TextOutput):
    """A line for every row, label:score by label number, after a line with the numbers of rows and labels."""

    @property
    def header(self) -> str:
        return f"{self.n_rows} {self.n_labels}\n"

    def lines(self, rows: Iterable[Row]) -> str:
        return "".join(
            " ".join(f"{label}:{_shown(score)}" for label, score in sorted(zip(labels, scores, strict=True)))
            + "\n"
            for _, labels, scores in rows
        )


def _shown(score: float) -> str:
    return f"{score:.{DIGITS}g}"
