"""Requests and hints about pages to the local node: bring to DRAM, was read, is damaged, verify.

Tells the node which tenant the pages of a root belong to, so that it can count them per tenant.
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
from kvstore.client.local.node import Mapped
from kvstore.client.local.verify_hit import Run, address_parts
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, FrameState, Status, word_of
from kvstore.shm.index import IndexDamaged
from kvstore.wire.control import BATCH_MAX, HINT, NO_REPLY, Op, pack_json, unpack_json

PAUSE_MIN_S, PAUSE_MAX_S = 0.002, 0.02  # between two checks whether pages have arrived
# Hints are not sent to a node without a heartbeat for this long, nor for this long after one that it did not accept: a
# read must never wait for a daemon that is down.
SILENT_NS: Final = 2_000_000_000
_SCRUB_S: Final = 1.0
_INDEXED_S: Final = 1.0
_ASK_S_MIN: Final = 0.2  # minimum wait for an answer, even close to the deadline


def bring(mapped: Mapped, keys: Keys, closed: bool, deadline: float) -> None:
    """Ask the node to bring to DRAM those leading pages that only lower tiers have.

    Returns when that is done or refused, or at ``deadline`` (``time.monotonic``). The index then shows what is in DRAM.

    Raises:
        NodeUnavailable, DeadlineExceeded: the node did not answer in time.
    """
    rest = keys[stored_pages(mapped, keys, closed)[0] :]
    for reader in reversed(list(mapped.lower.values())):  # a page comes up tier by tier
        for part in _parts(b"".join(locate(mapped, reader, rest, closed))):
            pause_s = PAUSE_MIN_S
            while (status := _ordered(mapped, part, deadline)) == Status.BUSY and time.monotonic() < deadline:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
            if status != Status.OK:
                return


def await_saved(mapped: Mapped, hashes: list[bytes], addresses: npt.NDArray[np.void], deadline: float) -> int:
    """Wait until these pages, which the node is saving from these reserved frames, are stored in either tier or will
    not be, or until ``deadline`` (``time.monotonic``). Returns how many are stored.
    """
    pause_s = PAUSE_MIN_S
    while True:
        late = time.monotonic() >= deadline
        if not any(_is_reserved(mapped, *address) for address in addresses.tolist()):
            # No save is in progress any more. The index is updated after the records.
            deadline = min(deadline, time.monotonic() + _INDEXED_S)
        try:
            found = zip(*(mapped.index.find_many(each.tier, hashes) for each in mapped.tiers), strict=True)
            stored = sum(any(tiers) for tiers in found)
        except IndexDamaged:
            stored = 0
        if stored == len(hashes) or late:
            return stored
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


def _is_reserved(mapped: Mapped, number: int, frame: int, generation: int) -> bool:
    extent = mapped.dram.extent(number)
    return extent is not None and int(extent.words[frame]) == word_of(generation, FrameState.RESERVED)


def wish(mapped: Mapped, keys: Keys, closed: bool) -> None:
    """As ``bring``, as a hint: does not wait and raises nothing."""
    for reader in reversed(list(mapped.lower.values())):
        for part in _parts(b"".join(locate(mapped, reader, keys, closed))):
            _tell(mapped, Op.PREFETCH, part, 0)


def tell_read(mapped: Mapped, addresses: bytes) -> None:
    """Tell the node that these pages were read from a lower tier, so that it can promote them. Raises nothing."""
    for part in _parts(addresses):
        _tell(mapped, Op.PREFETCH, part, HINT)


def wish_shown(mapped: Mapped, key: bytes, looked: bytes) -> bytes:
    """Ask the node to take in published pages, if the page of that key is among them. Does not wait and raises nothing.
    Returns the new ``looked`` position for the next call, so that nothing is asked twice."""
    waits, looked = mapped.published.waits(key, looked)
    if waits:
        _tell(mapped, Op.DRAIN, b"", 0)
    return looked


def tell_damaged(mapped: Mapped, address: bytes) -> None:
    """Ask the node to check a page whose bytes are invalid; it drops damaged pages. Raises nothing."""
    if heard_from(mapped):
        with contextlib.suppress(Unavailable, InvalidRequest):
            mapped.channel.request(Op.SCRUB, count=1, body=(address,), timeout_s=_SCRUB_S).result()


def have_verified(mapped: Mapped, runs: list[Run]) -> bool:
    """Ask the node to verify these DRAM pages and record their checksums. Returns False if it cannot now, or if some
    are invalid."""
    try:
        for part in address_parts(runs):
            count = len(part) // ADDRESS_BYTES
            reply = mapped.exchange(Op.SCRUB, count=count, body=(part,))
            if any(status != Status.OK for status in reply.body[:count]):
                return False
    except Unavailable:
        return False
    return True


def _ordered(mapped: Mapped, part: bytes, deadline: float) -> int:
    """Return the state of these pages: BUSY while one is being moved; then OK, or why the first missing page is
    missing."""
    count = len(part) // ADDRESS_BYTES
    timeout_s = max(_ASK_S_MIN, deadline - time.monotonic())
    message = mapped.exchange(Op.PREFETCH, count=count, a=1, body=(part,), timeout_s=timeout_s)
    statuses = bytes(message.body[:count])
    if message.op == Status.BUSY or Status.BUSY in statuses:
        return Status.BUSY
    return next((status for status in statuses if status != Status.OK), Status.OK)


def _tell(mapped: Mapped, op: Op, part: bytes, flags: int) -> None:
    """Send a hint if it can be sent at once; otherwise send none for a while."""
    if heard_from(mapped):
        count = len(part) // ADDRESS_BYTES
        try:
            mapped.channel.request(op, count=count, flags=NO_REPLY | flags, body=(part,), timeout_s=0.0)
        except (Unavailable, InvalidRequest):  # InvalidRequest: the store was closed
            mapped.tell_ns = time.monotonic_ns() + SILENT_NS


def heard_from(mapped: Mapped) -> bool:
    """Return whether the node had a recent heartbeat, and accepted the last hint."""
    now_ns, heartbeat_ns = time.monotonic_ns(), mapped.header.heartbeat_ns  # 0: it is just starting
    return now_ns >= mapped.tell_ns and (not heartbeat_ns or now_ns - heartbeat_ns < SILENT_NS)


def _parts(raw: bytes) -> Iterator[bytes]:
    step = BATCH_MAX * ADDRESS_BYTES
    return (raw[start : start + step] for start in range(0, len(raw), step))


LAYOUT_BYTES_MAX = 4096  # of a layout as JSON: bounds what the node remembers
NAMED_MAX = 1 << 14  # named roots that a client remembers; naming a root again is harmless
_QUIETLY = b"?"


def name_root(
    mapped: Mapped,
    root: bytes,
    layout: Layout,
    salt: str,
    adapter: str,
    quietly: bool = False,
    timeout_s: float | None = None,
) -> None:
    """Tell a node the tenant and layout of a root, once, and again if the node has forgotten names since
    (``Header.names_forgotten``). With the layout, an operator can name prompts without knowing it.

    ``quietly``: only if it can be sent without waiting for the node; a later write sends it again.
    """
    if _is_news(mapped, root, quietly):
        about = {"fingerprint": layout.fingerprint.hex(), "model": layout.model, "salt": salt, "adapter": adapter}
        whole = asdict(layout)
        more = {"layout": whole} if len(pack_json(whole)) <= LAYOUT_BYTES_MAX else {}
        _say(mapped, root, {**about, **more}, quietly, timeout_s)


def name_objects(mapped: Mapped, root: bytes, salt: str, quietly: bool = False, timeout_s: float | None = None) -> None:
    """As ``name_root``, for the root of a tenant's objects."""
    if _is_news(mapped, root, quietly):
        _say(mapped, root, {"salt": salt, "objects": True}, quietly, timeout_s)


def _is_news(mapped: Mapped, root: bytes, quietly: bool) -> bool:
    named, forgotten = mapped.named, mapped.header.names_forgotten
    if named.get(root) == forgotten or (quietly and named.get(root + _QUIETLY) == forgotten):
        return False
    return not quietly or heard_from(mapped)


def _say(mapped: Mapped, root: bytes, about: dict[str, Any], quietly: bool, timeout_s: float | None = None) -> None:
    body = (pack_json({"call": "root", "root": root.hex(), **about}),)
    forgotten = mapped.header.names_forgotten  # read first: a name forgotten after this is sent again
    if len(mapped.named) >= NAMED_MAX:
        mapped.named.clear()
        mapped.limited.clear()  # each is added with a name, and writers send a cleared name again
    if quietly:
        with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed
            mapped.channel.request(Op.ADMIN, flags=NO_REPLY, body=body, timeout_s=0.0)
            mapped.named[root + _QUIETLY] = forgotten  # the node may not have received it
    else:
        said = unpack_json(mapped.exchange(Op.ADMIN, body=body, timeout_s=timeout_s).body)
        (mapped.limited.add if said.get("limited") else mapped.limited.discard)(root)
        mapped.named[root] = forgotten
