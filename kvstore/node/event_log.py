"""EventLog: what happened to pages, as the performer performs it, for readers that follow a node.

A bounded ring, filled by one thread at a time (under the node's mutex), read by any. An entry is a batch: the pages of
one instruction. Appending is a store into a slot and never wakes a reader, so that it costs a put nothing; readers look
for news every ``LOOK_S``. A reader that is too slow is told how many entries were overwritten (``lost``).

Numbers go on over restarts: those of a start begin at its time in microseconds, above all earlier ones, and the first
entry is ``cleared``. So a reader that followed the node before is served from there, and knows that what it knew is
void.

Answers of admin calls: how much of a list fits one message.
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

ANSWER_BYTES: Final = 100 * 1024  # of the lists in an answer; a local message has 128 KiB


def fitted(items: Iterable[Any], bytes_max: int = ANSWER_BYTES) -> list[Any]:
    """The first of ``items`` that take at most ``bytes_max`` as JSON, but at least one."""
    found: list[Any] = []
    left = bytes_max
    for item in items:
        left -= len(json.dumps(item)) + 2
        if found and left < 0:
            break
        found.append(item)
    return found


SLOTS: Final = 16384  # entries kept
PAGES_MAX: Final = 65536  # and of how many pages together
EVENT_PAGES_MAX: Final = 512  # of one entry, so that one fits a message; a larger batch makes several
LOOK_S: Final = 0.01
LIMIT_MAX: Final = 10000
WAIT_S_MAX: Final = 1.0
ANSWER_PAGES_MAX: Final = 1024  # 36 bytes each in JSON
ANSWER_EVENTS_MAX: Final = 400  # and some 200 more for an event; see ``answers.fitted``
TENANTS_MAX: Final = 64  # named in one event as JSON has it ...
TENANT_CHARS_MAX: Final = 64  # ... and characters of each name

SEALED, DEMOTED, PROMOTED, EVICTED, DROPPED, CLEARED = (
    *("sealed", "demoted", "promoted"),
    *("evicted", "dropped", "cleared"),
)
STORED: Final = (SEALED, DEMOTED, PROMOTED)

# Cause of a seal -> kind and reason.
_SEALS: Final = {
    "put": (SEALED, ""),
    "through": (SEALED, ""),
    "save": (DEMOTED, ""),
    "load": (PROMOTED, ""),
    "scan": (SEALED, "found"),
}


class PageEvent(NamedTuple):
    """Pages of one decision to which the same happened.

    Attributes:
        seq: number of the event; they are consecutive from a start to its end.
        time_ns: since the epoch.
        kind: "sealed" (stored in ``tier``), "demoted" (saved to NVMe; DRAM's copy stays until it is evicted),
            "promoted" (loaded into DRAM; NVMe's stays), "evicted" (left ``tier``), "dropped" (left it because it did
            not hold, or was deleted), "cleared" (what was told before is void; ``keys`` is empty).
        reason: of evicted "space", "reclaim" (its extent was given up), "request" or "quota"; of dropped what
            did not hold, or "deleted"; of sealed "found" where a start found the page on NVMe; of cleared "start".
        keys: 16 bytes each.
        roots: of each page; one alone is of all of them.
        spans: of each page, see ``model.prefix``.
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
"""A ``PageEvent`` whose keys, roots and spans lie end to end: objects of their own would take four times the memory."""


def _pages_in(entry: _Entry) -> int:
    return len(entry[5]) // KEY_BYTES


def _split(names: bytes) -> list[bytes]:
    return [names[at : at + KEY_BYTES] for at in range(0, len(names), KEY_BYTES)]


class EventLog:
    """Lives from a start of its node to the end. One thread at a time appends; anyone reads.

    Args:
        staged: what is appended is told with the next ``publish``.

    Attributes:
        last: number of the newest entry that is told.
    """

    def __init__(self, first_seq: int | None = None, staged: bool = False) -> None:
        self._staged = staged
        self._ring: list[_Entry | None] = [None] * SLOTS
        self.salt_of: Callable[[bytes], str] = lambda root: ""  # whose a root is; see ``described``
        self.first_of_run = time.time_ns() // 1000 if first_seq is None else first_seq
        self._first = self._next = self.first_of_run  # kept: from _first to before _next
        self._pages = 0
        self.append(CLEARED, Tier.DRAM, "start", [])
        self.publish()

    # --- writing ----------------------------------------------------------------------------------------------------

    def sealed(
        self,
        cause: str,
        tier: Tier,
        keys: list[bytes],
        root: bytes,
        rows: Rows | None = None,
        spans: Sequence[int] = (),
    ) -> None:
        """Pages were stored in ``tier`` because of ``cause``, see ``WriteSealed``.

        ``root``: of the first page, and of all where clients put them; ``rows``: identities of the others.
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
        """One thing happened to these pages. ``roots``: as in ``PageEvent``."""
        if len(keys) > EVENT_PAGES_MAX:
            for start in range(0, len(keys), EVENT_PAGES_MAX):
                part = slice(start, start + EVENT_PAGES_MAX)
                some = roots[part] if len(roots) > 1 else roots
                self.append(kind, tier, reason, keys[part], some, spans[part])
            return
        seq = self._next
        if seq - self._first == SLOTS:
            self._forget()
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
            self._forget()

    def publish(self) -> None:
        """Tell what was appended."""
        self.last = self._next - 1

    def _forget(self) -> None:
        place = self._first % SLOTS
        entry = self._ring[place]
        assert entry is not None, "kept"
        self._first += 1  # first: a reader must not look for what is gone
        self._ring[place] = None
        self._pages -= _pages_in(entry)

    # --- reading ----------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> int:
        """How many were appended since the start."""
        return self._next - self.first_of_run

    @property
    def overwritten(self) -> int:
        """How many entries are not kept any more. A reader that follows closely had read them."""
        return self._first - self.first_of_run

    def since(
        self, after: int | None, limit: int = 1000, pages_max: int = PAGES_MAX
    ) -> tuple[list[PageEvent], int, int]:
        """Up to ``limit`` events that followed number ``after``, oldest first, and of no more than ``pages_max`` pages
        (but at least one event).

        ``after`` None: only what follows from now on. A number of an earlier start, or one that was never given, means
        from this start on: the first event then is "cleared".

        Returns (events, the ``after`` of the next call, how many events between were overwritten).
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
            if entry is None or entry[0] != seq:  # overwritten, since this began perhaps: the events before it go too
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
        """Until there is an event after that number (None: the newest now); False where none came in time."""
        after = self.last if after is None else after
        deadline = time.monotonic() + timeout_s
        while self.last == after:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(LOOK_S, left_s))
        return True

    def described(self, event: PageEvent) -> dict[str, Any]:
        """An event as JSON has it: keys in hex; in place of roots ``tenants``, the names of those whose pages they are.

        Where there is more than one, ``whose`` has for each key its tenant's place in that list, -1 where unknown.
        """
        salts = {root: self.salt_of(root)[:TENANT_CHARS_MAX] for root in dict.fromkeys(event.roots)}
        tenants = list(dict.fromkeys(salts.values()))[:TENANTS_MAX]
        told = {**event._asdict(), "tier": str(event.tier), "keys": [key.hex() for key in event.keys]}
        del told["roots"], told["spans"]
        told["tenants"] = tenants
        if len(tenants) > 1:
            places = {salt: place for place, salt in enumerate(tenants)}
            told["whose"] = [places.get(salts[root], -1) for root in event.roots]
        return told


def answer(log: EventLog, request: dict[str, Any]) -> dict[str, Any]:
    """The admin call ``events``: {"after": number or None, "limit": 1..10000, "wait_s": 0..1} -> {"events", "next",
    "lost"}. What does not fit a message is left for the next call."""
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
    told = fitted(log.described(event) for event in events)
    if len(told) < len(events):
        after = events[len(told)].seq - 1
    return {"events": told, "next": after, "lost": lost}
