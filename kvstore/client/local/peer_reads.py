"""Reads pages of other nodes of the pool that the local node does not have.

A client does this without its node's daemon: it reads the pool's members from the node's folder, asks the owners of the
spans, and reads from the nodes that they name. The sender proves each page, and the client compares its checksums. Any
fault of another node shortens the match; a node that does not answer is skipped for a while.

Pages of other nodes that this machine has read recently. A page that it reads twice is worth caching here.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.cluster.data_connection import SILENCE_S, DialCredentials, credentials_of
from kvstore.cluster.find_pages import CACHE_S, Finder
from kvstore.cluster.lookup_plan import Stretch
from kvstore.cluster.page_mover import TRANSPORTS, PageMover
from kvstore.cluster.peer_links import PeerLinks, PeersFile, PoolView
from kvstore.cluster.transport import RATE_MIN, LateBytes, PlaceHolder, Places
from kvstore.errors import InvalidRequest, KVStoreError, OutOfSpace
from kvstore.model.prefix import Fingerprints, Keys, fingerprints
from kvstore.model.replica import Tier
from kvstore.safe_files import open_plain
from kvstore.shm.folder import NodeFolder, allocate
from kvstore.wire.data import ChainQuery, ReadRequest, pages_per_request

NAME: Final = "brought"
PLACES: Final = 1 << 16
BYTES: Final = 8 * PLACES


class BroughtBefore:
    """A table of page fingerprints in a file of the node's folder, shared by all its processes. The last bits of a
    fingerprint choose its slot. A later page overwrites its slot, and two processes may write at the same time; the
    only effect is that a page is cached too late or too early. Without the file (if there is no memory for it) every
    process has its own table.
    """

    def __init__(self, folder: NodeFolder | None) -> None:
        self._table: Fingerprints = np.zeros(PLACES, np.uint64)
        if folder is not None:
            with contextlib.suppress(OSError, OutOfSpace):  # the folder is being purged, or full
                self._table = _mapped(folder)

    def leading(self, links: list[bytes]) -> int:
        """Return how many leading pages were fetched before."""
        if not links:
            return 0
        named = fingerprints(b"".join(links))
        seen = self._table[_places(named)] == named
        return len(seen) if seen.all() else int(seen.argmin())

    def add(self, links: list[bytes]) -> None:
        """Record that these pages are being fetched."""
        if links:
            named = fingerprints(b"".join(links))
            self._table[_places(named)] = named


def _places(named: Fingerprints) -> Fingerprints:
    return named % np.uint64(PLACES)


def _mapped(folder: NodeFolder) -> Fingerprints:
    path = folder.path / NAME
    fd = open_plain(path, os.O_RDWR | os.O_CREAT, folder.file_mode)
    try:
        if os.fstat(fd).st_size < BYTES:
            allocate(fd, 0, BYTES, str(path))
            os.fchmod(fd, folder.file_mode)  # regardless of the umask
        return np.frombuffer(mmap.mmap(fd, BYTES), np.uint64)
    finally:
        os.close(fd)


LOSS_S: Final = 0.8  # a get's total wait for all other nodes, beyond the time its bytes take at ``RATE_MIN``
HERE_S: Final = 0.4  # a get's wait for its own node to grant frames; after it the get continues without

log = logging.getLogger("kvstore.cluster")


@dataclass
class Brought:
    """Pages that were fetched from other nodes: how many leading ones, and from which nodes and tiers."""

    pages: int = 0
    nodes: Counter[str] = field(default_factory=Counter)
    tiers: Counter[Tier] = field(default_factory=Counter)

    def add(self, more: Brought) -> None:
        """Add what a later fetch brought."""
        self.pages += more.pages
        self.nodes.update(more.nodes)
        self.tiers.update(more.tiers)


class Patience:
    """The time budget of one call for other nodes, and how much of it may be spent waiting for silent ones.

    Args:
        within_s: for the whole call. None limits only the time in which no pages arrive; transfers may take as long as
            their bytes need at ``RATE_MIN``.

    Attributes:
        deadline_s: as ``time.monotonic()``.
        left_s: remaining seconds to wait for silent nodes.
        here_s: remaining seconds to wait for the local node's answers, and for pages that another process of this
            machine fetches.
    """

    def __init__(self, within_s: float | None = None, here_s: float = HERE_S) -> None:
        self._grows = within_s is None
        within_s = LOSS_S if within_s is None else within_s
        self.deadline_s = time.monotonic() + within_s
        self.left_s = min(LOSS_S, within_s)
        self.here_s = here_s

    def until_s(self, nbytes: int) -> float:
        """Return the deadline of a transfer of ``nbytes`` that begins now."""
        return self.deadline_s + (nbytes / RATE_MIN if self._grows else 0.0)

    def came(self, nbytes: int) -> None:
        """Extend the budget after ``nbytes`` arrived."""
        self.extend(nbytes / RATE_MIN)

    def extend(self, seconds: float) -> None:
        """Extend the budget by ``seconds`` in which pages arrived."""
        self.deadline_s += seconds if self._grows else 0.0

    @property
    def over(self) -> bool:
        """True once the budget is used up."""
        return self.left_s <= 0 or time.monotonic() >= self.deadline_s

    @contextlib.contextmanager
    def asking(self) -> Iterator[float]:
        """Enclose questions that are answered at once or not at all; yields their deadline."""
        began_s = time.monotonic()
        try:
            yield min(self.deadline_s, began_s + self.left_s)
        finally:
            self.waited(time.monotonic() - began_s)

    def waited(self, seconds: float) -> None:
        """Deduct ``seconds`` that passed without an answer."""
        self.left_s -= seconds

    @contextlib.contextmanager
    def waiting(self) -> Iterator[float]:
        """Enclose a transfer; yields how long the other end may be silent at any point. If the transfer fails, the time
        is deducted; time in which pages arrived is not."""
        began_s, silence_s = time.monotonic(), max(0.0, min(SILENCE_S, self.left_s))
        try:
            yield silence_s
        except KVStoreError:
            self.waited(min(2 * silence_s, time.monotonic() - began_s))
            raise


class Elsewhere:
    """Reads from other nodes for one node's clients in one process. Threads share it.

    Args:
        kept_s: how long the answers of owners are kept.

    Attributes:
        brought: pages that gets of this machine have fetched.
    """

    def __init__(self, folder: Path, kept_s: float = CACHE_S) -> None:
        self._kept_s = kept_s
        self.brought = BroughtBefore(NodeFolder.at(folder))
        self._peers = PeersFile(folder)
        self._lock = threading.Lock()
        self._links: PeerLinks | None = None
        self._finder: Finder | None = None
        self._mover: PageMover | None = None

    @property
    def alone(self) -> bool:
        """True if the pool has no other node."""
        view = self._peers.look()
        return view is None or len(view.peers) < 2

    def seek(
        self,
        chain: ChainQuery,
        keys: Keys,
        pages: int,
        without: Collection[str] = (),
        patience: Patience | None = None,
    ) -> list[Stretch]:
        """Return where other nodes have the pages after the first ``pages`` of a chain, without gaps.

        The spans are unknown if the keys' position in their chain is unknown; then nothing is found.

        Args:
            without: nodes to leave out.
            patience: the budget of the call.
        """
        view = self._peers.look()
        if view is None or len(view.peers) < 2 or pages >= len(keys) or (above := keys.above) is None:
            return []
        finder = self._finder or self._begin(view)
        with (patience or Patience()).asking() as until_s:
            return finder.find(chain, above + keys.hashes, len(above) + pages, until_s, without, chain.closed)

    def read(
        self,
        chain: ChainQuery,
        keys: Keys,
        rows: Places,
        pages: int,
        patience: Patience | None = None,
        holder: PlaceHolder | None = None,
    ) -> Brought:
        """Read the pages after the first ``pages`` into ``rows``. Rows after the counted ones may change; after the
        return only if they are ``holder`` and were left."""
        brought, failed, patience = Brought(), set[str](), patience or Patience()
        limit = min(len(keys), pages + len(rows))
        while pages + brought.pages < limit and not patience.over:
            start = pages + brought.pages
            stretch = next(iter(self.seek(chain, keys, start, failed, patience)), None)
            if stretch is None:
                break
            stop = min(start + stretch.stop, limit)
            into = rows[start - pages : stop - pages]
            try:
                if self._read(chain, stretch.node, keys[start:stop], into, patience, brought, holder) < stop - start:
                    failed.add(stretch.node)
            except LateBytes:
                break  # these rows are of no use any more
        return brought

    def _read(
        self,
        chain: ChainQuery,
        node: str,
        keys: Keys,
        rows: Places,
        patience: Patience,
        brought: Brought,
        holder: PlaceHolder | None,
    ) -> int:
        """Read these pages from one node; return how many arrived. Raises LateBytes."""
        view, mover, done = self._peers.look(), self._mover, 0
        page_bytes = chain.frame_class.page_bytes
        peer = view.peers.get(node) if view is not None else None
        step = pages_per_request(chain, keys.extras is not None)
        try:
            while peer is not None and mover is not None and done < len(keys):
                request = ReadRequest(chain, keys[done : done + step], 0, page_bytes)
                deadline_s = patience.until_s(len(request.keys) * page_bytes)
                with patience.waiting() as silence_s:
                    got = mover.read(peer, request, rows[done : done + step], deadline_s, silence_s, holder)
                patience.came(got.pages * page_bytes)
                done += got.pages
                brought.add(Brought(got.pages, +Counter({node: got.pages}), Counter(got.tiers)))
                if got.pages < len(request.keys):
                    break
        except LateBytes:
            raise
        except KVStoreError as error:
            log.debug("%s: %s", node, error)
        return done

    def close(self) -> None:
        """Close the connections to other nodes."""
        with self._lock:
            links, mover = self._links, self._mover
            self._links = self._finder = self._mover = None
        if mover is not None:
            mover.close()
        if links is not None:
            links.close()

    def _begin(self, view: PoolView) -> Finder:
        with self._lock:
            if self._finder is None:
                self._links = PeerLinks(view.pool, f"client of {view.node}", _credentials())
                self._mover = PageMover(TRANSPORTS, self._links)
                self._finder = Finder(self._peers, self._links, self._kept_s)
            return self._finder


def _credentials() -> DialCredentials:
    """Return the credentials in the environment. Unusable ones cost the pages of other nodes, never a local read."""
    try:
        return credentials_of(os.environ)
    except InvalidRequest as error:
        log.warning("connecting to data servers without credentials: %s", error)
        return DialCredentials()
