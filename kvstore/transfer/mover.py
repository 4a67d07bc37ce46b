"""PageMover: brings pages from other nodes by the transport that the plan picks, and by the next one where that fails.

A transport that may be faster than the one in use is measured aside: a thread reads once more what was just read, into
memory of its own, so that nobody waits for a transport that turns out to be slow, or not to work at all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from kvstore.errors import InvalidRequest, KVStoreError, PermissionDenied, Unauthenticated
from kvstore.model.replica import Tier
from kvstore.transfer.links import PeerLinks
from kvstore.transfer.peers import PoolNode
from kvstore.transfer.plan import SAMPLE_BYTES, TransportPlan
from kvstore.transfer.pulling import Places, Pulled
from kvstore.transfer.reading import ReadRequest
from kvstore.transfer.transport import HeldPlaces, LateBytes, Transport, TransportKind

ASIDE_BYTES: Final = 8 << 20  # are read once more to measure a transport, where a page is not larger
ASIDE_S: Final = 10.0  # for that: the first read may have to make a connection
ASIDE_SILENCE_S: Final = 5.0
CLOSE_S: Final = 1.0  # for what is being measured

log = logging.getLogger("kvstore.cluster")


class PageMover:
    """For one process. Threads share it.

    Args:
        kinds: the table of transports.
        links: how data servers are reached.
    """

    def __init__(self, kinds: Mapping[str, TransportKind], links: PeerLinks) -> None:
        self._kinds = {name: kind for name, kind in kinds.items() if not kind.missing()}
        self._links = links
        self._plan = TransportPlan({name: kind.bytes_per_s for name, kind in kinds.items()})
        self._made: dict[str, Transport] = {}
        self._lock = threading.Lock()
        self._aside: threading.Thread | None = None
        self._closed = False

    def read(
        self,
        peer: PoolNode,
        request: ReadRequest,
        places: Places,
        deadline_s: float,
        silence_s: float,
        held: HeldPlaces | None = None,
    ) -> Pulled:
        """See ``Transport.read``. Raises what the last transport that was tried did."""
        with self._lock:
            names = self._plan.order(peer.process, self._fit(peer), time.monotonic())
        found = Pulled()
        for last, name in enumerate(names, 1 - len(names)):
            done, began_s = found.pages, time.monotonic()
            rest = replace(request, keys=request.keys[done:]) if done else request
            try:
                more = self._transport(name).read(peer, rest, places[done:], deadline_s, silence_s, held)
            except (InvalidRequest, PermissionDenied, Unauthenticated):
                raise  # whichever way we came
            except KVStoreError as error:
                self._failed(peer, name, error)
                if isinstance(error, LateBytes) or (last == 0 and not done):
                    raise
                continue
            self._moved(peer, name, rest, more, began_s)
            found.add(more)
            if found.pages == len(request.keys):
                break
        return found

    def close(self) -> None:
        """End its transports."""
        with self._lock:
            self._closed = True
            made, self._made, aside = list(self._made.values()), {}, self._aside
        for transport in made:
            transport.close()
        if aside is not None:
            aside.join(CLOSE_S)

    def _fit(self, peer: PoolNode) -> list[str]:
        return [name for name in self._kinds if name in peer.transports]

    def _transport(self, name: str) -> Transport:
        with self._lock:
            found = self._made.get(name)
            if found is None:
                found = self._kinds[name].make(self._links)
                if not self._closed:
                    self._made[name] = found
            return found

    def _failed(self, peer: PoolNode, name: str, error: KVStoreError) -> None:
        with self._lock:
            pause_s = self._plan.failed(peer.process, name, time.monotonic())
        log.info("%s: %s is left out for %g s: %s", peer.name, name, pause_s, error)

    def _moved(self, peer: PoolNode, name: str, request: ReadRequest, pulled: Pulled, began_s: float) -> None:
        """Note how fast it was, and have others measured where they may be faster."""
        now_s, nbytes = time.monotonic(), pulled.pages * request.length
        if nbytes < SAMPLE_BYTES or set(pulled.tiers) != {Tier.DRAM}:  # the speed of something else
            nbytes = 0
        with self._lock:
            self._plan.moved(peer.process, name, nbytes, now_s - began_s, now_s)
            others = self._plan.to_measure(peer.process, self._fit(peer), now_s) if nbytes else []
            if not others or self._closed or (self._aside is not None and self._aside.is_alive()):
                return
            pages = max(1, min(pulled.pages, ASIDE_BYTES // request.length))
            again = replace(request, keys=request.keys[:pages])
            self._aside = threading.Thread(
                target=self._measure, args=(peer, others, again), name="kvstore-measure", daemon=True
            )
            self._aside.start()

    def _measure(self, peer: PoolNode, names: list[str], request: ReadRequest) -> None:
        rows = np.zeros((len(request.keys), request.length), np.uint8)
        for name in names:
            try:
                transport = self._transport(name)
                for _ in range(2):  # the first read pays for the connection
                    began_s = time.monotonic()
                    pulled = transport.read(peer, request, rows, began_s + ASIDE_S, ASIDE_SILENCE_S)
            except KVStoreError as error:
                self._failed(peer, name, error)
                continue
            now_s = time.monotonic()
            with self._lock:
                self._plan.moved(peer.process, name, pulled.pages * request.length, now_s - began_s, now_s)
                speed = self._plan.speed(peer.process, name)
            log.info("%s: %s brings %.2f GB/s", peer.name, name, speed / 1e9)
