"""RemoteReader: layers of a prompt's pages as they are sealed in a node reached over gRPC."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstore.client.buffers import Rows
from kvstore.client.reader import Reader
from kvstore.client.remote.fetch import fetch
from kvstore.client.remote.node import RemoteNode
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.pb import store_pb2 as pb
from kvstore.tier.host_memory import copy, empty


class RemoteReader(Reader):
    """A reader that fetches pages whole, as they are sealed, and keeps them here (``pages * page_bytes``). So every
    page crosses the network once, and an eviction in between does no harm.
    """

    def __init__(
        self, node: RemoteNode, layout: Layout, keys: Keys, timeout_s: float, named: Callable[[Keys], pb.Pages]
    ) -> None:
        super().__init__(layout, keys, timeout_s)
        self._node = node
        self._named = named
        self._rows = np.empty((0, layout.page_bytes), np.uint8)
        self._fetched = 0

    def _read(self, page: int, layer: int, start: int, stop: int, target: Rows) -> int:
        self._node.check_open()
        if page == self._fetched:
            self._fetch()
        copy(target[page : self._fetched], self._rows[page : self._fetched, start:stop])
        return self._fetched - page

    def _fetch(self) -> None:
        """Fetch what is sealed beyond what we have."""
        if not len(self._rows):
            self._rows = empty((self.pages, self._layout.page_bytes))
        rest = self._keys[self._fetched :]
        request = pb.ReadRequest(pages=self._named(rest))
        self._fetched += fetch(
            self._node, request, len(rest), self._layout.page_bytes, self._rows[self._fetched :]
        ).pages
