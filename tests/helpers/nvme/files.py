"""Nodes with NVMe targets in files, what lies where in such a file, and faults that befall it.

A page's place is found as clients find it: index, record, the node's ``nvme`` file. Faults are written through the page
cache, which the kernel keeps in step with the O_DIRECT reads of daemon and clients.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from kvstore import Keys, Layout, Store
from kvstore.failpoint import STALLED
from kvstore.model.replica import Address, FrameClass, Tier
from kvstore.shm.folder import NodeFolder
from kvstore.shm.records import ExtentTable
from kvstore.tier.nvme import geometry
from kvstore.tier.nvme.disk import FileDisk
from kvstore.tier.nvme.map import NvmeMap
from kvstore.tier.nvme.table import Superblock
from kvstore.tier.nvme.target import read_superblock
from tests.helpers.content import SMALL, Pages, chain, contents, mismatch
from tests.helpers.inside import node_of
from tests.helpers.nursery import of_nodes
from tests.helpers.processes import WAIT_S, Daemon, Machine, Worker, wait_until

MIB = 1 << 20
CLASS = FrameClass(SMALL.page_bytes, SMALL.page_tokens, SMALL.layers)
PROVEN_BYTES = geometry.HEAD_BYTES + 4 * SMALL.page_tokens + 4 * SMALL.layers  # of a header; then zeros
WORKER = (sys.executable, "-m", "tests.helpers.workers.auditors")

# Not prefix-closed as clients see it: pages are found one by one.
WINDOW = replace(SMALL, model="process-test-window", attention="window", window=64)

# Every page is saved at once, none is loaded again for being read, no checkpoint but the one of a clean stop; what came
# last stays.
AT_ONCE: dict[str, Any] = {
    "demote_at": 0.0,
    "promote_after": 255,
    "checkpoint_s": 3600.0,
    "nvme_extent": MIB,
    "eviction": "lru",
}


def target(machine: Machine, number: int = 0) -> Path:
    """The file that is the node's NVMe."""
    return machine.logs / f"device-{number}"


def serve(
    machine: Machine, name: str = "n", nvme: int = 16 * MIB, dram: str = "4MiB", devices: int = 1, **settings: Any
) -> Daemon:
    """A node with ``devices`` files of ``nvme`` bytes; ``settings`` over ``AT_ONCE``."""
    paths = [target(machine, number) for number in range(devices)]
    return serve_at(machine, name, [f"{path}:{nvme}" for path in paths], dram, **settings)


def serve_at(
    machine: Machine, name: str, nvme: Iterable[str], dram: str = "4MiB", failing: bool = False, **settings: Any
) -> Daemon:
    """The same for any targets; ``failing``: it is expected to end, and not waited for."""
    flags = {"dram": dram, "config": str(write_config(machine, name, nvme=list(nvme), **settings))}
    return machine.spawn(name, **flags) if failing else machine.serve(name, **flags)


def write_config(machine: Machine, name: str, **settings: Any) -> Path:
    """The node's configuration file."""
    path = machine.logs / f"{name}.toml"
    lines = [f"{setting} = {json.dumps(value)}" for setting, value in (AT_ONCE | settings).items()]
    path.write_text("\n".join(["[node]", *lines, ""]))
    return path


def nvme_worker(machine: Machine, verb: str, node: str = "n", **arguments: Any) -> Worker:
    """Start a worker with one of the verbs of ``workers.auditors``, or of ``workers.pages``."""
    command = [*WORKER, verb, json.dumps({"node": node, **arguments})]
    return machine.start(Worker, verb, command, of_nodes())


def tier(store: Store, name: str = "nvme") -> dict[str, Any]:
    """What the node says of a tier."""
    return dict(store.stats()["tiers"][name])


