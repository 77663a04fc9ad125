"""Kernels that parse rows of text in byte buffers; they release the interpreter lock and allocate nothing.

A buffer holds whole lines and ends with a newline, so that no scan needs a bound. A kernel fills the arrays
it is given, leaves bad lines out, and records for the first of them which line it is, what is wrong (a code),
where in the buffer, and a number. Decimal numbers equal ``float(token)`` to the last bit: most take Clinger's
exact path (53 bits of digits and a power of ten that a double holds), the others the Eisel-Lemire product
(Lemire, "Number parsing at a gigabyte per second", 2021); what even that cannot decide is recorded for Python
to decide. All kernels live in this one file because Numba's cache does not notice a change in another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dswml.selection import compiled

#: The two dialects of ``l1,l2,... f1:v1 f2:v2 ...``.
XMLREPO, SVMLIGHT = 0, 1

# What can be wrong with a line.
BAD_LABEL, LABEL_RANGE, LABEL_TWICE, LABEL_VALUE = 1, 2, 3, 4
BAD_FEATURE, FEATURE_RANGE, FEATURE_TWICE, BAD_VALUE = 5, 6, 7, 8
BAD_ROW, FIELD_COUNT, BAD_FIELD, FIELD_RANGE, FIELD_TWICE, MISSING = 9, 10, 11, 12, 13, 14
NOT_DECLARED, NOT_CLOSED = 15, 16

# How parsing a number went.
DECIDED, MALFORMED, UNDECIDED = 0, 1, 2

_TAB, _NEWLINE, _RETURN, _SPACE = 9, 10, 13, 32
_QUOTE, _HASH, _PERCENT, _APOSTROPHE = 34, 35, 37, 39
_PLUS, _COMMA, _MINUS, _DOT, _ZERO, _NINE, _COLON, _QUESTION = 43, 44, 45, 46, 48, 57, 58, 63
_E_UPPER, _E, _OPEN, _CLOSE = 69, 101, 123, 125
_QID = np.frombuffer(b"qid:", dtype=np.uint8)


def _powers_of_five() -> NDArray[np.uint64]:
    """Return the leading 128 bits of 5**q for q = -342 .. 308, as Eisel-Lemire needs them."""
    table = np.empty((651, 2), dtype=np.uint64)
    for q in range(-342, 309):
        if q >= 0:
            bits = 5**q
            shift = 128 - bits.bit_length()
            bits = bits << shift if shift >= 0 else bits >> -shift
        else:
            power = 5**-q
            length = (power - 1).bit_length()
            bits = (1 << (length + 127 if q >= -27 else 2 * length + 128)) // power + 1
            bits >>= max(0, bits.bit_length() - 128)
        table[q + 342] = (bits >> 64, bits & (2**64 - 1))
    return table


_FIVE = _powers_of_five()
_TEN = np.array([float(10**k) for k in range(23)])


@compiled
def _product(a: Any, b: Any) -> Any:
    """Return the high and low 64 bits of the 128-bit product."""
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a_low, a_high, b_low, b_high = a & mask, a >> half, b & mask, b >> half
    low = a_low * b_low
    middle = a_high * b_low + (low >> half)
    cross = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> half) + (cross >> half), (cross << half) | (low & mask)


@compiled
def _eisel_lemire(digits: Any, exponent: Any) -> Any:
    """Return digits * 10**exponent correctly rounded and whether it is decided (digits > 0)."""
    if exponent > 308:
        return np.inf, True
    if exponent < -342:
        return 0.0, True
    leading = 0
    w = digits
    for step in (32, 16, 8, 4, 2, 1):
        if w < (np.uint64(1) << np.uint64(64 - step)):
            w <<= np.uint64(step)
            leading += step
    high, low = _product(w, _FIVE[exponent + 342, 0])
    if (high & np.uint64(0x1FF)) == np.uint64(0x1FF):
        carry, _ = _product(w, _FIVE[exponent + 342, 1])
        low += carry
        if low < carry:
            high += np.uint64(1)
        if low == np.uint64(0xFFFFFFFFFFFFFFFF) and (exponent < -27 or exponent > 55):
            return 0.0, False
    upper = high >> np.uint64(63)
    shift = upper + np.uint64(9)
    mantissa = high >> shift
    power = ((217706 * exponent) >> 16) + 63 + np.int64(upper) - leading + 1023
    if power <= 0:
        return 0.0, False  # subnormal
    one = np.uint64(1)
    halfway = low <= one and -4 <= exponent <= 23 and (mantissa & np.uint64(3)) == one
    if halfway and (mantissa << shift) == high:
        mantissa -= one
    mantissa = (mantissa + (mantissa & one)) >> one
    if mantissa >= np.uint64(1 << 53):
        mantissa = np.uint64(1 << 52)
        power += 1
    if power >= 2047:
        return np.inf, True
    bits = (mantissa & np.uint64((1 << 52) - 1)) | (np.uint64(power) << np.uint64(52))
    return np.uint64(bits).view(np.float64), True


@compiled
def parse_index(text: Any, at: Any) -> Any:
    """Parse a whole number of 0 or more; return it (at most 2**40) and where it ends (`at`: none here)."""
    number = np.int64(0)
    i = at
    while _ZERO <= text[i] <= _NINE:
        number = min(number * 10 + np.int64(text[i] - _ZERO), np.int64(1 << 40))
        i += 1
    return number, i


@compiled
def _leading_digits(text: Any, at: Any, end: Any) -> Any:
    """Return the first 19 significant digits of ``text[at:end]``, their power of ten, and if more follow."""
    digits = np.uint64(0)
    exponent = np.int64(0)
    n_digits = 0
    fraction = more = False
    for i in range(at, end):
        if text[i] == _DOT:
            fraction = True
        elif n_digits < 19:
            digits = digits * np.uint64(10) + np.uint64(text[i] - _ZERO)
            n_digits += digits != np.uint64(0)
            exponent -= fraction
        else:
            more |= text[i] != _ZERO
            exponent += not fraction
    return digits, exponent, more


@compiled
def parse_number(text: Any, at: Any) -> Any:
    """Parse a decimal number at ``text[at]``; return its value, where it ends, and how that went.

    The third item is `DECIDED` when the value equals ``float(token)``, `MALFORMED` when there is no number
    here, and `UNDECIDED` when the token is well formed but only arbitrary precision can round it.
    """
    i = at
    negative = text[i] == _MINUS
    if negative or text[i] == _PLUS:
        i += 1
    first = i
    digits = np.uint64(0)
    while _ZERO <= text[i] <= _NINE:
        digits = digits * np.uint64(10) + np.uint64(text[i] - _ZERO)
        i += 1
    n_digits = i - first
    exponent = np.int64(0)
    if text[i] == _DOT:
        i += 1
        point = i
        while _ZERO <= text[i] <= _NINE:
            digits = digits * np.uint64(10) + np.uint64(text[i] - _ZERO)
            i += 1
        n_digits += i - point
        exponent = np.int64(point - i)
    if n_digits == 0:
        return 0.0, at, MALFORMED
    more = False
    if n_digits > 19:
        digits, exponent, more = _leading_digits(text, first, i)
    if text[i] == _E or text[i] == _E_UPPER:
        i += 1
        minus = text[i] == _MINUS
        if minus or text[i] == _PLUS:
            i += 1
        power, end = parse_index(text, i)
        if end == i:
            return 0.0, at, MALFORMED
        i = end
        exponent += -power if minus else power
    decided = True
    if not more and digits < np.uint64(1 << 53) and -22 <= exponent <= 22:
        exact = np.float64(digits)
        value = exact / _TEN[-exponent] if exponent < 0 else exact * _TEN[exponent]
    elif digits == np.uint64(0):
        value = 0.0
    else:
        value, decided = _eisel_lemire(digits, exponent)
        if more and decided:
            above, decided = _eisel_lemire(digits + np.uint64(1), exponent)
            decided = decided and value == above
    return (-value if negative else value), i, (DECIDED if decided else UNDECIDED)


@compiled
def next_line(text: Any, at: Any) -> Any:
    """Return where the next line begins."""
    while text[at] != _NEWLINE:
        at += 1
    return at + 1


@compiled
def at_line_end(text: Any, at: Any) -> Any:
    """Tell whether the line ends here, with or without a carriage return."""
    return text[at] == _NEWLINE or (text[at] == _RETURN and text[at + 1] == _NEWLINE)


@compiled
def sort_row(keys: Any, values: Any) -> Any:
    """Sort a row's keys in place, their values with them; return a key that occurs twice, or -1."""
    gap = 1
    while 3 * gap + 1 < len(keys):
        gap = 3 * gap + 1
    while gap > 0:  # shell sort: quick to compile, and rows out of order are rare
        for k in range(gap, len(keys)):
            key, value = keys[k], values[k]
            j = k
            while j >= gap and keys[j - gap] > key:
                keys[j], values[j] = keys[j - gap], values[j - gap]
                j -= gap
            keys[j], values[j] = key, value
        gap //= 3
    for k in range(1, len(keys)):
        if keys[k] == keys[k - 1]:
            return np.int64(keys[k])
    return np.int64(-1)


