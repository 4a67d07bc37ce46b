"""Prompts as a model's own tokenizer makes them: of a text, or of a chat by the model's chat template.

A template is a program of the model (Jinja), run by transformers in its sandbox.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from engine.text.tokenizer import ByteTokenizer
from kvstore.errors import InvalidRequest

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
