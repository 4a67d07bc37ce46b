"""The messages of the directory, between owners, readers and nodes; no I/O except in ``read_state``.

::

    FIND       namespace | number of the caller's placement u64 | fingerprints u64[]
    HOLD       namespace | closed u8 | keys 16 bytes[]
    FOUND      names u16, doubts u16, rows u32 | per name: length u8, UTF-8 | per doubt: placement u64, length u8,
               UTF-8 |
               pages u32[rows] | nodes u16[rows] | tiers u8[rows]
    ANNOUNCE   number of the node's daemon u64, stream u64, number u64, placement u64, pages u32, whole u8,
               length of the node's name u8 | name | fingerprints u64[] | marks u8[]
    ANNOUNCED  number of the next batch i64; -1: begin another stream | tombstones u32 that the node needs. If there are
               any, it sends BURY (``wire.object_messages``)
    LIST       first entry u64 | UTF-8 of the node's name
    LISTED     entries u64[], see ``directory.page_entries``; the last ones if fewer than ``LISTED_MAX``

A namespace is: fingerprint of the layout 16 bytes | lengths of salt and adapter u16, u16 | salt, adapter, UTF-8.
FIND asks an owner which nodes have pages. HOLD asks a node which pages it has. FOUND answers both.

A node's position in the names of FOUND is valid in that answer only. An empty name is not a node. Fingerprints in
ANNOUNCE and LISTED are veiled by their root (``model.prefix.veil_of``), which only nodes can do. Fingerprints in FIND
are not veiled: the owner veils them by the root that the caller names, after it has checked that the caller may read
it.

STATUS and STATE report a data server's part of the directory, in pages, because it may name many nodes. STATUS carries
the last name of the page before, or "". Every STATE has the same numbers, and the next ``PAGE_NAMES`` names of each
field in ``BY_NODE``; ``more`` says whether names follow.
"""

from __future__ import annotations

import json
import struct
import time
from functools import lru_cache
from typing import Any, Final

import numpy as np

from kvstore.cluster.data_connection import DataConnection
from kvstore.cluster.directory import GONE, AnnounceBatch, Doubt, Locations
from kvstore.cluster.lookup_plan import HOLD_PAGES_MAX
from kvstore.model.prefix import Fingerprints
from kvstore.model.replica import KEY_BYTES, TIERS
from kvstore.wire.data import FrameKind, Namespace, WireError

FIND_PAGES_MAX: Final = 1 << 16
NAME_BYTES_MAX: Final = 64
LISTED_MAX: Final = 1 << 16
_FOUND: Final = struct.Struct("<HHI")
_DOUBT: Final = struct.Struct("<QB")
_PLACEMENT: Final = struct.Struct("<Q")
_CLOSED: Final = struct.Struct("<B")
_NAMESPACE: Final = struct.Struct(f"<{KEY_BYTES}sHH")
_ANNOUNCE: Final = struct.Struct("<QQQQIBB")
_ANNOUNCED: Final = struct.Struct("<qI")
_LIST: Final = struct.Struct("<Q")

Body = bytes | bytearray | memoryview


@lru_cache(maxsize=256)
def _pack_namespace(namespace: Namespace) -> bytes:
    """Return the part at the start of FIND and HOLD that names the owner of the pages."""
    salt, adapter = namespace.salt.encode(), namespace.adapter.encode()
    return _NAMESPACE.pack(namespace.fingerprint, len(salt), len(adapter)) + salt + adapter


def _unpack_namespace(body: Body) -> tuple[Namespace, int]:
    """Return the owner of the pages, and where it ends in the body. Raises struct.error, ValueError."""
    fingerprint, salt_bytes, adapter_bytes = _NAMESPACE.unpack_from(body)
    at = _NAMESPACE.size + salt_bytes
    salt = bytes(body[_NAMESPACE.size : at]).decode()
    return Namespace(fingerprint, salt, bytes(body[at : at + adapter_bytes]).decode()), at + adapter_bytes


def pack_find(namespace: Namespace, pages: Fingerprints, placement: int) -> bytes:
    """Return the body of FIND. ``placement`` is the number of the placement by which the caller chose this owner."""
    assert len(pages) <= FIND_PAGES_MAX
    return _pack_namespace(namespace) + _PLACEMENT.pack(placement) + pages.astype("<u8", copy=False).tobytes()


