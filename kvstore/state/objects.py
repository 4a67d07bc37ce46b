"""Objects: what the node decides about opaque objects (see ``model.objects``). Part of ``NodeState``.

The key of a page names its content; the key of an object does not. So all tiers together hold at most one version of an
object. A head is sealed only if no tier has a head of that key, or if the stored head is the one to be replaced.

**Tombstones.** A node of a pool keeps a tombstone of each key that it, or another node, has deleted or replaced. An
object with an older stamp is dropped, and a new one is refused. If the object cannot be dropped now, because it is
being moved or found by a scan, the node tries again every tick.

A request may have many objects (``ObjectBatches``), each with its pieces and its head. Either all pages of an object
are sealed, the head last, or none. An object that is refused does not affect the others. One instruction seals the
pages of all objects, so that a batch of small objects costs the node little more than a batch of pages::

    request   a's head | b's pieces, b's head | c's head       c's key is stored already, and c replaces nothing
    reply     OK       | OK ..                | PRESENT        one ``WriteSealed`` with the pages of a and b
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

import numpy as np

from kvstore.model import objects
from kvstore.model.objects import (
    HEAD_TAG,
    PIECE_TAG,
    HeadRows,
    ObjectGroup,
    groups_in,
    is_object_class,
    pieces_of,
    read_row,
    stamp_of,
)
from kvstore.model.prefix import fingerprints
from kvstore.model.replica import EXTRA, KEY, ROOT, Address, FrameState, Status, Tier, keys_of
from kvstore.model.tombstones import TOMBSTONE_S, Tombstone, Tombstones
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.directory_spans import spans_at
from kvstore.state.groups import Groups
from kvstore.state.interfaces import ClientSession
from kvstore.state.space import Space
from kvstore.state.tier_pages import standings_of
from kvstore.state.tiering.copying import CopyBatches
from kvstore.state.writing import Writing, duplicate_refusal

Seal = Callable[[ev.SealGranted], list[do.Instruction]]
NOWHERE = Address(0, 0, 0)


BROKEN_PER_EVENT = 64  # objects of groups that have lost a member, to be removed by one decision
TRIES_PER_TICK = 256  # objects that a tick tries to drop again
LOOSE_MAX = 4096  # unfinished objects whose pieces are remembered; pieces of others leave when they are cold


class Objects:
    """The decisions that seal and delete objects.

    Args:
        spaces: the node's tiers; clients write into the first one.
        seal_chain: seals pages of one chain.
        unpin: ends the pins of pages with these keys. Called before pages are dropped.

    Attributes:
        tombstones: those that this node has.
    """

    def __init__(
        self,
        spaces: Mapping[Tier, Space],
        sessions: Mapping[int, ClientSession],
        copies: CopyBatches,
        counters: Counter[str],
        seal_chain: Seal,
        unpin: Callable[[list[bytes]], None],
        groups: Groups,
    ) -> None:
        self._spaces = tuple(spaces.values())
        self._sessions = sessions
        self._copies = copies
        self._counters = counters
        self._seal_chain = seal_chain
        self._unpin = unpin
        self._groups = groups
        self._scanning = len(self._spaces) > 1
        # Last pieces of objects whose heads are not stored yet -> the sessions that put them.
        self._loose: OrderedDict[bytes, int] = OrderedDict()
        self.tombstones = Tombstones()
        self._to_drop: dict[bytes, Tombstone] = {}  # objects that could not be dropped yet

    def seal(self, event: ev.SealGranted) -> list[do.Instruction]:
        """Seal the head of an object. ``event.replaces`` is the head that it replaces, if any.

        The status is OK, PRESENT (another head is stored), NO_SPACE (a page of another root has its key), NO_PARENT,
        STALE or BUSY. BUSY: the replaced object is being copied or is not erased yet, or the scan has not yet found all
        objects in lower tiers.
        """
        key, root = event.rows[0, KEY].tobytes(), event.rows[0, ROOT].tobytes()
        assert event.replaces is not None and len(event.rows) == 1
        if not is_object_class(event.frame_class):
            return [do.Reply(Status.INVALID, detail={"field": "frame_class", "reason": "holds no objects"})]
        about = read_row(event.rows[0].tobytes())
        matches = about is not None and objects.key_hash(about[0], about[1].name) == key
        if about is None or not matches or not about[1].is_whole(event.frame_class.page_bytes):
            return [do.Reply(Status.INVALID, detail={"field": "pages", "reason": "must be an object's head"})]
        refusal = self.refusal({about[1].group: [key]})
        if refusal is not None:
            return [refusal]
        current = self.find(key)
        status = self.may_seal(key, root, current, event.replaces, stamp_of(about[1].nonce))
        if status != Status.OK:
            return [do.Reply(statuses=[int(status)])]
        space, session = self._spaces[0], self._sessions.get(event.session)
        parent_ok = event.parent == root or space.pages.find_in(root, event.parent) is not None
        is_granted = session is not None and event.addresses[0] in session.granted
        out: list[do.Instruction] = []
        if current is not None and parent_ok and is_granted:
            self.replace(key, out)
        self._loose.pop(event.parent, None)
        out += self._seal_chain(event)
        reply = out[-1]
        assert type(reply) is do.Reply
        if event.in_pool and reply.statuses == [Status.OK]:
            out[-1:] = [self.replaced(key, root, stamp_of(about[1].nonce), event.now_ns), reply]
        return out

    def may_seal(self, key: bytes, root: bytes, current: Address | None, replaces: Address, stamp: int) -> Status:
        """Return OK if a head of this key may be sealed. ``current`` is the page that has the key now, if any."""
        if self._is_scanning():
            return Status.BUSY
        if self.tombstones.stamp(key) > stamp:
            return Status.PRESENT  # it was deleted or replaced after this put was decided
        if current is not None and self._space_of(current).pages.root_of(current) != root:
            return Status.NO_SPACE  # one of the two keys is forged: the page that was stored first keeps the key
        if (current or NOWHERE) != replaces:
            return Status.PRESENT
        return Status.BUSY if self._are_moving(self._groups.replaced_with(key)) else Status.OK

    def refusal(self, groups: Mapping[ObjectGroup, list[bytes]]) -> do.Reply | None:
        """Return the reply that refuses to seal these members, by their groups; None if they may be sealed."""
        for group, keys in groups.items():
            refusal = self._groups.refusal(group, keys) if group.members else None
            if refusal is not None:
                self._counters["objects_refused_group"] += len(keys)
                return refusal
        return None

    @property
    def is_settled(self) -> bool:
        """True while no object is being copied or erased, and the scan has found all objects in lower tiers."""
        return not self._is_scanning() and not self._copies.is_busy

    def absent(self, keys: list[bytes]) -> bool:
        """Return True if no tier has a page with any of these keys."""
        return all(space.pages.absent(keys) == len(keys) for space in self._spaces)

    def sealed(self, event: ev.SealGranted, reply: do.Reply) -> None:
        """Remember sealed pieces, so that they are dropped with their session if no head follows."""
        count = reply.statuses.count(Status.OK)
        if count and event.rows[0, EXTRA].tobytes().startswith(PIECE_TAG) and is_object_class(event.frame_class):
            last = len(reply.statuses) - 1 - reply.statuses[::-1].index(Status.OK)
            self._loose.pop(event.parent, None)
            if len(self._loose) >= LOOSE_MAX:
                self._loose.popitem(last=False)
            self._loose[event.rows[last, KEY].tobytes()] = event.session

    def end_session(self, session: int, out: list[do.Instruction]) -> None:
        """Drop the pieces of an ended session whose heads were not stored: such pieces cannot be used."""
        for key in [key for key, owner in self._loose.items() if owner == session]:
            del self._loose[key]
            if self.find(key) is not None and not self._is_moving(key):  # else they leave when they are cold
                self.drop(key, out)

    def delete(self, event: ev.Delete) -> list[do.Instruction]:
        """Handle ``events.Delete``: drop the chain that ends with each of these pages from all tiers.

        All members of the object's group are dropped with it. Pages with other children stay. Pins of the chain end.
        """
        out: list[do.Instruction] = []
        pages = [self._object_key(address) for address in event.addresses]  # before any of them is dropped
        dropped: set[bytes] = set()
        statuses = []
        for address, key in zip(event.addresses, pages, strict=True):
            status = Status.OK
            if key is None:
                status = Status.STALE
            elif key not in dropped:
                keys, space = self._groups.leaving_with(key), self._space_of(address)
                extent = space.segment.extents[address.extent]
                if self._is_scanning() or self._are_moving(keys):
                    status = Status.BUSY
                elif extent.children[address.frame] and not self._unpinned(space, address, key):
                    status = Status.STALE
                else:
                    for each in keys:
                        self.drop(each, out)
                    dropped.update(keys)
                    self._counters["objects_deleted"] += len(keys)
            statuses.append(int(status))
        out.append(do.Reply(statuses=statuses))
        return out

    def remove_broken(self, out: list[do.Instruction]) -> None:
        """Remove some of the objects whose group has lost a member."""
        for key in self._groups.broken_members(BROKEN_PER_EVENT):
            address = self.find(key)
            if self._is_moving(key):
                continue  # a later event removes it
            if address is not None and self._space_of(address).segment.extents[address.extent].children[address.frame]:
                self._groups.spare(key)  # it is pinned
            else:
                self.drop(key, out, "evicted", "group")
                self._counters["objects_evicted_group"] += 1

    def _object_key(self, address: Address) -> bytes | None:
        """Return the key of the object's page at this address; None if there is none."""
        space = self._space_of(address)
        if not space.pages.sealed(address) or not self._is_object_page(space, address):
            return None
        return space.pages.records.key(address.extent, address.frame)

    def bury(self, event: ev.Bury) -> list[do.Instruction]:
        """Handle ``events.Bury``. The statuses are OK (an object was dropped), STALE (there is no older one) or BUSY
        (the object will be dropped soon)."""
        out: list[do.Instruction] = []
        statuses = []
        for tombstone in event.tombstones:
            self.tombstones.add(tombstone)
            status = self._drop_older(tombstone, out)
            if status == Status.BUSY:
                self._to_drop[tombstone.key] = tombstone
            statuses.append(int(status))
        out.append(do.WriteObjectStamp(max([each.stamp for each in event.tombstones], default=0)))
        out.append(do.Reply(statuses=statuses))
        return out

    def replaced(self, key: bytes, root: bytes, stamp: int, now_ns: int) -> do.Instruction:
        """Keep a tombstone of the values that a new one has replaced on all nodes. Return the instruction for that."""
        self.tombstones.add(Tombstone(key, root, stamp, now_ns + TOMBSTONE_S * 10**9))
        return do.WriteObjectStamp(stamp)

    def tick(self, now_ns: int, out: list[do.Instruction]) -> None:
        """Drop objects that could not be dropped before, and forget tombstones that have ended."""
        for key in self.tombstones.expire(now_ns) if self.tombstones else ():
            self._to_drop.pop(key, None)
        for key in list(self._to_drop)[:TRIES_PER_TICK]:
            tombstone = self._to_drop.pop(key)
            if self._drop_older(tombstone, out) == Status.BUSY:
                self._to_drop[key] = tombstone

    def _drop_older(self, tombstone: Tombstone, out: list[do.Instruction]) -> Status:
        current = self.find(tombstone.key)
        if current is not None:
            space = self._space_of(current)
            nonce = space.pages.records.extra(current.extent, current.frame)[len(HEAD_TAG) :]
            is_theirs = space.pages.root_of(current) == tombstone.root and self._is_object_page(space, current)
            if not is_theirs or stamp_of(nonce) >= tombstone.stamp:
                return Status.STALE
        keys = self._groups.leaving_with(tombstone.key)
        if self._is_scanning() or self._are_moving(keys):
            return Status.BUSY
        if current is None:
            return Status.STALE
        for key in keys:
            self.drop(key, out)
        self._counters["objects_deleted"] += len(keys)
        return Status.OK

    @staticmethod
    def _is_object_page(space: Space, address: Address) -> bool:
        """Return True for a head or a piece.

        Pages of a prompt may have the same class. Their ``extra`` field is a digest or zeros, which practically never
        begins with one of the tags.
        """
        tag = space.pages.records.extra(address.extent, address.frame)[: len(HEAD_TAG)]
        frame_class = space.segment.extents[address.extent].pool.frame_class
        return tag in (HEAD_TAG, PIECE_TAG) and is_object_class(frame_class)

    def find(self, key: bytes) -> Address | None:
        """Return the page with this key in the fastest tier that has it; None if no tier has it."""
        return next(filter(None, (space.pages.find(key) for space in self._spaces)), None)

    def _space_of(self, address: Address) -> Space:
        first, *lower = self._spaces
        return next((space for space in lower if address.extent in space.segment.extents), first)

    def _is_scanning(self) -> bool:
        """Return True while the scan may still find objects in lower tiers: a deleted object could be among them."""
        if self._scanning:
            self._scanning = any(
                is_object_class(extent.pool.frame_class) and extent.count(FrameState.QUARANTINED)
                for space in self._spaces[1:]
                for extent in space.segment.extents.values()
            )
        return self._scanning

    def _chain(self, space: Space, key: bytes) -> list[bytes]:
        """Return the keys from this one up to the first of its chain in that tier."""
        keys: list[bytes] = []
        address = space.pages.find(key)
        while address is not None:
            keys.append(key)
            key = space.pages.records.parent(*address[:2])
            at_root = key == space.pages.records.root(*address[:2])
            address = None if at_root else space.pages.find(key)
        return keys

    def _are_moving(self, keys: list[bytes]) -> bool:
        """Return True if any of these objects is moving."""
        return self._copies.is_busy and any(map(self._is_moving, keys))

    def _is_moving(self, key: bytes) -> bool:
        """Return True if a page of this object is being copied, or an earlier page with its key is not erased yet."""
        if not self._copies.is_busy:
            return False
        keys = {one for space in self._spaces for one in self._chain(space, key)}
        return self._copies.touches(keys | {key})

    def _unpinned(self, space: Space, address: Address, key: bytes) -> bool:
        """End the pins of a page. Return whether it has no children then."""
        self._unpin([key])
        return not space.segment.extents[address.extent].children[address.frame]

    def replace(self, key: bytes, out: list[do.Instruction]) -> None:
        """Drop an object that another one replaces. If its group is complete, all members of the group leave."""
        for each in self._groups.replaced_with(key):
            self.drop(each, out)

    def drop(self, key: bytes, out: list[do.Instruction], kind: str = "dropped", reason: str = "deleted") -> None:
        """Drop an object from all tiers, the lowest first, so that after a kill no reboot finds a remaining page. Pins
        of its pages end."""
        spaces = self._spaces[::-1]
        keys = max((self._chain(space, key) for space in spaces), key=len)
        self._unpin(keys)
        for space in spaces:
            dropped: list[bytes] = []
            addresses: list[Address] = []
            for page_key in keys:
                address = space.pages.find(page_key)
                if address is None:
                    continue
                if space.segment.extents[address.extent].children[address.frame] != (1 if dropped else 0):
                    break
                dropped.append(page_key)
                addresses.append(address)
            if not dropped:
                continue
            parent = space.pages.find(keys[keys.index(dropped[-1]) + 1]) if dropped[-1] != keys[-1] else None
            if parent is not None:
                space.pages.unhold(parent)
            roots = [space.pages.root_of(address) for address in addresses]
            space.pages.retire(addresses, out)
            spans = spans_at(space.segment, addresses)
            out.append(do.Unindex(dropped, space.tier, kind, reason, roots, spans))
            if kind == "evicted":
                space.pages.counters[f"evicted_{reason}"] += len(dropped)


