"""Segment and extent tables: what owner and client see of each other, and what damage looks like (None)."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import OutOfSpace, VersionMismatch
from kvstore.model.replica import FrameClass, FrameState, word_of
from kvstore.shm.folder import NodeFolder
from kvstore.shm.records import ExtentTable
from kvstore.tier import dram
from kvstore.tier.dram import SEGMENT_HEAD_BYTES, DramStore, SegmentFile, SegmentMap

MIB = 1 << 20
CLASS = FrameClass(page_bytes=10_000, page_tokens=5, layers=4)  # frames of 12 KiB; tokens padded to 8 bytes
INCARNATION = 0xFEED_BEEF_0000_0001


@pytest.fixture(params=["tmp", "shm"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NodeFolder]:
    """A node folder, on a disk and in shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if request.param == "shm" else tmp_path) as home:
        folder = NodeFolder(home, "n")
        folder.create()
        yield folder


# --- segment --------------------------------------------------------------------------------------------------------


def test_no_memory_is_given_back_under_an_extent(folder: NodeFolder) -> None:
    """By an extent's number clients know that the memory behind it is still the same."""
    store = DramStore(SegmentFile.create(folder, INCARNATION, MIB, 2), INCARNATION, [(0, CLASS)])
    store.carve(1, 7, CLASS)
    for position in (0, 1):
        with pytest.raises(AssertionError):
            store.give_back(position)
        store.drop(position)
        store.give_back(position)
    store.close()


def test_frames_lie_where_the_docstring_says(folder: NodeFolder) -> None:
    segment = SegmentFile.create(folder, INCARNATION, MIB, 3)
    segment.populate(2)
    frames = MIB // CLASS.frame_bytes
    view = segment.frame_view(2, CLASS.frame_bytes, frames)
    assert view.shape == (85, 12288)
    view[3, :4] = (1, 2, 3, 4)
    with open(folder.segment, "rb") as file:
        file.seek(SEGMENT_HEAD_BYTES + 2 * MIB + 3 * 12288)
        assert file.read(4) == b"\1\2\3\4"
    with pytest.raises(AssertionError):
        segment.frame_view(3, CLASS.frame_bytes, frames)
    with pytest.raises(AssertionError):
        segment.frame_view(0, CLASS.frame_bytes, frames + 1)
    segment.close()


def test_populate_keeps_what_is_stored(folder: NodeFolder) -> None:
    segment = SegmentFile.create(folder, INCARNATION, MIB, 2)
    segment.populate(0)
    segment.data[:MIB] = 7
    segment.populate(0)
    assert (segment.data[:MIB] == 7).all()
    segment.close()


def test_populate_without_memory_names_the_remedy(folder: NodeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = SegmentFile.create(folder, INCARNATION, MIB, 2)

    def full(fd: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfSpace, match="remount,size"):
        segment.populate(0)
    segment.close()


def test_kernels_without_populate_are_served(folder: NodeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dram, "_MADV_POPULATE_WRITE", 9999)  # EINVAL, as before 5.14
    segment = SegmentFile.create(folder, INCARNATION, MIB, 2)
    segment.populate(0)
    segment.close()


def test_read_only_views_cannot_be_made_writable(folder: NodeFolder) -> None:
    SegmentFile.create(folder, INCARNATION, MIB, 1).populate(0)
    segment = SegmentMap.open(folder, INCARNATION)
    assert segment is not None
    views, frames = segment.frames_readonly(0, 4096, 256), segment.frames(0, 4096, 256)
    with pytest.raises(ValueError, match="read-only"):
        views[0, 0] = 1
    with pytest.raises(ValueError):
        views.flags.writeable = True
    frames[0, 0] = 1
    assert views[0, 0] == 1
    segment.close()  # with views alive: they stay good memory
    assert views[0, 0] == 1


def test_a_segment_that_was_made_longer(folder: NodeFolder) -> None:
    """Maps stay as they were; a kill before its head says so leaves it as it was."""
    SegmentFile.create(folder, INCARNATION, MIB, 2).close()
    os.truncate(folder.segment, folder.segment.stat().st_size + MIB)
    before = SegmentFile.open(folder, INCARNATION)
    assert before is not None and before.positions == 2
    SegmentFile.lengthen(folder, 4)
    SegmentFile.rename(folder, INCARNATION, INCARNATION + 1)
    SegmentFile.rename(folder, INCARNATION, INCARNATION + 2)
    assert SegmentFile.open(folder, INCARNATION) is None
    after = SegmentFile.open(folder, INCARNATION + 1)
    assert after is not None and (after.positions, len(after.data), len(before.data)) == (4, 4 * MIB, 2 * MIB)
    before.data[5] = 9
    assert after.data[5] == 9
    before.close()
    after.close()


@pytest.mark.parametrize("damage", ["absent", "empty", "incarnation", "magic", "cut"])
def test_a_doubtful_segment_is_none(folder: NodeFolder, damage: str) -> None:
    incarnation = INCARNATION
    if damage != "absent":
        SegmentFile.create(folder, INCARNATION, MIB, 2).close()
        size = folder.segment.stat().st_size
        if damage == "incarnation":
            incarnation += 1
        elif damage == "magic":
            with open(folder.segment, "r+b") as file:
                file.write(b"X")
        else:
            os.truncate(folder.segment, {"empty": 0, "cut": size - 1}[damage])
    fds = len(os.listdir("/proc/self/fd"))
    assert SegmentFile.open(folder, incarnation) is None
    assert SegmentMap.open(folder, incarnation) is None
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_segment_of_another_version_is_refused_in_words(folder: NodeFolder) -> None:
    SegmentFile.create(folder, INCARNATION, MIB, 2).close()
    with open(folder.segment, "r+b") as file:
        file.seek(8)
        file.write((7).to_bytes(8, "little"))
    fds = len(os.listdir("/proc/self/fd"))
    for open_it in (SegmentFile.open, SegmentMap.open, SegmentFile.cut_to):
        with pytest.raises(VersionMismatch, match="segment format 7, this program knows 1"):
            open_it(folder, INCARNATION)
    assert len(os.listdir("/proc/self/fd")) == fds


# --- tables ---------------------------------------------------------------------------------------------------------


def table_of(folder: NodeFolder, frames: int = 6) -> ExtentTable:
    return ExtentTable.create(folder, 7, 2, CLASS, INCARNATION, frames)


def test_giving_an_extent_up_makes_every_map_of_it_miss(folder: NodeFolder) -> None:
    owner = table_of(folder)
    owner.words[:] = word_of(3, FrameState.SEALED)
    reader = ExtentTable.open(folder, 7, INCARNATION)
    assert reader is not None
    owner.unlink()
    assert not reader.words.any()
    assert ExtentTable.open(folder, 7, INCARNATION) is None
    assert folder.extents() == []
    owner.unlink()  # again: nothing happens
    owner.close()
    reader.close()


def test_closing_under_a_view_neither_crashes_nor_leaks(folder: NodeFolder) -> None:
    gc.collect()  # what other tests left is not ours to count
    fds = len(os.listdir("/proc/self/fd"))
    table = table_of(folder)
    table.words[2] = 11
    words = table.words
    table.close()
    table.close()
    assert words[2] == 11
    with pytest.raises(AttributeError):
        _ = table.rows
    del words, table
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == fds
