"""Flipped bytes in data, records, index: found, dropped with descendants, counted with a reason, the rest unharmed."""

from __future__ import annotations

import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from kvstore import Store
from kvstore.model.replica import Address, FrameClass, Tier
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import Header
from kvstore.shm.records import RECORDS_HEAD_BYTES, ExtentTable
from kvstore.tier.dram import SEGMENT_HEAD_BYTES, SegmentMap
from tests.helpers.content import SMALL, chain, mismatch
from tests.helpers.inside import node_of
from tests.helpers.processes import (
    Daemon,
    Machine,
    check_laws,
    check_pages,
    check_right,
    put,
    wait_until,
)
from tests.helpers.workers.pages import WRONG_BYTES

PAGES, DAMAGED = 8, 3
CLASS = FrameClass(SMALL.page_bytes, SMALL.page_tokens, SMALL.layers)
ROW = CLASS.record

# Byte offsets inside a record. What proves a page or its place must be found; the rest must do no harm.
PROVEN = {
    "key": 8 + 5,
    "root": 8 + 16 + 5,
    "extra": 8 + 32 + 5,
    "tokens": 8 + 48 + 21,
    "parent": ROW.parent.start + 5,
    "identity sum": ROW.identity_sum + 3,
    "checksum of layer 0": ROW.checksums.start,
    "checksum of layer 3": ROW.checksums.stop - 1,
}
HARMLESS = {
    "payload bytes": ROW.info + 1,
    "shards": ROW.info + 4,
    "mask": ROW.info + 5,
    "flags": ROW.info + 6,
    "lease": ROW.lease_until_ns + 7,
    "group": ROW.group + 1,
}
# In the word: the state, and the generation. The daemon knows both; one that starts takes the page under another name.
WORD = {"state": 0, "generation": 2}


def flip(path: Path, offset: int, mask: int = 0xFF) -> None:
    """Change one byte of a file, in place."""
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ mask]))


def address_of(store: Store, seed: int, page: int) -> Address:
    mapped = node_of(store).mapped()
    assert mapped is not None
    address = mapped.index.find(Tier.DRAM, store.in_pool(chain(seed, PAGES)).hashes[page])
    assert address is not None
    return address


def record_at(store: Store, machine: Machine, seed: int, page: int) -> tuple[Path, int]:
    """File and offset of a page's record."""
    address = address_of(store, seed, page)
    return machine.folder("n") / f"records-{address.extent}", RECORDS_HEAD_BYTES + address.frame * ROW.row_bytes


def data_at(store: Store, machine: Machine, seed: int, page: int) -> tuple[Path, int]:
    """File and offset of a page's bytes."""
    folder = NodeFolder.at(machine.folder("n"))
    header = Header.open(folder)
    assert header is not None
    address = address_of(store, seed, page)
    table = ExtentTable.open(folder, address.extent, header.incarnation)
    segment = SegmentMap.open(folder, header.incarnation)
    assert table is not None and segment is not None
    place = SEGMENT_HEAD_BYTES + table.position * segment.extent_bytes + address.frame * CLASS.frame_bytes
    table.close()
    segment.close()
    return folder.segment, place


def stamped(store: Store) -> bool:
    """All pages have their checksums."""
    stats = store.stats()
    return bool(stats["scrubber"]["pages_stamped"] >= stats["tiers"]["dram"]["pages"])


def filled(machine: Machine, seeds: int, scrub: bool = True) -> Store:
    """A node with that many prompts of ``PAGES`` pages, stamped. Without ``scrub`` only who is asked looks at them."""
    config = machine.logs / "node.toml"
    config.write_text(f"[node]\nscrub_bytes_per_s = {(64 << 20) * scrub + (not scrub)}\n")
    machine.serve("n", dram="16MiB", config=str(config))
    store = machine.connect("n")
    for seed in range(seeds):
        assert put(store, seed, PAGES) == PAGES
    if not scrub:
        store.verify()
    wait_until("all pages have checksums", lambda: stamped(store))
    return store


def damage(store: Store) -> dict[str, int]:
    """Pages dropped, by reason."""
    return {name: n for name, n in store.stats()["counters"].items() if name.startswith("damaged_")}


def mended(store: Store, seed: int) -> None:
    """The prompt can be put again, and is right."""
    put(store, seed, PAGES)
    check_pages(store, {seed: PAGES})


