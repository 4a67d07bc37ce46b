"""The pages of one layout, salt and adapter in one store, with the verbs that users call most."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

from kvstore.client.buffers import DeviceRows, Rows, device_rows_to_fill, on_device, rows_to_fill
from kvstore.client.device_link import BOUNCE_BYTES, COPY_DEADLINE_S, link_of
from kvstore.client.match import Lease, Match
from kvstore.client.reader import Reader
from kvstore.client.writer import Writer
from kvstore.device.host_memory import empty
from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys, as_tokens, check_extras, root_key
from kvstore.model.replica import FrameClass, Tier
from kvstore.model.retention import Retention, check_replicas, hints_of, replicated
from kvstore.model.shard import Shard


class PendingPut(ABC):
    """A put whose last acknowledgements have not been read. Made by ``PrefixCache.put_async``; the caller may reuse its
    buffer.

    ``result`` reads the acknowledgements. After a failure some leading pages may be stored, and a later put of the same
    prompt continues where this one stopped. Any thread may use it.
    """

    __slots__ = ()

    @abstractmethod
    def result(self) -> int:
        """Wait for the acknowledgements, and return the number of new pages. ``PrefixCache.put`` says why it may be
        smaller than expected.

        Further calls have the same result or exception.

        Raises:
            QuotaExceeded: nothing was stored, because the tenant's quota is used up.
            NodeUnavailable, DeadlineExceeded: the node did not acknowledge in time; some pages may be stored.
        """


class PrefixCache(ABC):
    """The pages of one layout, tenant salt and adapter. Made by ``Store.cache``, and valid as long as its store.

    A cache holds no pages and no session of its own. Any thread may use it. ``tokens`` in every verb is a prompt (any
    integer sequence or array, an ndarray is fastest) or ``Keys``. A prompt matches at most all tokens but the last one,
    which has to be computed for its logits. ``Keys`` name pages directly.

    Over gRPC each verb is at least one round trip, so reads also raise ``NodeUnavailable`` or ``DeadlineExceeded`` if
    the node is not responding.

    Attributes:
        layout, salt, adapter, replicas: the arguments of ``Store.cache``.
        root: 16 bytes with which every chain of this cache starts.
        page_bytes: the size of a page.
    """

    def __init__(self, layout: Layout, salt: str, adapter: str, replicas: int | None = None) -> None:
        check_replicas(replicas)
        self.layout = layout
        self.replicas = replicas
        self.salt = salt
        self.adapter = adapter
        self.root = root_key(layout, salt, adapter)
        self.page_bytes = layout.page_bytes
        self.frame_class = FrameClass(layout.page_bytes, layout.page_tokens, layout.layers)
        self._page_tokens = layout.page_tokens
        self._whole = Shard(layout)

    # --- keys -------------------------------------------------------------------------------------------------------

    def keys(self, tokens: Any, extras: Sequence[bytes] | None = None) -> Keys:
        """Return the keys of all full pages of ``tokens``, for several calls, and for other stores.

        Keys contain the pool's current secret. If the pool was recreated, they are computed again on use, which costs
        only time.

        Args:
            extras: for each full page, the digest of the media inside it (``b""`` if there are none); or None.

        Raises:
            InvalidRequest: tokens are empty, negative, too large or not integers; extras do not fit the pages.
        """
        return Keys.of(as_tokens(tokens), self._page_tokens, self.root, extras, self._tag())

    @abstractmethod
    def _tag(self) -> bytes:
        """Return the pool's key suffix for this root, or ``b""`` if unknown."""

    def _page_keys(self, tokens: Any, extras: Sequence[bytes] | None) -> Keys:
        """Return the keys of all full pages."""
        if type(tokens) is Keys:
            if tokens.root != self.root or tokens.page_tokens != self._page_tokens:
                raise InvalidRequest("tokens", "must be keys of this cache's layout, salt and adapter")
            if extras is not None:
                raise InvalidRequest("extras", "must be absent: the keys contain them")
            tag = self._tag()
            return tokens if tokens.tag == tag else tokens.with_tag(tag)
        return self.keys(tokens, extras)

    def _keys_to_store(
        self,
        tokens: Any,
        extras: Sequence[bytes] | None,
        retention: Retention | Sequence[Retention],
        replicas: int | None = None,
    ) -> Keys:
        """Return the keys of all full pages, with the hint bytes to store."""
        keys = self._page_keys(tokens, extras)
        keys = keys.hinted(hints_of(retention, len(keys), self._page_tokens)) if retention != () else keys
        return keys.hinted(replicated(keys.hints, len(keys))) if self._copies(replicas) > 1 else keys

    def _copies(self, replicas: int | None) -> int:
        """Return how many copies a put asks for, given its ``replicas``; 1 if the node decides. Raises
        InvalidRequest."""
        check_replicas(replicas)
        return replicas or self.replicas or 1

    def _matchable_keys(self, tokens: Any, extras: Sequence[bytes] | None) -> Keys:
        """Return the keys of the pages that a prompt can match: all but the page with its last token."""
        if type(tokens) is Keys:
            return self._page_keys(tokens, extras)
        array = as_tokens(tokens)
        if extras is not None:
            check_extras(extras, len(array) // self._page_tokens)
            extras = extras[: (len(array) - 1) // self._page_tokens]
        return Keys.of(array[:-1], self._page_tokens, self.root, extras, self._tag())

    # --- reading ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def lookup(self, tokens: Any, extras: Sequence[bytes] | None = None) -> Match:
        """Return the length of the longest stored prefix, as a hint: no page is read, kept or marked as used.

        Raises:
            InvalidRequest: as ``keys``, or the store is closed.
        """

    @abstractmethod
    def get(
        self, tokens: Any, out: Any = None, *, extras: Sequence[bytes] | None = None, verify: bool | None = None
    ) -> Match:
        """Copy the longest stored prefix into ``out``. Every page is proven to be the requested one.

        Args:
            out: ``[pages, page_bytes]``: any C-contiguous writable buffer that is large enough for all requested pages.
                This may be numpy or torch of any dtype and shape, bytearray, memoryview, or device memory (torch CUDA,
                ``__cuda_array_interface__``, DLPack), which is written after the work queued in its stream. If None,
                ``match.data`` is allocated.
            verify: also compare the checksums of every layer. None: the store's setting decides. Pages from NVMe and
                over gRPC are always verified.

        Rows after the match are unchanged, with two exceptions: they may have parts of a page that was evicted during
        its copy, and pages that follow an unreadable page on NVMe. A page that cannot be proven ends the match; a miss
        raises nothing. On the node's own machine this process reads NVMe itself, even while the daemon is down. A
        device that does not answer within ``timeout_s`` of ``connect`` is a miss as well.

        Raises:
            InvalidRequest: as ``keys``; ``out`` is too small, read-only or not contiguous, and nothing was copied.
            DeviceLost: the device of ``out`` has failed.
            DeadlineExceeded: the device did not copy in time, and may still write into ``out``.
        """

    @abstractmethod
    def get_async(
        self, tokens: Any, out: Any = None, *, extras: Sequence[bytes] | None = None, verify: bool | None = None
    ) -> Future[Match]:
        """Run ``get`` in one of the store's threads. Until the future is done, ``out`` must not be used.

        Raises:
            DeadlineExceeded: too many calls are waiting.
        """

    def _to_device(self, keys: Keys, out: Any, verify: bool | None) -> Match | None:
        """Do ``get`` if ``out`` is device memory; return None if it is host memory."""
        if not on_device(out):
            return None
        return self._get_to_device(keys, device_rows_to_fill(out, self.page_bytes, len(keys)), verify)

    def _get_to_device(self, keys: Keys, rows: DeviceRows, verify: bool | None) -> Match:
        """Do ``get`` through pinned memory, some pages at a time."""
        link, step = link_of(rows.device), max(1, BOUNCE_BYTES // self.page_bytes)
        pages, below, nodes = 0, Counter[Tier](), Counter[str]()
        while True:
            part = keys[pages : pages + step]
            with link.bounces.borrow(len(part) * self.page_bytes, time.monotonic() + COPY_DEADLINE_S) as bounce:
                host = bounce.memory[: len(part) * self.page_bytes].reshape(-1, self.page_bytes)
                match = self.get(part, host, verify=verify)
                if match.pages:
                    target = rows[pages : pages + match.pages]
                    bounce.event = event = link.copy([(host[: match.pages], target)], to_device=True)
                    event.wait(time.monotonic() + COPY_DEADLINE_S)
            pages, nodes = pages + match.pages, nodes + Counter(match.nodes)
            below += Counter({tier: count for tier, count in match.tiers.items() if tier != Tier.DRAM})
            if match.reason or pages == len(keys):
                return Match(pages * self._page_tokens, pages, match.reason, None, below, nodes)

    def get_shard(
        self,
        tokens: Any,
        out: Any = None,
        *,
        rank: int = 0,
        ranks: int = 1,
        stage: int = 0,
        stages: int = 1,
        extras: Sequence[bytes] | None = None,
        verify: bool | None = None,
    ) -> Match:
        """Copy one shard's part of each page, whichever shards wrote the page. The part has the heads of ``rank`` (see
        ``Layout.held_heads``) in the layers of ``stage`` (see ``Layout.shard_layers``), in the order of the page.

        Args:
            out: ``[pages, shard bytes]``, as for ``get``, or a strided array or tensor with contiguous rows. If None,
                ``match.data`` is allocated.
            verify: as for ``get``. Checksums cover whole layers, so whole pages are read.

        A page matches only when every shard has sealed its part. In DRAM only the shard's bytes are read; pages on NVMe
        are read whole, a few at a time. Over gRPC only the shard's bytes are sent.

        Raises:
            InvalidRequest: as ``get``; a rank or stage is invalid.
        """
        shard = self._shard(rank, ranks, stage, stages)
        keys = self._matchable_keys(tokens, extras)
        if out is not None and on_device(out):
            rows = device_rows_to_fill(out, shard.nbytes, len(keys), apart=True)
            host: Rows = empty((len(keys), shard.nbytes))
            match = self._get_shard(keys, shard, host, verify)
            link_of(rows.device).upload(host[: match.pages], rows[: match.pages])
            return match
        target = rows_to_fill(out, shard.nbytes, len(keys), apart=True) if out is not None else None
        return self._get_shard(keys, shard, target, verify)

    @abstractmethod
    def _get_shard(self, keys: Keys, shard: Shard, target: Rows | None, verify: bool | None) -> Match:
        """Copy a shard's part of these pages into the first rows of ``target``. If that is None, allocate
        ``match.data``."""

    @abstractmethod
    def prefetch(self, tokens: Any, timeout_s: float = 5.0, extras: Sequence[bytes] | None = None) -> Match:
        """Ask the node to copy the stored prefix from NVMe to DRAM, and return what is in DRAM afterwards.

        That may be less than is stored, if DRAM is full of pages that cannot be evicted, or if ``timeout_s`` has
        passed; copies in progress then end later.

        Raises:
            InvalidRequest: as ``keys``; ``timeout_s`` is not positive.
            NodeUnavailable, DeadlineExceeded: the daemon did not answer in time.
        """

    # --- writing ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def put(
        self,
        tokens: Any,
        pages: Any,
        extras: Sequence[bytes] | None = None,
        *,
        checksum: bool = False,
        wait: bool = False,
        retention: Retention | Sequence[Retention] = (),
        replicas: int | None = None,
    ) -> int:
        """Store the full pages of ``tokens``, and return the number of new ones. Pages already in DRAM are skipped.

        Pages that are only on NVMe are also written to DRAM, which saves a later read. They do not count as new.

        Args:
            pages: ``[full pages, page_bytes]``: a C-contiguous buffer of exactly that size and any dtype, in host or
                device memory. The copy starts after the work queued in the device's stream.
            extras: as in ``keys``.
            checksum: compute the layers' checksums in this process; otherwise the node computes them soon after the
                seal. No effect over gRPC, where all data is verified.
            wait: return when the node has sealed the pages, and count those that it accepted. If false, a put on this
                machine returns when its pages are *published* in shared memory: every later lookup in any process sees
                them, and they survive the end of the daemon and of this process. The count then includes pages that the
                node rejects later, because another writer was faster or their parents were evicted.
            retention: how long new pages are worth keeping, for all of them or per range of ``tokens``. A hint for the
                order of eviction among this cache's own pages. A stored page keeps its first hint.
            replicas: on how many nodes of the pool new pages are stored, 1 or 2; None: as the cache says. The second
                copy goes to another machine. With ``wait`` the put returns when both copies are stored; otherwise the
                node stores the second one soon afterwards. Pages that were stored with one replica get a second one.

        There may be fewer new pages than expected: if the store is full of pages that cannot be evicted (leased, being
        written), if another writer was faster, or if parent pages were evicted. The stored pages are always a prefix. A
        put waits for the node in any case if pages cannot be published: over gRPC, in an embedded store, after a page
        that is only on NVMe, and beyond 64 sessions at a time.

        Raises:
            InvalidRequest: as ``keys``; ``pages`` does not have exactly the size of the full pages, or is not
                contiguous; ``retention`` has the wrong type.
            QuotaExceeded: nothing new was stored, because the tenant's quota is used up.
            NodeUnavailable, DeadlineExceeded: the node, or the device of ``pages``, did not answer in time; some pages
                may be stored. With ``wait`` and two replicas also: the pages are stored, but no other node has stored
                the second copy. It is owed, and the node continues to try.
            DeviceLost: the device of ``pages`` has failed; some pages may be stored.
        """

    @abstractmethod
    def put_async(
        self,
        tokens: Any,
        pages: Any,
        extras: Sequence[bytes] | None = None,
        *,
        checksum: bool = False,
        retention: Retention | Sequence[Retention] = (),
        replicas: int | None = None,
    ) -> PendingPut:
        """Do ``put(wait=True)`` without waiting for the last acknowledgements, or for second copies.

        ``pages`` may be reused at once.

        The pages are also sealed if ``result`` is never called; a later put reads the acknowledgements, or the store
        does soon after its last put.
        """

    def _shard(self, *cut: int) -> Shard:
        """Return the shard of (rank, ranks, stage, stages). The shard with the whole page, the usual one, is cached."""
        if all(type(number) is int for number in cut) and cut == (0, 1, 0, 1):
            return self._whole
        return Shard(self.layout, *cut)

    # --- leases, and layers -----------------------------------------------------------------------------------------

    def lease(self, tokens: Any, ttl_s: float = 30.0, extras: Sequence[bytes] | None = None) -> Lease:
        """Return a lease with read-only views of the longest stored prefix: ``with cache.lease(tokens) as lease``.

        Over gRPC the views are read-only copies, which stay valid after the lease.

        Raises:
            InvalidRequest: as ``keys``; ``ttl_s`` is not positive.
        """
        return self._lease(self._matchable_keys(tokens, extras), ttl_s)

    def writer(
        self,
        tokens: Any,
        ttl_s: float = 30.0,
        group: str | int | None = None,
        rank: int = 0,
        ranks: int = 1,
        extras: Sequence[bytes] | None = None,
        stage: int = 0,
        stages: int = 1,
        retention: Retention | Sequence[Retention] = (),
    ) -> Writer:
        """Return a writer of all full pages: ``with cache.writer(tokens) as w: w.write_layer(0, data)``.

        Over gRPC each layer is one stream, and the node has it when ``write_layer`` returns.

        Args:
            ttl_s: time until the reservation's deadline; pages that are not sealed by then are revoked.
            group: names the write to which this shard belongs, for example a request id. Shards on several machines
                must use the same text. None: the write has no other shards.
            rank, ranks: which share of the KV heads this writer writes; see ``Layout.shard_heads``.
            stage, stages: which layers it writes; see ``Layout.shard_layers``. ``ranks * stages`` is at most 8.
            retention: as for ``put``; the first shard that reserves a page sets it.

        Raises:
            InvalidRequest: as ``keys``; ``ttl_s``, ``group``, or a number of the shard is invalid.
        """
        shard = self._shard(rank, ranks, stage, stages)
        return self._writer(shard, self._keys_to_store(tokens, extras, retention), ttl_s, group)

    def reader(self, tokens: Any, timeout_s: float = 30.0, extras: Sequence[bytes] | None = None) -> Reader:
        """Return a reader of pages, layer by layer, which may be used while they are being written:
        ``cache.reader(tokens).read_layer(0, out)``.

        Over gRPC a layer is available when its page is sealed. The reader fetches whole pages and keeps them.

        Args:
            timeout_s: how long one ``read_layer`` may wait.

        Raises:
            InvalidRequest: as ``keys``; ``timeout_s`` is not positive.
        """
        return self._reader(self._matchable_keys(tokens, extras), timeout_s)

    @abstractmethod
    def _lease(self, keys: Keys, ttl_s: float) -> Lease:
        """Make a lease of this kind of store, without entering it."""

    @abstractmethod
    def _writer(self, shard: Shard, keys: Keys, ttl_s: float, group: str | int | None) -> Writer:
        """Make a writer of this kind of store, without entering it."""

    @abstractmethod
    def _reader(self, keys: Keys, timeout_s: float) -> Reader:
        """Make a reader of this kind of store."""

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("store", "cannot be pickled: call kvstore.connect() in the other process")
