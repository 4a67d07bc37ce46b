"""Damage on NVMe: no wrong byte is served, the rest stays usable, the reason is counted, and a later put works.

Pages rest on NVMe only. Faults are those of the peers' disk tiers, and worse ones: flipped bytes anywhere, a cut tail,
swapped, foreign, torn and stale frames, headers of another version, damaged directories, tables and superblocks; while
the node runs, and while it is down. And the loss that needs no damage: pages that are in neither tier.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from kvstore import Keys, Store
from kvstore.tier.nvme import geometry
from kvstore.tier.nvme.frame_header import VERSION
from tests.helpers.content import SMALL
from tests.helpers.nvme.files import (
    CLASS,
    MIB,
    PROVEN_BYTES,
    Places,
    counted,
    flip,
    found,
    nvme_worker,
    prompt,
    read_at,
    reboot,
    resummed,
    save_all,
    scanned,
    serve,
    serve_at,
    target,
    tier,
    write_at,
)
from tests.helpers.processes import Machine, check_laws, wait_settled, wait_until

PAGES, DAMAGED = 8, 3
HEADER, STRIDE = geometry.header_bytes(CLASS), geometry.stride_bytes(CLASS)
FLIPS = 100  # while it runs, and as many while it is down


def filled(store: Store, seeds: int, first: int = 0) -> None:
    """Prompts of ``PAGES`` pages, all of them on NVMe only."""
    cache = store.cache(SMALL)
    for seed in range(first, first + seeds):
        keys, data = prompt(seed, PAGES)
        assert cache.put(keys, data) == PAGES
    save_all(store)
    assert tier(store)["pages"] >= seeds * PAGES


def mended(store: Store, seeds: Iterable[int]) -> None:
    """These prompts can be put again, are right, and reach NVMe again."""
    for seed in seeds:
        keys, data = prompt(seed, PAGES)
        store.cache(SMALL).put(keys, data)
        assert found(store, seed, PAGES) == PAGES
    save_all(store)
    for seed in seeds:
        assert found(store, seed, PAGES) == PAGES
    assert tier(store, "dram")["pages"] == 0


def misses(store: Store) -> dict[str, int]:
    """Why matches of this client ended early."""
    return dict(store.stats()["client"]["misses"])


# --- 200 flipped bytes ----------------------------------------------------------------------------------------------


def somewhere(rng: random.Random, places: Places, seeds: int, owners: dict[int, tuple[int, int]]) -> int:
    """A byte of the file: of a page, of what the node says about pages, or any."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randrange(places.superblock.size_bytes)
    if kind == 1:
        name = rng.choice([name for name in places.metadata() if name != "back"])  # of the two ends, one stays
        return rng.choice(places.metadata()[name])
    start = rng.choice(sorted(owners))
    return start + (rng.randrange(PROVEN_BYTES) if kind == 2 else HEADER + rng.randrange(CLASS.page_bytes))


def hits(offsets: list[int], owners: dict[int, tuple[int, int]]) -> dict[int, int]:
    """seed -> the first page of it whose proven bytes are among those offsets."""
    first: dict[int, int] = {}
    for start, (seed, page) in owners.items():
        for offset in offsets:
            into = offset - start
            if 0 <= into < PROVEN_BYTES or HEADER <= into < STRIDE:
                first[seed] = min(page, first.get(seed, PAGES))
    return first


