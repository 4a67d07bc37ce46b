"""Streams of data messages: received ones become pages, and pages become messages to send.

Data is copied once between a message and its page. A stream takes a few MiB of the node's buffers, or a few pages if a
page is larger. Data for a slow reader waits in that buffer, and the reader holds no frame of the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.client.buffers import PageRows
from kvstore.device.host_memory import copy, empty
from kvstore.errors import InvalidRequest
from kvstore.server.gate import Call
from kvstore.wire.grpc import FIXED64, digest_of, fields, pack_data

BATCH_BYTES: Final = 4 << 20  # bytes of pages read or put in one step; a larger page is one step
CHUNK_BYTES: Final = 1 << 20  # bytes of data in a sent message; by default, gRPC clients refuse more than 4 MiB
DIRECT_BYTES: Final = 1 << 20  # a message with at least this much data in whole pages is put without another copy
MESSAGES_MAX: Final = 1024  # small messages in one step
_COPIES: Final = 4  # batches in memory: pages, messages in work, and arriving messages (one may exceed a batch)

Value = TypeVar("Value")
Rows = npt.NDArray[np.uint8]


class Data(NamedTuple):
    """A message of a data stream. ``data`` is a view of the message."""

    begin: bytes | None
    data: memoryview
    digest: int
    page: int
    offset: int

    def check(self) -> None:
        """Raise InvalidRequest if the data does not match its digest."""
        if len(self.data) and digest_of(self.data) != self.digest:
            raise InvalidRequest("data_xxh3", "must be xxh3_64 of data: the data was damaged in transfer")


def read_data(message: bytes) -> Data:
    """Parse a ``WriteRequest`` or ``PutObjectRequest``. Raises InvalidRequest if the message is neither."""
    begin, data, numbers = None, memoryview(b""), {3: 0, 4: 0, 5: 0}
    try:
        for field in fields(message):
            if field.number == 1 and field.view is not None:
                begin = bytes(field.view)
            elif field.number == 2 and field.view is not None:
                data = field.view
            elif field.number in numbers and field.view is None:
                numbers[field.number] = field.integer
    except ValueError as error:
        raise InvalidRequest("request", f"not a valid message ({error})") from None
    return Data(begin, data, numbers[3], numbers[4], numbers[5])


assert FIXED64 == 1, "``fields`` returns a digest as a number"


def buffer_bytes(page_bytes: int) -> int:
    """Return how many bytes of the node's buffers a stream of pages of this size takes."""
    return _COPIES * max(page_bytes, BATCH_BYTES)


