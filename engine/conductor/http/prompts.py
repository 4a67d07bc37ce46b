"""PromptMaker: turns texts and chats into tokens, in threads, for models by name.

The event loop never waits for a tokenizer. The threads are few and shared equally by callers; the work that waits
is bounded by the bytes of bodies that callers may have. Separate threads load tokenizers.

A model's own tokenizer makes a prompt, from a text, or from a chat by the model's chat template. A template is a
program of the model (Jinja), run by transformers in its sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from engine.conductor.http.openai_errors import invalid
from engine.model.request import ServedModel
from engine.text.tokenizer import ByteTokenizer
from kvstore import boundary
from kvstore.errors import InvalidRequest
from kvstore.limits import Lane, Owner

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COUNTED_CHARACTERS_MIN: Final = (
    256 << 10
)  # a text up to this size becomes tokens at once: at worst 75 MiB, for a second
PIECE_CHARACTERS: Final = 64 << 10
PIECE_SLACK: Final = 16  # a piece has at most this many tokens more than it has as a part of its text

Tokens = npt.NDArray[np.uint32]


class PromptTokenizer:
    """The tokenizer of one model; for a preset it is bytes, without a template. Threads may share it.

    A prompt is cut after ``tokens_max`` tokens: set it one above the model's limit to detect a prompt that is too long.
    A tokenizer needs 300 bytes and 3 us for each token, which would be 2 GiB and half a minute for 8 MiB of text. So a
    long text is first counted in pieces, until they are more tokens than the model takes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, tokens_max: int) -> None:
        self.has_template = tokenizer is not None and bool(tokenizer.chat_template)
        self._tokenizer = tokenizer
        self._bytes = ByteTokenizer()
        # Tokenizers in Rust only lock when a call changes how they truncate, and all calls truncate in the same way.
        # The others hold the interpreter anyway.
        is_fast = tokenizer is not None and tokenizer.is_fast
        self._turn: contextlib.AbstractContextManager[Any] = contextlib.nullcontext() if is_fast else threading.Lock()
        self._tokens_max = max(1, tokens_max)
        if tokenizer is not None:
            tokenizer.truncation_side = "right"
            self._encode("", True)

    def text(self, text: str) -> Tokens:
        """Ids of a prompt, with the special tokens that the model begins one with."""
        if self._tokenizer is None:
            return self._bytes.array(text)[: self._tokens_max]
        return self._ids(text, True)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> Tokens:
        """Ids of a chat, up to where the model's answer begins.

        Raises:
            InvalidRequest: "messages": the model has no template, or its template refuses them.
        """
        if self._tokenizer is None or not self.has_template:
            raise InvalidRequest("messages", "the model has no chat template")
        from jinja2 import TemplateError

        try:
            with self._turn:
                found: Any = self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
                )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            why = " ".join(str(error).split())[:200]
            raise InvalidRequest("messages", f"the model's chat template refuses them: {why}") from None
        return self._ids(found, False)  # the template has the special tokens

    def _ids(self, text: str, special: bool) -> Tokens:
        if len(text) > COUNTED_CHARACTERS_MIN:
            pieces: list[Tokens] = []
            for at in range(0, len(text), PIECE_CHARACTERS):
                pieces.append(self._encode(text[at : at + PIECE_CHARACTERS], False))
                if sum(map(len, pieces)) - len(pieces) * PIECE_SLACK > self._tokens_max:
                    return np.concatenate(pieces)[: self._tokens_max]
        return self._encode(text, special)

    def _encode(self, text: str, special: bool) -> Tokens:
        assert self._tokenizer is not None, "presets have bytes"
        with self._turn:
            found = self._tokenizer.encode(
                text, add_special_tokens=special, truncation=True, max_length=self._tokens_max
            )
        return np.array(found, np.uint32)


def prompt_tokenizer(path: str | None, tokens_max: int) -> PromptTokenizer:
    """The tokenizer in a model's folder; None: the one of a preset.

    Raises:
        InvalidRequest: "model": it cannot be read.
    """
    if path is None:
        return PromptTokenizer(None, tokens_max)
    from transformers import AutoTokenizer  # only here: it takes a second

    try:
        found = AutoTokenizer.from_pretrained(Path(path), local_files_only=True, trust_remote_code=False)
        return PromptTokenizer(found, tokens_max)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise InvalidRequest("model", f"its tokenizer cannot be read: {type(error).__name__}") from error


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

        await boundary.task_loop("task/tokenizers", turn)

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