def test_flipped_bytes_while_it_runs(machine: Machine) -> None:
    """Peers: a flipped byte came back as a hit, 39 times of 39. Other processes read all the while."""
    rng, seeds = random.Random(11), 60
    serve(machine)
    store = machine.connect("n")
    filled(store, seeds)
    reads = {"first": 0, "count": seeds, "pages": PAGES, "ways": ["get"], "pause_s": 0.005}
    readers = [nvme_worker(machine, "read", random=i, **reads) for i in (0, 1)]
    for reader in readers:
        reader.wait_for("read")
    dropped = 0
    flips = 0
    while flips < FLIPS:
        with Places(machine) as places:
            owners = places.owners(store, range(seeds), PAGES)
            offsets = [somewhere(rng, places, seeds, owners) for _ in range(rng.choice((1, 1, 2, 8)))]
        damage = hits(offsets, owners)
        for offset in offsets:
            flip(target(machine), offset, 1 << rng.randrange(8))
        flips += len(offsets)
        for seed in range(seeds):
            pages = found(store, seed, PAGES)
            assert pages == damage.get(seed, PAGES), f"prompt {seed}, damaged from {damage.get(seed)}: {pages} pages"
        dropped += sum(PAGES - page for page in damage.values())
        seen = {seed: store.cache(SMALL).lookup(prompt(seed, PAGES)[0]).pages for seed in damage}
        assert seen == damage, "it is told, and dropped, before the get that found it returns"
        assert store.stats()["counters"].get("pages_dropped", 0) == dropped, "the descendants go, and nothing else"
        mended(store, damage)
    for reader in readers:
        reader.finish()
    assert dropped and sum(counted(store, "damaged_").values()) > 20, counted(store, "damaged_")
    assert counted(store, "damaged_").keys() <= {"damaged_header", "damaged_payload", "damaged_version"}
    assert misses(store).get("checksum", 0) > 0, misses(store)
    check_laws(store)


# --- each fault by name ---------------------------------------------------------------------------------------------


class Victim:
    """A page that is about to be damaged: page ``DAMAGED`` of a prompt. ``other``: that of a prompt to swap it with."""

    def __init__(self, path: Path, at: int, other: int, twin: bytes) -> None:
        self.path = path
        self.at = at
        self.frame, self.other_frame = read_at(path, at, STRIDE), read_at(path, other, STRIDE)
        self.other = other
        self.twin = twin  # what another node has in the very same frame, for the very same page


def flipped_payload(page: Victim) -> None:
    flip(page.path, page.at + HEADER + 4711, 4)


def flipped_header(page: Victim) -> None:
    flip(page.path, page.at + 70, 4)


def zeroed(page: Victim) -> None:
    """A write that never arrived, on a device that was blank."""
    write_at(page.path, page.at, bytes(STRIDE))


def swapped(page: Victim) -> None:
    """Two sound frames in each other's place."""
    write_at(page.path, page.at, page.other_frame)
    write_at(page.path, page.other, page.frame)


def other_version(page: Victim) -> None:
    """Written by a later program; all sums hold."""
    header = bytearray(page.frame[:HEADER])
    header[8:12] = (VERSION + 1).to_bytes(4, "little")
    write_at(page.path, page.at, resummed(bytes(header)))


def of_another_node(page: Victim) -> None:
    """The very page, in the very frame, but of another device: what it says is not what this node wrote."""
    write_at(page.path, page.at, page.twin)


def torn(page: Victim) -> None:
    """Half of the page that is there, half of the one that was: a write that was cut."""
    half = HEADER + CLASS.frame_bytes // 2
    write_at(page.path, page.at + half, page.other_frame[half:])


def torn_header(page: Victim) -> None:
    """The page under the header of the one that was."""
    write_at(page.path, page.at, page.other_frame[:HEADER])


def of_an_earlier_generation(page: Victim) -> None:
    """A write that the device said it did, and did not: what lies there is sound, and older."""
    header = bytearray(page.frame[:HEADER])
    header[32] ^= 1
    write_at(page.path, page.at, resummed(bytes(header)))


# Each with the reason that is counted for it.
FAULTS: dict[Callable[[Victim], None], str] = {
    flipped_payload: "payload",
    flipped_header: "header",
    zeroed: "empty",
    swapped: "swapped",
    other_version: "version",
    of_another_node: "foreign",
    torn: "payload",
    torn_header: "swapped",
    of_an_earlier_generation: "swapped",
}
OTHERS = 20  # prompts 20.. are those to swap with; the ones after those are nobody's


