"""PromptMaker: turns texts and chats into tokens, in threads, for models by name.

The event loop never waits for a tokenizer. The threads are few and shared equally by callers; the work that waits
is bounded by the bytes of bodies that callers may have. Separate threads load tokenizers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from engine.conductor.http.openai_errors import invalid
from engine.conductor.shell.answers import ServedModel
from engine.text.chat import PromptTokenizer, Tokens, prompt_tokenizer
from kvstore import boundary
from kvstore.errors import InvalidRequest
from kvstore.limits import Lane, Owner

THREADS: Final = 2  # at most, for one caller
LOADERS: Final = 2  # so that a slow tokenizer delays no other
TURN_S: Final = 30.0  # the longest wait for a free thread
PREPARE_S: Final = 1.0  # how often to look for new models
MODELS_MAX: Final = 64  # models whose tokenizers are kept

Value = TypeVar("Value")


class PromptMaker:
    """Turns requests into tokens. Call ``close`` once there are no more requests. Belongs to one event loop."""

    def __init__(self) -> None:
        self._lane = Lane(THREADS, "tokenize")
        self._loader = ThreadPoolExecutor(LOADERS, "kvstore-tokenizers")
        self._loaded: OrderedDict[tuple[str, str | None, int], asyncio.Future[PromptTokenizer]] = OrderedDict()

    def close(self) -> None:
        """Stop the threads; their current work runs to its end."""
        self._lane.close(wait=False)
        self._loader.shutdown(wait=False, cancel_futures=True)

    async def prepare(self, models: Callable[[], list[ServedModel]]) -> None:
        """Load the tokenizers of new models, which takes seconds, so that the first caller need not wait.

        Runs until cancelled. A caller that asks for a model whose tokenizer cannot be read gets the error.
        """
        known: list[ServedModel] = []

        async def turn() -> None:
            nonlocal known
            now = models()
            new, known = [model for model in now if model not in known], now  # a failed one is not retried for ever
            await self._load(new)
            await asyncio.sleep(PREPARE_S)

        await boundary.kept_task("task/tokenizers", turn)

    async def prepared(self, models: list[ServedModel], timeout_s: float) -> None:
        """Wait at most this long until these tokenizers are loaded or have failed. Loading goes on afterwards."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._load(models)

    async def _load(self, models: list[ServedModel]) -> None:
        for model in models[:MODELS_MAX]:
            with contextlib.suppress(InvalidRequest):
                await self.tokenizer(model)

    async def chat(self, messages: Sequence[Mapping[str, str]], model: ServedModel, owner: Owner) -> Tokens:
        """The tokens of a chat. One too long for the model is cut one token above the limit.

        Raises:
            Refusal: the model has no chat template.
            InvalidRequest: the template refuses the messages, or the tokenizer cannot be read.
            TooManyCalls: no thread is free in time.
        """
        tokenizer = await self.tokenizer(model)
        if not tokenizer.has_template:
            raise invalid("messages", f"{model.name} has no chat template: ask /v1/completions", "no_chat_template")
        return _some(await self.run(partial(tokenizer.chat, messages), owner), "messages")

    async def texts(self, prompts: Sequence[str | Tokens], model: ServedModel, owner: Owner) -> list[Tokens]:
        """The tokens of each prompt, in order. One too long for the model is cut one token above the limit.

        Raises:
            Refusal: a prompt is empty.
            InvalidRequest: the tokenizer cannot be read.
            TooManyCalls: no thread is free in time.
        """
        found = []
        for prompt in prompts:
            if isinstance(prompt, str):
                tokenizer = await self.tokenizer(model)
                found.append(_some(await self.run(partial(tokenizer.text, prompt), owner), "prompt"))
            else:
                found.append(prompt)
        return found

    async def tokenizer(self, model: ServedModel) -> PromptTokenizer:
        """The tokenizer of a model, loaded once; concurrent callers wait for the same load."""
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
        return await asyncio.shield(found)  # a caller that leaves must not cancel the load for others

    async def run(self, work: Callable[[], Value], owner: Owner, left_s: float = TURN_S) -> Value:
        """Do ``work`` in one of the threads. Raises TooManyCalls if none is free in time."""
        return await self._lane.run(lambda _: None, work, None, owner, left_s)


def _some(ids: Tokens, param: str) -> Tokens:
    if not len(ids):
        raise invalid(param, "is empty")
    return ids
