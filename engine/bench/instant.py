"""Answers that cost nothing: in place of a conductor and its engines, so that what is left is the door's own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from engine.conductor.shell.answers import Answered, AnswerPart, Ask, Drawn, Routed, ServedModel
from engine.model.request import Usage

CONTEXT_TOKENS = 8192


class InstantAnswers:
    """Draws ``max_tokens`` words at once, whatever is asked. ``models``: names, and the folders of their tokenizers."""

    def __init__(self, **models: str | None) -> None:
        self._models = [ServedModel(name, path, CONTEXT_TOKENS) for name, path in models.items()]

    def models(self) -> list[ServedModel]:
        """See ``Answers``."""
        return self._models

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerPart, None]:
        """See ``Answers``."""
        yield Routed(await self.explain(ask))
        count = ask.sampling.max_tokens
        for index in range(count):
            yield Drawn((index,), f" word{index}")
        cached = len(ask.tokens) // 2
        yield Answered(
            "length", "", Usage(prompt_tokens=len(ask.tokens), completion_tokens=count, cached_tokens={"dram": cached})
        )

    async def explain(self, ask: Ask) -> dict[str, Any]:
        """See ``Answers``."""
        return {"model": ask.model, "reason": "there is nothing to choose"}
