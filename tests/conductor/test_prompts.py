"""Tokenizers of a conductor's door: loaded before it says that it serves."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engine.conductor.door import prompts
from engine.conductor.door.prompts import PromptMaker
from engine.conductor.shell.answers import ServedModel
from engine.text.chat import PromptTokenizer
from kvstore.errors import InvalidRequest

MODELS = [ServedModel("bad", "/bad", 100), ServedModel("slow", "/slow", 100)]
LONG_S = 60.0


def test_tokenizers_are_waited_for_within_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be read holds up nobody; one that takes longer is loaded on, once."""
    asked: list[str | None] = []
    go = threading.Event()

    def load(path: str | None, tokens_max: int) -> PromptTokenizer:
        asked.append(path)
        if path == "/bad":
            raise InvalidRequest("model", "cannot be read")
        assert go.wait(LONG_S)
        return PromptTokenizer(None, tokens_max)

    monkeypatch.setattr(prompts, "prompt_tokenizer", load)

    async def check() -> None:
        maker = PromptMaker()
        await maker.prepared(MODELS[1:], 0.01)
        waiting = asyncio.create_task(maker.prepared(MODELS, LONG_S))
        while "/bad" not in asked:
            await asyncio.sleep(0.001)
        assert not waiting.done()
        go.set()
        await waiting
        await maker.tokenizer(MODELS[1])
        maker.close()

    asyncio.run(check())
    assert asked == ["/slow", "/bad"]