def unpack_find(body: Body) -> tuple[Namespace, Fingerprints, int]:
    """Return the owner of the pages, their fingerprints, and the number of the placement. Raises WireError if the body
    is invalid."""
    try:
        namespace, at = _unpack_namespace(body)
        (placement,) = _PLACEMENT.unpack_from(body, at)
    except (struct.error, ValueError) as error:
        raise WireError(f"find: {error}") from None
    at += _PLACEMENT.size
    size = len(body) - at
    if size % 8 or size > 8 * FIND_PAGES_MAX:
        raise WireError(f"find: must be at most {FIND_PAGES_MAX} fingerprints (got {size} bytes)")
    return namespace, np.frombuffer(body, "<u8", size // 8, at).astype(np.uint64, copy=False), int(placement)


def pack_hold(namespace: Namespace, keys: list[bytes], closed: bool) -> bytes:
    """Return the body of HOLD. ``closed``: a node that has a page has all pages before it, so it may skip some."""
    assert len(keys) <= HOLD_PAGES_MAX
    return b"".join((_pack_namespace(namespace), _CLOSED.pack(closed), *keys))


def unpack_hold(body: Body) -> tuple[Namespace, list[bytes], bool]:
    """Return the owner of the pages, their keys, and whether the chain is closed. Raises WireError if the body is
    invalid."""
    try:
        namespace, at = _unpack_namespace(body)
        (closed,) = _CLOSED.unpack_from(body, at)
    except (struct.error, ValueError) as error:
        raise WireError(f"hold: {error}") from None
    raw = bytes(body[at + _CLOSED.size :])
    if len(raw) % KEY_BYTES or len(raw) > KEY_BYTES * HOLD_PAGES_MAX:
        raise WireError(f"hold: must be at most {HOLD_PAGES_MAX} keys (got {len(raw)} bytes)")
    return namespace, [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)], bool(closed)


def pack_found(locations: Locations) -> bytes:
    """Return the body of FOUND, with only the names that occur in rows."""
    occurs = np.zeros(len(locations.names), np.bool_)
    occurs[locations.nodes] = True
    nodes = (occurs.cumsum(dtype="<u2") - np.uint16(1))[locations.nodes]
    names = [locations.names[place].encode() for place in occurs.nonzero()[0].tolist()]
    head = _FOUND.pack(len(names), len(locations.doubts), len(locations.pages))
    head += b"".join([bytes([len(name)]) + name for name in names])
    for node, placement in locations.doubts:
        name = node.encode()
        head += _DOUBT.pack(placement, len(name)) + name
    return b"".join((head, locations.pages.astype("<u4").tobytes(), nodes.tobytes(), locations.tiers.tobytes()))


def unpack_found(body: Body, count: int) -> Locations:
    """Return the locations in a FOUND about ``count`` pages. Raises WireError if the body is invalid."""
    try:
        name_count, doubt_count, rows = _FOUND.unpack_from(body)
        at, names, doubts = _FOUND.size, list[str](), list[Doubt]()
        for _ in range(name_count):
            size = body[at]
            names.append(bytes(body[at + 1 : at + 1 + size]).decode())
            at += 1 + size
        for _ in range(doubt_count):
            placement, size = _DOUBT.unpack_from(body, at)
            at += _DOUBT.size + size
            doubts.append(Doubt(bytes(body[at - size : at]).decode(), placement))
        if len(body) != at + 7 * rows:
            raise ValueError(f"{len(body)} bytes")
        pages = np.frombuffer(body, "<u4", rows, at).astype(np.int64)
        nodes = np.frombuffer(body, "<u2", rows, at + 4 * rows).astype(np.int64)
        tiers = np.frombuffer(body, np.uint8, rows, at + 6 * rows)
    except (struct.error, ValueError, IndexError) as error:
        raise WireError(f"found: {error}") from None
    if rows and (int(pages.max()) >= count or int(nodes.max()) >= name_count or int(tiers.max()) >= len(TIERS)):
        raise WireError("found: names an unknown page, node or tier")
    return Locations(pages, nodes, tiers, names, tuple(doubts))


def pack_announce(batch: AnnounceBatch, daemon: int) -> bytes:
    """Return the body of ANNOUNCE. ``daemon`` is the number in the node's catalog entry."""
    name = batch.node.encode()
    head = _ANNOUNCE.pack(daemon, batch.stream, batch.number, batch.placement, len(batch.marks), batch.whole, len(name))
    return b"".join((head, name, batch.fingerprints.astype("<u8", copy=False).tobytes(), batch.marks.tobytes()))


