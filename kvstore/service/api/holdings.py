"""Holdings: what the node holds for remote callers between calls: reservations and leases.

Life of one: ``add`` (the caller is told a number that cannot be guessed) -> ``find`` by its owner, any number of times
-> it is ended and dropped, by its owner, by its deadline, or because its owner's identity has ended. A caller that is
not the owner gets the answer for an unknown number: nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from kvstore.errors import KVStoreError, LeaseBroken, TooManyCalls, Unauthenticated
from kvstore.serving.identities import Identity, is_tenant

ID_BYTES: Final = 16
HELD_MAX: Final = 4096  # of one kind
HELD_SHARE_MAX: Final = 1024  # of them by one tenant
HELD_BYTES_MAX: Final = 128 << 20  # of memory that all of one kind take; half of it by one tenant
SWEEP_S: Final = 0.25


class Ending(Protocol):
    """What can be held."""

    def end(self) -> None:
        """Give it back; nothing is raised but what a node says that cannot answer."""
        ...


Thing = TypeVar("Thing", bound=Ending)


class Held(Generic[Thing]):
    """One thing held for its owner. To work with it, hold ``lock`` and then check ``over``."""

    def __init__(self, owner: Identity, thing: Thing, until_s: float, size_bytes: int) -> None:
        self.owner = owner
        self.thing = thing
        self.size_bytes = size_bytes
        self.until_s = until_s  # time.monotonic
        self.lock = threading.Lock()
        self.over = False

    def end(self) -> None:
        """Give it back, once."""
        with self.lock:
            if not self.over:
                self.over = True
                self.thing.end()


class Holdings(Generic[Thing]):
    """A bounded table of one kind. Any thread may use it.

    Args:
        what: "reservation" or "lease", for messages.
        check: raises Unauthenticated where an identity has ended.
    """

    def __init__(
        self,
        what: str,
        check: Callable[[Identity], None],
        held_max: int = HELD_MAX,
        bytes_max: int = HELD_BYTES_MAX,
    ) -> None:
        self._what = what
        self._check = check
        self._max = held_max
        self._held: dict[bytes, Held[Thing]] = {}
        self._bytes_max = bytes_max
        self._of: Counter[Identity] = Counter()
        self._bytes_of: Counter[Identity] = Counter()
        self._mutex = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def check_room(self, owner: Identity) -> None:
        """Raises TooManyCalls where no more can be held for this owner."""
        with self._mutex:
            self._check_room(owner, 0)

    def _check_room(self, owner: Identity, size_bytes: int) -> None:
        tenant = is_tenant(owner)
        share = HELD_SHARE_MAX if tenant else self._max
        if len(self._held) >= self._max or self._of[owner] >= min(share, self._max):
            raise TooManyCalls(f"no more {self._what}s are held: end some", retry_after_s=1.0)
        bytes_share = self._bytes_max // 2 if tenant else self._bytes_max
        all_bytes, mine = self._bytes_of.total() + size_bytes, self._bytes_of[owner] + size_bytes
        if size_bytes and (all_bytes > self._bytes_max or mine > bytes_share):
            raise TooManyCalls(f"the {self._what}s that are held name too many pages: end some", retry_after_s=1.0)

    def add(self, owner: Identity, thing: Thing, ttl_s: float, size_bytes: int = 0) -> bytes:
        """Hold ``thing`` for ``ttl_s``; returns the number to name it by. Raises TooManyCalls, and then has ended
        it."""
        number = secrets.token_bytes(ID_BYTES)
        try:
            with self._mutex:
                self._check_room(owner, size_bytes)
                self._held[number] = Held(owner, thing, time.monotonic() + ttl_s, size_bytes)
                self._of[owner] += 1
                self._bytes_of[owner] += size_bytes
        except TooManyCalls:
            thing.end()
            raise
        return number

    def find(self, owner: Identity, number: bytes) -> Held[Thing]:
        """What the owner named. Raises LeaseBroken where there is no such thing (any more)."""
        held = self._held.get(number)
        if held is None or held.owner != owner or time.monotonic() >= held.until_s:
            raise LeaseBroken(f"there is no such {self._what} of {owner.name}'s, or it is over")
        return held

    def drop(self, number: bytes) -> None:
        """Forget a thing that was ended; its number names nothing any more."""
        with self._mutex:
            self._forget(number)

    def abandon(self, number: bytes) -> None:
        """End what nobody was told of."""
        with self._mutex:
            held = self._forget(number)
        if held is not None:
            with contextlib.suppress(KVStoreError):
                held.end()

    def sweep(self, everything: bool = False) -> None:
        """End those past their deadline, and those of owners that have ended."""
        now_s = time.monotonic()
        with self._mutex:
            over = [
                number
                for number, held in self._held.items()
                if everything or now_s >= held.until_s or not self._known(held.owner)
            ]
            ended = [self._forget(number) for number in over]
        for held in ended:
            if held is not None:
                with contextlib.suppress(KVStoreError):
                    held.end()

    def _forget(self, number: bytes) -> Held[Thing] | None:
        held = self._held.pop(number, None)
        if held is not None:
            self._of[held.owner] -= 1
            self._bytes_of[held.owner] -= held.size_bytes
            if not self._of[held.owner]:
                del self._of[held.owner], self._bytes_of[held.owner]
        return held

    def _known(self, owner: Identity) -> bool:
        try:
            self._check(owner)
        except Unauthenticated:
            return False
        return True


async def sweep_forever(run: Callable[[], None]) -> None:
    """Call ``run`` in a thread every ``SWEEP_S``, until cancelled."""
    while True:
        await asyncio.sleep(SWEEP_S)
        await asyncio.to_thread(run)
