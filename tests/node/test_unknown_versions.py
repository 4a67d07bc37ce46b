"""Files in shared memory of a version that this program does not know: the start says so, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

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


def swap(path: Path, head: bytes) -> bytes:
    """Put it there instead of what is returned."""
    with open(path, "r+b", buffering=0) as file:
        before = file.read(len(head))
        file.seek(0)
        file.write(head)
    return before


@pytest.mark.parametrize("newer", [segment_of, table_of])
def test_a_start_over_files_of_another_version_is_refused_in_words(newer: object, machine: Machine) -> None:
    daemon = machine.serve("n", dram="4MiB")
    with machine.connect("n") as store:
        assert put(store, 1, PAGES) == PAGES
    assert daemon.terminate() == 0
    assert callable(newer)
    path, head = newer(machine.folder("n"))
    before = swap(path, head)
    inode = path.stat().st_ino
    refused = machine.spawn("n", dram="4MiB")
    assert refused.wait() != 0
    said = refused.errors.read_text()
    assert f"{path.name} format 9, this program knows" in said and "Traceback" not in said, said
    verified = machine.run("verify", "--node", "n")
    assert verified.returncode != 0 and "format 9" in verified.stdout + verified.stderr
    assert path.stat().st_ino == inode and swap(path, before) == head, "nothing was changed"
    machine.serve("n", dram="4MiB")
    with machine.connect("n") as store:
        check_pages(store, {1: PAGES})
        check_laws(store)
