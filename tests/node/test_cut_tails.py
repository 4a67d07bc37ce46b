"""Files whose tail was cut off, most while no daemon ran: what is whole is served, the rest is a miss."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kvstore import Store
from kvstore.errors import Unavailable
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import Header
from kvstore.tier.dram import SEGMENT_HEAD_BYTES, SegmentMap
from kvstore.tier.nvme.table import Superblock
from tests.helpers.content import SMALL, chain
from tests.helpers.nvme.files import MIB, reboot, save_all, scanned, serve, serve_at, superblock_of, target
from tests.helpers.nvme.files import found as found_pages
from tests.helpers.processes import Daemon, Machine, check_laws, check_pages, check_right, frames, put, wait_until

PAGES, SEEDS = 8, 24  # of 16 KiB: three quarters of 4 MiB
PROMPTS = dict.fromkeys(range(SEEDS), PAGES)
SMALL_DRAM = {"dram": "4MiB"}


def filled(machine: Machine) -> tuple[Daemon, Store]:
    daemon = machine.serve("n", **SMALL_DRAM)
    store = machine.connect("n")
    for seed in PROMPTS:
        assert put(store, seed, PAGES) == PAGES
    assert store.verify()["findings"] == []
    return daemon, store


def cut(path: Path, left: int) -> None:
    assert left < path.stat().st_size
    os.truncate(path, left)


def map_segment(machine: Machine) -> SegmentMap | None:
    """As a client maps it."""
    folder = NodeFolder.at(machine.folder("n"))
    header = Header.open(folder)
    assert header is not None
    return SegmentMap.open(folder, header.incarnation)


# --- DRAM -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [SEGMENT_HEAD_BYTES + 2 * MIB + 12_345, 4096])
def test_a_segment(left: int, machine: Machine) -> None:
    """Clients that mapped it before go on as well."""
    daemon, store = filled(machine)
    daemon.kill()
    segment = machine.folder("n") / "segment"
    whole = segment.stat().st_size
    cut(segment, left)
    assert map_segment(machine) is None, "what was cut off would be a SIGBUS"
    said = machine.run("verify", "--node", "n")
    assert said.returncode == 1 and "tail was cut off" in said.stdout
    daemon = machine.serve("n", **SMALL_DRAM)
    assert segment.stat().st_size == whole
    late = machine.connect("n")
    expected = max(0, left - SEGMENT_HEAD_BYTES) // SMALL.page_bytes
    for reader in (late, store):
        there = check_right(reader, PROMPTS)
        assert 0.5 * expected <= there <= expected
    check_laws(late)
    for seed in range(100, 100 + SEEDS):
        put(late, seed, PAGES)
        assert check_right(late, {seed: PAGES}) == PAGES
    check_right(store, PROMPTS)
    daemon.kill()
    machine.serve("n", **SMALL_DRAM)
    check_right(store, PROMPTS)
    check_laws(store)


def test_a_segment_that_is_mapped(machine: Machine) -> None:
    """Programs that touch what was cut off end by SIGBUS, the daemon too, with no wrong byte before. The next start
    serves what is whole, also to clients that lived on."""
    daemon, store = filled(machine)
    reader = machine.worker("read", "n", first=0, count=SEEDS, pages=PAGES)
    reader.wait_for("read")
    operator = machine.connect("n", timeout_s=1.0)
    left = SEGMENT_HEAD_BYTES + 2 * MIB
    cut(machine.folder("n") / "segment", left)
    assert reader.wait() == -signal.SIGBUS and not reader.events("wrong"), reader.trace()
    with pytest.raises(Unavailable):
        operator.verify()  # the daemon reads every page
    assert daemon.wait() == -signal.SIGBUS, daemon.trace()
    machine.serve("n", **SMALL_DRAM)
    expected = (left - SEGMENT_HEAD_BYTES) // SMALL.page_bytes
    for late in (machine.connect("n"), store):
        assert 0.5 * expected <= check_right(late, PROMPTS) <= expected
        check_laws(late)


def test_a_segment_whose_writer_lives(machine: Machine) -> None:
    """What a stopped writer was granted behind the cut is nobody else's while it lives."""
    daemon, store = filled(machine)
    writer = store.cache(SMALL).writer(chain(50, PAGES)).__enter__()
    daemon.kill()
    cut(machine.folder("n") / "segment", SEGMENT_HEAD_BYTES + MIB)
    machine.serve("n", **SMALL_DRAM)
    late = machine.connect("n")
    assert int(late.stats()["tiers"]["dram"]["extents_quarantined"]) > 0
    check_laws(late)
    del writer
    store.close()
    wait_until("they are back", lambda: not late.stats()["tiers"]["dram"]["extents_quarantined"])
    check_laws(late)


