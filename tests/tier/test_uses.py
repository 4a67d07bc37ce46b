"""Uses: what clients write beside the records, and what programs of the version before write elsewhere."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.errors import OutOfSpace, VersionMismatch
from kvstore.model.replica import MARKS_ROW_BYTES, SHARDS_MAX, FrameClass
from kvstore.tier.folder import NodeFolder
from kvstore.tier.records import ExtentTable, TableFiles
from kvstore.tier.uses import Marks, Uses

CLASS = FrameClass(page_bytes=10_000, page_tokens=15, layers=3)
INCARNATION, EXTENT, FRAMES, LAYERS = 0x1234_5678_9ABC, 5, 7, 300


@pytest.fixture
def folder() -> Iterator[NodeFolder]:
    """In shared memory: other file systems give memory back in their own way."""
    with tempfile.TemporaryDirectory(prefix="kvtest-", dir="/dev/shm") as home:
        folder = NodeFolder(home, "n")
        folder.create()
        yield folder


def create(folder: NodeFolder) -> ExtentTable:
    return ExtentTable.create(folder, EXTENT, 2, CLASS, INCARNATION, FRAMES)


def opened(folder: NodeFolder, writable: bool = False) -> ExtentTable:
    table = ExtentTable.open(folder, EXTENT, INCARNATION, writable)
    assert table is not None
    return table


def write_marks(folder: NodeFolder, rows: np.ndarray) -> None:
    """As a program of the version before, which maps them."""
    with open(folder.marks(EXTENT), "r+b") as file:
        file.write(rows.astype("<u8").tobytes())


def marks_memory(folder: NodeFolder) -> int:
    return folder.marks(EXTENT).stat().st_blocks


@pytest.fixture(params=[Uses, Marks])
def both(request: pytest.FixtureRequest, folder: NodeFolder) -> tuple[ExtentTable, ExtentTable]:
    """The same extent, mapped by two programs."""
    create(folder)
    if request.param is Marks:
        folder.uses(EXTENT).unlink()
    one, two = opened(folder), opened(folder)
    assert type(one.uses) is type(two.uses) is request.param
    return one, two


def test_progress_counts_per_shard_and_under_its_own_generation(both: tuple[ExtentTable, ExtentTable]) -> None:
    writer, reader = (table.uses for table in both)
    frames, generations = slice(2, 5), np.array([7, 1 << 32 | 8, 9], np.uint64)
    writer.begin(frames, generations)
    assert not reader.leading(frames, generations).any()
    levels = writer.levels(generations, LAYERS)
    assert levels.shape == (LAYERS + 1, 3)
    writer.shown(frames, 1)[:] = levels[2]
    writer.shown(frames, SHARDS_MAX - 1)[:] = levels[np.array([0, 1, 200]), np.arange(3)]
    shown = reader.leading(frames, generations)
    assert shown[:, 1].tolist() == [2, 2, 2] and shown[:, SHARDS_MAX - 1].tolist() == [0, 1, 200]
    assert not shown[:, [0, *range(2, SHARDS_MAX - 1)]].any()
    writer.begin(frames, generations)
    assert (reader.leading(frames, generations) == shown).all(), "another shard of the same pages begins"
    later = generations + np.array([0, 1, 0], np.uint64)
    assert reader.leading(frames, later)[:, 1].tolist() == [2, 0, 2]
    writer.begin(frames, later)
    assert reader.leading(frames, later)[:, 1].tolist() == [2, 0, 2], "an earlier page's progress is not its own"
    assert not reader.leading(slice(0, 2), generations[:2]).any() and not both[1].last_use.any()


def test_no_layer_is_shown_that_was_not_written(both: tuple[ExtentTable, ExtentTable]) -> None:
    """A byte does not count to 300."""
    uses, generations, frames = both[0].uses, np.array([3], np.uint64), slice(1, 2)
    uses.begin(frames, generations)
    levels = uses.levels(generations, LAYERS)
    for layers in range(LAYERS + 1):
        uses.shown(frames, 0)[:] = levels[layers]
        assert min(layers, 255) <= int(uses.leading(frames, generations)[0, 0]) <= layers


def test_what_programs_of_the_version_before_write_counts(folder: NodeFolder) -> None:
    table, reader = create(folder), opened(folder)
    assert marks_memory(folder) == 0
    reader.last_use[:] = [10, 20, 30, 0, 0, 0, 0]
    rows = np.zeros((FRAMES, MARKS_ROW_BYTES // 8))
    rows[:, 0] = [5, 25, 0, 7, 0, 0, 1]
    rows[3, 1:] = 99  # its progress
    write_marks(folder, rows)
    table.heed()
    assert reader.last_use.tolist() == [10, 25, 30, 7, 0, 0, 1]
    assert [table.used_ns(frame) for frame in range(FRAMES)] == [10, 25, 30, 7, 0, 0, 1]
    assert marks_memory(folder) == 0
    assert folder.marks(EXTENT).stat().st_size == FRAMES * MARKS_ROW_BYTES, "it is as long as they expect"
    table.heed()
    assert reader.last_use.tolist() == [10, 25, 30, 7, 0, 0, 1]


def test_an_extent_of_the_version_before_is_taken_over(folder: NodeFolder) -> None:
    """It has marks alone. Clients go by them until the daemon has made something better of them."""
    create(folder).close()
    folder.uses(EXTENT).unlink()
    rows = np.zeros((FRAMES, MARKS_ROW_BYTES // 8))
    rows[:, 0] = range(FRAMES)
    write_marks(folder, rows)
    client = opened(folder)
    assert type(client.uses) is Marks and client.last_use.tolist() == list(range(FRAMES))
    daemon = opened(folder, writable=True)
    assert type(daemon.uses) is Uses and daemon.last_use.tolist() == list(range(FRAMES))
    assert marks_memory(folder) == 0
    client.last_use[2] = 77
    daemon.heed()
    assert type(opened(folder).uses) is Uses and daemon.used_ns(2) == 77


@pytest.mark.parametrize("damage", ["empty", "cut", "magic", "incarnation", "extent", "frames"])
def test_uses_that_are_not_sound_are_made_anew(damage: str, folder: NodeFolder) -> None:
    create(folder).last_use[3] = 5
    path = folder.uses(EXTENT)
    data = bytearray(path.read_bytes())
    words = {"magic": 0, "incarnation": 2, "extent": 3, "frames": 4}
    if damage in words:
        data[8 * words[damage]] ^= 1
    path.write_bytes({"empty": b"", "cut": data[:-1]}.get(damage, data))
    assert type(opened(folder).uses) is Marks
    daemon = opened(folder, writable=True)
    assert type(daemon.uses) is Uses and not daemon.last_use.any()
    assert type(opened(folder).uses) is Uses


def test_uses_of_another_version_are_refused(folder: NodeFolder) -> None:
    create(folder)
    with open(folder.uses(EXTENT), "r+b") as file:
        file.seek(8)
        file.write(b"\x09")
    for writable in (False, True):
        with pytest.raises(VersionMismatch, match="uses-5 format 9, this program knows 1"):
            opened(folder, writable)


def test_where_there_is_no_memory_for_uses_the_marks_stay(folder: NodeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    create(folder).close()
    folder.uses(EXTENT).unlink()
    rows = np.zeros((FRAMES, MARKS_ROW_BYTES // 8))
    rows[:, 0] = 5
    write_marks(folder, rows)

    def refuse(*_: object, **__: object) -> None:
        raise OutOfSpace("none")

    monkeypatch.setattr(NodeFolder, "new_file", refuse)
    daemon = opened(folder, writable=True)
    daemon.heed()
    assert type(daemon.uses) is Marks and daemon.last_use.tolist() == [5] * FRAMES and marks_memory(folder)
    with pytest.raises(OutOfSpace):
        TableFiles.make(folder, 6, CLASS, FRAMES)


def test_uses_follow_their_extent(folder: NodeFolder) -> None:
    """They are renamed with it and removed with it; what is left of an extent goes with the next start."""
    table = create(folder)
    table.last_use[1] = 8
    ExtentTable.rename(folder, EXTENT, INCARNATION, INCARNATION + 1)
    renamed = ExtentTable.open(folder, EXTENT, INCARNATION + 1, writable=True)
    assert renamed is not None and renamed.used_ns(1) == 8
    renamed.unlink()
    assert not folder.uses(EXTENT).exists() and not folder.marks(EXTENT).exists()
    create(folder)
    folder.records(EXTENT).unlink()
    folder.lock()
    folder.close()
    assert not folder.uses(EXTENT).exists()