def save_all(store: Store, timeout_s: float = WAIT_S) -> None:
    """Wait until NVMe has all that DRAM has, and make DRAM empty."""

    def empty() -> bool:
        store.evict(pages=1 << 16)
        frames = tier(store, "dram")["frames"]
        return int(frames.get("sealed", 0)) == 0

    wait_until("all pages rest on NVMe only", empty, timeout_s)


def reboot(machine: Machine, name: str = "n") -> None:
    """What is left of shared memory when the machine restarts: nothing."""
    shutil.rmtree(machine.folder(name))


@contextmanager
def silent(device: Path) -> Iterator[None]:
    """Every call to this device waits meanwhile; of a node with the failpoint ``STALL``."""
    stalled = Path(f"{device}{STALLED}")
    stalled.touch()
    try:
        yield
    finally:
        stalled.unlink()


def scanned(store: Store) -> None:
    """Wait until the scan that follows a start is over."""
    wait_until("the scan is over", lambda: not tier(store)["state"].startswith("scanning"))
    wait_until("no frame waits for a scan", lambda: not tier(store)["frames"].get("quarantined", 0))


@lru_cache(maxsize=4096)
def prompt(seed: int, pages: int, layout: Layout = SMALL) -> tuple[Keys, Pages]:
    """Keys and bytes of a prompt, made once."""
    keys = chain(seed, pages, layout)
    return keys, contents(keys, layout)


def found(store: Store, seed: int, pages: int, layout: Layout = SMALL) -> int:
    """How many pages of a prompt there are; every byte of them is right."""
    keys, expected = prompt(seed, pages, layout)
    match = store.cache(layout).get(keys)
    if match.pages and not np.array_equal(match.data, expected[: match.pages]):
        raise AssertionError(f"prompt {seed}: {mismatch(match, keys, layout)}")
    return match.pages


def counted(store: Store, prefix: str) -> dict[str, int]:
    """Counters of that prefix, those that are not zero."""
    return {name: n for name, n in store.stats()["counters"].items() if name.startswith(prefix) and n}


# --- what lies where ------------------------------------------------------------------------------------------------


class Places:
    """Where things lie in the file of a node with one device, as of now. ``close`` lets go of it."""

    def __init__(self, machine: Machine, name: str = "n", path: Path | None = None) -> None:
        self.folder = NodeFolder.at(machine.folder(name))
        found = NvmeMap.open(self.folder)
        assert found is not None
        self.map = found
        self.path = path or target(machine)
        self.superblock = superblock_of(self.path)
        self.frames = geometry.frames_in(self.superblock.extent_bytes, CLASS)
        self._tables: dict[int, int] = {}

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *_: object) -> None:
        self.map.close()

    def address(self, store: Store, seed: int, page: int, pages: int = 8) -> Address:
        """Where the node says that a page rests on NVMe."""
        mapped = node_of(store).mapped()
        assert mapped is not None
        address = mapped.index.find(Tier.NVME, store.in_pool(prompt(seed, pages)[0]).hashes[page])
        assert address is not None, f"page {page} of prompt {seed} is not on NVMe"
        return address

    def offset(self, address: Address) -> int:
        """Where the header of that frame begins in the file."""
        if address.extent not in self._tables:
            table = ExtentTable.open(self.folder, address.extent, self.map.incarnation)
            assert table is not None
            self._tables[address.extent] = table.position
            table.close()
        place = self.map.place(self._tables[address.extent], CLASS, address.frame)
        assert place is not None and place.disk.path == str(self.path)
        return place.offset

    def page(self, store: Store, seed: int, page: int, pages: int = 8) -> int:
        """Where the header of a page begins in the file."""
        return self.offset(self.address(store, seed, page, pages))

    def owners(self, store: Store, seeds: Iterable[int], pages: int) -> dict[int, tuple[int, int]]:
        """Offset of the header -> (seed, page), of all pages of these prompts that rest on NVMe."""
        mapped = node_of(store).mapped()
        assert mapped is not None
        owners: dict[int, tuple[int, int]] = {}
        for seed in seeds:
            for page, key in enumerate(store.in_pool(prompt(seed, pages)[0]).hashes):
                address = mapped.index.find(Tier.NVME, key)
                if address is not None:
                    owners[self.offset(address)] = (seed, page)
        return owners

    def metadata(self) -> dict[str, range]:
        """Superblocks, table slots and directories of all positions, whether they are carved or not."""
        block = self.superblock
        places = {"front": range(4096), "back": range(block.size_bytes - 4096, block.size_bytes)}
        for which in (0, 1):
            places[f"table {which}"] = range(block.slot(which), block.slot(which) + block.table_bytes)
        for position in range(block.positions):
            start = block.data_start + position * block.extent_bytes
            places[f"directory {position}"] = range(start, start + geometry.directory_bytes(CLASS, self.frames))
        return places


