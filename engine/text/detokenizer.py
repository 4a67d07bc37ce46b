"""Text of an answer while it is being generated: whole characters only, and no beginning of a stop string.

Worked example, with the stop string "END" and a token per letter: "a", "E", "N" give "a", "", "" since "EN" may become
the stop string; an "x" gives "ENx"; "E", "N", "D" give nothing any more, and ``stopped`` is "END".
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.tokenizer import Tokenizer


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