def victims(machine: Machine, store: Store) -> list[Victim]:
    """One per fault: of prompt i for the fault of that number. The other node stored the same, in the same order."""
    twin = machine.logs / "twin"
    serve_at(machine, "twin", [f"{twin}:{16 * MIB}"])
    filled(machine.connect("twin"), 40)
    with Places(machine, "twin", twin) as places:
        twins = [places.page(machine.connect("twin"), seed, DAMAGED) for seed in range(len(FAULTS))]
    with Places(machine) as places:
        return [
            Victim(
                target(machine),
                places.page(store, seed, DAMAGED),
                places.page(store, OTHERS + seed, DAMAGED),
                read_at(twin, twins[seed], STRIDE),
            )
            for seed in range(len(FAULTS))
        ]


@pytest.mark.parametrize("when", ["running", "restarted", "rebooted", "scanned"])
def test_pages_that_are_not_what_was_written(when: str, machine: Machine) -> None:
    """While it runs; over a restart; over a reboot after a clean end, or after a kill, which makes it scan.

    Peers: one bad page failed its whole batch. Here the pages before it are returned, and all other chains.
    """
    daemon = serve(machine)
    store = machine.connect("n")
    filled(store, 40)
    pages = victims(machine, store)
    if when != "running":
        assert daemon.terminate() == 0 if when == "rebooted" else daemon.kill()
    for fault, page in zip(FAULTS, pages, strict=True):
        fault(page)
    if when != "running":
        if when != "restarted":
            reboot(machine)
        machine.serve("n")
        store = machine.connect("n")
        scanned(store)
    left = dict.fromkeys(range(40), PAGES) | dict.fromkeys(range(len(FAULTS)), DAMAGED)
    left[OTHERS + list(FAULTS).index(swapped)] = DAMAGED
    reasons = Counter(FAULTS.values()) + Counter({"swapped": 1})
    if when == "scanned":  # what is older, but sound, is found under the name it carries: nothing is wrong with it
        left[list(FAULTS).index(of_an_earlier_generation)] = PAGES
        reasons["swapped"] -= 1
    damaged = [seed for seed in left if left[seed] < PAGES]
    assert {seed: found(store, seed, PAGES) for seed in left} == left
    assert all(store.cache(SMALL).lookup(prompt(seed, PAGES)[0]).pages <= left[seed] for seed in damaged)
    if when == "scanned":
        assert counted(store, "scan_").keys() == {f"scan_{reason}" for reason in reasons}
        assert all(counted(store, "scan_")[f"scan_{reason}"] >= count for reason, count in reasons.items())
        assert counted(store, "pages_not_adopted") == {"pages_not_adopted": len(damaged) * (PAGES - DAMAGED - 1)}
    else:
        assert misses(store) == {"checksum": len(damaged)}, misses(store)
        # The daemon was told, and has looked for itself.
        assert counted(store, "damaged_") == {f"damaged_{reason}": count for reason, count in reasons.items()}
        assert counted(store, "pages_dropped") == {"pages_dropped": len(damaged) * (PAGES - DAMAGED)}
    mended(store, damaged)
    check_laws(store)


