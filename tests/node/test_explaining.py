"""Admin calls that explain a lookup, prompts that are named in parts, and answers that fit one message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Keys, Layout, Store
from kvstore.client.admin import KEYS_MAX, KEYS_PER_CALL
from kvstore.errors import InvalidRequest
from kvstore.node.operator import named_pages
from kvstore.node.operator.named_pages import NamedPages
from kvstore.wire import control
from tests.helpers.inside import admin

LAYOUT = Layout(model="m", layers=1, kv_heads=1, head_dim=16, page_tokens=4)
ROOT = "ab" * 16


@pytest.fixture
def store() -> Iterator[Store]:
    with kvstore.open(dram="32MiB", pins_share_max=0.7) as opened:
        yield opened


def put(store: Store, first: int, pages: int, salt: str = "", layout: Layout = LAYOUT) -> Keys:
    cache = store.cache(layout, salt=salt)
    keys = cache.keys(np.arange(first, first + pages * layout.page_tokens))
    assert cache.put(keys, np.zeros((pages, layout.page_bytes), np.uint8)) == pages
    return keys


# --- explain --------------------------------------------------------------------------------------------------------


def test_of_each_page_what_is_known(store: Store) -> None:
    keys = put(store, 0, 6)
    store.pin(keys[:2], 60.0)
    store.evict(keys=keys[4:])
    with store.cache(LAYOUT).lease(keys[:3]):
        told = store.explain(keys)
    assert told["pages"][:4] == [
        {"tiers": ["dram"], "leased": True, "pinned": True},
        {"tiers": ["dram"], "leased": True, "pinned": True},
        {"tiers": ["dram"], "leased": True},
        {"tiers": ["dram"]},
    ]
    for page in told["pages"][4:]:
        event = page["event"]
        assert page["tiers"] == [] and (event["kind"], event["tier"], event["reason"]) == ("evicted", "dram", "request")
        assert 0 <= event["ago_s"] <= told["events_s"]
    assert told["elsewhere"] == [] and told["scanning"] is False


def test_the_same_tokens_elsewhere(store: Store) -> None:
    longer = Layout(model="longer", layers=1, kv_heads=1, head_dim=16, page_tokens=8)
    put(store, 0, 4, "a")
    put(store, 0, 2, "b", longer)
    put(store, 500, 2, "c")
    mine = store.cache(LAYOUT, "d").keys(np.arange(16))
    told = {(other["salt"], other["model"]) for other in store.explain(mine)["elsewhere"]}
    assert told == {("a", "m"), ("b", "longer")}
    assert {other["salt"] for other in store.explain(mine[:1])["elsewhere"]} == {"a"}  # too short for the other's page
    store.evict(salt="a")
    assert {other["salt"] for other in store.explain(mine)["elsewhere"]} == {"b"}


# --- layouts --------------------------------------------------------------------------------------------------------


def test_layouts_that_were_met(store: Store) -> None:
    other = Layout(model="n", layers=2, kv_heads=1, head_dim=16, page_tokens=4, group="window")
    put(store, 0, 2)
    put(store, 0, 3, "a", other)
    put(store, 0, 3, "b", other)
    assert store.put("object", b"x")  # objects have no layout
    found = store.layouts()
    assert [(about["fingerprint"], about["pages"], about["tenants"]) for about in found] == [
        (other.fingerprint.hex(), 6, 2),
        (LAYOUT.fingerprint.hex(), 2, 1),
    ]
    assert [Layout(**about["layout"]) for about in found] == [other, LAYOUT]
    assert [about["layout"]["model"] for about in store.layouts("m")] == ["m"] and store.layouts("x") == []


# --- prompts in parts -----------------------------------------------------------------------------------------------


def test_a_prompt_in_parts(store: Store) -> None:
    pages = 2 * KEYS_PER_CALL + 7
    keys = put(store, 0, pages)
    named = store._page_arguments(keys)
    assert set(named) == {"prompt"}
    assert admin(store, "pages", limit=1, **named)["total"] == pages
    assert store.pages(300, keys=keys)["total"] == pages and len(store.pages(300, keys=keys)["pages"]) == 300
    assert store.pin(keys, 60.0)["pages"] == pages
    assert store.unpin(keys=keys) == {"unpinned": 1}
    assert store.evict(keys=keys)["pages"] == pages
    with pytest.raises(InvalidRequest, match="^keys: must be at most 65536 pages"):
        store.pin(store.cache(LAYOUT).keys(np.arange(4 * (KEYS_MAX + 1))), 60.0)


def test_names_are_bounded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    named = NamedPages()
    first = named.name({"keys": [ROOT], "root": ROOT})["prompt"]
    assert named.name({"keys": [ROOT] * 2, "root": ROOT, "prompt": first}) == {"prompt": first, "pages": 3}
    assert named.expand({"call": "pages", "prompt": first}) == {"call": "pages", "keys": [ROOT] * 3, "root": ROOT}
    others = [named.name({"keys": [ROOT], "root": ROOT})["prompt"] for _ in range(named_pages.PROMPTS_MAX - 1)]
    named.expand({"prompt": first})  # used: another goes
    named.name({"keys": [ROOT], "root": ROOT})
    named.expand({"prompt": first})
    monkeypatch.setattr(named_pages, "PAGES_MAX", 3)
    bad: list[tuple[str, dict[str, Any]]] = [
        ("keys", {"keys": [ROOT], "root": ROOT, "prompt": first}),
        ("root", {"keys": [ROOT], "root": "cd" * 16, "prompt": first}),
        ("root", {"keys": [ROOT], "root": "zz" * 16}),
        ("keys", {"keys": [], "root": ROOT}),
        *(("prompt", {"keys": [ROOT], "root": ROOT, "prompt": unknown}) for unknown in (others[0], "", 5, [])),
    ]
    for field, request in bad:
        with pytest.raises(InvalidRequest) as error:
            named.name(request)
        assert error.value.field == field, request
    with pytest.raises(InvalidRequest, match="^prompt: cannot be combined with keys"):
        named.expand({"prompt": first, "keys": [ROOT]})
    assert len(named.expand({"prompt": first})["keys"]) == 3  # nothing was added
    monkeypatch.setattr(named_pages, "IDLE_S", -1.0)
    with pytest.raises(InvalidRequest, match="^prompt: .* is unknown or has expired"):
        named.expand({"prompt": first})


# --- answers --------------------------------------------------------------------------------------------------------


def test_answers_with_long_names_fit_one_message(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of tenants take up to 6 KB each as JSON, and there may be many."""
    sent: list[int] = []
    pack = control.pack_json
    monkeypatch.setattr(control, "pack_json", lambda value: sent.append(len(pack(value))) or pack(value))
    salts = [f"{number:03}" + "\u0101" * 500 for number in range(150)]
    keys = [put(store, 0, 2, salt) for salt in salts]
    for named in keys:
        store.pin(named[:1], 60.0)
    listed = store.pages(300)
    assert len(listed["pages"]) == 300 and {page["tenant"] for page in listed["pages"]} == set(salts)
    assert {pin["salt"] for pin in store.pins()["pins"]} == set(salts)
    would = store.evict(percent=100.0, dry_run=True)
    assert would["by_tenant"]["(others)"]["pages"] > 0
    assert sum(of["pages"] for of in would["by_tenant"].values()) == would["pages"] == 150
    assert would["stayed"] == {"pinned": 150}
    mine = store.cache(LAYOUT, "nobody").keys(np.arange(8))
    assert store.explain(mine)["elsewhere"]
    assert max(sent) <= control.MESSAGE_BYTES_MAX - control.HEAD.size


def test_pages_say_what_keeps_them(store: Store, tmp_path: Path) -> None:
    keys = put(store, 0, 3)
    store.pin(keys[:1], 60.0)
    with store.cache(LAYOUT).lease(keys[:2]):
        pages = {page["position"]: page for page in store.pages()["pages"]}
    assert [(pages[i]["leased"], pages[i]["pinned"], pages[i]["holds"]) for i in range(3)] == [
        (True, True, 2),
        (True, False, 1),
        (False, False, 0),
    ]
