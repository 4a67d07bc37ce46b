"""Uses: what clients write in addition to the records."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.errors import OutOfSpace
from kvstore.model.replica import SHARDS_MAX, FrameClass, Tier
from kvstore.shm.folder import NodeFolder
from kvstore.shm.records import ExtentTable, TableFiles

CLASS = FrameClass(page_bytes=10_000, page_tokens=15, layers=3)
INCARNATION, EXTENT, FRAMES, LAYERS = 0x1234_5678_9ABC, 5, 7, 300


@pytest.fixture
def folder() -> Iterator[NodeFolder]:
    """In shared memory: other file systems give memory back in their own way."""
    with tempfile.TemporaryDirectory(prefix="kvtest-", dir="/dev/shm") as home:
        folder = NodeFolder(home, "n")
        folder.create()
        yield folder


def create(folder: NodeFolder, tier: Tier = Tier.DRAM) -> ExtentTable:
    return ExtentTable.create(folder, EXTENT, 2, CLASS, INCARNATION, FRAMES, tier)


def opened(folder: NodeFolder, writable: bool = False) -> ExtentTable:
    table = ExtentTable.open(folder, EXTENT, INCARNATION, writable)
    assert table is not None
    return table


@pytest.fixture
def both(folder: NodeFolder) -> tuple[ExtentTable, ExtentTable]:
    """The same extent, mapped by two programs."""
    create(folder)
    return opened(folder), opened(folder)


def test_progress_counts_per_shard_and_under_its_own_generation(both: tuple[ExtentTable, ExtentTable]) -> None:
    writer, reader = (table.uses for table in both)
    frames, generations = slice(2, 5), np.array([7, 1 << 32 | 8, 9], np.uint64)
    writer.begin(frames, generations)
    assert not reader.leading(frames, generations).any()
    levels = writer.levels(generations, LAYERS)
    assert levels.shape == (LAYERS + 1, 3)
    writer.progress(frames, 1)[:] = levels[2]
    writer.progress(frames, SHARDS_MAX - 1)[:] = levels[np.array([0, 1, 200]), np.arange(3)]
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
        uses.progress(frames, 0)[:] = levels[layers]
        assert min(layers, 255) <= int(uses.leading(frames, generations)[0, 0]) <= layers


@pytest.mark.parametrize("damage", ["empty", "cut", "magic", "incarnation", "extent", "frames", "shards"])
def test_uses_that_are_not_sound_are_made_anew(damage: str, folder: NodeFolder) -> None:
    create(folder).last_use[3] = 5
    path = folder.uses(EXTENT)
    data = bytearray(path.read_bytes())
    words = {"magic": 0, "incarnation": 2, "extent": 3, "frames": 4, "shards": 5}
    if damage in words:
        data[8 * words[damage]] ^= 1
    path.write_bytes({"empty": b"", "cut": data[:-1]}.get(damage, data))
    assert ExtentTable.open(folder, EXTENT, INCARNATION) is None, "a reader misses until the daemon has made new ones"
    assert not opened(folder, writable=True).last_use.any()
    assert not opened(folder).last_use.any()


def test_where_there_is_no_memory_for_uses_there_is_no_table(
    folder: NodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(folder).close()
    folder.uses(EXTENT).unlink()

    def refuse(*_: object, **__: object) -> None:
        raise OutOfSpace("none")

    monkeypatch.setattr(NodeFolder, "new_file", refuse)
    assert ExtentTable.open(folder, EXTENT, INCARNATION, writable=True) is None
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
    assert not folder.uses(EXTENT).exists()
    create(folder)
    folder.records(EXTENT).unlink()
    folder.lock()
    folder.close()
    assert not folder.uses(EXTENT).exists()
