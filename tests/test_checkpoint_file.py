"""The folder of checkpoints: crashes, damage, newer programs, rivals."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore

from dswml.checkpoint_file import CheckpointFolder, newest_checkpoint
from dswml.errors import DataError, DswmlError, StoreExistsError


class Killed(BaseException):
    """Stands for the end of the process."""


def small(number: int) -> dict[str, Any]:
    return {"a": np.full((3, 2), float(number)), "n": number}


def state_in(url: str) -> Any:
    found = newest_checkpoint(url)
    return None if found is None else found.values["n"]


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Two checkpoints."""
    made = CheckpointFolder(str(tmp_path / "run"))
    made.take()
    made.write({"verb": "train"}, small(1))
    made.write({"verb": "train"}, small(2))
    return made


def test_values_come_back_with_their_bits_and_their_order(tmp_path: Path) -> None:
    made = CheckpointFolder(str(tmp_path / "run"))
    made.take()
    numbers = np.random.default_rng(0).normal(size=(4, 3))
    values = {
        "rows": numbers,
        "columns": np.asfortranarray(numbers),
        "backwards": np.asfortranarray(numbers)[:, ::-1],
        "nothing": np.zeros((5, 0)),
        "whole": np.full(4, -1),
        "cube": np.zeros((2, 2, 2)),
        "number": 0.1 + 0.2,
        "text": "a",
        "list": [1, 2],
        "missing": None,
        "yes": True,
    }
    made.write({"radius": 0.1}, values)
    found = newest_checkpoint(made.url)
    assert found is not None
    assert (found.number, found.request, found.values.keys()) == (1, {"radius": 0.1}, values.keys())
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(found.values[name], value)
            assert found.values[name].dtype == value.dtype
        else:
            assert found.values[name] == value
    assert found.values["columns"].flags.f_contiguous
    assert found.values["backwards"].flags.f_contiguous
    assert found.values["rows"].flags.c_contiguous


@contextmanager
def killed_at_write(number: int) -> Iterator[None]:
    """Let the process end in the middle of a write, so that nobody is there to clean up."""
    put = LocalStore.set
    writes = itertools.count()

    async def crash(self: LocalStore, key: str, value: Any) -> None:
        if next(writes) != number:
            return await put(self, key, value)
        (self.root / key).parent.mkdir(parents=True, exist_ok=True)
        (self.root / f"{key}.partial").write_bytes(value.to_bytes()[:5])
        patch.setattr(CheckpointFolder, "_remove", lambda *_: None)
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "set", crash)
        yield


def test_a_crash_at_any_write_leaves_the_checkpoint_before(folder: CheckpointFolder) -> None:
    for number in range(100):
        try:
            with killed_at_write(number):
                folder.write({"verb": "train"}, small(3))
            break
        except Killed:
            assert state_in(folder.url) == 2
    assert number >= 5
    assert state_in(folder.url) == 3
    folder.write({"verb": "train"}, small(4))
    assert state_in(folder.url) == 4
    assert len(list(Path(folder.url).glob("checkpoint-*"))) == 2


def flip(place: Path) -> None:
    chunk = place / "a" / "c" / "0" / "0"
    content = bytearray(chunk.read_bytes())
    content[10] ^= 1
    chunk.write_bytes(bytes(content))


def truncate(place: Path) -> None:
    chunk = place / "a" / "c" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:20])


def lose(place: Path) -> None:
    (place / "a" / "c" / "0" / "0").unlink()


def exchange(place: Path) -> None:
    array = zarr.open_array(place / "a", mode="r+")
    array[0, 0] = 7.0


def claim(place: Path) -> None:
    attributes = place / "a" / "zarr.json"
    about = json.loads(attributes.read_text())
    about["shape"] = [10**15, 2]
    attributes.write_text(json.dumps(about))


def tamper(place: Path) -> None:
    attributes = place / "zarr.json"
    before = attributes.read_text()
    attributes.write_text(before.replace('"n": 2', '"n": 9'))
    assert attributes.read_text() != before


def tear(place: Path) -> None:
    attributes = place / "zarr.json"
    attributes.write_text(attributes.read_text()[:100])


DAMAGE: dict[Callable[[Path], None], str] = {
    flip: "is damaged",
    truncate: "is damaged",
    lose: "is missing",
    exchange: "does not match its checksum",
    claim: "is truncated",
    tamper: "do not match their checksum",
    tear: "cannot be opened",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning_or_refused(
    damage: Callable[[Path], None], folder: CheckpointFolder
) -> None:
    damage(Path(folder.url) / "checkpoint-000002")
    with pytest.warns(UserWarning, match=f"{DAMAGE[damage]}.*the checkpoint before it is used instead"):
        assert state_in(folder.url) == 1
    shutil.rmtree(Path(folder.url) / "checkpoint-000001")
    with pytest.raises(DataError, match=DAMAGE[damage]):
        newest_checkpoint(folder.url)


def test_a_checkpoint_of_a_newer_program_is_refused(folder: CheckpointFolder) -> None:
    zarr.open_group(Path(folder.url) / "checkpoint-000002").attrs["format_version"] = 2
    with pytest.raises(DataError, match="version 2; this program reads version 1: install a newer dswml"):
        newest_checkpoint(folder.url)


@pytest.mark.parametrize("content", ["attributes", "arrays", "files"])
def test_a_place_of_something_else_is_refused(content: str, tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    if content == "files":
        (place / "letter.txt").write_text("Dear Sir")
    elif content == "arrays":
        zarr.create_group(place).create_array("a", shape=(2,), dtype=float)
    else:
        zarr.create_group(place, attributes={"format": "dswml-model"})
    with pytest.raises(StoreExistsError, match="is not a folder of checkpoints"):
        newest_checkpoint(str(place))
    with pytest.raises(StoreExistsError, match="is not a folder of checkpoints"):
        CheckpointFolder(str(place)).take()


@pytest.mark.parametrize("left", ["nothing", "partial file", "bare group"])
def test_a_crash_while_the_folder_is_made_leaves_one_that_can_be_used(left: str, tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    if left == "bare group":
        zarr.create_group(place)
    elif left == "partial file":
        (place / "zarr.1234.partial").write_text("{")
    assert newest_checkpoint(str(place)) is None
    made = CheckpointFolder(str(place))
    made.take()
    made.write({}, small(1))
    assert state_in(made.url) == 1


def test_beginning_again_removes_what_was_there(folder: CheckpointFolder) -> None:
    flip(Path(folder.url) / "checkpoint-000002")
    CheckpointFolder(folder.url).take()
    assert newest_checkpoint(folder.url) is None


def test_a_process_thought_dead_cannot_spoil_the_work_of_its_successor(folder: CheckpointFolder) -> None:
    successor = CheckpointFolder(folder.url, last=2)
    successor.take()
    with pytest.raises(DswmlError, match="another process goes on from the checkpoint in"):
        folder.write({}, small(3))
    successor.write({}, small(3))
    assert state_in(folder.url) == 3