def test_a_tail_that_is_cut_while_it_runs(machine: Machine) -> None:
    """Peers: a truncated page came back as a hit, or failed its whole batch. A get brings the pages before it, as do a
    prefetch and a lease; other chains are whole; what is cut off is dropped, and can be put again."""
    serve(machine, promote_after=2)
    store = machine.connect("n")
    cache = store.cache(SMALL)
    filled(store, 40)
    keys, data = prompt(1000, 32)
    assert cache.put(keys, data) == 32
    save_all(store)
    with Places(machine) as places:
        owners = places.owners(store, range(40), PAGES) | {
            places.page(store, 1000, page, 32): (1000, page) for page in range(32)
        }
        cut = places.page(store, 1000, 21, 32) + HEADER + 5000
    os.truncate(target(machine), cut)
    left = dict.fromkeys(range(40), PAGES) | {1000: 32}
    for start, (seed, page) in owners.items():
        if start + STRIDE > cut:
            left[seed] = min(left[seed], page)
    assert 0 < left[1000] <= 21 and sum(pages == PAGES for pages in left.values()) > 10, left
    assert {seed: found(store, seed, 32 if seed == 1000 else PAGES) for seed in left} == left
    assert misses(store) == {"io": sum(pages < (32 if seed == 1000 else PAGES) for seed, pages in left.items())}
    damaged = [seed for seed in left if left[seed] < PAGES]
    for seed in left:
        whole, pages = prompt(seed, 32 if seed == 1000 else PAGES)
        wait_until("it is dropped", lambda k=whole, n=left[seed]: found_again(store, k) == n)
        assert cache.prefetch(whole).pages == left[seed]
        with cache.lease(whole) as lease:
            assert len(lease.pages) == left[seed]
            assert all(np.array_equal(view, row) for view, row in zip(lease.pages, pages, strict=False))
    assert counted(store, "damaged_").keys() == {"damaged_io"}, counted(store, "damaged_")
    mended(store, damaged)
    check_laws(store)


def found_again(store: Store, keys: Keys) -> int:
    """Read it once more, and see what the node says then."""
    store.cache(SMALL).get(keys)
    return store.cache(SMALL).lookup(keys).pages


def refused(machine: Machine, *words: str) -> None:
    """The node does not start, and says why in one line."""
    daemon = machine.spawn("n")
    assert daemon.wait() in (1, 2)
    lines = [line for line in daemon.errors.read_text().splitlines() if line.startswith("kvstore:")]
    assert len(lines) == 1 and all(word in lines[0] for word in (str(target(machine)), *words)), lines
    assert daemon.output() == ""


# --- what the node wrote about its pages ----------------------------------------------------------------------------


def in_places(*names: str) -> Callable[[Places, random.Random], None]:
    """Flip a few bytes in each of these places."""

    def damage(places: Places, rng: random.Random) -> None:
        for name, place in places.metadata().items():
            if name.startswith(names):
                for offset in (0, rng.randrange(64), rng.randrange(64, 200), rng.randrange(64, 2000)):
                    flip(places.path, place[offset], 1 << rng.randrange(8))

    return damage


def overwritten(name: str, data: bytes) -> Callable[[Places, random.Random], None]:
    """Other bytes over one of these places."""

    def damage(places: Places, rng: random.Random) -> None:
        write_at(places.path, places.metadata()[name].start, data)

    return damage


HARMLESS = {
    "one directory": in_places("directory 3"),
    "all directories": in_places("directory"),
    "one table": in_places("table 0"),
    "the other table": in_places("table 1"),
    "superblock in front": in_places("front"),
    "superblock at the end": in_places("back"),
    "all that one may lose": in_places("front", "table 1", "directory"),
    "a zeroed directory": overwritten("directory 5", bytes(4096)),
    "a zeroed table": overwritten("table 0", bytes(4096)),
}
REFUSED = {
    "both superblocks": in_places("front", "back"),
    "both tables": in_places("table"),
    "another file system": overwritten("front", bytes(1024) + b"\x53\xef" * 1536),
    "a zeroed beginning": overwritten("front", bytes(4096)),
}


