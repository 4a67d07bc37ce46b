"""``LocalNode``: a node on this machine, as a process uses it. The process maps the node's files (``MappedNode``),
which is enough for reads. Only writes need the node's daemon."""

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
from kvstore.client.local.peer_reads import PeerReader
from kvstore.client.local.pool_objects import PoolObjects
from kvstore.client.local.publisher import Channel, PutLogReader
from kvstore.client.local.tier_reader import DramReader, LowerReader, TierReader
from kvstore.client.store import AFTER_FORK
from kvstore.client.workers import Workers
from kvstore.errors import InvalidRequest, NodeUnavailable
from kvstore.model.prefix import Keys, tag_of
from kvstore.model.replica import FrameClass, Tier
from kvstore.shm.counters import TIMED_NS
from kvstore.shm.folder import NodeFolder, read_secret
from kvstore.shm.header import DaemonState, Header, boot_id
from kvstore.shm.index import Index
from kvstore.tier.dram import SegmentMap
from kvstore.wire.control import Message, Op

LOWER_READERS: dict[Tier, Callable[[NodeFolder, ReadThreads], LowerReader]] = {Tier.NVME: NvmeReader}
"""The lower tiers, the fastest first. To add one, write a ``LowerReader`` class and add a row here."""

_EPOCH, _INCARNATION, _MOUNTS = Header.epoch.position, Header.incarnation.position, Header.mounts.position
_NAMES_FORGOTTEN, _STATE = Header.names_forgotten.position, Header.state.position
_READY = int(DaemonState.READY)


class Embedded(Protocol):
    """A node that runs in this process."""

    def channel(self) -> Channel:
        """Return a channel with a new session."""

    def close(self) -> None:
        """End the node and remove its files."""


class _Resources:
    """The resources of a ``LocalNode``. They are closed with it, even if it is only dropped or the process exits."""

    def __init__(self, embedded: Embedded | None, workers: Workers, threads: ReadThreads) -> None:
        self.pid = os.getpid()
        self.embedded = embedded
        self.workers = workers
        self.threads = threads
        self.channel: Channel | None = None
        self.pools: GrantPools | None = None

    def close(self) -> None:
        """Close everything, the node last. Does nothing in a forked child, because the parent owns everything."""
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


class MappedNode:
    """The mapped files of one incarnation of a node, under one epoch of its index.

    When the incarnation or the epoch changes, the owner replaces the whole object (only ``index_lookup.reopen_index``
    changes it in place). A read may continue with the old object. The old index is closed when its last reader is done.

    Attributes:
        dram: the reader of DRAM.
        lower: the readers of the lower tiers, the fastest first.
        tiers: ``dram`` and then ``lower``.
        hbm: the reader of memory that other processes have mounted.
        claims: which writers of this session write which pages.
        named: the roots whose names the node has received, see ``hints``.
        limited: the roots whose tenants have a quota.
        no_hints_until_ns: when hints are sent again to a node that was silent.
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
        older: MappedNode | None,
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
        self.named: dict[bytes, int] = older.named if older is not None else {}
        self.limited: set[bytes] = older.limited if older is not None else set()
        self.published = PutLogReader(folder, header, timeout_s)
        self.no_hints_until_ns: int = older.no_hints_until_ns if older is not None else 0
        self.timeout_s = timeout_s

    @property
    def below(self) -> Mapping[Tier, LowerReader]:
        """The readers with which a read continues after DRAM, in order: mounted memory, if there is any, and then the
        lower tiers."""
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
        """Send a request and return its reply. If the daemon ends before it replies, send the request once more within
        the time, so the request must be one that can be repeated. Raises the errors of ``Channel.request`` and
        ``PendingReply.result``."""
        send = partial(self.channel.request, op, count=count, a=a, b=b, flags=flags, body=body)
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        try:
            return send(timeout_s=timeout_s).result()
        except NodeUnavailable:
            return send(timeout_s=max(0.0, deadline - time.monotonic())).result()

    def pool(self, frame_class: FrameClass, root: bytes = b"") -> GrantPool:
        """Return the pool of frames of this class that are granted ahead. A root with a quota has pools of its own."""
        return self.pools.of(frame_class, root if root in self.limited else b"")

    @property
    def publishes(self) -> bool:
        """True if puts can be published: this session has a log, and the node is serving. A quota does not matter,
        because a tenant is charged when frames are granted."""
        return self.channel.publisher is not None and self.words[_STATE] == _READY

    def is_named(self, root: bytes) -> bool:
        """Return whether the node has the name of this root, and has not forgotten it since."""
        return self.named.get(root) == self.words[_NAMES_FORGOTTEN]

    def row(self, frame_class: FrameClass) -> int:
        """Return the row of this session's counters for pages of this class."""
        return self.counters.row(frame_class.page_bytes, frame_class.page_tokens)

    def object_rows(self) -> Iterator[bytes | None]:
        """Yield the identity row of each object's head in the index, as its record proves it. Yield None for each entry
        that is not a head."""
        for reader in self.tiers:
            for _, raw in self.index.scan(reader.tier):
                head = reader.object_head(raw)
                yield head.row if head is not None else None


