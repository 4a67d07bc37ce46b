"""What a node saves when its memory is about to go: all of it, once, within its time."""

from __future__ import annotations

from typing import Any

import pytest

import kvstore
from kvstore.model.replica import Tier
from kvstore.service.node import Node
from kvstore.service.nvme_pages import NvmePages
from kvstore.tier.folder import NodeFolder
from kvstore.tier.header import Header
from kvstore.tier.records import ExtentTable
from tests.process.harness import Machine, put
from tests.process.nvme import PROMPT_PAGES as PAGES
from tests.process.nvme import check_stored, target


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


def test_a_close_takes_nothing_out_of_dram(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """To save is enough: its decisions are as many as its batches, however many pages there are."""
    store = kvstore.open(**settings(machine, demote_at=1.0))
    for seed in range(25):
        put(store, seed, PAGES)
    spy = Spy(monkeypatch)
    store.close()
    assert sum(spy.saves) == 25 * PAGES
    assert "Evict" not in spy.events and spy.events.count("Saved") == len(spy.saves) <= 8, spy.events
    monkeypatch.undo()
    with kvstore.open(**settings(machine)) as store:
        assert check_stored(store, dict.fromkeys(range(25), PAGES)) == 25 * PAGES