@compiled
def known_number(text: Any, at: Any, known_at: Any, known: Any) -> Any:
    """Parse a number as `parse_number` does, but look up those that Python has decided."""
    value, end, status = parse_number(text, at)
    if status == UNDECIDED:
        low, high = 0, len(known_at)
        while low < high:
            middle = (low + high) // 2
            if known_at[middle] < at:
                low = middle + 1
            else:
                high = middle
        if low < len(known_at) and known_at[low] == at:
            value, status = known[low], DECIDED
    return value, end, status


@compiled
def _is_blank(c: Any) -> Any:
    return c in (_SPACE, _TAB)


@compiled
def _matches(text: Any, at: Any, word: Any) -> Any:
    """Tell whether the text goes on with the word; no word holds a newline."""
    k = 0
    while k < len(word) and text[at + k] == word[k]:
        k += 1
    return k == len(word)


@compiled
def _ends_token(text: Any, at: Any, dialect: Any) -> Any:
    return _is_blank(text[at]) or at_line_end(text, at) or (text[at] == _HASH and dialect == SVMLIGHT)


@compiled
def parse_labelled_rows(
    text: Any,
    dialect: Any,
    base: Any,
    n_features: Any,
    n_labels: Any,
    largest: Any,
    known_at: Any,
    known: Any,
    x_indptr: Any,
    x_indices: Any,
    x_values: Any,
    y_indptr: Any,
    y_indices: Any,
    undecided: Any,
    bad: Any,
) -> Any:
    """Parse rows of labels and features; return counts of rows, entries of X and Y, lines, bad lines,
    undecided numbers, and rows at the end that are empty lines.

    In `XMLREPO` every line is a row; in `SVMLIGHT` empty lines and comments are not, and ``qid:`` is passed
    over.
    """
    n_rows = n_lines = n_bad = n_undecided = blank = 0
    nx = ny = np.int64(0)
    x_indptr[0] = y_indptr[0] = 0
    i = 0
    while i < len(text):
        n_lines += 1
        empty = at_line_end(text, i)
        if dialect == SVMLIGHT and (empty or text[i] == _HASH):
            i = next_line(text, i)
            continue
        x_start, y_start = nx, ny
        code, at, number = 0, i, np.int64(-1)

        ordered = True
        labelled = not empty and not _is_blank(text[i])
        while labelled:
            number, end = parse_index(text, i)
            if end > i and text[end] == _COLON and ny == y_start:
                break  # no label: the line begins with its first feature
            labelled = text[end] == _COMMA
            if end == i or not (labelled or _ends_token(text, end, dialect)):
                code = BAD_LABEL
                break
            if number >= n_labels:
                code = LABEL_RANGE
                break
            y_indices[ny] = number
            ordered = ordered and (ny == y_start or y_indices[ny - 1] < number)
            ny += 1
            i = end + 1 if labelled else end
        if code == 0 and not ordered:
            number = sort_row(y_indices[y_start:ny], y_indices[y_start:ny].copy())
            if number >= 0:
                code = LABEL_TWICE

        ordered = True
        while code == 0:
            while _is_blank(text[i]):
                i += 1
            if _ends_token(text, i, dialect):
                break
            at = i
            number, end = parse_index(text, i)
            if end == i or text[end] != _COLON:
                if dialect == SVMLIGHT and nx == x_start and _matches(text, i, _QID):
                    while not _ends_token(text, i, dialect):
                        i += 1
                    continue
                code = BAD_FEATURE
                break
            column = number - base
            if column < 0 or column >= n_features:
                code = FEATURE_RANGE
                break
            value, i, status = known_number(text, end + 1, known_at, known)
            if status == UNDECIDED:
                undecided[n_undecided, 0], undecided[n_undecided, 1] = end + 1, i
                n_undecided += 1
            if status == MALFORMED or not abs(value) < largest or not _ends_token(text, i, dialect):
                code = BAD_VALUE
                break
            x_indices[nx] = column
            x_values[nx] = value
            ordered = ordered and (nx == x_start or x_indices[nx - 1] < column)
            nx += 1
        if code == 0 and not ordered:
            number = sort_row(x_indices[x_start:nx], x_values[x_start:nx])
            if number >= 0:
                code = FEATURE_TWICE
                number += base

        i = next_line(text, i)
        if code != 0:
            if n_bad < len(bad):
                bad[n_bad, 0], bad[n_bad, 1], bad[n_bad, 2], bad[n_bad, 3] = n_lines - 1, code, at, number
            n_bad += 1
            nx, ny = x_start, y_start
            continue
        n_rows += 1
        x_indptr[n_rows], y_indptr[n_rows] = nx, ny
        blank = blank + 1 if empty else 0
    return n_rows, nx, ny, n_lines, n_bad, n_undecided, blank


