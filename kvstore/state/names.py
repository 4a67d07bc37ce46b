"""Names: what clients said of roots (salt, adapter, model, layout), within a bound of bytes that tenants share.

What was said of a root is a line of JSON, as the node's book has it, and counts as its bytes and ``NAME_BYTES`` for the
tables around it. Where all lines together take more than ``bytes_max``, the tenants with the most give way, down to a
common level: a tenant with many names loses its oldest ones, and no tenant loses any for one that has more.

Worked example: of 100 bytes tenant a has 90 and b says 30 more. There may be 93 (a sixteenth is cleared at once, so
that the search is paid for once per batch of names): the level is 63, and a loses names until that is so.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

NAME_BYTES: Final = 512  # of a name, in addition to its line: its root, its places in two tables, its objects
CLEARED_SHARE: Final = 16  # one part in this many is cleared at once
LOOKS: Final = 8  # of a tenant's oldest names, for one whose root has no pages


@dataclass(frozen=True, slots=True)
class Name:
    """What a client said of a root. ``whole``: its layout is among it."""

    salt: str
    line: bytes
    whole: bool

    @classmethod
    def of(cls, root: bytes, about: dict[str, Any]) -> Name:
        """The name that a client registered for a root."""
        line = json.dumps({"root": root.hex(), **about}).encode()  # in ASCII, without a line end inside
        return cls(str(about["salt"]), line, "layout" in about)

    @property
    def about(self) -> dict[str, Any]:
        """The description as the client gave it."""
        said = json.loads(self.line)
        del said["root"]
        return dict(said)

    @property
    def cost_bytes(self) -> int:
        """What remembering it takes."""
        return len(self.line) + NAME_BYTES


class Names:
    """A table of names, at most ``bytes_max`` together."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._names: dict[bytes, Name] = {}
        self._of: dict[str, OrderedDict[bytes, None]] = {}  # by salt, what was said longest ago first
        self._bytes_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, root: bytes) -> bool:
        return root in self._names

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._names)

    def get(self, root: bytes) -> Name | None:
        """What was said of this root."""
        return self._names.get(root)

    def all(self) -> dict[bytes, Name]:
        """A copy of the table: names do not change."""
        return dict(self._names)

    def lines(self) -> list[bytes]:
        """All lines."""
        return [name.line for name in self._names.values()]

    def add(self, root: bytes, name: Name) -> None:
        """Remember this, in place of what was said before."""
        self.remove(root)
        self._names[root] = name
        self._of.setdefault(name.salt, OrderedDict())[root] = None
        self._count(name.salt, name.cost_bytes)

    def remove(self, root: bytes) -> Name | None:
        """Forget what was said of this root, and return it."""
        name = self._names.pop(root, None)
        if name is not None:
            del self._of[name.salt][root]
            self._count(name.salt, -name.cost_bytes)
        return name

    def _count(self, salt: str, size: int) -> None:
        self.bytes += size
        self._bytes_of[salt] = self._bytes_of.get(salt, 0) + size
        if not self._bytes_of[salt]:
            del self._bytes_of[salt], self._of[salt]

    def shed(self, bare: Callable[[bytes], bool], spare: bytes) -> int:
        """Where there is more than may be, forget names; how many.

        Args:
            bare: whether a root has no pages: those go first, as far as one look tells.
            spare: the root that was said just now, which stays.
        """
        if self.bytes <= self.bytes_max:
            return 0
        before, goal = len(self._names), self.bytes_max - self.bytes_max // CLEARED_SHARE
        largest = sorted(self._bytes_of, key=self._bytes_of.__getitem__, reverse=True)
        level = _level([self._bytes_of[salt] for salt in largest], goal)
        for salt in largest:
            roots = self._of[salt]
            while self.bytes > goal and self._bytes_of.get(salt, 0) > level and (len(roots) > 1 or spare not in roots):
                self.remove(_oldest(roots, bare, spare))
            if self.bytes <= goal:
                break
        return before - len(self._names)


def _oldest(roots: OrderedDict[bytes, None], bare: Callable[[bytes], bool], spare: bytes) -> bytes:
    """The name to forget: of the oldest few the first without pages, or the last one looked at."""
    root = spare
    for _ in range(LOOKS):
        root = next(iter(roots))
        if root != spare and bare(root):
            return root
        roots.move_to_end(root)
    return root if root != spare else next(iter(roots))


def _level(sizes: list[int], goal: int) -> int:
    """How much each may have, so that all together have ``goal``. ``sizes``: largest first."""
    rest = sum(sizes)
    for count, size in enumerate(sizes, 1):
        rest -= size
        level = (goal - rest) // count
        if count == len(sizes) or level >= sizes[count]:
            return max(0, level)
    return goal
