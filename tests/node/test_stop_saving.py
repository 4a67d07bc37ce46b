"""What a node saves when its memory is about to go: all of it, once, within its time."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Any

import pytest

import kvstore
from kvstore.errors import Unavailable
from kvstore.model.replica import Tier
from kvstore.node.node import Node
from kvstore.node.nvme_pages import NvmePages
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import Header
from kvstore.shm.records import ExtentTable
from tests.helpers.content import SMALL, chain
from tests.helpers.nvme.nodes import NODE, check_closed, check_stored, configure, nvme, reboot, target, wait_scanned
from tests.helpers.nvme.nodes import PROMPT_PAGES as PAGES
from tests.helpers.processes import CLI, Daemon, Machine, check_right, put, wait_until


def settings(machine: Machine, **more: Any) -> dict[str, Any]:
    return {
        "dram": "4MiB",
        "nvme": f"{target(machine)}:32MiB",
        "nvme_extent": "1MiB",
        "shm_dir": str(machine.shm_dir),
        "scrub_bytes_per_s": 0,
        **more,
    }


class Spy:
    """Counts what is decided and saved while a store closes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.saves: list[int] = []
        handle, save = Node.handle, NvmePages.save

        def counted(node: Node, event: Any) -> Any:
            self.events.append(type(event).__name__)
            assert len(self.events) < 1000, "it decides again and again"
            return handle(node, event)

        def saved(nvme: NvmePages, pages: Any, *rest: Any) -> Any:
            self.saves.append(len(pages))
            return save(nvme, pages, *rest)

        patch.setattr(Node, "handle", counted)
        patch.setattr(NvmePages, "save", saved)


def test_a_page_that_cannot_be_saved_is_tried_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page whose record was altered cannot be saved, and nobody repairs records any more: the end is not put off."""
    store = kvstore.open(**settings(machine, demote_at=1.0))
    put(store, 1, PAGES)
    put(store, 2, PAGES)
    folder = NodeFolder.at(next(machine.shm_dir.iterdir()))
    header = Header.open(folder)
    assert header is not None
    table = ExtentTable.open(folder, folder.extents()[0], header.incarnation, writable=True)
    assert table is not None and table.tier == Tier.DRAM
    table.words[PAGES // 2] ^= 1 << 40  # of the first prompt
    spy = Spy(monkeypatch)
    store.close()
    assert sum(spy.saves) == 2 * PAGES, "every page once"
    with kvstore.open(**settings(machine)) as store:
        assert check_stored(store, {2: PAGES}) == PAGES


# --- daemons ----------------------------------------------------------------------------------------------------------


def served(machine: Machine, prompts: int, cli: Sequence[str] = CLI, **settings: Any) -> Daemon:
    """A node whose pages are in DRAM alone."""
    daemon = machine.serve(NODE, cli=cli, **configure(machine, demote_at=1.0, dram="16MiB", **settings))
    store = machine.connect(NODE)
    # Before, a put may find no frame in memory that is there already, and have others saved.
    wait_until("memory is there", lambda: store.stats()["tiers"]["dram"]["populated_bytes"] == 16 << 20)
    for seed in range(prompts):
        assert put(store, seed, PAGES) == PAGES
    assert nvme(store)["pages"] == 0
    return daemon


def kept(machine: Machine) -> tuple[int, int]:
    """Pages in DRAM and on NVMe as the next daemon finds them: first where memory stayed, then where it went."""
    daemon = machine.serve(NODE)
    there = machine.connect(NODE).stats()["tiers"]["dram"]["pages"]
    daemon.kill()
    reboot(machine)
    machine.serve(NODE)
    store = machine.connect(NODE)
    wait_scanned(store)
    return there, nvme(store)["pages"]


@pytest.mark.parametrize(("on_stop", "saved"), [("save", True), ("keep", False), ("auto", False)])
def test_what_sigterm_saves(on_stop: str, saved: bool, machine: Machine) -> None:
    daemon = served(machine, 40, on_stop=on_stop)
    assert daemon.terminate() == 0
    assert kept(machine) == (40 * PAGES, 40 * PAGES if saved else 0)
    if saved:
        assert check_stored(machine.connect(NODE), dict.fromkeys(range(40), PAGES)) == 40 * PAGES
        assert "saved" in daemon.errors.read_text() and f"pages={40 * PAGES}" in daemon.errors.read_text()


HANGING = """
import signal, kvstore.tier.nvme.disk as disk
from kvstore.cli.main import main
from tests.helpers.nvme.files import Faults
disk.os = faults = Faults()
signal.signal(signal.SIGUSR1, lambda *_: faults.add("pwritev", after=%d))
signal.signal(signal.SIGUSR2, lambda *_: faults.heal())
main()
"""
WRITES = 20  # more than the first batch takes, fewer than all of it


@pytest.mark.parametrize("end", ["signal", "time"])
def test_a_slow_disk_does_not_put_the_end_off(end: str, machine: Machine) -> None:
    """Readers go on, writers are told; what was saved until the end is the hottest chains, each from its front."""
    hanging = sys.executable, "-c", HANGING % WRITES
    daemon = served(
        machine,
        100,
        hanging,
        on_stop="save",
        checkpoint_s=1e6,
        nvme_answer_s=60,
        stop_save_s=60 if end == "signal" else 1,
    )
    store = machine.connect(NODE)
    acked = dict.fromkeys(range(100), PAGES)
    daemon.signal(signal.SIGUSR1)
    daemon.signal(signal.SIGTERM)
    wait_until("some is saved", lambda: nvme(store)["pages"])  # what is read from here on is no hotter for it
    with pytest.raises(Unavailable, match="ending"):
        put(store, 200, PAGES)
    assert check_right(store, acked) == sum(acked.values())
    if end == "signal":
        assert "not all is saved" not in daemon.errors.read_text()
        daemon.signal(signal.SIGTERM)
    wait_until("it saves no more", lambda: "not all is saved" in daemon.errors.read_text())
    assert daemon.alive, "it cannot be through"
    daemon.signal(signal.SIGUSR2)
    assert daemon.wait() == 0
    assert check_right(store, acked) == sum(acked.values())
    reboot(machine)
    machine.serve(NODE, **configure(machine))
    store = machine.connect(NODE)
    wait_scanned(store)
    assert 0 < nvme(store)["pages"] < sum(acked.values())
    assert check_closed(store, acked) == nvme(store)["pages"]
    cache = store.cache(SMALL)
    saved = [cache.lookup(chain(seed, PAGES)).pages for seed in reversed(acked)]
    assert saved == sorted(saved, reverse=True) and saved[0] == PAGES, "hottest first"
