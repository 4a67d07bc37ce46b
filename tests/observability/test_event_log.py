"""Page events: the ring and its bounds, numbers over restarts, and what a real node tells of its pages."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvstore
from kvstore import Layout
from kvstore.model.replica import Tier
from kvstore.node import event_log
from kvstore.node.event_log import EventLog
from kvstore.wire.control import HEAD, MESSAGE_BYTES_MAX

LAYOUT = Layout(model="events", layers=2, kv_heads=2, head_dim=8, dtype="float16", page_tokens=8)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def filled(count: int, first_seq: int = 100) -> EventLog:
    log = EventLog(first_seq)
    for number in range(count):
        log.append_sealed("put", Tier.DRAM, [key(number)], b"r" * 16)
    return log


def test_a_log_begins_with_cleared_and_numbers_are_consecutive() -> None:
    log = filled(3)
    events, after, lost = log.since(0)
    assert [(event.seq, event.kind) for event in events] == [
        (100, "cleared"),
        *((n, "sealed") for n in (101, 102, 103)),
    ]
    assert [event.keys for event in events] == [[], [key(0)], [key(1)], [key(2)]]
    assert (after, lost) == (103, 0)
    assert log.since(after) == ([], 103, 0)


def test_a_reader_that_goes_on_misses_nothing_and_gets_nothing_twice() -> None:
    log, after, seen = EventLog(1), 0, []
    for number in range(1000):
        log.append("evicted", Tier.DRAM, "space", [key(number)])
        if number % 7 == 0:
            events, after, lost = log.since(after, limit=5)
            seen += events
            assert lost == 0
    while events := log.since(after, limit=50)[0]:
        seen += events
        after = events[-1].seq
    assert [event.seq for event in seen] == list(range(1, 1002))


def test_slots_are_bounded_and_what_was_overwritten_is_counted() -> None:
    log = filled(event_log.SLOTS + 50, first_seq=0)
    events, after, lost = log.since(10, limit=1)
    kept_first = log.last - event_log.SLOTS + 1
    assert (events[0].seq, after, lost) == (kept_first, kept_first, kept_first - 11)
    assert len(log.since(10, limit=10**9)[0]) == event_log.SLOTS


def test_pages_are_bounded() -> None:
    log = EventLog(0)
    batch = [key(n) for n in range(512)]
    for _ in range(200):
        log.append("evicted", Tier.DRAM, "space", batch)
    events, _, lost = log.since(0, limit=10**9)
    assert sum(len(event.keys) for event in events) == event_log.PAGES_MAX
    assert lost + len(events) == 200


def test_numbers_go_on_over_restarts_and_an_old_one_starts_over() -> None:
    first = EventLog()
    for number in range(100):
        first.append("evicted", Tier.DRAM, "space", [key(number)])
    time.sleep(0.001)
    second = EventLog()
    assert second.first_of_run > first.last
    second.append("evicted", Tier.DRAM, "space", [key(7)])
    for after in (first.last, second.last + 1000):
        events, _, lost = second.since(after)
        assert ([event.kind for event in events], lost) == (["cleared", "evicted"], 0)


def test_waiting_ends_with_news_or_with_time() -> None:
    log = EventLog(0)
    started = time.monotonic()
    assert not log.wait(None, 0.05)
    assert time.monotonic() - started >= 0.05
    threading.Timer(0.05, log.append, ("evicted", Tier.DRAM, "space", [key(1)])).start()
    assert log.wait(None, 60.0)
    assert log.wait(0, 0.0)  # there is news already


def test_a_reader_beside_a_writer_sees_every_number_once_or_counted_as_lost() -> None:
    log, stop = EventLog(0), threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            log.append("evicted", Tier.DRAM, "space", [key(number)] * 40)  # the bound on pages overwrites often
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        after, told, deadline = 0, 0, time.monotonic() + 1.0
        while time.monotonic() < deadline:
            events, next_after, lost = log.since(after, limit=100)
            assert [event.seq for event in events] == list(range(after + 1 + lost, next_after + 1))
            assert all(event.keys[0] == key(event.seq - 1) for event in events)
            told, after = told + len(events) + lost, next_after
    finally:
        stop.set()
        writer.join()
    assert told == after > 1000


def test_an_event_names_whose_pages_it_is_of() -> None:
    log = EventLog(0)
    roots = [bytes([n]) * 16 for n in range(200)]
    log.salt_of = {root: f"tenant-{n}" for n, root in enumerate(roots)}.get  # type: ignore[assignment]
    log.append_sealed("put", Tier.DRAM, [key(1), key(2)], roots[5])
    log.append("evicted", Tier.DRAM, "space", [key(1), key(2), key(3)], [roots[1], roots[2], roots[1]])
    log.append("dropped", Tier.DRAM, "data", [key(9)])
    log.append("evicted", Tier.DRAM, "space", [key(n) for n in range(600)], [roots[n % 200] for n in range(600)])
    one, several, unknown, many, rest = (log.describe(event) for event in log.since(0)[0])
    assert one["tenants"] == ["tenant-5"] and "whose" not in one and "roots" not in one
    assert several["tenants"] == ["tenant-1", "tenant-2"] and several["whose"] == [0, 1, 0]
    assert unknown["tenants"] == []
    assert len(many["keys"]) == len(many["whose"]) == 512 and len(many["tenants"]) == event_log.TENANTS_MAX
    assert many["whose"][63:65] == [63, -1]
    assert len(rest["whose"]) == 88


def test_the_largest_answer_fits_a_message() -> None:
    for pages in (1, 3, 512):
        log = EventLog()
        log.salt_of = lambda root: "\u1234" * 999 + root.hex()  # six bytes a character
        for _ in range(4000 // pages):
            roots = [n.to_bytes(16, "big") for n in range(pages)]
            log.append("evicted", Tier.NVME, "c" * 20, [b"\xff" * 16] * pages, roots)
        text = json.dumps(event_log.answer(log, {"after": 0, "limit": event_log.LIMIT_MAX}))
        assert len(text) < MESSAGE_BYTES_MAX - HEAD.size


# --- what a node tells ----------------------------------------------------------------------------------------------


def told(store: Any, after: int) -> list[tuple[str, str, str, list[str]]]:
    reply = store.events(after)
    assert reply["lost"] == 0
    return [(e["kind"], e["tier"], e["reason"], e["keys"]) for e in reply["events"]]


def tokens(seed: int, pages: int) -> Any:
    return np.random.default_rng(seed).integers(0, 1000, pages * LAYOUT.page_tokens, dtype=np.uint32)


def content(pages: int) -> Any:
    return np.zeros((pages, LAYOUT.page_bytes), np.uint8)


def test_a_node_with_nvme_tells_of_saving_and_loading(tmp_path: Path) -> None:
    with kvstore.open(dram="1MiB", nvme=f"{tmp_path}/kv:8MiB", demote_at=0) as store:
        cache = store.cache(LAYOUT)
        start = store.events()["next"]
        chain = tokens(1, 4)
        keys = [k.hex() for k in cache.keys(chain)]
        cache.put(chain, content(4))
        saved = wait_for(store, start, "demoted", 4)
        assert saved == keys
        store.evict(4)
        left = [k for kind, tier, _, names in told(store, start) if (kind, tier) == ("evicted", "dram") for k in names]
        assert left == keys[::-1]
        cache.prefetch(np.append(chain, [1]).astype(np.uint32))
        assert wait_for(store, start, "promoted", 4) == keys


def wait_for(store: Any, after: int, kind: str, pages: int) -> list[str]:
    deadline = time.monotonic() + 60
    while True:
        found = [k for event in told(store, after) if event[0] == kind for k in event[3]]
        if len(found) >= pages:
            return found
        assert time.monotonic() < deadline, told(store, after)
        store.events(None, wait_s=0.1)