@pytest.mark.parametrize("clean", [True, False], ids=["ended", "killed"])
def test_what_is_written_about_pages_is_damaged(clean: bool, machine: Machine) -> None:
    """One after the other, each with a reboot: no page is lost by it, and none is wrong."""
    rng = random.Random(13)
    daemon = serve(machine)
    store = machine.connect("n")
    filled(store, 40)
    for name, damage in HARMLESS.items():
        (daemon.terminate if clean else daemon.kill)()
        with Places(machine) as places:
            damage(places, rng)
        reboot(machine)
        daemon = machine.serve("n")
        store = machine.connect("n")
        scanned(store)
        assert [found(store, seed, PAGES) for seed in range(40)] == [PAGES] * 40, name
        assert ("is repaired" in daemon.errors.read_text()) == ("superblock" in name or "all that" in name), name
        check_laws(store)
    assert counted(store, "damaged_") == {}


@pytest.mark.parametrize("name", REFUSED)
def test_a_target_that_cannot_be_known_again(name: str, machine: Machine) -> None:
    """It is refused, not made anew: it may be somebody's. With leave to format it works."""
    daemon = serve(machine)
    store = machine.connect("n")
    filled(store, 10)
    with Places(machine) as places:
        assert found(store, 0, PAGES) == PAGES
        REFUSED[name](places, random.Random(14))
        assert [found(store, seed, PAGES) for seed in range(10)] == [PAGES] * 10, "who has it open reads on"
        with machine.connect("n") as late:  # opens it now, and knows it by either end
            pages = [found(late, seed, PAGES) for seed in range(10)]
            assert pages == [PAGES * (name != "both superblocks")] * 10
            assert name != "both superblocks" or misses(late) == {"io": 10}
        assert daemon.terminate() == 0
        if name == "both tables":
            REFUSED[name](places, random.Random(14))  # it has written them again
    reboot(machine)
    before = target(machine).read_bytes()
    refused(machine, "--format")
    assert target(machine).read_bytes() == before
    serve(machine, nvme_format=True)
    store = machine.connect("n")
    assert tier(store)["pages"] == 0 and found(store, 0, PAGES) == 0
    mended(store, range(3))


# --- pages that are in neither tier ---------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [2, 8], ids=["twice DRAM", "eight times"])
def test_every_accepted_page_is_in_dram_or_nvme(times: int, machine: Machine) -> None:
    """Peers: with a segment half the size of the data, 4 to 37 % of accepted pages were in neither tier.

    Two writers look for what they put, at once and later; another process looks at random moments; two read, and two
    have pages brought back to DRAM all the while.
    """
    serve(machine, nvme=64 * MIB, demote_at=0.5, promote_after=2)
    count = times * 4 * MIB // SMALL.page_bytes // PAGES // 2
    writers = [
        nvme_worker(machine, "accepted", first=first, count=count, pages=PAGES, parts=parts)
        for first, parts in ((0, 1), (10_000, 2))
    ]
    for writer in writers:
        writer.wait_for("put", 4)
    audits = [nvme_worker(machine, "audit", logs=[str(writer.log) for writer in writers])]
    others = [nvme_worker(machine, "read", first=0, count=count, pages=PAGES, random=1)]
    others += [nvme_worker(machine, "prefetching", first=first, count=count, pages=PAGES) for first in (0, 10_000)]
    for writer in writers:
        writer.wait_well(60.0)
    for audit in audits:
        before = len(audit.events("audited"))
        audit.wait_for("audited", before + 3)  # of all that there is
    for worker in [*audits, *others]:
        worker.finish()
    missing = [event for worker in [*writers, *audits] for event in worker.events("missing")]
    assert missing == [], f"{len(missing)} times, first {missing[:3]}"
    store = machine.connect("n")
    acked = {seed: pages for writer in writers for seed, pages in writer.acknowledged().items()}
    assert sum(acked.values()) == 2 * count * PAGES, "not everything was accepted"
    assert {seed: found(store, seed, pages) for seed, pages in acked.items()} == acked
    assert counted(store, "demoted")["demoted"] >= (times - 1) * 256 - 64 and counted(store, "pages_promoted")
    assert not counted(store, "evicted_") and not tier(store)["evicted"]
    wait_settled(store)
    check_laws(store)
