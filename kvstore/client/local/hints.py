"""Requests and hints to the local node: promote pages to DRAM, a page was read, a page is damaged, verify pages.

A request waits for its reply. A hint is sent only if that needs no waiting, and gets no reply. A node that is silent
gets no hints for a while, so that reads never wait for a daemon that is down.

The module also sends the node the tenant and layout of each root, so that it can count pages per tenant.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.client.local.index_lookup import locate, stored_pages
from kvstore.client.local.node import MappedNode
from kvstore.client.local.verify_hit import Run, address_parts
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, FrameState, Status, word_of
from kvstore.shm.index import IndexDamaged
from kvstore.wire.control import BATCH_MAX, HINT, NO_REPLY, Op, pack_json, unpack_json

PAUSE_MIN_S, PAUSE_MAX_S = 0.002, 0.02  # between two checks whether pages have arrived
# A node gets no hints if its last heartbeat is older than this, nor for this time after a hint that it did not accept.
SILENT_NS: Final = 2_000_000_000
_SCRUB_S: Final = 1.0  # longest wait for the check of a damaged page
_INDEX_S: Final = 1.0  # longest time from the end of a save until the index shows it
_REPLY_S_MIN: Final = 0.2  # shortest wait for a reply, even close to the deadline


def promote(mapped: MappedNode, keys: Keys, closed: bool, deadline: float) -> None:
    """Ask the node to promote the leading pages of ``keys`` that are only in lower tiers to DRAM, and wait for it.

    Returns when the node has promoted them or refuses, or at ``deadline`` (``time.monotonic``). Afterwards the index
    shows which pages are in DRAM.

    Raises:
        NodeUnavailable, DeadlineExceeded: the node did not answer in time.
    """
    rest = keys[stored_pages(mapped, keys, closed)[0] :]
    for reader in reversed(list(mapped.lower.values())):  # a page is promoted one tier at a time
        for part in _request_parts(b"".join(locate(mapped, reader, rest, closed))):
            pause_s = PAUSE_MIN_S
            while (status := _request_promotion(mapped, part, deadline)) == Status.BUSY and time.monotonic() < deadline:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
            if status != Status.OK:
                return


def wait_for_saves(mapped: MappedNode, hashes: list[bytes], addresses: npt.NDArray[np.void], deadline: float) -> int:
    """Wait for pages that the node is saving to lower tiers, and return how many are stored.

    The wait ends when all pages are stored, soon after no save is in progress, or at ``deadline``
    (``time.monotonic``).

    Args:
        hashes: the keys of the pages.
        addresses: the reserved frames from which the node saves the pages.
    """
    pause_s = PAUSE_MIN_S
    while True:
        is_late = time.monotonic() >= deadline
        if not any(_is_reserved(mapped, *address) for address in addresses.tolist()):
            # The save is no longer in progress. The node updates the index after the records.
            deadline = min(deadline, time.monotonic() + _INDEX_S)
        try:
            entries = zip(*(mapped.index.find_many(reader.tier, hashes) for reader in mapped.tiers), strict=True)
            stored = sum(any(page_entries) for page_entries in entries)
        except IndexDamaged:
            stored = 0
        if stored == len(hashes) or is_late:
            return stored
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


def _is_reserved(mapped: MappedNode, number: int, frame: int, generation: int) -> bool:
    extent = mapped.dram.extent(number)
    return extent is not None and int(extent.words[frame]) == word_of(generation, FrameState.RESERVED)


def hint_promote(mapped: MappedNode, keys: Keys, closed: bool) -> None:
    """Send the hint that these pages should be promoted to DRAM. Does not wait, and raises nothing."""
    for reader in reversed(list(mapped.lower.values())):
        for part in _request_parts(b"".join(locate(mapped, reader, keys, closed))):
            _send_hint(mapped, Op.PREFETCH, part, 0)


def hint_read(mapped: MappedNode, addresses: bytes) -> None:
    """Send the hint that these pages were read from a lower tier, after which the node may promote them. Does not wait,
    and raises nothing."""
    for part in _request_parts(addresses):
        _send_hint(mapped, Op.PREFETCH, part, HINT)


def hint_drain(mapped: MappedNode, key: bytes, positions: bytes) -> bytes:
    """Send the hint to take in published pages, if the page of ``key`` is one of them. Does not wait, and raises
    nothing.

    Args:
        positions: the result of the last call, or b"". If the log has not changed since, no hint is sent.
    """
    is_pending, positions = mapped.published.check_pending(key, positions)
    if is_pending:
        _send_hint(mapped, Op.DRAIN, b"", 0)
    return positions


def report_damaged(mapped: MappedNode, address: bytes) -> None:
    """Ask the node to check a page whose bytes are invalid, and wait for it. The node drops a damaged page. Raises
    nothing."""
    if accepts_hints(mapped):
        with contextlib.suppress(Unavailable, InvalidRequest):
            mapped.channel.request(Op.SCRUB, count=1, body=(address,), timeout_s=_SCRUB_S).result()


def request_checksums(mapped: MappedNode, runs: list[Run]) -> bool:
    """Ask the node to verify these DRAM pages and record their checksums. Return False if the node is not responding,
    or if a page is invalid."""
    try:
        for part in address_parts(runs):
            count = len(part) // ADDRESS_BYTES
            reply = mapped.exchange(Op.SCRUB, count=count, body=(part,))
            if any(status != Status.OK for status in reply.body[:count]):
                return False
    except Unavailable:
        return False
    return True


def _request_promotion(mapped: MappedNode, part: bytes, deadline: float) -> int:
    """Ask the node to promote the pages at these addresses, and return their status. The status is BUSY while a page is
    being promoted, OK when all are promoted, and otherwise the reason why the first missing page cannot be."""
    count = len(part) // ADDRESS_BYTES
    timeout_s = max(_REPLY_S_MIN, deadline - time.monotonic())
    message = mapped.exchange(Op.PREFETCH, count=count, a=1, body=(part,), timeout_s=timeout_s)
    statuses = bytes(message.body[:count])
    if message.op == Status.BUSY or Status.BUSY in statuses:
        return Status.BUSY
    return next((status for status in statuses if status != Status.OK), Status.OK)


def _send_hint(mapped: MappedNode, op: Op, part: bytes, flags: int) -> None:
    """Send a hint if that needs no waiting. Otherwise send no hints for ``SILENT_NS``."""
    if accepts_hints(mapped):
        count = len(part) // ADDRESS_BYTES
        try:
            mapped.channel.request(op, count=count, flags=NO_REPLY | flags, body=(part,), timeout_s=0.0)
        except (Unavailable, InvalidRequest):  # InvalidRequest: the store was closed
            mapped.no_hints_until_ns = time.monotonic_ns() + SILENT_NS


def want_copies(mapped: MappedNode, keys: list[bytes], owed: bool) -> None:
    """Ask the node to note that stored pages, consecutive in one chain, want a second copy on another node. Does not
    wait for it. Raises nothing.

    Args:
        owed: no other node has a copy yet.
    """
    with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed
        for start in range(0, len(keys), BATCH_MAX):
            part = keys[start : start + BATCH_MAX]
            mapped.channel.request(Op.OWED, count=len(part), a=1 if owed else 2, flags=NO_REPLY, body=part)


def accepts_hints(mapped: MappedNode) -> bool:
    """Return whether the node had a recent heartbeat, and accepted the last hint."""
    now_ns, heartbeat_ns = time.monotonic_ns(), mapped.header.heartbeat_ns  # 0: the node is just starting
    return now_ns >= mapped.no_hints_until_ns and (not heartbeat_ns or now_ns - heartbeat_ns < SILENT_NS)


def _request_parts(raw: bytes) -> Iterator[bytes]:
    """Split concatenated addresses into the parts of several requests."""
    step = BATCH_MAX * ADDRESS_BYTES
    return (raw[start : start + step] for start in range(0, len(raw), step))


LAYOUT_BYTES_MAX = 4096  # longest layout (as JSON) that is sent, which bounds the memory that the node needs for names
NAMED_MAX = 1 << 14  # named roots that a client remembers; naming a root twice does no harm
_AS_HINT = b"?"  # suffix of a root that was named by a hint only


def name_root(
    mapped: MappedNode,
    root: bytes,
    layout: Layout,
    salt: str,
    adapter: str,
    as_hint: bool = False,
    timeout_s: float | None = None,
) -> None:
    """Send the node the tenant and layout of a root, unless it was sent before. It is sent again if the node has
    forgotten names since (``Header.names_forgotten``). An operator can then name prompts without knowing the layout.

    Args:
        as_hint: send it only if that needs no waiting. A later write sends it again, since the hint may be lost.
    """
    if _must_name(mapped, root, as_hint):
        name = {"fingerprint": layout.fingerprint.hex(), "model": layout.model, "salt": salt, "adapter": adapter}
        fields = asdict(layout)
        layout_entry = {"layout": fields} if len(pack_json(fields)) <= LAYOUT_BYTES_MAX else {}
        _send_name(mapped, root, {**name, **layout_entry}, as_hint, timeout_s)


def name_as(mapped: MappedNode, root: bytes, about: dict[str, Any], timeout_s: float) -> None:
    """Send the node the name that another node has for a root, under the same conditions as ``name_root``. Raises
    InvalidRequest if it is not the name of this root."""
    if _must_name(mapped, root, as_hint=False):
        _send_name(mapped, root, about, as_hint=False, timeout_s=timeout_s)


def name_objects(
    mapped: MappedNode, root: bytes, salt: str, as_hint: bool = False, timeout_s: float | None = None
) -> None:
    """Send the node the tenant of a root of objects, under the same conditions as ``name_root``."""
    if _must_name(mapped, root, as_hint):
        _send_name(mapped, root, {"salt": salt, "objects": True}, as_hint, timeout_s)


def _must_name(mapped: MappedNode, root: bytes, as_hint: bool) -> bool:
    if mapped.is_named(root) or (as_hint and mapped.is_named(root + _AS_HINT)):
        return False
    return not as_hint or accepts_hints(mapped)


def _send_name(
    mapped: MappedNode, root: bytes, name: dict[str, Any], as_hint: bool, timeout_s: float | None = None
) -> None:
    body = (pack_json({"call": "root", "root": root.hex(), **name}),)
    forgotten = mapped.header.names_forgotten  # read before the request, so a name forgotten after it is sent again
    if len(mapped.named) >= NAMED_MAX:
        mapped.named.clear()
        mapped.limited.clear()  # a root is added together with its name, which the next write sends again
    if as_hint:
        with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed
            mapped.channel.request(Op.ADMIN, flags=NO_REPLY, body=body, timeout_s=0.0)
            mapped.named[root + _AS_HINT] = forgotten
    else:
        reply = unpack_json(mapped.exchange(Op.ADMIN, body=body, timeout_s=timeout_s).body)
        (mapped.limited.add if reply.get("limited") else mapped.limited.discard)(root)
        mapped.named[root] = forgotten
