"""Objects: what the node decides about opaque objects; see ``model.objects``. Part of ``NodeState``.

Unlike a page, an object has contents that its key does not name. So all tiers together hold one version of it at most:
a head is sealed only where none has one, or where the one that is there is the one to be replaced.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

from kvstore.model import objects
from kvstore.model.objects import HEAD_TAG, PIECE_TAG, is_object_class, read_row
from kvstore.model.replica import EXTRA, KEY, ROOT, Address, FrameState, Status, Tier
from kvstore.state import events as ev
from kvstore.state.client_session import ClientSession
from kvstore.state.copying import CopyBatches
from kvstore.state.space import Space
from kvstore.state.spans import spans_at

Seal = Callable[[ev.SealGranted], list[ev.Instruction]]
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

    def seal(self, event: ev.SealGranted) -> list[ev.Instruction]:
        """A head, ``event.replaces`` being the head it replaces, if any.

        Per head: OK, PRESENT (another is there), NO_SPACE (a page of another root has its key), BUSY (what it replaces
        is on its way, or not erased yet, or it is not known yet what lower tiers hold), NO_PARENT, STALE.
        """
        key, root = event.rows[0, KEY].tobytes(), event.rows[0, ROOT].tobytes()
        assert event.replaces is not None and len(event.rows) == 1
        if not is_object_class(event.frame_class):
            return [ev.Reply(Status.INVALID, detail={"field": "frame_class", "reason": "holds no objects"})]
        about = read_row(event.rows[0].tobytes())
        ours = about is not None and objects.key_hash(about[0], about[1].name) == key
        if about is None or not ours or not about[1].is_whole(event.frame_class.page_bytes):
            return [ev.Reply(Status.INVALID, detail={"field": "pages", "reason": "must be an object's head"})]
        current = self.find(key)
        status = self.may_seal(key, root, current, event.replaces)
        if status != Status.OK:
            return [ev.Reply(statuses=[int(status)])]
        space, granted = self._spaces[0], self._sessions.get(event.session)
        parent_ok = event.parent == root or space.find_in(root, event.parent) is not None
        mine = granted is not None and event.addresses[0] in granted.granted
        out: list[ev.Instruction] = []
        if current is not None and parent_ok and mine:
            self.drop(key, out)
        self._loose.pop(event.parent, None)
        return out + self._seal_chain(event)

    def may_seal(self, key: bytes, root: bytes, current: Address | None, replaces: Address) -> Status:
        """Whether a head of this key may be sealed where ``current`` is the page that has the key now."""
        if self._scans():
            return Status.BUSY
        if current is not None and self._space_of(current).root_of(current) != root:
            return Status.NO_SPACE  # a page that was forged to have this key: the one that came first has it
        if (current or NOWHERE) != replaces:
            return Status.PRESENT
        return Status.BUSY if self._moving(key) else Status.OK

    def absent(self, keys: list[bytes]) -> bool:
        """Whether no tier has a page of any of these keys."""
        return all(space.absent(keys) == len(keys) for space in self._spaces)

    def sealed(self, event: ev.SealGranted, reply: ev.Reply) -> None:
        """Pages of one layer were sealed; where they are pieces, they go with their writer if no head follows."""
        count = reply.statuses.count(Status.OK)
        if count and event.rows[0, EXTRA].tobytes().startswith(PIECE_TAG) and is_object_class(event.frame_class):
            last = len(reply.statuses) - 1 - reply.statuses[::-1].index(Status.OK)
            self._loose.pop(event.parent, None)
            if len(self._loose) >= LOOSE_MAX:
                self._loose.popitem(last=False)
            self._loose[event.rows[last, KEY].tobytes()] = event.session

    def end_session(self, session: int, out: list[ev.Instruction]) -> None:
        """A writer is dead: pieces that it put without their heads are of no use."""
        for key in [key for key, owner in self._loose.items() if owner == session]:
            del self._loose[key]
            if self.find(key) is not None and not self._moving(key):  # else it leaves when it is cold
                self.drop(key, out)

    def delete(self, event: ev.Delete) -> list[ev.Instruction]:
        """The chain that ends with each of these pages goes, in all tiers, as far as nothing else hangs on it."""
        out: list[ev.Instruction] = []
        statuses = []
        for address in event.addresses:
            space = self._space_of(address)
            status = Status.OK
            if not space.sealed(address) or not self._is_objects(space, address):
                status = Status.STALE
            else:
                extent = space.segment.extents[address.extent]
                key = space.records.key(address.extent, address.frame)
                if self._scans() or self._moving(key):
                    status = Status.BUSY
                elif extent.children[address.frame]:
                    status = Status.STALE
                else:
                    self.drop(key, out)
                    self._counters["objects_deleted"] += 1
            statuses.append(int(status))
        out.append(ev.Reply(statuses=statuses))
        return out

    @staticmethod
    def _is_objects(space: Space, address: Address) -> bool:
        """A head or a piece. Pages of a prompt may have the same class; what stands beside them is a digest, or zeros,
        and begins with these words as seldom as a forged one would."""
        tag = space.records.extra(address.extent, address.frame)[: len(HEAD_TAG)]
        frame_class = space.segment.extents[address.extent].pool.frame_class
        return tag in (HEAD_TAG, PIECE_TAG) and is_object_class(frame_class)

    def find(self, key: bytes) -> Address | None:
        """The page of that key, in the fastest tier that has it."""
        return next(filter(None, (space.find(key) for space in self._spaces)), None)

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
        address = space.find(key)
        while address is not None:
            keys.append(key)
            key = space.records.parent(*address[:2])
            at_root = key == space.records.root(*address[:2])
            address = None if at_root else space.find(key)
        return keys

    def _moving(self, key: bytes) -> bool:
        """A page of this object is on its way, or what was stored under its key is not erased yet."""
        if not self._copies.busy:
            return False
        keys = {one for space in self._spaces for one in self._chain(space, key)}
        return self._copies.touches(keys | {key})

    def drop(self, key: bytes, out: list[ev.Instruction]) -> None:
        """The object goes from all tiers, the lowest first: what is left of it then is found by no reboot."""
        spaces = self._spaces[::-1]
        keys = max((self._chain(space, key) for space in spaces), key=len)
        for space in spaces:
            gone: list[bytes] = []
            addresses: list[Address] = []
            for one in keys:
                address = space.find(one)
                if address is None:
                    continue
                if space.segment.extents[address.extent].children[address.frame] != (1 if gone else 0):
                    break
                gone.append(one)
                addresses.append(address)
            if not gone:
                continue
            parent = space.find(keys[keys.index(gone[-1]) + 1]) if gone[-1] != keys[-1] else None
            if parent is not None:
                space.unhold(parent)
            roots = [space.root_of(address) for address in addresses]
            space.retire(addresses, out)
            spans = spans_at(space.segment, addresses)
            out.append(ev.Unindex(gone, space.tier, "dropped", "deleted", roots, spans))
