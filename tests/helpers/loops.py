"""Event loops of tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run it in an event loop, for a minute at most."""
    asyncio.run(asyncio.wait_for(test(), 60))


async def until(holds: Callable[[], bool]) -> None:
    """Wait until that is so."""
    while not holds():
        await asyncio.sleep(0.005)
