"""LocalNode: a node's files as this process maps them. Everything a read needs is here; only writes need its daemon.

Which tiers this machine's clients read below memory, and how.
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
"""The tiers below memory, the fastest first. Another one is a class (``LowerReader``) and a row here."""


def lower_readers(folder: NodeFolder, threads: ReadThreads) -> dict[Tier, LowerReader]:
    """A reader for each, of one node; nothing is opened yet."""
    return {tier: reader(folder, threads) for tier, reader in LOWER_READERS.items()}


_EPOCH, _INCARNATION, _MOUNTS = Header.epoch.position, Header.incarnation.position, Header.mounts.position


class Embedded(Protocol):
    """A node inside this process."""

    def channel(self) -> Channel:
        """A new session with it."""

    def close(self) -> None:
        """End it and remove its files."""


class Ends:
    """What has to be ended with a LocalNode, also when it is merely dropped or the process exits."""

    def __init__(self, embedded: Embedded | None, workers: Workers, threads: ReadThreads) -> None:
        self.pid = os.getpid()
        self.embedded = embedded
        self.workers = workers
        self.threads = threads
        self.channel: Channel | None = None
        self.pools: GrantPools | None = None

    def end(self) -> None:
        """Close everything, the node last. In a forked child nothing is done: all of it is the parent's."""
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
    """One incarnation of a node under one index epoch, mapped. Reads that hold it may finish with it at any time.

    Replaced, never changed, when either number changes (but see ``stored.follow``); the index is let go of when the
    last reader has.

    Attributes:
        dram, lower: how each tier of the node is read; ``lower`` the fastest first. ``tiers``: all, in that order.
        hbm: how memory is read that other processes have mounted.
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
        "tell_ns",
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
        self.named: dict[bytes, int] = older.named if older is not None else {}  # roots as told, see ``naming``
        self.limited: set[bytes] = older.limited if older is not None else set()  # roots with a quota
        self.published = Published(folder, header, timeout_s)
        self.tell_ns: int = older.tell_ns if older is not None else 0  # when it may be told again: it did not listen
        self.timeout_s = timeout_s

    @property
    def below(self) -> Mapping[Tier, LowerReader]:
        """What a read goes on with where DRAM ends, in this order."""
        return self._with_hbm if self.words[_MOUNTS] else self.lower

    def in_pool(self, keys: Keys) -> Keys:
        """The same pages by the keys that they have in this node's pool."""
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
        """Request and reply; asked once more in that time where the daemon went away. For what may be asked twice.
        Raises what ``Channel.request`` and ``PendingReply.result`` do.
        """
        ask = partial(self.channel.request, op, count=count, a=a, b=b, flags=flags, body=body)
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        try:
            return ask(timeout_s=timeout_s).result()
        except NodeUnavailable:
            return ask(timeout_s=max(0.0, deadline - time.monotonic())).result()

    def pool(self, frame_class: FrameClass, root: bytes = b"") -> GrantPool:
        """The frames of a class granted to us ahead of need; for pages of that root, where it has a quota."""
        return self.pools.of(frame_class, root if root in self.limited else b"")

    def row(self, frame_class: FrameClass) -> int:
        """Where pages of this geometry are counted."""
        return self.counters.row(frame_class.page_bytes, frame_class.page_tokens)

    def object_rows(self) -> Iterator[bytes | None]:
        """Identity rows of the heads of all objects that the index names, as they say themselves; None for each page
        that is not such a head."""
        for reader in self.tiers:
            for _, raw in self.index.scan(reader.tier):
                head = reader.object_head(raw)
                yield head.row if head is not None else None