class LocalNode:
    """A node on this machine, as one process uses it. Thread-safe.

    The first call maps the node's files. They are mapped again when the epoch or the incarnation changes. ``close``
    ends it, and so does dropping it or the end of the process. A forked child cannot use it, since neither the index
    nor the session is valid there.

    If the files do not exist or cannot be trusted, reads miss and writes raise ``NodeUnavailable``.

    Args:
        path: the node's folder.
        embedded: the node, if it runs in this process; it ends with this object. None for the node of a daemon.
        timeout_s: the longest time that a request may take.

    Attributes:
        refusal: why calls are refused; "" while the store is open.
        last: the last result of ``mapped``.
        misses: the number of matches that ended early, by reason. Concurrent threads may lose counts.
        check_ns: when ``recheck`` is due.
        peer_reader: reads pages of other nodes; None if this process does not.
        pool_objects: reads objects of other nodes; None if this process does not.
    """

    def __init__(self, path: Path, embedded: Embedded | None = None, timeout_s: float = 5.0) -> None:
        self.path = path
        self.folder = NodeFolder.at(path)
        self.timeout_s = timeout_s
        self.refusal = ""
        self.misses: dict[str, int] = {}
        self.check_ns = 0
        self.peer_reader: PeerReader | None = None
        self.pool_objects: PoolObjects | None = None
        self.workers = Workers(f"kvstore-{self.folder.name}")
        self._pid = os.getpid()
        self.last: MappedNode | None = None
        self._header_path = os.fspath(self.folder.header)
        self._header_id = (0, 0)
        self._lock = threading.Lock()
        self._threads = ReadThreads(f"kvstore-{self.folder.name}-nvme")
        self._resources = _Resources(embedded, self.workers, self._threads)
        self._finalizer = weakref.finalize(self, self._resources.close)
        _nodes.add(self)

    @property
    def name(self) -> str:
        """The node's name."""
        return self.folder.name

    @property
    def embedded(self) -> bool:
        """True if the node runs in this process."""
        return self._resources.embedded is not None

    def mapped(self) -> MappedNode | None:
        """Return the node's files for reading. Return None if there are no files that can be trusted now, so that
        everything is a miss.

        Raises:
            InvalidRequest: the store is closed, or this is a forked child.
            VersionMismatch: the files are from another version.
        """
        mapped = self.last
        if mapped is not None:
            words = mapped.words
            if words[_EPOCH] == mapped.epoch and words[_INCARNATION] == mapped.incarnation and not self.refusal:
                return mapped
        return self._map()

    def writable(self) -> MappedNode:
        """Return the node's files for writing. Waits up to ``timeout_s`` for a node that is being created.

        Raises:
            NodeUnavailable: there is no such node, or it is not ready.
            InvalidRequest, VersionMismatch: as for ``mapped``.
        """
        mapped = self.mapped()
        if mapped is not None and mapped.channel.ended:
            mapped = self._map()
        if mapped is not None:
            return mapped
        deadline = time.monotonic() + self.timeout_s
        while mapped is None:
            if time.monotonic() >= deadline or not self.path.is_dir():
                raise NodeUnavailable(f"{self.name}: no such node on this machine, or it is not ready")
            time.sleep(0.005)
            mapped = self.mapped()
        return mapped

    def missed(self, reason: str) -> None:
        """Count a match that ended early for this reason."""
        self.misses[reason] = self.misses.get(reason, 0) + 1

    def recheck(self, now_ns: int) -> None:
        """Check whether the folder was purged or recreated, which mappings do not show. A get calls this once
        ``check_ns`` has passed."""
        self.check_ns = now_ns + TIMED_NS + now_ns % TIMED_NS
        if self.last is not None and self._identify() != self._header_id:
            self._map()

    def check_open(self) -> None:
        """Raise InvalidRequest if the store is closed, or if this is a forked child."""
        if self.refusal:
            raise InvalidRequest("store", self.refusal)

    def close(self) -> None:
        """End the session and refuse later calls. Existing views stay valid memory, but their contents may change."""
        if not self.refusal:
            self.refusal = "is closed"
            mapped, self.last = self.last, None
            if mapped is not None:
                mapped.hbm.close()
            if self.peer_reader is not None:
                self.peer_reader.close()
            if self.pool_objects is not None:
                self.pool_objects.close()
            self._finalizer()

    # --- mapping ----------------------------------------------------------------------------------------------------

    def _identify(self) -> tuple[int, int]:
        """Return the device and inode of the header file; (0, 0) if there is none."""
        try:
            status = os.stat(self._header_path)
        except OSError:
            return 0, 0
        return status.st_dev, status.st_ino

    def _map(self) -> MappedNode | None:
        """Map the node's current files. If the incarnation has not changed, everything but the index is reused."""
        self.check_open()  # before the lock: in a forked child, another thread may have held it at the fork
        with self._lock:
            self.check_open()
            old = self.last
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
                return None  # the daemon is about to create the file, or to change the epoch
            channel = self._channel(old, incarnation)
            dram = old.dram if old is not None else DramReader(self.folder, incarnation, segment)
            lower = old.lower if old is not None else self._lower_readers()
            self._header_id = identity
            parts = self.folder, header, incarnation, epoch, index, dram, lower, channel, secret, old
            self.last = MappedNode(*parts, self.timeout_s)
            self._resources.pools = self.last.pools
            return self.last

    def _lower_readers(self) -> dict[Tier, LowerReader]:
        return {tier: reader(self.folder, self._threads) for tier, reader in LOWER_READERS.items()}

    def _open_header(self) -> Header | None:
        """Return the header, if the folder can be trusted and the header was written since the machine booted."""
        header = Header.open(self.folder) if self.folder.is_trusted() else None
        return header if header is not None and header.boot_id == boot_id() else None

    def _channel(self, old: MappedNode | None, incarnation: int) -> Channel:
        if old is not None:
            return old.channel
        resources = self._resources
        if resources.embedded is None:
            resources.channel = channel = SocketChannel(self.path, self.timeout_s, incarnation=f"{incarnation:016x}")
            channel.begin()
        elif resources.channel is None:
            resources.channel = resources.embedded.channel()
        return resources.channel

    def _unmap(self, old: MappedNode | None) -> None:
        """Drop the files of an old incarnation, which are no longer valid, and end its session."""
        self.last = None
        if old is not None and self._resources.embedded is None:
            old.channel.close()
            old.pools.end()

    def _after_fork(self) -> None:
        self.refusal = AFTER_FORK.format(self._pid)


