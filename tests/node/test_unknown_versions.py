"""Files of a version that this program does not know: the start says so, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.tier.nvme.table import Superblock
from tests.helpers.processes import Machine, check_laws, check_pages, put

PAGES = 8
HEADS_AT = (0, 2048)  # of a table; a sum of the 80 bytes before it ends each


def segment_of(folder: Path) -> tuple[Path, bytes]:
    path = folder / "segment"
    with open(path, "rb") as file:
        head = file.read(16)
    return path, head[:8] + (9).to_bytes(8, "little")


def table_of(folder: Path) -> tuple[Path, bytes]:
    path = min(folder.glob("records-*"))
    data = bytearray(path.read_bytes()[:4096])
    for at in HEADS_AT:
        data[at + 8 : at + 16] = (9).to_bytes(8, "little")
        data[at + 80 : at + 88] = xxhash.xxh3_64_intdigest(data[at : at + 80]).to_bytes(8, "little")
    return path, bytes(data)


def header_of(folder: Path) -> tuple[Path, bytes]:
    path = folder / "header"
    return path, path.read_bytes()[:8] + (9).to_bytes(8, "little")


def uses_of(folder: Path) -> tuple[Path, bytes]:
    path = min(folder.glob("uses-*"))
    return path, path.read_bytes()[:8] + (9).to_bytes(8, "little")


def swap(path: Path, head: bytes) -> bytes:
    """Put it there instead of what is returned."""
    with open(path, "r+b", buffering=0) as file:
        before = file.read(len(head))
        file.seek(0)
        file.write(head)
    return before


Newer = Callable[[Path], tuple[Path, bytes]]
NAMES: dict[Newer, str] = {header_of: "file", segment_of: "segment"}


@pytest.mark.parametrize("newer", [header_of, segment_of, table_of, uses_of])
def test_a_start_over_files_of_another_version_is_refused_in_words(newer: Newer, machine: Machine) -> None:
    daemon = machine.serve("n", dram="4MiB")
    with machine.connect("n") as store:
        assert put(store, 1, PAGES) == PAGES
    assert daemon.terminate() == 0
    path, head = newer(machine.folder("n"))
    before = swap(path, head)
    inode = path.stat().st_ino
    refused = machine.spawn("n", dram="4MiB")
    assert refused.wait() != 0
    said = refused.errors.read_text()
    assert f"{NAMES.get(newer, path.name)} format 9, this program knows" in said and "Traceback" not in said, said
    verified = machine.run("verify", "--node", "n")
    assert verified.returncode != 0 and "format 9" in verified.stdout + verified.stderr
    assert path.stat().st_ino == inode and swap(path, before) == head, "nothing was changed"
    machine.serve("n", dram="4MiB")
    with machine.connect("n") as store:
        check_pages(store, {1: PAGES})
        check_laws(store)


def test_a_start_over_a_target_of_another_version_is_refused_in_words(machine: Machine, tmp_path: Path) -> None:
    flags = {"dram": "4MiB", "nvme": f"{tmp_path / 'kv'}:16MiB"}
    daemon = machine.serve("n", **flags)
    assert daemon.terminate() == 0
    path = tmp_path / "kv"
    front = Superblock.unpacked(np.frombuffer(path.read_bytes()[:4096], np.uint8))
    assert front is not None
    newer = replace(front, version=9).packed().tobytes()
    with open(path, "r+b", buffering=0) as file:
        for at in (0, path.stat().st_size - len(newer)):
            file.seek(at)
            file.write(newer)
    before = path.read_bytes()
    refused = machine.spawn("n", **flags)
    assert refused.wait() != 0
    said = refused.errors.read_text()
    assert "kv: must have format 4 (got 9); --format" in said and "Traceback" not in said, said
    assert path.read_bytes() == before, "nothing was changed"
