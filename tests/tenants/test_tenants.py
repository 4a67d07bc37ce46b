"""Tenants of a real daemon: what quotas and pins promise holds over floods, kills, reboots and changed quotas."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest

import kvstore
from kvstore import Retention, Store
from kvstore.client.admin import keys_argument
from kvstore.errors import OutOfSpace, PermissionDenied, QuotaExceeded
from kvstore.pb import store_pb2 as pb
from kvstore.wire.grpc import RETRY_KEY
from tests.helpers.api import Client, identities_file, pages_message, serve_api, write_messages
from tests.helpers.content import SMALL, chain, contents, prompt
from tests.helpers.inside import admin
from tests.helpers.nvme.nodes import NODE, check_sound, configure, reboot, save_all, wait_quiet, wait_scanned
from tests.helpers.processes import Machine, check_laws, check_pages, put, wait_until

PAGES = 8
PROMPT = PAGES * SMALL.page_bytes
QUOTA = 4 * PROMPT


def share(store: Store, salt: str, tier: str = "dram") -> dict[str, Any]:
    """What a tenant has in a tier."""
    tenants: dict[str, Any] = store.stats()["tenants"]
    return dict(tenants[salt][tier])


def dram(store: Store, salt: str) -> dict[str, Any]:
    return share(store, salt)


def found(store: Store, salt: str, seeds: range) -> int:
    """Pages of these prompts that can be read, wherever they are; each is right."""
    cache = store.cache(SMALL, salt=salt)
    return sum(cache.lookup(chain(seed, PAGES, SMALL, salt)).pages for seed in seeds)


def serve_with(machine: Machine, quotas: list[str], **flags: str) -> Any:
    """A daemon without NVMe, with these quotas."""
    path = machine.logs / "node.toml"
    path.write_text(f"[node]\nquotas = {quotas}\n".replace("'", "'"))
    return machine.serve("a", **{"dram": "16MiB", "config": str(path), **flags})


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


@pytest.mark.parametrize("eviction", ["gittins", "lru"])
def test_at_its_quota_a_tenant_loses_first_what_its_hints_say(machine: Machine, eviction: str) -> None:
    """And after a kill as before it. Where the node's policy takes no notice of hints, what is oldest leaves."""
    daemon = serve_with(machine, [f"t dram={QUOTA}"], eviction=eviction)
    store = machine.connect("a")
    cache = store.cache(SMALL, salt="t")
    for seed, priority in ((1, 3), (2, 0), (3, -3), (4, 0)):
        keys = chain(seed, PAGES, SMALL, "t")
        assert cache.put(keys, contents(keys, SMALL), retention=Retention(priority), wait=True) == PAGES
        time.sleep(0.02)  # an age of several milliseconds

    def left() -> list[int]:
        return [seed for seed in range(1, 9) if found(store, "t", range(seed, seed + 1))]

    flood(store, "t", 5, 1)
    assert left() == ([1, 2, 4, 5] if eviction == "gittins" else [2, 3, 4, 5])
    daemon.kill()
    serve_with(machine, [f"t dram={QUOTA}"], eviction=eviction)
    flood(store, "t", 6, 3)
    assert left() == ([1, 6, 7, 8] if eviction == "gittins" else [5, 6, 7, 8])
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
    pin = admin(store, "pin", ttl_s=600, **keys_argument(store.in_pool(chain(0, PAGES, SMALL, ""))))
    assert (pin["pages"], pin["bytes"]) == (PAGES, PAGES * SMALL.page_bytes)
    daemon.kill()
    machine.serve("a")
    assert [entry["pin"] for entry in admin(store, "pins")["pins"]] == [pin["pin"]]
    flood(store, "", 100, 2 * room)
    store.evict(pages=1 << 20)
    assert check_pages(store, {0: PAGES}) == PAGES
    assert store.cache(SMALL).get(chain(1, PAGES, SMALL, "")).pages == 0  # paired: what was not pinned left
    check_laws(store)
    admin(store, "unpin", pin=pin["pin"])
    store.evict(pages=1 << 20)
    assert store.cache(SMALL).get(chain(0, PAGES, SMALL, "")).pages == 0
    flood(store, "", 0, 1)
    admin(store, "pin", ttl_s=0.3, **keys_argument(store.in_pool(chain(0, PAGES, SMALL, ""))))
    wait_until("the pin runs out", lambda: not admin(store, "pins")["pins"])


