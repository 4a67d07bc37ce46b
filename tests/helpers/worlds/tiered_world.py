"""TieredWorld: a node with NVMe. The mover, the scanner, checkpoints, failing devices and reboots, step by step.

The copies are the product's, and so are the devices, over a disk that loses power (``copying``). A page holds the key
that it was written for, so one that ends up with another page's content is seen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvstore.model.replica import LEAN_IDENTITY_BYTES, Address, FrameState, Status, Tier, position_of, standing_of
from kvstore.node.nvme_pages import lean_identities
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.interfaces import Rows
from kvstore.tier.nvme.frame_header import FrameHeader
from tests.helpers.worlds.copying import Flight
from tests.helpers.worlds.real_node import Nvme
from tests.helpers.worlds.world import MAY_LOSE, Chain, World

RESERVED, QUARANTINED = FrameState.RESERVED, FrameState.QUARANTINED
ROUNDS_MAX = 300  # of the mover until nothing is left to do


@dataclass
class Scan:
    """What the scan of a start has yet to do."""

    extents: list[int]
    found: list[FrameHeader] = field(default_factory=list)
    offered: int = 0
    ended: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Directory:
    """An extent's records, taken for its checkpoint."""

    life: int
    extent: int
    position: int
    rows: Rows
    version: int


