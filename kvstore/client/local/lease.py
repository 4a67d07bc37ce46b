"""``LocalLease``: read-only views of pages in a node's DRAM, whose frames are kept until a deadline. ``RunLease`` is
the node's lease of the frames."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Final

from kvstore import failpoint
from kvstore.client.local.hints import promote
from kvstore.client.local.index_lookup import pages_below
from kvstore.client.local.node import LocalNode, MappedNode
from kvstore.client.local.verify_hit import Run, address_parts, prove
from kvstore.client.match import ABSENT, ELSEWHERE, GENERATION, Lease, Match
from kvstore.errors import InvalidRequest, LeaseBroken, Unavailable
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, Status
from kvstore.shm.header import DaemonState
from kvstore.wire.control import NO_REPLY, Op, encode

RELEASE_S: Final = 0.2  # longest wait to send a release; without it the lease ends at its deadline
_OK = int(Status.OK)


class RunLease:
    """A node's lease of the frames of some runs, which the node then grants to no other session. Used by one thread at
    a time.

    It begins with ``take``, and ``renew`` extends it. It ends with ``release``, at its deadline, or with this process.

    Args:
        number: the number of a lease that was taken before; 0 for a new lease.
    """

    def __init__(self, mapped: MappedNode, ttl_ms: int, number: int = 0) -> None:
        self.number = number or secrets.randbits(63) | 1
        self._mapped = mapped
        self._ttl_ms = ttl_ms
        self._is_answered = bool(number)  # False while a request has no answer: a published release could overtake it

    def take(self, runs: list[Run]) -> int:
        """Take the lease. Return the number of leading pages for which the node gave it. Those of them that are
        still unchanged afterwards are leased. Raises as ``MappedNode.exchange``."""
        return self._publish(runs) or self._request(runs)

    def renew(self, runs: list[Run]) -> bool:
        """Move the deadline. If the node has forgotten the lease, for example after a restart, take it again and return
        False: the runs may have changed since. Raises as ``MappedNode.exchange``."""
        if self._mapped.exchange(Op.RENEW, a=self.number, b=self._ttl_ms).op == Status.OK:
            return True
        self._request(runs)
        return False

    def release(self) -> None:
        """End the lease. If the node does not receive this, the lease ends at its deadline."""
        with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed first
            self._release()

    def _release(self) -> None:
        """Release the lease through the log if possible. That wakes no process, because the node reads the log before
        each decision."""
        mapped, publisher = self._mapped, self._mapped.channel.publisher
        if self._is_answered and publisher is not None:
            request = encode(Op.RELEASE, 0, a=self.number, flags=NO_REPLY)
            with mapped.channel.copies:
                if publisher.publish(request, [], mapped.header):
                    return
        mapped.channel.request(Op.RELEASE, a=self.number, flags=NO_REPLY, timeout_s=RELEASE_S)

    def _publish(self, runs: list[Run]) -> int:
        """Take the lease through the log, without a message (see ``shm.put_log``). Return the number of pages; they are
        leased if they are unchanged now. Return 0 if a request is needed."""
        mapped, publisher, parts = self._mapped, self._mapped.channel.publisher, address_parts(runs)
        if publisher is None or len(parts) > 1:
            return 0
        if mapped.header.state != DaemonState.READY:
            return 0
        count = len(parts[0]) // ADDRESS_BYTES
        request = encode(Op.LEASE, 0, count=count, a=self.number, b=self._ttl_ms, flags=NO_REPLY, body=parts)
        with mapped.channel.copies:
            is_published = publisher.publish(request, [], mapped.header)
        if not is_published or publisher.deciding:
            return 0  # if the lease is published and then requested too, it is still one lease
        self._is_answered = True
        return count

    def _request(self, runs: list[Run]) -> int:
        """Take the lease by requests. Return the number of leading pages that are leased."""
        leased, self._is_answered = 0, False
        for part in address_parts(runs):
            count = len(part) // ADDRESS_BYTES
            message = self._mapped.exchange(Op.LEASE, count=count, a=self.number, b=self._ttl_ms, body=(part,))
            statuses = bytes(message.body[:count])
            if statuses.count(_OK) != count:
                leased += next(i for i, status in enumerate(statuses) if status != _OK)
                break
            leased += count
        self._is_answered = True
        return leased


class LocalLease(Lease):
    """A lease with views of DRAM.

    Taking it first promotes pages that are only in a lower tier, as far as DRAM has space. It also copies pages to DRAM
    that are only in an engine's memory: device memory has no views, and a lease may last longer than an engine waits
    for its readers. If no page is stored, no request is made.

    The lease survives a restart of the daemon, and ends with this process. Views are valid only during the lease. A
    view that is used later shows wrong data but does not crash. If a page changed during the lease, the end of the
    ``with`` block raises ``LeaseBroken``.
    """

    def __init__(
        self, node: LocalNode, layout: Layout, keys: Keys, ttl_s: float, name: Callable[[MappedNode], None]
    ) -> None:
        super().__init__(layout, keys, ttl_s)
        self._node = node
        self._name = name  # sends the node the tenant of these pages
        self._run_lease: RunLease | None = None
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
            self._run_lease = RunLease(mapped, self._ttl_ms)
            leased = self._run_lease.take(runs)
            if failpoint.ACTIVE:
                failpoint.hit("client.leased")
            try:
                runs, reason = leased_runs(runs, leased, reason)
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
        """Raise LeaseBroken if a page has changed since the lease was taken."""
        for run in self._runs:
            unchanged = run.unchanged()
            if unchanged < run.length:
                raise LeaseBroken(f"page {run.page + unchanged} changed after the lease's deadline; discard the read")

    def _renew(self) -> None:
        """Renew the lease. A restarted daemon keeps leases but not their numbers, so the lease is then taken again."""
        if self._run_lease is not None and self._runs and not self._run_lease.renew(self._runs):
            self.check()

    def release(self) -> None:
        """End the lease. The views become invalid."""
        run_lease, self._run_lease = self._run_lease, None
        self._runs, self.pages = [], []
        if run_lease is not None:
            run_lease.release()

    def _proven(self, mapped: MappedNode) -> tuple[list[Run], str]:
        """Return the runs of the leading pages in DRAM, and why there are not more. If lower tiers have further pages,
        these are promoted first."""
        keys, closed = self._keys, self._layout.attention == "full"
        runs, pages, reason = prove(mapped, keys, self._layout.page_bytes, closed)
        if reason in ELSEWHERE and pages_below(mapped, keys, pages, closed):
            self._name(mapped)
            promote(mapped, keys, closed, time.monotonic() + mapped.timeout_s)
            runs, pages, reason = prove(mapped, keys, self._layout.page_bytes, closed)
        return runs, reason


def leased_runs(runs: list[Run], pages: int, reason: str) -> tuple[list[Run], str]:
    """Return the leading pages of ``runs`` that are leased and did not change before that, and why there are no more:
    GENERATION if a page has changed, otherwise ``reason``. ``pages``: the number of pages for which the node gave the
    lease."""
    leased: list[Run] = []
    for run in runs:
        count = min(run.unchanged(), pages - run.page)
        if count > 0:
            leased.append(run._replace(length=count, words=run.words[: 8 * count]))
        if count < run.length:
            return leased, GENERATION
    return leased, reason