# --- NVMe -----------------------------------------------------------------------------------------------------------


def test_pins_of_objects_outlive_a_kill_and_a_flood_and_end_with_their_objects(machine: Machine) -> None:
    daemon = machine.serve("n", dram="32MiB")
    store = machine.connect("n")
    values = {"small": b"1", "large": bytes(3 << 20), "replaced": bytes(300_000), "deleted": bytes(5000)}
    assert all(store.put_many(list(values), list(values.values()), wait=False))
    for key, pages in zip(values, (1, 3, 5, 2), strict=True):
        keys = store.object_pages(key)
        assert keys is not None and store.pin(keys, 600.0)["pages"] == len(keys) == pages, key
    assert store.object_pages("none") is None
    daemon.kill()
    machine.serve("n", dram="32MiB")
    for number in range(100):
        assert store.put(f"flood{number}", bytes(700_000))
    assert store.contains([*values, "flood0"]) == [True] * 4 + [False]
    assert store.delete("deleted") == 1 and store.put("replaced", b"new", replace=True)
    assert len(store.pins()["pins"]) == 2, "the owner of a value may delete and replace it"
    assert store.clear("") > 3 and store.pins()["pins"] == []
    check_laws(store)


def test_nvme_quota_takes_from_its_tenant_alone_and_survives_restarts_and_reboots(machine: Machine) -> None:
    flags = configure(machine, quotas=[f"noisy nvme={QUOTA}"], checkpoint_s=1e6)
    daemon, store = machine.serve(NODE, **flags), machine.connect(NODE)
    quiet = 12
    flood(store, "quiet", 0, quiet)
    flood(store, "noisy", 1000, 40)  # DRAM holds 16 prompts: both tiers are at work
    wait_until("noisy has been at its limit", lambda: share(store, "noisy", "nvme")["evicted_quota"] > 0)
    save_all(store, quiet * PAGES)
    assert found(store, "quiet", range(quiet)) == quiet * PAGES
    noisy = share(store, "noisy", "nvme")
    assert QUOTA - PROMPT <= noisy["bytes"] <= QUOTA and share(store, "quiet", "nvme")["evicted_quota"] == 0
    assert found(store, "noisy", range(1036, 1040)) > found(store, "noisy", range(1000, 1004)), "the coldest left"

    daemon.kill()  # a smaller quota takes effect without anybody asking for anything; names outlive the kill
    half = QUOTA // 2
    daemon = machine.serve(NODE, **configure(machine, quotas=[f"noisy nvme={half}"], checkpoint_s=1e6))
    wait_until("noisy is within the smaller quota", lambda: share(store, "noisy", "nvme")["bytes"] <= half)
    assert found(store, "quiet", range(quiet)) == quiet * PAGES
    check_sound(store)

    daemon.kill()  # after a reboot the scan finds pages again that had left; whose they are nobody knows
    reboot(machine)
    machine.serve(NODE, **configure(machine, quotas=["* nvme=16KiB", f"noisy nvme={half}", "quiet nvme=64MiB"]))
    store = machine.connect(NODE)
    wait_scanned(store)
    assert store.stats()["unclaimed_bytes"]["nvme"] >= quiet * PROMPT
    assert found(store, "quiet", range(quiet)) == quiet * PAGES, "what nobody claimed leaves for nobody's quota"
    store.cache(SMALL, salt="noisy").prefetch(chain(1039, PAGES, SMALL, "noisy"))
    wait_until("noisy, who has spoken, is within its quota", lambda: share(store, "noisy", "nvme")["bytes"] <= half)
    store.cache(SMALL, salt="quiet").prefetch(chain(0, PAGES, SMALL, "quiet"))
    assert found(store, "quiet", range(quiet)) == quiet * PAGES
    wait_quiet(store)
    check_sound(store)


