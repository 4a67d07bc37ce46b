"""LocalNode: a node's files, mapped into this process. Reads need nothing else; only writes need its daemon.

The module also lists the tiers below memory, with their readers.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from kvstore.client.local.channel import SocketChannel
from kvstore.client.local.grants import GrantPool, GrantPools
from kvstore.client.local.hbm import HbmReader
from kvstore.client.local.nvme import NvmeReader, ReadThreads
from kvstore.client.local.peer_reads import Elsewhere
from kvstore.client.local.publisher import Channel, Published
from kvstore.client.local.tier_reader import DramReader, LowerReader, TierReader
from kvstore.client.store import AFTER_FORK
from kvstore.client.workers import Workers
from kvstore.errors import InvalidRequest, NodeUnavailable
from kvstore.model.prefix import Keys, tag_of
from kvstore.model.replica import FrameClass, Tier
from kvstore.shm.counters import TIMED_NS
from kvstore.shm.folder import NodeFolder, read_secret
from kvstore.shm.header import Header, boot_id
from kvstore.shm.index import Index
from kvstore.tier.dram import SegmentMap
from kvstore.wire.control import Message, Op

LOWER_READERS: dict[Tier, Callable[[NodeFolder, ReadThreads], LowerReader]] = {Tier.NVME: NvmeReader}
"""The tiers below memory, the fastest first. To add one, write a ``LowerReader`` class and add a row here."""


def lower_readers(folder: NodeFolder, threads: ReadThreads) -> dict[Tier, LowerReader]:
    """Make a reader of one node for each tier; nothing is opened yet."""
    return {tier: reader(folder, threads) for tier, reader in LOWER_READERS.items()}


_EPOCH, _INCARNATION, _MOUNTS = Header.epoch.position, Header.incarnation.position, Header.mounts.position


class Embedded(Protocol):
    """A node inside this process."""

    def channel(self) -> Channel:
        """A new session with it."""

    def close(self) -> None:
        """End it and remove its files."""


class Ends:
    """Resources to close with a LocalNode, even if it is only dropped or the process exits."""

    def __init__(self, embedded: Embedded | None, workers: Workers, threads: ReadThreads) -> None:
        self.pid = os.getpid()
        self.embedded = embedded
        self.workers = workers
        self.threads = threads
        self.channel: Channel | None = None
        self.pools: GrantPools | None = None

    def end(self) -> None:
        """Close everything, the node last. Does nothing in a forked child: everything belongs to the parent."""
        if os.getpid() != self.pid:
            return
        self.workers.close()
        self.threads.close()
        if self.channel is not None:
            self.channel.close()
        if self.pools is not None:
            self.pools.end()
        if self.embedded is not None:
            self.embedded.close()


class Mapped:
    """One incarnation of a node under one index epoch, mapped. A read may keep using it after it was replaced.

    It is replaced, never changed, when either number changes (but see ``stored.follow``); the index is closed when the
    last reader is done.

    Attributes:
        dram, lower: the readers of each tier of the node, the fastest first. ``tiers``: all of them, in that order.
        hbm: the reader of memory that other processes have mounted.
    """

    __slots__ = (
        "folder",
        "header",
        "words",
        "incarnation",
        "secret",
        "epoch",
        "index",
        "dram",
        "hbm",
        "lower",
        "tiers",
        "_with_hbm",
        "channel",
        "counters",
        "pools",
        "claims",
        "named",
        "published",
        "limited",
        "no_hints_until_ns",
        "timeout_s",
    )

    def __init__(
        self,
        folder: NodeFolder,
        header: Header,
        incarnation: int,
        epoch: int,
        index: Index,
        dram: DramReader,
        lower: Mapping[Tier, LowerReader],
        channel: Channel,
        secret: bytes,
        older: Mapped | None,
        timeout_s: float,
    ) -> None:
        self.folder = folder
        self.header = header
        self.words = header.words
        self.incarnation = incarnation
        self.secret = secret
        self.epoch = epoch
        self.index = index
        self.dram = dram
        self.lower = lower
        self.tiers: tuple[TierReader, ...] = (dram, *lower.values())
        self.hbm: HbmReader = older.hbm if older is not None else HbmReader(folder, header)
        self._with_hbm: Mapping[Tier, LowerReader] = {Tier.HBM: self.hbm, **lower}
        self.channel = channel
        self.counters = channel.counters
        self.pools: GrantPools = older.pools if older is not None else GrantPools(channel)
        self.claims: Claims = older.claims if older is not None else Claims()
        self.named: dict[bytes, int] = older.named if older is not None else {}  # named roots, see ``hints``
        self.limited: set[bytes] = older.limited if older is not None else set()  # roots with a quota
        self.published = Published(folder, header, timeout_s)
        self.no_hints_until_ns: int = older.no_hints_until_ns if older is not None else 0
        self.timeout_s = timeout_s

    @property
    def below(self) -> Mapping[Tier, LowerReader]:
        """Return the readers with which a read continues after DRAM, in this order."""
        return self._with_hbm if self.words[_MOUNTS] else self.lower

    def in_pool(self, keys: Keys) -> Keys:
        """Return the keys that these pages have in this node's pool."""
        return keys.with_tag(tag_of(self.secret, keys.root))

    def exchange(
        self,
        op: Op,
        *,
        count: int = 0,
        a: int = 0,
        b: int = 0,
        flags: int = 0,
        body: Iterable[bytes] = (),
        timeout_s: float | None = None,
    ) -> Message:
        """Make a request that may be repeated, and return its reply. It is sent once more within the time if the daemon
        ended. Raises what ``Channel.request`` and ``PendingReply.result`` do.
        """
        ask = partial(self.channel.request, op, count=count, a=a, b=b, flags=flags, body=body)
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        try:
            return ask(timeout_s=timeout_s).result()
        except NodeUnavailable:
            return ask(timeout_s=max(0.0, deadline - time.monotonic())).result()

    def pool(self, frame_class: FrameClass, root: bytes = b"") -> GrantPool:
        """Return the pool of frames granted ahead for a class; for pages of that root, if it has a quota."""
        return self.pools.of(frame_class, root if root in self.limited else b"")

    def row(self, frame_class: FrameClass) -> int:
        """Return the row of counters for pages of this geometry."""
        return self.counters.row(frame_class.page_bytes, frame_class.page_tokens)

    def object_rows(self) -> Iterator[bytes | None]:
        """Yield the identity row of each object's head that the index names, as its record says; None for each page
        that is not such a head."""
        for reader in self.tiers:
            for _, raw in self.index.scan(reader.tier):
                head = reader.object_head(raw)
                yield head.row if head is not None else None


