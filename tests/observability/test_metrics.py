"""/metrics of real daemons: known work makes known counts, no counter goes down, and nobody can make it endless."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from pathlib import Path

from kvstore.limits import LEAVING_MAX
from kvstore.model.replica import Tier
from kvstore.node.operator.metrics import METRICS, TENANTS_MAX, TENANTS_REST
from kvstore.server import http as http_module
from kvstore.shm.counters import MISS_REASONS, OPERATIONS
from tests.helpers.content import SMALL, chain, contents, prompt
from tests.helpers.processes import Machine, evict_all, put, wait_until
from tests.helpers.scraping import Growth, Scrape, fetch, serve_http

PAGE, TOKENS = SMALL.page_bytes, SMALL.page_tokens


# --- what is counted ------------------------------------------------------------------------------------------------


def test_known_work_makes_known_counts(machine: Machine) -> None:
    _, address = serve_http(machine)
    store = machine.connect("m")
    cache, longer = store.cache(SMALL), chain(1, 10)
    grown = Growth(address)
    assert cache.put(chain(1, 8), contents(chain(1, 8))) == 8
    assert cache.put_async(chain(2, 3), contents(chain(2, 3))).result() == 3
    for _ in range(5):
        assert cache.get(longer).pages == 8
    assert cache.lookup(longer).pages == 8
    with cache.lease(longer) as lease:
        assert len(lease.pages) == 8
    assert store.evict(pages=3)["pages"] == 3
    grown.look()
    calls = {"get": 5, "put": 1, "put_async": 1, "lookup": 1, "lease": 1}
    assert calls.keys() == {*OPERATIONS}
    for operation, count in calls.items():
        assert grown("kvstore_operations_total", operation=operation) == count, operation
        if operation != "get":  # of which some are timed
            assert grown("kvstore_operation_duration_seconds_count", operation=operation) == count
            assert 0 < grown("kvstore_operation_duration_seconds_sum", operation=operation) < 10
    assert grown("kvstore_operation_duration_seconds_count", operation="get") >= 1
    assert grown("kvstore_asked_pages_total") == 60
    assert grown("kvstore_hit_pages_total", tier="dram") == 48
    assert grown("kvstore_hit_tokens_total", tier="dram") == 48 * TOKENS
    assert grown("kvstore_read_bytes_total", tier="dram") == 48 * PAGE
    missed = {reason: grown("kvstore_missed_pages_total", reason=reason) for reason in MISS_REASONS}
    assert missed == dict.fromkeys(MISS_REASONS, 0) | {"absent": 12}
    assert grown("kvstore_missed_tokens_total") == 12 * TOKENS
    assert grown("kvstore_put_pages_total") == grown("kvstore_sealed_pages_total") == 11
    assert grown("kvstore_tier_bytes_total", tier="dram", direction="in") == 11 * PAGE
    assert grown("kvstore_tier_bytes_total", tier="dram", direction="out") == 48 * PAGE
    assert grown("kvstore_evicted_pages_total", tier="dram", reason="request") == 3
    assert grown("kvstore_eviction_age_seconds_count", tier="dram") == 3
    assert grown("kvstore_tenant_used_bytes", tenant="", tier="dram") == 8 * PAGE
    assert grown("kvstore_pages", tier="dram") == 8
    assert grown("kvstore_tier_used_bytes", tier="dram") == 8 * PAGE
    assert grown("kvstore_event_log_entries_total") >= 3


def test_hits_on_nvme_and_what_moves(machine: Machine, tmp_path: Path) -> None:
    # A second use brings pages back to DRAM; what leaves it is saved, which is no loss.
    _, address = serve_http(machine, nvme=f"{tmp_path}/disk:64MiB")
    store = machine.connect("m")
    cache, keys = store.cache(SMALL), chain(0, 16)
    grown = Growth(address)
    rounds = 16 * (1 << 20) // (16 * PAGE) * 2  # twice what DRAM holds
    for seed in range(rounds):
        assert put(store, seed, 16) == 16
    match = cache.get(keys)
    assert match.tiers == {Tier.NVME: 16}
    grown.look()
    assert grown("kvstore_hit_pages_total", tier="nvme") == 16
    assert grown("kvstore_hit_tokens_total", tier="nvme") == 16 * TOKENS
    assert grown("kvstore_read_bytes_total", tier="nvme") == 16 * PAGE
    moved = grown("kvstore_moved_pages_total", direction="demoted")
    left = grown("kvstore_evicted_pages_total", tier="dram", reason="saved")
    assert moved >= left >= 16 * rounds // 2 - 16
    assert grown("kvstore_moved_bytes_total", direction="demoted") == moved * PAGE
    assert grown("kvstore_tier_bytes_total", tier="nvme", direction="in") == moved * PAGE
    assert grown("kvstore_evicted_pages_total", tier="dram", reason="space") == 0
    assert grown("kvstore_nvme_written_today_bytes") >= moved * PAGE
    assert cache.prefetch(keys).pages == 16
    grown.look()
    assert grown("kvstore_moved_pages_total", direction="promoted") >= 16
    now = Scrape(address)
    path = f"{tmp_path}/disk"
    assert now("kvstore_device_up", path=path) == 1
    assert now("kvstore_device_pages", path=path) == now("kvstore_pages", tier="nvme") > 0
    assert now("kvstore_device_used_bytes", path=path) == now("kvstore_tier_used_bytes", tier="nvme")


# --- how it is told -------------------------------------------------------------------------------------------------


def test_what_is_exported_is_well_formed(machine: Machine, tmp_path: Path) -> None:
    _, address = serve_http(machine, nvme=f"{tmp_path}/disk:16MiB", listen="127.0.0.1:0")
    put(machine.connect("m"), 1, 4)
    found = Scrape(address)
    by_name = {family.name: family for family in found.families}
    assert {about.name for about in METRICS} == by_name.keys(), (
        "every metric of the table has a TYPE line, no other has"
    )
    doubled = [
        s for s, n in Counter((s.name, str(s.labels)) for f in found.families for s in f.samples).items() if n > 1
    ]
    assert doubled == []
    for about in METRICS:
        family = by_name[about.name]
        assert (family.type, family.documentation) == (about.kind, about.help)
        assert about.name.startswith("kvstore_") and about.help.endswith(".")
        assert not about.name.endswith(("_total", "_count", "_sum", "_bucket", "_info")) or about.kind == "gauge"
        for sample in family.samples:
            assert {*sample.labels} - {"le"} == {*about.labels}, sample
        if about.kind == "histogram":
            check_histograms(found, about.name)
    for name in ("kvstore_put_pages_total", "kvstore_sealed_pages_total"):
        assert found(name) == 4, name
    assert found("kvstore_pages", tier="dram") == found("kvstore_frames", tier="dram", state="sealed") == 4
    _, _, text = fetch(address)
    assert text.endswith("\n") and "created" not in text


def check_histograms(found: Scrape, name: str) -> None:
    """Buckets are cumulative, the last one is +Inf and is the count; each has a sum."""
    rows: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    for (series, labels), value in found.values.items():
        if series == f"{name}_bucket":
            rest = tuple(label for label in labels if label[0] != "le")
            rows.setdefault(rest, []).append((float(dict(labels)["le"]), value))
    for labels, buckets in rows.items():
        bounds, counts = zip(*buckets, strict=True)
        assert sorted(bounds) == list(bounds) and bounds[-1] == float("inf"), (name, labels)
        assert sorted(counts) == list(counts), (name, labels)
        assert found.values[f"{name}_count", labels] == counts[-1]
        inside = [count - before for count, before in zip(counts, (0, *counts[:-1]), strict=True)]
        low = sum(n * bound for n, bound in zip(inside[1:], bounds[:-1], strict=True))
        high = sum(n * bound for n, bound in zip(inside, bounds, strict=True) if n)
        assert low * 0.999 <= found.values[f"{name}_sum", labels] <= high * 1.001, (name, labels, buckets)


HOSTILE = (
    'a"b',
    "back\\slash",
    "new\nline",
    "{}=,",
    "ünïcode \u2028 \U0001f4a9",
    "x" * 1000,
    "nul\0",
    TENANTS_REST,
    "*",
)


def test_hostile_salts_and_a_bound_on_tenants(machine: Machine) -> None:
    _, address = serve_http(machine, dram="64MiB")
    store = machine.connect("m")
    for seed, salt in enumerate(HOSTILE):
        assert put(store, seed, 1, salt=salt) == 1
    named = Scrape(address).labels("kvstore_tenant_used_bytes", "tenant")
    assert named == {salt[:100] for salt in HOSTILE}
    many = 3 * TENANTS_MAX
    for seed in range(many):
        assert put(store, seed, 1, salt=f"tenant-{seed}") == 1
    now = Scrape(address)
    named = now.labels("kvstore_tenant_used_bytes", "tenant")
    assert len(named) <= TENANTS_MAX + 1 and TENANTS_REST in named
    assert now("kvstore_tenants") == many + len(HOSTILE)
    used = sum(now("kvstore_tenant_used_bytes", tenant=tenant, tier="dram") for tenant in named)
    assert used == now("kvstore_tier_used_bytes", tier="dram") == (many + len(HOSTILE)) * PAGE
    assert named == Scrape(address).labels("kvstore_tenant_used_bytes", "tenant"), "who has a name keeps it"
    stats = store.stats()  # a message has a bound as well
    assert stats["tenants_left_off"] + len(stats["tenants"]) == many + len(HOSTILE)


# --- counters do not go down ----------------------------------------------------------------------------------------


def test_no_counter_goes_down(machine: Machine) -> None:
    """While clients work, end and are killed, tenants are forgotten, and four scrape at once."""
    daemon, address = serve_http(machine, listen="127.0.0.1:0")
    stopped = threading.Event()
    wrong: list[str] = []
    rounds = Counter[str]()

    def scrape(name: str) -> None:
        before = Scrape(address).counters()
        while not stopped.is_set():
            now = Scrape(address).counters()
            wrong.extend(f"{s}: {value} -> {now.get(s)}" for s, value in before.items() if now.get(s, -1) < value)
            before = now
            rounds[name] += 1

    names = [f"scraper {i}" for i in range(4)]
    scrapers = [threading.Thread(target=scrape, args=(name,)) for name in names]
    for thread in scrapers:
        thread.start()
    try:
        killed = machine.worker("put", "m", first=1000, count=100_000, pages=8)
        ending = machine.connect("m")
        for i in range(4):
            put(ending, 100 + i, 8, salt=f"tenant-{i}")
            ending.cache(SMALL, salt=f"tenant-{i}").get(prompt(100 + i, 9))
        ending.close()
        wait_until("the writer has put", lambda: killed.acknowledged())
        killed.kill()
        store = machine.connect("m")
        evict_all(store)
        assert put(store, 1, 3) == 3
        seen = dict(rounds)
        wait_until("all have scraped since", lambda: all(rounds[name] > seen.get(name, 0) + 2 for name in names))
    finally:
        stopped.set()
        for thread in scrapers:
            thread.join(60)
    assert not wrong, wrong[:5]
    assert daemon.alive


def test_a_restart_counts_from_zero_and_the_living_from_there(machine: Machine) -> None:
    """Also the counts of a client that lives on: what it counted under the last daemon is not told again."""
    daemon, address = serve_http(machine)
    store = machine.connect("m")
    keys = chain(1, 8)
    assert put(store, 1, 8) == 8
    assert store.cache(SMALL).get(keys).pages == 8
    wait_until("it is counted", lambda: Scrape(address)("kvstore_hit_pages_total", tier="dram") == 8)
    daemon.kill()
    daemon, address = serve_http(machine)
    now = Scrape(address)
    counted = ("kvstore_asked_pages_total", "kvstore_put_pages_total", "kvstore_sealed_pages_total")
    assert [now(name) for name in counted] == [0, 0, 0]
    assert now("kvstore_pages", tier="dram") == 8
    assert store.cache(SMALL).get(keys).pages == 8
    assert Scrape(address)("kvstore_hit_pages_total", tier="dram") == 8


# --- HTTP -----------------------------------------------------------------------------------------------------------


def test_slow_and_dead_clients_hang_nobody(machine: Machine) -> None:
    daemon, address = serve_http(machine)
    host, port = address.rsplit(":", 1)
    threads = len(list(Path(f"/proc/{daemon.pid}/task").iterdir()))

    def open_many(count: int) -> list[socket.socket]:
        return [socket.create_connection((host, int(port)), timeout=60) for _ in range(count)]

    with_nothing = open_many(5)
    for one in with_nothing[:2]:
        one.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    assert fetch(address)[0] == fetch(address, "/healthz")[0] == 200, "some slow ones are in nobody's way"
    gone = open_many(20)
    for one in gone:
        one.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        one.close()  # it does not wait for the answer
    wait_until("those are through", lambda: answers(address))
    crowd = open_many(4 * http_module.CONNECTIONS_MAX)
    wait_until("the oldest silent ones give way", lambda: answers(address))
    assert len(list(Path(f"/proc/{daemon.pid}/task").iterdir())) <= threads + http_module.CONNECTIONS_MAX + LEAVING_MAX
    wait_until("the slow ones are cut off", lambda: not crowd[-1].recv(1), http_module.REQUEST_S + 30)
    assert put(machine.connect("m"), 1, 3) == 3, "clients of the store notice nothing"
    for one in (*with_nothing, *crowd):
        one.close()
    assert "Traceback" not in daemon.errors.read_text()


def answers(address: str) -> bool:
    """Whether a scrape gets through."""
    try:
        return fetch(address)[0] == 200
    except OSError:
        return False
