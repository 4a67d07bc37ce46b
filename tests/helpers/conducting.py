"""A conductor in this process, on the running event loop, without its servers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.conductor.backends.settings import parse_backends
from engine.conductor.config import ConductorConfig
from engine.conductor.shell.conductor import Conductor
from engine.conductor.shell.metrics import ConductorTally
from engine.model.request import AnswerEnd, AnswerRoute, AnswerTokens, Request, Sampling
from tests.helpers.processes import WAIT_S


@contextlib.asynccontextmanager
async def conducting(backends: Sequence[str], **config: Any) -> AsyncIterator[Conductor]:
    """One that has heard of all back ends that answer."""
    settings = ConductorConfig(backend=parse_backends(list(backends)), **config)
    conductor = Conductor(settings, ConductorTally(), lambda: None)
    running = asyncio.create_task(conductor.run())
    try:
        await conductor.wait_settled(WAIT_S)
        yield conductor
        assert not running.done() or running.result() is None
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def until(what: str, holds: Callable[[], Any]) -> Any:
    """Wait for a fact, while the loop goes on."""
    until_s = time.monotonic() + WAIT_S
    while not (found := holds()):
        assert time.monotonic() < until_s, f"it did not come to pass that {what}"
        await asyncio.sleep(0.01)
    return found


@dataclass
class Collected:
    """What came of an answer."""

    routes: list[dict[str, Any]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    end: AnswerEnd | None = None

    def add(self, part: AnswerRoute | AnswerTokens | AnswerEnd) -> None:
        """One part more."""
        match part:
            case AnswerRoute():
                self.routes.append(part.document)
            case AnswerTokens():
                self.ids += part.ids
                self.text += part.text
            case AnswerEnd():
                self.end, self.text = part, self.text + part.text

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were found."""
        assert self.end is not None
        return sum(self.end.usage.cached_tokens.values())


def asking(tokens: Sequence[int], model: str, max_tokens: int = 8, **more: Any) -> Request:
    """A prompt to be answered greedily."""
    sampling = Sampling(max_tokens=max_tokens, **more.pop("sampling", {}))
    return Request(id="r", model=model, tokens=np.array(tokens, np.uint32), sampling=sampling, **more)


async def answered(conductor: Conductor, request: Request) -> Collected:
    """All of an answer."""
    found = Collected()
    async with contextlib.aclosing(conductor.answer(request)) as parts:
        async for part in parts:
            found.add(part)
    return found
