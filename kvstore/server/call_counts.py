"""Counts, times and traces every gRPC call by its method, and remembers refused callers for the log."""

from __future__ import annotations

import asyncio
import contextlib
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import grpc

from kvstore.server import tracing

BOUNDS_S: Final = tuple(2.0**bits for bits in range(-13, 7))  # 122 us to 64 s


class Durations:
    """A histogram of durations, with a count for each bound in ``BOUNDS_S`` and one for longer calls."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one call that took ``seconds``."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


REFUSALS: Final = ("UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED")
_NAMES: Final = {code.value[0]: code.name for code in grpc.StatusCode}


class Calls:
    """All calls since the start. The event loop's thread counts, any thread may read. Only methods that are served
    occur, so the tables are bounded.

    Attributes:
        ended: calls by (method, name of the status code), including refused ones.
        durations: by method.
        sent_bytes, received_bytes: of messages, without gRPC's overhead.
        refused: for each status code of a refusal, how many calls and the last caller.
        shed: calls that were refused or ended for lack of room, by what was lacking.
    """

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, str]] = Counter()
        self.durations: dict[str, Durations] = {}
        self.sent_bytes = 0
        self.received_bytes = 0
        self.refused: dict[str, tuple[int, str]] = {}
        self.shed: Counter[str] = Counter()

    @contextlib.contextmanager
    def watch(self, method: str, context: Any) -> Iterator[None]:
        """Count and time one call. This context encloses the gate, which sets the call's status."""
        start_s, code = time.monotonic(), "UNKNOWN"
        with tracing.span(f"kvstore.grpc {method}", _traceparent(context)) as span:
            try:
                yield
                code = "OK"
            except asyncio.CancelledError:
                code = "CANCELLED"
                raise
            except BaseException:
                code = _code(context)
                raise
            finally:
                span.set_attribute("rpc.grpc.status", code)
                self.ended[method, code] += 1
                self.durations.setdefault(method, Durations()).add(time.monotonic() - start_s)
                if code in REFUSALS:
                    self.refused[code] = self.refused.get(code, (0, ""))[0] + 1, _host(context.peer())


def _code(context: Any) -> str:
    """Return the call's status; UNKNOWN if the call failed without one."""
    code = context.code()
    number = code.value[0] if isinstance(code, grpc.StatusCode) else int(code or 0)
    return _NAMES.get(number, "UNKNOWN") if number else "UNKNOWN"


def _traceparent(context: Any) -> str:
    if not tracing.enabled():
        return ""
    values = [value for key, value in context.invocation_metadata() or () if key == "traceparent"]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else ""


def _host(peer: str) -> str:
    """Return an address such as ``ipv4:10.0.0.1:5555`` without its port."""
    return peer.rpartition(":")[0] if peer.startswith("ip") else peer
