"""Tenants of a real daemon: accounts and pins outlive kill -9, a flood at its quota touches nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore import Store
from kvstore.client.admin import keys_argument
from kvstore.errors import InvalidRequest, OutOfSpace, QuotaExceeded
from tests.process.content import SMALL, chain, contents
from tests.process.harness import Machine, check_laws, check_pages, put, wait_until

PAGES = 8
QUOTA = 4 * PAGES * SMALL.page_bytes


def dram(store: Store, salt: str) -> dict[str, Any]:
    tenants: dict[str, Any] = store.stats()["tenants"]
    return dict(tenants[salt]["dram"])


def flood(store: Store, salt: str, first: int, count: int) -> None:
    """Prompt after prompt; each is stored whole."""
    for seed in range(first, first + count):
        assert put(store, seed, PAGES, salt=salt) == PAGES


def test_a_flood_at_its_quota_touches_nobody_else_and_accounts_outlive_a_kill(machine: Machine) -> None:
    flags = {"dram": "16MiB", "quotas": f"noisy dram={QUOTA}"}
    (machine.logs / "node.toml").write_text(f'[node]\nquotas = ["noisy dram={QUOTA}"]\n')
    daemon = machine.serve("a", dram=flags["dram"], config=str(machine.logs / "node.toml"))
    store = machine.connect("a")
    room = store.stats()["tiers"]["dram"]["capacity_bytes"] // (PAGES * SMALL.page_bytes)
    quiet = dict.fromkeys(range(int(room * 0.7)), PAGES)
    flood(store, "quiet", 0, len(quiet))
    flood(store, "noisy", 10_000, int(room))
    assert check_pages(store, quiet, salt="quiet") == len(quiet) * PAGES
    before = {salt: dram(store, salt) for salt in ("quiet", "noisy")}
    assert before["noisy"]["bytes"] <= QUOTA and before["noisy"]["evicted_quota"] > 0
    assert before["quiet"]["pages"] == len(quiet) * PAGES and before["quiet"]["evicted_quota"] == 0
    daemon.kill()
    machine.serve("a")
    for salt in ("quiet", "noisy"):
        after = dram(store, salt)
        assert (after["pages"], after["bytes"]) == (before[salt]["pages"], before[salt]["bytes"])
    flood(store, "noisy", 20_000, 20)
    assert check_pages(store, quiet, salt="quiet") == len(quiet) * PAGES
    check_laws(store)


def test_what_may_not_leave_is_refused(machine: Machine) -> None:
    (machine.logs / "node.toml").write_text(f'[node]\nquotas = ["* dram={PAGES * SMALL.page_bytes}"]\n')
    machine.serve("a", dram="16MiB", config=str(machine.logs / "node.toml"))
    store = machine.connect("a")
    cache = store.cache(SMALL, salt="t")
    long = chain(1, 2 * PAGES, SMALL, "t")
    assert cache.put(long, contents(long, SMALL)) == PAGES  # its own front is never evicted for its tail
    with cache.lease(long):
        other = chain(2, 3, SMALL, "t")
        with pytest.raises(QuotaExceeded) as refused:
            cache.put(other, contents(other, SMALL))
        assert refused.value.retry_after_s > 0 and isinstance(refused.value, OutOfSpace)
        with pytest.raises(QuotaExceeded), cache.writer(other):
            raise AssertionError("nothing could be reserved")
        assert put(store, 3, PAGES, salt="another") == PAGES
    assert cache.put(other, contents(other, SMALL)) == 3  # paired: the lease ended
    assert dram(store, "t")["refused"] > 0
    check_laws(store)


def test_pins_outlive_a_kill_and_a_flood(machine: Machine) -> None:
    daemon = machine.serve("a", dram="16MiB")
    store = machine.connect("a")
    room = store.stats()["tiers"]["dram"]["capacity_bytes"] // (PAGES * SMALL.page_bytes)
    flood(store, "", 0, 2)
    pin = store._admin("pin", ttl_s=600, **keys_argument(chain(0, PAGES, SMALL, "")))
    assert (pin["pages"], pin["bytes"]) == (PAGES, PAGES * SMALL.page_bytes)
    daemon.kill()
    machine.serve("a")
    assert [entry["pin"] for entry in store._admin("pins")["pins"]] == [pin["pin"]]
    flood(store, "", 100, 2 * room)
    store.evict(pages=1 << 20)
    assert check_pages(store, {0: PAGES}) == PAGES
    assert store.cache(SMALL).get(chain(1, PAGES, SMALL, "")).pages == 0  # paired: what was not pinned left
    check_laws(store)
    store._admin("unpin", pin=pin["pin"])
    store.evict(pages=1 << 20)
    assert store.cache(SMALL).get(chain(0, PAGES, SMALL, "")).pages == 0
    flood(store, "", 0, 1)
    store._admin("pin", ttl_s=0.3, **keys_argument(chain(0, PAGES, SMALL, "")))
    wait_until("the pin runs out", lambda: not store._admin("pins")["pins"])


def test_pins_are_bounded_and_bad_calls_change_nothing(machine: Machine) -> None:
    (machine.logs / "node.toml").write_text("[node]\npins_share_max = 0.0\n")
    machine.serve("a", dram="16MiB", config=str(machine.logs / "node.toml"))
    store = machine.connect("a")
    put(store, 0, PAGES)
    named = keys_argument(chain(0, PAGES, SMALL, ""))
    for field, call, arguments in (
        ("keys", "pin", {**named, "ttl_s": 5}),
        ("ttl_s", "pin", {**named, "ttl_s": -1}),
        ("keys", "pin", {**named, "keys": ["zz"], "ttl_s": 5}),
        ("pin", "unpin", {"pin": 77}),
        ("root", "root", {"root": "00" * 16, "fingerprint": "00" * 16, "salt": "thief"}),
    ):
        with pytest.raises(InvalidRequest) as error:
            store._admin(call, **arguments)
        assert error.value.field == field
    assert store._admin("pins")["pins"] == []
    assert "thief" not in store._admin("tenants")["tenants"]