def test_pins_on_nvme_outlive_eviction_and_a_kill_and_fill_a_quota(machine: Machine) -> None:
    flags = configure(machine, quotas=[f"t dram={PROMPT}"])
    daemon, store = machine.serve(NODE, **flags), machine.connect(NODE)
    flood(store, "t", 0, 1)
    flood(store, "", 1, 3)
    save_all(store, 4 * PAGES)
    pins = [store.pin(chain(0, PAGES, SMALL, "t"), 600), store.pin(chain(1, PAGES // 2, SMALL), 600)]
    assert [pin["pages"] for pin in pins] == [PAGES, PAGES // 2], "what is on NVMe alone is pinned there"
    assert store.pin(chain(0, PAGES, SMALL, "t"), 900)["pin"] == pins[0]["pin"], "pinned again is pinned longer"
    daemon.kill()
    machine.serve(NODE, **flags)
    gone = store.evict(tier="all", percent=100)
    assert gone["pages"] == 4 * PAGES - PAGES - PAGES // 2
    assert found(store, "t", range(1)) == PAGES and found(store, "", range(1, 4)) == PAGES // 2
    tiers = {entry["pin"]: entry["tiers"] for entry in store.pins()["pins"]}
    assert tiers == {pins[0]["pin"]: {"nvme": PAGES}, pins[1]["pin"]: {"nvme": PAGES // 2}}
    assert store.cache(SMALL, salt="t").prefetch(chain(0, PAGES, SMALL, "t")).pages == PAGES
    store.pin(chain(0, PAGES, SMALL, "t"), 900)  # now it is kept in DRAM
    with pytest.raises(QuotaExceeded):
        put(store, 5, 1, salt="t")
    assert found(store, "t", range(1)) == PAGES, "a pinned tail does not leave for its own tenant"
    store.unpin(keys=chain(0, PAGES, SMALL, "t"))
    assert put(store, 5, PAGES, salt="t") == PAGES
    store.unpin(pins[1]["pin"])
    assert store.pins() == {"pins": [], "bytes": {"dram": 0, "nvme": 0}}
    store.evict(tier="all", percent=100)
    assert found(store, "t", range(6)) + found(store, "", range(4)) == 0
    check_sound(store)


# --- edges ----------------------------------------------------------------------------------------------------------


def test_over_grpc_a_full_quota_is_back_pressure_with_a_hint(machine: Machine) -> None:
    identities = identities_file(machine.logs)
    path = machine.logs / "node.toml"
    path.write_text(f'[node]\nquotas = ["a dram={PROMPT}"]\n')
    _, address = serve_api(machine, identities=identities, config=str(path))
    local = machine.connect("api")
    first, more = chain(1, PAGES, SMALL, "a"), chain(2, PAGES, SMALL, "a")
    with kvstore.connect(f"kv://{address}", token="a-token") as store:
        cache = store.cache(SMALL, salt="a")
        assert cache.put(first, contents(first)) == PAGES
        with local.cache(SMALL, salt="a").lease(first):
            for attempt in (lambda: cache.put(more, contents(more)), lambda: cache.writer(more).__enter__()):
                with pytest.raises(QuotaExceeded) as refused:
                    attempt()
                assert refused.value.retry_after_s > 0 and isinstance(refused.value, OutOfSpace)
            with pytest.raises(QuotaExceeded):
                store.put("k", b"x" * PROMPT, salt="a")
            client = Client(address, "a-token")
            with pytest.raises(grpc.RpcError) as error:
                client.call("Write", write_messages(pages_message(more, salt="a"), contents(more)))
            assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            said = dict(error.value.trailing_metadata())
            assert int(said[RETRY_KEY]) > 0 and said["kvstore-error"] == "QuotaExceeded"
            client.close()
        wait_until("the lease ends", lambda: local.stats()["leases"] == 0)
        assert cache.put(more, contents(more)) == PAGES, "paired: the lease ended"
        pin, foreign = store.pin(more[:1], 60), store.cache(SMALL, salt="b").keys(prompt(1, 2))
        for forbidden in (lambda: store.unpin(pin["pin"]), store.pins, store.stats, lambda: store.pin(foreign, 9)):
            with pytest.raises(PermissionDenied):
                forbidden()
        assert local.pins()["pins"][0]["salt"] == "a" and store.unpin(keys=more[:1])["unpinned"] == 1
    with kvstore.connect(f"kv://{address}", token="b-token") as store:
        other = chain(2, 2 * PAGES, SMALL, "b")
        assert store.cache(SMALL, salt="b").put(other, contents(other)) == 2 * PAGES


def test_what_one_tenant_is_told_does_not_depend_on_what_another_stored(machine: Machine) -> None:
    _, address = serve_api(machine, identities=identities_file(machine.logs))
    local, b = machine.connect("api"), Client(address, "b-token")

    def told() -> list[str]:
        answers = []
        for salt in ("b", "a"):  # its own, and one that it may not use
            pages = pages_message(chain(1, PAGES, SMALL, salt), salt=salt)
            for name, request in (
                ("Lookup", pb.LookupRequest(pages=pages)),
                ("Prefetch", pb.LookupRequest(pages=pages)),
                ("Read", pb.ReadRequest(pages=pages)),
                ("Lease", pb.LeaseRequest(pages=pages)),
                ("Pin", pb.PinRequest(prompt=pages, ttl_s=9)),
                ("Unpin", pb.UnpinRequest(prompt=pages)),
                ("GetObject", pb.GetObjectRequest(key="k", salt=salt)),
                ("ContainsObjects", pb.ObjectKeys(keys=["k"], salt=salt)),
                ("DeleteObjects", pb.ObjectKeys(keys=["k"], salt=salt)),
                ("ClearObjects", pb.ClearObjectsRequest(salt=salt)),
                ("About", pb.AboutRequest()),
                ("Stats", pb.Empty()),
                ("Pins", pb.Empty()),
            ):
                try:
                    answers.append(f"{name} {salt}: {b.call(name, request)}")
                except grpc.RpcError as error:
                    answers.append(f"{name} {salt}: {error.code()} {error.details()} {error.trailing_metadata()}")
        return answers

    before = told()
    for salt in ("a", ""):
        assert put(local, 1, PAGES, salt=salt) == PAGES and local.put("k", b"secret", salt=salt)
        local.pin(chain(1, PAGES, SMALL, salt), 60)
    assert told() == before
    assert put(local, 1, PAGES, salt="b") == PAGES
    assert told() != before, "paired: of its own it is told"
    b.close()


def test_many_salts_are_bounded_and_operators_still_see_the_node(machine: Machine) -> None:
    daemon = machine.serve("a", dram="8MiB")
    store = machine.connect("a")
    rows = contents(chain(0, 1))
    for i in range(300):
        store.cache(SMALL, salt=f"salt-{i}-{'x' * 900}").put(chain(0, 1, SMALL, f"salt-{i}-{'x' * 900}"), rows)
    before = daemon.memory_bytes()
    for i in range(300, 1300):
        salt = f"salt-{i}-{'x' * 900}"
        store.cache(SMALL, salt=salt).put(chain(0, 1, SMALL, salt), rows)
    assert daemon.memory_bytes() - before < 24 << 20, "what is remembered of a salt has a bound"
    stats = store.stats()
    assert stats["tiers"]["dram"]["pages"] and len(stats["tenants"]) < 1300
    check_laws(store)
