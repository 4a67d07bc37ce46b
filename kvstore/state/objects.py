"""Objects: what the node decides about opaque objects; see ``model.objects``. Part of ``NodeState``.

Unlike a page, an object has contents that its key does not name. So all tiers together hold one version of it at most:
a head is sealed only where none has one, or where the one that is there is the one to be replaced.

ObjectBatches: whole objects sealed together, each its pieces and its head. Part of ``NodeState``.

All pages of an object are sealed, its head last, or none. An object that is refused does not affect the others. All
that are sealed leave as one instruction, so that a batch of small objects costs the node little more than a batch of
pages::

    asked     a's head | b's pieces, b's head | c's head       c's key is there already, and c replaces nothing
    answered  OK       | OK ..                | PRESENT        one ``WriteSealed`` of the pages of a and b
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

import numpy as np

from kvstore.model import objects
from kvstore.model.objects import HEAD_TAG, PIECE_TAG, HeadRows, is_object_class, pieces_of, read_row
from kvstore.model.prefix import fingerprints
from kvstore.model.replica import EXTRA, KEY, ROOT, Address, FrameState, Status, Tier, keys_of
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.directory_spans import spans_at
from kvstore.state.interfaces import ClientSession
from kvstore.state.space import Space
from kvstore.state.tier_pages import standings_of
from kvstore.state.tiering.copying import CopyBatches
from kvstore.state.writing import Writing, named_twice

Seal = Callable[[ev.SealGranted], list[do.Instruction]]
NOWHERE = Address(0, 0, 0)


LOOSE_MAX = 4096  # pieces of that many unfinished objects are remembered; others leave as they get cold


class Objects:
    """Seals and deletes whole objects. ``spaces``: the node's tiers, the first of which clients write into;
    ``seal_chain`` is how the node seals pages of one chain."""

    def __init__(
        self,
        spaces: Mapping[Tier, Space],
        sessions: Mapping[int, ClientSession],
        copies: CopyBatches,
        counters: Counter[str],
        seal_chain: Seal,
    ) -> None:
        self._spaces = tuple(spaces.values())
        self._sessions = sessions
        self._copies = copies
        self._counters = counters
        self._seal_chain = seal_chain
        self._scanning = len(self._spaces) > 1
        self._loose: OrderedDict[bytes, int] = (
            OrderedDict()
        )  # last pieces whose head is yet to come, and the sessions that put them

    def seal(self, event: ev.SealGranted) -> list[do.Instruction]:
        """A head, ``event.replaces`` being the head it replaces, if any.

        Per head: OK, PRESENT (another is there), NO_SPACE (a page of another root has its key), BUSY (what it replaces
        is on its way, or not erased yet, or it is not known yet what lower tiers hold), NO_PARENT, STALE.
        """
        key, root = event.rows[0, KEY].tobytes(), event.rows[0, ROOT].tobytes()
        assert event.replaces is not None and len(event.rows) == 1
        if not is_object_class(event.frame_class):
            return [do.Reply(Status.INVALID, detail={"field": "frame_class", "reason": "holds no objects"})]
        about = read_row(event.rows[0].tobytes())
        ours = about is not None and objects.key_hash(about[0], about[1].name) == key
        if about is None or not ours or not about[1].is_whole(event.frame_class.page_bytes):
            return [do.Reply(Status.INVALID, detail={"field": "pages", "reason": "must be an object's head"})]
        current = self.find(key)
        status = self.may_seal(key, root, current, event.replaces)
        if status != Status.OK:
            return [do.Reply(statuses=[int(status)])]
        space, granted = self._spaces[0], self._sessions.get(event.session)
        parent_ok = event.parent == root or space.pages.find_in(root, event.parent) is not None
        mine = granted is not None and event.addresses[0] in granted.granted
        out: list[do.Instruction] = []
        if current is not None and parent_ok and mine:
            self.drop(key, out)
        self._loose.pop(event.parent, None)
        return out + self._seal_chain(event)

    def may_seal(self, key: bytes, root: bytes, current: Address | None, replaces: Address) -> Status:
        """Whether a head of this key may be sealed where ``current`` is the page that has the key now."""
        if self._scans():
            return Status.BUSY
        if current is not None and self._space_of(current).pages.root_of(current) != root:
            return Status.NO_SPACE  # a page that was forged to have this key: the one that came first has it
        if (current or NOWHERE) != replaces:
            return Status.PRESENT
        return Status.BUSY if self._moving(key) else Status.OK

    @property
    def settled(self) -> bool:
        """True while no object is on its way between tiers, and it is known which objects lower tiers hold."""
        return not self._scans() and not self._copies.busy

    def absent(self, keys: list[bytes]) -> bool:
        """Whether no tier has a page of any of these keys."""
        return all(space.pages.absent(keys) == len(keys) for space in self._spaces)

    def sealed(self, event: ev.SealGranted, reply: do.Reply) -> None:
        """Pages of one layer were sealed; where they are pieces, they go with their writer if no head follows."""
        count = reply.statuses.count(Status.OK)
        if count and event.rows[0, EXTRA].tobytes().startswith(PIECE_TAG) and is_object_class(event.frame_class):
            last = len(reply.statuses) - 1 - reply.statuses[::-1].index(Status.OK)
            self._loose.pop(event.parent, None)
            if len(self._loose) >= LOOSE_MAX:
                self._loose.popitem(last=False)
            self._loose[event.rows[last, KEY].tobytes()] = event.session

    def end_session(self, session: int, out: list[do.Instruction]) -> None:
        """A writer is dead: pieces that it put without their heads are of no use."""
        for key in [key for key, owner in self._loose.items() if owner == session]:
            del self._loose[key]
            if self.find(key) is not None and not self._moving(key):  # else it leaves when it is cold
                self.drop(key, out)

    def delete(self, event: ev.Delete) -> list[do.Instruction]:
        """The chain that ends with each of these pages goes, in all tiers, as far as nothing else hangs on it."""
        out: list[do.Instruction] = []
        statuses = []
        for address in event.addresses:
            space = self._space_of(address)
            status = Status.OK
            if not space.pages.sealed(address) or not self._is_objects(space, address):
                status = Status.STALE
            else:
                extent = space.segment.extents[address.extent]
                key = space.pages.records.key(address.extent, address.frame)
                if self._scans() or self._moving(key):
                    status = Status.BUSY
                elif extent.children[address.frame]:
                    status = Status.STALE
                else:
                    self.drop(key, out)
                    self._counters["objects_deleted"] += 1
            statuses.append(int(status))
        out.append(do.Reply(statuses=statuses))
        return out

    @staticmethod
    def _is_objects(space: Space, address: Address) -> bool:
        """A head or a piece. Pages of a prompt may have the same class; their field is a digest, or zeros, and begins
        with these words as seldom as a forged one would."""
        tag = space.pages.records.extra(address.extent, address.frame)[: len(HEAD_TAG)]
        frame_class = space.segment.extents[address.extent].pool.frame_class
        return tag in (HEAD_TAG, PIECE_TAG) and is_object_class(frame_class)

    def find(self, key: bytes) -> Address | None:
        """The page of that key, in the fastest tier that has it."""
        return next(filter(None, (space.pages.find(key) for space in self._spaces)), None)

    def _space_of(self, address: Address) -> Space:
        first, *lower = self._spaces
        return next((space for space in lower if address.extent in space.segment.extents), first)

    def _scans(self) -> bool:
        """True while it is unknown which objects lower tiers hold: one that is deleted now could be found later."""
        if self._scanning:
            self._scanning = any(
                is_object_class(extent.pool.frame_class) and extent.count(FrameState.QUARANTINED)
                for space in self._spaces[1:]
                for extent in space.segment.extents.values()
            )
        return self._scanning

    def _chain(self, space: Space, key: bytes) -> list[bytes]:
        """Keys from this one up to the first of its chain, in that tier."""
        keys: list[bytes] = []
        address = space.pages.find(key)
        while address is not None:
            keys.append(key)
            key = space.pages.records.parent(*address[:2])
            at_root = key == space.pages.records.root(*address[:2])
            address = None if at_root else space.pages.find(key)
        return keys

    def _moving(self, key: bytes) -> bool:
        """A page of this object is on its way, or what was stored under its key is not erased yet."""
        if not self._copies.busy:
            return False
        keys = {one for space in self._spaces for one in self._chain(space, key)}
        return self._copies.touches(keys | {key})

    def drop(self, key: bytes, out: list[do.Instruction]) -> None:
        """The object goes from all tiers, the lowest first: what is left of it then is found by no reboot."""
        spaces = self._spaces[::-1]
        keys = max((self._chain(space, key) for space in spaces), key=len)
        for space in spaces:
            gone: list[bytes] = []
            addresses: list[Address] = []
            for one in keys:
                address = space.pages.find(one)
                if address is None:
                    continue
                if space.segment.extents[address.extent].children[address.frame] != (1 if gone else 0):
                    break
                gone.append(one)
                addresses.append(address)
            if not gone:
                continue
            parent = space.pages.find(keys[keys.index(gone[-1]) + 1]) if gone[-1] != keys[-1] else None
            if parent is not None:
                space.pages.unhold(parent)
            roots = [space.pages.root_of(address) for address in addresses]
            space.pages.retire(addresses, out)
            spans = spans_at(space.segment, addresses)
            out.append(do.Unindex(gone, space.tier, "dropped", "deleted", roots, spans))


_ALONE = standings_of(0, 0, 1)
_HEAD, _PIECE = np.frombuffer(HEAD_TAG + PIECE_TAG, np.uint64).tolist()
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

    def seal(self, event: ev.SealObjects) -> list[do.Instruction]:
        """See ``events.SealObjects``. Per page what became of its object: as ``Objects.seal``, and OVER_QUOTA."""
        keys, spans = keys_of(event.rows), _spans(event)
        root = event.rows[0, ROOT].tobytes()
        if len(set(keys)) != len(keys) or len(set(event.addresses)) != len(keys):
            return [named_twice()]
        if not spans or not _heads_hold(event, keys, root, spans):
            reason = "must be whole objects, each with an object's head"
            return [do.Reply(Status.INVALID, detail={"field": "pages", "reason": reason})]
        out: list[do.Instruction] = []
        statuses = self._statuses(event, keys, root, spans)
        for i, (_, stop) in enumerate(spans):
            key = keys[stop - 1]
            if statuses[i] == Status.OK and event.replaces[stop - 1] != NOWHERE:
                self._objects.drop(key, out)
                if self._objects.find(key) is not None:
                    statuses[i] = Status.PRESENT  # a page hangs on it, so it stays
        number = self._writing.tenants.number(root)
        if self._space.pages.holdings.limited:
            self._admit(event, number, spans, statuses, out)
        chosen = [span for span, status in zip(spans, statuses, strict=True) if status == Status.OK]
        if chosen:
            self._seal(event, keys, root, number, chosen, out)
        answers: list[int] = []
        for (start, stop), status in zip(spans, statuses, strict=True):
            answers += [int(status)] * (stop - start)
        out.append(do.Reply(statuses=answers))
        return out

    def _statuses(self, event: ev.SealObjects, keys: list[bytes], root: bytes, spans: list[Span]) -> list[Status]:
        """Whether each object may be sealed, apart from its tenant's quota."""
        new = self._objects.absent(keys)
        session = self._sessions.get(event.session)
        granted = session.granted if session is not None else set[Address]()
        mine = granted.issuperset(event.addresses)
        if new and mine and self._objects.settled and event.replaces.count(NOWHERE) == len(keys):
            return [Status.OK] * len(spans)
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
        out: list[do.Instruction],
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
        out: list[do.Instruction],
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
        spans: list[int] = fingerprints(b"".join(keys)).tolist()  # an object is its own span
        infos: list[int] = []
        stops: list[int] = []
        for start, stop in chosen:
            infos += standings_of(0, 0, stop - start) if stop - start > 1 else _ALONE
            stops.append(len(infos))
        space.pages.seal_objects(addresses, spans, stops, number)
        out.append(do.WriteSealed(addresses, keys, infos, rows, parents, spans=spans))
        pool.granted_ahead -= len(addresses)
        self._writing.counters["pages_sealed"] += len(addresses)
        if self._writing.pending or event.number:
            space.pages.show(keys, root, addresses, infos)
            self._writing.follow(keys, out)


def _spans(event: ev.SealObjects) -> list[Span]:
    """The objects of a request; empty where its pages do not form whole objects."""
    tags: list[int] = event.rows[:, _TAG].copy().view(np.uint64)[:, 0].tolist()
    stops = [page for page, tag in enumerate(tags, 1) if tag == _HEAD]
    if not is_object_class(event.frame_class) or tags[-1] != _HEAD or tags.count(_PIECE) + len(stops) != len(tags):
        return []
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
