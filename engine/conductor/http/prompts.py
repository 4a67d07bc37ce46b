"""PromptMaker: turns texts and chats into tokens, with the tokenizer of each model.

The model's chat template turns a chat into a string. A template is a Jinja program that comes with the model, and
transformers runs it in a sandbox.

Tokenizers run in a few threads, which callers share equally, so the event loop never waits for them. The waiting work
is bounded, because the memory for the bodies of requests is. Other threads load tokenizers.
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

# A prompt up to this size is tokenized at once, which takes at most 75 MiB and a second. A longer one is counted first.
COUNTED_CHARACTERS_MIN: Final = 256 << 10
PIECE_CHARACTERS: Final = 64 << 10
PIECE_SLACK: Final = 16  # a piece that is tokenized alone has at most this many more tokens than inside its text

Tokens = npt.NDArray[np.uint32]


class PromptTokenizer:
    """The tokenizer of one model. Threads may share it.

    A prompt is cut after ``tokens_max`` tokens. Set that to one above the model's limit to detect prompts that are too
    long. A tokenizer takes 300 bytes and 3 us for each token, so 8 MiB of text would take 2 GiB and half a minute. A
    long text is therefore tokenized in pieces first, until the pieces have more tokens than ``tokens_max``.

    Args:
        tokenizer: None if every byte is a token, and there is no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, tokens_max: int) -> None:
        self.has_template = tokenizer is not None and bool(tokenizer.chat_template)
        self._tokenizer = tokenizer
        self._bytes = ByteTokenizer()
        # A tokenizer in Rust needs no lock if all calls truncate in the same way, as these do. Other tokenizers need a
        # lock. It costs nothing, because they hold the interpreter anyway.
        is_fast = tokenizer is not None and tokenizer.is_fast
        self._lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext() if is_fast else threading.Lock()
        self._tokens_max = max(1, tokens_max)
        if tokenizer is not None:
            tokenizer.truncation_side = "right"
            self._encode("", True)

    def text(self, text: str) -> Tokens:
        """Return the ids of a prompt, with the special tokens that the model expects at its start."""
        if self._tokenizer is None:
            return self._bytes.array(text)[: self._tokens_max]
        return self._ids(text, True)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> Tokens:
        """Return the ids of a chat, up to the start of the model's answer.

        Raises:
            InvalidRequest: "messages": the model has no chat template, or the template refuses the messages.
        """
        if self._tokenizer is None or not self.has_template:
            raise InvalidRequest("messages", "the model has no chat template")
        from jinja2 import TemplateError

        try:
            with self._lock:
                text: Any = self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
                )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            why = " ".join(str(error).split())[:200]
            raise InvalidRequest("messages", f"the model's chat template refuses them: {why}") from None
        return self._ids(text, False)  # the template adds the special tokens

    def _ids(self, text: str, special: bool) -> Tokens:
        if len(text) > COUNTED_CHARACTERS_MIN:
            pieces: list[Tokens] = []
            for at in range(0, len(text), PIECE_CHARACTERS):
                pieces.append(self._encode(text[at : at + PIECE_CHARACTERS], False))
                if sum(map(len, pieces)) - len(pieces) * PIECE_SLACK > self._tokens_max:
                    return np.concatenate(pieces)[: self._tokens_max]
        return self._encode(text, special)

    def _encode(self, text: str, special: bool) -> Tokens:
        assert self._tokenizer is not None, "not for a tokenizer of bytes"
        with self._lock:
            ids = self._tokenizer.encode(text, add_special_tokens=special, truncation=True, max_length=self._tokens_max)
        return np.array(ids, np.uint32)


def prompt_tokenizer(path: str | None, tokens_max: int) -> PromptTokenizer:
    """Load the tokenizer in the folder ``path``; None if every byte is a token.

    Raises:
        InvalidRequest: "model": the tokenizer cannot be read.
    """
    if path is None:
        return PromptTokenizer(None, tokens_max)
    from transformers import AutoTokenizer  # only here: the import takes a second

    try:
        tokenizer = AutoTokenizer.from_pretrained(Path(path), local_files_only=True, trust_remote_code=False)
        return PromptTokenizer(tokenizer, tokens_max)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise InvalidRequest("model", f"its tokenizer cannot be read: {type(error).__name__}") from error