def batch_pages(page_bytes: int) -> int:
    """Return the number of pages in one step."""
    return max(1, BATCH_BYTES // page_bytes)


def pack_pages(data: memoryview, pack: Callable[[memoryview], bytes] = pack_data) -> list[bytes]:
    """Return messages with ``data`` and its digests."""
    return [pack(data[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES)]


async def first_of(requests: AsyncIterator[bytes], call: Call) -> Data:
    """Receive the first message of a stream, which has to contain ``begin``. Raises InvalidRequest."""
    message = await call.receive(requests)
    if message is not None:
        first = read_data(message)
        if first.begin is not None:
            return first
    raise InvalidRequest("begin", "must be in the first message")


async def batches(first: Data, requests: AsyncIterator[bytes], call: Call) -> AsyncIterator[list[Data]]:
    """Yield the messages of a stream in batches of ``BATCH_BYTES``. Raises InvalidRequest for a second ``begin``."""
    batch, size = [first], len(first.data)
    while (message := await call.receive(requests)) is not None:
        data = read_data(message)
        if data.begin is not None:
            raise InvalidRequest("begin", "must be in the first message only")
        batch.append(data)
        size += len(data.data)
        if size >= BATCH_BYTES or len(batch) >= MESSAGES_MAX:
            yield batch
            batch, size = [], 0
    yield batch


async def run_ahead(call: Call, steps: Iterable[Callable[[], Value]]) -> AsyncGenerator[Value, None]:
    """Yield the results of ``steps`` in order. A thread runs each step while the caller uses the previous result."""
    step: asyncio.Task[Value] | None = None
    try:
        for work in steps:
            result = await step if step is not None else None
            step = asyncio.create_task(call.run(work))
            if result is not None:
                yield result
        if step is not None:
            yield await step
    finally:
        _cancel(step)


async def feed(call: Call, pages: PageAssembly, batches: AsyncIterator[list[Data]]) -> bool:
    """Give batches to ``pages`` in a thread, each while the next one arrives. Return False if ``pages`` needs no more
    data."""
    step: asyncio.Task[bool] | None = None
    arriving: asyncio.Task[list[Data] | None] | None = None
    try:
        while True:
            arriving = asyncio.create_task(_next(batches))
            if step is not None and not await step:  # awaited first: an error is raised even if no more data arrives
                return False
            batch = await arriving
            if batch is None:
                return True
            step = asyncio.create_task(call.wait(pages.feed, batch))
    finally:
        _cancel(step)
        _cancel(arriving)


async def _next(batches: AsyncIterator[list[Data]]) -> list[Data] | None:
    return await anext(batches, None)


def _cancel(step: asyncio.Task[Any] | None) -> None:
    """Cancel a task, or discard its result or error if it has ended."""
    if step is not None and not step.cancel() and not step.cancelled():
        step.exception()


class PageAssembly:
    """An assembly of whole pages from data of any size.

    It is made for ``count`` pages. ``feed`` takes each batch, and calls ``put`` with whole pages when the
    buffer is full or the batch ends. ``end`` checks that no page is incomplete.
    """

    def __init__(self, count: int, page_bytes: int, put: Callable[[int, Rows | PageRows], bool]) -> None:
        self._count = count
        self._bytes_left = count * page_bytes
        self._page_bytes = page_bytes
        self._rows: Rows = empty((min(count, batch_pages(page_bytes)), page_bytes))
        self._put = put
        self._filled = 0  # bytes of ``_rows``
        self._page = 0

    def feed(self, messages: list[Data]) -> bool:
        """Add the data of these messages. Return False if ``put`` stored less than it received: no more data is needed.

        Raises:
            InvalidRequest: the data is damaged, or longer than the pages. Pages that were already put stay stored.
        """
        whole = PageRows()
        for message in messages:
            message.check()
            data = np.frombuffer(message.data, np.uint8)
            if len(data) > self._bytes_left:
                raise InvalidRequest("data", f"must be {self._count} pages, as named (got more)")
            self._bytes_left -= len(data)
            if not self._filled and len(data) >= DIRECT_BYTES and not len(data) % self._page_bytes:
                whole.extend(data.reshape(-1, self._page_bytes))
                continue
            if whole and not self._put_direct(whole):
                return False
            while len(data):
                flat = self._rows.reshape(-1)
                size = min(len(data), len(flat) - self._filled)
                copy(flat[self._filled : self._filled + size], data[:size])
                data, self._filled = data[size:], self._filled + size
                if self._filled == len(flat) and not self._put_buffered():
                    return False
        if whole:
            return self._put_direct(whole)
        return self._filled < self._page_bytes or self._put_buffered()

    def end(self) -> None:
        """Raise InvalidRequest if the last page is incomplete. The pages before it stay stored."""
        if self._filled:
            raise InvalidRequest("data", f"ended inside page {self._page}; the pages before it are stored")

    def _put_buffered(self) -> bool:
        """Put the whole pages of the buffer, and move the rest to its start."""
        whole = self._filled // self._page_bytes
        is_complete = self._put(self._page, self._rows[:whole])
        rest = self._filled - whole * self._page_bytes
        flat = self._rows.reshape(-1)
        flat[:rest] = flat[whole * self._page_bytes : self._filled]
        self._filled, self._page = rest, self._page + whole
        return is_complete

    def _put_direct(self, whole: PageRows) -> bool:
        """Put pages from their messages, and clear the list."""
        is_complete = self._put(self._page, PageRows(whole))
        self._page += len(whole)
        whole.clear()
        return is_complete
