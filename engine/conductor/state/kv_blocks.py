"""KvBlocks: which pages a foreign engine has, by its KV events (vLLM's), under the keys that we know pages by.

An engine names its blocks by hashes of its own. An event that a block is stored has the block's tokens and the hash of
the block before it, so a chain of blocks can be read as a chain of our pages, whatever the two sizes are::

    blocks of 32    h1: tokens 0..31         h2 (parent h1): tokens 32..63
    pages of 48     ......... p1 ends in h2 ^
    kept            h1: link root, rest 0..31, pages p1       h2: link p1, rest 48..63, pages p1

A page is there while every block that it touches is. What is kept is bounded in bytes; blocks beyond that are not kept.
A block whose parent is not known is not kept either: what was missed can be told again from its beginning, and a page
that is not known costs no more than its computation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvstore.cluster.directory import GONE, Marks
from kvstore.model.prefix import Fingerprints, Keys, fingerprint

BLOCK_BYTES: Final = 600  # memory of a block here, without its tokens
PAGE_BYTES: Final = 250  # memory of a page, and of each block that it is in
HASH_BYTES_MAX: Final = 64
TOKEN_BYTES: Final = 4
TIER_OF: Final = {None: 0, "GPU": 0, "CPU": 1}  # medium -> place in ``directory.TIERS``; any other one is the last
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
NAMED: Final = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}

KV_OUTCOMES: Final = (
    *("stored", "removed", "cleared", "unknown", "malformed", "other_group", "not_kept", "no_room"),
    *("gap", "forgotten"),
)
"""Outcomes of events. "not_kept": blocks whose chain is not known; "no_room": for lack of memory. The last two are
counted by the follower: messages were missed, and everything known was forgotten because they cannot be replayed."""

BlockHash = int | bytes
Root = Callable[[str, str], bytes]
"""The root of pages by salt and adapter."""


class Malformed(ValueError):
    """The payload is not an event."""


@dataclass(slots=True)
class _Block:
    """A block.

    Attributes:
        link: the key of the last page that ends in or before it; ``rest``: the tokens after that.
        size: bytes of its tokens; ``cost``: the memory it takes here.
        tiers: one bit for each tier that it is in.
        pages: the pages that it is a part of.
        early: the page among them that begins before it, by ``early_bytes``; 0: there is none.
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
    """The blocks of one engine. ``take`` changes it; ``told`` returns how its pages have changed since the last call.

    Args:
        page_tokens: of our pages.
        root: see ``Root``.
        bytes_max: of all that is kept.
        counts: of events and blocks, by ``KV_OUTCOMES``; they are added to.
    """

    def __init__(self, page_tokens: int, root: Root, bytes_max: int, counts: Counter[str]) -> None:
        self.counts = counts
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._page_tokens = page_tokens
        self._root = root
        self._max = bytes_max
        self._used = 0
        self._blocks: dict[BlockHash, _Block] = {}
        self._pages: dict[int, int] = {}  # fingerprint -> one bit for each tier that it is in
        self._changes: list[tuple[int, int]] = []  # fingerprint and mark, in order

    @property
    def nbytes(self) -> int:
        """Bytes that are kept, roughly."""
        return self._used

    def clear(self) -> None:
        """Forget everything; what is reported next is to be reported as a whole."""
        self._blocks.clear()
        self._pages.clear()
        self._changes.clear()
        self._used = 0

    def told(self) -> tuple[Fingerprints, Marks]:
        """Pages that came and went since the last call."""
        changes, self._changes = self._changes, []
        return _arrays(changes)

    def everything(self) -> tuple[Fingerprints, Marks]:
        """All pages; this clears the list of changes."""
        self._changes.clear()
        return _arrays([(page, tier) for page, tiers in self._pages.items() for tier in _bits(tiers)])

    def take(self, batch: Any) -> bool:
        """The payload of one message, as it was packed. What cannot be read is counted and left out.

        Returns:
            Whether everything was cleared: changes are then those after it.
        """
        events = batch.get("events") if isinstance(batch, dict) else batch[1] if _is_row(batch, 2) else None
        if not isinstance(events, list):
            self.counts["malformed"] += 1
            return False
        cleared = False
        for event in events:
            try:
                cleared |= self._event(event)
            except Malformed:
                self.counts["malformed"] += 1
        return cleared

    def _event(self, event: Any) -> bool:
        kind = event.get("type") if isinstance(event, dict) else event[0] if _is_row(event, 1) else None
        if not isinstance(kind, str) or kind not in FIELDS:
            self.counts["unknown" if isinstance(kind, str) else "malformed"] += 1
            return False
        given = event if isinstance(event, dict) else dict(zip(FIELDS[kind], event[1:], strict=False))
        if kind == "AllBlocksCleared":
            self.clear()
        elif given.get("group_idx"):
            self.counts["other_group"] += 1  # a hybrid model: the first group alone tells what a prompt has
            return False
        elif kind == "BlockStored":
            self._stored(given)
        else:
            tier = _tier(given)
            for name in _hashes(given):
                self._removed(name, tier)
        self.counts[NAMED[kind]] += 1
        return kind == "AllBlocksCleared"

    # --- blocks -----------------------------------------------------------------------------------------------------

    def _stored(self, given: dict[str, Any]) -> None:
        hashes, tier, parent = _hashes(given), _tier(given), given.get("parent_block_hash")
        size, ids = given.get("block_size"), given.get("token_ids")
        if type(size) is not int or not 1 <= size <= 1 << 20 or not isinstance(ids, list):
            raise Malformed
        if len(ids) != size * len(hashes):  # the event of a copy to another medium may lack its tokens
            for name in hashes:
                self._copied(name, tier)
            return
        try:
            tokens = np.array(ids, np.uint32).tobytes() if all(type(each) is int for each in ids) else None
        except OverflowError:
            tokens = None
        if tokens is None:
            raise Malformed
        for index, name in enumerate(hashes):
            if name in self._blocks:
                self._copied(name, tier)
            elif not self._add(name, parent, tokens[index * size * 4 : (index + 1) * size * 4], given, index, tier):
                self.counts["not_kept"] += len(hashes) - index
                return
            parent = name

    def _add(
        self, name: BlockHash, parent: BlockHash | None, tokens: bytes, given: dict[str, Any], index: int, tier: int
    ) -> bool:
        """Add a block. False: its chain is not known, or there is no room."""
        if parent is None:
            adapter, salt = _adapter(given), _salt(given, index)
            if salt is None or adapter is None:
                return False
            link, rest = self._root(salt, adapter), b""
        else:
            before = self._blocks.get(parent) if isinstance(parent, int | bytes) else None
            if before is None or _salt(given, index) != "":
                return False
            link, rest = before.link, before.rest
        data = rest + tokens
        full = len(data) - len(data) % self._page_bytes
        keys = list(Keys.of(np.frombuffer(data[:full], np.uint32), self._page_tokens, link).links) if full else []
        cost = BLOCK_BYTES + len(data) - full + PAGE_BYTES * (len(keys) + len(rest) // min(len(tokens), len(rest) or 1))
        if self._used + cost > self._max:
            self.counts["no_room"] += 1
            return False
        self._used += cost
        block = _Block(keys[-1] if keys else link, data[full:], parent, len(tokens), 1 << tier, cost)
        self._blocks[name] = block
        for at, key in enumerate(keys):
            page = fingerprint(key)
            block.pages.add(page)
            if at == 0 and rest:
                block.early, block.early_bytes = page, len(rest)
                before_it, whole = self._before(block)
                for each in before_it:
                    each.pages.add(page)
                if not whole:
                    continue  # the block that it begins with is not there any more
            self._page(page, tier, True)
        return True

    def _before(self, block: _Block) -> tuple[list[_Block], bool]:
        """The known blocks in which its first page begins, and whether all of them are known."""
        found: list[_Block] = []
        missing, name = block.early_bytes, block.parent
        while missing > 0:
            before = self._blocks.get(name) if name is not None else None
            if before is None:
                return found, False
            found.append(before)
            missing -= before.size
            name = before.parent
        return found, True

    def _copied(self, name: BlockHash, tier: int) -> None:
        """Add a tier to a block, if the block is known."""
        block = self._blocks.get(name)
        if block is None:
            self.counts["not_kept"] += 1
            return
        block.tiers |= 1 << tier
        for page in block.pages:
            if page in self._pages:
                self._page(page, tier, True)

    def _removed(self, name: BlockHash, tier: int) -> None:
        block = self._blocks.get(name)
        if block is None:
            return
        block.tiers &= ~(1 << tier)
        for page in block.pages:
            self._page(page, tier, False)
        if not block.tiers:
            del self._blocks[name]
            self._used -= block.cost
            for each in self._before(block)[0]:
                each.pages.discard(block.early)
            for page in block.pages:
                for other in _bits(self._pages.get(page, 0)):
                    self._page(page, other, False)

    def _page(self, page: int, tier: int, there: bool) -> None:
        tiers = self._pages.get(page, 0)
        now = tiers | 1 << tier if there else tiers & ~(1 << tier)
        if now == tiers:
            return
        if now:
            self._pages[page] = now
        else:
            del self._pages[page]
        self._changes.append((page, tier if there else tier | GONE))


def _is_row(value: Any, least: int) -> bool:
    return isinstance(value, list | tuple) and len(value) >= least


def _hashes(given: dict[str, Any]) -> list[BlockHash]:
    found = given.get("block_hashes")
    if not isinstance(found, list) or not all(_is_hash(each) for each in found):
        raise Malformed
    return found


def _is_hash(value: Any) -> bool:
    return type(value) is int or (isinstance(value, bytes) and 0 < len(value) <= HASH_BYTES_MAX)


def _tier(given: dict[str, Any]) -> int:
    medium = given.get("medium")
    if medium is not None and not isinstance(medium, str):
        raise Malformed
    return TIER_OF.get(medium, LAST_TIER)


def _adapter(given: dict[str, Any]) -> str | None:
    """The adapter of its pages; None: only its number is known, by which no request asks."""
    name = given.get("lora_name")
    if name is None:
        return "" if given.get("lora_id") is None else None
    return name if isinstance(name, str) else None


def _salt(given: dict[str, Any], index: int) -> str | None:
    """The salt that its blocks depend on, besides tokens and adapter; None: they depend on something else."""
    rows = given.get("extra_keys")
    row = rows[index] if isinstance(rows, list) and index < len(rows) else None
    if not row:
        return ""
    if not isinstance(row, list):
        return None
    keys = list(row[1:] if row[0] == given.get("lora_name") else row)
    if not keys:
        return ""
    return keys[0] if len(keys) == 1 and isinstance(keys[0], str) else None


def _bits(tiers: int) -> list[int]:
    return [tier for tier in range(LAST_TIER + 1) if tiers >> tier & 1]


def _arrays(changes: Sequence[tuple[int, int]]) -> tuple[Fingerprints, Marks]:
    pages = np.array([page for page, _ in changes], np.uint64)
    return pages, np.array([mark for _, mark in changes], np.uint8)
