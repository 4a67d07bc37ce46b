"""Pins: prefixes that an operator keeps from leaving until a deadline, in whichever tiers have them.

Under closure it is enough that something hangs on the last page. A pin names its pages by key and root, so they may
move; what damage takes away it loses. All pins of a tier together keep at most a share of it, and those of one tenant a
share of that; pages under several count once. A pin keeps, and counts, what is stored of the pages that it was asked
for; its name is the last of those, so that asking again, when more is stored, moves its deadline and its end.

At a start, as long as NVMe is scanned, a pin is restored with all its pages, also those that are not there: what the
scan finds is kept from then on. When the scan has ended the pin keeps what is stored, as any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from kvstore.model.replica import Address, FrameState, Tier
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.space import Space
from kvstore.state.tenants import Tenants

PINS_MAX = 1024
TENANT_PINS_MAX = 256
KEYS_MAX = 65536  # of all pins together
TENANT_KEYS_MAX = KEYS_MAX // 2
TENANT_SHARE = 0.75  # of what pins may keep of a tier, by one tenant's


@dataclass(slots=True)
class PinnedChain:
    """Consecutive pages from the start of a chain. ``lengths``: how many of them each tier keeps.

    ``keys`` are longer than those only at a start, see the module.
    """

    keys: list[bytes]
    root: bytes
    asked: bytes
    salt: str  # at the time when it was pinned: whom it counts for
    until_ns: int
    until_s: float  # the same by the wall clock, for people
    frame_bytes: int = 0
    lengths: dict[Tier, int] = field(default_factory=dict)

    @property
    def pages(self) -> int:
        """How many are there."""
        return max(self.lengths.values(), default=0)

    @property
    def awaits(self) -> bytes:
        """The first that is not."""
        return self.keys[self.pages]


@dataclass(slots=True)
class Use:
    """What one tenant's pins take."""

    pins: int = 0
    keys: int = 0
    kept_bytes: Counter[Tier] = field(default_factory=Counter)


