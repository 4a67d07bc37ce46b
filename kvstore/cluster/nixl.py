"""NixlTransport: reads pages one-sidedly with NIXL: over shared memory, TCP, or RDMA if NIXL's backend supports it.

The source node lends the pages (LEND): it proves them and takes a lease. NIXL then reads their bytes without the data
server. Afterwards the data server says which pages were unchanged (RETURN), and this end compares the checksums. Late
bytes may still arrive, so memory is not reused before its read has ended:

- Pages that are stored in our own node are read into their frames. If bytes are late, the frames stay reserved.
- All other pages are read into memory of the transport, and copied from there. Late memory stays with the transport.

NixlAgent is NIXL in this process, reduced to what kvstore uses: it registers memory, and reads from other processes.
The package is optional. Its agent has no calls with a deadline, and a posted read cannot be cancelled reliably. So
callers poll, and keep the memory of a read that does not end.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.cluster.data_connection import DataConnection
from kvstore.cluster.peer_links import PeerLinks, PoolNode
from kvstore.cluster.transport import CHECKSUM, LateBytes, PlaceHolder, Places, PullResult
from kvstore.device.host_memory import copy, empty
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.model.replica import Tier
from kvstore.wire.data import (
    BODY_MAX,
    FrameKind,
    LentRun,
    Loan,
    ReadRequest,
    pack_return,
    sums_of,
    unpack_attached,
    unpack_end,
    unpack_lent,
)

PACKAGES: Final = ("nixl", "nixl_cu12", "nixl_cu13")
BACKEND: Final = "UCX"
DRAM, VRAM = "DRAM", "VRAM"  # NIXL's names of kinds of memory
PREPARED_MAX: Final = 256  # descriptor lists of other nodes' extents to keep
PAUSE_S: Final = 50e-6  # pause between two checks whether a read has ended

Rows = npt.NDArray[np.uint8]


@cache
def missing() -> str:
    """Why NIXL is unavailable on this machine; "" if it is available."""
    if any(importlib.util.find_spec(name) is not None for name in PACKAGES):
        return ""
    return "not installed"


class NixlAgent:
    """One agent. Threads share it; one thread at a time calls NIXL.

    Life: made, which takes half a second -> memory is registered and other agents are met -> dropped, and both with it.

    Args:
        name: a name that is unique among all agents that it meets.

    Raises:
        Unavailable: the package is missing, or cannot be used.
    """

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._memory: list[Rows] = []  # registered memory must not be unmapped
        self._frame_lists: OrderedDict[tuple[object, ...], Any] = OrderedDict()
        api = _api()
        errors = vars(importlib.import_module(f"{api.__package__}._bindings"))
        kinds = [kind for kind in errors.values() if isinstance(kind, type) and issubclass(kind, Exception)]
        self._errors: tuple[type[Exception], ...] = (*kinds, RuntimeError)
        with self._locked("no agent"):
            self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(True, False, 0, backends=[BACKEND]))
            if BACKEND not in self._agent.backends:
                raise Unavailable(f"nixl: there is no {BACKEND}")

    def register(self, rows: Rows) -> None:
        """Register memory while the agent lives: other nodes may read it, and this process may read into it. Raises
        Unavailable."""
        with self._locked("cannot register memory"):
            self._agent.register_memory([(rows.ctypes.data, rows.nbytes, 0, "")], DRAM)
            self._memory.append(rows)

    def register_at(self, address: int, nbytes: int, device: int, kind: str) -> None:
        """Register memory that the caller keeps mapped; ``kind`` VRAM is memory of a device. Raises Unavailable if the
        backend cannot reach it."""
        with self._locked(f"cannot register memory of kind {kind}"):
            self._agent.register_memory([(address, nbytes, device, "")], kind)

    def metadata(self) -> bytes:
        """Return the bytes that another agent needs in order to meet this one. Raises Unavailable."""
        with self._locked("has no metadata"):
            return bytes(self._agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> str:
        """Make another agent's memory readable, and return its name. Raises Unavailable."""
        with self._locked("the other end's metadata is invalid"):
            name = self._agent.add_remote_agent(metadata)
            return name.decode() if isinstance(name, bytes) else str(name)

    def part_from(self, name: str) -> None:
        """Forget another agent."""
        with self._lock:
            for key in [key for key in self._frame_lists if key[0] == name]:
                del self._frame_lists[key]
            try:
                self._agent.remove_remote_agent(name)
            except self._errors as error:
                logging.getLogger("kvstore.data").debug("nixl: %s", error)

    def post(
        self,
        name: str,
        runs: list[LentRun],
        offset: int,
        length: int,
        places: list[int],
        kind: str = DRAM,
        device: int = 0,
    ) -> NixlRead:
        """Prepare to read bytes ``offset`` to ``offset + length`` of each page of ``runs`` into memory at ``places``.

        Args:
            kind, device: the memory that the runs are in.

        Raises:
            Unavailable: nothing was posted.
        """
        with self._locked("cannot read"):
            local = np.array([(place, length, 0) for place in places], np.uint64)
            into, at, reads = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, DRAM), 0, []
            for run in runs:
                local_indices = np.arange(at, at + run.pages, dtype=np.int32)
                remote_indices = np.arange(run.frame, run.frame + run.pages, dtype=np.int32)
                frames = self._frames_of(name, run, offset, length, kind, device)
                reads.append(self._agent.make_prepped_xfer("READ", into, local_indices, frames, remote_indices))
                at += run.pages
        return NixlRead(self, into, reads)

    def _frames_of(self, name: str, run: LentRun, offset: int, length: int, kind: str, device: int) -> Any:
        """Return the prepared list of this part of every frame of an extent."""
        key = name, run.address, run.frames, run.stride, offset, length, kind, device
        if key not in self._frame_lists:
            row = np.array([[run.address + offset, length, device, run.stride, run.frames]], np.uint64)
            self._frame_lists[key] = self._agent.prep_xfer_dlist(name, row, kind)
            while len(self._frame_lists) > PREPARED_MAX:
                self._frame_lists.popitem(last=False)
        self._frame_lists.move_to_end(key)
        return self._frame_lists[key]

    def transfer(self, read: Any) -> str:
        """Post a read, and return its state as ``state`` does. Raises Unavailable: the read might or might not have
        been posted."""
        with self._locked("cannot read"):
            return str(self._agent.transfer(read))

    def state(self, read: Any) -> str:
        """Return DONE, PROC (still reading) or ERR. After ERR, or if this raises Unavailable, the bytes may still
        arrive."""
        with self._locked("the read failed"):
            return str(self._agent.check_xfer_state(read))

    def _locked(self, problem: str) -> _LockedCall:
        return _LockedCall(self, problem)


