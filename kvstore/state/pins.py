"""Pins: an operator keeps prefixes from being evicted until a deadline, in whichever tiers have them.

To pin a prefix in a tier it is enough to hold its last page there, because pages with children never leave. A pin
names its pages by key and root, so they may move. A page that is dropped because of damage is lost to the pin.

All pins of a tier together may keep a share of it, and the pins of one tenant a share of that. A page under several
pins counts once. A pin keeps and counts those of its requested pages that are stored. It is named by the last
requested page, so that a second request, when more pages are stored, moves its deadline and its end.

While NVMe is scanned after startup, a pin is restored with all its pages, stored or not, and keeps each page once the
scan has found it. When the scan has ended, the pin keeps the pages that are stored, like any other pin.
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
KEYS_MAX = 65536  # pages of all pins together
TENANT_KEYS_MAX = KEYS_MAX // 2
TENANT_SHARE = 0.75  # limit of one tenant's pins in a tier, as a share of the limit of all pins


@dataclass(slots=True)
class PinnedChain:
    """The pages of a pin: consecutive pages from the start of a chain.

    Attributes:
        keys: the pages' keys. During the scan after startup, some of these pages might not be stored.
        asked: the last requested page.
        salt: the tenant that the pin counts for: the root's tenant when it was pinned.
        until_s: the deadline by the wall clock, for people.
        lengths: how many of the pages each tier keeps.
    """

    keys: list[bytes]
    root: bytes
    asked: bytes
    salt: str
    until_ns: int
    until_s: float
    frame_bytes: int = 0
    lengths: dict[Tier, int] = field(default_factory=dict)

    @property
    def pages(self) -> int:
        """Number of pages that are stored in some tier."""
        return max(self.lengths.values(), default=0)

    @property
    def next_key(self) -> bytes:
        """Key of the first page that is not stored."""
        return self.keys[self.pages]


@dataclass(slots=True)
class PinUsage:
    """Number and size of one tenant's pins."""

    pins: int = 0
    keys: int = 0
    kept_bytes: Counter[Tier] = field(default_factory=Counter)


