"""Groups: the cache groups of a model, and the pages that each group needs to continue a prompt.

A *boundary* is a number of tokens after which a stored prompt can be continued. It is a multiple of every group's
``page_tokens``. The pages that a group needs depend on its kind of attention. Worked example with pages of 16 tokens
and the boundary 96::

    page                0   1   2   3   4   5 | token 96 comes next
    full                x   x   x   x   x   x | attends to all tokens before it
    window of 40                    x   x   x | attends to itself and to tokens 57 to 95
    state                                   x | continues from the state after token 95

Pages of a full group form a chain: a page is useful only together with all pages before it. Pages of window and state
groups are useful without the pages before them, so each of these pages is a chain of its own. Its key, its record and
every read still depend on the whole prompt, because a digest of all earlier tokens takes the place of the media digest
(``Keys.extras``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from math import lcm
from typing import NamedTuple

from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys, Tokens, check_extras

GROUPS_MAX = 64


class Lack(NamedTuple):
    """The missing page that keeps a match from reaching the next longer boundary."""

    group: int
    page: int


def is_chained(layout: Layout) -> bool:
    """Return True if a page of this group is useful only together with all pages before it."""
    return layout.attention == "full"


def pages_needed(layout: Layout, boundary: int) -> range:
    """Return the pages that are needed to continue after ``boundary`` tokens, a multiple of ``page_tokens``."""
    stop = boundary // layout.page_tokens
    if layout.attention == "state":
        return range(max(0, stop - 1), stop)
    if layout.attention == "window":
        return range(min(stop, max(0, boundary - layout.window + 1) // layout.page_tokens), stop)
    return range(stop)


def boundary_tokens(layouts: Sequence[Layout]) -> int:
    """Return the number of tokens that divides every boundary."""
    return lcm(*(layout.page_tokens for layout in layouts))


def longest_boundary(
    layouts: Sequence[Layout], leading: Sequence[int], limit: int, has: Callable[[int, int], bool]
) -> tuple[int, Lack | None]:
    """Return the longest boundary of at most ``limit`` tokens whose pages are all stored, and the missing page of the
    next longer one.

    The search begins with the longest boundary. If a page is missing, it continues with the longest boundary that does
    not need that page. ``has`` is called at most once per page.

    Args:
        leading: number of leading pages that each chained group has; ignored for other groups.
        has: returns True if a group that is not chained has a page.
    """
    step, lack = boundary_tokens(layouts), None
    boundary = limit // step * step
    stored: set[Lack] = set()
    while boundary:
        missing = _missing(layouts, leading, boundary, has, stored)
        if missing is None:
            break
        lack = missing
        boundary = missing.page * layouts[missing.group].page_tokens // step * step
    return boundary, lack


def _missing(
    layouts: Sequence[Layout], leading: Sequence[int], boundary: int, has: Callable[[int, int], bool], stored: set[Lack]
) -> Lack | None:
    """Return a page that this boundary needs and that is not stored; None if all are. Stored pages are added to
    ``stored``."""
    for group, layout in enumerate(layouts):
        needed = pages_needed(layout, boundary)
        if is_chained(layout):
            if leading[group] < len(needed):
                return Lack(group, leading[group])
            continue
        for page in reversed(needed):
            each = Lack(group, page)
            if each not in stored:
                if not has(group, page):
                    return each
                stored.add(each)
    return None


class SinglePages:
    """Keys for pages of a window or state group: each page is a chain of its own. Immutable.

    Args:
        tokens: the prompt, uint32 ``[n]``. The caller must not change the array afterwards.
        media: a bytes value per full page, or None.
    """

    __slots__ = ("_before", "_media", "_page_tokens", "_root", "_tokens")

    def __init__(self, tokens: Tokens, page_tokens: int, root: bytes, media: Sequence[bytes] | None) -> None:
        pages = len(tokens) // page_tokens
        if media is not None:
            check_extras(media, pages)
        self._tokens, self._page_tokens, self._root, self._media = tokens, page_tokens, root, media
        self._before: list[bytes] = []  # for each page a digest of all tokens and media before it
        digest = hashlib.blake2b(digest_size=16, person=b"kvstore.before")
        data, step = tokens[: pages * page_tokens].tobytes(), 4 * page_tokens
        for page in range(pages):
            self._before.append(digest.copy().digest())
            digest.update(data[page * step : (page + 1) * step])
            if media is not None:
                digest.update(len(media[page]).to_bytes(4, "little") + media[page])

    def __len__(self) -> int:
        return len(self._before)

    def page(self, page: int) -> Keys:
        """Return the key of one page, as a chain of its own."""
        start = page * self._page_tokens
        extra = self._before[page] + (self._media[page] if self._media is not None else b"")
        tokens = self._tokens[start : start + self._page_tokens]
        return Keys.of(tokens, self._page_tokens, self._root, [extra])


class GroupedKeys:
    """Keys of the full pages of a prompt in every group. Immutable. ``GroupedCache.keys`` makes them; several calls can
    use them.

    Attributes:
        tokens: number of tokens that the keys cover.
        layouts: the layout of each group.
        roots: the root of each group's chains.
    """

    __slots__ = ("_groups", "layouts", "roots", "tokens")

    def __init__(
        self, tokens: int, layouts: tuple[Layout, ...], roots: tuple[bytes, ...], groups: Sequence[Keys | SinglePages]
    ) -> None:
        self.tokens = tokens
        self.layouts = layouts
        self.roots = roots
        self._groups = tuple(groups)

    def upto(self, tokens: int) -> GroupedKeys:
        """Return the keys of the first ``tokens`` tokens; all keys if they cover fewer tokens."""
        return GroupedKeys(min(tokens, self.tokens), self.layouts, self.roots, self._groups)

    def pages(self, group: int) -> int:
        """Return the number of full pages that the keys cover in this group."""
        return self.tokens // self.layouts[group].page_tokens

    def needed(self, tokens: int) -> tuple[range, ...]:
        """Return the pages of each group that are needed to continue after ``tokens`` tokens, which must be a
        boundary."""
        return tuple(pages_needed(layout, tokens) for layout in self.layouts)

    def parts(self, group: int, pages: range) -> list[Keys]:
        """Return keys of these pages for the methods of ``GroupedCache.groups[group]``: one ``Keys`` for a full group,
        one per page for other groups."""
        if pages and not 0 <= pages[0] <= pages[-1] < self.pages(group):
            raise InvalidRequest("pages", f"must be in 0..{self.pages(group) - 1} (got {pages})")
        keys = self._groups[group]
        if isinstance(keys, SinglePages):
            return [keys.page(page) for page in pages]
        return [keys[pages.start : pages.stop]] if pages else []
