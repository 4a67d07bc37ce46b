"""PrefixCache: the pages of one layout, salt and adapter in one store. The verbs users call most."""

from __future__ import annotations

import contextlib
import platform
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from kvstore import failpoint
from kvstore.client.buffers import rows_to_fill, rows_to_read
from kvstore.client.lease import Lease
from kvstore.client.local import LocalNode, Mapped
from kvstore.client.match import Match
from kvstore.client.proof import ABSENT, CHECKSUM, GENERATION, Run, address_parts, prove, stored_pages
from kvstore.client.put import PendingPut, checksums_of
from kvstore.client.reader import Reader
from kvstore.client.writer import Writer
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys, as_tokens, root_key
from kvstore.model.replica import ADDRESS_BYTES, STAMPED, FrameClass, Status
from kvstore.transfer.control import CHECKSUMS, Op

# x86-64 shows stores in their order, so that equal words before and after prove the bytes between. Elsewhere the
# checksums have to.
ORDERED = platform.machine() in ("x86_64", "AMD64")
PUTS_UNREAD_MAX = 16  # asynchronous puts whose replies nobody has read; frames granted in return wait in them
_STAMPED_BIT = np.uint64(STAMPED << 48)


class PrefixCache:
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
        self._closed = layout.attention == "full"
        self._verify = verify or not ORDERED
        self._puts: deque[PendingPut] = deque()

    # --- keys -------------------------------------------------------------------------------------------------------

    def keys(self, tokens: Any, extras: Sequence[bytes] | None = None) -> Keys:
        """Keys of all full pages of ``tokens``, to reuse over several calls.

        Args:
            extras: digests of the media inside each full page (``b""`` where none), or None.

        Raises:
            InvalidRequest: tokens are empty, negative, too large or no integers; extras do not fit the pages.
        """
        return Keys.of(as_tokens(tokens), self._page_tokens, self.root, extras)

    def _named(self, tokens: Any, extras: Sequence[bytes] | None) -> Keys:
        """Keys of all full pages."""
        if type(tokens) is Keys:
            if tokens.root != self.root or tokens.page_tokens != self._page_tokens:
                raise InvalidRequest("tokens", "these keys are of another layout, salt or adapter")
            if extras is not None:
                raise InvalidRequest("extras", "are part of the keys already")
            return tokens
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
        return Keys.of(array[:-1], self._page_tokens, self.root, extras)

    # --- reading ----------------------------------------------------------------------------------------------------

    def lookup(self, tokens: Any, extras: Sequence[bytes] | None = None) -> Match:
        """Length of the longest stored prefix, from the index alone. A hint: no page is touched, kept or marked used.

        Raises:
            InvalidRequest: as ``keys``, or the store is closed.
        """
        keys = self._asked(tokens, extras)
        mapped = self._node.mapped()
        pages = stored_pages(mapped, keys.hashes, self._closed)[0] if mapped is not None else 0
        return Match(pages * self._page_tokens, pages, "" if pages == len(keys.hashes) else ABSENT)

    def get(
        self, tokens: Any, out: Any = None, *, extras: Sequence[bytes] | None = None, verify: bool | None = None
    ) -> Match:
        """Copy the longest stored prefix into ``out``; every page is proven to be what was asked for.

        Args:
            out: ``[pages, page_bytes]``; any C-contiguous writable buffer large enough for all pages asked for: numpy
                or torch (CPU) of any dtype and shape, bytearray, memoryview. None allocates ``match.data``.
            verify: compare the checksums of every layer as well. None: as the store was opened.

        Pages after the match are not changed, except that a page which was evicted while it was read may have been
        copied in part. A page that cannot be proven ends the match; nothing raises for a miss.

        Raises:
            InvalidRequest: as ``keys``; ``out`` is too small, read-only or not contiguous (nothing was copied).
        """
        keys = self._asked(tokens, extras)
        asked = len(keys.hashes)
        target = rows_to_fill(out, self.page_bytes, asked) if out is not None else None
        node = self._node
        now_ns = time.monotonic_ns()
        if now_ns > node.check_ns:
            node.recheck(now_ns)
        mapped = node.mapped()
        if mapped is None or not asked:
            return self._missed(asked)
        pages, reason = 0, ""
        for _ in (0, 1):  # once more where a page moved or was evicted between the index and the copy
            runs, proven, reason = prove(mapped, keys, self.page_bytes, self._closed)
            if target is None or out is None:  # what is found the second time may be more
                target = np.empty((proven, self.page_bytes), np.uint8)
            if failpoint.ACTIVE:
                failpoint.hit("client.reading")
            pages, changed = _copy(runs, target, now_ns)
            if self._verify if verify is None else verify:
                pages, reason = self._verified(mapped, runs, target, pages, reason)
            if changed:
                reason = GENERATION
            if reason != GENERATION:
                break
        if reason:
            node.missed(reason)
        data = target[:pages] if out is None and target is not None else None
        return Match(pages * self._page_tokens, pages, reason, data)

    def get_async(
        self, tokens: Any, out: Any = None, *, extras: Sequence[bytes] | None = None, verify: bool | None = None
    ) -> Future[Match]:
        """``get`` in one of the store's threads. ``out`` belongs to the store until the future is done.

        Raises:
            DeadlineExceeded: too many calls are waiting already.
        """
        return self._node.workers.submit(self.get, tokens, out, extras=extras, verify=verify)

    def _missed(self, asked: int) -> Match:
        if asked:
            self._node.missed(ABSENT)
        return Match(0, 0, ABSENT if asked else "")

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
            if not (extent.info[frame:stop] & _STAMPED_BIT).all() and not self._scrub(mapped, runs):
                return page, CHECKSUM
            ours = checksums_of(target[page : page + count], layers)
            equal = (ours == extent.checksums[frame:stop]).all(axis=1)
            if not equal.all():
                self._scrub(mapped, runs)  # so that the node finds and drops it
                return page + int(equal.argmin()), CHECKSUM
        return pages, reason

    def _scrub(self, mapped: Mapped, runs: list[Run]) -> bool:
        """Have the node verify and stamp these pages. False where it cannot now, or some do not hold."""
        try:
            for part in address_parts(runs):
                count = len(part) // ADDRESS_BYTES
                reply = mapped.exchange(Op.SCRUB, count=count, body=(part,))
                if any(status != Status.OK for status in reply.body[:count]):
                    return False
        except Unavailable:
            return False
        return True

    # --- writing ----------------------------------------------------------------------------------------------------

    def put(self, tokens: Any, pages: Any, extras: Sequence[bytes] | None = None, *, checksum: bool = False) -> int:
        """Store the full pages of ``tokens``; returns how many are new. Pages already stored are skipped.

        Args:
            pages: ``[full pages, page_bytes]``: exactly so many bytes in any C-contiguous buffer of any dtype.
            extras: as in ``keys``.
            checksum: compute the layers' checksums here; otherwise the node does, soon after the seal.

        Fewer new pages than expected mean that the store is full of pages that may not leave (leased, being written),
        or that another writer was faster, or that the pages before were evicted meanwhile; what was stored is a
        prefix either way. When this returns, every counted page is sealed and survives the daemon.

        Raises:
            InvalidRequest: as ``keys``; ``pages`` is not exactly as large as the full pages, or not contiguous.
            NodeUnavailable, DeadlineExceeded: the node did not answer in time; some pages may be stored.
        """
        return self._start_put(tokens, pages, extras, checksum).result()

    def put_async(
        self, tokens: Any, pages: Any, extras: Sequence[bytes] | None = None, *, checksum: bool = False
    ) -> PendingPut:
        """``put`` without waiting for the last acknowledgements. ``pages`` may be reused as soon as this returns.

        A put whose ``result`` is never asked for is sealed all the same; its replies are read by a later put.
        """
        put = self._start_put(tokens, pages, extras, checksum)
        self._puts.append(put)
        while len(self._puts) > PUTS_UNREAD_MAX:
            with contextlib.suppress(Unavailable):  # kept for whoever asks for that result
                self._puts.popleft().result()
        return put

    def _start_put(self, tokens: Any, pages: Any, extras: Sequence[bytes] | None, checksum: bool) -> PendingPut:
        keys = self._named(tokens, extras)
        rows = rows_to_read(pages, self.page_bytes, len(keys.hashes))
        mapped = self._node.writable()
        stored, last = stored_pages(mapped, keys.hashes, self._closed)
        put = PendingPut(mapped, keys, self.frame_class, CHECKSUMS if checksum else 0)
        if stored < len(rows):
            if last is not None:
                mapped.mark_used(last)  # what the new pages hang on must not be what leaves for them
            put.send(rows, stored)
        return put

    def lease(self, tokens: Any, ttl_s: float = 30.0, extras: Sequence[bytes] | None = None) -> Lease:
        """Read-only views of the longest stored prefix, without a copy: ``with cache.lease(tokens) as lease``.

        Raises:
            InvalidRequest: as ``keys``; ``ttl_s`` is not positive.
        """
        return Lease(self._node, self.layout, self._asked(tokens, extras), ttl_s)

    def writer(
        self,
        tokens: Any,
        ttl_s: float = 30.0,
        group: str | int | None = None,
        rank: int = 0,
        ranks: int = 1,
        extras: Sequence[bytes] | None = None,
    ) -> Writer:
        """Write the full pages layer by layer: ``with cache.writer(tokens) as w: w.write_layer(0, data)``.

        Args:
            ttl_s: the reservation's deadline; what is not sealed by then is given up.
            group: what the ranks of one write have in common (a request id, say). None: a writer of its own.
            rank, ranks: which share of the KV heads this writer writes; see ``Layout.shard_heads``.

        Raises:
            InvalidRequest: as ``keys``; ``rank``, ``ranks``, ``group`` or ``ttl_s`` make no sense.
        """
        return Writer(self._node, self.layout, self._named(tokens, extras), ttl_s, group, rank, ranks)

    def reader(self, tokens: Any, timeout_s: float = 30.0, extras: Sequence[bytes] | None = None) -> Reader:
        """Read pages layer by layer while they are being written: ``cache.reader(tokens).read_layer(0, out)``.

        Args:
            timeout_s: how long one ``read_layer`` may wait.

        Raises:
            InvalidRequest: as ``keys``; ``timeout_s`` is not positive.
        """
        return Reader(self._node, self.layout, self._asked(tokens, extras), timeout_s)

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("store", "cannot be pickled: call kvstore.connect() in the other process")


def _copy(runs: list[Run], target: npt.NDArray[np.uint8], now_ns: int) -> tuple[int, bool]:
    """Copy proven runs; returns the pages that held still meanwhile, and whether one did not."""
    pages = 0
    for run in runs:
        extent, frame, page, count, words = run
        stop = frame + count
        target[page : page + count] = extent.pages[frame:stop]
        if extent.words[frame:stop].tobytes() != words:
            return page + run.unchanged(), True
        extent.last_use[frame:stop] = now_ns
        pages = page + count
    return pages, False
