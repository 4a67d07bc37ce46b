"""Rules: settings that an engine's decisions depend on and that do not change while it runs."""

from __future__ import annotations

from dataclasses import dataclass

SIDE_MAX = 4  # side batches at once; each has a thread


@dataclass(frozen=True)
class GroupRules:
    """A cache group: layers with an arena of their own.

    Attributes:
        frames: the number of frames of that arena.
        window: how many tokens the layer with the longest view sees; 0 if a layer sees all tokens.
    """

    frames: int
    window: int


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The settings that decisions depend on. ``EngineConfig`` explains the settings that are not listed here.

    Attributes:
        frames, window: the model's first cache group, see ``GroupRules``.
        other_groups: the other cache groups, each with a shorter view than the first.
        layers: the number of layers of the model.
        kept_max: frames of each group that may keep pages of requests that have ended.
    """

    frames: int
    kept_max: int = 0
    layers: int
    page_tokens: int
    chunk_tokens: int
    batch_max: int
    local_prefill_tokens: int = 0
    prefill: tuple[str, ...] = ()
    side_max: int = SIDE_MAX
    window: int = 0
    other_groups: tuple[GroupRules, ...] = ()

    @property
    def groups(self) -> tuple[GroupRules, ...]:
        """All cache groups."""
        return GroupRules(self.frames, self.window), *self.other_groups

    def frames_for(self, tokens: int) -> tuple[int, ...]:
        """Return how many frames of each group a sequence of this many tokens needs.

        In a group with a window the number is at most that of a ring. A ring is just large enough for the longest chunk
        and for the tokens that its first token sees. A page overwrites the page that is one ring's length before it,
        because no later token sees that page.
        """
        pages = -(-tokens // self.page_tokens)
        return tuple(min(pages, self._ring(group.window)) if group.window else pages for group in self.groups)

    def windows_for(self, tokens: int) -> tuple[int, ...]:
        """For each group, the window if a sequence of this many tokens has a ring of frames there, else 0."""
        pages, frames = -(-tokens // self.page_tokens), self.frames_for(tokens)
        return tuple(group.window if n < pages else 0 for group, n in zip(self.groups, frames, strict=True))

    def holds(self, tokens: int) -> bool:
        """Return True if the arenas can hold a sequence of this many tokens."""
        return all(n <= group.frames for group, n in zip(self.groups, self.frames_for(tokens), strict=True))

    def _ring(self, window: int) -> int:
        return ring_frames(window, self.chunk_tokens, self.page_tokens)

    @property
    def tokens_max(self) -> int:
        """The longest sequence that the arenas can hold, in tokens; 0 if there is no limit, because rings suffice."""
        bounds = [
            group.frames * self.page_tokens
            for group in self.groups
            if not group.window or group.frames < self._ring(group.window)
        ]
        return min(bounds, default=0)


def ring_frames(window: int, chunk_tokens: int, page_tokens: int) -> int:
    """Return how many frames a ring has. ``Rules.frames_for`` explains it."""
    return max(window - 3 + max(chunk_tokens, page_tokens), 0) // page_tokens + 2


def needed_from(window: int, tokens: int, page_tokens: int) -> int:
    """Return the first token of the first page that a group with ``window`` still needs after ``tokens`` tokens.

    The page is needed to compute later tokens, or to compute the last of the ``tokens`` again. Without a window (0) all
    pages are needed.
    """
    return max(0, tokens - window) // page_tokens * page_tokens if window else 0
