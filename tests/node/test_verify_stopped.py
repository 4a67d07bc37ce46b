"""``kvstore verify`` of a node whose daemon is not running: sound after a stop and after kill -9, damage is found, and
nothing is changed by looking."""

from __future__ import annotations

import hashlib
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore import Store
from kvstore.config import NvmeTarget
from kvstore.errors import NodeBusy, NodeUnavailable
from kvstore.model.replica import Address, FrameClass, Tier
from kvstore.node.verify_stopped import verify_devices, verify_folder
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import Header
from kvstore.shm.records import _COPIES_AT, RECORDS_HEAD_BYTES, ExtentTable
from kvstore.tier.dram import SEGMENT_HEAD_BYTES
from tests.helpers.content import SMALL, chain
from tests.helpers.inside import node_of
from tests.helpers.nvme.files import MIB, Places, flip, reboot, serve, target, tier
from tests.helpers.processes import Daemon, Machine, check_laws, check_pages, put, wait_until

CLASS = FrameClass(SMALL.page_bytes, SMALL.page_tokens, SMALL.layers)
SEEDS, PAGES, DAMAGED = 12, 8, 3
Place = tuple[Path, list[int]]
Damage = Callable[[Machine, Store], Place]


def stored(machine: Machine, seeds: int = SEEDS) -> tuple[Daemon, Store]:
    """A node with these prompts in DRAM, with checksums, and on NVMe."""
    daemon = serve(machine)
    store = machine.connect("n")
    for seed in range(seeds):
        assert put(store, seed, PAGES) == PAGES
    wait_until("NVMe has all of it", lambda: tier(store)["pages"] == seeds * PAGES)
    assert store.verify()["findings"] == []  # computes the checksums that are missing
    return daemon, store


def look(machine: Machine) -> dict[str, Any]:
    return verify_folder(machine.folder("n"))


def contents_of(machine: Machine) -> dict[str, tuple[int, str]]:
    """Every file of the node and its target: when it was changed, and a digest; not LMDB's table of readers."""
    files = [path for path in (*machine.folder("n").rglob("*"), target(machine)) if path.is_file()]
    return {
        str(path): (path.stat().st_mtime_ns, hashlib.md5(path.read_bytes()).hexdigest())
        for path in files
        if path.name != "lock.mdb"
    }


def address_of(store: Store, seed: int, page: int) -> Address:
    mapped = node_of(store).mapped()
    assert mapped is not None
    address = mapped.index.find(Tier.DRAM, store.in_pool(chain(seed, PAGES)).hashes[page])
    assert address is not None
    return address


def test_a_node_killed_while_it_is_written_to_is_sound(machine: Machine) -> None:
    chance = random.Random(5)
    serve(machine, dram="2MiB")
    for turn in range(2):
        daemon = machine.processes[-1] if turn == 0 else serve(machine, dram="2MiB")
        workers = [machine.worker("put", "n", first=1000 * turn + 100 * n, count=100, pages=8) for n in range(2)]
        workers[0].wait_for("put", 3)
        assert machine.connect("n").stats()["tiers"]["dram"]["pages"] > 0, "what is merely published no tier has"
        time.sleep(chance.random() / 4)
        daemon.kill()
        found = look(machine)
        assert (found["state"], found["findings"]) == ("killed", [])
        assert sum(found["pages_by_tier"].values()) > 0
        for worker in workers:
            worker.kill()
    serve(machine, dram="2MiB")
    check_laws(machine.connect("n"))


