"""``PeerReader`` reads pages that are only on other nodes of the pool.

A client does this without its node's daemon. It reads the list of the pool's members in the node's folder, asks the
owners of the spans which nodes have the pages, and reads from these nodes. The sender proves each page, and the client
compares the checksums. A fault of another node only shortens the match. A node that is not responding is skipped for a
while, and a ``TimeBudget`` limits how long one call waits for all nodes.

``FetchHistory`` records which pages this machine has read from other nodes recently. A page that is read twice is worth
caching here.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from kvstore.cluster.data_connection import SILENCE_S, DataConnection, DialCredentials, credentials_of
from kvstore.cluster.find_pages import CACHE_S, Finder
from kvstore.cluster.lookup_plan import Stretch
from kvstore.cluster.page_mover import TRANSPORTS, PageMover
from kvstore.cluster.peer_links import PeerLinks, PeersFile, PoolNode, PoolView
from kvstore.cluster.transport import RATE_MIN, LateBytes, PlaceHolder, Places
from kvstore.errors import InvalidRequest, KVStoreError, NodeUnavailable, OutOfSpace
from kvstore.model.prefix import Fingerprints, Keys, fingerprints
from kvstore.model.replica import Tier
from kvstore.safe_files import open_plain
from kvstore.shm.folder import NodeFolder, allocate
from kvstore.wire.data import ChainQuery, Namespace, ReadRequest, pages_per_request

HISTORY_FILE: Final = "brought"
PLACES: Final = 1 << 16  # pages that the history can hold
HISTORY_BYTES: Final = 8 * PLACES


class FetchHistory:
    """A table of fingerprints of fetched pages, in a file in the node's folder that all processes of the node share.

    The last bits of a fingerprint choose its slot, and a later page overwrites the slot. Two processes may write at the
    same time. Neither does harm: a page is only cached too late or too early. If there is no memory for the file, each
    process has its own table.
    """

    def __init__(self, folder: NodeFolder | None) -> None:
        self._table: Fingerprints = np.zeros(PLACES, np.uint64)
        if folder is not None:
            with contextlib.suppress(OSError, OutOfSpace):  # the folder is being purged, or full
                self._table = _map_history(folder)

    def leading(self, links: list[bytes]) -> int:
        """Return how many leading pages were fetched before."""
        if not links:
            return 0
        pages = fingerprints(b"".join(links))
        is_listed = self._table[_slots(pages)] == pages
        return len(is_listed) if is_listed.all() else int(is_listed.argmin())

    def add(self, links: list[bytes]) -> None:
        """Add pages that are being fetched."""
        if links:
            pages = fingerprints(b"".join(links))
            self._table[_slots(pages)] = pages


def _slots(pages: Fingerprints) -> Fingerprints:
    return pages % np.uint64(PLACES)


def _map_history(folder: NodeFolder) -> Fingerprints:
    path = folder.path / HISTORY_FILE
    fd = open_plain(path, os.O_RDWR | os.O_CREAT, folder.file_mode)
    try:
        if os.fstat(fd).st_size < HISTORY_BYTES:
            allocate(fd, 0, HISTORY_BYTES, str(path))
            os.fchmod(fd, folder.file_mode)  # regardless of the umask
        return np.frombuffer(mmap.mmap(fd, HISTORY_BYTES), np.uint64)
    finally:
        os.close(fd)


LOSS_S: Final = 0.8  # longest total wait of a get for other nodes, in addition to its bytes' time at ``RATE_MIN``
STRIPE_BYTES: Final = 1 << 20  # the least that is read from one of several nodes at a time; at least one page
STRIPE_BYTES_MIN: Final = 16 * STRIPE_BYTES  # smaller reads come from one node
STRIPE_SPEED_MAX: Final = 1.5e9  # bytes per second of a node; a faster one is limited by the reader's CPU
SOURCES_MAX: Final = 4  # nodes that one get reads from at the same time
LOCAL_WAIT_S: Final = 0.4  # longest wait of a get for frames of its own node; then it continues without them

log = logging.getLogger("kvstore.cluster")

Result = TypeVar("Result")


@dataclass
class FetchResult:
    """How many leading pages were fetched from other nodes: in total, by node and by tier."""

    pages: int = 0
    nodes: Counter[str] = field(default_factory=Counter)
    tiers: Counter[Tier] = field(default_factory=Counter)

    def add(self, later: FetchResult) -> None:
        """Add the result of a later fetch."""
        self.pages += later.pages
        self.nodes.update(later.nodes)
        self.tiers.update(later.tiers)


class TimeBudget:
    """The time that one call may spend on other nodes, and the part of it that it may wait for silent nodes.

    Args:
        timeout_s: limit of the whole call. With None only the time in which no pages arrive is limited, and transfers
            may take the time that their bytes need at ``RATE_MIN``.

    Attributes:
        deadline_s: the end of the budget, by ``time.monotonic``.
        silence_left_s: seconds that the call may still wait for silent nodes.
        local_wait_s: longest wait for the local node's replies, and for pages that another process on this machine
            fetches.
    """

    def __init__(self, timeout_s: float | None = None, local_wait_s: float = LOCAL_WAIT_S) -> None:
        self._can_grow = timeout_s is None
        timeout_s = LOSS_S if timeout_s is None else timeout_s
        self.deadline_s = time.monotonic() + timeout_s
        self.silence_left_s = min(LOSS_S, timeout_s)
        self.local_wait_s = local_wait_s

    def transfer_deadline_s(self, nbytes: int) -> float:
        """Return the deadline of a transfer of ``nbytes`` that begins now."""
        return self.deadline_s + (nbytes / RATE_MIN if self._can_grow else 0.0)

    def extend_for(self, nbytes: int) -> None:
        """Extend the budget after ``nbytes`` have arrived."""
        self.extend(nbytes / RATE_MIN)

    def extend(self, seconds: float) -> None:
        """Extend the budget by ``seconds`` in which pages arrived, unless the whole call has a limit."""
        self.deadline_s += seconds if self._can_grow else 0.0

    @property
    def is_over(self) -> bool:
        """True once the budget is used up."""
        return self.silence_left_s <= 0 or time.monotonic() >= self.deadline_s

    @contextlib.contextmanager
    def query(self) -> Iterator[float]:
        """Enclose requests whose replies take no time to compute. Yields their deadline, and deducts the time that
        passed."""
        start_s = time.monotonic()
        try:
            yield min(self.deadline_s, start_s + self.silence_left_s)
        finally:
            self.deduct(time.monotonic() - start_s)

    def deduct(self, seconds: float) -> None:
        """Deduct ``seconds`` in which nothing arrived."""
        self.silence_left_s -= seconds

    @contextlib.contextmanager
    def transfer(self) -> Iterator[float]:
        """Enclose a transfer. Yields how long the other end may be silent at any point. The time is deducted only if
        the transfer fails, and then only as much of it as the other end may have been silent."""
        start_s, silence_s = time.monotonic(), max(0.0, min(SILENCE_S, self.silence_left_s))
        try:
            yield silence_s
        except KVStoreError:
            self.deduct(min(2 * silence_s, time.monotonic() - start_s))
            raise


class _Reading:
    """One read of consecutive pages from the nodes that have them.

    The pages are divided into parts. Every node that is read from gets the next part when it has sent the last one. A
    part is half of what the node would send of the remaining pages, by the measured speeds of all nodes: so the parts
    become smaller, and all nodes end at about the same time. If a node fails, another one gets its part. With one node,
    the parts are as large as a request may be.

    Attributes:
        failed: nodes that did not send all pages of a part.
    """

    def __init__(
        self,
        chain: ChainQuery,
        keys: Keys,
        rows: Places,
        mover: PageMover,
        budget: TimeBudget,
        holder: PlaceHolder | None,
        at_once: int,
    ) -> None:
        self.failed: set[str] = set()
        self._chain, self._keys, self._rows, self._mover = chain, keys, rows, mover
        self._budget, self._holder, self._at_once = budget, holder, at_once
        self._pages_max = pages_per_request(chain, keys.extras is not None)
        self._pages_min = max(1, STRIPE_BYTES // chain.frame_class.page_bytes)
        self._peers: list[PoolNode] = []  # the nodes that are read from at the same time
        self._next = 0  # the first page that no node was asked for
        self._returned: list[tuple[int, int]] = []  # parts of nodes that failed
        self._lock = threading.Lock()
        self._done: dict[int, tuple[int, str, dict[Tier, int]]] = {}  # first page -> pages, node, tiers
        self._late: LateBytes | None = None

    def run(self, peers: list[PoolNode]) -> None:
        """Read all parts, as far as the nodes have them. Raises LateBytes: bytes may still arrive in the rows."""
        seconds = peers[1:] if self._at_once == 1 else []
        self._peers = peers[: self._at_once]
        others = [
            threading.Thread(target=self._read_from, args=(peer, None), name="kvstore-read", daemon=True)
            for peer in self._peers[1:]
        ]
        for thread in others:
            thread.start()
        self._read_from(peers[0], seconds[0] if seconds else None)
        for thread in others:
            thread.join()
        if self._late is not None:
            raise self._late

    def result(self) -> FetchResult:
        """Return the leading pages that arrived."""
        result = FetchResult()
        while (part := self._done.get(result.pages)) is not None:
            pages, node, tiers = part
            result.add(FetchResult(pages, +Counter({node: pages}), Counter(tiers)))
            if not pages:
                break
        return result

    def _take(self, peer: PoolNode) -> tuple[int, int] | None:
        """Return the next part for this node, from its first page to its last one (exclusive); None if there are no
        more."""
        speeds = {each.name: self._mover.speed(each) for each in self._peers} if self._at_once > 1 else {}
        with self._lock:
            if self._returned:
                return self._returned.pop()
            first = self._next
            pages = len(self._keys) - first
            if speeds:
                share = speeds[peer.name] / max(1.0, sum(speeds.values()))
                pages = min(pages, max(self._pages_min, int(pages * share / 2)))
            self._next = first + min(pages, self._pages_max)
            return (first, self._next) if pages else None

    def _read_from(self, peer: PoolNode, second: PoolNode | None) -> None:
        """Read parts from one node, until there are no more or the node fails."""
        while (part := self._take(peer)) is not None:
            pages = self._read_part(peer, second, *part)
            if pages < part[1] - part[0]:
                with self._lock:
                    self.failed.add(peer.name)
                    self._returned.append((part[0] + pages, part[1]))
                return

    def _read_part(self, peer: PoolNode, second: PoolNode | None, first: int, stop: int) -> int:
        """Read the pages ``first`` to ``stop`` from one node. Return how many leading pages arrived."""
        page_bytes, budget = self._chain.frame_class.page_bytes, self._budget
        request = ReadRequest(self._chain, self._keys[first:stop], 0, page_bytes)
        deadline_s = budget.transfer_deadline_s((stop - first) * page_bytes)
        try:
            with budget.transfer() as silence_s:
                reply = self._mover.read(
                    peer, request, self._rows[first:stop], deadline_s, silence_s, self._holder, second
                )
        except LateBytes as error:
            self._late = error
            return 0
        except KVStoreError as error:
            log.debug("%s: %s", peer.name, error)
            return 0
        budget.extend_for(reply.pages * page_bytes)
        if reply.pages:
            with self._lock:
                self._done[first] = reply.pages, peer.name, reply.tiers
        return reply.pages


class PeerReader:
    """Reads pages from other nodes, for the clients of one node in one process. Thread-safe.

    Args:
        cache_s: how long the answers of owners are reused.

    Attributes:
        history: the pages that gets on this machine have fetched.
    """

    def __init__(self, folder: Path, cache_s: float = CACHE_S) -> None:
        self._cache_s = cache_s
        self.history = FetchHistory(NodeFolder.at(folder))
        self._peers = PeersFile(folder)
        self._lock = threading.Lock()
        self._links: PeerLinks | None = None
        self._finder: Finder | None = None
        self._mover: PageMover | None = None

    @property
    def has_peers(self) -> bool:
        """True if the pool has other nodes."""
        view = self._peers.look()
        return view is not None and len(view.peers) >= 2

    def find(
        self,
        chain: ChainQuery,
        keys: Keys,
        pages: int,
        without: Collection[str] = (),
        budget: TimeBudget | None = None,
    ) -> list[Stretch]:
        """Return which other nodes have the pages after the first ``pages`` of a chain, as stretches without gaps.

        Returns no stretch if the position of the keys in their chain is unknown, since then the spans are unknown too.

        Args:
            without: nodes to leave out.
            budget: the budget of the call; default: a new one.
        """
        view = self._peers.look()
        if view is None or len(view.peers) < 2 or pages >= len(keys) or (above := keys.above) is None:
            return []
        finder = self._finder or self._connect(view)
        with (budget or TimeBudget()).query() as deadline_s:
            return finder.find(chain, above + keys.hashes, len(above) + pages, deadline_s, without, chain.closed)

    def read(
        self,
        chain: ChainQuery,
        keys: Keys,
        rows: Places,
        pages: int,
        budget: TimeBudget | None = None,
        holder: PlaceHolder | None = None,
    ) -> FetchResult:
        """Read the pages after the first ``pages`` into ``rows``, and return how many arrived.

        The contents of further rows are undefined. They change after the return only if a ``holder`` is given and was
        told to leave them (``PlaceHolder.leave``).
        """
        result, failed, budget = FetchResult(), set[str](), budget or TimeBudget()
        limit = min(len(keys), pages + len(rows))
        while pages + result.pages < limit and not budget.is_over:
            start = pages + result.pages
            stretch = next(iter(self.find(chain, keys, start, failed, budget)), None)
            if stretch is None:
                break
            stop = min(start + stretch.stop, limit)
            targets = rows[start - pages : stop - pages]
            try:
                failed |= self._read_stretch(chain, stretch, keys[start:stop], targets, budget, result, holder)
            except LateBytes:
                break  # late bytes may still be written into these rows, so they cannot be used again
        return result

    def read_from(
        self, node: str, chain: ChainQuery, keys: Keys, rows: Places, budget: TimeBudget, holder: PlaceHolder
    ) -> int:
        """Read pages from this node, whatever the directory says, and return how many leading pages arrived."""
        view = self._peers.look()
        if view is None:
            return 0
        self._connect(view)
        result = FetchResult()
        with contextlib.suppress(LateBytes):  # ``result`` has the pages that arrived before
            self._read_stretch(chain, Stretch(node, 0, len(keys), b""), keys, rows, budget, result, holder)
        return result.pages

    def _read_stretch(
        self,
        chain: ChainQuery,
        stretch: Stretch,
        keys: Keys,
        rows: Places,
        budget: TimeBudget,
        result: FetchResult,
        holder: PlaceHolder | None,
    ) -> set[str]:
        """Read pages that one or more nodes have, and add them to ``result``. Return the nodes that did not send all
        pages that they were asked for.

        Raises:
            LateBytes: bytes may still arrive in the rows.
        """
        view, mover = self._peers.look(), self._mover
        if view is None or mover is None or stretch.node not in view.peers:
            return {stretch.node}
        nodes = [name for name in (stretch.node, *stretch.others) if name in view.peers]
        reading = _Reading(
            chain, keys, rows, mover, budget, holder, self._nodes_at_once(view, mover, nodes, chain, keys)
        )
        try:
            reading.run([view.peers[name] for name in nodes])
        finally:
            result.add(reading.result())
        return reading.failed

    def _nodes_at_once(self, view: PoolView, mover: PageMover, nodes: list[str], chain: ChainQuery, keys: Keys) -> int:
        """Return from how many nodes to read at the same time. Several are faster if there are many bytes, and if the
        link to a node, and not this process, limits the speed. If it is the link of this machine, which they share,
        each of them is still fast enough."""
        if len(nodes) < 2 or len(keys) * chain.frame_class.page_bytes < STRIPE_BYTES_MIN:
            return 1
        speed = max(mover.speed(view.peers[name]) for name in nodes)
        return max(1, min(len(nodes), SOURCES_MAX, int(speed / (2 * RATE_MIN)))) if speed < STRIPE_SPEED_MAX else 1

    def find_objects(
        self,
        namespace: Namespace,
        keys: list[bytes],
        without: Collection[str],
        budget: TimeBudget,
        fresh: bool = False,
    ) -> list[list[str]]:
        """Return, for each key of an object, the other nodes that have it; see ``Finder.find_objects``."""
        view = self._peers.look()
        if view is None or len(view.peers) < 2:
            return [[] for _ in keys]
        finder = self._finder or self._connect(view)
        with budget.query() as deadline_s:
            return finder.find_objects(namespace, keys, deadline_s, without, fresh)

    def owners(self, keys: list[bytes]) -> list[list[str]]:
        """Return the owners of each object's span, except this node."""
        view = self._peers.look()
        if view is None or len(view.peers) < 2:
            return [[] for _ in keys]
        return (self._finder or self._connect(view)).owners(keys)

    @property
    def nodes(self) -> list[str] | None:
        """The other nodes of the pool; None if the node is in no pool."""
        view = self._peers.look()
        return sorted(view.peers.keys() - {view.node}) if view is not None else None

    def call(self, node: str, deadline_s: float, silence_s: float, use: Callable[[DataConnection], Result]) -> Result:
        """Call ``use`` with a connection to a node's data server, see ``PeerLinks.call``. Raises NodeUnavailable if the
        node is no longer in the pool."""
        view, links = self._peers.look(), self._links
        peer = view.peers.get(node) if view is not None else None
        if peer is None or links is None:
            raise NodeUnavailable(f"{node}: is not in the pool")
        return links.call(peer, deadline_s, use, silence_s)

    def close(self) -> None:
        """Close the connections to other nodes."""
        with self._lock:
            links, mover = self._links, self._mover
            self._links = self._finder = self._mover = None
        if mover is not None:
            mover.close()
        if links is not None:
            links.close()

    def _connect(self, view: PoolView) -> Finder:
        """Create what is needed to reach other nodes, once, and return the finder."""
        with self._lock:
            if self._finder is None:
                self._links = PeerLinks(view.pool, f"client of {view.node}", _credentials(view))
                self._mover = PageMover(TRANSPORTS, self._links)
                self._finder = Finder(self._peers, self._links, self._cache_s)
            return self._finder


def _credentials(view: PoolView) -> DialCredentials:
    """Return the credentials in the environment, and the private networks of the node. If the credentials are invalid,
    pages of other nodes cannot be read, but local reads succeed."""
    try:
        credentials = credentials_of(os.environ)
    except InvalidRequest as error:
        log.warning("connecting to data servers without credentials: %s", error)
        credentials = DialCredentials()
    return replace(credentials, private_networks=view.private_networks or credentials.private_networks)
