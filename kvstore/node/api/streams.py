"""Streams: data messages as they come and go. Data is copied once between a message and the pages it belongs to.

A stream's node has one buffer of a few MiB, or of one page where pages are larger: what was read for a slow reader
waits in it, and nothing of the store is held for him.
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

BATCH_BYTES: Final = 4 << 20  # of pages read or put in one step, where a page is not larger
CHUNK_BYTES: Final = 1 << 20  # of data in a message sent; a client's default bound for a message is 4 MiB
DIRECT_BYTES: Final = 1 << 20  # of whole pages in one message, which are put from there without another copy
MESSAGES_MAX: Final = 1024  # taken in one step, of very small ones
_COPIES: Final = 4  # of a batch: the pages, the messages being worked on and those coming, of which one may be too much

Value = TypeVar("Value")
Rows = npt.NDArray[np.uint8]


class Data(NamedTuple):
    """A message of a data stream, read without copying the data."""

    begin: bytes | None
    data: memoryview
    digest: int
    page: int
    offset: int

    def check(self) -> None:
        """Raises InvalidRequest where the data is not what its digest says."""
        if len(self.data) and digest_of(self.data) != self.digest:
            raise InvalidRequest("data_xxh3", "is not xxh3_64 of data: it was damaged on its way")


def read_data(message: bytes) -> Data:
    """A ``WriteRequest`` or ``PutObjectRequest``. Raises InvalidRequest where it is not one."""
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


assert FIXED64 == 1, "``fields`` gives a digest as a number"


def buffer_bytes(page_bytes: int) -> int:
    """What a stream of such pages takes of the node's buffers."""
    return _COPIES * max(page_bytes, BATCH_BYTES)


def batch_pages(page_bytes: int) -> int:
    """Pages in one step."""
    return max(1, BATCH_BYTES // page_bytes)


def pack_pages(data: memoryview, pack: Callable[[memoryview], bytes] = pack_data) -> list[bytes]:
    """Messages of ``data`` with its digests."""
    return [pack(data[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES)]


async def first_of(requests: AsyncIterator[bytes], call: Call) -> Data:
    """The first message of a stream, which has to begin it. Raises InvalidRequest."""
    message = await call.receive(requests)
    if message is not None:
        first = read_data(message)
        if first.begin is not None:
            return first
    raise InvalidRequest("begin", "must be in the first message")


async def batches(first: Data, requests: AsyncIterator[bytes], call: Call) -> AsyncIterator[list[Data]]:
    """What a stream brings, ``BATCH_BYTES`` or more at a time. Raises InvalidRequest where it begins again."""
    gathered, size = [first], len(first.data)
    while (message := await call.receive(requests)) is not None:
        data = read_data(message)
        if data.begin is not None:
            raise InvalidRequest("begin", "must be in the first message only")
        gathered.append(data)
        size += len(data.data)
        if size >= BATCH_BYTES or len(gathered) >= MESSAGES_MAX:
            yield gathered
            gathered, size = [], 0
    yield gathered


async def ahead(call: Call, steps: Iterable[Callable[[], Value]]) -> AsyncGenerator[Value, None]:
    """What comes of ``steps``, in order: each is done in a thread while what came of the one before is sent."""
    step: asyncio.Task[Value] | None = None
    try:
        for work in steps:
            before = await step if step is not None else None
            step = asyncio.create_task(call.run(work))
            if before is not None:
                yield before
        if step is not None:
            yield await step
    finally:
        _forget(step)


async def feed(call: Call, pages: PageAssembly, batches: AsyncIterator[list[Data]]) -> bool:
    """Hand batches to ``pages`` in a thread, each while the next one comes. False where nothing more is wanted."""
    step: asyncio.Task[bool] | None = None
    coming: asyncio.Task[list[Data] | None] | None = None
    try:
        while True:
            coming = asyncio.create_task(_next(batches))
            if step is not None and not await step:  # what is wrong is told at once, whether more comes or not
                return False
            batch = await coming
            if batch is None:
                return True
            step = asyncio.create_task(call.wait(pages.feed, batch))
    finally:
        _forget(step)
        _forget(coming)


async def _next(batches: AsyncIterator[list[Data]]) -> list[Data] | None:
    return await anext(batches, None)


def _forget(step: asyncio.Task[Any] | None) -> None:
    """End it; its result is not needed any more."""
    if step is not None and not step.cancel() and not step.cancelled():
        step.exception()


class PageAssembly:
    """Whole pages put together from data of any size.

    Life: made for ``count`` pages -> ``feed`` for every batch, which hands whole pages on as soon as a buffer is full
    or the batch ends -> ``end``.
    """

    def __init__(self, count: int, page_bytes: int, put: Callable[[int, Rows | PageRows], bool]) -> None:
        self._left = count * page_bytes
        self._page_bytes = page_bytes
        self._rows: Rows = empty((min(count, batch_pages(page_bytes)), page_bytes))
        self._put = put
        self._filled = 0  # bytes of the rows
        self._page = 0

    def feed(self, messages: list[Data]) -> bool:
        """Take these in. False where ``put`` took less than it was given: nothing more has to be sent.

        Raises:
            InvalidRequest: data is damaged, or more than the pages need; pages handed on before stay.
        """
        whole = PageRows()
        for message in messages:
            message.check()
            data = np.frombuffer(message.data, np.uint8)
            if len(data) > self._left:
                raise InvalidRequest("data", "is more than the pages named")
            self._left -= len(data)
            if not self._filled and len(data) >= DIRECT_BYTES and not len(data) % self._page_bytes:
                whole.extend(data.reshape(-1, self._page_bytes))
                continue
            if whole and not self._hand_on(whole):
                return False
            while len(data):
                flat = self._rows.reshape(-1)
                some = min(len(data), len(flat) - self._filled)
                copy(flat[self._filled : self._filled + some], data[:some])
                data, self._filled = data[some:], self._filled + some
                if self._filled == len(flat) and not self._empty():
                    return False
        if whole:
            return self._hand_on(whole)
        return self._filled < self._page_bytes or self._empty()

    def end(self) -> None:
        """Raises InvalidRequest where a page was begun and not finished; those before stay."""
        if self._filled:
            raise InvalidRequest("data", f"ended inside page {self._page}; the pages before it are stored")

    def _empty(self) -> bool:
        """Hand on the pages of the buffer that are whole."""
        whole = self._filled // self._page_bytes
        took_all = self._put(self._page, self._rows[:whole])
        rest = self._filled - whole * self._page_bytes
        flat = self._rows.reshape(-1)
        flat[:rest] = flat[whole * self._page_bytes : self._filled]
        self._filled, self._page = rest, self._page + whole
        return took_all

    def _hand_on(self, whole: PageRows) -> bool:
        """Hand on pages that lie in their messages, and forget them."""
        took_all = self._put(self._page, PageRows(whole))
        self._page += len(whole)
        whole.clear()
        return took_all
