"""Lease: read-only views of pages where they lie, kept there until a deadline."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kvstore import failpoint
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.local.prefetch import bring
from kvstore.client.local.proof import Run, address_parts, prove
from kvstore.client.local.stored import known_on_nvme
from kvstore.client.match import ABSENT, ELSEWHERE, GENERATION, Match
from kvstore.errors import InvalidRequest, LeaseBroken, Unavailable
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, Status
from kvstore.rpc.control import NO_REPLY, Op

_OK = int(Status.OK)
_RELEASE_S = 0.2  # a release that cannot be sent is no loss: the deadline passes by itself


class Lease:
    """Views of the longest stored prefix: ``with cache.lease(tokens) as lease: use(lease.pages[0])``.

    Views are of DRAM: what is on NVMe only is brought there when the lease is taken, as far as there is room.

    Life: made -> entered (looked up, leased, proven) -> left, which releases it. Two more ends: its deadline
    ``ttl_s`` after it was taken or renewed, and the death of this process; then the node may give the frames to other
    pages, the views show whatever is there, and leaving raises ``LeaseBroken``. Views live no longer than the lease;
    they are memory all the same, so using one later is wrong but no crash. A restart of the daemon keeps the lease.

    Attributes (once entered):
        pages: read-only uint8 arrays ``[page_bytes]``, no copies, one per matched page.
        match: how much was found. Nothing found is an empty lease, and costs no request.
    """

    def __init__(
        self,
        node: LocalNode,
        layout: Layout,
        keys: Keys,
        ttl_s: float,
        name: Callable[[Mapped], None] | None = None,
    ) -> None:
        if not 0 < ttl_s < 1e6:
            raise InvalidRequest("ttl_s", f"must be positive seconds, not {ttl_s!r}")
        self.pages: list[npt.NDArray[np.uint8]] = []
        self.match = Match(0, 0, ABSENT)
        self._node = node
        self._layout = layout
        self._keys = keys
        self._name = name  # tells the node whose pages these are
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._mapped: Mapped | None = None
        self._runs: list[Run] = []
        self._id = 0

    def __enter__(self) -> Lease:
        """Take the lease.

        Raises:
            NodeUnavailable, DeadlineExceeded: the daemon did not answer in time.
        """
        if self._id:
            raise InvalidRequest("lease", "is taken already: make another")
        self._id = secrets.randbits(63) | 1
        start_ns = time.monotonic_ns()
        mapped = self._node.mapped()
        runs: list[Run] = []
        reason = ABSENT
        if mapped is not None:
            self._keys = mapped.in_pool(self._keys)
            runs, reason = self._proven(mapped)
        if mapped is not None and runs:
            self._mapped = mapped
            held = self._take(mapped, runs)
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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release it.

        Raises:
            LeaseBroken: a page changed meanwhile. Inside the handling of another exception that one gets a note.
        """
        try:
            self.check()
        except LeaseBroken as broken:
            if error is None:
                raise
            error.add_note(str(broken))
        finally:
            self.release()

    def forget_views(self) -> None:
        """For who only renews and releases: what was asked, and the views, take no memory any more."""
        self.pages = []
        self._keys = Keys.of(np.empty(0, np.uint32), self._layout.page_tokens, self._keys.root)

    def check(self) -> None:
        """Whether everything read through the views up to now was right.

        Raises:
            LeaseBroken: a page changed; the lease was overstayed.
        """
        for run in self._runs:
            same = run.unchanged()
            if same < run.length:
                raise LeaseBroken(f"page {run.page + same} changed under a lease that was overstayed; discard the read")

    def renew(self, ttl_s: float) -> None:
        """Move the deadline to ``ttl_s`` from now. Also after a restart of the daemon, whose leases have no names.

        Raises:
            LeaseBroken: it had ended, and a page has changed.
            NodeUnavailable, DeadlineExceeded: the daemon did not answer; the old deadline holds.
        """
        if not 0 < ttl_s < 1e6:
            raise InvalidRequest("ttl_s", f"must be positive seconds, not {ttl_s!r}")
        self._ttl_ms = max(1, int(ttl_s * 1000))
        if self._mapped is None or not self._runs:
            return
        message = self._mapped.exchange(Op.RENEW, a=self._id, b=self._ttl_ms)
        if message.op != Status.OK:
            self._take(self._mapped, self._runs)
            self.check()

    def release(self) -> None:
        """End it now. Views must not be used any more."""
        mapped, self._mapped = self._mapped, None
        self._runs, self.pages = [], []
        if mapped is not None:
            with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed first
                mapped.channel.request(Op.RELEASE, a=self._id, flags=NO_REPLY, timeout_s=_RELEASE_S)

    def _proven(self, mapped: Mapped) -> tuple[list[Run], str]:
        """Runs in DRAM, and why not more; what more is on NVMe is brought to DRAM first."""
        keys, closed = self._keys, self._layout.attention == "full"
        runs, pages, reason = prove(mapped, keys, self._layout.page_bytes, closed)
        if reason in ELSEWHERE and known_on_nvme(mapped, keys, pages, closed):
            if self._name is not None:
                self._name(mapped)
            bring(mapped, keys, closed, time.monotonic() + mapped.timeout_s)
            runs, pages, reason = prove(mapped, keys, self._layout.page_bytes, closed)
        return runs, reason

    def _take(self, mapped: Mapped, runs: list[Run]) -> int:
        """Ask for the lease; returns for how many leading pages it was given."""
        held = 0
        for part in address_parts(runs):
            count = len(part) // ADDRESS_BYTES
            message = mapped.exchange(Op.LEASE, count=count, a=self._id, b=self._ttl_ms, body=(part,))
            statuses = bytes(message.body[:count])
            if statuses.count(_OK) != count:
                return held + next(i for i, status in enumerate(statuses) if status != _OK)
            held += count
        return held

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("lease", "cannot be pickled: it belongs to this process")


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
