"""LocalLease: read-only views of pages in this machine's memory, which stay in place until a deadline.

RunLease: takes, renews and releases a node's lease of proven frames.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Final

from kvstore import failpoint
from kvstore.client.local.hints import bring
from kvstore.client.local.index_lookup import known_below
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.local.verify_hit import Run, address_parts, prove
from kvstore.client.match import ABSENT, ELSEWHERE, GENERATION, Lease, Match
from kvstore.errors import InvalidRequest, LeaseBroken, Unavailable
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, Status
from kvstore.shm.header import DaemonState
from kvstore.wire.control import NO_REPLY, Op, encode

RELEASE_S: Final = 0.2  # a release that cannot be sent does no harm: the lease ends at its deadline
_OK = int(Status.OK)


class RunLease:
    """Keeps the frames of some runs from being granted to others. Used by one thread at a time.

    Life: made -> ``take`` -> ``renew``, any number of times -> ``release``, or its deadline, or this process's end.

    Args:
        number: the number of a lease that was taken before; 0 for a new one.
    """

    def __init__(self, mapped: Mapped, ttl_ms: int, number: int = 0) -> None:
        self.number = number or secrets.randbits(63) | 1
        self._mapped = mapped
        self._ttl_ms = ttl_ms
        self._answered = bool(number)  # no unanswered request, which a published one would overtake

    def take(self, runs: list[Run]) -> int:
        """Take the lease; return for how many leading pages it was given. Those of them that are unchanged now are
        leased. Raises as ``Mapped.exchange``."""
        return self._publish(runs) or self._ask(runs)

    def renew(self, runs: list[Run]) -> bool:
        """Move the deadline. Returns False if the node did not know the lease any more (after a restart, for example)
        and it was taken again: runs may have changed. Raises as ``Mapped.exchange``."""
        if self._mapped.exchange(Op.RENEW, a=self.number, b=self._ttl_ms).op == Status.OK:
            return True
        self._ask(runs)
        return False

    def release(self) -> None:
        """End the lease."""
        with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed first
            self._release()

    def _release(self) -> None:
        """Release the lease through the log if possible: the node reads that before it decides anything, and need not
        be woken."""
        mapped, publisher = self._mapped, self._mapped.channel.publisher
        if self._answered and publisher is not None:
            request = encode(Op.RELEASE, 0, a=self.number, flags=NO_REPLY)
            if publisher.publish(request, [], mapped.header):
                return
        mapped.channel.request(Op.RELEASE, a=self.number, flags=NO_REPLY, timeout_s=RELEASE_S)

    def _publish(self, runs: list[Run]) -> int:
        """Take the lease through the log, without a message; return for how many pages, if they are unchanged now. 0
        means that a request is needed. See ``shm.put_log``."""
        mapped, publisher, parts = self._mapped, self._mapped.channel.publisher, address_parts(runs)
        if publisher is None or len(parts) > 1:
            return 0
        if mapped.header.state != DaemonState.READY:
            return 0
        count = len(parts[0]) // ADDRESS_BYTES
        request = encode(Op.LEASE, 0, count=count, a=self.number, b=self._ttl_ms, flags=NO_REPLY, body=parts)
        if not publisher.publish(request, [], mapped.header) or publisher.deciding:
            return 0  # a lease that is both published and requested is one lease
        self._answered = True
        return count

    def _ask(self, runs: list[Run]) -> int:
        held, self._answered = 0, False
        for part in address_parts(runs):
            count = len(part) // ADDRESS_BYTES
            message = self._mapped.exchange(Op.LEASE, count=count, a=self.number, b=self._ttl_ms, body=(part,))
            statuses = bytes(message.body[:count])
            if statuses.count(_OK) != count:
                held += next(i for i, status in enumerate(statuses) if status != _OK)
                break
            held += count
        self._answered = True
        return held


class LocalLease(Lease):
    """A lease whose views are of DRAM. When it is taken, pages that only a lower tier has are brought to DRAM, as far
    as there is space. So are pages that only an engine's own memory has: an engine waits for its readers, but not as
    long as a lease may last, and device memory has no views.

    It also ends with the death of this process. After its end the views show whatever is in the frames, and leaving
    raises ``LeaseBroken`` if a page changed. Views are valid only during the lease; using one later reads wrong data
    but does not crash. A restart of the daemon keeps the lease. If nothing is found, no request is made.
    """

    def __init__(
        self, node: LocalNode, layout: Layout, keys: Keys, ttl_s: float, name: Callable[[Mapped], None]
    ) -> None:
        super().__init__(layout, keys, ttl_s)
        self._node = node
        self._name = name  # tells the node which tenant these pages belong to
        self._kept: RunLease | None = None
        self._runs: list[Run] = []

    def _take(self) -> None:
        start_ns = time.monotonic_ns()
        mapped = self._node.mapped()
        runs: list[Run] = []
        reason = ABSENT
        if mapped is not None:
            self._keys = mapped.in_pool(self._keys)
            runs, reason = self._proven(mapped)
        if mapped is not None and runs:
            self._kept = RunLease(mapped, self._ttl_ms)
            held = self._kept.take(runs)
            if failpoint.ACTIVE:
                failpoint.hit("client.leased")
            try:
                runs, reason = still(runs, held, reason)
            except BaseException:
                self.release()
                raise
        now_ns = time.monotonic_ns()
        for extent, frame, _, count, _ in runs:
            self.pages += list(extent.views[frame : frame + count])
            extent.last_use[frame : frame + count] = now_ns
        self._runs = runs
        if reason:
            self._node.missed(reason)
        if mapped is not None:
            row = mapped.counters.row(self._layout.page_bytes, self._layout.page_tokens)
            mapped.counters.leased(row, len(self._keys), len(self.pages), reason, start_ns)
        self.match = Match(len(self.pages) * self._layout.page_tokens, len(self.pages), reason)

    def check(self) -> None:
        """See ``Lease.check``."""
        for run in self._runs:
            same = run.unchanged()
            if same < run.length:
                raise LeaseBroken(f"page {run.page + same} changed after the lease's deadline; discard the read")

    def _renew(self) -> None:
        """Renew, also after a restart of the daemon, which knows leases but not their numbers."""
        if self._kept is not None and self._runs and not self._kept.renew(self._runs):
            self.check()

    def release(self) -> None:
        """See ``Lease.release``."""
        kept, self._kept = self._kept, None
        self._runs, self.pages = [], []
        if kept is not None:
            kept.release()

    def _proven(self, mapped: Mapped) -> tuple[list[Run], str]:
        """Return runs in DRAM, and why not more. Further pages in lower tiers are brought to DRAM first."""
        keys, closed = self._keys, self._layout.attention == "full"
        runs, pages, reason = prove(mapped, keys, self._layout.page_bytes, closed)
        if reason in ELSEWHERE and known_below(mapped, keys, pages, closed):
            self._name(mapped)
            bring(mapped, keys, closed, time.monotonic() + mapped.timeout_s)
            runs, pages, reason = prove(mapped, keys, self._layout.page_bytes, closed)
        return runs, reason


def still(runs: list[Run], held: int, reason: str) -> tuple[list[Run], str]:
    """Return the leading part of ``runs`` that is leased (``held`` pages) and did not change before that."""
    kept: list[Run] = []
    for run in runs:
        count = min(run.unchanged(), held - run.page)
        if count > 0:
            kept.append(run._replace(length=count, words=run.words[: 8 * count]))
        if count < run.length:
            return kept, GENERATION
    return kept, reason
