"""Parsers of text: numbers to the last bit, rows as an independent parser reads them, bad lines named."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dswml.arff import arff_rows, parse_attribute, parse_label_names, read_arff_header
from dswml.errors import DataError
from dswml.rows import SVMLIGHT, XMLREPO, ArffRows, LabelledRows, RowBatch, scale_rows
from dswml.text import DECIDED, MALFORMED, UNDECIDED, parse_number

Rows = list[tuple[list[int], dict[int, float]]]


def number(token: str) -> tuple[float, int, int]:
    value, end, status = parse_number(np.frombuffer(token.encode() + b"\n", dtype=np.uint8), 0)
    return value, end, status


def rows_of(batch: RowBatch) -> Rows:
    assert batch.x_indptr is not None
    assert batch.x_indices is not None
    rows = []
    for row in range(batch.n_rows):
        x = slice(*batch.x_indptr[row : row + 2])
        y = slice(*batch.y_indptr[row : row + 2])
        features = dict(zip(batch.x_indices[x].tolist(), batch.x_values[x].tolist(), strict=True))
        rows.append((batch.y_indices[y].tolist(), features))
    return rows


def reason(parse: LabelledRows | ArffRows, line: bytes) -> str:
    batch = parse(line)
    assert batch.n_rows == 0
    assert batch.n_bad == 1
    return batch.bad[0].reason


# Numbers

_digits = st.text("0123456789", min_size=1, max_size=40)
_tokens = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.floats(allow_nan=False, allow_infinity=False).map("{:.16g}".format),
    st.floats(0, 1).map("{:.25f}".format),
    st.builds("{}{}.{}e{}".format, st.sampled_from(["", "-", "+"]), _digits, _digits, st.integers(-400, 400)),
    # Halfway between two doubles: what makes rounding hard.
    st.integers(2**52, 2**53 - 1).map(lambda n: f"{2 * n + 1}e0"),
    st.integers(2**52, 2**53 - 1).map(lambda n: f"{2 * n + 1}.000000000000000000001"),
    st.tuples(st.integers(1, 2**53), st.integers(-330, 300)).map(lambda t: f"{t[0]}e{t[1]}"),
)


@settings(max_examples=2000, deadline=None)
@given(_tokens)
@example("9007199254740993")
@example("1.7976931348623157e308")
@example("1.7976931348623159e308")
@example("2.2250738585072011e-308")
@example("5e-324")
@example("0.000000000000000000000000000000000000001e39")
@example("-0")
@example("1e99999999999999999999")
@example("1e-99999999999999999999")
@example("0e99999999999999999999")
def test_a_number_equals_float_of_its_token_or_is_left_to_python(token: str) -> None:
    value, end, status = number(token)
    assert end == len(token)
    assert status in (DECIDED, UNDECIDED)
    if status == DECIDED:
        assert struct.pack("d", value) == struct.pack("d", float(token))


@pytest.mark.parametrize("token", ["", "-", ".", "e5", "1e", "1e+", "nan", "inf", "x", "--1"])
def test_what_is_no_number_is_malformed(token: str) -> None:
    assert number(token)[2] == MALFORMED


def test_numbers_of_sixteen_digits_never_need_python() -> None:
    rng = np.random.default_rng(0)
    tokens = [f"{value:.16g}" for value in rng.standard_normal(2000) * 10.0 ** rng.integers(-9, 9, 2000)]
    assert {number(token)[2] for token in tokens} == {DECIDED}


def test_undecided_numbers_are_right_in_the_rows() -> None:
    tokens = ["5e-324", "1e-320", "0.1000000000000000055511151231257827021181583404541015625", "2.5"]
    assert number(tokens[0])[2] == UNDECIDED
    line = "0 " + " ".join(f"{k}:{token}" for k, token in enumerate(tokens))
    (row,) = rows_of(LabelledRows(XMLREPO)(line.encode()))
    assert row == ([0], {k: float(token) for k, token in enumerate(tokens)})
    undecided_then_bad = LabelledRows(XMLREPO)(f"0 0:{tokens[0]} 1:oops\n1 0:{tokens[1]}\n".encode())
    assert rows_of(undecided_then_bad) == [([1], {0: 1e-320})]


# Rows of labels and features

_rows = st.lists(
    st.tuples(
        st.lists(st.integers(0, 50), unique=True, max_size=5),
        st.dictionaries(st.integers(0, 99), st.floats(-1e30, 1e30), max_size=6),
    ),
    max_size=20,
)


def as_text(rows: Rows, base: int = 0, end: str = "\n") -> bytes:
    lines = (
        ",".join(map(str, labels)) + " " + " ".join(f"{k + base}:{v!r}" for k, v in features.items())
        for labels, features in rows
    )
    return "".join(line + end for line in lines).encode()


@settings(max_examples=300, deadline=None)
@given(
    rows=_rows,
    dialect=st.sampled_from([XMLREPO, SVMLIGHT]),
    base=st.sampled_from([0, 1]),
    end=st.sampled_from(["\n", "\r\n", " \t\n"]),
)
def test_rows_come_back_as_they_were_written(rows: Rows, dialect: int, base: int, end: str) -> None:
    batch = LabelledRows(dialect, 100, 51, base)(as_text(rows, base, end))
    assert batch.n_bad == 0
    assert batch.n_lines == len(rows)
    assert rows_of(batch) == [(sorted(labels), dict(sorted(x.items()))) for labels, x in rows]


def test_rows_without_labels_or_features_survive() -> None:
    text = b"3,1 2:0.5\n 4:1\n0\n \n"
    expected: Rows = [([1, 3], {2: 0.5}), ([], {4: 1.0}), ([0], {}), ([], {})]
    for dialect in (XMLREPO, SVMLIGHT):
        assert rows_of(LabelledRows(dialect)(text)) == expected


def test_an_empty_line_is_a_row_of_the_repository_and_nothing_in_svmlight() -> None:
    text = b"1 0:1\n\n2 0:1\n\n\r\n"
    assert len(rows_of(LabelledRows(XMLREPO)(text))) == 5
    assert LabelledRows(XMLREPO)(text).trailing_blank == 2
    assert rows_of(LabelledRows(SVMLIGHT)(text)) == [([1], {0: 1.0}), ([2], {0: 1.0})]


def test_svmlight_comments_and_query_ids_are_passed_over() -> None:
    text = b"# head\n1 qid:7 2:3 # tail\n5:1\n2#x\n  # only a comment\n"
    assert rows_of(LabelledRows(SVMLIGHT)(text)) == [([1], {2: 3.0}), ([], {5: 1.0}), ([2], {}), ([], {})]


def test_a_last_line_without_newline_is_read() -> None:
    assert rows_of(LabelledRows(XMLREPO)(b"1 2:3")) == [([1], {2: 3.0})]
    assert rows_of(LabelledRows(XMLREPO)(b"")) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"1,x 0:1", "'1,x' is not a list of label numbers"),
        (b"1, 0:1", "'1,' is not a list of label numbers"),
        (b"-1 0:1", "'-1' is not a list of label numbers"),
        (b"1.0 0:1", "'1.0' is not a list of label numbers"),
        (b"1,1 0:1", "label 1 appears twice"),
        (b"5,1,5 0:1", "label 5 appears twice"),
        (b"9 0:1", "label 9 is not in 0..8"),
        (b"1 7", "'7' is not feature:value"),
        (b"1 a:1", "'a:1' is not feature:value"),
        (b"1 -2:1", "'-2:1' is not feature:value"),
        (b"1 0:1 0:2", "feature 0 appears twice"),
        (b"1 3:1 2:1 3:2", "feature 3 appears twice"),
        (b"1 30:1", "feature 30 is not in 0..29"),
        (b"1 99999999999999999999:1", "is not in 0..29"),
        (b"1 2:", "'2:' does not give a finite float32 number"),
        (b"1 2:nan", "'2:nan' does not give a finite"),
        (b"1 2:-inf", "'2:-inf' does not give a finite"),
        (b"1 2:1e39", "'2:1e39' does not give a finite float32"),
        (b"1 2:1e400", "'2:1e400' does not give a finite"),
        (b"1 2:0x10", "'2:0x10' does not give a finite"),
        (b"1 2:1_0", "'2:1_0' does not give a finite"),
        (b"\xff\xfe", "is not a list of label numbers"),
        (b"1 2:1\r3:1", "does not give a finite"),
        (b"1 " + b"z" * 500, "z..."),
    ],
)
def test_a_bad_line_is_left_out_and_named(line: bytes, expected: str) -> None:
    for dialect in (XMLREPO, SVMLIGHT):
        parse = LabelledRows(dialect, n_features=30, n_labels=9, dtype="float32")
        assert expected in reason(parse, line + b"\n")
        batch = parse(b"1 1:1\n" + line + b"\n2 2:2\n")
        assert rows_of(batch) == [([1], {1: 1.0}), ([2], {2: 2.0})]
        assert [bad.line for bad in batch.bad] == [1]


def test_features_numbered_from_one_have_no_feature_zero() -> None:
    parse = LabelledRows(SVMLIGHT, n_features=3, base=1)
    assert rows_of(parse(b"0 1:1 3:2\n")) == [([0], {0: 1.0, 2: 2.0})]
    assert reason(parse, b"0 0:1\n") == "feature 0 is not in 1..3"


def test_many_bad_lines_are_counted_and_the_first_described() -> None:
    batch = LabelledRows(XMLREPO)(b"oops\n" * 100)
    assert batch.n_bad == 100
    assert [bad.line for bad in batch.bad] == list(range(8))


def test_long_rows_out_of_order_are_sorted() -> None:
    rng = np.random.default_rng(1)
    columns = rng.permutation(5000)
    line = "0 " + " ".join(f"{c}:{c}" for c in columns)
    (row,) = rows_of(LabelledRows(XMLREPO)(line.encode()))
    assert list(row[1].items()) == [(c, float(c)) for c in range(5000)]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_rows_or_bad_lines(text: bytes) -> None:
    parse = ArffRows(True, np.array([0, -1, 1]), ("a", "l", "b"), ((2, b"no", b"yes"),))
    dense = ArffRows(False, np.array([0, -1, 1]), ("a", "l", "b"))
    for parser in (LabelledRows(XMLREPO), LabelledRows(SVMLIGHT), parse, dense):
        batch = parser(text)
        n_lines = len(text.split(b"\n")) - (text.endswith(b"\n") or not text)
        assert batch.n_lines == n_lines
        assert batch.n_rows + batch.n_bad <= n_lines


# ARFF

_COLUMNS = np.array([0, -2, 1, -1, 2])
_NAMES = ("a", "second", "b", "first", "c")


def sparse_arff(**options: Any) -> ArffRows:
    return ArffRows(True, _COLUMNS, _NAMES, ((4, b"YES", b"NO"),), **options)


def dense_arff() -> ArffRows:
    return ArffRows(False, _COLUMNS, _NAMES, ((4, b"YES", b"NO"),))


@pytest.mark.parametrize(
    ("line", "labels", "features"),
    [
        (b"{0 1.5,1 1,3 1}", [0, 1], {0: 1.5}),
        (b"{ 0 1 , 2\t3.5 }", [], {0: 1.0, 1: 3.5}),
        (b"{3 1,0 2}", [0], {0: 2.0}),
        (b"{1 0,3 0}", [], {}),
        (b"{4 NO}", [], {2: 1.0}),
        (b"{4 'NO',0 \"7\"}", [], {0: 7.0, 2: 1.0}),
        (b"{}", [], {}),
        (b"{0 5e-324}\r", [], {0: 5e-324}),
    ],
)
def test_sparse_arff_rows(line: bytes, labels: list[int], features: dict[int, float]) -> None:
    assert rows_of(sparse_arff()(b"% comment\n\n" + line + b"\n")) == [(labels, features)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"{0 1", "the row ends without }"),
        (b"{0 1} 5", "'5' does not belong in a sparse row"),
        (b"{0 1 2}", "'2}' does not belong in a sparse row"),
        (b"1,0,1,0,YES", "does not belong in a sparse row"),
        (b"{0}", "'0' is not an attribute number and a value"),
        (b"{0 1,}", "'}' is not an attribute number and a value"),
        (b"{-1 1}", "'-1' is not an attribute number and a value"),
        (b"{5 1}", "attribute 5 is not in 0..4"),
        (b"{0 1,0 2}", "attribute 0 appears twice"),
        (b"{1 0,0 1,1 1}", "attribute 1 appears twice"),
        (b"{0 ?}", "the value of 'a' is missing (?)"),
        (b"{1 2}", "'2' is not 0 or 1, as the label 'second' must be"),
        (b"{0 NaN}", "'NaN' does not give a finite float64 number"),
        (b"{0 '1}", "does not give a finite"),
        (b"{4 MAYBE}", "'MAYBE' is not among the declared values of 'c'"),
        (b"{4 NOT}", "'NOT' is not among the declared values of 'c'"),
    ],
)
def test_bad_sparse_arff_rows_are_named(line: bytes, expected: str) -> None:
    assert expected in reason(sparse_arff(), line + b"\n")


def test_dense_arff_rows() -> None:
    batch = dense_arff()(b"1,0,2.5,1,NO\n -3 , 1 , 4e1 , 0 , 'YES' \r\n5 0 6 1 YES\n")
    assert batch.x_indptr is None
    assert batch.x_values.tolist() == [[1, 2.5, 1], [-3, 40, 0], [5, 6, 0]]
    assert np.split(batch.y_indices, batch.y_indptr[1:-1])[1].tolist() == [1]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"1,0,2,1", "the row does not have 5 values"),
        (b"1,0,2,1,NO,7", "the row does not have 5 values"),
        (b"1,?,2,1,NO", "the value of 'second' is missing (?)"),
        (b"{0 1}", "'{0 1}' does not belong in a dense row"),
        (b"1,0,2x,1,NO", "'2x' does not give a finite"),
        (b"1,0,inf,1,NO", "'inf' does not give a finite"),
        (b"1,0.5,2,1,NO", "'0.5' is not 0 or 1, as the label 'second' must be"),
    ],
)
def test_bad_dense_arff_rows_are_named(line: bytes, expected: str) -> None:
    assert expected in reason(dense_arff(), line + b"\n")


@pytest.mark.parametrize(
    ("declaration", "name", "values"),
    [
        ("plain numeric", "plain", None),
        ("a-b.c REAL", "a-b.c", None),
        ("'two words' {0,1}", "two words", ("0", "1")),
        ('"tab\\"s" integer', 'tab"s', None),
        (r"'it\'s' { 'a b' , \"c\" }".replace(r"\"", '"'), "it's", ("a b", "c")),
        (r"TAG_m\'usica {0,1}", r"TAG_m\'usica", ("0", "1")),
        ("close{0, 1}", "close", ("0", "1")),
    ],
)
def test_attributes_are_declared_in_many_ways(
    declaration: str, name: str, values: tuple[str, ...] | None
) -> None:
    attribute = parse_attribute(declaration)
    assert (attribute.name, attribute.values) == (name, values)


def header_of(text: str) -> Any:
    return read_arff_header(text.encode().splitlines(keepends=True), place="x.arff", max_bytes=10_000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("@relation r\n@attribute a string\n@data\n", "x.arff, line 2: attribute 'a' has type 'string'"),
        ("@relation r\n@attribute a\n@data\n", "x.arff, line 2: 'a' is not a name and a type"),
        ("@relation r\nnonsense\n", "x.arff, line 2: 'nonsense' is not @relation"),
        ("@relation r\n@attribute a real\n", "ends before @data"),
        ("@attribute a real\n@attribute a real\n@data\n", "declares the attribute 'a' twice"),
        ("% x\n" * 3000, "no @data in its first 10000 bytes"),
    ],
)
def test_a_bad_header_is_named(text: str, expected: str) -> None:
    with pytest.raises(DataError) as raised:
        header_of(text)
    assert expected in str(raised.value)


def test_labels_are_wherever_the_list_says() -> None:
    header = header_of("@relation r\n@attribute l1 {0,1}\n@attribute a real\n@attribute l0 {0,1}\n@DATA\n")
    parse, features = arff_rows(header, ["l0", "l1"], sparse=False, dtype="float32", place="x.arff")
    assert features == ("a",)
    batch = parse(b"1,7,0\n0,8,1\n")
    assert batch.y_indices.tolist() == [1, 0]
    assert batch.x_values.tolist() == [[7], [8]]


@pytest.mark.parametrize(
    ("kind", "sparse", "expected"),
    [
        ("{red,green,blue}", False, "numbers or exactly two values"),
        ("{1,0}", True, "put 0 first in the header"),
    ],
)
def test_attributes_that_have_no_meaning_as_numbers_are_refused(
    kind: str, sparse: bool, expected: str
) -> None:
    header = header_of(f"@relation r\n@attribute a {kind}\n@attribute l {{0,1}}\n@data\n")
    with pytest.raises(DataError, match=expected):
        arff_rows(header, ["l"], sparse=sparse, dtype="float32", place="x.arff")


def test_a_label_must_be_an_attribute_once_and_binary() -> None:
    header = header_of("@relation r\n@attribute a real\n@attribute l {no,yes}\n@data\n")
    for names, expected in (
        (["b"], "'b' is not an attribute"),
        (["a", "a"], "twice"),
        (["l"], "a label must be"),
    ):
        with pytest.raises(DataError, match=expected):
            arff_rows(header, names, sparse=False, dtype="float32", place="x.arff")


def test_label_names_come_from_xml_or_lines() -> None:
    xml = (
        b'<?xml version="1.0"?><labels xmlns="http://mulan.sourceforge.net/labels">'
        b'<label name="a &amp; b"><label name="nested"/></label></labels>'
    )
    assert parse_label_names(xml, place="x.xml") == ("a & b", "nested")
    assert parse_label_names("é\r\nb\r\n".encode(), place="x.txt") == ("é", "b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"<labels><label name='a'></labels>", "not well-formed XML"),
        (b"<labels></labels>", "must hold elements"),
        (b"<!DOCTYPE x [<!ENTITY e 'e'>]><labels><label name='&e;'/></labels>", "document type"),
        (b"a\n\nb\n", "line 2: the name of a label is empty"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_bad_lists_of_labels_are_refused(text: bytes, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        parse_label_names(text, place="x")


# Scaling


def test_rows_are_scaled_to_unit_norm_without_overflow() -> None:
    text = b"0 0:3 1:4\n1\n2 0:1e200 5:1e200\n0 3:-1e-200 4:1e-200\n0 2:0\n"
    scaled = scale_rows(LabelledRows(XMLREPO)(text))
    half = math.sqrt(0.5)
    np.testing.assert_allclose(scaled, [0.6, 0.8, half, half, -half, half, 0], rtol=1e-15)


def test_dense_rows_are_scaled_too() -> None:
    scaled = scale_rows(dense_arff()(b"3,0,4,1,YES\n0,0,0,0,YES\n"))
    np.testing.assert_allclose(scaled, [[0.6, 0.8, 0.0], [0.0, 0.0, 0.0]])
