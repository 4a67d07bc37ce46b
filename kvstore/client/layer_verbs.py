"""LayerVerbs: what a prefix cache can do with layers and shards of pages: write, follow, and read a shard's part."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.client.buffers import rows_to_fill
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.local.proof import copy_runs, prove
from kvstore.client.match import ABSENT, ELSEWHERE, GENERATION, Match
from kvstore.client.reader import Reader
from kvstore.client.writer import Writer
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.replica import FrameClass, Tier
from kvstore.model.shard import Shard

WHOLE_BYTES: Final = 4 << 20  # of pages that a shard's reader takes whole at a time, where one is not larger


class LayerVerbs:
    """Mixed into every prefix cache."""

    layout: Layout
    page_bytes: int
    frame_class: FrameClass
    _node: LocalNode
    _closed: bool
    _verify: bool

    @abstractmethod
    def _asked(self, tokens: Any, extras: Sequence[bytes] | None) -> Keys:
        """Keys of the pages that a prompt can match."""

    @abstractmethod
    def _named(self, tokens: Any, extras: Sequence[bytes] | None) -> Keys:
        """Keys of all full pages."""

    @abstractmethod
    def _name(self, mapped: Mapped, quietly: bool = False) -> None:
        """Tell the node whose these pages are."""

    @abstractmethod
    def lookup(self, tokens: Any, extras: Sequence[bytes] | None = None) -> Match:
        """See ``PrefixCache.lookup``."""

    @abstractmethod
    def get(
        self, tokens: Any, out: Any = None, *, extras: Sequence[bytes] | None = None, verify: bool | None = None
    ) -> Match:
        """See ``PrefixCache.get``."""

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
    ) -> Writer:
        """Write the full pages layer by layer: ``with cache.writer(tokens) as w: w.write_layer(0, data)``.

        Args:
            ttl_s: the reservation's deadline; what is not sealed by then is given up.
            group: what the shards of one write have in common (a request id, say). None: a writer of its own.
            rank, ranks: which share of the KV heads this writer writes; see ``Layout.shard_heads``.
            stage, stages: which layers it writes; see ``Layout.shard_layers``. ``ranks * stages`` is at most 8.

        Raises:
            InvalidRequest: as ``keys``; ``ttl_s``, ``group``, or a number of the shard makes no sense.
        """
        shard = Shard(self.layout, rank, ranks, stage, stages)
        return Writer(self._node, shard, self._named(tokens, extras), ttl_s, group, self._name)

    def reader(self, tokens: Any, timeout_s: float = 30.0, extras: Sequence[bytes] | None = None) -> Reader:
        """Read pages layer by layer while they are being written: ``cache.reader(tokens).read_layer(0, out)``.

        Args:
            timeout_s: how long one ``read_layer`` may wait.

        Raises:
            InvalidRequest: as ``keys``; ``timeout_s`` is not positive.
        """
        return Reader(self._node, self.layout, self._asked(tokens, extras), timeout_s, self._name)

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
        are read; those on NVMe are read whole, a few at a time.

        Raises:
            InvalidRequest: as ``get``; a number of the shard makes no sense.
        """
        shard = Shard(self.layout, rank, ranks, stage, stages)
        keys = self._asked(tokens, extras)
        asked = len(keys)
        target = rows_to_fill(out, shard.nbytes, asked, apart=True) if out is not None else None
        if target is None:  # what is sealed from now on is not looked for
            keys = keys[: self.lookup(keys).pages]
            target = np.empty((len(keys), shard.nbytes), np.uint8)
        node, now_ns = self._node, time.monotonic_ns()
        if now_ns > node.check_ns:
            node.recheck(now_ns)
        mapped, checked = node.mapped(), self._verify if verify is None else verify
        keys = mapped.in_pool(keys) if mapped is not None else keys
        pages, nvme_pages, reason = 0, 0, ABSENT
        if mapped is not None and not checked:
            pages, reason = self._shard_in_dram(mapped, keys, shard, target, now_ns)
        if mapped is not None and pages < len(keys) and reason in ELSEWHERE:
            count, nvme_pages, reason = self._shard_of_whole(keys[pages:], shard, target[pages:], checked)
            pages += count
        elif pages < asked:
            node.missed(reason or ABSENT)
        reason = "" if pages == asked else reason or ABSENT
        data = target[:pages] if out is None else None
        return Match(pages * self.layout.page_tokens, pages, reason, data, nvme_pages)

    def _shard_in_dram(
        self, mapped: Mapped, keys: Keys, shard: Shard, target: npt.NDArray[np.uint8], now_ns: int
    ) -> tuple[int, str]:
        """Copy a shard's part of the leading pages that are in DRAM; how many that were, and why not more."""
        runs, _, reason = prove(mapped, keys, self.page_bytes, self._closed)
        pages, changed = copy_runs(runs, shard.unpacked(target), now_ns, shard)
        reason = GENERATION if changed else reason
        goes_on = reason in ELSEWHERE and pages < len(keys)  # with pages that count when they are got whole
        if pages or not goes_on:
            mapped.counters.got(mapped.row(self.frame_class), pages if goes_on else len(keys), pages, 0, reason)
        return pages, reason

    def _shard_of_whole(
        self, keys: Keys, shard: Shard, rows: npt.NDArray[np.uint8], verify: bool
    ) -> tuple[int, int, str]:
        """The same of pages that are got whole; how many, how many of them came from NVMe, and why not more."""
        parts = shard.unpacked(rows)
        step = max(1, WHOLE_BYTES // self.page_bytes)
        whole = np.empty((min(step, len(keys)), self.page_bytes), np.uint8)
        pages = nvme_pages = 0
        while True:
            match = self.get(keys[pages : pages + step], whole, verify=verify)
            parts[pages : pages + match.pages] = shard.part(whole[: match.pages])
            pages, nvme_pages = pages + match.pages, nvme_pages + match.tiers.get(Tier.NVME, 0)
            if match.reason or pages == len(keys):
                return pages, nvme_pages, match.reason
