"""Tokenizers, and the text of an answer while it is generated.

A tokenizer either maps bytes to tokens, or is one of Hugging Face from a local folder. ``Detokenizer`` returns the text
of an answer token by token: only complete characters, and no text that may be the beginning of a stop string.

Worked example, with the stop string "END" and one token for each letter: the tokens "a", "E", "N" return "a", "" and
"", because "EN" may become the stop string. If "x" follows, it returns "ENx". If then "E", "N", "D" follow, they return
nothing, and ``stopped`` is "END".
"""

from __future__ import annotations

import codecs
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has at most 4 bytes, so at most 3 bytes at the end of a string may belong to an incomplete character.
UNFINISHED_MAX = 3
# Tokens that end inside a character are decoded again with each new token. When there are more than the first number,
# their bytes are not text, and only the last few tokens are retained.
WINDOW_TOKENS_MAX, WINDOW_TOKENS_MIN = 24, 8

SLOW_TO_TEXT = {  # fast tokenizers do not have the second option
    "skip_special_tokens": True,
    "clean_up_tokenization_spaces": False,
}


class TextStream(Protocol):
    """The text of one answer, token by token."""

    def feed(self, token: int) -> str:
        """Append a token. Returns the new text that no later token can change."""
        ...

    def flush(self) -> str:
        """End the answer, and return the rest of its text. An incomplete character becomes U+FFFD."""
        ...


class Tokenizer(Protocol):
    """A tokenizer, as an engine uses it. Threads may share it, but only one thread may use a stream."""

    @property
    def vocab_size(self) -> int:
        """The number of ids, which start at 0."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids at the start of an answer."""
        ...

    def stream(self) -> TextStream:
        """Return a new stream for the text of an answer."""
        ...


