"""EventLog: the recent changes to a node's pages, for readers that follow the node.

The log is a ring of bounded size. One thread at a time appends, under the node's mutex; any thread reads. An entry is a
batch: the pages of one instruction. Appending is one store into the ring. It wakes no reader, so it costs a put almost
nothing. A reader that waits for new entries looks every ``LOOK_S``. A reader that is too slow receives the number of
entries that were overwritten (``lost``).

A daemon's numbers begin at its start time in microseconds, and are higher than all numbers of earlier daemons. Its
first entry is ``cleared``. So a reader that followed an earlier daemon continues with this one, and discards its pages.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from kvstore.errors import InvalidRequest
from kvstore.model.replica import KEY_BYTES, Tier, roots_of
from kvstore.state.interfaces import Rows

SLOTS: Final = 16384  # entries in the ring
PAGES_MAX: Final = 65536  # pages in all entries of the ring
EVENT_PAGES_MAX: Final = 512  # pages per entry, so that it fits into a message; a larger batch has several entries
LOOK_S: Final = 0.01
LIMIT_MAX: Final = 10000
WAIT_S_MAX: Final = 1.0
ANSWER_BYTES: Final = 100 * 1024  # bytes of the lists in an answer; a local message has 128 KiB
ANSWER_PAGES_MAX: Final = 1024  # 36 bytes of JSON each
ANSWER_EVENTS_MAX: Final = 400  # about 200 bytes of JSON each, without their pages
TENANTS_MAX: Final = 64  # tenants per event in JSON ...
TENANT_CHARS_MAX: Final = 64  # ... and characters of each name

SEALED, DEMOTED, PROMOTED, EVICTED, DROPPED, CLEARED = (
    *("sealed", "demoted", "promoted"),
    *("evicted", "dropped", "cleared"),
)
STORED: Final = (SEALED, DEMOTED, PROMOTED)

# Cause of a seal -> kind and reason.
_SEALS: Final = {
    "put": (SEALED, ""),
    "copy": (SEALED, ""),
    "through": (SEALED, ""),
    "save": (DEMOTED, ""),
    "load": (PROMOTED, ""),
    "scan": (SEALED, "found"),
}


def fit_into_message(items: Iterable[Any], bytes_max: int = ANSWER_BYTES) -> list[Any]:
    """Return the first of ``items`` that take at most ``bytes_max`` as JSON, but at least one."""
    first: list[Any] = []
    bytes_left = bytes_max
    for item in items:
        bytes_left -= len(json.dumps(item)) + 2
        if first and bytes_left < 0:
            break
        first.append(item)
    return first


class PageEvent(NamedTuple):
    """A change to pages, the same for all of them, from one decision.

    Attributes:
        seq: number of the event. Numbers are consecutive for as long as a daemon runs.
        time_ns: since the epoch.
        kind: "sealed" (stored in ``tier``), "demoted" (saved to NVMe; the copy in DRAM stays until it is evicted),
            "promoted" (loaded into DRAM; the copy on NVMe stays), "evicted" (removed from ``tier``), "dropped" (removed
            from ``tier`` because of damage or a deletion), "cleared" (earlier events are void; ``keys`` is empty).
        reason: for "evicted" one of "space", "reclaim" (the extent was reclaimed), "request", "quota" and "group" (its
            group of objects has lost a member); for "dropped" what was damaged, or "deleted"; for "sealed" the word
            "found" if the page was found on NVMe at startup; for "cleared" the word "start".
        keys: 16 bytes each.
        roots: one root per page, or one for all pages.
        spans: one span per page, see ``model.prefix``.
    """

    seq: int
    time_ns: int
    kind: str
    tier: Tier
    reason: str
    keys: list[bytes]
    roots: list[bytes]
    spans: Sequence[int] = ()


_Entry = tuple[int, int, str, Tier, str, bytes, bytes, "array[int]"]
"""A ``PageEvent`` with its keys and roots joined. As separate objects they would take four times the memory."""


def _pages_in(entry: _Entry) -> int:
    return len(entry[5]) // KEY_BYTES


def _split(names: bytes) -> list[bytes]:
    return [names[at : at + KEY_BYTES] for at in range(0, len(names), KEY_BYTES)]


class EventLog:
    """The log of one start of a node. One thread at a time appends; any thread reads.

    Args:
        first_seq: number of the first entry. None means the current time in microseconds.
        staged: readers see new entries only after ``publish``.

    Attributes:
        last: number of the newest entry that readers see.
        salt_of: returns the tenant's salt of a root, for ``describe``.
        first_of_run: number of the first entry.
    """

    def __init__(self, first_seq: int | None = None, staged: bool = False) -> None:
        self._staged = staged
        self._ring: list[_Entry | None] = [None] * SLOTS
        self.salt_of: Callable[[bytes], str] = lambda root: ""
        self.first_of_run = time.time_ns() // 1000 if first_seq is None else first_seq
        self._first = self._next = self.first_of_run  # the ring has the entries from _first to before _next
        self._pages = 0
        self.append(CLEARED, Tier.DRAM, "start", [])
        self.publish()

    # --- writing ----------------------------------------------------------------------------------------------------

    def append_sealed(
        self,
        cause: str,
        tier: Tier,
        keys: list[bytes],
        root: bytes,
        rows: Rows | None = None,
        spans: Sequence[int] = (),
    ) -> None:
        """Append an event: these pages were stored in ``tier``.

        Args:
            cause: why they were stored, see ``WriteSealed``.
            root: root of the first page. If clients put the pages, it is the root of all of them.
            rows: identity rows of the pages, which have the other roots.
        """
        kind, reason = _SEALS[cause]
        roots = [root]
        if cause != "put" and rows is not None:
            roots = roots_of(rows)
        self.append(kind, tier, reason, keys, roots, spans)

    def append(
        self,
        kind: str,
        tier: Tier,
        reason: str,
        keys: list[bytes],
        roots: Sequence[bytes] = (),
        spans: Sequence[int] = (),
    ) -> None:
        """Append an event. The arguments are as in ``PageEvent``. Many pages make several entries."""
        if len(keys) > EVENT_PAGES_MAX:
            for start in range(0, len(keys), EVENT_PAGES_MAX):
                part = slice(start, start + EVENT_PAGES_MAX)
                part_roots = roots[part] if len(roots) > 1 else roots
                self.append(kind, tier, reason, keys[part], part_roots, spans[part])
            return
        seq = self._next
        if seq - self._first == SLOTS:
            self._remove_oldest()
        self._ring[seq % SLOTS] = (
            *(seq, time.time_ns(), kind, tier, reason),
            b"".join(keys),
            b"".join(roots),
            array("Q", spans),
        )
        self._next = seq + 1
        if not self._staged:
            self.last = seq
        self._pages += len(keys)
        while self._pages > PAGES_MAX:
            self._remove_oldest()

    def publish(self) -> None:
        """Let readers see all entries."""
        self.last = self._next - 1

    def _remove_oldest(self) -> None:
        slot = self._first % SLOTS
        entry = self._ring[slot]
        assert entry is not None, "entries from _first on are in the ring"
        self._first += 1  # before the removal, so that a reader does not expect the entry
        self._ring[slot] = None
        self._pages -= _pages_in(entry)

    # --- reading ----------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> int:
        """Number of entries appended since the start."""
        return self._next - self.first_of_run

    @property
    def overwritten(self) -> int:
        """Number of entries that were removed from the ring. A reader that follows closely has read them before."""
        return self._first - self.first_of_run

    def since(
        self, after: int | None, limit: int = 1000, pages_max: int = PAGES_MAX
    ) -> tuple[list[PageEvent], int, int]:
        """Return events after number ``after``, oldest first: at most ``limit``, with at most ``pages_max`` pages, but
        at least one event.

        Args:
            after: number of an event. If it is None, return no events, only the number to continue with. If it is from
                an earlier daemon or was never used, return events from the first one of this daemon, which is
                "cleared".

        Returns (events, ``after`` for the next call, number of events in between that were overwritten).
        """
        last = self.last
        if after is None or after == last:
            return [], last, 0
        if not self.first_of_run <= after < last:
            after = self.first_of_run - 1
        events: list[PageEvent] = []
        pages = lost = 0
        seq = after + 1
        while seq <= last and len(events) < limit:
            entry = self._ring[seq % SLOTS]
            if entry is None or entry[0] != seq:  # overwritten, perhaps during this call: the earlier ones are lost too
                lost, events, pages = self._first - after - 1, [], 0
                seq = self._first
                continue
            if events and pages + _pages_in(entry) > pages_max:
                break
            events.append(PageEvent(*entry[:5], _split(entry[5]), _split(entry[6]), entry[7]))
            pages += _pages_in(entry)
            seq += 1
        return events, seq - 1, lost

    def wait(self, after: int | None, timeout_s: float) -> bool:
        """Wait for an event after this number (None: after the newest event). Return False if no event comes in
        time."""
        after = self.last if after is None else after
        deadline_s = time.monotonic() + timeout_s
        while self.last == after:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                return False
            time.sleep(min(LOOK_S, remaining_s))
        return True

    def describe(self, event: PageEvent) -> dict[str, Any]:
        """Return an event for JSON: keys in hex, and ``tenants``, the salts of the pages' tenants, in place of roots.

        If there are several tenants, ``whose`` has, for each page, its tenant's index in ``tenants``, or -1 if the
        tenant is not listed.
        """
        salts = {root: self.salt_of(root)[:TENANT_CHARS_MAX] for root in dict.fromkeys(event.roots)}
        tenants = list(dict.fromkeys(salts.values()))[:TENANTS_MAX]
        document = {**event._asdict(), "tier": str(event.tier), "keys": [key.hex() for key in event.keys]}
        del document["roots"], document["spans"]
        document["tenants"] = tenants
        if len(tenants) > 1:
            indexes = {salt: index for index, salt in enumerate(tenants)}
            document["whose"] = [indexes.get(salts[root], -1) for root in event.roots]
        return document


def answer(log: EventLog, request: dict[str, Any]) -> dict[str, Any]:
    """Answer the admin call ``events``: {"after": number or None, "limit": 1..10000, "wait_s": 0..1} -> {"events",
    "next", "lost"}. Events that do not fit into the message come with the next call."""
    after = request.get("after")
    if after is not None and (not isinstance(after, int) or isinstance(after, bool) or after < 0):
        raise InvalidRequest("after", f"must be the number of an event (got {after!r})")
    limit, wait_s = request.get("limit", 1000), request.get("wait_s", 0)
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= LIMIT_MAX:
        raise InvalidRequest("limit", f"must be from 1 to {LIMIT_MAX} (got {limit!r})")
    if not isinstance(wait_s, int | float) or isinstance(wait_s, bool) or not 0 <= wait_s <= WAIT_S_MAX:
        raise InvalidRequest("wait_s", f"must be from 0 to {WAIT_S_MAX:g} (got {wait_s!r})")
    after = log.last if after is None else after
    if wait_s:
        log.wait(after, wait_s)
    events, after, lost = log.since(after, min(limit, ANSWER_EVENTS_MAX), ANSWER_PAGES_MAX)
    documents = fit_into_message(log.describe(event) for event in events)
    if len(documents) < len(events):
        after = events[len(documents)].seq - 1
    return {"events": documents, "next": after, "lost": lost}
