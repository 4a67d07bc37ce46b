"""Elsewhere: pages that other nodes of the pool have, for what a node's own tiers do not.

A client asks by itself, without its node's daemon: it reads who there is in the node's folder, asks the owners of the
spans, and reads from the nodes that they name. What comes was proven by its sender, and its checksums are compared
here. Whatever goes wrong with another node is a shorter match; one that does not answer is left alone for a while.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.client.buffers import Rows
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.model.prefix import Keys
from kvstore.model.replica import Tier
from kvstore.model.span import fingerprints, span_start
from kvstore.transfer.base import DialCredentials
from kvstore.transfer.credentials import credentials_of
from kvstore.transfer.finding import KEPT_S, Finder, Stretch
from kvstore.transfer.links import PeerLinks
from kvstore.transfer.peers import PeersFile, PoolView
from kvstore.transfer.pulling import pull
from kvstore.transfer.reading import ReadRequest, WantedChain, pages_per_request

READ_S: Final = 5.0  # for what one get brings from other nodes; a silent one is dead much earlier
SEEN_MAX: Final = 1 << 16  # pages of which a process knows that it has brought them

log = logging.getLogger("kvstore.cluster")


@dataclass
class Brought:
    """What a get brought from other nodes: leading pages, from whom, and from which of their tiers."""

    pages: int = 0
    nodes: dict[str, int] = field(default_factory=dict)
    tiers: dict[Tier, int] = field(default_factory=dict)


class BroughtBefore:
    """The pages that a process has brought of late. Threads share it; a race costs a page kept too early or late."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def leading(self, hashes: list[bytes]) -> int:
        """How many leading ones of these were brought before. All of them are from now on."""
        seen, count = self._keys, 0
        while count < len(hashes) and hashes[count] in seen:
            count += 1
        for key in hashes:
            seen[key] = None
        with contextlib.suppress(KeyError):  # another thread was faster
            while len(seen) > SEEN_MAX:
                seen.popitem(last=False)
        return count


class Elsewhere:
    """For one node's clients in one process. Threads share it.

    Args:
        kept_s: how long what owners told is kept.

    Attributes:
        brought: what its gets have brought.
        gathering: held while pages are brought to be stored: who wants the same finds them here then.
        behind: taken while what a get brought is stored behind it.
    """

    def __init__(self, folder: Path, kept_s: float = KEPT_S) -> None:
        self._kept_s = kept_s
        self.brought = BroughtBefore()
        self.gathering = threading.Lock()
        self.behind = threading.Semaphore()
        self._peers = PeersFile(folder)
        self._lock = threading.Lock()
        self._links: PeerLinks | None = None
        self._finder: Finder | None = None

    @property
    def alone(self) -> bool:
        """Whether there is no other node."""
        view = self._peers.look()
        return view is None or len(view.peers) < 2

    def seek(self, keys: Keys, pages: int, closed: bool, without: Collection[str] = ()) -> list[Stretch]:
        """Where the pages after the first ``pages`` of a chain are, as far as other nodes have them, one after another.

        Of keys that do not begin at the root nobody knows the spans.

        Args:
            closed: see ``WantedChain``.
            without: nodes that are not to be named.
        """
        view = self._peers.look()
        if view is None or len(view.peers) < 2 or keys.before != keys.root or pages >= len(keys):
            return []
        finder = self._finder or self._begin(view)
        named = fingerprints(b"".join(keys.hashes))
        spans = named[span_starts(len(keys))[pages:]]
        return finder.find(named[pages:], spans, time.monotonic() + READ_S, without, closed)

    def read(self, chain: WantedChain, keys: Keys, rows: Rows, pages: int) -> Brought:
        """Read the pages after the first ``pages`` into ``rows``. Rows after those that count may change."""
        brought, failed = Brought(), set[str]()
        limit, deadline_s = min(len(keys), pages + len(rows)), time.monotonic() + READ_S
        while pages + brought.pages < limit and time.monotonic() < deadline_s:
            start = pages + brought.pages
            stretch = next(iter(self.seek(keys, start, chain.closed, failed)), None)
            if stretch is None:
                break
            stop = min(start + stretch.stop, limit)
            into = rows[start - pages : stop - pages]
            if self._read(chain, stretch.node, keys[start:stop], into, deadline_s, brought) < stop - start:
                failed.add(stretch.node)
        return brought

    def _read(self, chain: WantedChain, node: str, keys: Keys, rows: Rows, deadline_s: float, brought: Brought) -> int:
        """Read these pages from one node; how many of them came."""
        view, links, done = self._peers.look(), self._links, 0
        peer = view.peers.get(node) if view is not None else None
        step = pages_per_request(chain, keys.extras is not None)
        with contextlib.suppress(KVStoreError):
            while peer is not None and links is not None and done < len(keys):
                part, into = keys[done : done + step], rows[done : done + step]
                with links.to(peer, deadline_s) as connection:
                    got = pull(connection, ReadRequest(chain, part, 0, into.shape[1]), into, deadline_s)
                done += got.pages
                brought.pages += got.pages
                brought.nodes[node] = brought.nodes.get(node, 0) + got.pages
                for tier, count in got.tiers.items():
                    brought.tiers[tier] = brought.tiers.get(tier, 0) + count
                if got.pages < len(part):
                    break
        return done

    def close(self) -> None:
        """Close its connections."""
        with self._lock:
            links, self._links, self._finder = self._links, None, None
        if links is not None:
            links.close()

    def _begin(self, view: PoolView) -> Finder:
        with self._lock:
            if self._finder is None:
                self._links = PeerLinks(view.pool, f"client of {view.node}", _credentials())
                self._finder = Finder(self._peers, self._links, self._kept_s)
            return self._finder


def _credentials() -> DialCredentials:
    """Those of the environment. Ones that cannot be used cost the pages of other nodes, never a read here."""
    try:
        return credentials_of(os.environ)
    except InvalidRequest as error:
        log.warning("data servers are not told who we are: %s", error)
        return DialCredentials()


@lru_cache(maxsize=64)
def span_starts(pages: int) -> npt.NDArray[np.int64]:
    """For each page of a chain of that length the first one of its span."""
    return np.array([span_start(page) for page in range(pages)], np.int64)