def unpack_announce(body: Body) -> tuple[AnnounceBatch, int]:
    """Return the batch in an ANNOUNCE, and the number of the daemon. Raises WireError if the body is invalid."""
    try:
        daemon, stream, number, placement, pages, whole, size = _ANNOUNCE.unpack_from(body)
        at = _ANNOUNCE.size + size
        if not 0 < size <= NAME_BYTES_MAX or len(body) != at + 9 * pages:
            raise ValueError(f"{len(body)} bytes")
        node = bytes(body[_ANNOUNCE.size : at]).decode()
        fingerprints = np.frombuffer(body, "<u8", pages, at).astype(np.uint64)
        marks = np.frombuffer(body, np.uint8, pages, at + 8 * pages).copy()
    except (struct.error, ValueError) as error:
        raise WireError(f"announce: {error}") from None
    if pages and int((marks & ~np.uint8(GONE)).max()) >= len(TIERS):
        raise WireError("announce: names an unknown tier")
    return AnnounceBatch(node, stream, number, fingerprints, marks, bool(whole), placement), daemon


def pack_announced(number: int, tombstones: int = 0) -> bytes:
    """Return the body of ANNOUNCED. ``number`` is the number of the next batch; ``tombstones`` says how many tombstones
    the owner has that the node needs."""
    return _ANNOUNCED.pack(number, tombstones)


def unpack_announced(body: Body) -> tuple[int, int]:
    """Return the number of the next batch, and the number of tombstones. Raises WireError if the body is invalid."""
    if len(body) != _ANNOUNCED.size:
        raise WireError(f"announced: {len(body)} bytes")
    number, tombstones = _ANNOUNCED.unpack(body)
    return int(number), int(tombstones)


def pack_list(node: str, start: int) -> bytes:
    """Return the body of LIST."""
    return _LIST.pack(start) + node.encode()


def unpack_list(body: Body) -> tuple[str, int]:
    """Return the node and the first entry in a LIST. Raises WireError if the body is invalid."""
    try:
        (start,) = _LIST.unpack_from(body)
        return bytes(body[_LIST.size :][: NAME_BYTES_MAX + 1]).decode(), start
    except (struct.error, ValueError) as error:
        raise WireError(f"list: {error}") from None


def pack_listed(entries: Fingerprints) -> bytes:
    """Return the body of LISTED."""
    assert len(entries) <= LISTED_MAX
    return entries.astype("<u8", copy=False).tobytes()


def unpack_listed(body: Body) -> Fingerprints:
    """Return the entries in a LISTED. Raises WireError if the body is invalid or the entries do not ascend."""
    if len(body) % 8 or len(body) > 8 * LISTED_MAX:
        raise WireError(f"listed: must be at most {LISTED_MAX} entries (got {len(body)} bytes)")
    entries = np.frombuffer(body, "<u8").astype(np.uint64, copy=False)
    if not (entries[1:] > entries[:-1]).all():
        raise WireError("listed: the entries do not ascend")
    return entries


PAGE_NAMES: Final = 256  # names of at most 48 characters, in two fields: less than ``BODY_MAX`` of STATE
BY_NODE: Final = ("peers", "heard_ago_s")


def state_page(state: dict[str, Any], after: str) -> dict[str, Any]:
    """Return the page of ``state`` that follows the name ``after``."""
    names = sorted({name for field in BY_NODE for name in state[field] if name > after})
    page = frozenset(names[:PAGE_NAMES])
    return {
        **state,
        "peers": [name for name in state["peers"] if name in page],
        "heard_ago_s": {name: age_s for name, age_s in state["heard_ago_s"].items() if name in page},
        "last": names[:PAGE_NAMES][-1] if names else after,
        "more": len(names) > PAGE_NAMES,
    }


def read_state(connection: DataConnection, within_s: float) -> dict[str, Any]:
    """Read the state of a data server's part of the directory, page by page. The numbers are those of the last page.

    Raises:
        KVStoreError: as ``DataConnection.call``; WireError if a page is invalid.
    """
    deadline_s = time.monotonic() + within_s
    peers: list[str] = []
    heard_ago_s: dict[str, float] = {}
    last = ""
    while True:
        body = connection.call(FrameKind.STATUS, last.encode(), reply=FrameKind.STATE, deadline_s=deadline_s)
        try:
            page = json.loads(body)
            peers += page["peers"]
            heard_ago_s |= page["heard_ago_s"]
            before, last, more = last, str(page.pop("last")), page.pop("more")
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
            raise WireError(f"state: a page is invalid ({error!r})") from None
        if not more:
            return {**page, "peers": peers, "heard_ago_s": heard_ago_s}
        if last <= before:
            raise WireError(f"state: the page after {before!r} ends at {last!r}")
