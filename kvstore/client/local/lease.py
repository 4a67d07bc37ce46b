"""LocalLease: read-only views of pages where they lie in this machine's memory, kept there until a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstore import failpoint
from kvstore.client.lease import Lease
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.local.prefetch import bring
from kvstore.client.local.proof import Run, prove
from kvstore.client.local.run_lease import RunLease
from kvstore.client.local.stored import known_below
from kvstore.client.match import ABSENT, ELSEWHERE, GENERATION, Match
from kvstore.errors import LeaseBroken
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys


class LocalLease(Lease):
    """A lease whose views are of DRAM: what only a lower tier has is brought there when it is taken, as
    far as there is room, and so is what only an engine's own memory has: an engine waits for its readers, but not as
    long as a lease may last, and memory of a device has no views.

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
                raise LeaseBroken(f"page {run.page + same} changed under a lease that was overstayed; discard the read")

    def _renew(self) -> None:
        """Also after a restart of the daemon, whose leases have no names."""
        if self._kept is not None and self._runs and not self._kept.renew(self._runs):
            self.check()

    def release(self) -> None:
        """See ``Lease.release``."""
        kept, self._kept = self._kept, None
        self._runs, self.pages = [], []
        if kept is not None:
            kept.release()

    def _proven(self, mapped: Mapped) -> tuple[list[Run], str]:
        """Runs in DRAM, and why not more; what more is in lower tiers is brought to DRAM first."""
        keys, closed = self._keys, self._layout.attention == "full"
        runs, pages, reason = prove(mapped, keys, self._layout.page_bytes, closed)
        if reason in ELSEWHERE and known_below(mapped, keys, pages, closed):
            self._name(mapped)
            bring(mapped, keys, closed, time.monotonic() + mapped.timeout_s)
            runs, pages, reason = prove(mapped, keys, self._layout.page_bytes, closed)
        return runs, reason


def still(runs: list[Run], held: int, reason: str) -> tuple[list[Run], str]:
    """The leading part of ``runs`` that is leased (``held`` pages) and has not changed until it was."""
    kept: list[Run] = []
    for run in runs:
        count = min(run.unchanged(), held - run.page)
        if count > 0:
            kept.append(run._replace(length=count, words=run.words[: 8 * count]))
        if count < run.length:
            return kept, GENERATION
    return kept, reason
