"""Pages as KV events tell of them: key, parent, token ids; read from the records while the node goes on.

Nothing is locked. A record is believed where its word is the same before and after, as readers of the pool do it; the
token ids of a page that is on NVMe alone are in its header there. A page that is gone, or not to be read, is None.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from kvstore.model.objects import HEAD_TAG, PIECE_TAG
from kvstore.model.replica import Address, FrameState, Tier, word_of
from kvstore.service.node.contents import Contents
from kvstore.service.node.index_keeper import snapshot
from kvstore.state import closure
from kvstore.tier import frame_header, nvme_geometry
from kvstore.tier.disk import aligned_buffer
from kvstore.tier.frame_header import FrameHeader
from kvstore.tier.record import Record
from kvstore.tier.records import ExtentTable

log = logging.getLogger("kvstore.events")

TOKENS_MAX = 4096  # of one batch, unless one page has more: some 15 KB

# vLLM's names; other consumers know them too.
MEDIUMS = {Tier.HBM: "GPU", Tier.DRAM: "CPU", Tier.NVME: "DISK"}
KvEvent = dict[str, Any]
"""A map, as vLLM and SGLang pack theirs: "type", and its fields by name."""

CLEARED: Final[KvEvent] = {"type": "AllBlocksCleared"}


class PageFacts(NamedTuple):
    """A stored page. ``parent`` None: it starts its chain. ``tokens`` uint32 little-endian, end to end; none of a page
    of an opaque object, of which nobody is told."""

    key: bytes
    parent: bytes | None
    tokens: bytes


class PageReader:
    """Reads what is stored where. Lives with its node; one thread uses it.

    A page that has gone when it is read is not told of as stored, and neither is what hangs on it, until its going has
    been told: it may be back by then, and its children be found before it is told of again.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._skipped: set[tuple[Tier, bytes]] = set()  # stored, as events say, and not told of

    def stored_now(self, keys: list[bytes], tier: Tier) -> list[PageFacts | None] | None:
        """Pages that an event says were stored, as far as they are to be told of. None: the index cannot tell."""
        pages = self.find(keys, tier)
        gone = [i for i, page in enumerate(pages or ()) if page is None]
        again = self.find([keys[i] for i in gone], tier) if gone else []  # moved inside the tier just now, perhaps
        if pages is None or again is None:
            return None
        for i, page in zip(gone, again, strict=True):
            pages[i] = page
        return [self._told(key, tier, page) for key, page in zip(keys, pages, strict=True)]

    def _told(self, key: bytes, tier: Tier, page: PageFacts | None) -> PageFacts | None:
        if page is None or (page.parent is not None and (tier, page.parent) in self._skipped):
            self._skipped.add((tier, key))
            return None
        self._skipped.discard((tier, key))
        return page

    def gone(self, keys: list[bytes], tier: Tier) -> None:
        """An event says that these pages left."""
        if self._skipped:
            self._skipped.difference_update((tier, key) for key in keys)

    def forget(self) -> None:
        """Everything is told anew."""
        self._skipped.clear()

    def find(self, keys: list[bytes], tier: Tier) -> list[PageFacts | None] | None:
        """These pages, where they are in ``tier`` now. None: the index cannot tell at present."""
        look = self._contents.look
        here = look(tier, keys)
        upper = self._contents.above(tier)
        above = look(upper, keys) if upper is not None else [None] * len(keys)
        if here is None or above is None:
            return None
        return [
            self._read(key, address, copy) if address is not None else None
            for key, address, copy in zip(keys, here, above, strict=True)
        ]

    def stored(self, tier: Tier) -> Iterator[PageFacts]:
        """Every page of ``tier``, parents before their children, chain by chain.

        Events report a page that comes, goes or moves in the meantime.
        """
        if tier == Tier.HBM:
            yield from self._stored_by_engines()
            return
        snapshots = [snapshot(table) for table in self._contents.tables(tier)]
        links = closure.link(snapshots)
        order = np.argsort(links.parent, kind="stable")  # children of one page beside each other
        parents = links.parent[order]
        starts, ends = (np.searchsorted(parents, np.arange(len(parents)), side) for side in ("left", "right"))
        waiting = order[parents == -1].tolist()
        while waiting:
            i = waiting.pop()
            if links.duplicate[i]:
                continue
            key = links.key(i)
            facts = self._read(key, links.address(i), None)
            if facts is None:
                facts = (self.find([key], tier) or [None])[0]  # moved since, perhaps
            if self._told(key, tier, facts) is None or facts is None:
                continue  # and what hangs on it
            waiting += order[starts[i] : ends[i]].tolist()
            if facts.tokens:
                yield facts

    def _stored_by_engines(self) -> Iterator[PageFacts]:
        """Every page in memory that engines have mounted, where a page may be without its parent."""
        found = {key: page for key, address in self._contents.listed(Tier.HBM) if (page := self._mounted(key, address))}
        children: dict[bytes, list[bytes]] = {}
        for key, page in found.items():
            children.setdefault(page.parent or b"", []).append(key)
        waiting = [key for key, page in found.items() if page.parent not in found]
        while waiting:
            key = waiting.pop()
            if self._told(key, Tier.HBM, found[key]) is not None:
                waiting += children.get(key, ())
                yield found[key]

    def _mounted(self, key: bytes, address: Address) -> PageFacts | None:
        table = self._contents.mounted(address.extent)
        word = word_of(address.generation, FrameState.SEALED)
        if table is None or address.frame >= table.frames or int(table.words[address.frame]) != word:
            return None
        record = Record(table.rows[address.frame].tobytes(), table.fmt)
        if int(table.words[address.frame]) != word or record.key != key:
            return None
        return PageFacts(key, record.parent if record.parent != record.root else None, record.tokens)

    def _read(self, key: bytes, address: Address, above: Address | None) -> PageFacts | None:
        table = self._contents.table(address.extent)
        if table is None:
            return self._mounted(key, address)
        if address.frame >= table.frames:
            return None
        record = _record(table, key, address)
        if record is None:
            return None
        if record.extra.startswith((HEAD_TAG, PIECE_TAG)):  # an opaque object has no token ids
            return PageFacts(key, None, b"")
        tokens = self._tokens(key, address, table, record, above)
        parent = record.parent if record.parent != record.root else None
        return None if tokens is None else PageFacts(key, parent, tokens)

    def _tokens(
        self, key: bytes, address: Address, table: ExtentTable, record: Record, above: Address | None
    ) -> bytes | None:
        if record.tokens:
            return record.tokens
        if above is not None:
            copy = self._contents.table(above.extent)
            found = _record(copy, key, above) if copy is not None and above.frame < copy.frames else None
            if found is not None and found.tokens:
                return found.tokens
        return self._tokens_on_nvme(key, address, table)

    def _tokens_on_nvme(self, key: bytes, address: Address, table: ExtentTable) -> bytes | None:
        nvme, frame_class = self._contents.nvme, table.frame_class
        if nvme is None:
            return None
        buffer = aligned_buffer(nvme_geometry.header_bytes(frame_class))
        try:
            nvme.devices.read_header(table.position, address.frame, frame_class, buffer)
        except OSError as error:
            log.warning("frame %d of extent %d could not be read: %s", address.frame, address.extent, error)
            return None
        incarnation = nvme.devices.header_incarnation(table.position)
        found = frame_header.unpack(buffer, frame_class, incarnation, *address)
        return found.tokens.tobytes() if isinstance(found, FrameHeader) and found.key == key else None


