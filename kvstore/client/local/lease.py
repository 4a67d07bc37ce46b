"""LocalLease: read-only views of pages where they lie in this machine's memory, kept there until a deadline."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable

from kvstore import failpoint
from kvstore.client.lease import Lease
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.local.prefetch import bring
from kvstore.client.local.proof import Run, address_parts, prove
from kvstore.client.local.stored import known_below
from kvstore.client.match import ABSENT, ELSEWHERE, GENERATION, Match
from kvstore.errors import InvalidRequest, LeaseBroken, Unavailable
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, Status
from kvstore.rpc.control import NO_REPLY, Op, encode
from kvstore.tier.header import DaemonState

_OK = int(Status.OK)
_RELEASE_S = 0.2  # a release that cannot be sent is no loss: the deadline passes by itself


class LocalLease(Lease):
    """A lease whose views are of DRAM: what only a lower tier has is brought there when it is taken, as
    far as there is room.

    It ends with the death of this process too. After its end the views show whatever is there, and leaving raises
    ``LeaseBroken`` where a page changed. Views live no longer than the lease; they are memory all the same, so using
    one later is wrong but no crash. A restart of the daemon keeps the lease. Where nothing is found no request is made.
    """

    def __init__(
        self, node: LocalNode, layout: Layout, keys: Keys, ttl_s: float, name: Callable[[Mapped], None]
    ) -> None:
        super().__init__(layout, keys, ttl_s)
        self._node = node
        self._name = name  # tells the node whose pages these are
        self._mapped: Mapped | None = None
        self._runs: list[Run] = []
        self._id = secrets.randbits(63) | 1
        self._answered = False  # no request for it is on its way: what is published would overtake that

    def _take(self) -> None:
        start_ns = time.monotonic_ns()
        mapped = self._node.mapped()
        runs: list[Run] = []
        reason = ABSENT
        if mapped is not None:
            self._keys = mapped.in_pool(self._keys)
            runs, reason = self._proven(mapped)
        if mapped is not None and runs:
            self._mapped = mapped
            held = self._publish(mapped, runs) or self._ask(mapped, runs)
            if failpoint.ACTIVE:
                failpoint.hit("client.leased")
            try:
                runs, reason = _still(runs, held, reason)
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
                raise LeaseBroken(f"page {run.page + same} changed under a lease that was overstayed; discard the read")

    def _renew(self) -> None:
        """Also after a restart of the daemon, whose leases have no names."""
        if self._mapped is None or not self._runs:
            return
        message = self._mapped.exchange(Op.RENEW, a=self._id, b=self._ttl_ms)
        if message.op != Status.OK:
            self._ask(self._mapped, self._runs)
            self.check()

    def release(self) -> None:
        """See ``Lease.release``."""
        mapped, self._mapped = self._mapped, None
        self._runs, self.pages = [], []
        if mapped is not None:
            with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed first
                self._say_released(mapped)

    def _say_released(self, mapped: Mapped) -> None:
        """Published where that can be: the node hears of it before it decides anything, and nobody has to wake it."""
        publisher = mapped.channel.publisher
        if self._answered and publisher is not None and Op.RELEASE in publisher.ops:
            request = encode(Op.RELEASE, 0, a=self._id, flags=NO_REPLY)
            if publisher.publish(request, [], mapped.header):
                return
        mapped.channel.request(Op.RELEASE, a=self._id, flags=NO_REPLY, timeout_s=_RELEASE_S)

    def _proven(self, mapped: Mapped) -> tuple[list[Run], str]:
        """Runs in DRAM, and why not more; what more is in lower tiers is brought to DRAM first."""
        keys, closed = self._keys, self._layout.attention == "full"
        runs, pages, reason = prove(mapped, keys, self._layout.page_bytes, closed)
        if reason in ELSEWHERE and known_below(mapped, keys, pages, closed):
            self._name(mapped)
            bring(mapped, keys, closed, time.monotonic() + mapped.timeout_s)
            runs, pages, reason = prove(mapped, keys, self._layout.page_bytes, closed)
        return runs, reason

    def _publish(self, mapped: Mapped, runs: list[Run]) -> int:
        """Take the lease without a message; for how many pages it is, if they are unchanged now (``_still``). 0: ask.
        See ``service.node.deciding``."""
        publisher, parts = mapped.channel.publisher, address_parts(runs)
        if publisher is None or Op.LEASE not in publisher.ops or len(parts) > 1:
            return 0
        if mapped.header.state != DaemonState.READY:
            return 0
        count = len(parts[0]) // ADDRESS_BYTES
        request = encode(Op.LEASE, 0, count=count, a=self._id, b=self._ttl_ms, flags=NO_REPLY, body=parts)
        if not publisher.publish(request, [], mapped.header) or publisher.deciding:
            return 0  # a lease that is published and asked for as well is one lease
        self._answered = True
        return count

    def _ask(self, mapped: Mapped, runs: list[Run]) -> int:
        """Ask for the lease; returns for how many leading pages it was given."""
        held, self._answered = 0, False
        for part in address_parts(runs):
            count = len(part) // ADDRESS_BYTES
            message = mapped.exchange(Op.LEASE, count=count, a=self._id, b=self._ttl_ms, body=(part,))
            statuses = bytes(message.body[:count])
            if statuses.count(_OK) != count:
                held += next(i for i, status in enumerate(statuses) if status != _OK)
                break
            held += count
        self._answered = True
        return held


def _still(runs: list[Run], held: int, reason: str) -> tuple[list[Run], str]:
    """The leading part of ``runs`` that is leased (``held`` pages) and has not changed until it was."""
    kept: list[Run] = []
    for run in runs:
        count = min(run.unchanged(), held - run.page)
        if count > 0:
            kept.append(run._replace(length=count, words=run.words[: 8 * count]))
        if count < run.length:
            return kept, GENERATION
    return kept, reason
