"""Zarr groups at paths and URLs: what is there, what is not, and what is damaged, is said plainly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from dswml.errors import DataError, StoreExistsError, StoreNotFoundError, UsageError
from dswml.storage import (
    CSR_INDICES,
    CSR_INDPTR,
    CSR_VALUES,
    DENSE_FLOAT,
    LABELS,
    absolute_url,
    chunk_checksums,
    open_group,
    open_node,
    options_key,
    parse_options,
    read_array,
    read_names,
    remove_store,
    store_exists,
    write_names,
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "group.zarr"


def numbers(place: Path, codecs: Any = DENSE_FLOAT, shards: int | None = None) -> zarr.Array[Any]:
    """A group with one array of the numbers 0 to 99 in chunks of ten."""
    group = open_group(place, "w")
    array = group.create_array(
        "numbers",
        shape=(100,),
        chunks=(10,),
        shards=None if shards is None else (shards,),
        dtype="float64",
        compressors=codecs,
        fill_value=-1,
    )
    array[:] = np.arange(100)
    return reopened(place)


def reopened(place: Path) -> zarr.Array[Any]:
    array = open_group(place, "r")["numbers"]
    assert isinstance(array, zarr.Array)
    return array


def test_a_group_that_is_not_there_is_named(place: Path) -> None:
    with pytest.raises(StoreNotFoundError, match=f"no store at {place}"):
        open_group(place, "r")
    with pytest.raises(FileNotFoundError):
        open_group(place, "r+")


def test_creating_never_overwrites(place: Path) -> None:
    open_group(place, "w").attrs["kept"] = 1
    with pytest.raises(StoreExistsError, match=str(place)):
        open_group(place, "w")
    assert open_group(place, "r").attrs["kept"] == 1


def test_what_is_not_a_zarr_group_is_refused(place: Path) -> None:
    place.mkdir()
    (place / "letter.txt").write_text("hello")
    with pytest.raises(DataError, match=r"is not a Zarr v3 group \(it has no zarr.json\)"):
        open_group(place)
    (place / "zarr.json").write_text("{ not json")
    with pytest.raises(DataError, match="cannot be opened as a Zarr v3 group"):
        open_group(place)


def test_an_array_in_place_of_a_group_is_refused(place: Path) -> None:
    zarr.create_array(str(place), shape=(3,), dtype="float32")
    with pytest.raises(DataError, match=f"{place} is a Zarr array, not a group"):
        open_group(place)


def test_a_file_in_place_of_a_group_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    with pytest.raises(DataError, match="Zarr v3 group"):
        open_group(tmp_path / "file")


def test_an_empty_folder_is_nothing(tmp_path: Path) -> None:
    assert not store_exists(tmp_path)
    open_group(tmp_path, "w")
    assert store_exists(tmp_path)


def test_only_a_zarr_store_is_ever_removed(place: Path) -> None:
    place.mkdir()
    (place / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreExistsError, match="is not a Zarr store: it is not deleted"):
        remove_store(place)
    assert (place / "thesis.tex").exists()


def test_a_store_is_removed_with_all_it_holds(place: Path) -> None:
    numbers(place)
    remove_store(place)
    assert not place.exists()
    remove_store(place)


@pytest.mark.parametrize("url", ["memory://names/a.zarr", None])
def test_names_of_any_alphabet_survive(url: str | None, place: Path) -> None:
    names = ["cat", "", 'naïve, "quoted"', "日本語", "tab\t\n", "\N{GRINNING FACE}"]
    group = open_group(url or place, "w")
    write_names(group, "label_names", names)
    assert read_names(open_group(url or place, "r"), "label_names") == tuple(names)
    assert read_names(group, "feature_names") is None
    remove_store(url or place)


def test_zarr_alone_reads_names(place: Path) -> None:
    write_names(open_group(place, "w"), "label_names", ["a", "ö"])
    text = zarr.open_array(str(place / "label_names"), mode="r")[:]
    assert json.loads(np.asarray(text).tobytes()) == ["a", "ö"]


def test_names_that_are_not_a_list_of_text_are_refused(place: Path) -> None:
    group = open_group(place, "w")
    for key, text in (("a", b"[1, 2]"), ("b", b"[oops")):
        array = group.create_array(key, shape=(len(text),), dtype="uint8", chunks=(len(text),))
        array[:] = np.frombuffer(text, np.uint8)
        with pytest.raises(DataError, match=f"{key} in {place} is not a JSON list of names"):
            read_names(group, key)


@pytest.mark.parametrize("codecs", [DENSE_FLOAT, CSR_VALUES, CSR_INDICES, CSR_INDPTR, LABELS])
def test_every_kind_of_array_reads_back_what_was_written(place: Path, codecs: Any) -> None:
    array = numbers(place, codecs)
    assert read_array(array, 5, 37, store="s").tolist() == list(range(5, 37))


@pytest.mark.parametrize("codecs", [DENSE_FLOAT, CSR_VALUES, LABELS])
@pytest.mark.parametrize("position", [0, 1, 17, -5, -1])
def test_one_flipped_bit_is_an_error_that_names_store_array_and_chunk(
    place: Path, codecs: Any, position: int
) -> None:
    numbers(place, codecs)
    file = place / "numbers" / "c" / "3"
    content = bytearray(file.read_bytes())
    content[position] ^= 0x10
    file.write_bytes(content)
    array = reopened(place)
    with pytest.raises(DataError, match=r"chunk 3 of array numbers in /data/s\.zarr is damaged"):
        read_array(array, 25, 60, store="/data/s.zarr")
    assert read_array(array, 40, 60, store="/data/s.zarr")[0] == 40


@pytest.mark.parametrize("length", [0, 1, 3, 4, 40, 83])
def test_a_truncated_chunk_is_an_error_that_names_it(place: Path, length: int) -> None:
    numbers(place)
    file = place / "numbers" / "c" / "9"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(DataError, match="chunk 9 of array numbers in s is damaged"):
        read_array(reopened(place), 0, 100, store="s")


def test_a_lost_chunk_is_an_error_and_not_the_fill_value(place: Path) -> None:
    numbers(place)
    (place / "numbers" / "c" / "4").unlink()
    with pytest.raises(DataError, match=r"chunk 4 of array numbers in s is missing.*restore"):
        read_array(reopened(place), 0, 100, store="s")
    with pytest.raises(DataError, match="numbers/c/4 is missing from s"):
        chunk_checksums(reopened(place), store="s")


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_a_damaged_shard_is_an_error_that_names_its_first_unreadable_chunk(place: Path, damage: str) -> None:
    numbers(place, shards=50)
    file = place / "numbers" / "c" / "1"
    content = bytearray(file.read_bytes())
    if damage == "truncate":
        file.write_bytes(content[:-30])
    elif damage == "flip":
        content[100] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    chunk = 6 if damage == "flip" else 5
    with pytest.raises(DataError, match=f"chunk {chunk} of array numbers in s is"):
        read_array(reopened(place), 0, 100, store="s")
    assert read_array(reopened(place), 0, 50, store="s")[-1] == 49


@pytest.mark.parametrize("shards", [None, 50])
def test_checksums_follow_the_content_of_every_chunk(place: Path, shards: int | None) -> None:
    before = chunk_checksums(numbers(place, shards=shards), store="s")
    assert len(before) == 4 * 10
    changed = open_group(place, "r+")["numbers"]
    assert isinstance(changed, zarr.Array)
    changed[37] = 38
    after = chunk_checksums(reopened(place), store="s")
    assert [i // 4 for i in range(40) if before[i] != after[i]][:1] == [3]
    assert after[16:] == before[16:]


def test_somebodys_own_array_of_the_older_format_opens(place: Path) -> None:
    zarr.create_array(str(place), data=np.arange(3.0), zarr_format=2)
    node = open_node(place)
    assert isinstance(node, zarr.Array)
    assert np.asarray(node[:]).tolist() == [0, 1, 2]
    with pytest.raises(StoreNotFoundError):
        open_node(place / "nothing")


def test_paths_become_absolute_and_urls_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_url("a.zarr") == str(tmp_path / "a.zarr")
    assert absolute_url(Path("a.zarr")) == str(tmp_path / "a.zarr")
    assert absolute_url("memory://a.zarr/") == "memory://a.zarr"
    with pytest.raises(UsageError, match="must not be empty"):
        absolute_url("")


def test_an_unknown_protocol_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="Protocol not known: nosuch"):
        open_group("nosuch://bucket/a.zarr")


def test_options_that_cannot_be_sent_are_refused() -> None:
    with pytest.raises(UsageError, match="storage options must be texts"):
        options_key({"session": object()})
    assert parse_options(options_key({"b": 1, "a": [2]})) == {"a": [2], "b": 1}
