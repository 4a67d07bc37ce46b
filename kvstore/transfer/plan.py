"""TransportPlan: by which transports pages come from a node. Pure: time comes with each call.

A transport is *fit* for a node where both ends have it. The fastest of the fit ones comes first, as measured; one that
failed is left out for a while, longer each time. What every node has is the last resort, whatever happened to it.

Worked example: n2 offers tcp and nixl, and so do we. tcp is expected to bring 2 GB/s, nothing is known about nixl: so
tcp is taken, and nixl is to be measured. The measurements are 3 GB/s and 1: it stays tcp, for ten minutes. Then tcp's
3 GB/s are known, as it is in use, and nixl is to be measured again. Where n2 offers nixl alone, nixl is taken at once,
and tcp where that fails.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

LAST_RESORT: Final = "tcp"  # what every data server speaks
FAILED_MIN_S, FAILED_MAX_S = 5.0, 300.0  # how long a transport that failed is left out
STALE_S: Final = 600.0  # a speed that is this old is measured again
SAMPLE_BYTES: Final = 1 << 20  # less than this tells of latency, not of speed
WEIGHT: Final = 0.25  # of the newest measurement
PEERS_MAX: Final = 256  # that are remembered; who was read from least recently is forgotten


@dataclass(slots=True)
class _Known:
    """What is known of one transport to one peer."""

    bytes_per_s: float = 0.0  # 0: it has not been measured
    measured_s: float = 0.0
    failures: int = 0  # since it last brought something
    until_s: float = 0.0  # it is left out


class TransportPlan:
    """The plan of one process. Used by one thread at a time.

    Args:
        expected: by transport, the bytes per second it is taken for until it was measured; 0: it has to be measured
            before it is chosen from among several.
    """

    def __init__(self, expected: Mapping[str, float]) -> None:
        self._expected = expected
        self._peers: OrderedDict[str, dict[str, _Known]] = OrderedDict()

    def order(self, peer: str, fit: Sequence[str], now_s: float) -> list[str]:
        """Transports to try for the next pull, one after the other; the last resort is among them."""
        ready = [name for name in fit if now_s >= self._known(peer, name).until_s]
        rated = [name for name in ready if self.speed(peer, name)] or ready
        rated.sort(key=lambda name: -self.speed(peer, name))
        return rated if LAST_RESORT in rated else [*rated, LAST_RESORT]

    def to_measure(self, peer: str, fit: Sequence[str], now_s: float) -> list[str]:
        """Transports whose speed is not known, or not any more: they may be faster than the one in use."""
        in_use = self.order(peer, fit, now_s)[0]
        known = {name: self._known(peer, name) for name in fit if name != in_use}
        return [name for name, each in known.items() if now_s >= each.until_s and _stale(each, now_s)]

    def speed(self, peer: str, name: str) -> float:
        """Bytes per second that it brings, as measured or expected; 0: nobody knows."""
        return self._known(peer, name).bytes_per_s or self._expected.get(name, 0.0)

    def moved(self, peer: str, name: str, nbytes: int, seconds: float, now_s: float) -> None:
        """Record that the transport brought ``nbytes`` in ``seconds``."""
        known = self._known(peer, name)
        known.failures, known.until_s = 0, 0.0
        if nbytes >= SAMPLE_BYTES and seconds > 0:
            fresh, before = nbytes / seconds, known.bytes_per_s
            old = before and not _stale(known, now_s)
            known.bytes_per_s = WEIGHT * fresh + (1 - WEIGHT) * before if old else fresh
            known.measured_s = now_s

    def failed(self, peer: str, name: str, now_s: float) -> float:
        """Record that the transport brought nothing, or not in time. Returns for how many seconds it is left out."""
        known = self._known(peer, name)
        known.failures += 1
        pause_s = min(FAILED_MAX_S, FAILED_MIN_S * 2 ** min(known.failures - 1, 16))
        known.until_s = now_s + pause_s
        return float(pause_s)

    def _known(self, peer: str, name: str) -> _Known:
        found = self._peers.setdefault(peer, {})
        self._peers.move_to_end(peer)
        while len(self._peers) > PEERS_MAX:
            self._peers.popitem(last=False)
        return found.setdefault(name, _Known())


def _stale(known: _Known, now_s: float) -> bool:
    return not known.bytes_per_s or now_s - known.measured_s >= STALE_S


def fit_for(ours: Mapping[str, str], offered: Sequence[str]) -> dict[str, str]:
    """By transport of either end, why it leads to a node that offers these; "": it does, and is live.

    Args:
        ours: by transport of this process, why it has it not; "": it has it.
    """
    found = {name: why and f"not here: {why}" for name, why in ours.items()}
    found |= {name: "not known here" for name in offered if name not in ours}
    found |= {name: "not offered there" for name, why in found.items() if name not in offered and not why}
    if found.get(LAST_RESORT) == "not offered there":
        found[LAST_RESORT] = "the last resort"
    return found
