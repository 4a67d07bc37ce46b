"""Text to token ids and back: bytes as they are, or a tokenizer of Hugging Face from a local directory.

Nothing here knows about stop strings: see `engine.text`.
"""

from __future__ import annotations

import codecs
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Tokens that are decoded again with each new one. A character is at most 4 bytes and a token at least one, so that
# 8 tokens always hold the start of the last character whole.
WINDOW_TOKENS_MIN, WINDOW_TOKENS_MAX = 8, 24


class TextStream(Protocol):
    """Text of one answer, token by token. ``feed`` returns what no later token can change; ``flush`` the rest."""

    def feed(self, token: int) -> str: ...

    def flush(self) -> str: ...


class Tokenizer(Protocol):
    """What an engine needs of a tokenizer. Safe to use from several threads; a stream belongs to one."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def stream(self) -> TextStream: ...


class ByteTokenizer:
    """A token is a byte of UTF-8; ids 256 and 257 end and begin a text and have none themselves."""

    EOS = 256
    BOS = 257
    vocab_size = 258
    eos_ids: tuple[int, ...] = (EOS,)

    def encode(self, text: str) -> list[int]:
        """Bytes of ``text``, without special tokens. Lone surrogates, which have no bytes, become "?"."""
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are no UTF-8 become U+FFFD; ids above 255 are left out."""
        return bytes(token for token in ids if token < 256).decode("utf-8", "replace")

    def stream(self) -> TextStream:
        """A new stream, at the start of a text."""
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return self._decoder.decode(bytes((token,))) if token < 256 else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class HFTokenizer:
    """A tokenizer of Hugging Face. Special tokens are added to prompts as it says, and have no text in answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: tuple[int, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # the fast ones fail with "Already borrowed" where two threads meet
        own = tokenizer.eos_token_id
        self.eos_ids = eos_ids or (() if own is None else (int(own),))
        self.vocab_size = len(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``."""
        with self._lock:
            return [int(token) for token in self._tokenizer.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
        with self._lock:
            text = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def stream(self) -> TextStream:
        """A new stream, at the start of a text."""
        return _WindowStream(self)


class _WindowStream:
    """Decodes the last few tokens again with each new one, and hands out what the text grew by.

    Single tokens cannot be decoded alone: a character may need several, and some tokenizers strip the space in front
    of the first word. Only a last U+FFFD can still change; what stands before it is certain.
    """

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._given = 0  # characters of the window's text that were handed out

    def feed(self, token: int) -> str:
        self._tokens.append(token)
        certain = self._certain()
        text = certain[self._given :]
        if len(self._tokens) > WINDOW_TOKENS_MAX:
            del self._tokens[:-WINDOW_TOKENS_MIN]
            self._given = len(self._certain())
        else:
            self._given = max(self._given, len(certain))
        return text

    def flush(self) -> str:
        text = self._tokenizer.decode(self._tokens)[self._given :]
        self._tokens.clear()
        self._given = 0
        return text

    def _certain(self) -> str:
        return self._tokenizer.decode(self._tokens).removesuffix(REPLACEMENT)
