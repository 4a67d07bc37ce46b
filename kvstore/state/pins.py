"""Pins: prefixes that an operator keeps from leaving until a deadline, in whichever tiers have them.

Under closure it is enough that something hangs on the last page. A pin names its pages by key, so they may move; what
damage takes away it loses. All pins of a tier together keep at most a share of it; pages under several count once.
Pinning what is pinned already moves the deadline of that pin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from kvstore.model.replica import Address, Tier
from kvstore.state import events as ev
from kvstore.state.space import Space
from kvstore.state.tenants import Tenants

PINS_MAX = 1024
TENANT_PINS_MAX = 256
KEYS_MAX = 65536  # of all pins together: they are written down as a whole


@dataclass(slots=True)
class Pin:
    """Consecutive pages from the start of a chain. ``lengths``: how many of them each tier keeps."""

    keys: list[bytes]
    root: bytes
    until_ns: int
    until_s: float  # the same by the wall clock, which outlives a daemon
    frame_bytes: int = 0
    lengths: dict[Tier, int] = field(default_factory=dict)


class Pins:
    """All pins of a node. Part of ``NodeState``."""

    def __init__(self, spaces: dict[Tier, Space], tenants: Tenants, share_max: float) -> None:
        self.spaces = spaces
        self.tenants = tenants
        self.share_max = share_max
        self.pins: dict[int, Pin] = {}
        self._next = 1
        self._kept: dict[Tier, Counter[bytes]] = {tier: Counter() for tier in spaces}  # pages by their pins
        self.kept_bytes: dict[Tier, int] = dict.fromkeys(spaces, 0)

    def pin(self, event: ev.Pin) -> list[ev.Instruction]:
        """See ``events.Pin``."""
        pin = Pin(event.keys, event.root, event.until_ns, event.until_s)
        for tier, space in self.spaces.items():
            length = self._stored(space, event.keys)
            if length > max(pin.lengths.values(), default=0):
                page = space.find(event.keys[0])
                assert page is not None
                pin.frame_bytes = space.segment.extents[page.extent].pool.frame_class.frame_bytes
                pin.lengths[tier] = length
        pages = max(pin.lengths.values(), default=0)
        if not pages:
            return [ev.Reply(detail={"pages": 0})]
        same = next((n for n, old in self.pins.items() if old.keys == pin.keys and not event.restore), 0)
        refusal = "" if event.restore else self._refusal(pin, same)
        if refusal:
            return [ev.Reply(detail={"refused": refusal})]
        number = same or event.pin or self._next
        while number in self.pins and not same:
            number += 1
        self._next = max(self._next, number + 1)
        if same:
            self._end(same)
        self.pins[number] = pin
        for tier, length in pin.lengths.items():
            self._keep(pin, tier, length)
            address = self.spaces[tier].find(pin.keys[length - 1])
            assert address is not None
            self.spaces[tier].hold(address)
        detail = {"pin": number, "pages": pages, "bytes": pages * pin.frame_bytes, "until": pin.until_s}
        return [self.book(), ev.Reply(detail=detail)]

    def _refusal(self, pin: Pin, same: int) -> str:
        """Why there can be no such pin; "" where there can. ``same``: it takes the place of this one."""
        if not self._begins(pin):
            return "do not begin with the first page of their chain: what is before them would be kept and not counted"
        for tier, length in pin.lengths.items():
            segment = self.spaces[tier].segment
            new = sum(key not in self._kept[tier] for key in pin.keys[:length])
            if (
                self.kept_bytes[tier] + new * pin.frame_bytes
                > self.share_max * segment.positions * segment.extent_bytes
            ):
                return f"would keep more than {self.share_max:g} of {tier}, see pins_share_max"
        if same:
            return ""
        salt = self.tenants.salt(pin.root)
        if sum(self.tenants.salt(old.root) == salt for old in self.pins.values()) >= TENANT_PINS_MAX:
            return f"this tenant has {TENANT_PINS_MAX} pins, and may have no more"
        if len(self.pins) >= PINS_MAX or sum(len(old.keys) for old in self.pins.values()) + len(pin.keys) > KEYS_MAX:
            return f"there can be {PINS_MAX} pins of {KEYS_MAX} pages in all"
        return ""

    def unpin(self, event: ev.Unpin) -> list[ev.Instruction]:
        """See ``events.Unpin``."""
        found = [
            n for n, pin in self.pins.items() if n == event.pin or (event.keys and pin.keys[-1:] == event.keys[-1:])
        ]
        for number in found:
            self._end(number)
        return [self.book(), ev.Reply(detail={"unpinned": len(found)})]

    def expire(self, now_ns: int) -> list[ev.Instruction]:
        """Pins past their deadlines end."""
        over = [number for number, pin in self.pins.items() if pin.until_ns <= now_ns]
        for number in over:
            self._end(number)
        return [self.book()] if over else []

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
                    if not pin.lengths:
                        del self.pins[number]

    def held(self, space: Space) -> list[Address]:
        """Pages that pins hang on, one entry per pin."""
        ends = [pin.keys[pin.lengths[space.tier] - 1] for pin in self.pins.values() if space.tier in pin.lengths]
        return [address for key in ends if (address := space.find(key)) is not None]

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
                "pages": max(pin.lengths.values()),
                "bytes": max(pin.lengths.values()) * pin.frame_bytes,
                "tiers": {str(tier): length for tier, length in pin.lengths.items()},
                "until": pin.until_s,
                "last": pin.keys[max(pin.lengths.values()) - 1].hex(),
            }
            for number, pin in self.pins.items()
        ]

    def book(self) -> ev.WritePins:
        """What has to outlive the daemon."""
        return ev.WritePins(
            [
                {"pin": n, "keys": b"".join(pin.keys).hex(), "root": pin.root.hex(), "until": pin.until_s}
                for n, pin in self.pins.items()
            ]
        )

    def _begins(self, pin: Pin) -> bool:
        """Its first page is the first of a chain."""
        space = self.spaces[next(iter(pin.lengths))]
        page = space.find(pin.keys[0])
        assert page is not None  # stored, as ``lengths`` says
        return space.records.parent(*page[:2]) == space.records.root(*page[:2])

    @staticmethod
    def _stored(space: Space, keys: list[bytes]) -> int:
        """How many leading pages this tier has."""
        return next((i for i, key in enumerate(keys) if space.find(key) is None), len(keys))

    def _keep(self, pin: Pin, tier: Tier, length: int) -> None:
        """Count the first ``length`` pages of a pin; negative: not any more."""
        kept = self._kept[tier]
        for key in pin.keys[: abs(length)]:
            before = kept[key]
            kept[key] += 1 if length > 0 else -1
            if not before:
                self.kept_bytes[tier] += pin.frame_bytes
            elif not kept[key]:
                del kept[key]
                self.kept_bytes[tier] -= pin.frame_bytes

    def _end(self, number: int) -> None:
        pin = self.pins.pop(number)
        for tier, length in pin.lengths.items():
            self._keep(pin, tier, -length)
            address = self.spaces[tier].find(pin.keys[length - 1])
            assert address is not None  # held; what damage takes away is known to ``lost``
            self.spaces[tier].unhold(address)
