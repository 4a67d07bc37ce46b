"""Lanes: threads for what blocks, shared by those who call.

What waits for a thread waits in the event loop, where it is counted, has its turn, and can be cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from kvstore.errors import NodeUnavailable
from kvstore.serving.identities import LOCAL, Identity
from kvstore.serving.shares import Shares

QUICK_THREADS: Final = 4  # for what only looks at the index, or asks the node
READ_THREADS: Final = 8  # for what copies or reads pages
WAIT_THREADS: Final = 8  # for what may have to wait for room: writers of a full node do not hold up its readers
LANE_OWNERS: Final = 2  # so many times as many there are in all: one owner alone never has every thread

Value = TypeVar("Value")


class Lane:
    """Some threads: ``count`` of them for one owner at most."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(LANE_OWNERS * count, f"kvstore-api-{name}")
        self._slots = Shares(f"threads that {name}", name, LANE_OWNERS * count, count, count)

    async def run(
        self,
        started: Callable[[Future[Any]], None],
        work: Callable[[], Value],
        undo: Callable[[Value], object] | None,
        owner: Identity = LOCAL,
        left_s: float = 60.0,
        begun: bool = False,
    ) -> Value:
        """Do ``work``. Where the call ends meanwhile, ``undo`` gets what came of it: nobody else will.

        Args:
            left_s: until the call's deadline.
            begun: see ``Shares.take``.

        Raises:
            TooManyCalls: there is no thread in time.
        """
        await self._slots.take(1, left_s, owner, begun=begun)
        began_s = time.monotonic()
        try:
            step = self._pool.submit(work)
        except RuntimeError:  # the daemon ends
            self._slots.give(1, owner)
            raise NodeUnavailable("the node is ending") from None
        started(step)
        try:
            value = await asyncio.wrap_future(step)
        except asyncio.CancelledError:
            left = partial(self._left, owner, began_s, undo)
            loop = asyncio.get_running_loop()
            step.add_done_callback(lambda done: call_soon(loop, partial(left, done)))
            raise
        except BaseException:
            self._slots.give(1, owner)
            raise
        self._slots.give(1, owner, time.monotonic() - began_s)
        return value

    def _left(self, owner: Identity, began_s: float, undo: Callable[[Any], object] | None, step: Future[Any]) -> None:
        self._slots.give(1, owner, time.monotonic() - began_s)
        if undo is not None and not step.cancelled() and step.exception() is None:
            with contextlib.suppress(RuntimeError):  # the daemon ends, and everything held with it
                self._pool.submit(undo, step.result())

    def close(self) -> None:
        """Steps under way are waited for: they end by their own deadlines."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class Threads:
    """The threads that do what blocks. Each call has one step in them at a time. Made in the event loop."""

    def __init__(self) -> None:
        self.quick = Lane(QUICK_THREADS, "quick")
        self.read = Lane(READ_THREADS, "read")
        self.wait = Lane(WAIT_THREADS, "wait")

    def close(self) -> None:
        """See ``Lane.close``."""
        for lane in (self.quick, self.read, self.wait):
            lane.close()


def call_soon(loop: asyncio.AbstractEventLoop, then: Callable[[], None]) -> None:
    """From any thread: do it in the loop, if there still is one."""
    with contextlib.suppress(RuntimeError):  # the loop has ended, and what was to be given back with it
        loop.call_soon_threadsafe(then)
