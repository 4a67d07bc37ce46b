"""KvBlocks: translates the KV events of a foreign engine (in vLLM's format) into the pages that it has, by our keys.

The engine names its blocks by its own hashes. The event for a stored block has the block's tokens and the hash of the
block before it. A chain of blocks can therefore be read as a chain of our pages, even if their sizes differ::

    blocks of 32    h1: tokens 0..31         h2 (parent h1): tokens 32..63
    pages of 48     ......... p1 ends in h2 ^
    recorded        h1: link root, rest 0..31, pages p1       h2: link p1, rest 48..63, pages p1

The engine has a page while it has every block that the page overlaps. The memory for blocks is bounded, and further
blocks are ignored. A block whose parent is unknown is ignored as well: a replay can supply the missing events, and an
unknown page only costs its computation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvstore.cluster.directory import GONE, Marks
from kvstore.model.prefix import Fingerprints, Keys, fingerprint

BLOCK_BYTES: Final = 600  # memory of a block's record, without its tokens
PAGE_BYTES: Final = 250  # memory of a page's record, for each block that the page overlaps
HASH_BYTES_MAX: Final = 64
TOKEN_BYTES: Final = 4
TIER_OF: Final = {None: 0, "GPU": 0, "CPU": 1}  # medium -> index in ``directory.TIERS``; other media: the last
LAST_TIER: Final = 2

STORED: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)
REMOVED: Final = ("block_hashes", "medium", "group_idx")
FIELDS: Final[dict[str, tuple[str, ...]]] = {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": ()}
COUNTED_AS: Final = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}

KV_OUTCOMES: Final = (
    *("stored", "removed", "cleared", "unknown", "malformed", "other_group", "not_kept", "no_room"),
    *("gap", "forgotten"),
)
"""Outcomes of events. "not_kept": blocks that were ignored because their chain is unknown; "no_room": blocks that were
ignored for lack of memory. ``KvIntake`` counts the last two. "gap": messages were missed; "forgotten": all blocks were
forgotten, because the missed messages could not be replayed."""

BlockHash = int | bytes
Root = Callable[[str, str], bytes]
"""Returns the root of a chain for a salt and an adapter."""


class MalformedEvent(ValueError):
    """The payload is not a valid event."""


@dataclass(slots=True)
class _Block:
    """One block of the engine.

    Attributes:
        link: the key of the last page that ends in the block or before it.
        rest: the bytes of the tokens after that page.
        size: bytes of the block's tokens.
        tiers: one bit for each tier that the block is in.
        cost: memory of this record.
        pages: fingerprints of the pages that the block overlaps.
        early: the one of these pages that ends in the block and begins before it; 0 if there is none.
        early_bytes: how many bytes of tokens that page has before the block.
    """

    link: bytes
    rest: bytes
    parent: BlockHash | None
    size: int
    tiers: int
    cost: int
    pages: set[int] = field(default_factory=set)
    early: int = 0
    early_bytes: int = 0


class KvBlocks:
    """The blocks of one engine, and the pages that they form.

    ``apply`` takes the engine's events. ``changes`` returns how its pages have changed since the last call.

    Args:
        page_tokens: tokens of one of our pages.
        root: see ``Root``.
        bytes_max: memory for all records.
        counts: counts of events and blocks by ``KV_OUTCOMES``. This object increases them.
    """

    def __init__(self, page_tokens: int, root: Root, bytes_max: int, counts: Counter[str]) -> None:
        self.counts = counts
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._page_tokens = page_tokens
        self._root = root
        self._bytes_max = bytes_max
        self._bytes_used = 0
        self._blocks: dict[BlockHash, _Block] = {}
        self._pages: dict[int, int] = {}  # by fingerprint: one bit for each tier that the page is in
        self._changes: list[tuple[int, int]] = []  # (fingerprint, mark), in order

    @property
    def nbytes(self) -> int:
        """The approximate memory of all records."""
        return self._bytes_used

    def clear(self) -> None:
        """Forget all blocks and pages, and all changes that were not returned."""
        self._blocks.clear()
        self._pages.clear()
        self._changes.clear()
        self._bytes_used = 0

    def changes(self) -> tuple[Fingerprints, Marks]:
        """Return the pages that the engine has gained and lost since the last call, in order."""
        changes, self._changes = self._changes, []
        return _arrays(changes)

    def all_pages(self) -> tuple[Fingerprints, Marks]:
        """Return all pages of the engine. ``changes`` then begins after this call."""
        self._changes.clear()
        return _arrays([(page, tier) for page, tiers in self._pages.items() for tier in _bits(tiers)])

    def apply(self, batch: Any) -> bool:
        """Apply the unpacked payload of one message. Events that cannot be read are counted and skipped.

        Returns:
            True if the engine cleared its cache. ``changes`` then begins after that event.
        """
        events = batch.get("events") if isinstance(batch, dict) else batch[1] if _is_row(batch, 2) else None
        if not isinstance(events, list):
            self.counts["malformed"] += 1
            return False
        was_cleared = False
        for event in events:
            try:
                was_cleared |= self._apply_event(event)
            except MalformedEvent:
                self.counts["malformed"] += 1
        return was_cleared

    def _apply_event(self, event: Any) -> bool:
        kind = event.get("type") if isinstance(event, dict) else event[0] if _is_row(event, 1) else None
        if not isinstance(kind, str) or kind not in FIELDS:
            self.counts["unknown" if isinstance(kind, str) else "malformed"] += 1
            return False
        fields = event if isinstance(event, dict) else dict(zip(FIELDS[kind], event[1:], strict=False))
        if kind == "AllBlocksCleared":
            self.clear()
        elif fields.get("group_idx"):
            self.counts["other_group"] += 1  # of a hybrid model, only the first group counts
            return False
        elif kind == "BlockStored":
            self._add_blocks(fields)
        else:
            tier = _tier(fields)
            for name in _hashes(fields):
                self._remove_from_tier(name, tier)
        self.counts[COUNTED_AS[kind]] += 1
        return kind == "AllBlocksCleared"

    # --- blocks -----------------------------------------------------------------------------------------------------

    def _add_blocks(self, fields: dict[str, Any]) -> None:
        hashes, tier, parent = _hashes(fields), _tier(fields), fields.get("parent_block_hash")
        size, ids = fields.get("block_size"), fields.get("token_ids")
        if type(size) is not int or not 1 <= size <= 1 << 20 or not isinstance(ids, list):
            raise MalformedEvent
        if len(ids) != size * len(hashes):  # the event for a copy on another medium may have no tokens
            for name in hashes:
                self._add_to_tier(name, tier)
            return
        try:
            tokens = np.array(ids, np.uint32).tobytes() if all(type(each) is int for each in ids) else None
        except OverflowError:
            tokens = None
        if tokens is None:
            raise MalformedEvent
        for index, name in enumerate(hashes):
            if name in self._blocks:
                self._add_to_tier(name, tier)
            elif not self._add(name, parent, tokens[index * size * 4 : (index + 1) * size * 4], fields, index, tier):
                self.counts["not_kept"] += len(hashes) - index
                return
            parent = name

    def _add(
        self, name: BlockHash, parent: BlockHash | None, tokens: bytes, fields: dict[str, Any], index: int, tier: int
    ) -> bool:
        """Add a block. Returns False if its chain is unknown, or if there is no memory for it."""
        if parent is None:
            adapter, salt = _adapter(fields), _salt(fields, index)
            if salt is None or adapter is None:
                return False
            link, rest = self._root(salt, adapter), b""
        else:
            before = self._blocks.get(parent) if isinstance(parent, int | bytes) else None
            if before is None or _salt(fields, index) != "":
                return False
            link, rest = before.link, before.rest
        data = rest + tokens
        full = len(data) - len(data) % self._page_bytes
        keys = list(Keys.of(np.frombuffer(data[:full], np.uint32), self._page_tokens, link).links) if full else []
        cost = BLOCK_BYTES + len(data) - full + PAGE_BYTES * (len(keys) + len(rest) // min(len(tokens), len(rest) or 1))
        if self._bytes_used + cost > self._bytes_max:
            self.counts["no_room"] += 1
            return False
        self._bytes_used += cost
        block = _Block(keys[-1] if keys else link, data[full:], parent, len(tokens), 1 << tier, cost)
        self._blocks[name] = block
        for at, key in enumerate(keys):
            page = fingerprint(key)
            block.pages.add(page)
            if at == 0 and rest:
                block.early, block.early_bytes = page, len(rest)
                earlier, is_complete = self._blocks_of_early_page(block)
                for each in earlier:
                    each.pages.add(page)
                if not is_complete:
                    continue  # the engine no longer has the block in which the page begins
            self._set_tier(page, tier, True)
        return True

    def _blocks_of_early_page(self, block: _Block) -> tuple[list[_Block], bool]:
        """Return the known blocks before ``block`` that its early page overlaps, and True if these are all of them."""
        earlier: list[_Block] = []
        missing, name = block.early_bytes, block.parent
        while missing > 0:
            before = self._blocks.get(name) if name is not None else None
            if before is None:
                return earlier, False
            earlier.append(before)
            missing -= before.size
            name = before.parent
        return earlier, True

    def _add_to_tier(self, name: BlockHash, tier: int) -> None:
        """Record that a block is in one more tier. An unknown block is counted."""
        block = self._blocks.get(name)
        if block is None:
            self.counts["not_kept"] += 1
            return
        block.tiers |= 1 << tier
        for page in block.pages:
            if page in self._pages:
                self._set_tier(page, tier, True)

    def _remove_from_tier(self, name: BlockHash, tier: int) -> None:
        block = self._blocks.get(name)
        if block is None:
            return
        block.tiers &= ~(1 << tier)
        for page in block.pages:
            self._set_tier(page, tier, False)
        if not block.tiers:
            del self._blocks[name]
            self._bytes_used -= block.cost
            for each in self._blocks_of_early_page(block)[0]:
                each.pages.discard(block.early)
            for page in block.pages:
                for other in _bits(self._pages.get(page, 0)):
                    self._set_tier(page, other, False)

    def _set_tier(self, page: int, tier: int, is_present: bool) -> None:
        """Record whether a page is in a tier. A change is added to ``changes``."""
        before = self._pages.get(page, 0)
        tiers = before | 1 << tier if is_present else before & ~(1 << tier)
        if tiers == before:
            return
        if tiers:
            self._pages[page] = tiers
        else:
            del self._pages[page]
        self._changes.append((page, tier if is_present else tier | GONE))


def _is_row(value: Any, least: int) -> bool:
    return isinstance(value, list | tuple) and len(value) >= least


def _hashes(fields: dict[str, Any]) -> list[BlockHash]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or not all(_is_hash(each) for each in hashes):
        raise MalformedEvent
    return hashes


def _is_hash(value: Any) -> bool:
    return type(value) is int or (isinstance(value, bytes) and 0 < len(value) <= HASH_BYTES_MAX)


def _tier(fields: dict[str, Any]) -> int:
    medium = fields.get("medium")
    if medium is not None and not isinstance(medium, str):
        raise MalformedEvent
    return TIER_OF.get(medium, LAST_TIER)


def _adapter(fields: dict[str, Any]) -> str | None:
    """Return the name of a block's adapter; None if the event has only its number."""
    name = fields.get("lora_name")
    if name is None:
        return "" if fields.get("lora_id") is None else None
    return name if isinstance(name, str) else None


def _salt(fields: dict[str, Any], index: int) -> str | None:
    """Return the salt of the block at this index; None if the block also depends on, for example, an image."""
    rows = fields.get("extra_keys")
    row = rows[index] if isinstance(rows, list) and index < len(rows) else None
    if not row:
        return ""
    if not isinstance(row, list):
        return None
    keys = list(row[1:] if row[0] == fields.get("lora_name") else row)
    if not keys:
        return ""
    return keys[0] if len(keys) == 1 and isinstance(keys[0], str) else None


def _bits(tiers: int) -> list[int]:
    return [tier for tier in range(LAST_TIER + 1) if tiers >> tier & 1]


def _arrays(changes: Sequence[tuple[int, int]]) -> tuple[Fingerprints, Marks]:
    pages = np.array([page for page, _ in changes], np.uint64)
    return pages, np.array([mark for _, mark in changes], np.uint8)