def _record(table: ExtentTable, key: bytes, address: Address) -> Record | None:
    word = word_of(address.generation, FrameState.SEALED)
    if int(table.words[address.frame]) != word:
        return None
    record = table.record(address.frame)
    return record if int(table.words[address.frame]) == word and record.key == key else None


# --- in vLLM's words ------------------------------------------------------------------------------------------------


def blocks_stored(pages: Iterable[PageFacts | None], medium: str) -> Iterator[KvEvent]:
    """``BlockStored`` events: pages that follow one another in a chain share one, of ``TOKENS_MAX`` at most."""
    run: list[PageFacts] = []
    for page in pages:
        if page is None or not page.tokens:
            continue
        follows = run and page.parent == run[-1].key and len(page.tokens) == len(run[-1].tokens)
        if run and not (follows and (len(run) + 1) * len(page.tokens) <= 4 * TOKENS_MAX):
            yield _stored(run, medium)
            run = []
        run.append(page)
    if run:
        yield _stored(run, medium)


def _stored(run: list[PageFacts], medium: str) -> KvEvent:
    return {
        "type": "BlockStored",
        "block_hashes": [page.key for page in run],
        "parent_block_hash": run[0].parent,
        "token_ids": np.frombuffer(b"".join(page.tokens for page in run), "<u4").tolist(),
        "block_size": len(run[0].tokens) // 4,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }


def blocks_removed(keys: list[bytes], medium: str) -> KvEvent:
    """A ``BlockRemoved`` event."""
    return {"type": "BlockRemoved", "block_hashes": keys, "medium": medium}


def everything_stored(reader: PageReader) -> Iterator[KvEvent]:
    """``BlockStored`` events of all that both tiers hold."""
    for tier, medium in MEDIUMS.items():
        yield from blocks_stored(reader.stored(tier), medium)


def batches(events: Iterable[KvEvent]) -> Iterator[list[KvEvent]]:
    """Split events into batches of about ``TOKENS_MAX`` token ids, in order."""
    batch: list[KvEvent] = []
    tokens = 0
    for event in events:
        size = len(event.get("token_ids", ())) or 1
        if batch and tokens + size > TOKENS_MAX:
            yield batch
            batch, tokens = [], 0
        batch.append(event)
        tokens += size
    if batch:
        yield batch