_nodes: weakref.WeakSet[LocalNode] = weakref.WeakSet()


def _refuse_in_child() -> None:
    for node in list(_nodes):
        node._after_fork()


os.register_at_fork(after_in_child=_refuse_in_child)


class Claims:
    """The pages that each writer of a session writes. It keeps two writers from getting the same frames. Thread-safe.

    The node distinguishes sessions, not writers. A shard may request its group's pages twice, because the first reply
    was lost when the daemon ended. The node then returns the frames that the session already has. All writers of a
    session are in one process, so this class decides which of them may request frames. A page of a shard and group
    belongs to one writer until that writer has sealed or revoked it, regardless of daemon restarts and deadlines. When
    a writer is dropped, its claims end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writers: weakref.WeakKeyDictionary[object, tuple[int, int, set[bytes]]] = weakref.WeakKeyDictionary()

    def claim(self, writer: object, group: int, shard: int, keys: Sequence[bytes]) -> int:
        """Claim the leading ``keys`` that no other writer of this group and shard has claimed. Return their number."""
        with self._lock:
            claimed = [claim[2] for claim in self._writers.values() if claim[:2] == (group, shard)]
            count = next((i for i, key in enumerate(keys) if any(key in pages for pages in claimed)), len(keys))
            self._writers[writer] = group, shard, set(keys[:count])
        return count

    def release(self, writer: object) -> None:
        """Release all claims of a writer. Call it when the writer has sealed or revoked its pages."""
        with self._lock:
            self._writers.pop(writer, None)
