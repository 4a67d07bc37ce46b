"""Erasing: objects that are deleted, or leave NVMe, are made unreadable there, while the node goes on.

The frames are RETIRING meanwhile: nobody reads them, nobody is granted them, and the next start goes on where a kill
came between. Whoever deletes waits for his own, here, without the node's mutex: an object that is gone stays gone. What
leaves by itself is the mover's to erase; until then the same key cannot be stored or deleted (``Status.BUSY``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from kvstore.errors import Unavailable
from kvstore.model.replica import Tier
from kvstore.service.node.contents import Contents
from kvstore.service.node.nvme_pages import NvmePages
from kvstore.service.node.waiting import Waiting
from kvstore.state import events as ev
from kvstore.tier.records import ExtentTable


class ErasingNode(Protocol):
    """The node that objects are erased for."""

    contents: Contents
    waiting: Waiting

    def handle(self, event: ev.Event) -> ev.Reply:
        """See ``Node``."""
        ...

    def device_failed(self, broken: dict[int, OSError]) -> None:
        """See ``Node``."""
        ...


def erase_some(node: ErasingNode, nvme: NvmePages, erasing: ev.Erase, places: Iterable[int]) -> set[int]:
    """Carry out this part of it; returns the places whose device fails: a reboot may bring back what lay there."""
    tables = node.contents.extents
    found = {place: erasing.pages[place][1] for place in places}
    broken = nvme.extents.erase((tables[address.extent], address.frame) for address in found.values())
    if broken:
        node.device_failed(broken)
    return {place for place, address in found.items() if tables[address.extent].position in broken}


def _erase(node: ErasingNode, nvme: NvmePages, erasing: ev.Erase) -> bool:
    """Carry it out and report it. False: a device fails."""
    failed = erase_some(node, nvme, erasing, range(len(erasing.pages)))
    node.handle(ev.Erased(time.monotonic_ns(), erasing.number, failed))
    return not failed


def erase_all(node: ErasingNode, nvme: NvmePages, mine: list[ev.Erase]) -> None:
    """Carry out what a caller's own deletion takes.

    Raises:
        Unavailable: a device fails; the objects are deleted all the same.
    """
    left = deque(mine)
    sound = True
    try:
        while left:
            sound &= _erase(node, nvme, left[0])
            left.popleft()
    finally:
        node.waiting.copies.extend(left)  # a caller who is interrupted leaves them to the mover
    if not sound:
        raise Unavailable("an object is deleted, but its device fails: a reboot may bring it back")


def deletes(event: ev.Event) -> bool:
    """Whoever is behind this event is told only when what he deletes is gone for good."""
    return type(event) in (ev.Delete, ev.SealObjects) or (type(event) is ev.SealGranted and event.replaces is not None)


def taken_out(instructions: list[ev.Instruction], tables: dict[int, ExtentTable], tier: Tier) -> list[ev.Erase]:
    """The erasures in that tier among these instructions, which are left without them."""
    erases = [
        instruction
        for instruction in instructions
        if type(instruction) is ev.Erase and tables[instruction.pages[0][1].extent].tier == tier
    ]
    instructions[:] = [instruction for instruction in instructions if instruction not in erases]
    return erases
