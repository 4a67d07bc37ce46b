"""Behind: pages that are put behind a parent that the first tier does not have. What ``Writing`` asks about them.

A node with one tier answers as ``Behind`` does: nobody has such a parent. With a second tier ``through.Through`` does.
"""

from __future__ import annotations

from kvstore.model.replica import Address
from kvstore.state import events as ev
from kvstore.state.frames import ClassPool
from kvstore.state.pending import Pending


class Behind:
    """The answers of a node with one tier."""

    def has(self, root: bytes, key: bytes) -> bool:
        """The second tier has that page."""
        return False

    def holds(self, root: bytes, key: bytes) -> bool:
        """The second tier has that page, or is about to have it, and takes more pages of its class."""
        return False

    def room(self, pool: ClassPool, anchor: bytes, count: int) -> int:
        """How many frames may be granted for pages after ``anchor``; all of ``count`` where they stay in this tier."""
        return count

    def make_room(self, anchor: bytes, pool: ClassPool, count: int, out: list[ev.Instruction]) -> list[Address]:
        """Up to ``count`` frames for what a put goes on with after ``anchor``, where there were none."""
        return []

    def room_for(
        self, anchor: bytes, pool: ClassPool, owner: int, taken: list[Address], count: int, out: list[ev.Instruction]
    ) -> list[Address]:
        """Frames for ``count`` reservations after ``anchor``, which need them all at once, where only ``taken`` were to
        be had."""
        return taken

    def seal(
        self, event: ev.SealGranted, granted: set[Address], keys: list[bytes], number: int
    ) -> list[ev.Instruction] | None:
        """A put whose pages hang on one that the first tier does not have; None where no tier has it."""
        return None

    def takes(self, page: Pending) -> bool:
        """This page is complete and has no parent here: whether the second tier takes it. ``start`` has to follow."""
        return False

    def flies(self, page: Pending) -> bool:
        """This page is being saved, or will be as soon as there is room for it."""
        return False

    def start(self, out: list[ev.Instruction]) -> None:
        """Have those pages saved that ``takes`` said yes to."""

    def again(self, out: list[ev.Instruction]) -> None:
        """Try once more what the second tier had no room for."""

    def saved(self, event: ev.Saved) -> list[ev.Instruction]:
        """See ``events.Saved``, of pages that ``start`` had saved."""
        raise AssertionError("nothing was to be saved behind anything")
