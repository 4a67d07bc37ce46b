"""Tokenizers of a conductor: loaded before it says that it serves; what a prompt may cost."""

from __future__ import annotations

import asyncio
import random
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.conductor.http import prompts
from engine.conductor.http.prompts import PromptMaker, PromptTokenizer, prompt_tokenizer
from engine.demo.command import MODEL
from engine.model.request import ServedModel
from kvstore.errors import InvalidRequest

MODELS = [ServedModel("bad", "/bad", 100), ServedModel("slow", "/slow", 100)]
LONG_S = 60.0
SEED = 3
TOKENS_MAX = 400


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
        await maker.wait_loaded(MODELS[1:], 0.01)
        waiting = asyncio.create_task(maker.wait_loaded(MODELS, LONG_S))
        while "/bad" not in asked:
            await asyncio.sleep(0.001)
        assert not waiting.done()
        go.set()
        await waiting
        await maker.tokenizer(MODELS[1])
        maker.close()

    asyncio.run(check())
    assert asked == ["/slow", "/bad"]


# --- long prompts ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder() -> Path:
    return MODEL


def test_a_text_is_counted_in_pieces_and_gives_the_tokens_of_the_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "COUNTED_CHARACTERS_MIN", 100)
    monkeypatch.setattr(prompts, "PIECE_CHARACTERS", 64)
    chance = random.Random(SEED)
    cut, whole = prompt_tokenizer(str(folder), TOKENS_MAX), prompt_tokenizer(str(folder), 1 << 20)
    seen = set()
    for _ in range(200):
        text = "".join(chance.choices("What is a salt? é\U0001f600", k=chance.randrange(2 * TOKENS_MAX)))
        for make in ("text", "chat"):
            given = text if make == "text" else [{"role": "user", "content": text}]
            wanted = getattr(whole, make)(given)
            found = getattr(cut, make)(given)
            assert len(found) == min(len(wanted), TOKENS_MAX)
            if len(wanted) <= TOKENS_MAX:
                assert (found == wanted).all()
            seen.add((make, len(wanted) <= TOKENS_MAX))
    assert len(seen) == 4


def test_a_text_of_megabytes_costs_no_more_memory_than_its_model_takes(folder: Path) -> None:
    tokenizer = prompt_tokenizer(str(folder), 8193)
    text = "".join(random.Random(SEED).choices("qwxzjkvQWXZJK#%&", k=4 << 20))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(tokenizer.text(text)) == 8193
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 256 << 10


def test_threads_share_a_tokenizer_without_a_lock(folder: Path) -> None:
    tokenizer = prompt_tokenizer(str(folder), TOKENS_MAX)
    message = [{"role": "user", "content": "What is a salt?"}]
    text, talk = tokenizer.text("What is a salt?"), tokenizer.chat(message)

    def check(_: int) -> bool:
        return bool((tokenizer.text("What is a salt?") == text).all() and (tokenizer.chat(message) == talk).all())

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(check, range(200)))
