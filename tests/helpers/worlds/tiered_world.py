"""TieredWorld: a node with NVMe. The mover, the scanner, checkpoints, failing devices and reboots, step by step.

What is copied is not bytes but what they say: the content of a frame is the key it was written for, and a copy carries
whatever it finds at the moment it looks. So a page that ends up with another page's content is seen.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field, replace

import numpy as np

from kvstore.model.replica import Address, Status, Tier, position_of
from kvstore.state import events as ev
from kvstore.tier.nvme import geometry
from tests.helpers.worlds.memory_shell import QUARANTINED, RESERVED, Nvme
from tests.helpers.worlds.simulated_disk import Written
from tests.helpers.worlds.tables import Table
from tests.helpers.worlds.world import MAY_LOSE, Chain, World

ROUNDS_MAX = 300  # of the mover until nothing is left to do


@dataclass
class Flight:
    """A copy that the mover is carrying out."""

    copy: ev.Save | ev.Load | ev.Carry | ev.Erase
    stage: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    seen: list[object] = field(default_factory=list)  # contents when the checksums were made; frames read
    heads: list[bytes] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)  # open for writing, -> extent
    damaged: list[tuple[bytes, Address]] = field(default_factory=list)


@dataclass
class Scan:
    """What the scan of a start has yet to do."""

    extents: list[int]
    found: list[Written] = field(default_factory=list)
    offered: int = 0
    ended: list[int] = field(default_factory=list)


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

    # --- the model --------------------------------------------------------------------------------------------------

    def _account(self, event: ev.Event, instructions: list[ev.Instruction]) -> None:
        below = self.gone(instructions, Tier.NVME)
        assert not below or isinstance(event, self.nvme_may_lose), f"{type(event).__name__} takes pages of NVMe away"
        if type(event) is not ev.Damaged:
            self.nvme_evicted += len(below)
        before = set(self.stored)
        super()._account(event, instructions)
        lost = before - self.stored
        assert not lost or not self.lossless or type(event) is ev.Damaged, f"{type(event).__name__} loses pages"

    def lost(self, gone: set[bytes], instructions: list[ev.Instruction]) -> set[bytes]:
        """See ``World.lost``."""
        below = self.gone(instructions, Tier.NVME)
        here, there = self.shell.index, self.shell.nvme_index
        return {
            key
            for key in gone | below
            if (key in gone or key not in here) and (key in below or key not in there) and key not in self.hidden
        }

    def readable(self) -> set[bytes]:
        """See ``World.readable``; what the scan will find counts."""
        return self.shell.index.keys() | self.shell.nvme_index.keys() | self.hidden

    def restart(self) -> None:
        """See ``World.restart``: the mover and the scanner die with the daemon."""
        self.flights.clear()
        self.late = set(), set()
        self.disk.stale.clear()  # what was not forgotten is found again
        self.disk.starts += 1
        for extent in self.disk.extents.values():
            extent.open = 0
            extent.version += 1  # nothing that the dead daemon was about to write counts
        super().restart()
        self.state.tiering.pairs[Tier.NVME].demotion.begin_day(self.day_bytes_left)
        self._begin_scan()

    def check(self) -> None:
        """See ``World.check``; and every page holds what it was stored with."""
        super().check()
        for key, address in self.shell.index.items():
            assert self.shell.content[address[:2]] == key, f"{address} holds {self.shell.content[address[:2]]!r}"
        for key, address in self.shell.nvme_index.items():
            position = self.shell.tables[address.extent].position
            written = self.disk.read(position, address.frame)
            proven = written is not None and written.address == address and written.key == key  # as a reader does
            assert proven or key in self.rotten, f"{address} is not on the disk"
            assert not proven or (written is not None and written.payload == key), f"{address} holds another page"
        assert self.shell.nvme_index.keys() <= self.tried
        copies = self.state.tiering.copies
        flying = len(self.flights) + len(self.shell.copies)
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
            self.disk.tidy()
        self.send(ev.Demote(self.now_ns, Tier.NVME, bytes_max, self.day_bytes_left))

    def move_on(self) -> bool:
        """One of the copies under way gets one step further. False: there is none."""
        while self.shell.copies:
            self.flights.append(Flight(self.shell.copies.popleft()))
        flights = [flight for flight in self.flights if not self._is_late(flight.copy)]
        if not flights:
            return False
        flight = self.chance.choice(flights)
        if isinstance(flight.copy, ev.Save):
            self._save(flight, flight.copy)
        elif isinstance(flight.copy, ev.Load):
            self._load(flight, flight.copy)
        elif isinstance(flight.copy, ev.Carry):
            self._carry(flight, flight.copy)
        else:
            self._erase(flight, flight.copy)
        flight.stage += 1
        return True

    def _is_late(self, copy: ev.Save | ev.Load | ev.Carry | ev.Erase) -> bool:
        """A device of this copy does not answer."""
        saves, loads = self.late
        if isinstance(copy, ev.Erase):
            written, read = {address.extent for _, address in copy.pages}, set()
        else:
            written = set() if isinstance(copy, ev.Load) else {page.target.extent for page in copy.pages}
            read = set() if isinstance(copy, ev.Save) else {page.source.extent for page in copy.pages}
        tables = self.shell.tables
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
            if not self.shell.copies:
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

    def _save(self, flight: Flight, save: ev.Save) -> None:
        tables = self.shell.tables
        if flight.stage == 0:
            flight.positions = {tables[page.target.extent].position: page.target.extent for page in save.pages}
            self.disk.open(set(flight.positions))
            for page in save.pages:
                flight.seen.append(self.shell.content.get(page.source[:2]))
                source = tables.get(page.source.extent)
                rows = source.rows[page.source.frame, :48].tobytes() if source is not None else bytes(48)
                flight.heads.append(rows)
        elif flight.stage == 1:
            for i, page in enumerate(save.pages):
                if not self.shell.is_sealed(page.source, page.state):
                    flight.failed[i] = "moved"
                    continue
                source, target = tables[page.source.extent], tables[page.target.extent]
                must = page.target.generation << 8 | RESERVED
                assert int(target.words[page.target.frame]) == must, "a page is saved into another's frame"
                parent = source.parents[page.source.frame].tobytes()
                standing = page.standing or self.shell.standing(*page.source[:2])
                payload = self.shell.content.get(page.source[:2])
                proof = flight.seen[i]
                written = Written(page.target, flight.heads[i], parent, standing, proof, payload)
                if self._fails() or not self.disk.write(target.position, written):
                    flight.failed[i] = "io"
                self.written_today += geometry.stride_bytes(target.frame_class)
            cap = self.nvme.rules.write_bytes_per_day
            assert not cap or self.written_today <= cap, f"{self.written_today} bytes in a day of {cap}"
        elif flight.stage == 2:
            for i, page in enumerate(save.pages):
                if not self.shell.is_sealed(page.source, page.state):
                    flight.failed[i] = "moved"
            self.disk.sync()
        else:
            self.flights.remove(flight)
            heads = np.frombuffer(b"".join(flight.heads), np.uint8).reshape(-1, 48)
            if self.send(ev.Saved(self.now_ns, save.number, heads, flight.failed)) is not None:
                self.disk.shut(flight.positions)
            if self.disk.failed & flight.positions.keys():
                self.send(ev.TierFailed(self.now_ns, Tier.NVME, sorted(self.disk.failed)))

    def _load(self, flight: Flight, load: ev.Load) -> None:
        tables = self.shell.tables
        frame_class = tables[load.pages[0].target.extent].frame_class
        if flight.stage == 0:
            for i, page in enumerate(load.pages):
                table = tables.get(page.source.extent)
                found = self.disk.read(table.position, page.source.frame) if table is not None else None
                if not self.shell.is_sealed(page.source):
                    flight.failed[i] = "moved"
                elif found is None or found.address != page.source or found.key != page.key:
                    flight.failed[i] = "data"
                    flight.damaged.append((page.key, page.source))
                elif self._fails():
                    flight.failed[i] = "io"
                flight.seen.append(found.payload if found is not None else "nothing")
                flight.heads.append(found.head if found is not None else bytes(48))
        elif flight.stage == 1:
            for i, page in enumerate(load.pages):
                target = tables[page.target.extent]
                must = page.target.generation << 8 | RESERVED
                assert int(target.words[page.target.frame]) == must, "a page is loaded into another's frame"
                self.shell.content[page.target[:2]] = flight.seen[i]
        else:
            self.flights.remove(flight)
            rows = np.zeros((len(load.pages), 48 + 4 * frame_class.page_tokens), np.uint8)
            rows[:, :48] = np.frombuffer(b"".join(flight.heads), np.uint8).reshape(-1, 48)
            sums = np.zeros((len(load.pages), frame_class.layers), np.uint32)
            if self.send(ev.Loaded(self.now_ns, load.number, rows, sums, flight.failed)) is not None:
                for key, source in flight.damaged:
                    self.send(ev.Damaged(self.now_ns, source, "data", key))

    def _carry(self, flight: Flight, carry: ev.Carry) -> None:
        tables = self.shell.tables
        if flight.stage == 0:
            flight.positions = {tables[page.target.extent].position: page.target.extent for page in carry.pages}
            self.disk.open(set(flight.positions))
            for i, page in enumerate(carry.pages):
                found = self.disk.read(tables[page.source.extent].position, page.source.frame)
                flight.seen.append(found)
                if not self.shell.is_sealed(page.source):
                    flight.failed[i] = "moved"
                elif found is None or found.address != page.source or found.key != page.key:
                    flight.failed[i] = "data"
                    flight.damaged.append((page.key, page.source))
        elif flight.stage == 1:
            for i, page in enumerate(carry.pages):
                found, target = flight.seen[i], tables[page.target.extent]
                must = page.target.generation << 8 | RESERVED
                assert int(target.words[page.target.frame]) == must, "a page is carried into another's frame"
                if i not in flight.failed:
                    assert isinstance(found, Written)
                    written = replace(found, address=page.target)
                    if self._fails() or not self.disk.write(target.position, written):
                        flight.failed[i] = "io"
        elif flight.stage == 2:
            self.disk.sync()
        else:
            self.flights.remove(flight)
            moved = [page for i, page in enumerate(carry.pages) if i not in flight.failed]
            if self.send(ev.Carried(self.now_ns, carry.number, flight.failed)) is not None:
                self.disk.shut(flight.positions)
                self.disk.events["moves"] += len(moved)
                for key, source in flight.damaged:
                    self.send(ev.Damaged(self.now_ns, source, "data", key))
            if self.disk.failed & flight.positions.keys():
                self.send(ev.TierFailed(self.now_ns, Tier.NVME, sorted(self.disk.failed)))

    def _erase(self, flight: Flight, erase: ev.Erase) -> None:
        if flight.stage == 0:
            for i, (_, address) in enumerate(erase.pages):
                if not self.disk.erase(self.shell.tables[address.extent].position, address.frame):
                    flight.failed[i] = "io"
        else:
            self.flights.remove(flight)
            self.send(ev.Erased(self.now_ns, erase.number, set(flight.failed)))

    # --- what clients ask -------------------------------------------------------------------------------------------

    def nvme_pages(self, chain: Chain) -> int:
        """How many leading pages NVMe has."""
        return next((i for i, key in enumerate(chain.keys) if key not in self.shell.nvme_index), len(chain.path))

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
        self.shell.content.update({address[:2]: key for address, key in zip(addresses, keys, strict=True)})
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
                assert key in self.shell.index or key in self.shell.nvme_index, "a page is not where it is said to be"
                self.stored.add(key)
            table = self.shell.tables.get(address.extent)
            ours = status != Status.STALE  # else what was on its way was given up, as the daily cap has it
            if ours and table is not None and table.words[address.frame] == address.generation << 8 | RESERVED:
                self._claim(session, [address])
                client.granted[chain.frame_class].append(address)
        return reply.statuses

    def prefetch(self, session: int, chain: Chain, *, hint: bool = False) -> list[int]:
        """A client wants a chain's pages in DRAM, or has just read them from NVMe."""
        keys = chain.keys[: self.nvme_pages(chain)]
        addresses = [self.shell.nvme_index[key] for key in keys]
        there = set(self.shell.index)
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
        if key in self.shell.index or key not in self.shell.nvme_index:
            super().use(key)
        else:
            address = self.shell.nvme_index[key]
            self.shell.tables[address.extent].last_use[address.frame] = self.now_ns

    # --- troubles ---------------------------------------------------------------------------------------------------

    def damage_below(self, key: bytes) -> None:
        """A page on NVMe is found damaged; it and its descendants go from there."""
        if self.send(ev.Damaged(self.now_ns, self.shell.nvme_index[key], "data", key)) is not None:
            assert key not in self.shell.nvme_index

    def rot(self, key: bytes) -> None:
        """A page on NVMe is altered, and nobody knows."""
        address = self.shell.nvme_index[key]
        place = self.shell.tables[address.extent].position, address.frame
        self.disk.frames[place] = replace(self.disk.frames[place], payload="rotten")
        self.rotten.add(key)

    def fail(self, positions: set[int]) -> None:
        """A device takes no more writes."""
        self.disk.failed |= positions
        self.send(ev.TierFailed(self.now_ns, Tier.NVME, sorted(positions)))

    # --- checkpoints, reboots, the scan -----------------------------------------------------------------------------

    def snapshot(self, position: int) -> tuple[Table, int] | None:
        """First half of a checkpoint: the directory as it is now, and the version it stands for."""
        extent = self.disk.extents.get(position)
        if extent is None or extent.clean or extent.number not in self.shell.tables:
            return None
        table = self.shell.tables[extent.number]
        if ((table.words & np.uint64(0xFF)) == QUARANTINED).any():
            return None
        return copy.deepcopy(table), extent.version

    def checkpoint(self, taken: tuple[Table, int]) -> bool:
        """Second half."""
        table, version = taken
        return self.disk.mark_clean(table, table.words, version)

    def reboot(self) -> None:
        """The machine loses its memory, and the node starts again from the disk."""
        self.reboots += 1
        self.unread = set()
        durable = (self.shell.nvme_index.keys() | self.hidden) - self.rotten
        self.clients.clear()
        self.pins.clear()
        self.claims.clear()
        self.groups.clear()
        self.stored &= durable
        self.shell.rebooted()
        self.hidden = set(durable)  # until the state has seen what is there
        self.restart()
        self.hidden -= self.shell.nvme_index.keys()
        if not self.lossless:  # what they hang on may be evicted before they are found
            self.stored -= self.hidden
            self.hidden = set()

    def forget_tables(self) -> None:
        """The daemon is killed, and afterwards NVMe's tables in memory cannot be believed: the disk tells again."""
        below = set(self.shell.nvme_index)
        for key in below & self.rotten:
            self._unpromise(key)
        self.stored -= (below & self.rotten if self.lossless else below) - self.shell.index.keys()
        self.unread = (self.unread | below) - self.rotten
        if self.lossless:  # else what they hang on may be evicted before they are found
            self.hidden |= self.unread
        for number in [number for number, table in self.shell.tables.items() if table.tier == Tier.NVME]:
            del self.shell.tables[number]
        self.restart()
        self.hidden -= self.shell.nvme_index.keys()

    def _begin_scan(self) -> None:
        words = {number: table.words & np.uint64(0xFF) for number, table in self.shell.tables.items()}
        waiting = [
            number
            for number, table in self.shell.tables.items()
            if table.tier == Tier.NVME and (words[number] == QUARANTINED).any()
        ]
        self.scan = Scan(waiting, ended=list(waiting)) if waiting else None

    def scan_on(self, count: int = 5) -> bool:
        """The scan gets on a bit: an extent read, some pages offered, an extent ended. False: it is done."""
        scan = self.scan
        if scan is None:
            return False
        if scan.extents:
            table = self.shell.tables[scan.extents.pop()]
            for frame in np.flatnonzero((table.words & np.uint64(0xFF)) == QUARANTINED).tolist():
                written = self.disk.read(table.position, frame)
                if written is not None:
                    assert written.payload == written.key, "a page on the disk is not what it says"
                    scan.found.append(written)
            scan.found.sort(key=lambda page: (position_of(page.standing), -page.address.generation))
        elif scan.offered < len(scan.found):
            part = scan.found[scan.offered : scan.offered + count]
            scan.offered += count
            heads = np.frombuffer(b"".join(page.head for page in part), np.uint8).reshape(-1, 48)
            parents, standings = [page.parent for page in part], [page.standing for page in part]
            self.send(ev.Adopt(self.now_ns, [page.address for page in part], heads, parents, standings))
        elif scan.ended:
            self.send(ev.Adopted(self.now_ns, scan.ended.pop()))
        else:
            self.scan = None
            assert not self.lossless or self.hidden <= self.readable_now(), "a page on the disk was not found again"
            self.hidden = self.unread = set()
        return True

    def readable_now(self) -> set[bytes]:
        """What a client can read at this moment."""
        return self.shell.index.keys() | self.shell.nvme_index.keys()
