"""``ChainPart``: consecutive stored pages of one chain, described so that another node can ask for them.

A record in memory has everything that proves its page. On NVMe the token ids are in the header in front of the page, so
those headers are read, without the node's mutex.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from kvstore.model.objects import is_object_class
from kvstore.model.prefix import Keys
from kvstore.model.replica import EXTRA, IDENTITY_HEAD_BYTES, KEY, Address, FrameClass, Tier, hint_byte_in
from kvstore.node.node import Node
from kvstore.node.nvme_pages import identity_row
from kvstore.node.performer import Performer
from kvstore.shm.records import ExtentTable
from kvstore.state.node_state import NodeState
from kvstore.wire.copy_order import CopyOrder
from kvstore.wire.data import ChainQuery

ORDER_BYTES: Final = 16 << 20  # bytes of pages in an order, or one page if that is larger
ORDER_PAGES: Final = 256
TIERS_READ: Final = (Tier.DRAM, Tier.NVME)


@dataclass(frozen=True)
class ChainPart:
    """Consecutive stored pages of one chain.

    Attributes:
        parent: the key of the page before the first one, or the root.
        siblings: how many stored pages have this parent; 0 if the parent is not in memory.
        about: the name of the root; None if no client has named it.
        rows: the identity row of each page.
        hints: the hint byte of each page.
    """

    root: bytes
    parent: bytes
    siblings: int
    about: dict[str, Any] | None
    frame_class: FrameClass
    rows: list[bytes]
    hints: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the pages."""
        return len(self.rows) * self.frame_class.page_bytes

    def order(self, source: str) -> CopyOrder:
        """Return the order to copy these pages from the node ``source``. The root must have a name."""
        about, shape = self.about, self.frame_class
        assert about is not None, "the caller has checked it"
        layout = about.get("layout") or {}
        closed = layout.get("attention", "full") == "full"
        chain = ChainQuery(bytes.fromhex(about["fingerprint"]), about["salt"], about["adapter"], shape, closed)
        keys = [row[KEY] for row in self.rows]
        tokens = np.frombuffer(b"".join([row[IDENTITY_HEAD_BYTES:] for row in self.rows]), "<u4")
        extras: list[bytes] | None = [row[EXTRA] for row in self.rows]
        if not any(map(any, extras or ())):
            extras = None
        parts = shape.page_tokens, self.root, self.parent, keys, tokens, extras
        return CopyOrder(source, about, chain, Keys(*parts, hints=self.hints))


@dataclass(slots=True)
class _Located:
    """Where the pages of a part are: for each page its table, address, and row (None if it is only in a header)."""

    siblings: int
    about: dict[str, Any] | None
    pages: list[tuple[ExtentTable, Address, bytes | None]]
    hints: bytes
    lineage: tuple[bytes, bytes, bytes]


def read_part(node: Node, keys: list[bytes]) -> ChainPart | int:
    """Return as many of these consecutive pages as an order may have. If the first pages are not stored, return their
    number instead.

    Raises:
        Unavailable: the node is stopping.
        OSError: a device is not responding.
    """
    located = node.look(partial(_locate, keys=keys))
    if isinstance(located, int):
        return located
    rows: list[bytes] = []
    for table, address, row in located.pages:
        if row is None:
            row = _row_on_nvme(node, table, address)
        if row is None:
            break
        rows.append(row)
    if not rows:
        return 1  # the header of the first page is damaged, or the page has just left
    _, root, parent = located.lineage
    frame_class = located.pages[0][0].frame_class
    return ChainPart(
        *(root, parent, located.siblings, located.about, frame_class, rows, located.hints[: len(rows)]),
    )


def _row_on_nvme(node: Node, table: ExtentTable, address: Address) -> bytes | None:
    if node.nvme is None:
        return None
    header = node.nvme.header(table, address.frame)
    if isinstance(header, str) or header.address != address:
        return None
    return identity_row(header).tobytes()


def _locate(performer: Performer, state: NodeState, keys: list[bytes]) -> _Located | int:
    """Find the leading pages, which are of one class. If the first pages are not stored, return their number."""
    pages: list[tuple[ExtentTable, Address, bytes | None]] = []
    hints = bytearray()
    for number, key in enumerate(keys[:ORDER_PAGES]):
        address = find(performer, key)
        if address is None:
            if not pages and number + 1 < len(keys):
                continue
            break
        if number > len(pages):
            return number  # the pages before this one are gone
        table = performer.tables[address.extent]
        shape = table.frame_class
        is_full = pages and (shape != pages[0][0].frame_class or (len(pages) + 1) * shape.page_bytes > ORDER_BYTES)
        if is_full or is_object_class(shape):
            break
        in_memory = table.fmt.tail
        pages.append((table, address, table.record(address.frame).identity if in_memory else None))
        hints.append(hint_byte_in(table.info(address.frame)))
    if not pages:
        return min(len(keys), ORDER_PAGES)
    table, address, _ = pages[0]
    lineage = table.lineage(address.frame)
    _, root, parent = lineage
    before = performer.index.find(Tier.DRAM, parent) if parent != root else None
    siblings = state.segment.extents[before.extent].children[before.frame] if before is not None else 0
    name = state.tenants.named.get(root)
    return _Located(siblings, name.about if name is not None else None, pages, bytes(hints), lineage)


def find(performer: Performer, key: bytes) -> Address | None:
    """Return the address of a page in the fastest tier that has it. The caller holds the node's mutex."""
    for tier in TIERS_READ:
        address = performer.index.find(tier, key) if tier in performer.stores else None
        if address is not None:
            return address
    return None


def ancestors(performer: Performer, state: NodeState, key: bytes) -> list[bytes]:
    """Return the keys of a page and of all pages before it, the first page of the chain first. The caller holds the
    node's mutex."""
    chain: list[bytes] = []
    while (address := find(performer, key)) is not None:
        chain.append(key)
        _, root, parent = performer.tables[address.extent].lineage(address.frame)
        if parent == root:
            break
        key = parent
    return chain[::-1]