class LocalNode:
    """One node of this machine as one process uses it. Threads may share it.

    Life: made (nothing mapped) -> mapped by the first verb, again whenever epoch or incarnation change -> ``close``,
    being dropped, or the end of the process. A forked child may not use it: neither the index nor the session is valid
    there. Reads need no daemon; if the files are gone or cannot be trusted, reads miss and writes raise
    ``NodeUnavailable``.

    Args:
        path: the node's folder.
        embedded: the node, if it runs in this process; it ends with this object. None for a daemon's node.
        timeout_s: deadline of a request.
    """

    def __init__(self, path: Path, embedded: Embedded | None = None, timeout_s: float = 5.0) -> None:
        self.path = path
        self.folder = NodeFolder.at(path)
        self.timeout_s = timeout_s
        self.refusal = ""
        self.misses: dict[str, int] = {}  # reason -> matches that ended for it; concurrent threads may lose counts
        self.check_ns = 0  # time of the next ``recheck``
        self.elsewhere: Elsewhere | None = None  # pages of other nodes
        self.workers = Workers(f"kvstore-{self.folder.name}")
        self._pid = os.getpid()
        self._mapped: Mapped | None = None
        self._header_id = (0, 0)
        self._lock = threading.Lock()
        self._threads = ReadThreads(f"kvstore-{self.folder.name}-nvme")
        self._ends = Ends(embedded, self.workers, self._threads)
        self._finalizer = weakref.finalize(self, self._ends.end)
        _nodes.add(self)

    @property
    def name(self) -> str:
        """The node's name."""
        return self.folder.name

    @property
    def embedded(self) -> bool:
        """True if the node runs in this process."""
        return self._ends.embedded is not None

    def mapped(self) -> Mapped | None:
        """Return the node's files for reading; None if there are none that can be trusted now (then everything is a
        miss).

        Raises:
            InvalidRequest: the store is closed, or this is a forked child.
            VersionMismatch: the files are of another version.
        """
        mapped = self._mapped
        if mapped is not None:
            words = mapped.words
            if words[_EPOCH] == mapped.epoch and words[_INCARNATION] == mapped.incarnation and not self.refusal:
                return mapped
        return self._map()

    def writable(self) -> Mapped:
        """Return the node's files for writing. Waits a little for a node that is being created.

        Raises:
            NodeUnavailable: there is no such node, or it is not ready.
            InvalidRequest, VersionMismatch: as ``mapped``.
        """
        mapped = self.mapped()
        if mapped is not None and mapped.channel.ended:
            mapped = self._map()
        deadline = time.monotonic() + self.timeout_s
        while mapped is None:
            if time.monotonic() >= deadline or not self.path.is_dir():
                raise NodeUnavailable(f"{self.name}: no such node on this machine, or it is not ready")
            time.sleep(0.005)
            mapped = self.mapped()
        return mapped

    @property
    def last(self) -> Mapped | None:
        """Return what ``mapped`` returned last, without checking anything."""
        return self._mapped

    def missed(self, reason: str) -> None:
        """Count why a match ended early."""
        self.misses[reason] = self.misses.get(reason, 0) + 1

    def recheck(self, now_ns: int) -> None:
        """Check, for a get after ``check_ns``, whether the folder was purged; mappings do not show that."""
        self.check_ns = now_ns + TIMED_NS + now_ns % TIMED_NS
        if self._mapped is not None and self._identify() != self._header_id:
            self._map()

    def check_open(self) -> None:
        """Raise InvalidRequest if the store is closed, or if this is a forked child."""
        if self.refusal:
            raise InvalidRequest("store", self.refusal)

    def close(self) -> None:
        """End the session; later calls are refused. Existing views stay valid memory, but their contents may change."""
        if not self.refusal:
            self.refusal = "is closed"
            mapped, self._mapped = self._mapped, None
            if mapped is not None:
                mapped.hbm.close()
            if self.elsewhere is not None:
                self.elsewhere.close()
            self._finalizer()

    # --- mapping ----------------------------------------------------------------------------------------------------

    def _identify(self) -> tuple[int, int]:
        try:
            status = os.stat(self.folder.header)
        except OSError:
            return 0, 0
        return status.st_dev, status.st_ino

    def _map(self) -> Mapped | None:
        """Map the node's current files. If the incarnation is the same, everything but the index is kept."""
        self.check_open()  # before the lock, which another thread may have held at a fork
        with self._lock:
            self.check_open()
            old = self._mapped
            identity = self._identify()
            header = old.header if old is not None and identity == self._header_id else self._open_header()
            if header is None:
                self._unmap(old)
                return None
            epoch, incarnation = header.words[_EPOCH], header.words[_INCARNATION]
            if old is not None and (incarnation != old.incarnation or old.channel.ended):
                self._unmap(old)
                old = None
            segment = old.dram.segment if old is not None else SegmentMap.open(self.folder, incarnation)
            index = Index.open_reader(self.folder, epoch)
            secret = old.secret if old is not None else read_secret(self.folder, incarnation)
            if segment is None or index is None or secret is None:
                return None  # the daemon is about to create it, or the epoch will change
            channel = self._channel(old, incarnation)
            dram = old.dram if old is not None else DramReader(self.folder, incarnation, segment)
            lower = old.lower if old is not None else lower_readers(self.folder, self._threads)
            self._header_id = identity
            parts = self.folder, header, incarnation, epoch, index, dram, lower, channel, secret, old
            self._mapped = Mapped(*parts, self.timeout_s)
            self._ends.pools = self._mapped.pools
            return self._mapped

    def _open_header(self) -> Header | None:
        """Return the header if the folder can be trusted and the header is of this boot."""
        header = Header.open(self.folder) if self.folder.trusted() else None
        return header if header is not None and header.boot_id == boot_id() else None

    def _channel(self, old: Mapped | None, incarnation: int) -> Channel:
        if old is not None:
            return old.channel
        ends = self._ends
        if ends.embedded is None:
            ends.channel = channel = SocketChannel(self.path, self.timeout_s, incarnation=f"{incarnation:016x}")
            channel.begin()
        elif ends.channel is None:
            ends.channel = ends.embedded.channel()
        return ends.channel

    def _unmap(self, old: Mapped | None) -> None:
        """Drop the old incarnation, whose files may not be used any more, and end its session."""
        self._mapped = None
        if old is not None and self._ends.embedded is None:
            old.channel.close()
            old.pools.end()

    def _after_fork(self) -> None:
        self.refusal = AFTER_FORK.format(self._pid)


