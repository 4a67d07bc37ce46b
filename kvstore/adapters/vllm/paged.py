"""What both sides know: which pages a model has, and pages on their way between the store and blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.client.grouped_cache import GroupedCache
    from kvstore.client.store import Store
    from kvstore.model.layout import Layout
    from kvstore.model.prefix import Keys
    from kvstore.model.shard import Shard

NO_BLOCK = 0  # vLLM's null block, where a window needs none
ROOTS_MAX = 1024  # of salts and adapters, whose caches are kept ready


@dataclass(frozen=True)
class PagedGroup:
    """Layers that keep the same tokens.

    Attributes:
        layers: their names, as far as this process has their cache, as the model runs them.
        tables: of each layer the number of vLLM's table that has its blocks.
        shard: the part of a page that this process has.
        block_size: tokens of a block. ``page_blocks``: blocks of a page.
    """

    layout: Layout
    layers: tuple[str, ...]
    tables: tuple[int, ...]
    block_size: int
    page_blocks: int
    shard: Shard


@dataclass(frozen=True)
class PagedModel:
    """What one engine serves.

    Attributes:
        page_tokens: tokens of a page, in every group.
        by_blocks: whether what could not be loaded is told by blocks; else by whole requests, since of several tables,
            and of a window, no part is of use.
        media_have_names: see ``media``.
    """

    groups: tuple[PagedGroup, ...]
    page_tokens: int
    by_blocks: bool
    media_have_names: bool

    @property
    def layouts(self) -> list[Layout]:
        """Of the groups."""
        return [group.layout for group in self.groups]


@dataclass
class GroupMove:
    """Pages of one group.

    Attributes:
        parts: their keys, as ``GroupedKeys.parts`` gives them.
        blocks: of each of vLLM's tables that the group's layers have, ``[pages * page_blocks]``, where they are;
            ``NO_BLOCK``: nowhere, or nothing is to be written there.
    """

    parts: list[Keys]
    blocks: dict[int, list[int]]


@dataclass
class BlockMove:
    """Pages of one request on their way between the store and blocks.

    Attributes:
        groups: of each group of the model.
        adapter: part of the pages' roots.
    """

    request: str
    adapter: str
    groups: list[GroupMove]


class RootCaches:
    """The caches of one tenant, by the adapter part of their roots. For one thread."""

    def __init__(self, store: Store, layouts: list[Layout], salt: str) -> None:
        self._store = store
        self._layouts = layouts
        self._salt = salt
        self._caches: dict[str, GroupedCache] = {}

    def of(self, adapter: str) -> GroupedCache:
        """Made when it is asked for first."""
        found = self._caches.get(adapter)
        if found is None:
            if len(self._caches) >= ROOTS_MAX:
                self._caches.clear()
            found = self._caches[adapter] = self._store.cache(self._layouts, self._salt, adapter)
        return found