class _LockedCall:
    """Holds the agent's lock, and turns an error of NIXL into Unavailable."""

    def __init__(self, agent: NixlAgent, problem: str) -> None:
        self._agent = agent
        self._problem = problem

    def __enter__(self) -> None:
        self._agent._lock.acquire()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._agent._lock.release()
        if isinstance(error, self._agent._errors):
            raise Unavailable(f"nixl: {self._problem} ({error})") from None


class NixlRead:
    """Reads that were prepared together. Life: ``begin`` -> ``wait`` until it is over. A read that never ends is
    kept."""

    def __init__(self, agent: NixlAgent, into: Any, reads: list[Any]) -> None:
        self._agent = agent
        self._into = into  # in use while the reads are
        self._reads = reads

    def begin(self) -> None:
        """Post the reads. Raises Unavailable: some reads might have been posted."""
        self._reads = [read for read in self._reads if self._agent.transfer(read) != "DONE"]

    def is_over(self) -> bool:
        """Return whether all bytes have arrived. Raises Unavailable if some bytes never will; others may still arrive
        later."""
        while self._reads:
            state = self._agent.state(self._reads[-1])
            if state == "PROC":
                return False
            if state != "DONE":
                raise Unavailable(f"nixl: the read ended with {state}")
            self._reads.pop()
        return True

    def wait(self, until_s: float) -> bool:
        """Wait until ``is_over``, but not after ``until_s``. Returns whether all reads are over. Raises as
        ``is_over``."""
        while not self.is_over():
            if time.monotonic() >= until_s:
                return False
            time.sleep(PAUSE_S)
        return True


def _api() -> Any:
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            api = importlib.import_module(f"{name}._api")
        except ImportError as error:
            raise Unavailable(f"nixl: cannot be used ({error})") from None
        logging.getLogger("nixl").setLevel(logging.WARNING)  # NIXL prints a line for every agent
        return api
    raise Unavailable(f"nixl: {missing()}")


CHUNK_BYTES: Final = 8 << 20  # bytes read at a time; at least one page
CHUNKS_MAX: Final = 2  # chunks of one call in flight
LANDING_BYTES_MAX: Final = 128 << 20  # memory of the transport, including late memory
LATE_BYTES_MAX: Final = 256 << 20  # bytes that may still arrive; with more, nothing is read
ATTACHED_MAX: Final = 64  # other nodes' agents to remember


@dataclass
class _RemoteAgent:
    """Another node's agent."""

    name: str
    incarnation: int


@dataclass
class _LateReads:
    """Reads that did not end in time, and a function to call once they have ended."""

    reads: list[NixlRead]
    nbytes: int
    on_end: Callable[[], None]