_ALONE = standings_of(0, 0, 1)
_HEAD, _PIECE = np.frombuffer(HEAD_TAG + PIECE_TAG, np.uint32).tolist()
_TAG = slice(EXTRA.start, EXTRA.start + len(HEAD_TAG))
Span = tuple[int, int]
"""The range of an object's pages in a request: the place of the first page, and the place after the head."""


class ObjectBatches:
    """The decisions about requests with several objects. ``writing`` belongs to the first tier."""

    def __init__(self, single: Objects, writing: Writing, sessions: Mapping[int, ClientSession]) -> None:
        self._objects = single
        self._writing = writing
        self._space = writing.space
        self._sessions = sessions

    def seal(self, event: ev.SealObjects) -> list[do.Instruction]:
        """Handle ``events.SealObjects``.

        The reply has, for each page, the status of its object: as in ``Objects.seal``, or OVER_QUOTA.
        """
        keys, spans = keys_of(event.rows), _spans(event)
        root = event.rows[0, ROOT].tobytes()
        if len(set(keys)) != len(keys) or len(set(event.addresses)) != len(keys):
            return [duplicate_refusal()]
        if not spans or not _are_heads_valid(event, keys, root, spans):
            reason = "must be whole objects, each with an object's head"
            return [do.Reply(Status.INVALID, detail={"field": "pages", "reason": reason})]
        members: dict[ObjectGroup, list[bytes]] = {}
        for row, group in groups_in(event.rows).items():
            members.setdefault(group, []).append(keys[row])
        refusal = self._objects.refusal(members) if members else None
        if refusal is not None:
            return [refusal]
        out: list[do.Instruction] = []
        statuses = self._statuses(event, keys, root, spans)
        for i, (_, stop) in enumerate(spans):
            key = keys[stop - 1]
            if statuses[i] == Status.OK and event.replaces[stop - 1] != NOWHERE:
                self._objects.replace(key, out)
                if self._objects.find(key) is not None:
                    statuses[i] = Status.PRESENT  # the old object has a child, and stays
        number = self._writing.tenants.number(root)
        if self._space.pages.holdings.limited:
            self._admit(event, number, spans, statuses, out)
        chosen = [span for span, status in zip(spans, statuses, strict=True) if status == Status.OK]
        if chosen:
            self._seal(event, keys, root, number, chosen, out)
            for _, stop in chosen if event.in_pool else ():
                out.append(self._objects.replaced(keys[stop - 1], root, _stamp(event, stop - 1), event.now_ns))
        page_statuses: list[int] = []
        for (start, stop), status in zip(spans, statuses, strict=True):
            page_statuses += [int(status)] * (stop - start)
        out.append(do.Reply(statuses=page_statuses))
        return out

    def _statuses(self, event: ev.SealObjects, keys: list[bytes], root: bytes, spans: list[Span]) -> list[Status]:
        """Return OK for each object that may be sealed. The tenant's quota is not checked here."""
        new = self._objects.absent(keys)
        session = self._sessions.get(event.session)
        granted = session.granted if session is not None else set[Address]()
        all_granted = granted.issuperset(event.addresses)
        has_tombstones = len(self._objects.tombstones) > 0
        is_plain = self._objects.is_settled and not has_tombstones and event.replaces.count(NOWHERE) == len(keys)
        if new and all_granted and is_plain:
            return [Status.OK] * len(spans)
        statuses = []
        for start, stop in spans:
            key = keys[stop - 1]
            current = None if new else self._objects.find(key)
            stamp = _stamp(event, stop - 1) if has_tombstones else 0
            status = self._objects.may_seal(key, root, current, event.replaces[stop - 1], stamp)
            if status == Status.OK and not (all_granted or granted.issuperset(event.addresses[start:stop])):
                status = Status.STALE
            if status == Status.OK and not new and not self._objects.absent(keys[start : stop - 1]):
                status = Status.STALE  # an earlier request has sealed these pages, and its head was removed
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
        """Refuse the last objects, as whole objects, if their tenant's quota does not allow all of them."""
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