class ByteTokenizer:
    """A tokenizer with one token for each byte of UTF-8. The ids 256 (end) and 257 (begin) have no text."""

    EOS = 256
    BOS = 257
    vocab_size = 258
    eos_ids: tuple[int, ...] = (EOS,)

    def encode(self, text: str) -> list[int]:
        """Return the bytes of ``text``, without special tokens. A lone surrogate, which has no bytes, becomes "?"."""
        return list(text.encode("utf-8", "replace"))

    def array(self, text: str) -> npt.NDArray[np.uint32]:
        """Return the ids of ``encode`` as an array."""
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``. Bytes that are not UTF-8 become U+FFFD, and ids above 255 are skipped."""
        return bytes(token for token in ids if token < 256).decode("utf-8", "replace")

    def stream(self) -> TextStream:
        """Return a new stream for the text of an answer."""
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return self._decoder.decode(bytes((token,))) if token < 256 else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class HFTokenizer:
    """A tokenizer of Hugging Face. It adds its special tokens to prompts. Special tokens of answers have no text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: tuple[int, ...] = ()) -> None:
        self._tokenizer = tokenizer
        # Answers are decoded token by token. The fast backend, where there is one, needs an eighth of the time.
        fast = getattr(tokenizer, "backend_tokenizer", None)
        options = {"skip_special_tokens": True} if fast else SLOW_TO_TEXT
        self._decode: Callable[[list[int]], Any] = partial((fast or tokenizer).decode, **options)
        self._lock = threading.Lock()  # two threads at once make fast tokenizers fail with "Already borrowed"
        default_eos_id = tokenizer.eos_token_id
        self.eos_ids = eos_ids or (() if default_eos_id is None else (int(default_eos_id),))
        self.vocab_size = len(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``."""
        with self._lock:
            return [int(token) for token in self._tokenizer.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``. Bytes that are not UTF-8 become U+FFFD."""
        with self._lock:
            text = self._decode(list(ids))
        assert isinstance(text, str)
        return text

    def stream(self) -> TextStream:
        """Return a new stream for the text of an answer."""
        return _WindowStream(self)


class _WindowStream:
    """Decodes the last few tokens again with each new token, and returns the text that was added.

    A token cannot be decoded alone: a character may need several tokens, and some tokenizers strip the space in front
    of the first word. A U+FFFD at the end of the text may be the beginning of a character. Tokenizers that fall back to
    bytes also show the characters before an incomplete one as U+FFFD. So the window begins and ends after complete
    characters, and contains some text before the new text.

    The stream of the ``tokenizers`` library is not used: it decodes all tokens that are not text again with each new
    token, and has no flush.
    """

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._complete_tokens = 0  # leading tokens of the window, whose text ended with a complete character
        self._returned_chars = 0  # leading characters of the window's text that were returned

    def feed(self, token: int) -> str:
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        if not text.endswith(REPLACEMENT):
            return self._move_window(text)
        if len(self._tokens) - self._complete_tokens > WINDOW_TOKENS_MAX:
            return self._skip_invalid(text)
        return self._new_text(text, len(text.rstrip(REPLACEMENT)))

    def flush(self) -> str:
        text = self._tokenizer.decode(self._tokens)[self._returned_chars :]
        self._tokens.clear()
        self._complete_tokens = self._returned_chars = 0
        return text

    def _move_window(self, text: str) -> str:
        """Return the new text, and begin a new window before it. The new text ends with a complete character."""
        new = self._new_text(text, len(text))
        if self._complete_tokens and (recent := self._tokenizer.decode(self._tokens[self._complete_tokens :])):
            del self._tokens[: self._complete_tokens]
            self._returned_chars = len(recent)
        elif len(self._tokens) > WINDOW_TOKENS_MAX:  # many special tokens, which have no text
            del self._tokens[:-WINDOW_TOKENS_MIN]
            self._returned_chars = len(self._tokenizer.decode(self._tokens))
        self._complete_tokens = len(self._tokens)
        return new

    def _skip_invalid(self, text: str) -> str:
        """Return U+FFFD for bytes that are not text. Keep back the last bytes, which may become a character."""
        open_chars = min(len(text) - len(text.rstrip(REPLACEMENT)), UNFINISHED_MAX)
        new = self._new_text(text, len(text) - open_chars)
        del self._tokens[:-WINDOW_TOKENS_MIN]
        self._returned_chars = max(0, len(self._tokenizer.decode(self._tokens)) - open_chars)
        self._complete_tokens = 0
        return new

    def _new_text(self, text: str, stop: int) -> str:
        new = text[self._returned_chars : stop]
        self._returned_chars = max(self._returned_chars, stop)
        return new


class Detokenizer:
    """The text of one answer, up to the first stop string. Only one thread may use it.

    Call ``feed`` for each token, then ``flush``. The texts that they return add up to the answer's text. The first stop
    string that is complete ends the text in front of it; if several end with the same character, the longest counts. A
    stop string may begin and end inside tokens.

    Attributes:
        stopped: the stop string that ended the text; None before. Afterwards, ``feed`` and ``flush`` return "".
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._stream = tokenizer.stream()
        self._matchers = [_StopMatcher(text) for text in dict.fromkeys(stop)]
        self._pending = ""  # text that may be the beginning of a stop string
        self.stopped: str | None = None

    def feed(self, token: int) -> str:
        """Append a token. Return the text that has become certain."""
        return "" if self.stopped is not None else self._filter(self._stream.feed(token))

    def flush(self) -> str:
        """End the answer, and return the rest of its text. An incomplete character becomes U+FFFD.

        The rest may still complete a stop string.
        """
        if self.stopped is not None:
            return ""
        text = self._filter(self._stream.flush())
        if self.stopped is None:
            text, self._pending = text + self._pending, ""
            self._matchers = []
        return text

    def _filter(self, new: str) -> str:
        """Return the certain part of the pending text and ``new``. Stops at a stop string."""
        if not self._matchers:
            return new
        text = self._pending + new
        for end in range(len(self._pending) + 1, len(text) + 1):
            matches = [matcher.text for matcher in self._matchers if matcher.step(text[end - 1])]
            if matches:
                self.stopped = max(matches, key=len)
                self._pending = ""
                return text[: end - len(self.stopped)]
        certain_chars = len(text) - max(matcher.matched for matcher in self._matchers)
        self._pending = text[certain_chars:]
        return text[:certain_chars]


class _StopMatcher:
    """Searches for one stop string with constant work per character (Knuth, Morris and Pratt).

    Attributes:
        matched: the number of characters of the stop string with which the text so far ends.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # For each n: the length of the longest proper suffix of the first n characters that is also a prefix of them.
        self._borders = [0] * (len(text) + 1)
        k = 0
        for n in range(1, len(text)):
            while k and text[n] != text[k]:
                k = self._borders[k]
            k += text[n] == text[k]
            self._borders[n + 1] = k

    def step(self, character: str) -> bool:
        """Append a character. Returns True if it completes the stop string."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._borders[self.matched]
        self.matched += self.text[self.matched] == character
        if self.matched < len(self.text):
            return False
        self.matched = self._borders[self.matched]
        return True
