"""What KV events tell of a page that comes and goes while it is read: never a child before its parent."""

from __future__ import annotations

import threading
from typing import Any, cast

import numpy as np

import kvstore
from kvstore import Layout
from kvstore.model.replica import Tier
from kvstore.node.event_log import EventLog
from kvstore.node.kv_events import PageFacts, PageReader
from kvstore.node.performer import Performer
from tests.helpers.inside import node_of

LAYOUT = Layout(model="kv", layers=1, kv_heads=1, head_dim=8, dtype="float16", page_tokens=8)
PARENT, CHILD, OTHER, OBJECT = (bytes([n]) * 16 for n in range(4))
PARENT_OF: dict[bytes, bytes | None] = {PARENT: None, CHILD: PARENT, OTHER: None, OBJECT: None}


class Reader(PageReader):
    """A node whose pages are in ``here``; those in ``moving`` are found at the second look only."""

    def __init__(self) -> None:
        super().__init__(cast(Performer, None))
        self.here: set[bytes] = set()
        self.moving: set[bytes] = set()

    def find(self, keys: list[bytes], tier: Tier) -> list[PageFacts | None] | None:
        found: list[PageFacts | None] = [
            PageFacts(key, PARENT_OF[key], b"" if key == OBJECT else b"toke" * 8)
            if key in self.here - self.moving
            else None
            for key in keys
        ]
        self.moving.clear()
        return found

    def told(self, *keys: bytes, tier: Tier = Tier.DRAM) -> list[bytes]:
        pages = self.stored_now(list(keys), tier)
        assert pages is not None
        return [page.key for page in pages if page is not None and page.tokens]


def test_a_child_that_is_back_before_its_parent_is_told_of_waits_for_it() -> None:
    """Stored, gone and stored again, before anyone read: [parent] [child] -[child, parent] [parent, child]."""
    reader = Reader()
    assert reader.told(PARENT) == []  # it had gone by then
    reader.here = {PARENT, CHILD}  # and now both are back
    assert reader.told(CHILD) == []
    reader.remove([CHILD, PARENT], Tier.DRAM)
    assert reader.told(PARENT, CHILD) == [PARENT, CHILD]


def test_tiers_are_told_of_apart_and_a_page_that_moves_is_told_of() -> None:
    reader = Reader()
    assert reader.told(PARENT, tier=Tier.NVME) == []
    reader.here = {PARENT, CHILD, OBJECT, OTHER}
    reader.moving = {PARENT}
    assert reader.told(PARENT, CHILD) == [PARENT, CHILD]
    assert reader.told(CHILD, OTHER, tier=Tier.NVME) == [OTHER]
    assert reader.told(OBJECT) == [] and reader._skipped == {(Tier.NVME, PARENT), (Tier.NVME, CHILD)}
    reader.reset()
    assert reader.told(CHILD, tier=Tier.NVME) == [CHILD]


def test_what_is_staged_is_told_when_it_is_published() -> None:
    log = EventLog(0, staged=True)
    assert [event.kind for event in log.since(10**9)[0]] == ["cleared"]
    log.append("evicted", Tier.DRAM, "space", [PARENT])
    assert (log.last, log.since(0)) == (0, ([], 0, 0))
    assert not log.wait(0, 0.02)
    log.publish()
    assert log.last == 1 and [event.keys for event in log.since(0)[0]] == [[PARENT]]


def test_whoever_hears_of_a_page_finds_it_in_the_index() -> None:
    with kvstore.open(dram="32MiB") as store:
        node: Any = node_of(store)._resources.embedded
        performer = node.node.performer
        stop, missing, heard = threading.Event(), [], 0

        def follow() -> None:
            nonlocal heard
            after = performer.events.last
            while not stop.is_set():
                events, after, _ = performer.events.since(after)
                for event in events:
                    found = performer.index.look(event.tier, event.keys)
                    missing.extend(key for key, address in zip(event.keys, found, strict=True) if address is None)
                    heard += len(event.keys)

        follower = threading.Thread(target=follow)
        follower.start()
        cache, page = store.cache(LAYOUT), np.zeros((2, LAYOUT.page_bytes), np.uint8)
        try:
            for seed in range(500):
                cache.put(np.arange(16, dtype=np.uint32) + seed * 100, page)
        finally:
            stop.set()
            follower.join()
        assert missing == []
        assert heard > 100
