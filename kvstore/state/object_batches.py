"""ObjectBatches: whole objects sealed together, each its pieces and its head. Part of ``NodeState``.

All pages of an object are sealed, its head last, or none. An object that is refused does not affect the others. All
that are sealed leave as one instruction, so that a batch of small objects costs the node little more than a batch of
pages::

    asked     a's head | b's pieces, b's head | c's head       c's key is there already, and c replaces nothing
    answered  OK       | OK ..                | PRESENT        one ``WriteSealed`` of the pages of a and b
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvstore.model import objects
from kvstore.model.objects import HEAD_TAG, PIECE_TAG, HeadRows, is_object_class, pieces_of
from kvstore.model.replica import EXTRA, ROOT, Address, Status, keys_of
from kvstore.state import events as ev
from kvstore.state.client_session import ClientSession
from kvstore.state.eviction import Page
from kvstore.state.objects import NOWHERE, Objects
from kvstore.state.pages import standings_of
from kvstore.state.spans import spans_after
from kvstore.state.writing import Writing, named_twice

_HEAD, _PIECE = np.frombuffer(HEAD_TAG, np.uint8), np.frombuffer(PIECE_TAG, np.uint8)
_TAG = slice(EXTRA.start, EXTRA.start + len(HEAD_TAG))
Span = tuple[int, int]
"""The pages of an object among those of a request: the first, and the one after its head."""


class ObjectBatches:
    """Decides about requests of several objects. ``writing``: of the tier that clients write into."""

    def __init__(self, each: Objects, writing: Writing, sessions: Mapping[int, ClientSession]) -> None:
        self._objects = each
        self._writing = writing
        self._space = writing.space
        self._sessions = sessions

    def handlers(self) -> dict[type, Callable[[Any], list[ev.Instruction]]]:
        """The handler of each event on objects."""
        return {ev.SealObjects: self.seal, ev.Delete: self._objects.delete}

    def seal(self, event: ev.SealObjects) -> list[ev.Instruction]:
        """See ``events.SealObjects``. Per page what became of its object: as ``Objects.seal``, and OVER_QUOTA."""
        keys, spans = keys_of(event.rows), _spans(event)
        root = event.rows[0, ROOT].tobytes()
        if len(set(keys)) != len(keys) or len(set(event.addresses)) != len(keys):
            return [named_twice()]
        if not spans or not _heads_hold(event, keys, root, spans):
            reason = "must be whole objects, each with an object's head"
            return [ev.Reply(Status.INVALID, detail={"field": "pages", "reason": reason})]
        out: list[ev.Instruction] = []
        statuses = self._statuses(event, keys, root, spans)
        for i, (_, stop) in enumerate(spans):
            key = keys[stop - 1]
            if statuses[i] == Status.OK and event.replaces[stop - 1] != NOWHERE:
                self._objects.drop(key, out)
                if self._objects.find(key) is not None:
                    statuses[i] = Status.PRESENT  # a page hangs on it, so it stays
        number = self._writing.tenants.number(root)
        if self._space.holdings.limited:
            self._admit(event, number, spans, statuses, out)
        chosen = [span for span, status in zip(spans, statuses, strict=True) if status == Status.OK]
        if chosen:
            self._seal(event, keys, root, number, chosen, out)
        answers: list[int] = []
        for (start, stop), status in zip(spans, statuses, strict=True):
            answers += [int(status)] * (stop - start)
        out.append(ev.Reply(statuses=answers))
        return out

    def _statuses(self, event: ev.SealObjects, keys: list[bytes], root: bytes, spans: list[Span]) -> list[Status]:
        """Whether each object may be sealed, apart from its tenant's quota."""
        new = self._objects.absent(keys)
        session = self._sessions.get(event.session)
        granted = session.granted if session is not None else set[Address]()
        mine = granted.issuperset(event.addresses)
        statuses = []
        for start, stop in spans:
            key = keys[stop - 1]
            current = None if new else self._objects.find(key)
            status = self._objects.may_seal(key, root, current, event.replaces[stop - 1])
            if status == Status.OK and not (mine or granted.issuperset(event.addresses[start:stop])):
                status = Status.STALE
            if status == Status.OK and not new and not self._objects.absent(keys[start : stop - 1]):
                status = Status.STALE  # an earlier request of these very pages was carried out, and its head has left
            statuses.append(status)
        return statuses

    def _admit(
        self,
        event: ev.SealObjects,
        number: int,
        spans: list[Span],
        statuses: list[Status],
        out: list[ev.Instruction],
    ) -> None:
        """Choose among the objects that may be sealed as many whole ones as their tenant's quota allows."""
        chosen = [i for i, status in enumerate(statuses) if status == Status.OK]
        pages = [page for i in chosen for page in range(*spans[i])]
        fits = self._space.quotas.admit(number, event, pages, b"", out) if pages else 0
        for i in chosen:
            fits -= spans[i][1] - spans[i][0]
            if fits < 0:
                statuses[i] = self._writing.no_space(Status.OVER_QUOTA)

    def _seal(
        self,
        event: ev.SealObjects,
        keys: list[bytes],
        root: bytes,
        number: int,
        chosen: list[Span],
        out: list[ev.Instruction],
    ) -> None:
        space, pool = self._space, self._space.segment.pool(event.frame_class)
        pages = [page for span in chosen for page in range(*span)]
        rows, addresses = event.rows, event.addresses
        parents = [root, *keys[:-1]]
        for start, _ in chosen:
            parents[start] = root
        if len(pages) < len(keys):
            rows = rows[pages]
            keys, parents = [keys[page] for page in pages], [parents[page] for page in pages]
            addresses = [addresses[page] for page in pages]
        self._sessions[event.session].granted.difference_update(addresses)
        spans = spans_after(space.segment, None, keys, 0, pool)
        infos: list[int] = []
        at, used_ms = 0, event.now_ns // 1_000_000
        for start, stop in chosen:
            infos += standings_of(0, 0, stop - start)
            after = at + stop - start
            leaf = Page.of(used_ms, int.from_bytes(keys[after - 1][:8], "little"), infos[-1], number)
            space.seal_chain(addresses[at:after], spans[at:after], None, leaf, number)
            at = after
        out.append(ev.WriteSealed(addresses, keys, infos, rows, parents, spans=spans))
        pool.granted_ahead -= len(addresses)
        self._writing.counters["pages_sealed"] += len(addresses)
        if self._writing.pending:
            space.show(keys, root, addresses, infos)
            self._writing.follow(keys, out)


def _spans(event: ev.SealObjects) -> list[Span]:
    """The objects of a request; empty where its pages do not form whole objects."""
    tags = event.rows[:, _TAG]
    heads = (tags == _HEAD).all(axis=1)
    if not is_object_class(event.frame_class) or not heads[-1] or not ((tags == _PIECE).all(axis=1) | heads).all():
        return []
    stops = (np.flatnonzero(heads) + 1).tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _heads_hold(event: ev.SealObjects, keys: list[bytes], root: bytes, spans: list[Span]) -> bool:
    """Whether all pages are of one root, and each head's key is of what it says, and as many pieces are before it as it
    says and its value needs."""
    if event.rows[:, ROOT].tobytes() != root * len(keys):
        return False
    told, page_bytes = HeadRows(event.rows[[stop - 1 for _, stop in spans]], root), event.frame_class.page_bytes
    for i, (start, stop) in enumerate(spans):
        name, pieces = told.name(i), stop - start - 1
        whole = told.pieces[i] == pieces == pieces_of(told.value_bytes[i], page_bytes)
        if not name or not whole or objects.key_hash(root, name) != keys[stop - 1]:
            return False
    return True
