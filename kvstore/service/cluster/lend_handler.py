"""LendHandler: answers ATTACH, LEND and RETURN: pages of a node's memory that other nodes read one-sidedly.

See ``lending``. A process that knows an agent's metadata may read all of the node's memory, whatever salt the pages are
under. So only nodes and operators receive it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from kvstore.client.local.lease import still
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.local.proof import Run, prove
from kvstore.client.local.run_lease import RunLease
from kvstore.client.match import ABSENT, GENERATION
from kvstore.errors import NodeUnavailable, PermissionDenied
from kvstore.service.cluster.read_handler import sums_for
from kvstore.transfer.base import Exchange, Handler
from kvstore.transfer.lending import (
    LOAN_MS,
    LentRun,
    Loan,
    pack_attached,
    pack_lent,
    pages_lent_max,
    unpack_return,
)
from kvstore.transfer.nixl_agent import NixlAgent
from kvstore.transfer.reading import ReadRequest, pack_end, unpack_read
from kvstore.transfer.wire import FrameKind


class LendHandler:
    """For one node. Threads share it.

    Args:
        make: an agent; called when somebody first asks for it, and for each new memory of the node. Raises Unavailable.
    """

    def __init__(self, node: LocalNode, make: Callable[[], NixlAgent]) -> None:
        self._node = node
        self._make = make
        self._lock = threading.Lock()
        self._of: Mapped | None = None
        self._metadata = b""
        self._agents: list[NixlAgent] = []  # the last one alone; an older one ends with its memory

    @property
    def handlers(self) -> dict[FrameKind, Handler]:
        """For ``transfer.server``."""
        return {FrameKind.ATTACH: self.attach, FrameKind.LEND: self.lend, FrameKind.RETURN: self.take_back}

    def attach(self, exchange: Exchange, body: memoryview) -> None:
        """Answer ATTACH. Raises PermissionDenied; Unavailable where there is no agent."""
        mapped = self._mapped(exchange)
        with self._lock:
            if self._of is not mapped:
                agent = self._make()
                agent.register(mapped.dram.segment.data)
                self._of, self._metadata, self._agents = mapped, agent.metadata(), [agent]
            metadata = self._metadata
        exchange.reply(FrameKind.ATTACHED, pack_attached(mapped.incarnation, metadata))

    def lend(self, exchange: Exchange, body: memoryview) -> None:
        """Answer LEND. Raises InvalidRequest, PermissionDenied; Unavailable where the node gives no lease."""
        request = unpack_read(body)
        exchange.caller.check_salt(request.chain.salt)
        mapped = self._mapped(exchange)
        keys, shape = mapped.in_pool(request.keys)[: pages_lent_max(request)], request.chain.frame_class
        runs, _, reason = prove(mapped, keys, shape.page_bytes, request.chain.closed)
        lease = RunLease(mapped, LOAN_MS)
        if runs:
            runs, reason = still(runs, lease.take(runs), reason)
        if len(keys) < len(request.keys):
            reason = reason or ABSENT  # the rest is to be asked for again
        exchange.reply(FrameKind.LENT, pack_lent(_loan(mapped, request, runs, lease.number, reason)))

    def take_back(self, exchange: Exchange, body: memoryview) -> None:
        """Answer RETURN. Raises WireError, PermissionDenied."""
        loan, mapped, pages = unpack_return(body), self._mapped(exchange), 0
        for run in loan.runs:
            extent, words = mapped.dram.extent(run.extent), loan.words[pages : pages + run.pages].tobytes()
            held = 0
            if extent is not None and run.frame + run.pages <= len(extent.words):
                held = Run(extent, run.frame, 0, run.pages, words).unchanged()
            pages += held
            if held < run.pages:
                break
        RunLease(mapped, LOAN_MS, loan.lease).release()
        exchange.reply(FrameKind.RETURNED, pack_end(pages, "" if pages == loan.pages else GENERATION))

    def _mapped(self, exchange: Exchange) -> Mapped:
        if not exchange.caller.operator:
            raise PermissionDenied("only nodes and operators may read a node's memory by themselves")
        mapped = self._node.mapped()
        if mapped is None:
            raise NodeUnavailable(f"{self._node.name}: its memory is gone")
        return mapped


def _loan(mapped: Mapped, request: ReadRequest, runs: list[Run], lease: int, reason: str) -> Loan:
    if not runs:
        return Loan(mapped.incarnation, lease, sums=np.zeros((0, request.pieces), np.uint32), reason=reason)
    lent = []
    for run in runs:
        extent = run.extent
        frames, stride = len(extent.views), extent.views.strides[0]
        lent.append(LentRun(extent.views.ctypes.data, stride, frames, extent.number, run.frame, run.length))
    words = np.frombuffer(b"".join([run.words for run in runs]), np.uint64)
    sums = [sums_for(request, run, slice(run.frame, run.frame + run.length)) for run in runs]
    return Loan(mapped.incarnation, lease, lent, words, np.concatenate(sums), reason)
