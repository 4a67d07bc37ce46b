"""SpareTables: memory for tables before they are needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.errors import OutOfSpace
from kvstore.model.replica import FrameClass
from kvstore.node.performer import CLASSES_MAX, SpareTables
from kvstore.shm.folder import NodeFolder
from kvstore.shm.records import ExtentTable

CLASS = FrameClass(page_bytes=8192, page_tokens=16, layers=4)


@pytest.fixture
def folder(tmp_path: Path) -> NodeFolder:
    folder = NodeFolder(tmp_path, "n")
    folder.lock()
    return folder


def test_a_spare_becomes_an_extents_table_without_memory(folder: NodeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    spares = SpareTables(folder)
    assert spares.fill(CLASS, 7, 2) == 2

    def full(fd: int, start: int, size_bytes: int, what: str) -> None:
        raise OutOfSpace("full")

    monkeypatch.setattr("kvstore.shm.folder.allocate", full)
    assert spares.fill(CLASS, 7, 3) == 2, "no more than there are"
    with pytest.raises(OutOfSpace):
        ExtentTable.create(folder, 4, 1, CLASS, 99, 7)
    for number in (5, 6):
        table = ExtentTable.create(folder, number, 1, CLASS, 99, 7, files=spares.take(CLASS))
        assert table.frames == 7 and not table.words.any()
        assert folder.records(number).stat().st_blocks * 512 >= folder.records(number).stat().st_size
        table.close()
    assert spares.take(CLASS) is None
    assert folder.extents() == [5, 6]
    folder.close()


def test_spares_are_few_and_go_with_a_restart(folder: NodeFolder) -> None:
    spares = SpareTables(folder)
    for layers in range(1, CLASSES_MAX + 4):
        assert spares.fill(FrameClass(8192, 16, layers), 7, 1) == 1
    assert len([name for name in os.listdir(folder.path) if name.startswith(".tmp-")]) == 2 * CLASSES_MAX
    folder.close()
    again = NodeFolder(folder.path.parent, "n")
    again.lock()
    assert sorted(os.listdir(folder.path)) == ["lock", "sessions"]
    again.close()
