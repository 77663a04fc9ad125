"""Mulan's data sets: the header of an ARFF file, and the XML that says which attributes are labels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

import numpy as np

from dswml.errors import DataError
from dswml.rows import ArffRows

__all__ = ["ArffHeader", "Attribute", "arff_rows", "parse_attribute", "parse_label_names", "read_arff_header"]

_NUMERIC = {"numeric", "real", "integer"}
_NAME = re.compile(r"""\s*(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|([^\s{'"][^\s{]*))(?=[\s{])""")
_VALUE = re.compile(r"""\s*(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|([^,'"]*?))\s*(?:,|$)""")


@dataclass(frozen=True, slots=True)
class Attribute:
    """A column of an ARFF file: numeric, or (with values) nominal."""

    name: str
    values: tuple[str, ...] | None = None

    @property
    def numbers(self) -> tuple[float, ...] | None:
        """The nominal values as numbers, or None if some is not one."""
        try:
            return None if self.values is None else tuple(float(value) for value in self.values)
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class ArffHeader:
    """What stands before the data: the attributes, and how many lines and bytes it takes."""

    attributes: tuple[Attribute, ...]
    n_lines: int
    n_bytes: int


def _unescape(match: re.Match[str]) -> str:
    quoted = match[1] if match[1] is not None else match[2]
    # Only quoted text has escapes: Mulan writes unquoted names such as m\'usica as they are.
    return match[3] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)


def parse_attribute(declaration: str) -> Attribute:
    """Parse what follows ``@attribute``: a name, quoted or not, and a type.

    Examples
    --------
    >>> parse_attribute("'two words' {0,1}")
    Attribute(name='two words', values=('0', '1'))
    >>> parse_attribute("weight real").values is None
    True
    """
    match = _NAME.match(declaration)
    kind = "" if match is None else declaration[match.end() :].strip()
    if match is None or not kind:
        raise DataError(f"{declaration.strip()[:80]!r} is not a name and a type")
    name = _unescape(match)
    if kind.startswith("{") and kind.endswith("}"):
        return Attribute(name, _parse_values(kind[1:-1], name))
    if kind.lower() not in _NUMERIC:
        raise DataError(
            f"attribute {name!r} has type {kind[:40]!r}: only numeric and nominal attributes can be "
            "imported; remove it or write it as numbers"
        )
    return Attribute(name)


def _parse_values(text: str, name: str) -> tuple[str, ...]:
    if "'" not in text and '"' not in text:
        return tuple(value.strip() for value in text.split(","))
    values: list[str] = []
    position = 0
    while position < len(text):
        match = _VALUE.match(text, position)
        if match is None:
            raise DataError(f"the values {{{text[:60]}}} of attribute {name!r} cannot be read")
        values.append(_unescape(match))
        position = match.end()
    return tuple(values)


def read_arff_header(lines: Iterable[bytes], *, place: str, max_bytes: int) -> ArffHeader:
    """Read lines up to and including ``@data``.

    Parameters
    ----------
    lines : iterable of bytes
        The lines of the file, with their ends.
    place : str
        The file, for messages.
    max_bytes : int
        Length of a header that is refused.

    Examples
    --------
    >>> text = b"% a comment\\n@relation r\\n@attribute a real\\n@attribute b {0,1}\\n@data\\n1,0\\n"
    >>> header = read_arff_header(text.splitlines(keepends=True), place="r.arff", max_bytes=1000)
    >>> [attribute.name for attribute in header.attributes], header.n_lines
    (['a', 'b'], 5)
    """
    attributes: dict[str, Attribute] = {}
    n_bytes = 0
    for number, raw in enumerate(lines, start=1):
        n_bytes += len(raw)
        if n_bytes > max_bytes:
            raise DataError(f"{place} has no @data in its first {max_bytes} bytes: it is not an ARFF file")
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError:
            line = raw.decode("latin-1").strip()
        if not line or line.startswith("%"):
            continue
        word, _, rest = line.replace("\t", " ", 1).partition(" ")
        keyword = word.lower()
        if keyword == "@data":
            return ArffHeader(tuple(attributes.values()), number, n_bytes)
        if keyword == "@attribute":
            try:
                attribute = parse_attribute(rest)
            except DataError as error:
                raise DataError(f"{place}, line {number}: {error}") from None
            if attributes.setdefault(attribute.name, attribute) is not attribute:
                raise DataError(
                    f"{place} declares the attribute {attribute.name!r} twice: rename one of them"
                )
        elif keyword != "@relation":
            raise DataError(
                f"{place}, line {number}: {line[:60]!r} is not @relation, @attribute or @data: "
                "repair the header of the ARFF file"
            )
    raise DataError(f"{place} ends before @data: it is cut off, or not an ARFF file")


def parse_label_names(text: bytes, *, place: str) -> tuple[str, ...]:
    """Return label names from Mulan's XML, nested or flat, or from a text with one name a line.

    Examples
    --------
    >>> parse_label_names(b'<labels><label name="a"><label name="b"/></label></labels>', place="x.xml")
    ('a', 'b')
    >>> parse_label_names(b"first\\nsecond one\\n", place="x.txt")
    ('first', 'second one')
    """
    try:
        content = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8 text ({error}): convert it") from error
    if not content.lstrip().startswith("<"):
        names = tuple(line.rstrip("\r") for line in content.removesuffix("\n").split("\n"))
        if "" in names:
            raise DataError(f"{place}, line {names.index('') + 1}: the name of a label is empty")
        return names
    if "<!DOCTYPE" in content or "<!ENTITY" in content:
        raise DataError(f"{place} has a document type or entities, which Mulan's XML has not: remove them")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise DataError(f"{place} is not well-formed XML ({error})") from error
    labels = [element for element in root.iter() if element.tag.rpartition("}")[2] == "label"]
    names = tuple(element.get("name", "") for element in labels)
    if not names or "" in names:
        raise DataError(f'{place} must hold elements <label name="...">: it has {len(names)}, some unnamed')
    return names


def arff_rows(
    header: ArffHeader, label_names: Sequence[str], *, sparse: bool, dtype: str, place: str
) -> tuple[ArffRows, tuple[str, ...]]:
    """Decide what every attribute becomes; return the parser of the rows and the names of the features.

    Labels take the order of `label_names`, features that of the header. A nominal attribute whose values
    are numbers is taken as those numbers; one with two other values becomes 0 for the first and 1 for the
    second, as in Weka, and is named ``attribute=second``.
    """
    label_of = {name: label for label, name in enumerate(label_names)}
    if len(label_of) < len(label_names):
        twice = next(name for label, name in enumerate(label_names) if label_of[name] != label)
        raise DataError(f"the label {twice!r} of {place} is listed twice")
    declared = {attribute.name for attribute in header.attributes}
    for name in label_names:
        if name not in declared:
            raise DataError(
                f"the label {name!r} is not an attribute of {place}: does the list belong to another file?"
            )
    columns = np.empty(len(header.attributes), dtype=np.int64)
    words: list[tuple[int, bytes, bytes]] = []
    feature_names: list[str] = []
    for number, attribute in enumerate(header.attributes):
        numbers = attribute.numbers
        omitted = f"attribute {attribute.name!r} of {place} is {{{','.join(attribute.values or ())[:60]}}}: "
        if sparse and numbers and numbers[0] != 0:
            raise DataError(
                f"{omitted}a value left out of a sparse row means the first, which is not 0; "
                "put 0 first in the header"
            )
        if attribute.name in label_of:
            if attribute.values is not None and (numbers is None or not set(numbers) <= {0.0, 1.0}):
                raise DataError(f"{omitted}a label must be {{0,1}} or numeric")
            columns[number] = -1 - label_of[attribute.name]
            continue
        columns[number] = len(feature_names)
        if attribute.values is None or numbers is not None:
            feature_names.append(attribute.name)
            continue
        if len(attribute.values) != 2:
            raise DataError(
                f"{omitted}a nominal feature must have numbers or exactly two values; "
                "write it as several attributes {0,1}"
            )
        zero, one = attribute.values
        words.append((number, zero.encode(), one.encode()))
        feature_names.append(f"{attribute.name}={one}")
    names = tuple(attribute.name for attribute in header.attributes)
    return ArffRows(sparse, columns, names, tuple(words), dtype), tuple(feature_names)
