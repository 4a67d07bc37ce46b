"""A row that reads another node's pages by NIXL, where that is installed, beside plain sockets and our own TCP."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing

from kvstore.bench.content import BenchWork
from kvstore.bench.harness import Bar, NotMeasured, Result
from kvstore.bench.remote import BATCH_S, RemoteReading, data_server, measured, plain_sender
from kvstore.bench.stage import Stage
from kvstore.client.prefix_cache import PrefixCache
from kvstore.model.prefix import Keys
from kvstore.tier.data_file import DataServerAt
from kvstore.transfer.links import PeerLinks
from kvstore.transfer.nixl import NixlTransport
from kvstore.transfer.nixl_agent import missing
from kvstore.transfer.peers import PoolNode


class NixlReading(RemoteReading):
    """The same chains, read by NIXL (``ours``), over TCP (``tcp``), and by the plain programs."""

    def __init__(self, cache: PrefixCache, work: BenchWork, node: str, server: DataServerAt, port: int) -> None:
        super().__init__(cache, work, server, port)
        self._links = PeerLinks("", "bench")
        self._transport = NixlTransport(self._links)
        self._peer = PoolNode(node, server.process, "", (server.address,))

    def variants(self) -> dict[str, Callable[[tuple[int, Keys]], object]]:
        """See ``RemoteReading``."""
        found = super().variants()

        def ours(given: tuple[int, Keys]) -> int:
            until_s = time.monotonic() + BATCH_S
            return self._transport.read(self._peer, self.request(given[1]), self.out, until_s, BATCH_S).pages

        return {**found, "tcp": found["ours"], "ours": ours}

    def close(self) -> None:
        """End all connections."""
        self._transport.close()
        self._links.close()
        super().close()


def get(stage: Stage, name: str, bar: Bar | None, geometry: str) -> list[Result]:
    """Batches of 32 pages out of another node's memory. ``details``: seconds of a batch, those over TCP among them.

    Raises:
        NotMeasured: NIXL is not installed.
    """
    if why := missing():
        raise NotMeasured(f"nixl: {why}")
    stored = stage.stored(geometry)
    with ExitStack() as scene:
        node = stored.daemon.name
        child, server = scene.enter_context(data_server(stage, node, "--data-transports", "nixl"))
        port = scene.enter_context(plain_sender(stored.work))
        reading = NixlReading(stored.store.cache(stored.work.layout), stored.work, node, server, port)
        scene.enter_context(closing(reading))
        reading.verify()
        return [measured(stage, reading, child, name, bar)]