class TieredWorld(World):
    """See the module. ``lossless``: NVMe is large enough, so no page may be lost but by damage."""

    may_lose = (*MAY_LOSE, ev.Prefetch)
    # Whatever ends a copy, or an erasure, lets the emptying of an extent go on; pages behind NVMe's need room there.
    nvme_may_lose: tuple[type, ...] = (
        *(ev.Demote, ev.SaveAll, ev.Damaged, ev.Saved, ev.Loaded, ev.Carried, ev.Erased),
        *(ev.SealGranted, ev.Seal),
    )

    def __init__(
        self, extent_bytes: int, positions: int, nvme: Nvme, *, now_ns: int = 10**12, lossless: bool = False
    ) -> None:
        super().__init__(extent_bytes, positions, now_ns=now_ns, nvme=nvme)
        self.nvme = nvme
        self.disk = nvme.disk
        self.lossless = lossless
        self.flights: list[Flight] = []
        self.scan: Scan | None = None
        self.hidden: set[bytes] = set()  # on the disk, and not found again yet
        self.rotten: set[bytes] = set()  # their copies on the disk were altered, or cannot be trusted
        self.chance = random.Random(7)
        self.copies_fail = 0.0  # share of pages that cannot be copied
        self.late: tuple[set[int], set[int]] = set(), set()  # positions that do not answer now: written to, and read
        self.written_today = 0
        self.nvme_evicted = 0
        self.reboots = 0
        self.moved = 0  # pages, from one extent of NVMe to another
        self.scanned = 0  # extents

    # --- the model --------------------------------------------------------------------------------------------------

    def _account(self, event: ev.Event, instructions: list[do.Instruction]) -> None:
        below = self.gone(instructions, Tier.NVME)
        assert not below or isinstance(event, self.nvme_may_lose), f"{type(event).__name__} takes pages of NVMe away"
        if type(event) is not ev.Damaged:
            self.nvme_evicted += len(below)
        before = set(self.stored)
        super()._account(event, instructions)
        lost = before - self.stored
        assert not lost or not self.lossless or type(event) is ev.Damaged, f"{type(event).__name__} loses pages"

    def lost(self, gone: set[bytes], instructions: list[do.Instruction]) -> set[bytes]:
        """See ``World.lost``."""
        below = self.gone(instructions, Tier.NVME)
        here, there = self.node.index, self.node.nvme_index
        return {
            key
            for key in gone | below
            if (key in gone or key not in here) and (key in below or key not in there) and key not in self.hidden
        }

    def readable(self) -> set[bytes]:
        """See ``World.readable``; what the scan will find counts."""
        return self.node.index.keys() | self.node.nvme_index.keys() | self.hidden

    def restart(self) -> None:
        """See ``World.restart``: the mover and the scanner die with the daemon."""
        for flight in self.flights:
            flight.stop()
        self.flights.clear()
        self.late = set(), set()
        super().restart()
        self.state.tiering.pairs[Tier.NVME].demotion.begin_day(self.day_bytes_left)
        self._begin_scan()

    def check(self) -> None:
        """See ``World.check``; and every page holds what it was stored with."""
        super().check()
        for key, address in self.node.index.items():
            assert self.node.content(address) == key, f"{address} holds {self.node.content(address)!r}"
        for key, address in self.node.nvme_index.items():
            content = self.node.proven(address, key)
            assert content is not None or key in self.rotten, f"{address} is not on the disk"
            assert content in (None, key), f"{address} holds another page"
        assert self.node.nvme_index.keys() <= self.tried
        copies = self.state.tiering.copies
        flying = len(self.flights) + len(self.node.copies)
        deciding = len(copies.saving) + len(copies.loading) + len(copies.carrying) + len(copies.erasing)
        deciding -= len(self.state.tiering.pairs[Tier.NVME].promotion.early)
        assert deciding + len(copies.staging) == flying, "a copy is under way that nobody makes"
        assert sum(not batch.late for batch in copies.saving.values()) <= 1 and len(copies.carrying) <= 1
        going_down = (*copies.saving.values(), *copies.staging.values())
        assert copies.down[Tier.NVME] == {page.key for batch in going_down for page in batch.pages}
        assert copies.up[Tier.DRAM] == {page.key for batch in copies.loading.values() for page in batch.pages}

    # --- the mover --------------------------------------------------------------------------------------------------

    @property
    def day_bytes_left(self) -> int:
        """What may be written today yet."""
        return max(0, self.nvme.rules.write_bytes_per_day - self.written_today)

    def demote(self, bytes_max: int = 1 << 20) -> None:
        """The mover asks what to save next."""
        if self.chance.random() < 0.5:
            self.node.pages.extents.drop_stale(self.node.pages.extents.stale)
        self.send(ev.Demote(self.now_ns, Tier.NVME, bytes_max, self.day_bytes_left))

    def move_on(self) -> bool:
        """One of the copies under way gets one step further. False: there is none."""
        while self.node.copies:
            self.flights.append(Flight(self.node.copies.popleft()))
        flights = [flight for flight in self.flights if not self._is_late(flight.copy)]
        if not flights:
            return False
        flight = self.chance.choice(flights)
        if flight.over:
            self.flights.remove(flight)
            self._report(flight)
            return True
        flight.look = partial(self._look, flight.copy)
        self.node.pages.devices.flight = flight
        flight.step(partial(self._carry_out, flight.copy))
        self.node.pages.devices.flight = None
        if flight.over and isinstance(flight.copy, do.Save):
            self.written_today += flight.done.written_bytes
            cap = self.nvme.rules.write_bytes_per_day
            assert not cap or self.written_today <= cap, f"{self.written_today} bytes in a day of {cap}"
        return True

    def _carry_out(self, copy: do.Save | do.Load | do.Carry | do.Erase) -> Any:
        """Carry a copy out as the mover does, with pauses. Returns what became of it."""
        pages, tables, frames_of = self.node.pages, self.node.tables, self.node.performer.frames_of
        if isinstance(copy, do.Save):
            return pages.save(copy.pages, tables, frames_of)
        if isinstance(copy, do.Load):
            return pages.load(copy.pages, tables, frames_of)
        if isinstance(copy, do.Carry):
            return pages.carry(copy.pages, tables)
        return pages.extents.erase((tables[address.extent], address.frame) for _, address in copy.pages)

    def _look(self, copy: do.Save | do.Load | do.Carry | do.Erase) -> None:
        """Check that the frames which a copy fills are still reserved for it."""
        if not isinstance(copy, do.Erase):
            for page in copy.pages:
                assert self.node.is_sealed(page.target, RESERVED), "a page is copied into another's frame"

    def _report(self, flight: Flight) -> None:
        """Tell the state what became of a copy."""
        copy, done, now_ns = flight.copy, flight.done, self.now_ns
        if isinstance(copy, do.Erase):
            positions = [self.node.tables[address.extent].position for _, address in copy.pages]
            failed = {i for i, position in enumerate(positions) if position in done}
            self.send(ev.Erased(now_ns, copy.number, failed))
            return
        for place in range(len(copy.pages)):
            if place not in done.failed and self._fails():
                done.failed[place] = "io"
        where = {self.node.tables[page.target.extent].position for page in copy.pages}
        event: ev.Event = ev.Carried(now_ns, copy.number, done.failed)
        if isinstance(copy, do.Save):
            event = ev.Saved(now_ns, copy.number, done.rows[:, :LEAN_IDENTITY_BYTES].copy(), done.failed)
        elif isinstance(copy, do.Load):
            event = ev.Loaded(now_ns, copy.number, done.rows, done.checksums, done.failed)
        pages, keys = self.node.pages, {page.source: page.key for page in copy.pages}
        if self.send(event) is not None:
            pages.close_for_writing(done.open_positions)
            self.moved += len(copy.pages) - len(done.failed) if isinstance(copy, do.Carry) else 0
            for source, reason in done.damaged:
                self.send(ev.Damaged(self.now_ns, source, reason, keys[source]))
        if not isinstance(copy, do.Load) and self.disk.failed & where:
            self.send(ev.TierFailed(self.now_ns, Tier.NVME, sorted(self.disk.failed)))

    def _is_late(self, copy: do.Save | do.Load | do.Carry | do.Erase) -> bool:
        """A device of this copy does not answer."""
        saves, loads = self.late
        if isinstance(copy, do.Erase):
            written, read = {address.extent for _, address in copy.pages}, set()
        else:
            written = set() if isinstance(copy, do.Load) else {page.target.extent for page in copy.pages}
            read = set() if isinstance(copy, do.Save) else {page.source.extent for page in copy.pages}
        tables = self.node.tables
        return any(tables[number].position in saves for number in written if number in tables) or any(
            tables[number].position in loads for number in read if number in tables
        )

    def answer_late(self, saves: set[int], loads: set[int]) -> None:
        """These positions, and no others, do not answer from now on."""
        self.late = saves, loads
        self.send(ev.DevicesLate(self.now_ns, Tier.NVME, sorted(saves), sorted(loads)))

    def settle(self) -> None:
        """The mover works until there is nothing to do, and all devices answer."""
        if any(self.late):
            self.answer_late(set(), set())
        for _ in range(ROUNDS_MAX):
            while self.move_on():
                pass
            self.demote()
            if not self.node.copies:
                return
        raise AssertionError("the mover is never done")

    def last_save(self, bytes_max: int = 1 << 20) -> None:
        """The node saves what only DRAM holds, as before its memory goes. It comes to an end whatever fails."""
        for _ in range(ROUNDS_MAX):
            while self.move_on():
                pass
            reply = self.send(ev.SaveAll(self.now_ns, bytes_max, self.day_bytes_left))
            while self.move_on():
                pass
            if reply is None or not reply.detail["chains"]:
                return
        raise AssertionError("saving never ends")

    def _fails(self) -> bool:
        return self.chance.random() < self.copies_fail

    # --- what clients ask -------------------------------------------------------------------------------------------

    def nvme_pages(self, chain: Chain) -> int:
        """How many leading pages NVMe has."""
        return next((i for i, key in enumerate(chain.keys) if key not in self.node.nvme_index), len(chain.path))

    def put_behind(self, session: int, chain: Chain, start: int) -> list[int]:
        """A client puts pages ``start ..`` behind what NVMe has, and asks again while they are on their way."""
        client = self.clients[session]
        frames = client.granted.get(chain.frame_class, [])
        addresses = sorted(frames[: len(chain.path) - start])
        if not addresses:
            return []
        del frames[: len(addresses)]
        keys, rows = chain.keys[start : start + len(addresses)], chain.rows[start : start + len(addresses)]
        self.tried.update(keys)
        self._unclaim(session, addresses)
        for address, key in zip(addresses, keys, strict=True):
            self.node.write(address, key)
        for _ in range(ROUNDS_MAX):
            frame_class, parent = chain.frame_class, chain.parents[start]
            reply = self.send(ev.SealGranted(self.now_ns, session, frame_class, parent, addresses, rows))
            if reply is None or session not in self.clients:
                client.forfeited += addresses
                return []
            if Status.BUSY not in reply.statuses:
                break
            self.settle()
        else:
            raise AssertionError("pages never get through")
        for key, address, status in zip(keys, addresses, reply.statuses, strict=True):
            if status in (Status.OK, Status.PRESENT):
                assert key in self.node.index or key in self.node.nvme_index, "a page is not where it is said to be"
                self.stored.add(key)
            table = self.node.tables.get(address.extent)
            ours = status != Status.STALE  # else what was on its way was given up, as the daily cap has it
            if ours and table is not None and table.words[address.frame] == address.generation << 8 | RESERVED:
                self._claim(session, [address])
                client.granted[chain.frame_class].append(address)
        return reply.statuses

    def prefetch(self, session: int, chain: Chain, *, hint: bool = False) -> list[int]:
        """A client wants a chain's pages in DRAM, or has just read them from NVMe."""
        keys = chain.keys[: self.nvme_pages(chain)]
        addresses = [self.node.nvme_index[key] for key in keys]
        there = set(self.node.index)
        reply = self.send(ev.Prefetch(self.now_ns, session, addresses, hint))
        if reply is None:
            return []
        assert len(reply.statuses) == len(keys)
        for key, status in zip(keys, reply.statuses, strict=True):
            assert status in (Status.OK, Status.BUSY, Status.PARTIAL, Status.NO_PARENT, Status.NO_SPACE)
            if status == Status.OK:
                assert key in there
            assert hint or status != Status.PARTIAL
        return reply.statuses

    def use(self, key: bytes) -> None:
        """See ``World.use``; a page that is only on NVMe is read there."""
        if key in self.node.index or key not in self.node.nvme_index:
            super().use(key)
        else:
            address = self.node.nvme_index[key]
            self.node.tables[address.extent].last_use[address.frame] = self.now_ns

    # --- troubles ---------------------------------------------------------------------------------------------------

    def damage_below(self, key: bytes) -> None:
        """A page on NVMe is found damaged; it and its descendants go from there."""
        if self.send(ev.Damaged(self.now_ns, self.node.nvme_index[key], "data", key)) is not None:
            assert key not in self.node.nvme_index

    def rot(self, key: bytes) -> None:
        """A page on NVMe is altered, and nobody knows."""
        address = self.node.nvme_index[key]
        self.node.rot(address)
        self.rotten.add(key)

    def fail(self, positions: set[int]) -> None:
        """A device takes no more writes."""
        self.disk.failed |= positions
        self.send(ev.TierFailed(self.now_ns, Tier.NVME, sorted(positions)))

    # --- checkpoints, reboots, the scan -----------------------------------------------------------------------------

    def snapshot(self, position: int) -> Directory | None:
        """First half of a checkpoint: the directory as it is now, and the version it stands for."""
        pages = self.node.pages
        extent = pages.devices.extents.get(position)
        if extent is None or pages.extents.is_clean(position) or extent.number not in self.node.tables:
            return None
        table, version = self.node.tables[extent.number], pages.devices.version(position)
        if self.node.is_waiting(table):
            return None
        return Directory(self.crashes, extent.number, position, table.rows.copy(), version)

    def checkpoint(self, taken: Directory) -> bool:
        """Second half; False where it does not count."""
        pages, position = self.node.pages, taken.position
        extent = pages.devices.extents.get(position)
        if taken.life != self.crashes or extent is None or extent.number != taken.extent:
            return False
        failed = pages.extents.checkpoint(position, taken.rows, taken.version)
        return failed is None and pages.devices.extents[position].clean

    def reboot(self) -> None:
        """The machine loses its memory, and the node starts again from the disk."""
        self.reboots += 1
        self.unread = set()
        durable = (self.node.nvme_index.keys() | self.hidden) - self.rotten
        self.clients.clear()
        self.pins.clear()
        self.claims.clear()
        self.groups.clear()
        self.stored &= durable
        self.node.lose_memory()
        self.hidden = set(durable)  # until the state has seen what is there
        self.restart()
        self.hidden -= self.node.nvme_index.keys()
        if not self.lossless:  # what they hang on may be evicted before they are found
            self.stored -= self.hidden
            self.hidden = set()

    def forget_tables(self) -> None:
        """The daemon is killed, and afterwards NVMe's tables in memory cannot be believed: the disk tells again."""
        below = set(self.node.nvme_index)
        for key in below & self.rotten:
            self._unpromise(key)
        self.stored -= (below & self.rotten if self.lossless else below) - self.node.index.keys()
        self.unread = (self.unread | below) - self.rotten
        if self.lossless:  # else what they hang on may be evicted before they are found
            self.hidden |= self.unread
        self.node.forget_tables()
        self.restart()
        self.hidden -= self.node.nvme_index.keys()

    def _begin_scan(self) -> None:
        tables = self.node.tables.items()
        waiting = [number for number, table in tables if table.tier == Tier.NVME and self.node.is_waiting(table)]
        self.scan = Scan(waiting, ended=list(waiting)) if waiting else None
        self.scanned += len(waiting)

    def scan_on(self, count: int = 5) -> bool:
        """The scan gets on a bit: an extent read, some pages offered, an extent ended. False: it is done."""
        scan = self.scan
        if scan is None:
            return False
        if scan.extents:
            table = self.node.tables[scan.extents.pop()]
            for frame in np.flatnonzero((table.words & np.uint64(0xFF)) == QUARANTINED).tolist():
                (header,) = self.node.pages.read(table, frame, 1)
                if isinstance(header, FrameHeader):
                    content = self.node.proven(Address(*header.address), header.key)
                    assert content == header.key, "a page on the disk is not what it says"
                    scan.found.append(header)
            scan.found.sort(key=lambda page: (position_of(page.info), -page.address.generation))
        elif scan.offered < len(scan.found):
            part = scan.found[scan.offered : scan.offered + count]
            scan.offered += count
            heads = lean_identities(part)
            addresses = [Address(*page.address) for page in part]
            parents, standings = [page.parent for page in part], [standing_of(page.info) for page in part]
            self.send(ev.Adopt(self.now_ns, addresses, heads, parents, standings))
        elif scan.ended:
            self.send(ev.Adopted(self.now_ns, scan.ended.pop()))
        else:
            self.scan = None
            assert not self.lossless or self.hidden <= self.readable_now(), "a page on the disk was not found again"
            self.hidden = self.unread = set()
        return True

    def readable_now(self) -> set[bytes]:
        """What a client can read at this moment."""
        return self.node.index.keys() | self.node.nvme_index.keys()