def test_a_node_that_runs_is_refused_one_that_stopped_is_sound_and_stays_as_it_is(machine: Machine) -> None:
    daemon, store = stored(machine)
    with pytest.raises(NodeBusy, match=f"process {daemon.pid}"):
        look(machine)
    refused = machine.run("verify", "--folder", str(machine.folder("n")))
    assert refused.returncode == 1 and "is held by" in refused.stderr and "Traceback" not in refused.stderr
    with pytest.raises(NodeBusy):
        verify_devices([NvmeTarget(target(machine), 16 * MIB)])
    assert daemon.terminate() == 0
    store.close()
    before = contents_of(machine)
    done = machine.run("verify", "--node", "n", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert (found["state"], found["findings"], found["pages_damaged"]) == ("stopped", [], 0)
    assert found["pages_by_tier"] == {"dram": SEEDS * PAGES, "nvme": SEEDS * PAGES}
    assert found["pages_without_checksums"] == 0
    folder = NodeFolder.at(machine.folder("n"))
    with folder.block_starts(), folder.block_starts():
        late = machine.spawn("n")
        assert late.wait() == 1
        assert "is held by" in late.errors.read_text()
    assert contents_of(machine) == before
    with pytest.raises(NodeUnavailable):
        verify_folder(machine.shm_dir / "kvstore-nobody")


def flip_all(path: Path, offsets: list[int]) -> None:
    assert offsets
    for offset in offsets:
        flip(path, offset)


def in_page(machine: Machine, store: Store) -> Place:
    folder, address = NodeFolder.at(machine.folder("n")), address_of(store, 2, DAMAGED)
    header = Header.open(folder)
    assert header is not None
    table = ExtentTable.open(folder, address.extent, header.incarnation)
    assert table is not None
    at = SEGMENT_HEAD_BYTES + table.position * header.extent_bytes + address.frame * CLASS.frame_bytes
    return folder.segment, [at + 5000]


def in_record(machine: Machine, store: Store) -> Place:
    address = address_of(store, 2, DAMAGED)
    at = RECORDS_HEAD_BYTES + address.frame * CLASS.record.row_bytes + 8 + 48 + 21  # a token
    return machine.folder("n") / f"records-{address.extent}", [at]


def in_table_head(machine: Machine, store: Store) -> Place:
    both = [at + 40 for at in _COPIES_AT]  # of one alone the other is believed
    return machine.folder("n") / f"records-{address_of(store, 2, DAMAGED).extent}", both


def in_nvme_page(machine: Machine, store: Store) -> Place:
    with Places(machine) as places:
        return target(machine), [places.page(store, 2, DAMAGED, PAGES) + 4096 + 77]


def in_nvme_header(machine: Machine, store: Store) -> Place:
    with Places(machine) as places:
        return target(machine), [places.page(store, 2, DAMAGED, PAGES) + 100]


def in_index(machine: Machine, store: Store) -> Place:
    """In the page's address, in every version of it that LMDB keeps."""
    header = Header.open(NodeFolder.at(machine.folder("n")))
    assert header is not None
    path = machine.folder("n") / f"index-{header.epoch}" / "data.mdb"
    return path, [
        found.end() + 4
        for found in re.finditer(re.escape(store.in_pool(chain(2, PAGES)).hashes[DAMAGED]), path.read_bytes())
    ]


KINDS: list[tuple[Damage, str]] = [
    (in_page, "damaged (data)"),
    (in_record, "damaged (record)"),
    (in_nvme_page, "damaged (payload)"),
    (in_nvme_header, "damaged (header)"),
    (in_table_head, "is damaged: the extent is lost"),
    (in_index, "index"),
]


def test_damage_is_found(machine: Machine) -> None:
    daemon, store = stored(machine)
    places = [where(machine, store) for where, _ in KINDS]
    key = store.in_pool(chain(2, PAGES)).hashes[DAMAGED].hex()
    assert daemon.terminate() == 0
    store.close()
    for (_, said), (path, offsets) in zip(KINDS, places, strict=True):
        flip_all(path, offsets)
        before = contents_of(machine)
        found = look(machine)
        assert any(said in finding for finding in found["findings"]), found
        if said.startswith("damaged ("):
            assert found["pages_damaged"] == 1 and key in found["findings"][0]
        assert contents_of(machine) == before
        flip_all(path, offsets)
        assert look(machine)["findings"] == []
    flip(target(machine), 60)  # one end's superblock: the next start repairs it
    found = look(machine)
    assert found["findings"] == [] and any("superblock in front" in line for line in found["repairs"])
    back = target(machine).stat().st_size - 4096 + 60
    flip(target(machine), back)
    assert any("no sound superblock" in line for line in look(machine)["findings"])
    flip(target(machine), back)
    flip_all(*places[0])
    done = machine.run("verify", "--node", "n")
    assert done.returncode == 1 and key in done.stdout
    serve(machine)  # it goes on, and serves nothing that is wrong
    late = machine.connect("n")
    late.verify()
    check_pages(late, {seed: PAGES for seed in range(SEEDS) if seed != 2})


@pytest.mark.parametrize("killed", [False, True])
def test_targets_without_shared_memory(machine: Machine, killed: bool) -> None:
    """After a reboot: clean extents by their directories, the others frame by frame."""
    daemon, store = stored(machine)
    daemon.kill() if killed else daemon.terminate()
    store.close()
    reboot(machine)
    found = verify_devices([NvmeTarget(target(machine), 16 * MIB)])
    assert (found["findings"], found["pages_by_tier"]) == ([], {"nvme": SEEDS * PAGES})
    assert any("is scanned" in line for line in found["repairs"]) == killed
    if killed:
        done = machine.run("verify", "--nvme", f"{target(machine)}:16MiB")
        assert done.returncode == 0 and f"{SEEDS * PAGES} pages verified" in done.stdout
        wrong = machine.run("verify", "--nvme", f"{target(machine)}")
        assert wrong.returncode == 2 and wrong.stderr.startswith("kvstore: --nvme")
