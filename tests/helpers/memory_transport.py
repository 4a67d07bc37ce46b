"""Transports that stay in this process: a data connection without a socket, and an agent that copies as slowly as told.

Both are peers of the real ones in ``tests/transfer/test_contract.py``. The agent does what NIXL may: its copies come
late, the last one first, and can be seen at their end alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

from kvstore.cluster.data_connection import Caller, Handler
from kvstore.cluster.peer_links import PoolNode
from kvstore.errors import DeadlineExceeded, KVStoreError, NodeUnavailable, Unavailable
from kvstore.server.identities import LOCAL
from kvstore.wire.data import FrameKind, Head, LentRun, unpack_error


class MemoryOwner:
    """A node's handlers in this process. ``stopped``: it answers nothing; ``killed``: it is gone."""

    def __init__(self, handlers: Mapping[FrameKind, Handler]) -> None:
        self.handlers = handlers
        self.stopped = self.killed = False


class MemoryLinks:
    """See ``PeerLinks``."""

    def __init__(self, owner: MemoryOwner) -> None:
        self._owner = owner

    @contextlib.contextmanager
    def to(self, peer: PoolNode, deadline_s: float, silence_s: float = 1.0) -> Iterator[MemoryConnection]:
        yield MemoryConnection(self._owner, silence_s)

    def call(self, peer: PoolNode, deadline_s: float, use: Any, silence_s: float = 1.0) -> Any:
        with self.to(peer, deadline_s, silence_s) as connection:
            return use(connection)

    def close(self) -> None:
        pass


class MemoryConnection:
    """See ``DataConnection``. A request is answered when it is sent; its reply waits here."""

    def __init__(self, owner: MemoryOwner, silence_s: float, caller: Caller = LOCAL) -> None:
        self.caller = caller
        self.broken = False
        self.silence_s = silence_s
        self._owner = owner
        self._numbers = itertools.count(1)
        self._frames: list[tuple[FrameKind, bytes]] = []
        self._body = memoryview(b"")
        self.sent_bytes = 0

    def abort(self) -> None:
        """See ``Exchange``."""
        self.broken = True

    def reply(self, kind: FrameKind, *body: Any) -> None:
        """See ``Exchange``."""
        self._frames.append((kind, b"".join(bytes(memoryview(part).cast("B")) for part in body)))

    def send(self, kind: FrameKind, *body: Any, deadline_s: float) -> int:
        if self._owner.killed:
            raise NodeUnavailable("it is gone")
        if not self._owner.stopped:
            try:
                self._owner.handlers[kind](self, memoryview(b"".join(bytes(part) for part in body)))
            except KVStoreError as error:
                self._frames = [(FrameKind.ERROR, str(error).encode())]
        return next(self._numbers)

    def receive_head(self, request: int, *kinds: FrameKind, deadline_s: float) -> Head:
        if not self._frames:
            time.sleep(max(0.0, min(self.silence_s, deadline_s - time.monotonic())))
            raise DeadlineExceeded("sent nothing in time")
        kind, body = self._frames.pop(0)
        if kind is FrameKind.ERROR:
            raise unpack_error(b"\x09\x00" + body)
        assert kind in kinds
        self._body = memoryview(body)
        return Head(kind, 0, request, len(body))

    def receive(self, size: int, *, deadline_s: float) -> bytearray:
        part, self._body = self._body[:size], self._body[size:]
        return bytearray(part)

    def receive_into(self, view: memoryview, *, deadline_s: float) -> None:
        view[:] = self._body[: len(view)]
        self._body = self._body[len(view) :]

    def call(self, kind: FrameKind, *body: Any, reply: FrameKind, deadline_s: float) -> bytearray:
        head = self.receive_head(self.send(kind, *body, deadline_s=deadline_s), reply, deadline_s=deadline_s)
        return self.receive(head.body_bytes, deadline_s=deadline_s)


class MemoryAgent:
    """See ``NixlAgent``; of memory that this process has mapped.

    Attributes:
        late: reads do not end, until this is False again.
        fails: the next reads end without a word of where their bytes are.
        under_way_bytes_max: most that was ever posted and not over.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.late = self.fails = False
        self.registered: list[tuple[int, int]] = []
        self.under_way_bytes = self.under_way_bytes_max = 0

    def register(self, rows: Any) -> None:
        self.registered.append((rows.ctypes.data, rows.ctypes.data + rows.nbytes))

    def metadata(self) -> bytes:
        return self.name.encode()

    def meet(self, metadata: bytes) -> str:
        return metadata.decode()

    def part_from(self, name: str) -> None:
        pass

    def post(self, name: str, runs: list[LentRun], offset: int, length: int, places: list[int]) -> MemoryRead:
        for place in places:
            assert any(first <= place <= last - length for first, last in self.registered), "not registered"
        sources = [run.address + offset + (run.frame + page) * run.stride for run in runs for page in range(run.pages)]
        assert len(sources) == len(places)
        return MemoryRead(self, list(zip(places, sources, strict=True)), length)


class MemoryRead:
    """See ``NixlRead``: it copies one page per look, the last one first."""

    def __init__(self, agent: MemoryAgent, copies: list[tuple[int, int]], length: int) -> None:
        self._agent = agent
        self._copies = copies
        self._length = length

    def begin(self) -> None:
        self._agent.under_way_bytes += len(self._copies) * self._length
        self._agent.under_way_bytes_max = max(self._agent.under_way_bytes_max, self._agent.under_way_bytes)

    def is_over(self) -> bool:
        if self._agent.fails:
            raise Unavailable("the read failed")
        if self._agent.late:
            return False
        if self._copies:
            place, source = self._copies.pop()
            ctypes.memmove(place, source, self._length)
            self._agent.under_way_bytes -= self._length
        return not self._copies

    def wait(self, until_s: float) -> bool:
        while not self.is_over():
            if self._agent.late:
                time.sleep(0.001)
            if time.monotonic() >= until_s:
                return False
        return True