@compiled
def _parse_field(text: Any, at: Any, words: Any, word_at: Any, field: Any, known_at: Any, known: Any) -> Any:
    """Parse a value of ARFF, quoted or not: a number or, with words, one of two; return value, end and code.

    The code is 0, or what is wrong, or minus the start of a number that is undecided.
    """
    if text[at] == _QUESTION:
        return 0.0, at, MISSING
    quoted = text[at] == _QUOTE or text[at] == _APOSTROPHE
    start = at + 1 if quoted else at
    code = 0
    if word_at[field, 0] < 0:
        value, end, status = known_number(text, start, known_at, known)
        if status != DECIDED:
            code = BAD_VALUE if status == MALFORMED else -start
    else:
        value, end, code = 0.0, start, NOT_DECLARED
        for k in range(2):
            word = words[word_at[field, 2 * k] : word_at[field, 2 * k + 1]]
            if _matches(text, start, word):
                after = text[start + len(word)]
                ends = _is_blank(after) or after in (_COMMA, _CLOSE) or at_line_end(text, start + len(word))
                if after == text[at] if quoted else ends:
                    value, end, code = np.float64(k), start + len(word), 0
    if quoted and code <= 0:
        if text[end] != text[at]:
            code = BAD_VALUE
        end += 1
    return value, end, code