@pytest.mark.parametrize("finder", ["verify", "command line", "scrubber", "reader"])
def test_a_flipped_byte_of_a_page(finder: str, machine: Machine) -> None:
    store = filled(machine, 6, scrub=finder == "scrubber")
    rng = random.Random(1)
    path, start = data_at(store, machine, 2, DAMAGED)
    flip(path, start + rng.randrange(SMALL.page_bytes), 1 << rng.randrange(8))
    if finder == "verify":
        found = store.verify()
        assert found["pages_damaged"] == 1 and found["damage_since_start"] == {"damaged_data": 1}, found
    elif finder == "command line":
        result = machine.run("verify", "--node", "n")
        assert result.returncode == 1 and "1 damaged" in result.stdout, result.stdout + result.stderr
    elif finder == "reader":
        keys = chain(2, PAGES)
        match = store.cache(SMALL).get(keys, verify=True)
        assert (match.pages, mismatch(match, keys)) == (DAMAGED, "")
    wait_until("it is found", lambda: damage(store) == {"damaged_data": 1})
    keys = chain(2, PAGES)
    match = store.cache(SMALL).get(keys)
    assert (match.pages, mismatch(match, keys)) == (DAMAGED, "")
    assert store.stats()["counters"]["pages_dropped"] == PAGES - DAMAGED, "descendants were not dropped with it"
    check_pages(store, {seed: PAGES for seed in range(6) if seed != 2})
    result = machine.run("verify", "--node", "n")
    assert result.returncode == 0, result.stdout
    mended(store, 2)
    assert damage(store) == {"damaged_data": 1}


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
def test_a_flipped_byte_of_a_record(restart: bool, machine: Machine) -> None:
    """In each field, each in a prompt of its own; found by the running daemon, or when the next one starts."""
    fields = {**PROVEN, **HARMLESS, **WORD}
    found = {*PROVEN, *(() if restart else WORD)}
    store = filled(machine, len(fields) + 3)
    if restart:
        machine.processes[0].kill()
    for seed, offset in enumerate(fields.values()):
        path, start = record_at(store, machine, seed, DAMAGED)
        flip(path, start + offset, 0xFF if offset else 1)  # SEALED becomes RETIRING
    if restart:
        machine.serve("n")
    store.verify()
    check_laws(store)
    wrong: dict[str, str] = {}
    for seed, name in enumerate(fields):
        keys = chain(seed, PAGES)
        match = store.cache(SMALL).get(keys)
        if bad := mismatch(match, keys):
            wrong[name] = bad
        elif name in found and match.pages != DAMAGED:
            wrong[name] = f"{match.pages} pages are left, {DAMAGED} lie before the damaged one"
        elif match.pages not in (DAMAGED, PAGES):
            wrong[name] = f"{match.pages} pages are left"
    assert wrong == {}
    check_pages(store, dict.fromkeys(range(len(fields), len(fields) + 3), PAGES))
    counters = store.stats()["counters"]
    if restart:
        assert counters["pages_dropped_at_start"] + counters.get("pages_dropped", 0) >= 5 * len(PROVEN), counters
    else:
        assert sum(damage(store).values()) >= len(found), counters
    for seed in range(len(fields)):
        mended(store, seed)
    check_laws(store)


def test_flipped_bytes_anywhere_in_the_records(machine: Machine) -> None:
    """Headers, free frames, padding: at random, with readers at work and restarts in between; never a wrong byte."""
    rng = random.Random(2)
    store = filled(machine, 40)
    reader = machine.worker("read", "n", first=0, count=40, pages=PAGES)
    reader.wait_for("read")
    for number in range(30):
        records = sorted(machine.folder("n").glob("records-*"))
        path = rng.choice(records)
        flip(path, rng.randrange(path.stat().st_size), 1 << rng.randrange(8))
        if number % 6 == 5:
            machine.processes[-1 if number > 5 else 0].kill()
            machine.serve("n")
        check_right(store, dict.fromkeys(range(40), PAGES))
    store.verify()
    wait_until("the laws hold", lambda: store.verify()["findings"] == [])
    reader.finish()
    for seed in range(40):
        mended(store, seed)
    check_laws(store)


def test_a_lease_on_an_extent_that_is_given_up(machine: Machine) -> None:
    """Its table's header is damaged, the next daemon gives its place to other pages: the lease is said to be broken."""
    machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    put(store, 1, PAGES)
    holder = machine.worker("lease", "n", seed=1, pages=PAGES, ttl_s=60.0)
    stopped = machine.worker("read", "n", first=1, count=1, pages=PAGES, ways=["get", "layers"])
    holder.wait_for("leased")
    stopped.wait_for("read")
    stopped.stop()
    machine.processes[0].kill()
    path, _ = record_at(store, machine, 1, 0)
    for copy in (0, 2048):
        flip(path, copy + 40)
    machine.serve("n")
    assert store.cache(SMALL).get(chain(1, PAGES)).pages == 0
    for seed in range(100, 160):
        put(store, seed, PAGES)
    stopped.resume()
    holder.tell("release")
    holder.wait_for("broken")
    stopped.finish()
    check_laws(store)


def test_flipped_bytes_of_the_index(machine: Machine) -> None:
    """It is a hint: whatever it says, nothing wrong is read, and nothing that the records hold is lost for long.

    A process that dies of a damaged index dies of LMDB, which trusts its file. The daemon may not.
    """
    rng = random.Random(3)
    store = filled(machine, 60)
    used = store.stats()["index"]["used_bytes"]
    store.close()
    prompts = dict.fromkeys(range(60), PAGES)
    died: Counter[str] = Counter()
    daemon = machine.processes[0]
    assert isinstance(daemon, Daemon)
    for number in range(12):
        reader = machine.worker("read", "n", first=0, count=60, pages=PAGES, random=number)
        reader.wait_for("read")
        (path,) = machine.folder("n").glob("index-*/data.mdb")
        for _ in range((1, 4, 64)[number % 3]):
            flip(path, rng.randrange(used), 1 << rng.randrange(8))
        writer = machine.worker("put", "n", first=1000 + number, count=1, pages=PAGES)
        died["writer"] += writer.wait(60) < 0
        reader.signal(signal.SIGTERM)
        code = reader.wait()
        assert code != WRONG_BYTES, reader.events("wrong")
        died["reader"] += code < 0
        if not daemon.alive:
            died["daemon"] += 1
            daemon = machine.serve("n")
        prompts[1000 + number] = PAGES
        with machine.connect("n") as store:
            check_laws(store)
    with machine.connect("n") as store:
        print(died, store.stats()["index"], store.stats()["counters"])
        check_pages(store, prompts)
    assert died.total() == 0, died
