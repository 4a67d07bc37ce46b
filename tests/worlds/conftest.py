"""What a machine that loses power stands on: disks that forget, a clock of its own, one thread."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client.local import grants, hints
from kvstore.node import nvme_pages, nvme_start
from kvstore.node import tier_mover as mover
from kvstore.node.operator import page_calls
from kvstore.tier.nvme import map
from tests.helpers.nvme.inline_io import InlineIo
from tests.helpers.worlds.power_world import Clock, Disks
from tests.helpers.worlds.real_node import close_all

BATCH_BYTES = 64 << 10  # saved at a time, so that long chains take several


@pytest.fixture(autouse=True)
def nodes_end() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch) -> Disks:
    found = Disks()
    monkeypatch.setattr(nvme_start, "FileDisk", found)
    monkeypatch.setattr(nvme_start, "open_patiently", lambda *about: about[-1]())  # all in this one thread
    monkeypatch.setattr(map, "FileDisk", found)
    monkeypatch.setattr(nvme_pages, "IoThreads", lambda threads: InlineIo())
    monkeypatch.setattr(mover, "BATCH_BYTES", BATCH_BYTES)
    waits = (
        (grants, "BUSY_PAUSE_S"),
        (hints, "PAUSE_MIN_S"),
        (hints, "PAUSE_MAX_S"),
        (page_calls, "SAVE_WAIT_S"),
    )
    for module, name in waits:
        monkeypatch.setattr(
            module, name, 0.0
        )  # what they wait for comes when they ask, or when this one thread is back
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "monotonic_ns", found)
    return found


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvtest-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)
