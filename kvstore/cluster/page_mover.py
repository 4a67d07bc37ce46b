"""PageMover: reads pages from other nodes over the fastest transport that works.

``TransportPlan`` ranks transports. A transport is *fit* for a node if both ends have it. The fastest fit transport, as
measured, comes first. A failed transport is left out for a while, longer each time. The last resort, which every node
has, is always in the list. Worked example: n2 offers tcp and nixl, and so does this node. tcp is expected to reach 2
GB/s, and nothing is known about nixl. So tcp is used, and nixl is measured. The results are 3 GB/s for tcp and 1 GB/s
for nixl, so tcp stays in use. nixl is measured again after ten minutes. If n2 offered only nixl, nixl would be used at
once, and tcp if it fails.

``PageMover`` performs the plan. A transport that may be faster than the one in use is measured in a separate thread: it
reads the same pages once more, into memory of its own. So no request waits for a transport that turns out to be slow or
broken.

``TRANSPORTS`` is the table of transports. To add one, write a class and add a row.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvstore.cluster import nixl
from kvstore.cluster.nixl import NixlTransport
from kvstore.cluster.peer_links import PeerLinks, PoolNode
from kvstore.cluster.transport import LateBytes, PlaceHolder, Places, PullResult, TcpTransport, Transport, TransportKind
from kvstore.errors import InvalidRequest, KVStoreError, PermissionDenied, Unauthenticated
from kvstore.model.replica import Tier
from kvstore.wire.data import ReadRequest

LAST_RESORT: Final = "tcp"  # the transport that every data server offers
FAILED_MIN_S, FAILED_MAX_S = 5.0, 300.0  # how long a transport that failed is left out
STALE_S: Final = 600.0  # a speed that is this old is measured again
SAMPLE_BYTES: Final = 1 << 20  # smaller reads measure latency, not speed
WEIGHT: Final = 0.25  # weight of the newest measurement
PEERS_MAX: Final = 256  # peers to remember; the one that was read from least recently is forgotten


@dataclass(slots=True)
class _Speed:
    """The measurements of one transport to one peer."""

    bytes_per_s: float = 0.0  # 0: not measured
    measured_s: float = 0.0
    failures: int = 0  # since the last success
    until_s: float = 0.0  # the transport is left out until then


class TransportPlan:
    """The plan of one process. Used by one thread at a time. Each call passes the time.

    Args:
        expected: the bytes per second that each transport counts for until it is measured; 0 means that it is not
            preferred to another transport before it is measured.
    """

    def __init__(self, expected: Mapping[str, float]) -> None:
        self._expected = expected
        self._peers: OrderedDict[str, dict[str, _Speed]] = OrderedDict()

    def order(self, peer: str, fit: Sequence[str], now_s: float) -> list[str]:
        """Return the transports to try for the next read, best first. The last resort is among them."""
        ready = [name for name in fit if now_s >= self._speed_of(peer, name).until_s]
        ranking = [name for name in ready if self.speed(peer, name)] or ready
        ranking.sort(key=lambda name: -self.speed(peer, name))
        return ranking if LAST_RESORT in ranking else [*ranking, LAST_RESORT]

    def to_measure(self, peer: str, fit: Sequence[str], now_s: float) -> list[str]:
        """Return the fit transports without a recent measurement. They might be faster than the transport in use."""
        in_use = self.order(peer, fit, now_s)[0]
        others = {name: self._speed_of(peer, name) for name in fit if name != in_use}
        return [name for name, each in others.items() if now_s >= each.until_s and _stale(each, now_s)]

    def speed(self, peer: str, name: str) -> float:
        """Return the transport's bytes per second, measured or expected; 0 if unknown."""
        return self._speed_of(peer, name).bytes_per_s or self._expected.get(name, 0.0)

    def measured(self, peer: str, name: str) -> float:
        """Return the transport's measured bytes per second; 0 if it was not measured."""
        return self._speed_of(peer, name).bytes_per_s

    def note_success(self, peer: str, name: str, nbytes: int, seconds: float, now_s: float) -> None:
        """Record that the transport moved ``nbytes`` in ``seconds``."""
        its = self._speed_of(peer, name)
        its.failures, its.until_s = 0, 0.0
        if nbytes >= SAMPLE_BYTES and seconds > 0:
            newest, average = nbytes / seconds, its.bytes_per_s
            is_usable = average and not _stale(its, now_s)
            its.bytes_per_s = WEIGHT * newest + (1 - WEIGHT) * average if is_usable else newest
            its.measured_s = now_s

    def note_failure(self, peer: str, name: str, now_s: float) -> float:
        """Record that the transport failed or was too slow. Return for how many seconds the transport is left out."""
        its = self._speed_of(peer, name)
        its.failures += 1
        pause_s = min(FAILED_MAX_S, FAILED_MIN_S * 2 ** min(its.failures - 1, 16))
        its.until_s = now_s + pause_s
        return float(pause_s)

    def _speed_of(self, peer: str, name: str) -> _Speed:
        speeds = self._peers.setdefault(peer, {})
        self._peers.move_to_end(peer)
        while len(self._peers) > PEERS_MAX:
            self._peers.popitem(last=False)
        return speeds.setdefault(name, _Speed())


