"""The interface to a node, for every way to reach it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, NoReturn, Self, overload

from kvstore.client.admin import AdminVerbs
from kvstore.client.buffers import check_text
from kvstore.client.grouped_cache import GroupedCache
from kvstore.client.objects import ObjectVerbs
from kvstore.client.prefix_cache import PrefixCache
from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout

AFTER_FORK: Final = "was opened in process {}; open or connect again after fork"


class Store(AdminVerbs, ObjectVerbs):
    """One node, for all threads of this process. Made by ``kvstore.open`` or ``kvstore.connect``.

    A store ends with ``close`` or with its ``with`` block, when it is dropped together with its caches, or with the
    process. Its reservations and leases are then released. An embedded node ends with its store; a daemon's pages stay.
    A forked child must not use the store, and connects again.

    Attributes:
        reads_without_node: whether reads work while the node's daemon is down.
    """

    reads_without_node: bool = False

    @property
    @abstractmethod
    def name(self) -> str:
        """The node's name."""

    @overload
    def cache(self, layout: Layout, salt: str = "", adapter: str = "", replicas: int | None = None) -> PrefixCache: ...

    @overload
    def cache(
        self, layout: Sequence[Layout], salt: str = "", adapter: str = "", replicas: int | None = None
    ) -> GroupedCache: ...

    def cache(
        self, layout: Layout | Sequence[Layout], salt: str = "", adapter: str = "", replicas: int | None = None
    ) -> PrefixCache | GroupedCache:
        """Return the cache of one layout, tenant salt and adapter. The call is cheap. Caches of other layouts, salts or
        adapters share no pages with it.

        Args:
            layout: one layout, or a list of the layouts of a model with several cache groups.
            replicas: on how many nodes of the pool new pages are stored, 1 or 2. None: as the node's setting
                ``replicas`` says. See ``PrefixCache.put``.

        Raises:
            InvalidRequest: layout, salt, adapter or replicas is of the wrong type, or a page does not fit an extent of
                the node; two groups have the same layout.
        """
        if isinstance(layout, list | tuple):
            return GroupedCache([self._cache(each, salt, adapter, replicas) for each in layout])
        return self._cache(layout, salt, adapter, replicas)  # type: ignore[arg-type]  # refuses what is not a layout

    @abstractmethod
    def _cache(self, layout: Layout, salt: str, adapter: str, replicas: int | None) -> PrefixCache:
        """Return the cache of one layout."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return numbers about the node and this client. Over gRPC this needs an operator's token. Through shared
        memory, while the daemon is down, the numbers are those of the header, with ``state`` "down".

        ``client.misses`` counts by reason why matches of this store ended early.
        """

    @abstractmethod
    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until the node accepts requests.

        Raises:
            DeadlineExceeded: the node was not ready in time.
        """

    @abstractmethod
    def replace_session(self) -> None:
        """End the session and begin a new one, after requests whose outcome is unknown.

        Frames that the node would keep until this process ends become free at once. No thread may be writing. Leases
        end, and calls in progress fail. Over gRPC there is no session, and this does nothing: the node ends abandoned
        reservations and leases at their deadlines.

        Raises:
            NodeUnavailable: there is no such node.
        """

    @abstractmethod
    def close(self) -> None:
        """End the session or connection, and an embedded node. May be called twice.

        Puts and writers of other threads fail. The call does not wait for copies in progress; an embedded node waits
        for them at most a second. Their frames stay reserved until the copies have ended; a named embedded pool cannot
        be opened again before that.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("store", "cannot be pickled: call kvstore.connect() in the other process")

    def __repr__(self) -> str:
        return f"<kvstore.Store {self.name!r}>"


def check_cache(layout: Layout, salt: str, adapter: str, page_bytes_max: int) -> None:
    """Check the arguments of ``Store.cache``. ``page_bytes_max`` is 0 if unknown. Raises InvalidRequest."""
    if not isinstance(layout, Layout):
        raise InvalidRequest("layout", f"must be a kvstore.Layout (got {type(layout).__name__})")
    check_text(salt, "salt")
    check_text(adapter, "adapter")
    if page_bytes_max and layout.page_bytes > page_bytes_max:
        raise InvalidRequest("layout", f"must have pages of at most {page_bytes_max} bytes (got {layout.page_bytes})")
