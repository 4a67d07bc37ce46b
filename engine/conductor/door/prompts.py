"""PromptMaker: texts and chats become tokens, in threads, for models by name.

The event loop never waits for a tokenizer. Threads are few, callers share them in equal parts, and what waits for them
is bounded by the bytes of bodies that callers may have. Tokenizers are loaded by threads of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from engine.conductor.door.errors import invalid
from engine.conductor.door.wanted import Wanted
from engine.conductor.shell.answers import ServedModel
from engine.text.chat import PromptTokenizer, Tokens, prompt_tokenizer
from kvstore import boundary
from kvstore.errors import InvalidRequest
from kvstore.limits import Lane, Owner

THREADS: Final = 2  # for one caller at most
LOADERS: Final = 2  # so that a tokenizer that takes long holds up no other
TURN_S: Final = 30.0  # in which a thread has to be free
PREPARE_S: Final = 1.0  # how often to look for models that are new
MODELS_MAX: Final = 64  # whose tokenizers are kept

Value = TypeVar("Value")


class PromptMaker:
    """Makes tokens of what is wanted. ``close`` when nobody asks any more. Of the event loop alone."""

    def __init__(self) -> None:
        self._lane = Lane(THREADS, "tokenize")
        self._loader = ThreadPoolExecutor(LOADERS, "kvstore-tokenizers")
        self._loaded: OrderedDict[tuple[str, str | None, int], asyncio.Future[PromptTokenizer]] = OrderedDict()

    def close(self) -> None:
        """Let the threads go; what they are at goes on to its end."""
        self._lane.close(wait=False)
        self._loader.shutdown(wait=False, cancel_futures=True)

    async def prepare(self, models: Callable[[], list[ServedModel]]) -> None:
        """Load the tokenizers of models as they come, which takes seconds, so that who asks first need not wait.

        Runs until it is cancelled. Who asks for a model whose tokenizer cannot be read is told why.
        """
        known: list[ServedModel] = []

        async def turn() -> None:
            nonlocal known
            now = models()
            new, known = [model for model in now if model not in known], now  # one that fails is not tried for ever
            await self._load(new)
            await asyncio.sleep(PREPARE_S)

        await boundary.kept_task("task/tokenizers", turn)

    async def prepared(self, models: list[ServedModel], timeout_s: float) -> None:
        """Wait until the tokenizers of these are loaded, or cannot be; at most so long. They are loaded on."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._load(models)

    async def _load(self, models: list[ServedModel]) -> None:
        for model in models[:MODELS_MAX]:
            with contextlib.suppress(InvalidRequest):
                await self.tokenizer(model)

    async def tokens(self, wanted: Wanted, model: ServedModel, owner: Owner) -> list[Tokens]:
        """Of each prompt, in order; of a chat one. What is too long for the model is cut after one token too many.

        Raises:
            Refusal: the model has no chat template, or a prompt is empty.
            InvalidRequest: the template refuses the messages, or the tokenizer cannot be read.
            TooManyCalls: no thread is free in time.
        """
        if wanted.is_chat:
            tokenizer = await self.tokenizer(model)
            if not tokenizer.has_template:
                reason = f"{model.name} has no chat template: ask /v1/completions"
                raise invalid("messages", reason, "no_chat_template")
            return [_some(await self.run(partial(tokenizer.chat, wanted.messages), owner), "messages")]
        found = []
        for prompt in wanted.prompts:
            if isinstance(prompt, str):
                tokenizer = await self.tokenizer(model)
                found.append(_some(await self.run(partial(tokenizer.text, prompt), owner), "prompt"))
            else:
                found.append(prompt)
        return found

    async def tokenizer(self, model: ServedModel) -> PromptTokenizer:
        """Loaded once; whoever comes meanwhile waits for the same."""
        where = model.name, model.path, model.context_tokens
        found = self._loaded.get(where)
        if found is None or (found.done() and found.exception() is not None):
            loop = asyncio.get_running_loop()
            found = self._loaded[where] = loop.run_in_executor(
                self._loader, prompt_tokenizer, model.path, model.context_tokens + 1
            )
            while len(self._loaded) > MODELS_MAX:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(where)
        return await asyncio.shield(found)  # who goes away meanwhile stops nobody else's

    async def run(self, work: Callable[[], Value], owner: Owner, left_s: float = TURN_S) -> Value:
        """Do ``work`` in one of the threads. Raises TooManyCalls where none is free in time."""
        return await self._lane.run(lambda _: None, work, None, owner, left_s)


def _some(ids: Tokens, param: str) -> Tokens:
    if not len(ids):
        raise invalid(param, "is empty")
    return ids