def _stale(speed: _Speed, now_s: float) -> bool:
    return not speed.bytes_per_s or now_s - speed.measured_s >= STALE_S


def fit_for(ours: Mapping[str, str], offered: Sequence[str]) -> dict[str, str]:
    """Return, for each transport of either end, why it cannot be used with a node that offers ``offered``; "" if it
    can.

    Args:
        ours: for each transport of this process, why it is unavailable here; "" if it is available.
    """
    reasons = {name: why and f"not here: {why}" for name, why in ours.items()}
    reasons |= {name: "not known here" for name in offered if name not in ours}
    reasons |= {name: "not offered there" for name, why in reasons.items() if name not in offered and not why}
    if reasons.get(LAST_RESORT) == "not offered there":
        reasons[LAST_RESORT] = "the last resort"
    return reasons


MEASURE_BYTES: Final = 8 << 20  # bytes that a measurement reads; at least one page
MEASURE_S: Final = 10.0  # time for a measurement; its first read may have to connect
MEASURE_SILENCE_S: Final = 5.0
CLOSE_S: Final = 1.0  # how long ``close`` waits for a measurement in progress

log = logging.getLogger("kvstore.cluster")


class PageMover:
    """Moves pages for one process. Threads may share it.

    Args:
        kinds: the table of transports.
        links: connections to data servers.
    """

    def __init__(self, kinds: Mapping[str, TransportKind], links: PeerLinks) -> None:
        self._kinds = {name: kind for name, kind in kinds.items() if not kind.missing()}
        self._links = links
        self._plan = TransportPlan({name: kind.bytes_per_s for name, kind in kinds.items()})
        self._transports: dict[str, Transport] = {}
        self._lock = threading.Lock()
        self._measurement: threading.Thread | None = None
        self._closed = False

    def read(
        self,
        peer: PoolNode,
        request: ReadRequest,
        places: Places,
        deadline_s: float,
        silence_s: float,
        holder: PlaceHolder | None = None,
        second: PoolNode | None = None,
    ) -> PullResult:
        """See ``Transport.read``. Raises the error of the last transport that was tried."""
        with self._lock:
            names = self._plan.order(peer.process, self._fit(peer), time.monotonic())
        result = PullResult()
        for last, name in enumerate(names, 1 - len(names)):
            done, began_s = result.pages, time.monotonic()
            remaining = replace(request, keys=request.keys[done:]) if done else request
            try:
                more = self._transport(name).read(peer, remaining, places[done:], deadline_s, silence_s, holder, second)
            except (InvalidRequest, PermissionDenied, Unauthenticated):
                raise  # every transport would get the same answer
            except KVStoreError as error:
                self._note_failure(peer, name, error)
                if isinstance(error, LateBytes) or (last == 0 and not done):
                    raise
                continue
            self._note_success(peer, name, remaining, more, began_s)
            result.add(more)
            if result.pages == len(request.keys):
                break
        return result

    def speed(self, peer: PoolNode) -> float:
        """Return the measured bytes per second of the transport that the next read tries first; 0 if unknown."""
        with self._lock:
            name = self._plan.order(peer.process, self._fit(peer), time.monotonic())[0]
            return self._plan.measured(peer.process, name)

    def close(self) -> None:
        """Close all transports."""
        with self._lock:
            self._closed = True
            transports, self._transports, measurement = list(self._transports.values()), {}, self._measurement
        for transport in transports:
            transport.close()
        if measurement is not None:
            measurement.join(CLOSE_S)

    def _fit(self, peer: PoolNode) -> list[str]:
        return [name for name in self._kinds if name in peer.transports]

    def _transport(self, name: str) -> Transport:
        with self._lock:
            transport = self._transports.get(name)
            if transport is None:
                transport = self._kinds[name].make(self._links)
                if not self._closed:
                    self._transports[name] = transport
            return transport

    def _note_failure(self, peer: PoolNode, name: str, error: KVStoreError) -> None:
        with self._lock:
            pause_s = self._plan.note_failure(peer.process, name, time.monotonic())
        log.info("%s: %s is left out for %g s: %s", peer.name, name, pause_s, error)

    def _note_success(
        self, peer: PoolNode, name: str, request: ReadRequest, result: PullResult, began_s: float
    ) -> None:
        """Record how fast the read was, and start measuring transports that might be faster."""
        now_s, nbytes = time.monotonic(), result.pages * request.length
        if nbytes < SAMPLE_BYTES or set(result.tiers) != {Tier.DRAM}:  # this would measure another tier
            nbytes = 0
        with self._lock:
            self._plan.note_success(peer.process, name, nbytes, now_s - began_s, now_s)
            others = self._plan.to_measure(peer.process, self._fit(peer), now_s) if nbytes else []
            if not others or self._closed or (self._measurement is not None and self._measurement.is_alive()):
                return
            pages = max(1, min(result.pages, MEASURE_BYTES // request.length))
            sample = replace(request, keys=request.keys[:pages])
            self._measurement = threading.Thread(
                target=self._measure, args=(peer, others, sample), name="kvstore-measure", daemon=True
            )
            self._measurement.start()

    def _measure(self, peer: PoolNode, names: list[str], request: ReadRequest) -> None:
        rows = np.zeros((len(request.keys), request.length), np.uint8)
        for name in names:
            try:
                transport = self._transport(name)
                for _ in range(2):  # the first read pays for the connection
                    began_s = time.monotonic()
                    result = transport.read(peer, request, rows, began_s + MEASURE_S, MEASURE_SILENCE_S)
            except KVStoreError as error:
                self._note_failure(peer, name, error)
                continue
            now_s = time.monotonic()
            with self._lock:
                self._plan.note_success(peer.process, name, result.pages * request.length, now_s - began_s, now_s)
                speed = self._plan.speed(peer.process, name)
            log.info("%s: %s brings %.2f GB/s", peer.name, name, speed / 1e9)


TRANSPORTS: Final[Mapping[str, TransportKind]] = {
    "nixl": TransportKind(NixlTransport, nixl.missing, guarded=False),
    "tcp": TransportKind(TcpTransport, lambda: "", bytes_per_s=2e9),
}
"""Transports by the names under which nodes offer them in the catalog. If two are equally fast, the first is used."""


def missing_here() -> dict[str, str]:
    """Return, for each transport, why it is unavailable here, or "" if it is available."""
    return {name: kind.missing() for name, kind in TRANSPORTS.items()}
