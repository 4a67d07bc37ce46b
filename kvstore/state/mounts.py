"""Mounts: memory that engines mount. The node lists its pages under ``Tier.HBM``, but does not decide about them.

An engine mounts a segment, which is a number of frames of one class. It writes the segment's records itself, because
its frames are reused at decode speed, and publishes what it has written (``shm.mounted``). For each frame the node
keeps the generation, key, root and span that were published last. A page is removed when the engine retracts it, reuses
its frame, or ends. Several engines may have the same page. The index names one replica. When that replica is removed,
the index names another.

The memory belongs to the engine, so its bytes are counted per tenant but not limited by quotas. An engine decides what
it keeps, so this tier is not prefix-closed: a page may be here without its parent.

An engine is trusted only about its own segments. Frames beyond the end of a segment are ignored, and so are
generations that are not newer than the frame's. Readers prove pages by the records.
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
MOUNTED_FRAMES_MAX: Final = 1 << 18  # frames of all segments
TOGETHER: Final = 512  # pages per instruction when a segment ends
_OK, _STALE = int(Status.OK), int(Status.STALE)

Place = tuple[int, int]
"""Segment number and frame."""


class MountedSegment:
    """The published pages of one segment. 36 bytes per frame, in addition to the entries of listed pages.

    Life: mounted -> frames are published and retracted -> ended, by its engine or with its engine's session.
    """

    def __init__(self, number: int, session: int, frame_class: FrameClass, frames: int) -> None:
        self.number = number
        self.session = session
        self.frame_class = frame_class
        self.frames = frames
        self.pages = 0
        self.generation = array("Q", bytes(8 * frames))  # 0: no page is published there
        self.owner = array("I", bytes(4 * frames))  # number of the page's root, see ``Tenants``
        self.span = array("Q", bytes(8 * frames))
        self._keys = bytearray(KEY_BYTES * frames)

    def key(self, frame: int) -> bytes:
        """Return the key of the page that was published in this frame last."""
        return bytes(self._keys[KEY_BYTES * frame : KEY_BYTES * (frame + 1)])

    def hold(self, frame: int, generation: int, key: bytes, owner: int, span: int) -> None:
        """Record which page is in this frame."""
        self._keys[KEY_BYTES * frame : KEY_BYTES * (frame + 1)] = key
        self.generation[frame], self.owner[frame], self.span[frame] = generation, owner, span
        self.pages += 1

    def address(self, frame: int) -> Address:
        """Return the address of the page in this frame."""
        return Address(self.number, frame, self.generation[frame])


class Mounts:
    """All segments that are mounted at a node. Part of ``NodeState``.

    Attributes:
        segments: number -> segment. The numbers are extent numbers, so that each address belongs to one tier.
        counters: ``published_bytes``, and the numbers of removed pages: ``evicted_reused`` and ``evicted_ended``.
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
        self._unlisted: dict[bytes, list[Place]] = {}  # further replicas of listed keys

    def handlers(self) -> Mapping[type, Callable[[Any], list[do.Instruction]]]:
        """Return the handler of each event."""
        return {
            ev.Mount: self._mount,
            ev.Publish: self._publish,
            ev.Retract: self._retract,
            ev.Unmount: self._unmount,
            ev.RestoreMount: self._restore,
        }

    def entries(self) -> Iterator[tuple[bytes, Address]]:
        """Return the index entries (key, address), sorted by key."""
        return ((key, self.segments[number].address(frame)) for key, (number, frame) in sorted(self._listed.items()))

    def replicas(self) -> Iterator[tuple[bytes, Address, bytes, int]]:
        """Yield key, address, root and span of every page of every segment."""
        for segment in self.segments.values():
            for frame in range(segment.frames):
                if segment.generation[frame]:
                    root = self._accounts.roots[segment.owner[frame]].root
                    yield segment.key(frame), segment.address(frame), root, segment.span[frame]

    def listed(self) -> Iterator[tuple[bytes, bytes, int]]:
        """Yield key, root and span of every listed page, once."""
        for key, (number, frame) in self._listed.items():
            segment = self.segments[number]
            yield key, self._accounts.roots[segment.owner[frame]].root, segment.span[frame]

    def root_of(self, key: bytes) -> bytes | None:
        """Return the root of the page listed under that key, as its engine published it; None if there is none."""
        place = self._listed.get(key)
        return self._accounts.roots[self.segments[place[0]].owner[place[1]]].root if place is not None else None

    def copies(self) -> dict[int, Any]:
        """Return a copy of the large table, by its ``id``: faster than ``deepcopy``, which copies entry by entry."""
        return {id(self._listed): self._listed.copy()}

    # --- events -----------------------------------------------------------------------------------------------------

    def _mount(self, event: ev.Mount) -> list[do.Instruction]:
        """Mount a segment. The reply's detail has its number as ``segment``."""
        frames = sum(segment.frames for segment in self.segments.values()) + event.frames
        if len(self.segments) >= MOUNTS_MAX or frames > MOUNTED_FRAMES_MAX:
            return [do.Reply(Status.NO_SPACE)]
        number = self._numbers.draw()
        self._sessions.setdefault(event.session, ClientSession())
        self.segments[number] = MountedSegment(number, event.session, event.frame_class, event.frames)
        return [do.WriteMounts(len(self.segments), number + 1), do.Reply(detail={"segment": number})]

    def _restore(self, event: ev.RestoreMount) -> list[do.Instruction]:
        """Restore a segment whose records were found at startup. The check whether its engine is alive is repeated."""
        self._sessions.setdefault(event.session, ClientSession())
        self._numbers.skip(event.segment + 1)
        segment = MountedSegment(event.segment, event.session, event.frame_class, event.frames)
        self.segments[event.segment] = segment
        for (_, frame, generation), key, root, span in zip(
            event.addresses, event.keys, event.roots, event.spans, strict=True
        ):
            if frame < segment.frames and not segment.generation[frame]:
                self._hold(segment, frame, generation, key, self._tenants.number(root, restored=True), span)
        return [do.WriteMounts(len(self.segments), event.segment + 1)]

    def _publish(self, event: ev.Publish) -> list[do.Instruction]:
        segment = self._owned(event.session, event.segment)
        if segment is None or len(event.keys) != len(event.addresses):
            return [do.Reply(Status.STALE, [_STALE] * len(event.addresses))]
        out: list[do.Instruction] = []
        fresh = [self._is_fresh(segment, address) for address in event.addresses]
        reused = {a.frame for a, new in zip(event.addresses, fresh, strict=True) if new and segment.generation[a.frame]}
        self._remove(segment, sorted(reused), "reused", out)
        spans = spans_of(event.keys, event.position, event.before)
        number = self._tenants.number(event.root)
        listed: list[tuple[bytes, Address, int]] = []
        statuses = list[int]()
        for address, key, span, new in zip(event.addresses, event.keys, spans, fresh, strict=True):
            is_new = new and not segment.generation[address.frame]  # an event may name a frame only once
            statuses.append(_OK if is_new else _STALE)
            if is_new and self._hold(segment, address.frame, address.generation, key, number, span):
                listed.append((key, segment.address(address.frame), span))
        if listed:
            keys, addresses, key_spans = (list(column) for column in zip(*listed, strict=True))
            out.append(do.ShowPages(keys, addresses, event.root, key_spans))
        self.counters["published_bytes"] += statuses.count(_OK) * segment.frame_class.page_bytes
        return [*out, do.Reply(statuses=statuses)]

    def _retract(self, event: ev.Retract) -> list[do.Instruction]:
        segment = self._owned(event.session, event.segment)
        if segment is None:
            return [do.Reply(Status.STALE, [_STALE] * len(event.addresses))]
        current = [
            a.frame < segment.frames and segment.generation[a.frame] == a.generation != 0 for a in event.addresses
        ]
        out: list[do.Instruction] = []
        frames = {address.frame for address, is_current in zip(event.addresses, current, strict=True) if is_current}
        self._remove(segment, sorted(frames), "reused", out)
        return [*out, do.Reply(statuses=[_OK if is_current else _STALE for is_current in current])]

    def _unmount(self, event: ev.Unmount) -> list[do.Instruction]:
        segment = self._owned(event.session, event.segment)
        if segment is None:
            return [do.Reply(Status.STALE)]
        out: list[do.Instruction] = []
        self._end(segment, out)
        return [*out, do.Reply()]

    def end_session(self, session: int, out: list[do.Instruction]) -> None:
        """End the segments of a dead engine: their pages can no longer be read."""
        for segment in [one for one in self.segments.values() if one.session == session]:
            self._end(segment, out)

    # --- pages ------------------------------------------------------------------------------------------------------

    def _owned(self, session: int, number: int) -> MountedSegment | None:
        segment = self.segments.get(number)
        return segment if segment is not None and segment.session == session else None

    @staticmethod
    def _is_fresh(segment: MountedSegment, address: Address) -> bool:
        return address.frame < segment.frames and address.generation > segment.generation[address.frame]

    def _hold(self, segment: MountedSegment, frame: int, generation: int, key: bytes, number: int, span: int) -> bool:
        """Record a page in a free frame. Return True if the index lists this replica."""
        segment.hold(frame, generation, key, number, span)
        self._accounts.add(number, 1, segment.frame_class.frame_bytes)
        place = segment.number, frame
        if self._listed.setdefault(key, place) is place:
            return True
        self._unlisted.setdefault(key, []).append(place)
        return False

    def _remove(self, segment: MountedSegment, frames: list[int], reason: str, out: list[do.Instruction]) -> None:
        """Remove the pages in these frames, and update the index."""
        self.counters[f"evicted_{reason}"] += len(frames)
        removed: dict[bytes, tuple[bytes, int]] = {}  # root and span of keys whose listed replica is removed
        for frame in frames:
            key, owner, span = segment.key(frame), segment.owner[frame], segment.span[frame]
            segment.generation[frame] = 0
            segment.pages -= 1
            self._accounts.add(owner, -1, -segment.frame_class.frame_bytes)
            if self._remove_replica(key, (segment.number, frame)):
                removed[key] = self._accounts.roots[owner].root, span
        unlisted = [key for key in removed if key not in self._listed]
        if unlisted:
            roots, spans = [removed[key][0] for key in unlisted], [removed[key][1] for key in unlisted]
            out.append(do.Unindex(unlisted, Tier.HBM, "evicted", reason, roots, spans))
        moved = [(key, self._listed[key]) for key in removed if key in self._listed]
        if moved:
            addresses = [self.segments[number].address(frame) for _, (number, frame) in moved]
            out.append(do.ShowPages([key for key, _ in moved], addresses))

    def _remove_replica(self, key: bytes, place: Place) -> bool:
        """Remove one replica of a key. Return True if it was the listed one; another replica, if any, is then
        listed."""
        others = self._unlisted.get(key, [])
        was_listed = self._listed[key] == place
        if not was_listed:
            others.remove(place)
        elif others:
            self._listed[key] = others.pop(0)
        else:
            del self._listed[key]
        if key in self._unlisted and not others:
            del self._unlisted[key]
        return was_listed

    def _end(self, segment: MountedSegment, out: list[do.Instruction]) -> None:
        frames = [frame for frame in range(segment.frames) if segment.generation[frame]]
        for start in range(0, len(frames), TOGETHER):
            self._remove(segment, frames[start : start + TOGETHER], "ended", out)
        del self.segments[segment.number]
        out += [do.EndMount(segment.number), do.WriteMounts(len(self.segments))]