@dataclass
class _Chunk:
    """Pages of one request that are read together. ``block`` is memory of the transport, or None if the pages are read
    into their places."""

    first: int
    pages: int
    rows: list[Rows]
    block: Rows | None
    read: NixlRead = field(init=False)


class NixlTransport:
    """See ``Transport``. Nodes without an agent, and memory that cannot be registered, are left to other transports.

    Args:
        make: makes an agent with a name. Raises Unavailable.
    """

    def __init__(self, links: PeerLinks, make: Callable[[str], NixlAgent] = NixlAgent) -> None:
        self._links = links
        self._make = make
        self._lock = threading.Lock()
        self._agent: NixlAgent | None = None
        self._remote_agents: dict[str, _RemoteAgent] = {}  # by process of the data server
        self._roots: dict[int, Rows] = {}  # by address
        self._blocks: list[Rows] = []  # free memory of the transport
        self._blocks_bytes = 0
        self._late_reads: list[_LateReads] = []

    @property
    def late_bytes(self) -> int:
        """How many bytes may still arrive."""
        return sum(each.nbytes for each in self._late_reads)

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
        """See ``Transport``."""
        self._reap()
        if self.late_bytes > LATE_BYTES_MAX:
            raise Unavailable(f"nixl: {self.late_bytes} late bytes may still arrive here")
        agent = self._start_agent()
        with self._links.to(peer, deadline_s, silence_s) as connection:
            remote = self._attach(agent, peer, connection, deadline_s)
            body = connection.call(FrameKind.LEND, *request.pack(), reply=FrameKind.LENT, deadline_s=deadline_s)
            loan = unpack_lent(body, request)
            if loan.pages and loan.incarnation != remote.incarnation:
                self._forget(peer, agent)
                raise Unavailable(f"{peer.name}: its memory was replaced")
            good = self._fetch(agent, remote.name, loan, request, places, deadline_s, silence_s, holder)
            body = connection.call(FrameKind.RETURN, pack_return(loan), reply=FrameKind.RETURNED, deadline_s=deadline_s)
            same, reason = unpack_end(body[: BODY_MAX[FrameKind.END]], loan.pages)
        pages = min(good, same)
        why = CHECKSUM if good < same else reason or loan.reason
        return PullResult(pages, why, {Tier.DRAM: pages} if pages else {}, loan.pages)

    def close(self) -> None:
        """See ``Transport``. The agent is kept while bytes may still arrive, because only the agent can report their
        arrival."""
        with self._lock:
            agent, self._agent = self._agent, None
            self._remote_agents.clear()
        if agent is not None and self._late_reads:
            _AGENTS_IN_USE.append((agent, self._late_reads))

    # --- agents -----------------------------------------------------------------------------------------------------

    def _start_agent(self) -> NixlAgent:
        with self._lock:
            if self._agent is None:
                self._agent = self._make(f"kvstore-{os.getpid()}-{secrets.token_hex(4)}")
            return self._agent

    def _attach(self, agent: NixlAgent, peer: PoolNode, connection: DataConnection, deadline_s: float) -> _RemoteAgent:
        with self._lock:
            remote = self._remote_agents.get(peer.process)
        if remote is None:
            body = connection.call(FrameKind.ATTACH, reply=FrameKind.ATTACHED, deadline_s=deadline_s)
            incarnation, metadata = unpack_attached(body)
            remote = _RemoteAgent(agent.meet(metadata), incarnation)
            with self._lock:
                while len(self._remote_agents) >= ATTACHED_MAX:
                    agent.part_from(self._remote_agents.pop(next(iter(self._remote_agents))).name)
                self._remote_agents[peer.process] = remote
        return remote

    def _forget(self, peer: PoolNode, agent: NixlAgent) -> None:
        with self._lock:
            remote = self._remote_agents.pop(peer.process, None)
        if remote is not None:
            agent.part_from(remote.name)

    # --- memory -----------------------------------------------------------------------------------------------------

    def _register_root(self, agent: NixlAgent, places: Places) -> bool:
        """Register the memory that contains all these places. Returns False if the memory is more than one piece."""
        root = places[0]
        while isinstance(root.base, np.ndarray):
            root = root.base
        start, stop = root.ctypes.data, root.ctypes.data + root.nbytes
        if not all(start <= place.ctypes.data <= stop - place.nbytes for place in places):
            return False
        with self._lock:
            if start not in self._roots:
                agent.register(root)
                self._roots[start] = root
        return True

    def _block(self, agent: NixlAgent, nbytes: int) -> Rows:
        """Take memory of ``nbytes``. Raises Unavailable if too much is in use or late."""
        with self._lock:
            for at, block in enumerate(self._blocks):
                if block.nbytes >= nbytes:
                    return self._blocks.pop(at)
            size = max(nbytes, CHUNK_BYTES)
            if self._blocks_bytes + size > max(LANDING_BYTES_MAX, size):
                raise Unavailable(f"nixl: {self._blocks_bytes} bytes are in use")
            block = empty((size,))
            agent.register(block)
            self._blocks_bytes += size
            return block

    def _give_back(self, block: Rows) -> None:
        with self._lock:
            self._blocks.append(block)

    def _reap(self) -> None:
        """Free the memory of reads that were late and have ended."""
        with self._lock:
            late, self._late_reads = self._late_reads, []
        for each in late:
            try:
                each.reads = [read for read in each.reads if not read.is_over()]
            except Unavailable:
                pass  # NIXL will never report the end of this read, so its memory is kept
            if each.reads:
                with self._lock:
                    self._late_reads.append(each)
            else:
                each.on_end()

    # --- reading ----------------------------------------------------------------------------------------------------

    def _fetch(
        self,
        agent: NixlAgent,
        name: str,
        loan: Loan,
        request: ReadRequest,
        places: Places,
        deadline_s: float,
        silence_s: float,
        holder: PlaceHolder | None,
    ) -> int:
        """Read the lent pages into their places. Returns how many leading pages have the right checksum. Raises
        LateBytes, DeadlineExceeded, Unavailable."""
        step, good = max(1, CHUNK_BYTES // request.length), loan.pages
        if holder is not None and not (loan.pages and self._register_root(agent, places[: loan.pages])):
            holder = None
        chunks: list[_Chunk] = []
        first = 0
        try:
            while first < loan.pages or chunks:
                if first < loan.pages and len(chunks) < CHUNKS_MAX:
                    pages = min(step, loan.pages - first)
                    chunks.append(self._post(agent, name, loan, request, places, first, pages, holder))
                    chunks[-1].read.begin()
                    first += pages
                    continue
                chunk = chunks[0]
                if not chunk.read.wait(min(deadline_s, time.monotonic() + silence_s)):
                    raise DeadlineExceeded(f"nixl: {chunk.pages} pages did not arrive in time")
                chunks.pop(0)
                bad = _first_bad(chunk, loan, request)
                good = min(good, chunk.first + bad) if bad < chunk.pages else good
                if chunk.block is not None:
                    for place, row in zip(places[chunk.first :], chunk.rows[:bad], strict=False):
                        copy(place, row)
                    self._give_back(chunk.block)
        except Unavailable as error:
            self._leave(chunks, request.length, holder)
            if holder is not None:
                raise LateBytes(str(error)) from None
            raise
        return good

    def _post(
        self,
        agent: NixlAgent,
        name: str,
        loan: Loan,
        request: ReadRequest,
        places: Places,
        first: int,
        pages: int,
        holder: PlaceHolder | None,
    ) -> _Chunk:
        if holder is not None:
            chunk = _Chunk(first, pages, [places[page] for page in range(first, first + pages)], None)
        else:
            block = self._block(agent, pages * request.length)
            chunk = _Chunk(first, pages, list(block[: pages * request.length].reshape(pages, -1)), block)
        try:
            addresses = [row.ctypes.data for row in chunk.rows]
            runs = _part(loan.runs, first, pages)
            chunk.read = agent.post(name, runs, request.offset, request.length, addresses)
        except Unavailable:
            if chunk.block is not None:
                self._give_back(chunk.block)
            raise
        return chunk

    def _leave(self, chunks: list[_Chunk], length: int, holder: PlaceHolder | None) -> None:
        """Keep the memory of these chunks until their reads have ended."""
        if not chunks:
            return
        on_end = holder.leave() if holder is not None else None

        def free() -> None:
            if on_end is not None:
                on_end()
            for chunk in chunks:
                if chunk.block is not None:
                    self._give_back(chunk.block)

        nbytes = sum(chunk.pages for chunk in chunks) * length
        with self._lock:
            self._late_reads.append(_LateReads([chunk.read for chunk in chunks], nbytes, free))


_AGENTS_IN_USE: list[
    tuple[NixlAgent, list[_LateReads]]
] = []  # agents of closed transports whose bytes may still arrive


def _part(runs: list[LentRun], first: int, pages: int) -> list[LentRun]:
    """Return the runs that contain pages ``first`` to ``first + pages``."""
    part, at = [], 0
    for run in runs:
        start, stop = max(first, at), min(first + pages, at + run.pages)
        if start < stop:
            part.append(run._replace(frame=run.frame + start - at, pages=stop - start))
        at += run.pages
    return part


def _first_bad(chunk: _Chunk, loan: Loan, request: ReadRequest) -> int:
    """Return how many leading pages of a chunk have the checksums from the loan."""
    for page, row in enumerate(chunk.rows):
        sums = loan.sums[chunk.first + page]
        if (sums_of(row.reshape(1, -1), request.pieces)[0] != sums).any():
            return page
    return chunk.pages
