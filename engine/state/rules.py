"""Rules: settings that an engine's decisions depend on and that do not change while it runs."""

from __future__ import annotations

from dataclasses import dataclass

SIDE_MAX = 4  # side batches at once; each has a thread


@dataclass(frozen=True)
class GroupRules:
    """Layers with an arena of their own. ``frames``: all of that arena; ``window``: the tokens that the layer with the
    longest view sees, 0 if a layer sees all tokens."""

    frames: int
    window: int


@dataclass(frozen=True, kw_only=True)
class Rules:
    """See ``EngineConfig`` for what the settings mean. ``layers``: of the model; ``kept_max``: frames of each group
    that may keep pages of requests that have ended; ``frames`` and ``window``: of the model's first cache group, see
    ``GroupRules``; ``beside``: its other groups, each of which sees less than the first."""

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
    beside: tuple[GroupRules, ...] = ()

    @property
    def groups(self) -> tuple[GroupRules, ...]:
        """All cache groups."""
        return GroupRules(self.frames, self.window), *self.beside

    def frames_for(self, tokens: int) -> tuple[int, ...]:
        """Frames of each group that a sequence of this many tokens needs.

        With a window at most a ring: the pages that the longest chunk and the view of its first token can touch. A page
        takes the place of the page one ring's length before it, which no later token sees.
        """
        pages = -(-tokens // self.page_tokens)
        return tuple(min(pages, self._ring(group.window)) if group.window else pages for group in self.groups)

    def windows_for(self, tokens: int) -> tuple[int, ...]:
        """The window of each group in which a sequence of this many tokens has a ring of frames; else 0."""
        pages, found = -(-tokens // self.page_tokens), self.frames_for(tokens)
        return tuple(group.window if some < pages else 0 for group, some in zip(self.groups, found, strict=True))

    def holds(self, tokens: int) -> bool:
        """True if the arenas can hold a sequence of this many tokens."""
        return all(some <= group.frames for group, some in zip(self.groups, self.frames_for(tokens), strict=True))

    def _ring(self, window: int) -> int:
        return ring_frames(window, self.chunk_tokens, self.page_tokens)

    @property
    def tokens_max(self) -> int:
        """The longest sequence that the arenas can hold, in tokens; 0: any, since it needs at most a ring of frames."""
        bounds = [
            group.frames * self.page_tokens
            for group in self.groups
            if not group.window or group.frames < self._ring(group.window)
        ]
        return min(bounds, default=0)


def ring_frames(window: int, chunk_tokens: int, page_tokens: int) -> int:
    """Frames of a ring, see ``Rules.frames_for``."""
    return max(window - 3 + max(chunk_tokens, page_tokens), 0) // page_tokens + 2


def needed_from(window: int, tokens: int, page_tokens: int) -> int:
    """The start of the first page that is still needed, among the first ``tokens`` tokens of a sequence with a ring: by
    later tokens, or to compute the last of these again. ``window`` 0: all pages are."""
    return max(0, tokens - window) // page_tokens * page_tokens if window else 0