def test_tables(machine: Machine) -> None:
    """A table that is not whole is believed by nobody."""
    daemon, _ = filled(machine)
    daemon.kill()
    paths = sorted(machine.folder("n").glob("records-*"), key=lambda path: int(path.name.split("-")[1]))
    for number, path in enumerate(paths[len(paths) // 2 :]):
        cut(path, (0, 100, path.stat().st_size - 1)[number % 3])
    machine.serve("n", **SMALL_DRAM)
    late = machine.connect("n")
    assert 0.2 * SEEDS * PAGES < check_right(late, PROMPTS) < 0.8 * SEEDS * PAGES
    check_laws(late)
    assert frames(late)["sealed"] > 0


# --- NVMe -------------------------------------------------------------------------------------------------------------


def rest_of(machine: Machine, part: float) -> tuple[int, int]:
    """Where to cut that part of the file's carved extents off; and how many extents are whole then."""
    block = superblock_of(target(machine))
    kept = SEEDS * PAGES * (SMALL.page_bytes + 4096) * (1 - part)
    return int(block.data_start + kept) // 4096 * 4096 + 4096, int(kept // block.extent_bytes)


def audit(store: Store) -> int:
    """How many pages there are. All of them are right."""
    return sum(found_pages(store, seed, PAGES) for seed in PROMPTS)


@pytest.mark.parametrize("end", ["kill", "kill, reboot", "terminate, reboot", "killed again while it was extended"])
def test_an_nvme_target(end: str, machine: Machine) -> None:
    daemon = serve(machine)
    store = machine.connect("n")
    for seed in PROMPTS:
        assert put(store, seed, PAGES) == PAGES
    save_all(store)
    store.close()
    if "kill" in end:
        daemon.kill()
    else:
        assert daemon.terminate() == 0
    if "reboot" in end:
        reboot(machine)
    path = target(machine)
    whole = path.stat().st_size
    left, extents = rest_of(machine, 0.5)
    cut(path, left)
    if "extended" in end:
        os.truncate(path, whole)
    for turn in range(2):
        daemon = serve(machine, nvme_format="terminate" in end)  # not needed, and changes nothing
        assert path.stat().st_size == whole
        assert ("its tail was cut off" in daemon.errors.read_text()) == (turn == 0)
        late = machine.connect("n")
        scanned(late)
        there = audit(late)
        # an extent's last frames are whole as well; of a chain that lies at the cut the front
        assert extents * 40 <= there < 0.6 * SEEDS * PAGES
        check_laws(late)
        for seed in range(100, 104):
            put(late, seed, PAGES)
        check_pages(late, dict.fromkeys(range(100, 104), PAGES))
        late.close()
        daemon.kill()
    assert superblock_of(path) is not None
    assert machine.run("verify", "--node", "n").returncode == 0


def test_a_target_that_is_not_ours_stays_as_it_is(machine: Machine) -> None:
    """Cut off so far that nothing is whole; another node's; another size asked."""
    daemon = serve(machine)
    assert daemon.terminate() == 0
    reboot(machine)
    path = target(machine)
    block = superblock_of(path)
    cases = ("n", 8 * MIB, 4 * MIB), ("other", 16 * MIB, 3 * MIB), ("n", 16 * MIB, block.data_start - 4096)
    for name, size, left in cases:
        cut(path, left)
        refused = serve_at(machine, name, [f"{path}:{size}"], failing=True)
        assert refused.wait() == 2 and "--format" in refused.errors.read_text()
        assert path.stat().st_size == left


def test_a_target_that_cannot_be_made_long_again_is_left_out(machine: Machine) -> None:
    """It was four times as large as the file system that it is on now."""
    path = target(machine)
    system = os.statvfs(machine.logs)
    size = 4 * system.f_blocks * system.f_frsize // MIB * MIB
    extent_bytes = size // 64 // MIB * MIB
    block = Superblock.plan(1, "n", size, extent_bytes)
    path.write_bytes(block.packed())
    os.truncate(path, block.data_start + MIB)
    serve(machine, nvme=size, nvme_extent=extent_bytes)
    store = machine.connect("n")
    assert put(store, 1, PAGES) == PAGES
    check_pages(store, {1: PAGES})
    said = machine.run("tiers", "--node", "n").stdout
    assert str(path) in said and f"needs {size} bytes" in said and "free" in said
    assert path.stat().st_size == block.data_start + MIB