class Pins:
    """All pins of a node. Part of ``NodeState``.

    Attributes:
        book: what changed, for the next decision to carry.
    """

    def __init__(self, spaces: dict[Tier, Space], tenants: Tenants, share_max: float) -> None:
        self.spaces = spaces
        self.tenants = tenants
        self.share_max = share_max
        self.pins: dict[int, PinnedChain] = {}
        self.book: list[do.Instruction] = []
        self._next = 1
        self._named: dict[tuple[bytes, bytes], int] = {}  # root and last page asked for -> pin
        self._kept: dict[Tier, Counter[bytes]] = {tier: Counter() for tier in spaces}  # pages by their pins
        self.kept_bytes: dict[Tier, int] = dict.fromkeys(spaces, 0)
        self._uses: dict[str, Use] = {}
        self._keys = 0
        self._waiting: set[int] = set()  # pins of which the scan of NVMe may find more

    def pin(self, event: ev.Pin) -> list[do.Instruction]:
        """See ``events.Pin``."""
        pin = self._measured(event)
        if not pin.pages:
            return [do.Reply(detail={"pages": 0})]
        del pin.keys[pin.pages :]
        same = self._named.get((pin.root, pin.asked), 0)
        refusal = self._refusal(pin, same)
        if refusal:
            return [do.Reply(detail={"refused": refusal})]
        number = same or event.pin or self._next
        while number in self.pins and number != same:
            number += 1
        if same:
            self._end(same)
        self._begin(number, pin)
        self.book.append(_written(number, pin))
        detail = {"pin": number, "pages": pin.pages, "bytes": pin.pages * pin.frame_bytes, "until": pin.until_s}
        return [do.Reply(detail=detail)]

    def restore(self, event: ev.RestorePins) -> list[do.Instruction]:
        """See ``events.RestorePins``. The book is rewritten as a whole, so that a kill loses none of them."""
        scanned = self._is_scanned()
        for asked in event.pins:
            pin = self._measured(asked)
            if scanned:
                del pin.keys[pin.pages :]
            if pin.keys:
                self._begin(asked.pin, pin)
            if pin.pages < len(pin.keys):
                self._waiting.add(asked.pin)
        self.book.append(do.WritePins([_written(number, pin) for number, pin in self.pins.items()]))
        return []

    def adopted(self, keys: Collection[bytes]) -> None:
        """The scan of NVMe has found these pages."""
        for number in [number for number in self._waiting if self.pins[number].awaits in keys]:
            pin = self.pins[number]
            self._end(number)
            self._measure(pin)
            self._begin(number, pin)
            if pin.pages < len(pin.keys):
                self._waiting.add(number)

    def scanned(self) -> None:
        """The scan has done with an extent: where that was the last one, pins keep what there is."""
        if not self._waiting or not self._is_scanned():
            return
        for number in list(self._waiting):
            pin = self.pins[number]
            if not pin.pages:
                self._over([number])
                continue
            self._end(number)
            del pin.keys[pin.pages :]
            self._begin(number, pin)
            self.book.append(_written(number, pin))

    def _is_scanned(self) -> bool:
        """True when all pages in lower tiers are known."""
        _, *lower = self.spaces.values()
        extents = (extent for space in lower for extent in space.segment.extents.values())
        return not any(extent.count(FrameState.QUARANTINED) for extent in extents)

    def _measured(self, event: ev.Pin) -> PinnedChain:
        name = event.root, event.asked or event.keys[-1]
        pin = PinnedChain(list(event.keys), *name, self.tenants.salt(event.root), event.until_ns, event.until_s)
        self._measure(pin)
        return pin

    def _measure(self, pin: PinnedChain) -> None:
        """See what each tier has of a pin that is not counted. A tier keeps what is more than those above it have."""
        pin.lengths.clear()
        for tier, space in self.spaces.items():
            length = self._stored(space, pin.keys, pin.root)
            if length > pin.pages:
                page = space.pages.find(pin.keys[length - 1])
                assert page is not None  # counted just now
                pin.frame_bytes = space.segment.extents[page.extent].pool.frame_class.frame_bytes
                pin.lengths[tier] = length

    def _refusal(self, pin: PinnedChain, same: int) -> str:
        """Why there can be no such pin; "" where there can. ``same``: it takes the place of this one."""
        if not self._begins(pin):
            return "do not begin with the first page of their chain: what is before them would be kept and not counted"
        use = self._uses.get(pin.salt, Use())
        for tier, length in pin.lengths.items():
            segment = self.spaces[tier].segment
            more_bytes = sum(key not in self._kept[tier] for key in pin.keys[:length]) * pin.frame_bytes
            may_bytes = self.share_max * segment.positions * segment.extent_bytes
            if self.kept_bytes[tier] + more_bytes > may_bytes:
                return f"would keep more than {self.share_max:g} of {tier}, see pins_share_max"
            if use.kept_bytes[tier] + more_bytes > TENANT_SHARE * may_bytes:
                return f"would keep more of {tier} than one tenant's may: {TENANT_SHARE:g} of pins_share_max"
        more = len(pin.keys) - (len(self.pins[same].keys) if same else 0)
        if not same and use.pins >= TENANT_PINS_MAX:
            return f"this tenant has {TENANT_PINS_MAX} pins, and may have no more"
        if use.keys + more > TENANT_KEYS_MAX:
            return f"the pins of one tenant may keep {TENANT_KEYS_MAX} pages"
        if (not same and len(self.pins) >= PINS_MAX) or self._keys + more > KEYS_MAX:
            return f"there can be {PINS_MAX} pins of {KEYS_MAX} pages in all"
        return ""

    def unpin(self, event: ev.Unpin) -> list[do.Instruction]:
        """See ``events.Unpin``."""
        number = self._named.get((event.root, event.keys[-1]), 0) if event.keys else event.pin
        found = [number] if number in self.pins else []
        self._over(found)
        return [do.Reply(detail={"unpinned": len(found)})]

    def expire(self, now_ns: int) -> None:
        """Pins past their deadlines end."""
        self._over([number for number, pin in self.pins.items() if pin.until_ns <= now_ns])

    def _over(self, numbers: list[int]) -> None:
        for number in numbers:
            self._end(number)
        if numbers:
            self.book.append(do.ErasePins(numbers))

    def lost(self, space: Space, gone: Collection[bytes]) -> None:
        """These pages are about to go. The caller recounts what hangs on the others, see ``held``."""
        for number, pin in list(self.pins.items()):
            length = pin.lengths.get(space.tier, 0)
            left = next((i for i, key in enumerate(pin.keys[:length]) if key in gone), length)
            if left < length:
                self._keep(pin, space.tier, -length)
                pin.lengths[space.tier] = left
                if left:
                    self._keep(pin, space.tier, left)
                else:
                    del pin.lengths[space.tier]
                    if not pin.lengths and number not in self._waiting:
                        self._forget(number)
                        self.book.append(do.ErasePins([number]))

    def held(self, space: Space) -> list[Address]:
        """Pages that pins hang on, one entry per pin."""
        ends = [pin.keys[pin.lengths[space.tier] - 1] for pin in self.pins.values() if space.tier in pin.lengths]
        return [address for key in ends if (address := space.pages.find(key)) is not None]

    def keeps(self, tier: Tier, key: bytes) -> bool:
        """Whether some pin keeps this page in that tier."""
        return self._kept[tier][key] > 0

    def kept(self, tier: Tier) -> list[bytes]:
        """All pages that pins keep in a tier."""
        return list(self._kept[tier])

    def listing(self) -> list[dict[str, Any]]:
        """One entry per pin."""
        return [
            {
                "pin": number,
                "salt": self.tenants.salt(pin.root),
                "root": pin.root.hex(),
                "pages": pin.pages,
                "bytes": pin.pages * pin.frame_bytes,
                "tiers": {str(tier): length for tier, length in pin.lengths.items()},
                "until": pin.until_s,
                "last": pin.keys[max(pin.pages, 1) - 1].hex(),
            }
            for number, pin in self.pins.items()
        ]

    def _begins(self, pin: PinnedChain) -> bool:
        """Its first page is the first of a chain."""
        space = self.spaces[next(iter(pin.lengths))]
        page = space.pages.find(pin.keys[0])
        return page is not None and space.pages.records.parent(*page[:2]) == pin.root

    @staticmethod
    def _stored(space: Space, keys: list[bytes], root: bytes) -> int:
        """How many leading pages of this root the tier has: by closure all that are before one it has."""

        def has(length: int) -> bool:
            page = space.pages.find(keys[length - 1])
            return page is not None and space.pages.root_of(page) == root

        if has(len(keys)):
            return len(keys)
        low, high = 0, len(keys) - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if has(middle) else (low, middle - 1)
        return low

    def _keep(self, pin: PinnedChain, tier: Tier, length: int) -> None:
        """Count the first ``length`` pages of a pin; negative: not any more."""
        kept, changed = self._kept[tier], 0
        for key in pin.keys[: abs(length)]:
            before = kept[key]
            kept[key] += 1 if length > 0 else -1
            if not before:
                changed += pin.frame_bytes
            elif not kept[key]:
                del kept[key]
                changed -= pin.frame_bytes
        self.kept_bytes[tier] += changed
        self._uses[pin.salt].kept_bytes[tier] += changed

    def _begin(self, number: int, pin: PinnedChain) -> None:
        self.pins[number] = pin
        self._next = max(self._next, number + 1)
        self._named[pin.root, pin.asked] = number
        self._keys += len(pin.keys)
        use = self._uses.setdefault(pin.salt, Use())
        use.pins += 1
        use.keys += len(pin.keys)
        for tier, length in pin.lengths.items():
            self._keep(pin, tier, length)
            address = self.spaces[tier].pages.find(pin.keys[length - 1])
            assert address is not None  # counted just now, see ``_stored``
            self.spaces[tier].pages.hold(address)

    def _end(self, number: int) -> None:
        pin = self.pins[number]
        for tier, length in pin.lengths.items():
            self._keep(pin, tier, -length)
            address = self.spaces[tier].pages.find(pin.keys[length - 1])
            assert address is not None  # held; what damage takes away is known to ``lost``
            self.spaces[tier].pages.unhold(address)
        self._forget(number)

    def _forget(self, number: int) -> None:
        pin = self.pins.pop(number)
        self._waiting.discard(number)
        del self._named[pin.root, pin.asked]
        self._keys -= len(pin.keys)
        use = self._uses[pin.salt]
        use.pins -= 1
        use.keys -= len(pin.keys)
        if not use.pins:
            del self._uses[pin.salt]


def _written(number: int, pin: PinnedChain) -> do.WritePin:
    return do.WritePin(number, list(pin.keys), pin.root, pin.asked, pin.until_ns, pin.until_s)
