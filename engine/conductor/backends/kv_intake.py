"""KvIntake: receives the KV events of one engine in vLLM's wire format, and reports its pages as a node does.

The engine publishes messages ``[topic, number, payload]``, which a SUB socket receives. If numbers are missing, a
DEALER socket asks the engine's ROUTER to replay all messages from the first missing number. The replies are
``[number, payload]``, or ``[topic, number, payload]`` from newer engines, and ``[-1, ""]`` at the end. If the missed
messages cannot be replayed, the intake forgets all pages of the engine: an unknown page only costs its computation.

The numbers of one publisher increase. A lower number therefore comes from a new publisher, whose cache is empty. A
replayed message may arrive a second time through SUB. If it has other content under the same number, it also comes from
a new publisher.
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

FRAME_BYTES_MAX: Final = 2 << 20  # of a message: enough for the blocks of 400 thousand tokens
FRAMES_MAX: Final = 64  # messages that a socket buffers
TABLE_BYTES_MAX: Final = 128 << 20  # memory for the blocks of one engine
QUICK_BYTES: Final = 32 << 10  # a payload up to this size is read in the event loop; a larger one in a thread
REPLAY_S: Final = 20.0  # the longest replay
REPLAY_BYTES_MAX: Final = 256 << 20  # of one replay
REPLAYED_MAX: Final = 1 << 14  # replayed messages whose digests are stored
NUMBER_BYTES: Final = 8
END: Final = b"\xff" * NUMBER_BYTES  # the number -1

log = logging.getLogger("kvstore.conductor")


class KvIntake:
    """Receives the events of one engine while ``run`` runs. Belongs to one event loop.

    Args:
        layout: the placeholder for the layout of its pages, as hexadecimal digits.
        counts: counts events and messages, see ``KvBlocks``.
        report: receives the batches of the page stream, see ``kvstore.cluster.directory``.

    Attributes:
        restart_due: True if a new stream, with all pages, must start after the next message.

    Raises:
        InvalidRequest: a package is missing.
    """

    def __init__(
        self, settings: BackendSettings, layout: str, counts: Counter[str], report: Callable[[AnnounceBatch], None]
    ) -> None:
        self._settings = settings
        self._counts = counts
        self._report = report
        fingerprint = bytes.fromhex(layout)
        self._blocks = KvBlocks(
            settings.page_tokens, lambda salt, adapter: root_of(fingerprint, salt, adapter), TABLE_BYTES_MAX, counts
        )
        self._zmq: Any = None
        self._msgpack: Any = None
        if settings.events:
            self._zmq, self._msgpack = _import_packages()
        self._stream = time.monotonic_ns()  # the number of the page stream, ...
        self._batch = 0  # ... and of its next batch
        self._next: int | None = None  # the number of the next expected message; None if any number is accepted
        self._last_published = -1  # the number of the last message from SUB
        self._replayed: dict[int, int] = {}  # by number: digests of replayed messages, which SUB may still receive
        self.restart_due = False

    async def run(self) -> None:
        """Receive events until cancelled."""
        context = self._zmq.asyncio.Context()
        try:
            self._forget()
            sub = self._socket(context, self._zmq.SUB, self._settings.events)
            sub.setsockopt(self._zmq.SUBSCRIBE, b"")
            self._last_published = -1
            await self._catch_up(context)  # with messages from before the connection
            self._flush()
            while True:
                await self._take_published(context, await sub.recv_multipart())
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

    async def _take_published(self, context: Any, frames: list[bytes]) -> None:
        """Handle a message from SUB."""
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            self._counts["malformed"] += 1
            return
        number, payload = int.from_bytes(frames[1], "big"), frames[2]
        is_unknown = self._next is not None and number < self._next and self._replayed.get(number) != _digest(payload)
        is_new_publisher = is_unknown or number <= self._last_published
        self._last_published = number
        if is_new_publisher:
            log.info("%s reports its blocks from the beginning", self._settings.name)
            self._forget()
        if self._next is None or number > self._next:
            await self._catch_up(context, number)
        if self._next is None or number >= self._next:
            await self._apply(number, payload)
            self._replayed.clear()
        self._flush()

    async def _catch_up(self, context: Any, number: int = 0) -> None:
        """Replay the messages that were missed before this number. Forget all pages if they are no longer available."""
        has_state = self._next is not None
        self._counts["gap"] += has_state
        if self._settings.replay:
            await self._replay(context, self._next or 0)
        if has_state and self._next is not None and self._next < number:
            self._counts["forgotten"] += 1
            self._forget()

    async def _replay(self, context: Any, start: int) -> None:
        """Apply all messages that the engine replays, starting at number ``start``."""
        dealer = self._socket(context, self._zmq.DEALER, self._settings.replay)
        remaining_bytes = REPLAY_BYTES_MAX
        try:
            async with asyncio.timeout(REPLAY_S):
                await dealer.send_multipart([b"", start.to_bytes(NUMBER_BYTES, "big")])
                while remaining_bytes > 0:
                    frames = await dealer.recv_multipart()
                    remaining_bytes -= sum(map(len, frames))
                    if len(frames) < 2 or len(frames[-2]) != NUMBER_BYTES:
                        self._counts["malformed"] += 1
                    elif frames[-2] == END:
                        return
                    else:
                        await self._take_replayed(int.from_bytes(frames[-2], "big"), frames[-1])
        except TimeoutError:
            log.debug("%s does not replay the missed messages", self._settings.name)
        finally:
            dealer.close(linger=0)

    async def _take_replayed(self, number: int, payload: bytes) -> None:
        if self._next is not None and number > self._next:
            self._counts["forgotten"] += 1
            self._forget()
        if self._next is None or number == self._next:
            await self._apply(number, payload)
            self._replayed[number] = _digest(payload)
            if len(self._replayed) > REPLAYED_MAX:
                del self._replayed[next(iter(self._replayed))]

    async def _apply(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        apply, is_small = self._apply_payload, len(payload) < QUICK_BYTES
        was_cleared = apply(payload) if is_small else await asyncio.to_thread(apply, payload)
        if was_cleared:
            self._start_stream()

    def _apply_payload(self, payload: bytes) -> bool:
        """Apply the events of a message. Returns True if the engine cleared its cache."""
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
        self._start_stream()

    def _start_stream(self) -> None:
        """Start a new stream. Its first batch has all pages of the engine."""
        self.restart_due = False
        self._stream, self._batch = self._stream + 1, 0
        self._send(*self._blocks.all_pages(), whole=True)

    def _flush(self) -> None:
        if self.restart_due:
            self._start_stream()
            return
        pages, marks = self._blocks.changes()
        if len(pages):
            self._send(pages, marks)

    def _send(self, pages: Fingerprints, marks: Marks, whole: bool = False) -> None:
        batch = AnnounceBatch(self._settings.name, self._stream, self._batch, pages, marks, whole)
        self._batch += 1
        self._report(batch)


def _digest(payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload)


def _import_packages() -> tuple[ModuleType, ModuleType]:
    try:
        import msgpack
        import zmq.asyncio
    except ImportError as missing:
        raise InvalidRequest("backend", f"events= needs {missing.name}: pip install 'kvstore[events]'") from None
    return zmq, msgpack