_nodes: weakref.WeakSet[LocalNode] = weakref.WeakSet()


def _forked() -> None:
    for node in list(_nodes):
        node._after_fork()


os.register_at_fork(after_in_child=_forked)


class Claims:
    """Records which writer of a session writes which pages, so that no two writers get the same frames. Threads may
    share it.

    The node knows sessions, not writers. A shard that asks again for its group's pages gets the frames that its session
    already has, because a request may have been lost with the daemon. All writers of a session are in one process, so
    this class decides which may ask: a page of a shard and group belongs to one writer until that writer has sealed or
    revoked it, regardless of daemon restarts and deadlines. A dropped writer has no claims.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writers: weakref.WeakKeyDictionary[object, tuple[int, int, set[bytes]]] = weakref.WeakKeyDictionary()

    def claim(self, writer: object, group: int, shard: int, keys: Sequence[bytes]) -> int:
        """Claim as many leading ``keys`` for this writer and shard as no other writer has; return how many."""
        with self._lock:
            theirs = [claim[2] for claim in self._writers.values() if claim[:2] == (group, shard)]
            count = next((i for i, key in enumerate(keys) if any(key in pages for pages in theirs)), len(keys))
            self._writers[writer] = group, shard, set(keys[:count])
        return count

    def release(self, writer: object) -> None:
        """Release all claims of a writer that has sealed or revoked its pages and will not write again."""
        with self._lock:
            self._writers.pop(writer, None)
