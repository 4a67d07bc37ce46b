"""RemoteReader: layers of a prompt's pages as they are sealed in a node reached over gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.client.buffers import rows_to_fill
from kvstore.client.reader import Reader, layer_range
from kvstore.client.remote.fetch import fetch
from kvstore.client.remote.node import RemoteNode
from kvstore.errors import DeadlineExceeded
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.pb import store_pb2 as pb

POLL_MIN_S, POLL_MAX_S = 1e-3, 0.05


class RemoteReader(Reader):
    """Follows one prompt's pages: ``reader.read_layer(0, out)``, then layer 1, and so on, in any order.

    Life: made (nothing held) -> any number of ``read_layer`` calls -> dropped. The first calls fetch pages whole, as
    they are sealed, and keep them here (``pages * page_bytes``), so that every page crosses the network once and an
    eviction in between does no harm. One thread at a time.

    Attributes:
        pages: how many pages it reads: those a prompt can match, or all of the given keys.
    """

    def __init__(
        self, node: RemoteNode, layout: Layout, keys: Keys, timeout_s: float, named: Callable[[Keys], pb.Pages]
    ) -> None:
        super().__init__(None, layout, keys, timeout_s)  # type: ignore[arg-type]
        self._remote = node
        self._named = named
        self._rows = np.empty((0, layout.page_bytes), np.uint8)
        self._fetched = 0

    def read_layer(self, layer: int, out: Any, heads: tuple[int, int] | None = None) -> None:
        """Copy one layer of every page, or some heads of it, into ``out`` as soon as the pages are sealed.

        Raises:
            DeadlineExceeded: names the layer and the first page that did not come; pages before it are in ``out``.
            InvalidRequest: layer or heads are not in the layout; ``out`` is too small, read-only or not contiguous.
            NodeUnavailable: the node did not answer.
        """
        start, stop = layer_range(self._layout, layer, heads)
        target = rows_to_fill(out, stop - start, self.pages, apart=True)
        self._remote.check_open()
        deadline, pause_s, copied = time.monotonic() + self._timeout_s, POLL_MIN_S, 0
        while True:
            if copied < self._fetched:
                target[copied : self._fetched] = self._rows[copied : self._fetched, start:stop]
                copied, pause_s = self._fetched, POLL_MIN_S
            if copied == self.pages:
                return
            if self._fetch():
                continue
            if time.monotonic() + pause_s > deadline:
                raise DeadlineExceeded(f"layer {layer} of page {copied} did not arrive within {self._timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_MAX_S)

    def _fetch(self) -> int:
        """Fetch what is sealed beyond what we have; how many pages that were."""
        if not len(self._rows):
            self._rows = np.empty((self.pages, self._layout.page_bytes), np.uint8)
        rest = self._keys[self._fetched :]
        request = pb.ReadRequest(pages=self._named(rest))
        pages = fetch(self._remote, request, len(rest), self._layout.page_bytes, self._rows[self._fetched :]).pages
        self._fetched += pages
        return pages
