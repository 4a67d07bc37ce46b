"""Objects are removed by a pattern page by page: no call has all keys of a salt in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import kvstore
from kvstore.client.local.objects import object_key_pages
from kvstore.client.store import Store
from kvstore.errors import InvalidRequest
from kvstore.pb import store_pb2 as pb
from kvstore.service.api import objects, patterns
from kvstore.service.api.objects import ObjectCalls
from kvstore.serving.gate import Call, Gate, Threads
from kvstore.serving.identities import LOCAL, Identities
from tests.helpers.loops import run

OBJECTS, PAGE = 10, 3


@pytest.fixture
def store() -> Iterator[Store]:
    with kvstore.open(dram="16MiB") as opened:
        for number in range(OBJECTS):
            opened.put(f"k{number}", b"value", salt="a")
            opened.put(f"k{number}", b"value", salt="b")
        yield opened


def removed(store: Store, pattern: str) -> int:
    """By a call."""
    found = pb.ObjectsRemoved()

    async def test() -> None:
        gate = Gate(Identities(None), Threads(), 8, 60.0, 64 << 20)
        call = Call(gate, LOCAL, None, time.monotonic() + 60)
        asked = pb.RemoveObjectsRequest(pattern=pattern, salt="a").SerializeToString()
        try:
            found.ParseFromString(await ObjectCalls(store, 64 << 20).remove(call, asked))
        finally:
            gate.threads.close()

    run(test)
    return found.removed


def test_keys_come_in_pages(store: Store) -> None:
    pages = list(object_key_pages(store, "a", PAGE))
    assert [len(page) for page in pages] == [3, 3, 3, 1]
    assert (
        sorted(key for page in pages for key in page)
        == store.object_keys("a")
        == [f"k{number}" for number in range(OBJECTS)]
    )


def test_a_pattern_is_matched_page_by_page(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    start = patterns._start

    def started(pattern: str, keys: list[str]) -> Any:
        asked.append(len(keys))
        return start(pattern, keys)

    monkeypatch.setattr(objects, "object_key_pages", partial(object_key_pages, count=PAGE))
    monkeypatch.setattr(patterns, "_start", started)
    assert removed(store, "k[0-7]") == 8
    assert asked == [3, 3, 3, 1]
    assert store.object_keys("a") == ["k8", "k9"] and len(store.object_keys("b")) == OBJECTS


def test_a_wrong_pattern_is_told_where_nothing_is_stored(store: Store) -> None:
    assert removed(store, ".*") == OBJECTS and removed(store, ".*") == 0
    with pytest.raises(InvalidRequest, match="not a valid regular expression"):
        removed(store, "(")


def test_what_was_deleted_before_the_time_was_over_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a" * 40, b"value", salt="a")
    in_order = sorted(store.object_keys("a"), key=len)  # the slow one comes last
    monkeypatch.setattr(objects, "object_key_pages", lambda *_: iter([in_order[:OBJECTS], in_order[OBJECTS:]]))
    monkeypatch.setattr(patterns, "MATCH_S", 4.0)
    with pytest.raises(InvalidRequest, match=f"longer than 4 s; {OBJECTS} objects were deleted"):
        removed(store, "k.|(a+)+b")
    assert store.object_keys("a") == ["a" * 40]
