"""PrefixCache: the pages of one layout, salt and adapter in one store. The verbs users call most."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from kvstore import failpoint
from kvstore.client.buffers import rows_to_fill, rows_to_read
from kvstore.client.layer_verbs import LayerVerbs
from kvstore.client.lease import Lease
from kvstore.client.local.naming import name_root
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.local.prefetch import bring, have_verified, tell_damaged, tell_read
from kvstore.client.local.proof import Run, copy_runs, prove, tell_reuse
from kvstore.client.local.put import PendingPut, checksums_of
from kvstore.client.local.stored import known_on_nvme, locate, stored_beyond, stored_pages
from kvstore.client.match import ABSENT, CHECKSUM, ELSEWHERE, GENERATION, Match
from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout
from kvstore.model.pool_secret import tag_of
from kvstore.model.prefix import Keys, as_tokens, root_key
from kvstore.model.replica import STAMPED, FrameClass
from kvstore.rpc.control import CHECKSUMS
from kvstore.tier.counters import LOOKUP, ONE_GET, PUT, PUT_ASYNC, REUSE_SAMPLED, SessionCounters

# x86-64 shows stores in their order, so that equal words before and after prove the bytes between. Elsewhere the
# checksums have to.
ORDERED = platform.machine() in ("x86_64", "AMD64")
_STAMPED_BIT = np.uint64(STAMPED << 48)


class PrefixCache(LayerVerbs):
    """Pages of one layout, tenant salt and adapter. Made by ``Store.cache``; lives as long as its store.

    Holds no pages and no session of its own. Threads may share it. ``tokens`` in every verb is a prompt (any integer
    sequence or array, an ndarray is fastest) or ``Keys``. A prompt is matched up to its last but one token, since the
    last one has to be computed for its logits; ``Keys`` name their pages outright.

    Attributes:
        layout, salt, adapter: as given to ``Store.cache``.
        root: 16 bytes that start every chain here.
        page_bytes: bytes of a page.
    """

    def __init__(self, node: LocalNode, layout: Layout, salt: str, adapter: str, verify: bool) -> None:
        self.layout = layout
        self.salt = salt
        self.adapter = adapter
        self.root = root_key(layout, salt, adapter)
        self.page_bytes = layout.page_bytes
        self.frame_class = FrameClass(layout.page_bytes, layout.page_tokens, layout.layers)
        self._node = node
        self._page_tokens = layout.page_tokens
        self._counted: tuple[SessionCounters | None, int] = None, 0  # where gets count
        self._closed = layout.attention == "full"
        self._verify = verify or not ORDERED
        self._pool: tuple[bytes | None, bytes] = None, b""  # its secret, and the tag of our root there

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

    def _tag(self) -> bytes:
        """What our keys end with in the pool that was mapped last."""
        return self._tag_in(self._node.last)

    def _tag_in(self, mapped: Mapped | None) -> bytes:
        if mapped is not None and mapped.secret is not self._pool[0]:
            self._pool = mapped.secret, tag_of(mapped.secret, self.root)
        return self._pool[1]

    def _named(self, tokens: Any, extras: Sequence[bytes] | None) -> Keys:
        """Keys of all full pages."""
        if type(tokens) is Keys:
            if tokens.root != self.root or tokens.page_tokens != self._page_tokens:
                raise InvalidRequest("tokens", "these keys are of another layout, salt or adapter")
            if extras is not None:
                raise InvalidRequest("extras", "are part of the keys already")
            return tokens.with_tag(self._tag())
        return self.keys(tokens, extras)

    def _asked(self, tokens: Any, extras: Sequence[bytes] | None) -> Keys:
        """Keys of the pages a prompt can match: all but the one that holds its last token."""
        if type(tokens) is Keys:
            return self._named(tokens, extras)
        array = as_tokens(tokens)
        if extras is not None:
            full = len(array) // self._page_tokens
            if len(extras) != full:
                raise InvalidRequest("extras", f"must be {full} bytes values, one per full page")
            extras = extras[: (len(array) - 1) // self._page_tokens]
        return Keys.of(array[:-1], self._page_tokens, self.root, extras, self._tag())

    # --- reading ----------------------------------------------------------------------------------------------------

    def lookup(self, tokens: Any, extras: Sequence[bytes] | None = None) -> Match:
        """Length of the longest stored prefix, from the index alone. A hint: no page is touched, kept or marked used.

        Raises:
            InvalidRequest: as ``keys``, or the store is closed.
        """
        start_ns = time.monotonic_ns()
        mapped = self._node.mapped()
        keys = self._asked(tokens, extras)
        pages, nvme_pages, asked = 0, 0, len(keys.hashes)
        if mapped is not None:
            pages = stored_pages(mapped, keys, self._closed)[0]
            if pages < asked:
                found, more = stored_beyond(mapped, keys, pages, self._closed)
                if more and mapped.nvme.readable():
                    pages, nvme_pages = found, more
            mapped.counters.took(LOOKUP, start_ns)
        return Match(pages * self._page_tokens, pages, "" if pages == asked else ABSENT, None, nvme_pages)

    def get(
        self, tokens: Any, out: Any = None, *, extras: Sequence[bytes] | None = None, verify: bool | None = None
    ) -> Match:
        """Copy the longest stored prefix into ``out``; every page is proven to be what was asked for.

        Args:
            out: ``[pages, page_bytes]``; any C-contiguous writable buffer large enough for all pages asked for: numpy
                or torch (CPU) of any dtype and shape, bytearray, memoryview. None allocates ``match.data``.
            verify: compare the checksums of every layer as well. None: as the store was opened. Pages that are read
                from NVMe are always verified.

        Pages after the match are not changed, except that a page which was evicted while it was read may have been
        copied in part, and that pages after one on NVMe which could not be read may have been copied. A page that
        cannot be proven ends the match; nothing raises for a miss. NVMe is read from here, whether the daemon lives or
        not; a device that is silent for as long as a request may take (``timeout_s`` of ``connect``) is a miss too.

        Raises:
            InvalidRequest: as ``keys``; ``out`` is too small, read-only or not contiguous (nothing was copied).
        """
        now_ns = time.monotonic_ns()
        node = self._node
        timed = False
        if now_ns > node.check_ns:
            node.recheck(now_ns)
            timed = True
        mapped = node.mapped()
        keys = self._asked(tokens, extras)
        asked = len(keys.hashes)
        target = rows_to_fill(out, self.page_bytes, asked) if out is not None else None
        if mapped is None or not asked:
            return self._missed(asked)
        pages, nvme_pages, reason = 0, 0, ""
        for _ in (0, 1):  # once more where a page moved or was evicted between the index and the copy
            runs, proven, reason = prove(mapped, keys, self.page_bytes, self._closed)
            if target is None or out is None:  # what is found the second time may be more
                found = proven if not reason else self._found(mapped, keys, proven, reason)
                target = np.empty((found, self.page_bytes), np.uint8)
            if failpoint.ACTIVE:
                failpoint.hit("client.reading")
            if timed and mapped.counting and not now_ns % REUSE_SAMPLED:
                tell_reuse(mapped.counters, runs, proven, now_ns)
            pages, changed = copy_runs(runs, target, now_ns)
            if self._verify if verify is None else verify:
                pages, reason = self._verified(mapped, runs, target, pages, reason)
            if changed:
                reason = GENERATION
            if reason != GENERATION:
                break
        if reason:
            if reason in ELSEWHERE and target is not None:
                checked = self._verify if verify is None else verify
                pages, nvme_pages, reason = self._beyond(mapped, keys, target, pages, reason, checked)
            if reason:
                node.missed(reason)
            mapped.counters.got(mapped.row(self.frame_class), asked, pages - nvme_pages, nvme_pages, reason)
        elif mapped.counting:
            counters, row = self._counted
            if counters is not mapped.counters:
                counters, row = self._counted = mapped.counters, mapped.row(self.frame_class)
            counters.words[row] += ONE_GET + pages
        if timed and mapped.counting:
            mapped.counters.timed(mapped.row(self.frame_class), now_ns)
        data = target[:pages] if out is None and target is not None else None
        return Match(pages * self._page_tokens, pages, reason, data, nvme_pages)

    def get_async(
        self, tokens: Any, out: Any = None, *, extras: Sequence[bytes] | None = None, verify: bool | None = None
    ) -> Future[Match]:
        """``get`` in one of the store's threads. ``out`` belongs to the store until the future is done.

        Raises:
            DeadlineExceeded: too many calls are waiting already.
        """
        return self._node.workers.submit(self.get, tokens, out, extras=extras, verify=verify)

    def prefetch(self, tokens: Any, timeout_s: float = 5.0, extras: Sequence[bytes] | None = None) -> Match:
        """Have the node bring the stored prefix from NVMe to DRAM; returns what is in DRAM then.

        That may be less than is stored: DRAM is full of pages that may not leave, or ``timeout_s`` is over; what is on
        its way then still arrives.

        Raises:
            InvalidRequest: as ``keys``; ``timeout_s`` is not positive.
            NodeUnavailable, DeadlineExceeded: the daemon did not answer in time.
        """
        if not 0 < timeout_s < 1e6:
            raise InvalidRequest("timeout_s", f"must be positive seconds, not {timeout_s!r}")
        mapped, pages = self._node.mapped(), 0
        keys = self._asked(tokens, extras)
        if mapped is not None:
            pages = stored_pages(mapped, keys, self._closed)[0]
            if known_on_nvme(mapped, keys, pages, self._closed):  # else nothing will be stored: say nothing
                self._name(mapped)
                bring(mapped, keys, self._closed, time.monotonic() + timeout_s)
                pages = stored_pages(mapped, keys, self._closed)[0]
        return Match(pages * self._page_tokens, pages, "" if pages == len(keys) else ABSENT)

    def _missed(self, asked: int) -> Match:
        if asked:
            self._node.missed(ABSENT)
        return Match(0, 0, ABSENT if asked else "")

    # --- reading what is not in DRAM --------------------------------------------------------------------------------

    def _found(self, mapped: Mapped, keys: Keys, dram: int, reason: str) -> int:
        """How many pages a get may bring, where DRAM has the first ``dram`` and then none for that reason."""
        return stored_beyond(mapped, keys, dram, self._closed)[0] if reason in ELSEWHERE else dram

    def _beyond(
        self, mapped: Mapped, keys: Keys, target: npt.NDArray[np.uint8], pages: int, reason: str, verify: bool
    ) -> tuple[int, int, str]:
        """Go on after ``pages`` that came from DRAM: with NVMe, and with DRAM again where a page moved there meanwhile,
        or where pages of a layout that is not prefix-closed lie here and there.

        Returns pages, how many of them came from NVMe, and why not more.
        """
        limit, nvme_pages, retried = min(len(keys), len(target)), 0, False
        while reason in ELSEWHERE and pages < limit:
            rest, rows = keys[pages:limit], target[pages:limit]
            count, why = self._from_nvme(mapped, rest, rows)
            pages, nvme_pages = pages + count, nvme_pages + count
            reason = why if count or why != ABSENT else reason
            scattered = bool(count) and not self._closed
            if why not in ELSEWHERE or not (scattered or (why != ABSENT and not retried)):
                break
            retried = retried or not scattered
            rest, rows = rest[count:], rows[count:]
            runs, _, reason = prove(mapped, rest, self.page_bytes, self._closed)
            copied, changed = copy_runs(runs, rows, time.monotonic_ns())
            if verify:
                copied, reason = self._verified(mapped, runs, rows, copied, reason)
            pages, reason = pages + copied, GENERATION if changed else reason
        return pages, nvme_pages, reason or ("" if pages == len(keys) else ABSENT)

    def _from_nvme(self, mapped: Mapped, keys: Keys, rows: npt.NDArray[np.uint8]) -> tuple[int, str]:
        """Read the leading pages of ``keys`` from NVMe into ``rows``; how many that were, and why not more."""
        located = locate(mapped, keys[: len(rows)], self._closed)
        if not located:
            return 0, ABSENT
        read = mapped.nvme.start(located, keys, self.frame_class, rows)
        self._name(mapped, quietly=True)
        tell_read(mapped, read.addresses)  # while the devices are at it
        pages, why = read.result(mapped.timeout_s)
        if read.damaged:
            tell_damaged(mapped, read.damaged)
        return pages, why

    def _verified(
        self, mapped: Mapped, runs: list[Run], target: npt.NDArray[np.uint8], pages: int, reason: str
    ) -> tuple[int, str]:
        """Compare what was copied with the records' checksums; the node stamps first those that have none yet."""
        layers = self.layout.layers
        for extent, frame, page, count, _ in runs:
            count = min(count, pages - page)
            if count <= 0:
                break
            stop = frame + count
            if not (extent.info[frame:stop] & _STAMPED_BIT).all() and not have_verified(mapped, runs):
                return page, CHECKSUM
            ours = checksums_of(target[page : page + count], layers)
            equal = (ours == extent.checksums[frame:stop]).all(axis=1)
            if not equal.all():
                have_verified(mapped, runs)  # so that the node finds and drops it
                return page + int(equal.argmin()), CHECKSUM
        return pages, reason

    # --- writing ----------------------------------------------------------------------------------------------------

    def put(self, tokens: Any, pages: Any, extras: Sequence[bytes] | None = None, *, checksum: bool = False) -> int:
        """Store the full pages of ``tokens``; returns how many are new. Pages already in DRAM are skipped.

        Pages that are only on NVMe are written to DRAM as well, which saves reading them later; they are not new.

        Args:
            pages: ``[full pages, page_bytes]``: exactly so many bytes in any C-contiguous buffer of any dtype.
            extras: as in ``keys``.
            checksum: compute the layers' checksums here; otherwise the node does, soon after the seal.

        Fewer new pages than expected mean that the store is full of pages that may not leave (leased, being written),
        or that another writer was faster, or that the pages before were evicted meanwhile; what was stored is a
        prefix either way. When this returns, every counted page is sealed and survives the daemon.

        Raises:
            InvalidRequest: as ``keys``; ``pages`` is not exactly as large as the full pages, or not contiguous.
            QuotaExceeded: nothing new was stored, because the tenant has all it may have.
            NodeUnavailable, DeadlineExceeded: the node did not answer in time; some pages may be stored.
        """
        start_ns = time.monotonic_ns()
        put = self._start_put(tokens, pages, extras, checksum)
        new = put.result()
        put.counters.took(PUT, start_ns)
        return new

    def put_async(
        self, tokens: Any, pages: Any, extras: Sequence[bytes] | None = None, *, checksum: bool = False
    ) -> PendingPut:
        """``put`` without waiting for the last acknowledgements. ``pages`` may be reused as soon as this returns.

        A put whose ``result`` is never asked for is sealed all the same; its replies are read by a later put, or soon
        after the last one.
        """
        start_ns = time.monotonic_ns()
        put = self._start_put(tokens, pages, extras, checksum)
        put.counters.took(PUT_ASYNC, start_ns)
        put.leave()
        return put

    def _start_put(self, tokens: Any, pages: Any, extras: Sequence[bytes] | None, checksum: bool) -> PendingPut:
        keys = self._named(tokens, extras)
        rows = rows_to_read(pages, self.page_bytes, len(keys.hashes))
        mapped = self._node.writable()
        keys = keys.with_tag(self._tag_in(mapped))
        self._name(mapped)
        stored, last = stored_pages(mapped, keys, self._closed)
        known = known_on_nvme(mapped, keys, stored, self._closed) if stored < len(rows) else ()
        put = PendingPut(mapped, keys, self.frame_class, CHECKSUMS if checksum else 0, known)
        if stored < len(rows):
            if last is not None:
                mapped.mark_used(last)  # what the new pages hang on must not be what leaves for them
            put.send(rows, stored)
        return put

    def _name(self, mapped: Mapped, quietly: bool = False) -> None:
        name_root(mapped, self.root, self.layout, self.salt, self.adapter, quietly)

    def lease(self, tokens: Any, ttl_s: float = 30.0, extras: Sequence[bytes] | None = None) -> Lease:
        """Read-only views of the longest stored prefix, without a copy: ``with cache.lease(tokens) as lease``.

        Raises:
            InvalidRequest: as ``keys``; ``ttl_s`` is not positive.
        """
        return Lease(self._node, self.layout, self._asked(tokens, extras), ttl_s, self._name)

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("store", "cannot be pickled: call kvstore.connect() in the other process")