@compiled
def parse_arff_rows(
    text: Any,
    sparse: Any,
    columns: Any,
    words: Any,
    word_at: Any,
    largest: Any,
    known_at: Any,
    known: Any,
    x_indptr: Any,
    x_indices: Any,
    x_values: Any,
    y_indptr: Any,
    y_indices: Any,
    fields: Any,
    undecided: Any,
    bad: Any,
) -> Any:
    """Parse rows of ARFF, ``v0,v1,...`` or sparse ``{i v,j v,...}``; return counts as the parser above does.

    ``columns[attribute]`` is the column of X, or ``-1 - label``; columns of X come in the order of the
    attributes, so that the values of dense rows follow one another. ``word_at[attribute]`` bounds the two
    words of a nominal attribute in `words`, or is negative for a number.
    """
    n_rows = n_lines = n_bad = n_undecided = 0
    nx = ny = np.int64(0)
    x_indptr[0] = y_indptr[0] = 0
    i = 0
    while i < len(text):
        n_lines += 1
        while _is_blank(text[i]):
            i += 1
        if at_line_end(text, i) or text[i] == _PERCENT:
            i = next_line(text, i)
            continue
        x_start, y_start = nx, ny
        code, at, number = 0, i, np.int64(-1)
        n_fields = 0
        in_order = labels_in_order = True
        if sparse != (text[i] == _OPEN):
            code = BAD_ROW
        elif sparse:
            i += 1
        while code == 0:
            while _is_blank(text[i]):
                i += 1
            at = i
            if sparse:
                if text[i] == _CLOSE and n_fields == 0:
                    i += 1
                    break
                number, end = parse_index(text, i)
                if end == i or not _is_blank(text[end]):
                    code = BAD_FIELD
                    break
                if number >= len(columns):
                    code = FIELD_RANGE
                    break
                in_order = in_order and (n_fields == 0 or fields[n_fields - 1] < number)
                fields[n_fields] = number
                i = end
                while _is_blank(text[i]):
                    i += 1
                at = i
            else:
                number = np.int64(n_fields)
                if number >= len(columns):
                    code, number = FIELD_COUNT, number + 1
                    break
            value, end, code = _parse_field(text, i, words, word_at, number, known_at, known)
            if code < 0:
                undecided[n_undecided, 0], undecided[n_undecided, 1] = -code, end
                n_undecided += 1
                code = 0
            if code == 0 and not abs(value) < largest:
                code = BAD_VALUE
            if code > 0:
                break
            n_fields += 1
            column = columns[number]
            if column >= 0:
                x_indices[nx], x_values[nx] = column, value
                nx += 1
            elif value == 1.0:
                y_indices[ny] = -1 - column
                labels_in_order = labels_in_order and (ny == y_start or y_indices[ny - 1] < y_indices[ny])
                ny += 1
            elif value != 0.0:
                code = LABEL_VALUE
                break
            i = end
            spaced = _is_blank(text[i])
            while _is_blank(text[i]):
                i += 1
            if text[i] == _COMMA:
                i += 1
            elif sparse and text[i] == _CLOSE:
                i += 1
                break
            elif at_line_end(text, i):
                code = NOT_CLOSED if sparse else 0
                break
            elif sparse and spaced:
                code, at = BAD_ROW, i
            elif not spaced:
                code = BAD_VALUE
        while code == 0 and _is_blank(text[i]):
            i += 1
        if code == 0 and not at_line_end(text, i):
            code, at = BAD_ROW, i
        if code == 0 and not sparse and n_fields != len(columns):
            code, number = FIELD_COUNT, np.int64(n_fields)
        if code == 0 and not in_order:
            sort_row(x_indices[x_start:nx], x_values[x_start:nx])
            number = sort_row(fields[:n_fields], fields[:n_fields].copy())
            if number >= 0:
                code = FIELD_TWICE
        if code == 0 and not labels_in_order:
            sort_row(y_indices[y_start:ny], y_indices[y_start:ny].copy())

        i = next_line(text, i)
        if code != 0:
            if n_bad < len(bad):
                bad[n_bad, 0], bad[n_bad, 1], bad[n_bad, 2], bad[n_bad, 3] = n_lines - 1, code, at, number
            n_bad += 1
            nx, ny = x_start, y_start
            continue
        n_rows += 1
        x_indptr[n_rows], y_indptr[n_rows] = nx, ny
    return n_rows, nx, ny, n_lines, n_bad, n_undecided, 0


@compiled
def count_columns(indices: Any, counts: Any) -> None:
    """Add to each column's count how often it occurs."""
    for column in indices:
        counts[column] += 1


@compiled
def scale_to_unit(indptr: Any, values: Any, scaled: Any) -> None:
    """Scale each row to unit Euclidean norm, without overflow; rows of zeros stay."""
    for row in range(len(indptr) - 1):
        total = largest = 0.0
        for k in range(indptr[row], indptr[row + 1]):
            total += values[k] ** 2
            largest = max(largest, abs(values[k]))
        unit = 1.0
        if largest > 0.0 and not 1e-280 < total < 1e280:
            unit, total = largest, 0.0
            for k in range(indptr[row], indptr[row + 1]):
                total += (values[k] / unit) ** 2
        norm = np.sqrt(total) if largest > 0.0 else 1.0
        for k in range(indptr[row], indptr[row + 1]):
            scaled[k] = values[k] / unit / norm