class Pins:
    """All pins of a node. Part of ``NodeState``.

    Attributes:
        book: changes of pins, which the next decision returns as instructions.
    """

    def __init__(self, spaces: dict[Tier, Space], tenants: Tenants, share_max: float) -> None:
        self.spaces = spaces
        self.tenants = tenants
        self.share_max = share_max
        self.pins: dict[int, PinnedChain] = {}
        self.book: list[do.Instruction] = []
        self._next = 1
        self._by_name: dict[tuple[bytes, bytes], int] = {}  # root and last requested page -> pin
        self._pins_of: dict[Tier, Counter[bytes]] = {tier: Counter() for tier in spaces}  # number of pins of each page
        self.kept_bytes: dict[Tier, int] = dict.fromkeys(spaces, 0)
        self._usage: dict[str, PinUsage] = {}  # by salt
        self._keys = 0
        self._incomplete: set[int] = set()  # pins for which the scan of NVMe may find more pages

    def pin(self, event: ev.Pin) -> list[do.Instruction]:
        """Handle ``events.Pin``."""
        pin = self._new_chain(event)
        if not pin.pages:
            return [do.Reply(detail={"pages": 0})]
        del pin.keys[pin.pages :]
        same = self._by_name.get((pin.root, pin.asked), 0)
        refusal = self._refusal(pin, same)
        if refusal:
            return [do.Reply(detail={"refused": refusal})]
        number = same or event.pin or self._next
        while number in self.pins and number != same:
            number += 1
        if same:
            self._remove(same)
        self._add(number, pin)
        self.book.append(_write_pin(number, pin))
        detail = {"pin": number, "pages": pin.pages, "bytes": pin.pages * pin.frame_bytes, "until": pin.until_s}
        return [do.Reply(detail=detail)]

    def restore(self, event: ev.RestorePins) -> list[do.Instruction]:
        """Handle ``events.RestorePins``. All pins are written to the book again, so that a kill loses none of them."""
        is_scanned = self._is_scanned()
        for request in event.pins:
            pin = self._new_chain(request)
            if is_scanned:
                del pin.keys[pin.pages :]
            if pin.keys:
                self._add(request.pin, pin)
            if pin.pages < len(pin.keys):
                self._incomplete.add(request.pin)
        self.book.append(do.WritePins([_write_pin(number, pin) for number, pin in self.pins.items()]))
        return []

    def adopted(self, keys: Collection[bytes]) -> None:
        """Extend pins by these pages, which the scan of NVMe has found."""
        for number in [number for number in self._incomplete if self.pins[number].next_key in keys]:
            pin = self.pins[number]
            self._remove(number)
            self._measure(pin)
            self._add(number, pin)
            if pin.pages < len(pin.keys):
                self._incomplete.add(number)

    def scanned(self) -> None:
        """Note that the scan of an extent has ended. After the last extent, cut pins to the pages that are stored."""
        if not self._incomplete or not self._is_scanned():
            return
        for number in list(self._incomplete):
            pin = self.pins[number]
            if not pin.pages:
                self._end([number])
                continue
            self._remove(number)
            del pin.keys[pin.pages :]
            self._add(number, pin)
            self.book.append(_write_pin(number, pin))

    def _is_scanned(self) -> bool:
        """Return True once all pages in lower tiers are known."""
        _, *lower = self.spaces.values()
        extents = (extent for space in lower for extent in space.segment.extents.values())
        return not any(extent.count(FrameState.QUARANTINED) for extent in extents)

    def _new_chain(self, event: ev.Pin) -> PinnedChain:
        name = event.root, event.asked or event.keys[-1]
        pin = PinnedChain(list(event.keys), *name, self.tenants.salt(event.root), event.until_ns, event.until_s)
        self._measure(pin)
        return pin

    def _measure(self, pin: PinnedChain) -> None:
        """Find how many pages of a pin each tier has. A tier keeps pages if it has more of them than every upper
        tier."""
        pin.lengths.clear()
        for tier, space in self.spaces.items():
            length = self._stored(space, pin.keys, pin.root)
            if length > pin.pages:
                page = space.pages.find(pin.keys[length - 1])
                assert page is not None  # counted just now
                pin.frame_bytes = space.segment.extents[page.extent].pool.frame_class.frame_bytes
                pin.lengths[tier] = length

    def _refusal(self, pin: PinnedChain, same: int) -> str:
        """Return why the pin must be refused, or "". ``same``: number of the pin that it would replace, or 0."""
        if not self._starts_chain(pin):
            return "do not begin with the first page of their chain: what is before them would be kept and not counted"
        usage = self._usage.get(pin.salt, PinUsage())
        for tier, length in pin.lengths.items():
            segment = self.spaces[tier].segment
            more_bytes = sum(key not in self._pins_of[tier] for key in pin.keys[:length]) * pin.frame_bytes
            may_bytes = self.share_max * segment.positions * segment.extent_bytes
            if self.kept_bytes[tier] + more_bytes > may_bytes:
                return f"would keep more than {self.share_max:g} of {tier}, see pins_share_max"
            if usage.kept_bytes[tier] + more_bytes > TENANT_SHARE * may_bytes:
                return f"would keep more of {tier} than one tenant's may: {TENANT_SHARE:g} of pins_share_max"
        more = len(pin.keys) - (len(self.pins[same].keys) if same else 0)
        if not same and usage.pins >= TENANT_PINS_MAX:
            return f"this tenant has {TENANT_PINS_MAX} pins, and may have no more"
        if usage.keys + more > TENANT_KEYS_MAX:
            return f"the pins of one tenant may keep {TENANT_KEYS_MAX} pages"
        if (not same and len(self.pins) >= PINS_MAX) or self._keys + more > KEYS_MAX:
            return f"there can be {PINS_MAX} pins of {KEYS_MAX} pages in all"
        return ""

    def unpin(self, event: ev.Unpin) -> list[do.Instruction]:
        """Handle ``events.Unpin``."""
        number = self._by_name.get((event.root, event.keys[-1]), 0) if event.keys else event.pin
        numbers = [number] if number in self.pins else []
        self._end(numbers)
        return [do.Reply(detail={"unpinned": len(numbers)})]

    def expire(self, now_ns: int) -> None:
        """End the pins whose deadline has passed."""
        self._end([number for number, pin in self.pins.items() if pin.until_ns <= now_ns])

    def _end(self, numbers: list[int]) -> None:
        for number in numbers:
            self._remove(number)
        if numbers:
            self.book.append(do.ErasePins(numbers))

    def lost(self, space: Space, dropped: Collection[bytes]) -> None:
        """Shorten the pins whose pages are about to be dropped. The caller recounts all holds, see ``held_pages``."""
        for number, pin in list(self.pins.items()):
            length = pin.lengths.get(space.tier, 0)
            remaining = next((i for i, key in enumerate(pin.keys[:length]) if key in dropped), length)
            if remaining < length:
                self._count(pin, space.tier, -length)
                pin.lengths[space.tier] = remaining
                if remaining:
                    self._count(pin, space.tier, remaining)
                else:
                    del pin.lengths[space.tier]
                    if not pin.lengths and number not in self._incomplete:
                        self._forget(number)
                        self.book.append(do.ErasePins([number]))

    def release(self, keys: Collection[bytes]) -> None:
        """End the pins that keep any of these pages, because their owner deletes or replaces them."""
        if not self.pins or not any(key in pins_of for pins_of in self._pins_of.values() for key in keys):
            return
        wanted = set(keys)
        self._end([number for number, pin in self.pins.items() if not wanted.isdisjoint(pin.keys[: pin.pages])])

    def held_pages(self, space: Space) -> list[Address]:
        """Return the pages that pins hold, one entry per pin."""
        ends = [pin.keys[pin.lengths[space.tier] - 1] for pin in self.pins.values() if space.tier in pin.lengths]
        return [address for key in ends if (address := space.pages.find(key)) is not None]

    def is_pinned(self, tier: Tier, key: bytes) -> bool:
        """Return True if a pin keeps this page in that tier."""
        return self._pins_of[tier][key] > 0

    def pinned_keys(self, tier: Tier) -> list[bytes]:
        """Return the keys of all pages that pins keep in a tier."""
        return list(self._pins_of[tier])

    def listing(self) -> list[dict[str, Any]]:
        """Return a description of each pin."""
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

    def _starts_chain(self, pin: PinnedChain) -> bool:
        """Return True if the first page of the pin is the first page of its chain."""
        space = self.spaces[next(iter(pin.lengths))]
        page = space.pages.find(pin.keys[0])
        return page is not None and space.pages.records.parent(*page[:2]) == pin.root

    @staticmethod
    def _stored(space: Space, keys: list[bytes], root: bytes) -> int:
        """Return how many leading pages of this root the tier has. By prefix closure, a tier that has a page has all
        pages before it."""

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

    def _count(self, pin: PinnedChain, tier: Tier, length: int) -> None:
        """Count the first ``length`` pages of a pin as kept; a negative ``length`` takes them out of the count."""
        pins_of, changed_bytes = self._pins_of[tier], 0
        for key in pin.keys[: abs(length)]:
            before = pins_of[key]
            pins_of[key] += 1 if length > 0 else -1
            if not before:
                changed_bytes += pin.frame_bytes
            elif not pins_of[key]:
                del pins_of[key]
                changed_bytes -= pin.frame_bytes
        self.kept_bytes[tier] += changed_bytes
        self._usage[pin.salt].kept_bytes[tier] += changed_bytes

    def _add(self, number: int, pin: PinnedChain) -> None:
        self.pins[number] = pin
        self._next = max(self._next, number + 1)
        self._by_name[pin.root, pin.asked] = number
        self._keys += len(pin.keys)
        usage = self._usage.setdefault(pin.salt, PinUsage())
        usage.pins += 1
        usage.keys += len(pin.keys)
        for tier, length in pin.lengths.items():
            self._count(pin, tier, length)
            address = self.spaces[tier].pages.find(pin.keys[length - 1])
            assert address is not None  # counted just now, see ``_stored``
            self.spaces[tier].pages.hold(address)

    def _remove(self, number: int) -> None:
        pin = self.pins[number]
        for tier, length in pin.lengths.items():
            self._count(pin, tier, -length)
            address = self.spaces[tier].pages.find(pin.keys[length - 1])
            assert address is not None  # a held page is not evicted, and ``lost`` handles damage
            self.spaces[tier].pages.unhold(address)
        self._forget(number)

    def _forget(self, number: int) -> None:
        pin = self.pins.pop(number)
        self._incomplete.discard(number)
        del self._by_name[pin.root, pin.asked]
        self._keys -= len(pin.keys)
        usage = self._usage[pin.salt]
        usage.pins -= 1
        usage.keys -= len(pin.keys)
        if not usage.pins:
            del self._usage[pin.salt]


def _write_pin(number: int, pin: PinnedChain) -> do.WritePin:
    return do.WritePin(number, list(pin.keys), pin.root, pin.asked, pin.until_ns, pin.until_s)