def superblock_of(path: Path) -> Superblock:
    """Geometry of a device."""
    disk = FileDisk.open(path, path.stat().st_size, writable=False)
    try:
        found = read_superblock(disk)
        assert found is not None, f"{path} has no sound superblock"
        return found
    finally:
        disk.close()


# --- faults ---------------------------------------------------------------------------------------------------------


def read_at(path: Path, offset: int, size: int) -> bytes:
    """Bytes of a file."""
    with open(path, "rb", buffering=0) as file:
        data = os.pread(file.fileno(), size, offset)
    assert len(data) == size
    return data


def write_at(path: Path, offset: int, data: bytes) -> None:
    """Other bytes, in place."""
    with open(path, "r+b", buffering=0) as file:
        assert os.pwrite(file.fileno(), data, offset) == len(data)


def flip(path: Path, offset: int, mask: int = 0xFF) -> None:
    """Change one byte, in place."""
    write_at(path, offset, bytes([read_at(path, offset, 1)[0] ^ mask]))


def resummed(header: bytes) -> bytes:
    """A header whose sum holds again, whatever was changed in it."""
    used = header[: PROVEN_BYTES - 8]
    return used + xxhash.xxh3_64_intdigest(used).to_bytes(8, "little") + header[PROVEN_BYTES:]


# --- disks that fail ------------------------------------------------------------------------------------------------


class Faults:
    """What system calls on disks do from now on, in this process: fail, be slow, or hang until ``heal``.

    Stands in for ``os`` in ``kvstore.tier.nvme.disk``. ``path`` "": all disks. ``after``: so many calls succeed first.
    """

    def __init__(self) -> None:
        self.healed = threading.Event()
        self.calls: Counter[str] = Counter()
        self.bad_sector: int | None = None  # reads of that place fail
        self._rules: list[Rule] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def add(self, call: str, error: int = 0, path: Path | str = "", after: int = 0, slow_s: float = 0.0) -> None:
        """``error`` 0 and no ``slow_s``: such calls hang."""
        self.healed.clear()
        self._rules.append(Rule(call, error, str(path), slow_s, self.calls[call] + after))

    def heal(self) -> None:
        """All is well again, and what hangs goes on."""
        self._rules = []
        self.healed.set()

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        self._meet("preadv", fd)
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        if self.bad_sector is not None and offset <= self.bad_sector < offset + size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        self._meet("pwritev", fd)
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._meet("fdatasync", fd)
        os.fdatasync(fd)

    def _meet(self, call: str, fd: int) -> None:
        self.calls[call] += 1
        for rule in self._rules:
            if rule.call != call or self.calls[call] <= rule.after:
                continue
            if rule.path and os.readlink(f"/proc/self/fd/{fd}") != rule.path:
                continue
            if rule.error:
                raise OSError(rule.error, os.strerror(rule.error))
            if rule.slow_s:
                time.sleep(rule.slow_s)
            else:
                self.healed.wait(60.0)


class Rule(NamedTuple):
    """See ``Faults.add``; ``after``: calls of that kind that are over when it begins to count."""

    call: str
    error: int
    path: str
    slow_s: float
    after: int