THREADS: Final = 2  # that one caller may use at the same time
LOADERS: Final = 2  # threads that load tokenizers: a slow one must not delay the next one
TURN_S: Final = 30.0  # the longest wait for a free thread
PREPARE_S: Final = 1.0  # between two checks for new models
MODELS_MAX: Final = 64  # models whose tokenizers are cached

Value = TypeVar("Value")


class PromptMaker:
    """Turns prompts into tokens. Call ``close`` when there are no more requests. Belongs to one event loop."""

    def __init__(self) -> None:
        self._lane = Lane(THREADS, "tokenize")
        self._loader = ThreadPoolExecutor(LOADERS, "kvstore-tokenizers")
        self._loads: OrderedDict[tuple[str, str | None, int], asyncio.Future[PromptTokenizer]] = OrderedDict()

    def close(self) -> None:
        """Stop the threads after their current work. Does not wait for them."""
        self._lane.close(wait=False)
        self._loader.shutdown(wait=False, cancel_futures=True)

    async def prepare(self, models: Callable[[], list[ServedModel]]) -> None:
        """Load the tokenizers of new models until cancelled.

        Loading takes seconds, and the first caller should not have to wait for it. If a tokenizer cannot be read, the
        callers that use its model get the error.
        """
        seen: list[ServedModel] = []

        async def turn() -> None:
            nonlocal seen
            current = models()
            new, seen = [model for model in current if model not in seen], current  # tries a tokenizer only once
            await self._load(new)
            await asyncio.sleep(PREPARE_S)

        await boundary.task_loop("task/tokenizers", turn)

    async def wait_loaded(self, models: list[ServedModel], timeout_s: float) -> None:
        """Load the tokenizers of these models. Wait at most ``timeout_s``; loading continues afterwards."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._load(models)

    async def _load(self, models: list[ServedModel]) -> None:
        for model in models[:MODELS_MAX]:
            with contextlib.suppress(InvalidRequest):
                await self.tokenizer(model)

    async def chat(self, messages: Sequence[Mapping[str, str]], model: ServedModel, owner: Owner) -> Tokens:
        """Return the tokens of a chat. A chat that is too long is cut one token above the model's limit.

        Raises:
            Refusal: the model has no chat template.
            InvalidRequest: the template refuses the messages, or the tokenizer cannot be read.
            TooManyCalls: no thread is free in time.
        """
        tokenizer = await self.tokenizer(model)
        if not tokenizer.has_template:
            raise invalid("messages", f"{model.name} has no chat template: ask /v1/completions", "no_chat_template")
        return _not_empty(await self.run(partial(tokenizer.chat, messages), owner), "messages")

    async def texts(self, prompts: Sequence[str | Tokens], model: ServedModel, owner: Owner) -> list[Tokens]:
        """Return the tokens of each prompt, in order. A prompt that is too long is cut, one token above the model's
        limit.

        Raises:
            Refusal: a prompt is empty.
            InvalidRequest: the tokenizer cannot be read.
            TooManyCalls: no thread is free in time.
        """
        tokens = []
        for prompt in prompts:
            if isinstance(prompt, str):
                tokenizer = await self.tokenizer(model)
                tokens.append(_not_empty(await self.run(partial(tokenizer.text, prompt), owner), "prompt"))
            else:
                tokens.append(prompt)
        return tokens

    async def tokenizer(self, model: ServedModel) -> PromptTokenizer:
        """Return the tokenizer of a model. It is loaded once, and concurrent callers wait for the same load."""
        key = model.name, model.path, model.context_tokens
        load = self._loads.get(key)
        if load is None or (load.done() and load.exception() is not None):
            loop = asyncio.get_running_loop()
            load = self._loads[key] = loop.run_in_executor(
                self._loader, prompt_tokenizer, model.path, model.context_tokens + 1
            )
            while len(self._loads) > MODELS_MAX:
                self._loads.popitem(last=False)
        self._loads.move_to_end(key)
        return await asyncio.shield(load)  # the end of one caller must not cancel the load for others

    async def run(self, work: Callable[[], Value], owner: Owner, timeout_s: float = TURN_S) -> Value:
        """Do ``work`` in one of the threads, and return its result. Raises TooManyCalls if none is free in time."""
        return await self._lane.run(lambda _: None, work, None, owner, timeout_s)


def _not_empty(ids: Tokens, param: str) -> Tokens:
    if not len(ids):
        raise invalid(param, "is empty")
    return ids
