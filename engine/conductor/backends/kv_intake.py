"""KvIntake: follows one engine's KV events in vLLM's wire format, and reports its pages as a node of ours would.

SUB receives ``[topic, number, payload]``. If numbers are missing, DEALER asks the engine's ROUTER for all messages from
there on, and is answered with ``[number, payload]`` for each (newer engines put the topic before it), and ``[-1, ""]``
at the end. If the missed messages cannot be replayed, everything known is forgotten: an unknown page only costs its
computation.

The numbers of a publisher increase. A lower number means a new publisher, with an empty cache. A replayed message may
also arrive on its own; a message with other content under the same number is from a new publisher, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import xxhash

from engine.conductor.backends.settings import BackendSettings
from engine.conductor.state.kv_blocks import KvBlocks
from kvstore.cluster.directory import AnnounceBatch, Marks
from kvstore.errors import InvalidRequest
from kvstore.model.prefix import Fingerprints, root_of

FRAME_BYTES_MAX: Final = 2 << 20  # the blocks of 400 thousand tokens
FRAMES_MAX: Final = 64  # messages that wait here
TABLE_BYTES_MAX: Final = 128 << 20  # memory for blocks of one engine
QUICK_BYTES: Final = 32 << 10  # a payload up to this size is read in the event loop; a larger one in a thread
REPLAY_S: Final = 20.0
REPLAY_BYTES_MAX: Final = 256 << 20
REPLAYED_MAX: Final = 1 << 14  # digests that are kept
NUMBER_BYTES: Final = 8
END: Final = b"\xff" * NUMBER_BYTES

log = logging.getLogger("kvstore.conductor")


class KvIntake:
    """Follows the events while ``run`` does. Belongs to one event loop.

    Args:
        layout: stands for the layout of its pages, as hexadecimal digits.
        counts: see ``KvBlocks``.
        tell: called with the batches of a stream, see ``directory``.

    Attributes:
        anew: True if everything is to be reported again with the next message.

    Raises:
        InvalidRequest: a package is missing.
    """

    def __init__(
        self, settings: BackendSettings, layout: str, counts: Counter[str], tell: Callable[[AnnounceBatch], None]
    ) -> None:
        self._settings = settings
        self._counts = counts
        self._tell = tell
        fingerprint = bytes.fromhex(layout)
        self._blocks = KvBlocks(
            settings.page_tokens, lambda salt, adapter: root_of(fingerprint, salt, adapter), TABLE_BYTES_MAX, counts
        )
        self._zmq: Any = None
        self._msgpack: Any = None
        if settings.events:
            self._zmq, self._msgpack = _needed()
        self._stream = time.monotonic_ns()
        self._number = 0
        self._next: int | None = None  # the message expected next; None: any
        self._heard = -1  # the last one that arrived on its own
        self._replayed: dict[int, int] = {}  # digests of replayed messages, which may still arrive on their own
        self.anew = False

    async def run(self) -> None:
        """Until cancelled."""
        context = self._zmq.asyncio.Context()
        try:
            self._forget()
            sub = self._socket(context, self._zmq.SUB, self._settings.events)
            sub.setsockopt(self._zmq.SUBSCRIBE, b"")
            self._heard = -1
            await self._catch_up(context)  # earlier messages
            self._flush()
            while True:
                await self._message(context, await sub.recv_multipart())
        finally:
            context.destroy(linger=0)

    def _socket(self, context: Any, kind: int, address: str) -> Any:
        socket = context.socket(kind)
        socket.setsockopt(self._zmq.LINGER, 0)
        socket.setsockopt(self._zmq.RCVHWM, FRAMES_MAX)
        socket.setsockopt(self._zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        socket.connect(address)
        return socket

    # --- messages ---------------------------------------------------------------------------------------------------

    async def _message(self, context: Any, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            self._counts["malformed"] += 1
            return
        number, payload = int.from_bytes(frames[1], "big"), frames[2]
        before = self._next is not None and number < self._next and self._replayed.get(number) != _digest(payload)
        begun_anew, self._heard = before or number <= self._heard, number
        if begun_anew:
            log.info("%s reports its blocks from the beginning", self._settings.name)
            self._forget()
        if self._next is None or number > self._next:
            await self._catch_up(context, number)
        if self._next is None or number >= self._next:
            await self._take(number, payload)
            self._replayed.clear()
        self._flush()

    async def _catch_up(self, context: Any, number: int = 0) -> None:
        """Take the messages that were missed before this number. If they are no longer available, forget everything."""
        known = self._next is not None
        self._counts["gap"] += known
        if self._settings.replay:
            await self._replay(context, self._next or 0)
        if known and self._next is not None and self._next < number:
            self._counts["forgotten"] += 1
            self._forget()

    async def _replay(self, context: Any, start: int) -> None:
        """Take all messages from there on, as far as they are replayed."""
        dealer = self._socket(context, self._zmq.DEALER, self._settings.replay)
        left = REPLAY_BYTES_MAX
        try:
            async with asyncio.timeout(REPLAY_S):
                await dealer.send_multipart([b"", start.to_bytes(NUMBER_BYTES, "big")])
                while left > 0:
                    frames = await dealer.recv_multipart()
                    left -= sum(map(len, frames))
                    if len(frames) < 2 or len(frames[-2]) != NUMBER_BYTES:
                        self._counts["malformed"] += 1
                    elif frames[-2] == END:
                        return
                    else:
                        await self._again(int.from_bytes(frames[-2], "big"), frames[-1])
        except TimeoutError:
            log.debug("%s does not replay the missed messages", self._settings.name)
        finally:
            dealer.close(linger=0)

    async def _again(self, number: int, payload: bytes) -> None:
        if self._next is not None and number > self._next:
            self._counts["forgotten"] += 1
            self._forget()
        if self._next is None or number == self._next:
            await self._take(number, payload)
            self._replayed[number] = _digest(payload)
            if len(self._replayed) > REPLAYED_MAX:
                del self._replayed[next(iter(self._replayed))]

    async def _take(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        cleared = self._read(payload) if len(payload) < QUICK_BYTES else await asyncio.to_thread(self._read, payload)
        if cleared:
            self._begin()

    def _read(self, payload: bytes) -> bool:
        try:
            batch = self._msgpack.unpackb(payload, strict_map_key=False)
        except (ValueError, TypeError, RecursionError, self._msgpack.UnpackException):
            self._counts["malformed"] += 1
            return False
        return self._blocks.apply(batch)

    # --- reports ----------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._next = None
        self._replayed.clear()
        self._blocks.clear()
        self._begin()

    def _begin(self) -> None:
        """Begin a stream with the pages that are there."""
        self.anew = False
        self._stream, self._number = self._stream + 1, 0
        self._send(*self._blocks.all_pages(), whole=True)

    def _flush(self) -> None:
        if self.anew:
            self._begin()
            return
        pages, marks = self._blocks.changes()
        if len(pages):
            self._send(pages, marks)

    def _send(self, pages: Fingerprints, marks: Marks, whole: bool = False) -> None:
        batch = AnnounceBatch(self._settings.name, self._stream, self._number, pages, marks, whole)
        self._number += 1
        self._tell(batch)


def _digest(payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload)


def _needed() -> tuple[ModuleType, ModuleType]:
    try:
        import msgpack
        import zmq.asyncio
    except ImportError as missing:
        raise InvalidRequest("backend", f"events= needs {missing.name}: pip install 'kvstore[events]'") from None
    return zmq, msgpack
