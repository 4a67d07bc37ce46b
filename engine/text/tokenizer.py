"""Text to token ids and back: bytes as they are, or a tokenizer of Hugging Face from a local directory.

Stop strings are handled in `engine.text.tokenizer`.

Text of an answer while it is being generated: whole characters only, and no beginning of a stop string.

Worked example, with the stop string "END" and a token per letter: "a", "E", "N" give "a", "", "" since "EN" may become
the stop string; an "x" gives "ENx"; "E", "N", "D" give nothing any more, and ``stopped`` is "END".
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
# A character is at most 4 bytes and a token at least one, so that this many bytes may still become one.
UNFINISHED_MAX = 3
# Tokens that are not text are decoded again with each new one until there are this many; then all but the last few
# are given up as text.
WINDOW_TOKENS_MAX, WINDOW_TOKENS_MIN = 24, 8

SLOW_TO_TEXT = {
    "skip_special_tokens": True,
    "clean_up_tokenization_spaces": False,
}  # other tokenizers have no such option


class TextStream(Protocol):
    """Text of one answer, token by token."""

    def feed(self, token: int) -> str:
        """Takes one more token; returns the text that no later one can change."""
        ...

    def flush(self) -> str:
        """The rest: nothing follows. A character that was not finished is U+FFFD."""
        ...


class Tokenizer(Protocol):
    """A tokenizer, as an engine uses it. Safe to use from several threads; a stream belongs to one."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of an answer: of ids at its start."""
        ...

    def stream(self) -> TextStream:
        """A new stream, at the start of an answer."""
        ...


class ByteTokenizer:
    """A token is a byte of UTF-8; ids 256 and 257 end and begin a text and have none themselves."""

    EOS = 256
    BOS = 257
    vocab_size = 258
    eos_ids: tuple[int, ...] = (EOS,)

    def encode(self, text: str) -> list[int]:
        """Bytes of ``text``, without special tokens. Lone surrogates, which have no bytes, become "?"."""
        return list(text.encode("utf-8", "replace"))

    def array(self, text: str) -> npt.NDArray[np.uint32]:
        """``encode`` as an array."""
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``: bytes that are not UTF-8 become U+FFFD; ids above 255 are left out."""
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
        # The library's own for fast tokenizers: answers are decoded token by token, and it takes an eighth of the time.
        fast = getattr(tokenizer, "backend_tokenizer", None)
        how = {"skip_special_tokens": True} if fast else SLOW_TO_TEXT
        self._decode: Callable[[list[int]], Any] = partial((fast or tokenizer).decode, **how)
        self._lock = threading.Lock()  # the fast ones fail with "Already borrowed" if two threads meet
        own = tokenizer.eos_token_id
        self.eos_ids = eos_ids or (() if own is None else (int(own),))
        self.vocab_size = len(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``."""
        with self._lock:
            return [int(token) for token in self._tokenizer.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        with self._lock:
            text = self._decode(list(ids))
        assert isinstance(text, str)
        return text

    def stream(self) -> TextStream:
        """A new stream, at the start of a text."""
        return _WindowStream(self)


class _WindowStream:
    """Decodes the last few tokens again with each new one, and returns what their text grew by. The stream of
    ``tokenizers`` keeps all tokens that are not text, decodes them again with each new one, and has no flush.

    Single tokens cannot be decoded alone: a character may need several, and some tokenizers strip the space in front
    of the first word. A U+FFFD at the end may be the beginning of a character; with tokenizers that fall back to bytes
    even the characters right before it are shown as such until it is whole. So the window begins and ends at places
    where the text was seen to be whole, and has text of its own in front of what is new.
    """

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._whole = 0  # number of these tokens up to the last place where the text was whole
        self._given = 0  # number of characters of their text that were returned

    def feed(self, token: int) -> str:
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        if not text.endswith(REPLACEMENT):
            return self._end_at(text)
        if len(self._tokens) - self._whole > WINDOW_TOKENS_MAX:
            return self._give_up(text)
        return self._give(text, len(text.rstrip(REPLACEMENT)))

    def flush(self) -> str:
        text = self._tokenizer.decode(self._tokens)[self._given :]
        self._tokens.clear()
        self._whole = self._given = 0
        return text

    def _end_at(self, text: str) -> str:
        new = self._give(text, len(text))
        if self._whole and (own := self._tokenizer.decode(self._tokens[self._whole :])):
            del self._tokens[: self._whole]
            self._given = len(own)
        elif len(self._tokens) > WINDOW_TOKENS_MAX:  # special tokens without end
            del self._tokens[:-WINDOW_TOKENS_MIN]
            self._given = len(self._tokenizer.decode(self._tokens))
        self._whole = len(self._tokens)
        return new

    def _give_up(self, text: str) -> str:
        """Give up bytes that are not text: only the last may become a character."""
        open_chars = min(len(text) - len(text.rstrip(REPLACEMENT)), UNFINISHED_MAX)
        new = self._give(text, len(text) - open_chars)
        del self._tokens[:-WINDOW_TOKENS_MIN]
        self._given = max(0, len(self._tokenizer.decode(self._tokens)) - open_chars)
        self._whole = 0
        return new

    def _give(self, text: str, stop: int) -> str:
        new = text[self._given : stop]
        self._given = max(self._given, stop)
        return new


class Detokenizer:
    """One answer: ``feed`` for each token, then ``flush``. Joined, what they return is the answer's text, once.

    The first stop string to be complete ends the text in front of it (the longest, where several end on the same
    character), wherever tokens begin and end. After that all is "". Belongs to one thread.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._stream = tokenizer.stream()
        self._watches = [_Watch(text) for text in dict.fromkeys(stop)]
        self._held = ""  # may be the beginning of a stop string
        self.stopped: str | None = None
        """The stop string that was met."""

    def feed(self, token: int) -> str:
        """What is certain with this token and was not before; "" where it must be waited for, or has stopped."""
        return "" if self.stopped is not None else self._pass(self._stream.feed(token))

    def flush(self) -> str:
        """What was held back: nothing follows any more. A character cut off is U+FFFD. May still meet a stop string."""
        if self.stopped is not None:
            return ""
        text = self._pass(self._stream.flush())
        if self.stopped is None:
            text, self._held = text + self._held, ""
            self._watches = []
        return text

    def _pass(self, new: str) -> str:
        if not self._watches:
            return new
        text = self._held + new
        for end in range(len(self._held) + 1, len(text) + 1):
            met = [watch.text for watch in self._watches if watch.step(text[end - 1])]
            if met:
                self.stopped = max(met, key=len)
                self._held = ""
                return text[: end - len(self.stopped)]
        certain = len(text) - max(watch.matched for watch in self._watches)
        self._held = text[certain:]
        return text[:certain]


class _Watch:
    """How much of one stop string the text ends with (Knuth, Morris and Pratt): constant work per character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._shorter = [0] * (len(text) + 1)  # of the first n characters: the longest proper end that begins it too
        k = 0
        for n in range(1, len(text)):
            while k and text[n] != text[k]:
                k = self._shorter[k]
            k += text[n] == text[k]
            self._shorter[n + 1] = k

    def step(self, character: str) -> bool:
        """Take one more character; True where the string is complete."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._shorter[self.matched]
        self.matched += self.text[self.matched] == character
        if self.matched < len(self.text):
            return False
        self.matched = self._shorter[self.matched]
        return True