class LocalNode:
    """One node of this machine as one process uses it. Threads may share it.

    Life: made (nothing mapped) -> mapped by the first verb, again whenever epoch or incarnation change -> ``close``,
    being dropped, or the end of the process. In a forked child it is refused: neither the index nor the session may be
    used there. Reads need no daemon; where the files are gone or cannot be trusted they miss, and writes raise
    ``NodeUnavailable``.

    Args:
        path: the node's folder.
        embedded: the node, where it lives in this process; it ends with this object. None: a daemon's.
        timeout_s: deadline of a request.
    """

    def __init__(self, path: Path, embedded: Embedded | None = None, timeout_s: float = 5.0) -> None:
        self.path = path
        self.folder = NodeFolder.at(path)
        self.timeout_s = timeout_s
        self.refusal = ""
        self.misses: dict[str, int] = {}  # reason -> how often a match ended for it; threads may lose a count
        self.check_ns = 0  # when a get has to ``recheck``
        self.elsewhere: Elsewhere | None = None  # pages of other nodes, for those who want them
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
        """Whether the node lives in this process."""
        return self._ends.embedded is not None

    def mapped(self) -> Mapped | None:
        """The node's files for reading; None where there are none to be trusted now (everything is a miss).

        Raises:
            InvalidRequest: closed, or in a forked child.
            VersionMismatch: the files are of another version.
        """
        mapped = self._mapped
        if mapped is not None:
            words = mapped.words
            if words[_EPOCH] == mapped.epoch and words[_INCARNATION] == mapped.incarnation and not self.refusal:
                return mapped
        return self._map()

    def writable(self) -> Mapped:
        """The node's files for writing; waits a little for a node that is just being made.

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
        """What ``mapped`` returned last; nothing is looked at."""
        return self._mapped

    def missed(self, reason: str) -> None:
        """Count why a match ended early."""
        self.misses[reason] = self.misses.get(reason, 0) + 1

    def recheck(self, now_ns: int) -> None:
        """For a get after ``check_ns``, which is timed: look whether the folder was purged, which no mapping tells."""
        self.check_ns = now_ns + TIMED_NS + now_ns % TIMED_NS
        if self._mapped is not None and self._identify() != self._header_id:
            self._map()

    def check_open(self) -> None:
        """Raises InvalidRequest where the store is closed, or this is a forked child."""
        if self.refusal:
            raise InvalidRequest("store", self.refusal)

    def close(self) -> None:
        """End the session; later calls are refused. Views handed out stay valid as memory, not as pages."""
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
        """Map what is there now. Of the same incarnation everything is kept but the index."""
        self.check_open()  # before the lock, which another thread may have held during a fork
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
                return None  # the daemon is about to make it, or there will be another epoch
            channel = self._channel(old, incarnation)
            dram = old.dram if old is not None else DramReader(self.folder, incarnation, segment)
            lower = old.lower if old is not None else lower_readers(self.folder, self._threads)
            self._header_id = identity
            parts = self.folder, header, incarnation, epoch, index, dram, lower, channel, secret, old
            self._mapped = Mapped(*parts, self.timeout_s)
            self._ends.pools = self._mapped.pools
            return self._mapped

    def _open_header(self) -> Header | None:
        """The header, if we may trust the folder; that of an earlier boot is nothing to read by."""
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
        """Nothing of the old incarnation may be used any more; its session ends."""
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
    """Which writer of a session writes which pages, so that no two of them get the same frames. Threads may share it.

    The node knows sessions, not writers: a shard that asks again for its group's pages is given the frames that its
    session has for them, because a request may have been lost with the daemon. All writers of a session are of one
    process, so that it is decided here who asks: a page of a shard and group is one writer's until that one has sealed
    or revoked it, whatever becomes of the daemon and of deadlines meanwhile. A writer that is dropped claims nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writers: weakref.WeakKeyDictionary[object, tuple[int, int, set[bytes]]] = weakref.WeakKeyDictionary()

    def claim(self, writer: object, group: int, shard: int, keys: Sequence[bytes]) -> int:
        """How many leading ``keys`` this writer may ask for as that shard; the next one is another writer's."""
        with self._lock:
            theirs = [claim[2] for claim in self._writers.values() if claim[:2] == (group, shard)]
            count = next((i for i, key in enumerate(keys) if any(key in pages for pages in theirs)), len(keys))
            self._writers[writer] = group, shard, set(keys[:count])
        return count

    def release(self, writer: object) -> None:
        """This writer has said its last word about its pages, and stores nothing more."""
        with self._lock:
            self._writers.pop(writer, None)
