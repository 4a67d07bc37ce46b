"""Groups: a model with several cache groups, and which pages of each a boundary needs.

A *boundary* is a number of tokens behind which a prompt can go on. It is a multiple of every group's ``page_tokens``.
What a group needs there depends on its kind of attention. Worked example, pages of 16 tokens, the boundary is 96::

    page                0   1   2   3   4   5 | token 96 comes next
    full                x   x   x   x   x   x | attends to all before it
    window of 40                    x   x   x | attends to itself and to tokens 57 to 95
    state                                   x | goes on from the state behind token 95

Pages of a full group are a chain: each is of use with those before it alone. Pages of the others are found one by one,
and are stored without those before them. So each of them is a chain of one page. What it says of the tokens before it
is a digest of them all, which stands where the digests of media stand (``Keys.extras``): it is part of the page's key,
is stored with the page, and is compared on every read. A hit is proven there as it is in a chain.
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
    """Why no longer boundary was found: this group does not have that page."""

    group: int
    page: int


def is_chained(layout: Layout) -> bool:
    """Whether a page of this group is of use with those before it alone."""
    return layout.attention == "full"


def pages_needed(layout: Layout, boundary: int) -> range:
    """The pages that a prompt needs to go on behind ``boundary`` tokens, a multiple of ``page_tokens``."""
    stop = boundary // layout.page_tokens
    if layout.attention == "state":
        return range(max(0, stop - 1), stop)
    if layout.attention == "window":
        return range(min(stop, max(0, boundary - layout.window + 1) // layout.page_tokens), stop)
    return range(stop)


def boundary_tokens(layouts: Sequence[Layout]) -> int:
    """Boundaries are multiples of this."""
    return lcm(*(layout.page_tokens for layout in layouts))


def longest_boundary(
    layouts: Sequence[Layout], leading: Sequence[int], limit: int, has: Callable[[int, int], bool]
) -> tuple[int, Lack | None]:
    """The longest boundary of at most ``limit`` tokens that every group has, and why it is not longer.

    From the longest one downwards: a page that is needed and not there is needed by every boundary behind it, so that
    the next one to try is before that page. Each page is asked for once.

    Args:
        leading: of each chained group how many leading pages it has; of the others it does not count.
        has: whether a group, which is not chained, has a page.
    """
    step, lack = boundary_tokens(layouts), None
    boundary = limit // step * step
    found: set[Lack] = set()
    while boundary:
        missing = _missing(layouts, leading, boundary, has, found)
        if missing is None:
            break
        lack = missing
        boundary = missing.page * layouts[missing.group].page_tokens // step * step
    return boundary, lack


def _missing(
    layouts: Sequence[Layout], leading: Sequence[int], boundary: int, has: Callable[[int, int], bool], found: set[Lack]
) -> Lack | None:
    """A page that this boundary needs and its group does not have."""
    for group, layout in enumerate(layouts):
        needed = pages_needed(layout, boundary)
        if is_chained(layout):
            if leading[group] < len(needed):
                return Lack(group, leading[group])
            continue
        for page in reversed(needed):
            each = Lack(group, page)
            if each not in found:
                if not has(group, page):
                    return each
                found.add(each)
    return None


class SinglePages:
    """Keys of pages that are found one by one, see above. Immutable.

    Args:
        tokens: of the prompt, uint32 ``[n]``, which must not change afterwards.
        media: a bytes value per full page, or None.
    """

    __slots__ = ("_before", "_media", "_page_tokens", "_root", "_tokens")

    def __init__(self, tokens: Tokens, page_tokens: int, root: bytes, media: Sequence[bytes] | None) -> None:
        pages = len(tokens) // page_tokens
        if media is not None:
            check_extras(media, pages)
        self._tokens, self._page_tokens, self._root, self._media = tokens, page_tokens, root, media
        self._before: list[bytes] = []  # of each page a digest of all tokens and media before it
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
        """The key of one page, as a chain of its own."""
        start = page * self._page_tokens
        extra = self._before[page] + (self._media[page] if self._media is not None else b"")
        tokens = self._tokens[start : start + self._page_tokens]
        return Keys.of(tokens, self._page_tokens, self._root, [extra])


class GroupedKeys:
    """Keys of the full pages of a prompt in every group, with what proves a hit. Immutable; made by
    ``GroupedCache.keys``, and reusable over several calls.

    Attributes:
        tokens: how many tokens they name.
        layouts: of the groups, in their order.
        roots: what the chains of each group start with.
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
        """The keys of the first ``tokens`` tokens, or of all if these keys name fewer."""
        return GroupedKeys(min(tokens, self.tokens), self.layouts, self.roots, self._groups)

    def pages(self, group: int) -> int:
        """How many full pages of this group they name."""
        return self.tokens // self.layouts[group].page_tokens

    def needed(self, tokens: int) -> tuple[range, ...]:
        """The pages of each group that a prompt needs in order to go on behind ``tokens`` tokens, a boundary."""
        return tuple(pages_needed(layout, tokens) for layout in self.layouts)

    def parts(self, group: int, pages: range) -> list[Keys]:
        """Keys of these pages as the verbs of ``GroupedCache.groups[group]`` take them: consecutive pages of a chain,
        or one page each where the group's are found one by one."""
        if pages and not 0 <= pages[0] <= pages[-1] < self.pages(group):
            raise InvalidRequest("pages", f"{pages} are not in 0..{self.pages(group) - 1}")
        named = self._groups[group]
        if isinstance(named, SinglePages):
            return [named.page(page) for page in pages]
        return [named[pages.start : pages.stop]] if pages else []
