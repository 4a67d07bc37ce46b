"""PrefixCache: the pages of one layout, salt and adapter in one store. The verbs users call most.

PendingPut: a put whose last acknowledgements have not been read.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

from kvstore.client.buffers import Rows, rows_to_fill
from kvstore.client.device_link import BOUNCE_BYTES, COPY_DEADLINE_S, link_of
from kvstore.client.device_rows import DeviceRows, device_rows_to_fill, on_device
from kvstore.client.match import Lease, Match
from kvstore.client.reader import Reader
from kvstore.client.writer import Writer
from kvstore.device.host_memory import empty
from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys, as_tokens, check_extras, root_key
from kvstore.model.replica import FrameClass, Tier
from kvstore.model.retention import Retention, hints_of
from kvstore.model.shard import Shard


class PendingPut(ABC):
    """A put on its way. Made by ``PrefixCache.put_async``; the caller's buffer is free already.

    Ends with ``result``. After a failure some leading pages may be stored, and a later put of the same prompt continues
    where this one stopped. Threads may share it.
    """

    __slots__ = ()

    @abstractmethod
    def result(self) -> int:
        """Pages newly stored, once that is acknowledged. Fewer than were given: see ``PrefixCache.put``.

        May be called again, and gives the same answer or failure.

        Raises:
            QuotaExceeded: nothing was stored, because the tenant has all it may have.
            NodeUnavailable, DeadlineExceeded: the node did not acknowledge in time; some pages may be stored.
        """


class PrefixCache(ABC):
    """Pages of one layout, tenant salt and adapter. Made by ``Store.cache``; lives as long as its store.

    Holds no pages and no session of its own. Threads may share it. ``tokens`` in every verb is a prompt (any integer
    sequence or array, an ndarray is fastest) or ``Keys``. A prompt is matched up to its last but one token, since the
    last one has to be computed for its logits; ``Keys`` name their pages outright.

    Over gRPC each verb is at least one round trip, so that reading too needs the node and raises ``NodeUnavailable`` or
    ``DeadlineExceeded`` where it does not answer.

    Attributes:
        layout, salt, adapter: as given to ``Store.cache``.
        root: 16 bytes that start every chain here.
        page_bytes: bytes of a page.
    """

    def __init__(self, layout: Layout, salt: str, adapter: str) -> None:
        self.layout = layout
        self.salt = salt
        self.adapter = adapter
        self.root = root_key(layout, salt, adapter)
        self.page_bytes = layout.page_bytes
        self.frame_class = FrameClass(layout.page_bytes, layout.page_tokens, layout.layers)
        self._page_tokens = layout.page_tokens
        self._whole = Shard(layout)

    # --- keys -------------------------------------------------------------------------------------------------------

    def keys(self, tokens: Any, extras: Sequence[bytes] | None = None) -> Keys:
        """Keys of all full pages of ``tokens``, to reuse over several calls, and with other stores.

        They hold the node's pool to be what it was last. Where it has been made anew since, with another secret, a
        call that is given them makes their keys anew: that costs the time, nothing else.

        Args:
            extras: digests of the media inside each full page (``b""`` where none), or None.

        Raises:
            InvalidRequest: tokens are empty, negative, too large or no integers; extras do not fit the pages.
        """
        return Keys.of(as_tokens(tokens), self._page_tokens, self.root, extras, self._tag())

    @abstractmethod
    def _tag(self) -> bytes:
        """What our keys end with in the pool, as far as this side knows it; empty where it does not."""

    def _named(self, tokens: Any, extras: Sequence[bytes] | None) -> Keys:
        """Keys of all full pages."""
        if type(tokens) is Keys:
            if tokens.root != self.root or tokens.page_tokens != self._page_tokens:
                raise InvalidRequest("tokens", "these keys are of another layout, salt or adapter")
            if extras is not None:
                raise InvalidRequest("extras", "are part of the keys already")
            return tokens.with_tag(self._tag())
        return self.keys(tokens, extras)

    def _to_store(
        self, tokens: Any, extras: Sequence[bytes] | None, retention: Retention | Sequence[Retention]
    ) -> Keys:
        """Keys of all full pages, with the hints that they are stored with."""
        keys = self._named(tokens, extras)
        return keys.hinted(hints_of(retention, len(keys), self._page_tokens)) if retention != () else keys

    def _asked(self, tokens: Any, extras: Sequence[bytes] | None) -> Keys:
        """Keys of the pages a prompt can match: all but the one that holds its last token."""
        if type(tokens) is Keys:
            return self._named(tokens, extras)
        array = as_tokens(tokens)
        if extras is not None:
            check_extras(extras, len(array) // self._page_tokens)
            extras = extras[: (len(array) - 1) // self._page_tokens]
        return Keys.of(array[:-1], self._page_tokens, self.root, extras, self._tag())

    # --- reading ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def lookup(self, tokens: Any, extras: Sequence[bytes] | None = None) -> Match:
        """Length of the longest stored prefix. A hint: no page is touched, kept or marked used.

        Raises:
            InvalidRequest: as ``keys``, or the store is closed.
        """

    @abstractmethod
    def get(
        self, tokens: Any, out: Any = None, *, extras: Sequence[bytes] | None = None, verify: bool | None = None
    ) -> Match:
        """Copy the longest stored prefix into ``out``; every page is proven to be what was asked for.

        Args:
            out: ``[pages, page_bytes]``; any C-contiguous writable buffer large enough for all pages asked for: numpy
                or torch of any dtype and shape, bytearray, memoryview, or memory of a device (torch CUDA,
                ``__cuda_array_interface__``, DLPack), which is written behind what its stream has been given. None
                allocates ``match.data``.
            verify: compare the checksums of every layer as well. None: as the store was opened. Pages that are read
                from NVMe, or that come over gRPC, are always verified.

        Pages after the match are not changed, except that a page which was evicted while it was read may have been
        copied in part, and that pages after one on NVMe which could not be read may have been copied. A page that
        cannot be proven ends the match; nothing raises for a miss. On the node's own machine NVMe is read from here,
        whether the daemon lives or not; a device that is silent for as long as a request may take (``timeout_s`` of
        ``connect``) is a miss too.

        Raises:
            InvalidRequest: as ``keys``; ``out`` is too small, read-only or not contiguous (nothing was copied).
            DeviceLost: the device of ``out`` has failed.
            DeadlineExceeded: it did not copy in time; it may still write into ``out``.
        """

    @abstractmethod
    def get_async(
        self, tokens: Any, out: Any = None, *, extras: Sequence[bytes] | None = None, verify: bool | None = None
    ) -> Future[Match]:
        """``get`` in one of the store's threads. ``out`` belongs to the store until the future is done.

        Raises:
            DeadlineExceeded: too many calls are waiting already.
        """

    def _to_device(self, keys: Keys, out: Any, verify: bool | None) -> Match | None:
        """``get`` into memory of a device; None: ``out`` is the host's."""
        if not on_device(out):
            return None
        return self._get_to_device(keys, device_rows_to_fill(out, self.page_bytes, len(keys)), verify)

    def _get_to_device(self, keys: Keys, rows: DeviceRows, verify: bool | None) -> Match:
        """``get`` by way of pinned memory, some pages at a time."""
        link, step = link_of(rows.device), max(1, BOUNCE_BYTES // self.page_bytes)
        pages, below, nodes = 0, Counter[Tier](), Counter[str]()
        while True:
            asked = keys[pages : pages + step]
            with link.bounces.borrow(len(asked) * self.page_bytes, time.monotonic() + COPY_DEADLINE_S) as bounce:
                host = bounce.memory[: len(asked) * self.page_bytes].reshape(-1, self.page_bytes)
                match = self.get(asked, host, verify=verify)
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
        """``get`` of one shard's part of each page, by whichever shards they were written: the heads of ``rank`` (see
        ``Layout.held_heads``) of the layers of ``stage`` (``Layout.shard_layers``), in a page's order.

        Args:
            out: ``[pages, shard bytes]``; as for ``get``, or an array or tensor whose rows lie apart, each contiguous.
                None allocates ``match.data``.
            verify: as for ``get``. Checksums are of whole layers of whole pages, so those are read then.

        A page counts only when it is whole: every shard that writes it has sealed. Of pages in DRAM only these bytes
        are read; those on NVMe are read whole, a few at a time. Over gRPC only the shard's bytes cross the network.

        Raises:
            InvalidRequest: as ``get``; a number of the shard makes no sense.
        """
        shard = self._shard(rank, ranks, stage, stages)
        keys = self._asked(tokens, extras)
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
        """A shard's part of these pages, in the first rows of ``target``; None: in ``match.data``."""

    @abstractmethod
    def prefetch(self, tokens: Any, timeout_s: float = 5.0, extras: Sequence[bytes] | None = None) -> Match:
        """Have the node bring the stored prefix from NVMe to DRAM; returns what is in DRAM then.

        That may be less than is stored: DRAM is full of pages that may not leave, or ``timeout_s`` is over; what is on
        its way then still arrives.

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
    ) -> int:
        """Store the full pages of ``tokens``; returns how many were new. Pages already in DRAM are skipped.

        Pages that are only on NVMe are written to DRAM as well, which saves reading them later; they are not new.

        Args:
            pages: ``[full pages, page_bytes]``: exactly so many bytes in any C-contiguous buffer of any dtype, of the
                host or of a device. What a device's stream has been given before is waited for.
            extras: as in ``keys``.
            checksum: compute the layers' checksums here; otherwise the node does, soon after the seal. Without effect
                over gRPC, where what arrives is verified in any case.
            wait: return when the node has sealed the pages, and count those that it took. Otherwise a put on this
                machine returns when its pages are *published* in shared memory: every later lookup finds them, by any
                process, and they survive the daemon and this process. What the node then does not take (another writer
                was faster, the pages before have left meanwhile) was counted all the same.
            retention: how long new pages are worth keeping, or those of ranges of ``tokens``. A hint to eviction that
                orders this cache's own pages; a page that is stored keeps the one it came with.

        Fewer new pages than expected mean that the store is full of pages that may not leave (leased, being written),
        or that another writer was faster, or that the pages before were evicted meanwhile; what was stored is a
        prefix either way. Pages are always waited for where they cannot be published: over gRPC, in an embedded store,
        for a tenant with a quota, behind a page that only NVMe has, for more than 64 sessions at a time.

        Raises:
            InvalidRequest: as ``keys``; ``pages`` is not exactly as large as the full pages, or not contiguous;
                ``retention`` is something else.
            QuotaExceeded: nothing new was stored, because the tenant has all it may have.
            NodeUnavailable, DeadlineExceeded: the node, or the device of ``pages``, did not answer in time; some pages
                may be stored.
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
    ) -> PendingPut:
        """``put(wait=True)`` without waiting for the last acknowledgements. ``pages`` may be reused as soon as this
        returns.

        A put whose ``result`` is never asked for is sealed all the same; its replies are read by a later put, or soon
        after the last one.
        """

    def _shard(self, *cut: int) -> Shard:
        """By rank, ranks, stage and stages. All of a page, which most writers write, is made once."""
        if all(type(number) is int for number in cut) and cut == (0, 1, 0, 1):
            return self._whole
        return Shard(self.layout, *cut)

    # --- leases, and layers -----------------------------------------------------------------------------------------

    def lease(self, tokens: Any, ttl_s: float = 30.0, extras: Sequence[bytes] | None = None) -> Lease:
        """Read-only views of the longest stored prefix, without a copy: ``with cache.lease(tokens) as lease``.

        Over gRPC the pages are fetched: read-only copies, right whatever happens to the lease.

        Raises:
            InvalidRequest: as ``keys``; ``ttl_s`` is not positive.
        """
        return self._lease(self._asked(tokens, extras), ttl_s)

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
        """Write the full pages layer by layer: ``with cache.writer(tokens) as w: w.write_layer(0, data)``.

        Over gRPC each layer is one stream, which has arrived when ``write_layer`` returns.

        Args:
            ttl_s: the reservation's deadline; what is not sealed by then is given up.
            group: what the shards of one write have in common (a request id, say). None: a writer of its own. Shards on
                several machines must name theirs by the same text.
            rank, ranks: which share of the KV heads this writer writes; see ``Layout.shard_heads``.
            stage, stages: which layers it writes; see ``Layout.shard_layers``. ``ranks * stages`` is at most 8.
            retention: as for ``put``; of the shards of one write the first that reserves a page counts.

        Raises:
            InvalidRequest: as ``keys``; ``ttl_s``, ``group``, or a number of the shard makes no sense.
        """
        shard = self._shard(rank, ranks, stage, stages)
        return self._writer(shard, self._to_store(tokens, extras, retention), ttl_s, group)

    def reader(self, tokens: Any, timeout_s: float = 30.0, extras: Sequence[bytes] | None = None) -> Reader:
        """Read pages layer by layer while they are being written: ``cache.reader(tokens).read_layer(0, out)``.

        Over gRPC layers come once their page is sealed; pages are fetched whole and kept.

        Args:
            timeout_s: how long one ``read_layer`` may wait.

        Raises:
            InvalidRequest: as ``keys``; ``timeout_s`` is not positive.
        """
        return self._reader(self._asked(tokens, extras), timeout_s)

    @abstractmethod
    def _lease(self, keys: Keys, ttl_s: float) -> Lease:
        """A lease of this kind of store, not entered."""

    @abstractmethod
    def _writer(self, shard: Shard, keys: Keys, ttl_s: float, group: str | int | None) -> Writer:
        """A writer of this kind of store, not entered."""

    @abstractmethod
    def _reader(self, keys: Keys, timeout_s: float) -> Reader:
        """A reader of this kind of store."""

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("store", "cannot be pickled: call kvstore.connect() in the other process")
