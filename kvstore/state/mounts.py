"""Mounts: memory of engines, whose pages the node knows and lists under ``Tier.HBM``, and does not decide about.

An engine mounts a segment: a number of frames of one class. It writes the segment's records itself, since its frames
turn over at decode speed, and publishes what it has written (``shm.mounted``). The node mirrors that: of each frame
the generation under which the engine published it, its page's key, root and span. What the engine takes back, and all
that it has when it ends, leaves again. Several engines may have one page: the index names one replica, and the next
when that one goes.

The memory is the engine's own, so its bytes are counted per tenant and not charged to any quota. An engine keeps what
it likes, so this tier is not prefix-closed: a page may be here without those before it.

Nothing that comes from an engine is trusted further than that it speaks of its own segments: frames beyond the end, and
generations that are not newer than what the frame has, are passed over. Readers prove pages by the records.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from kvstore.model.prefix import spans_of
from kvstore.model.replica import KEY_BYTES, Address, FrameClass, Status, Tier
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.frames import ExtentNumbers
from kvstore.state.interfaces import ClientSession
from kvstore.state.tenants import Tenants

MOUNTS_MAX: Final = 64  # segments at a time
MOUNTED_FRAMES_MAX: Final = 1 << 18  # of all of them together
TOGETHER: Final = 512  # pages of one instruction, where a whole segment goes
_OK, _STALE = int(Status.OK), int(Status.STALE)

Place = tuple[int, int]
"""Segment and frame."""


class MountedSegment:
    """What the node knows of one segment. 36 bytes per frame, in addition to what is listed.

    Life: mounted -> its frames are published and taken back -> ended, by its engine or with its engine's session.
    """

    def __init__(self, number: int, session: int, frame_class: FrameClass, frames: int) -> None:
        self.number = number
        self.session = session
        self.frame_class = frame_class
        self.frames = frames
        self.pages = 0
        self.generation = array("Q", bytes(8 * frames))  # 0: nothing is published there
        self.owner = array("I", bytes(4 * frames))  # number of the page's root, see ``Tenants``
        self.span = array("Q", bytes(8 * frames))
        self._keys = bytearray(KEY_BYTES * frames)

    def key(self, frame: int) -> bytes:
        """The key of the page that was published there last."""
        return bytes(self._keys[KEY_BYTES * frame : KEY_BYTES * (frame + 1)])

    def hold(self, frame: int, generation: int, key: bytes, owner: int, span: int) -> None:
        """Record which page is in this frame."""
        self._keys[KEY_BYTES * frame : KEY_BYTES * (frame + 1)] = key
        self.generation[frame], self.owner[frame], self.span[frame] = generation, owner, span
        self.pages += 1

    def address(self, frame: int) -> Address:
        """The address of the page that is in this frame."""
        return Address(self.number, frame, self.generation[frame])


class Mounts:
    """All segments that are mounted at a node. Part of ``NodeState``; see the module.

    Attributes:
        segments: by number; numbers are extent numbers, so that an address is of one tier alone.
        counters: ``published_bytes``, and pages that left, as ``evicted_reused`` and ``evicted_ended``.
    """

    def __init__(
        self,
        numbers: ExtentNumbers,
        tenants: Tenants,
        sessions: dict[int, ClientSession],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.segments: dict[int, MountedSegment] = {}
        self._numbers = numbers
        self._tenants = tenants
        self._accounts = tenants.holdings[Tier.HBM]
        self._sessions = sessions
        self._listed: dict[bytes, Place] = {}
        self._others: dict[bytes, list[Place]] = {}  # more replicas of listed keys

    def handlers(self) -> Mapping[type, Callable[[Any], list[do.Instruction]]]:
        """The handler of each event."""
        return {
            ev.Mount: self._mount,
            ev.Publish: self._publish,
            ev.Retract: self._retract,
            ev.Unmount: self._unmount,
            ev.FoundMount: self._found,
        }

    def entries(self) -> Iterator[tuple[bytes, Address]]:
        """What the index lists: key and address, by key."""
        return ((key, self.segments[number].address(frame)) for key, (number, frame) in sorted(self._listed.items()))

    def replicas(self) -> Iterator[tuple[bytes, Address, bytes, int]]:
        """Key, address, root and span of every page of every segment."""
        for segment in self.segments.values():
            for frame in range(segment.frames):
                if segment.generation[frame]:
                    root = self._accounts.roots[segment.owner[frame]].root
                    yield segment.key(frame), segment.address(frame), root, segment.span[frame]

    def listed(self) -> Iterator[tuple[bytes, bytes, int]]:
        """Key, root and span of every page that is here, once."""
        for key, (number, frame) in self._listed.items():
            segment = self.segments[number]
            yield key, self._accounts.roots[segment.owner[frame]].root, segment.span[frame]

    def root_of(self, key: bytes) -> bytes | None:
        """The root of the page that is listed under that key, as its engine says; None where there is none."""
        place = self._listed.get(key)
        return self._accounts.roots[self.segments[place[0]].owner[place[1]]].root if place is not None else None

    def copies(self) -> dict[int, Any]:
        """What is large here, by its ``id``: copied at once, where ``deepcopy`` would take it entry by entry."""
        return {id(self._listed): self._listed.copy()}

    # --- events -----------------------------------------------------------------------------------------------------

    def _mount(self, event: ev.Mount) -> list[do.Instruction]:
        """The reply's detail names the ``segment``."""
        frames = sum(segment.frames for segment in self.segments.values()) + event.frames
        if len(self.segments) >= MOUNTS_MAX or frames > MOUNTED_FRAMES_MAX:
            return [do.Reply(Status.NO_SPACE)]
        number = self._numbers.draw()
        self._sessions.setdefault(event.session, ClientSession())
        self.segments[number] = MountedSegment(number, event.session, event.frame_class, event.frames)
        return [do.WriteMounts(len(self.segments), number + 1), do.Reply(detail={"segment": number})]

    def _found(self, event: ev.FoundMount) -> list[do.Instruction]:
        """A start has found its records; its engine lived just then, and is looked for again."""
        self._sessions.setdefault(event.session, ClientSession())
        self._numbers.skip(event.segment + 1)
        segment = MountedSegment(event.segment, event.session, event.frame_class, event.frames)
        self.segments[event.segment] = segment
        for (_, frame, generation), key, root, span in zip(
            event.addresses, event.keys, event.roots, event.spans, strict=True
        ):
            if frame < segment.frames and not segment.generation[frame]:
                self._hold(segment, frame, generation, key, self._tenants.number(root, found=True), span)
        return [do.WriteMounts(len(self.segments), event.segment + 1)]

    def _publish(self, event: ev.Publish) -> list[do.Instruction]:
        segment = self._owned(event.session, event.segment)
        if segment is None or len(event.keys) != len(event.addresses):
            return [do.Reply(Status.STALE, [_STALE] * len(event.addresses))]
        out: list[do.Instruction] = []
        fresh = [self._is_fresh(segment, address) for address in event.addresses]
        used = {a.frame for a, new in zip(event.addresses, fresh, strict=True) if new and segment.generation[a.frame]}
        self._leave(segment, sorted(used), "reused", out)
        spans = spans_of(event.keys, event.position, event.before)
        number = self._tenants.number(event.root)
        shown: list[tuple[bytes, Address, int]] = []
        statuses = list[int]()
        for address, key, span, new in zip(event.addresses, event.keys, spans, fresh, strict=True):
            there = new and not segment.generation[address.frame]  # no frame twice in one event
            statuses.append(_OK if there else _STALE)
            if there and self._hold(segment, address.frame, address.generation, key, number, span):
                shown.append((key, segment.address(address.frame), span))
        if shown:
            keys, addresses, names = (list(column) for column in zip(*shown, strict=True))
            out.append(do.ShowPages(keys, addresses, event.root, names))
        self.counters["published_bytes"] += statuses.count(_OK) * segment.frame_class.page_bytes
        return [*out, do.Reply(statuses=statuses)]

    def _retract(self, event: ev.Retract) -> list[do.Instruction]:
        segment = self._owned(event.session, event.segment)
        if segment is None:
            return [do.Reply(Status.STALE, [_STALE] * len(event.addresses))]
        there = [a.frame < segment.frames and segment.generation[a.frame] == a.generation != 0 for a in event.addresses]
        out: list[do.Instruction] = []
        frames = {address.frame for address, sound in zip(event.addresses, there, strict=True) if sound}
        self._leave(segment, sorted(frames), "reused", out)
        return [*out, do.Reply(statuses=[_OK if sound else _STALE for sound in there])]

    def _unmount(self, event: ev.Unmount) -> list[do.Instruction]:
        segment = self._owned(event.session, event.segment)
        if segment is None:
            return [do.Reply(Status.STALE)]
        out: list[do.Instruction] = []
        self._end(segment, out)
        return [*out, do.Reply()]

    def end_session(self, session: int, out: list[do.Instruction]) -> None:
        """The engine is dead: nothing that it had can be read any more."""
        for segment in [each for each in self.segments.values() if each.session == session]:
            self._end(segment, out)

    # --- pages ------------------------------------------------------------------------------------------------------

    def _owned(self, session: int, number: int) -> MountedSegment | None:
        segment = self.segments.get(number)
        return segment if segment is not None and segment.session == session else None

    @staticmethod
    def _is_fresh(segment: MountedSegment, address: Address) -> bool:
        return address.frame < segment.frames and address.generation > segment.generation[address.frame]

    def _hold(self, segment: MountedSegment, frame: int, generation: int, key: bytes, number: int, span: int) -> bool:
        """The page is in that frame, which is free. Whether it is listed with that."""
        segment.hold(frame, generation, key, number, span)
        self._accounts.add(number, 1, segment.frame_class.frame_bytes)
        place = segment.number, frame
        if self._listed.setdefault(key, place) is place:
            return True
        self._others.setdefault(key, []).append(place)
        return False

    def _leave(self, segment: MountedSegment, frames: list[int], reason: str, out: list[do.Instruction]) -> None:
        """What is in these frames leaves them."""
        self.counters[f"evicted_{reason}"] += len(frames)
        left: dict[bytes, tuple[bytes, int]] = {}  # keys whose listed replica leaves: root and span
        for frame in frames:
            key, owner, span = segment.key(frame), segment.owner[frame], segment.span[frame]
            segment.generation[frame] = 0
            segment.pages -= 1
            self._accounts.add(owner, -1, -segment.frame_class.frame_bytes)
            if self._without(key, (segment.number, frame)):
                left[key] = self._accounts.roots[owner].root, span
        gone = [key for key in left if key not in self._listed]
        if gone:
            roots, spans = [left[key][0] for key in gone], [left[key][1] for key in gone]
            out.append(do.Unindex(gone, Tier.HBM, "evicted", reason, roots, spans))
        heirs = [(key, self._listed[key]) for key in left if key in self._listed]
        if heirs:
            addresses = [self.segments[number].address(frame) for _, (number, frame) in heirs]
            out.append(do.ShowPages([key for key, _ in heirs], addresses))

    def _without(self, key: bytes, place: Place) -> bool:
        """One replica less; another one is listed in its stead. Whether it was the listed one."""
        others = self._others.get(key, [])
        was_listed = self._listed[key] == place
        if not was_listed:
            others.remove(place)
        elif others:
            self._listed[key] = others.pop(0)
        else:
            del self._listed[key]
        if key in self._others and not others:
            del self._others[key]
        return was_listed

    def _end(self, segment: MountedSegment, out: list[do.Instruction]) -> None:
        frames = [frame for frame in range(segment.frames) if segment.generation[frame]]
        for start in range(0, len(frames), TOGETHER):
            self._leave(segment, frames[start : start + TOGETHER], "ended", out)
        del self.segments[segment.number]
        out += [do.EndMount(segment.number), do.WriteMounts(len(self.segments))]
