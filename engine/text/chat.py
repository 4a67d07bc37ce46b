"""Prompts as a model's own tokenizer makes them: of a text, or of a chat by the model's chat template.

A template is a program of the model (Jinja), run by transformers in its sandbox.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.text.tokenizer import ByteTokenizer
from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptTokenizer:
    """One model's: of a preset bytes, without a template. Threads may share it; they take turns."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._bytes = ByteTokenizer()
        self._lock = threading.Lock()  # the fast ones fail with "Already borrowed" where two threads meet
        self.has_template = tokenizer is not None and bool(tokenizer.chat_template)

    def text(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the model begins one with."""
        if self._tokenizer is None:
            return self._bytes.encode(text)
        with self._lock:
            return [int(token) for token in self._tokenizer.encode(text)]

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a chat, up to where the model's answer begins.

        Raises:
            InvalidRequest: "messages": the model has no template, or its template refuses them.
        """
        if self._tokenizer is None or not self.has_template:
            raise InvalidRequest("messages", "the model has no chat template")
        from jinja2 import TemplateError

        try:
            with self._lock:
                found: Any = self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=False,
                )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            why = " ".join(str(error).split())[:200]
            raise InvalidRequest("messages", f"the model's chat template refuses them: {why}") from None
        return [int(token) for token in found]


def prompt_tokenizer(path: str | None) -> PromptTokenizer:
    """The tokenizer in a model's folder; None: of a preset.

    Raises:
        InvalidRequest: "model": it cannot be read.
    """
    if path is None:
        return PromptTokenizer(None)
    from transformers import AutoTokenizer  # only here: it takes a second

    try:
        return PromptTokenizer(
            AutoTokenizer.from_pretrained(Path(path), local_files_only=True, trust_remote_code=False)
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise InvalidRequest("model", f"its tokenizer cannot be read: {type(error).__name__}") from error
