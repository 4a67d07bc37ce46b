"""Registration: buffers that a store's caller moves bytes through often, remembered for DMA."""

from __future__ import annotations

import threading
from typing import Any

from kvstore.client.buffers import flat_bytes
from kvstore.errors import InvalidRequest


class Registration:
    """A registered buffer: from ``Store.register`` until ``release`` or the end of ``with``. Keeps the buffer alive."""

    def __init__(self, owner: Registrations, buffer: Any) -> None:
        self.bytes = flat_bytes(buffer, "buffer")
        self.start = self.bytes.ctypes.data
        self.stop = self.start + self.bytes.size
        self._owner = owner

    def release(self) -> None:
        """Forget the buffer. Twice is fine."""
        self._owner.remove(self)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Registrations:
    """All buffers registered with one store. Threads may share it."""

    def __init__(self) -> None:
        self._held: list[Registration] = []
        self._lock = threading.Lock()

    def add(self, buffer: Any) -> Registration:
        """See ``Store.register``."""
        new = Registration(self, buffer)
        if not new.bytes.flags.writeable:
            raise InvalidRequest("buffer", "must be writable")
        if not new.bytes.size:
            raise InvalidRequest("buffer", "must not be empty")
        with self._lock:
            if any(new.start < held.stop and held.start < new.stop for held in self._held):
                raise InvalidRequest("buffer", "overlaps one that is registered")
            self._held.append(new)
        return new

    def remove(self, registration: Registration) -> None:
        """See ``Registration.release``."""
        with self._lock:
            self._held = [held for held in self._held if held is not registration]

    def covers(self, buffer: Any) -> bool:
        """See ``Store.registered``."""
        flat = flat_bytes(buffer, "buffer")
        start, stop = flat.ctypes.data, flat.ctypes.data + flat.size
        with self._lock:
            return any(held.start <= start and stop <= held.stop for held in self._held)