def _stamp(event: ev.SealObjects, page: int) -> int:
    """Return the stamp in the row of a head."""
    return stamp_of(event.rows[page, _TAG.stop : EXTRA.stop].tobytes())


def _spans(event: ev.SealObjects) -> list[Span]:
    """Return the spans of a request's objects; an empty list if its pages do not form whole objects."""
    tags: list[int] = event.rows[:, _TAG].copy().view(np.uint32)[:, 0].tolist()
    stops = [page for page, tag in enumerate(tags, 1) if tag == _HEAD]
    if not is_object_class(event.frame_class) or tags[-1] != _HEAD or tags.count(_PIECE) + len(stops) != len(tags):
        return []
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _are_heads_valid(event: ev.SealObjects, keys: list[bytes], root: bytes, spans: list[Span]) -> bool:
    """Return True if all pages have one root, and each head matches its key and its number of pieces.

    The number of pieces must be the one in the head, and the one that the value's size needs.
    """
    if event.rows[:, ROOT].tobytes() != root * len(keys):
        return False
    heads, page_bytes = HeadRows(event.rows[[stop - 1 for _, stop in spans]], root), event.frame_class.page_bytes
    for i, (start, stop) in enumerate(spans):
        name, pieces = heads.name(i), stop - start - 1
        is_whole = heads.pieces[i] == pieces == pieces_of(heads.value_bytes[i], page_bytes)
        if not name or not is_whole or objects.key_hash(root, name) != keys[stop - 1]:
            return False
    return True
