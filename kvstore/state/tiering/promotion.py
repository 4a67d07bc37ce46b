"""Promotion: pages are loaded into the upper tier, on request or after enough reads."""

from __future__ import annotations

from collections import Counter

from kvstore.model.replica import Address, FrameClass, Status
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.directory_spans import spans_at
from kvstore.state.space import Space
from kvstore.state.tiering.copying import CopyBatch, CopyBatches
from kvstore.state.writing import Writing

LOADING_BYTES_MAX = 64 << 20  # bytes that may be loaded at a time


class Promotion:
    """The decisions about loads. Part of ``Tiering``."""

    def __init__(
        self,
        copies: CopyBatches,
        upper: Space,
        lower: Space,
        writing: Writing,
        counters: Counter[str],
        promote_after: int,
    ) -> None:
        self.copies = copies
        self.upper = upper
        self.lower = lower
        self.writing = writing
        self.counters = counters
        self.promote_after = promote_after
        self._up = copies.up[upper.tier]  # keys that are being loaded
        self.early: dict[int, ev.Loaded] = {}  # reports, by number, that came before those of their parents' batches
        self._reads: dict[int, bytearray] = {}  # lower extent -> reads of each frame since it got its page

    def prefetch(self, event: ev.Prefetch) -> list[do.Instruction]:
        """Handle ``events.Prefetch``.

        The reply has a status per page. OK: the upper tier has the page. BUSY: the page is being loaded. PARTIAL: it
        was not read often enough yet. STALE, NO_PARENT or NO_SPACE: it cannot be loaded.
        """
        out: list[do.Instruction] = []
        statuses: list[Status] = []
        to_load: dict[bytes, tuple[int, Address]] = {}  # key -> place in the event, address
        for place, address in enumerate(event.addresses):
            status, key = self._judge(address, event.hint, to_load)
            statuses.append(status)
            unreadable = self.copies.is_unreadable(self.lower, address)
            if status == Status.BUSY and key not in self._up and key not in to_load and not unreadable:
                to_load[key] = place, address
        pages = [(key, address) for key, (_, address) in to_load.items()]
        started = self._load(pages, out) if pages else 0
        waiting = self.upper.departures.waiting or self._loading_bytes > 0
        for place, _ in list(to_load.values())[started:]:
            statuses[place] = Status.BUSY if waiting else Status.NO_SPACE
        out.append(do.Reply(statuses=[int(status) for status in statuses]))
        return out

    def _judge(self, address: Address, hint: bool, to_load: dict[bytes, tuple[int, Address]]) -> tuple[Status, bytes]:
        """Return the status of one page, and its key. BUSY: it should be loaded, or is being loaded."""
        if not self.lower.pages.sealed(address):
            return Status.STALE, b""
        if hint and self._count_read(address) < self.promote_after:  # the usual case needs no look at the index
            return Status.PARTIAL, b""
        records = self.lower.pages.records
        key, root = records.key(address.extent, address.frame), records.root(address.extent, address.frame)
        stored = self.upper.pages.find(key)
        if stored is not None:  # a page of another root keeps the key, because it was stored first
            return Status.OK if self.upper.pages.root_of(stored) == root else Status.NO_PARENT, key
        if key in self._up or key in to_load:
            return Status.BUSY, key
        first = next(iter(to_load.values()), None)
        if first is not None and (
            self._class_of(first[1]) != self._class_of(address) or records.root(*first[1][:2]) != root
        ):
            return Status.NO_PARENT, key  # a page of another chain
        parent = records.parent(address.extent, address.frame)
        at_root = parent == root
        if at_root or parent in to_load or parent in self._up or self.upper.pages.find_in(root, parent) is not None:
            return Status.BUSY, key
        return Status.NO_PARENT, key

    def _class_of(self, address: Address) -> FrameClass:
        return self.lower.segment.extents[address.extent].pool.frame_class

    def _load(self, pages: list[tuple[bytes, Address]], out: list[do.Instruction]) -> int:
        """Take frames in the upper tier for these consecutive pages and start loading them. Return how many are being
        loaded."""
        frame_class = self._class_of(pages[0][1])
        bytes_left = LOADING_BYTES_MAX - self._loading_bytes
        count = min(len(pages), bytes_left // frame_class.page_bytes)
        if not self._loading_bytes:
            count = max(count, 1)  # one page may be larger than the whole limit
        if count <= 0:
            return 0
        records = self.lower.pages.records
        parents = [records.parent(address.extent, address.frame) for _, address in pages[:count]]
        number, root = self.copies.root_number(self.lower, pages[0][1]), records.root(*pages[0][1][:2])
        count = self.upper.quotas.fit(number, frame_class, count, parents[0], out)
        if not count:
            return 0
        targets = self.upper.take_after((parents[0],), self.upper.segment.pool(frame_class), count, out)
        if not targets:
            return 0
        copies = [do.Copying(key, source, target) for (key, source), target in zip(pages, targets, strict=False)]
        batch = CopyBatch(copies, frame_class, self.lower, self.upper)
        inside = {copy.key for copy in copies}
        for parent in parents[: len(copies)]:
            anchor = self.upper.pages.find_in(root, parent) if parent not in inside else None
            if anchor is not None:
                self.upper.pages.hold(anchor)
                batch.held.append(anchor)
            elif parent in self._up:
                batch.waits_for.add(parent)
        self.copies.start_loading(batch, out)
        return len(copies)

    def loaded(self, event: ev.Loaded) -> list[do.Instruction]:
        """Handle ``events.Loaded``: seal the verified pages in the upper tier, up to the first that was not read.

        If another device was faster, a report may come before the report on the batch with the parents. Then it is
        kept until that report has come.
        """
        out: list[do.Instruction] = []
        self.early[event.number] = event
        while (number := next(filter(self._is_due, self.early), None)) is not None:
            self._finish(self.early.pop(number), out)
        return out

    def _is_due(self, number: int) -> bool:
        """Return True if no parent of the batch is still being loaded."""
        return self.copies.loading[number].waits_for.isdisjoint(self._up)

    def _finish(self, event: ev.Loaded, out: list[do.Instruction]) -> None:
        batch = self.copies.loading.pop(event.number)
        self._up.difference_update(page.key for page in batch.pages)
        arrival = self.copies.seal_arrived(batch, event.rows, event.failed)
        places = arrival.places
        if places:
            targets, keys = [batch.pages[i].target for i in places], [batch.pages[i].key for i in places]
            for i in places:
                self._forget_reads(batch.pages[i].source)
                self.upper.pages.offer_leaf(batch.pages[i].target, batch.pages[i].key, event.now_ns // 1_000_000)
            out.append(do.WriteUse(targets, [event.now_ns] * len(places)))
            rows, sums = event.rows[places], event.checksums[places]
            spans = spans_at(self.upper.segment, targets)
            out.append(do.WriteSealed(targets, keys, arrival.standings, rows, arrival.parents, sums, "load", spans))
            self.counters["pages_promoted"] += len(places)
            self.counters["bytes_promoted"] += len(places) * batch.frame_class.page_bytes
            self._hold_for_children(dict(zip(keys, targets, strict=True)))
            self.writing.follow(keys, out)
        for reason in event.failed.values():
            self.counters[f"load_failed_{reason}"] += 1
        self.copies.finish(batch, arrival.unused, out)

    @property
    def _loading_bytes(self) -> int:
        """Number of bytes that are being loaded. Late batches do not count, because they must not block other loads."""
        batches = (batch for batch in self.copies.loading.values() if batch.target is self.upper and not batch.late)
        return sum(len(batch.pages) * batch.frame_class.page_bytes for batch in batches)

    def _hold_for_children(self, arrived: dict[bytes, Address]) -> None:
        """Hold pages that have just arrived for the batches that wait for them."""
        for batch in self.copies.loading.values():
            for key in batch.waits_for & arrived.keys() if batch.target is self.upper else ():
                self.upper.pages.hold(arrived[key])
                batch.held.append(arrived[key])
                batch.waits_for.discard(key)

    def _count_read(self, address: Address) -> int:
        extents = self.lower.segment.extents
        reads = self._reads.get(address.extent)
        if reads is None:
            if len(self._reads) > len(extents):  # some counts belong to extents that were dropped
                self._reads = {number: counts for number, counts in self._reads.items() if number in extents}
            reads = self._reads[address.extent] = bytearray(extents[address.extent].frames)
        reads[address.frame] = min(255, reads[address.frame] + 1)
        return reads[address.frame]

    def forget_reads(self, addresses: list[Address]) -> None:
        """Reset the read counts of these frames: they hold other pages now."""
        for address in addresses:
            self._forget_reads(address)

    def _forget_reads(self, address: Address) -> None:
        reads = self._reads.get(address.extent)
        if reads is not None:
            reads[address.frame] = 0
