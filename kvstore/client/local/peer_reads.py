"""Elsewhere: pages that other nodes of the pool have, for what a node's own tiers do not.

A client asks by itself, without its node's daemon: it reads who there is in the node's folder, asks the owners of the
spans, and reads from the nodes that they name. What comes was proven by its sender, and its checksums are compared
here. Whatever goes wrong with another node is a shorter match; one that does not answer is left alone for a while.

Brought: which pages of other nodes this machine has read of late. What it reads twice is worth a place in it.
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
from kvstore.cluster.find_pages import KEPT_S, Finder
from kvstore.cluster.lookup_plan import Stretch
from kvstore.cluster.page_mover import TRANSPORTS, PageMover
from kvstore.cluster.peer_links import PeerLinks, PeersFile, PoolView
from kvstore.cluster.transport import RATE_MIN, HeldPlaces, LateBytes, Places
from kvstore.errors import InvalidRequest, KVStoreError, OutOfSpace
from kvstore.model.prefix import Fingerprints, Keys, fingerprints
from kvstore.model.replica import Tier
from kvstore.safe_files import open_plain
from kvstore.shm.folder import NodeFolder, allocate
from kvstore.wire.data import ReadRequest, WantedChain, pages_per_request

NAME: Final = "brought"
PLACES: Final = 1 << 16
BYTES: Final = 8 * PLACES


class BroughtBefore:
    """A table that all processes of a node share, in a file of its folder: of each page the fingerprint, where its last
    bits say. A later page of the same place takes it, and two processes may write at a time: a page is then kept too
    late, or too early. Without the file (there is no memory for it) every process has a table of its own.
    """

    def __init__(self, folder: NodeFolder | None) -> None:
        self._table: Fingerprints = np.zeros(PLACES, np.uint64)
        if folder is not None:
            with contextlib.suppress(OSError, OutOfSpace):  # the folder is just being purged, or full
                self._table = _mapped(folder)

    def leading(self, links: list[bytes]) -> int:
        """How many leading ones of these pages were brought before."""
        if not links:
            return 0
        named = fingerprints(b"".join(links))
        seen = self._table[_places(named)] == named
        return len(seen) if seen.all() else int(seen.argmin())

    def add(self, links: list[bytes]) -> None:
        """These are being brought."""
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
            os.fchmod(fd, folder.file_mode)  # whatever the umask
        return np.frombuffer(mmap.mmap(fd, BYTES), np.uint64)
    finally:
        os.close(fd)


LOSS_S: Final = 0.8  # that one get waits for other nodes, however many, beyond what its bytes take at ``RATE_MIN``
HERE_S: Final = 0.4  # for our own node, where a get wants a place in it; without one it goes on

log = logging.getLogger("kvstore.cluster")


@dataclass
class Brought:
    """What was brought from other nodes: leading pages, from whom, and from which of their tiers."""

    pages: int = 0
    nodes: Counter[str] = field(default_factory=Counter)
    tiers: Counter[Tier] = field(default_factory=Counter)

    def add(self, more: Brought) -> None:
        """More of them."""
        self.pages += more.pages
        self.nodes.update(more.nodes)
        self.tiers.update(more.tiers)


class Patience:
    """How long one call goes on with other nodes, and how much of that it still waits for those that do not answer.

    Args:
        within_s: for all; None: for what does not bring pages, and as long as pages come they may take as ``RATE_MIN``
            has it.

    Attributes:
        deadline_s: of ``time.monotonic()``.
        left_s: for silence.
        here_s: for our own node's answers, and for pages that another program of this machine is about to bring.
    """

    def __init__(self, within_s: float | None = None, here_s: float = HERE_S) -> None:
        self._grows = within_s is None
        within_s = LOSS_S if within_s is None else within_s
        self.deadline_s = time.monotonic() + within_s
        self.left_s = min(LOSS_S, within_s)
        self.here_s = here_s

    def until_s(self, nbytes: int) -> float:
        """The deadline of a transfer of so many bytes that begins now."""
        return self.deadline_s + (nbytes / RATE_MIN if self._grows else 0.0)

    def came(self, nbytes: int) -> None:
        """So many bytes did."""
        self.extend(nbytes / RATE_MIN)

    def extend(self, seconds: float) -> None:
        """Pages came in that time."""
        self.deadline_s += seconds if self._grows else 0.0

    @property
    def over(self) -> bool:
        """Whether it is."""
        return self.left_s <= 0 or time.monotonic() >= self.deadline_s

    @contextlib.contextmanager
    def asking(self) -> Iterator[float]:
        """Around questions that are answered at once, or not at all: until when."""
        began_s = time.monotonic()
        try:
            yield min(self.deadline_s, began_s + self.left_s)
        finally:
            self.waited(time.monotonic() - began_s)

    def waited(self, seconds: float) -> None:
        """So long for nothing."""
        self.left_s -= seconds

    @contextlib.contextmanager
    def waiting(self) -> Iterator[float]:
        """Around a transfer: how long the other end may be silent, at its beginning and later. That counts where it
        fails; the time in which pages came does not."""
        began_s, silence_s = time.monotonic(), max(0.0, min(SILENCE_S, self.left_s))
        try:
            yield silence_s
        except KVStoreError:
            self.waited(min(2 * silence_s, time.monotonic() - began_s))
            raise


class Elsewhere:
    """For one node's clients in one process. Threads share it.

    Args:
        kept_s: how long what owners told is kept.

    Attributes:
        brought: what gets of this machine have brought.
    """

    def __init__(self, folder: Path, kept_s: float = KEPT_S) -> None:
        self._kept_s = kept_s
        self.brought = BroughtBefore(NodeFolder.at(folder))
        self._peers = PeersFile(folder)
        self._lock = threading.Lock()
        self._links: PeerLinks | None = None
        self._finder: Finder | None = None
        self._mover: PageMover | None = None

    @property
    def alone(self) -> bool:
        """Whether there is no other node."""
        view = self._peers.look()
        return view is None or len(view.peers) < 2

    def seek(
        self,
        chain: WantedChain,
        keys: Keys,
        pages: int,
        without: Collection[str] = (),
        patience: Patience | None = None,
    ) -> list[Stretch]:
        """Where the pages after the first ``pages`` of a chain are, as far as other nodes have them, one after another.

        Of keys whose place in their chain is not known nobody knows the spans.

        Args:
            without: nodes that are not to be named.
            patience: of the call that this is for.
        """
        view = self._peers.look()
        if view is None or len(view.peers) < 2 or pages >= len(keys) or (above := keys.above) is None:
            return []
        finder = self._finder or self._begin(view)
        with (patience or Patience()).asking() as until_s:
            return finder.find(chain, above + keys.hashes, len(above) + pages, until_s, without, chain.closed)

    def read(
        self,
        chain: WantedChain,
        keys: Keys,
        rows: Places,
        pages: int,
        patience: Patience | None = None,
        held: HeldPlaces | None = None,
    ) -> Brought:
        """Read the pages after the first ``pages`` into ``rows``. Rows after those that count may change: once this has
        returned only where they are ``held``, and left."""
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
                if self._read(chain, stretch.node, keys[start:stop], into, patience, brought, held) < stop - start:
                    failed.add(stretch.node)
            except LateBytes:
                break  # these rows are of no use to anybody now
        return brought

    def _read(
        self,
        chain: WantedChain,
        node: str,
        keys: Keys,
        rows: Places,
        patience: Patience,
        brought: Brought,
        held: HeldPlaces | None,
    ) -> int:
        """Read these pages from one node; how many of them came. Raises LateBytes."""
        view, mover, done = self._peers.look(), self._mover, 0
        page_bytes = chain.frame_class.page_bytes
        peer = view.peers.get(node) if view is not None else None
        step = pages_per_request(chain, keys.extras is not None)
        try:
            while peer is not None and mover is not None and done < len(keys):
                request = ReadRequest(chain, keys[done : done + step], 0, page_bytes)
                deadline_s = patience.until_s(len(request.keys) * page_bytes)
                with patience.waiting() as silence_s:
                    got = mover.read(peer, request, rows[done : done + step], deadline_s, silence_s, held)
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
        """Close its connections."""
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
    """Those of the environment. Ones that cannot be used cost the pages of other nodes, never a read here."""
    try:
        return credentials_of(os.environ)
    except InvalidRequest as error:
        log.warning("data servers are not told who we are: %s", error)
        return DialCredentials()
