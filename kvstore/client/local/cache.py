"""``LocalCache``: the pages of one layout, salt and adapter on a local node."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

import numpy as np

from kvstore import failpoint
from kvstore.client.buffers import DeviceRows, Rows, any_rows, check_seconds, rows_to_fill
from kvstore.client.local.copying import copy_proven, copy_shard, verify_copies
from kvstore.client.local.frame_copies import near_to_device
from kvstore.client.local.hints import hint_read, name_root, promote, report_damaged, want_copies
from kvstore.client.local.index_lookup import locate, pages_below, stored_beyond, stored_or_published, stored_pages
from kvstore.client.local.lease import LocalLease
from kvstore.client.local.node import LocalNode, MappedNode
from kvstore.client.local.peer_caching import PeerCaching
from kvstore.client.local.peer_reads import FetchResult, PeerReader, TimeBudget
from kvstore.client.local.put import LocalPut
from kvstore.client.local.reader import LocalReader
from kvstore.client.local.tier_reader import LowerReader
from kvstore.client.local.verify_hit import copy_runs, count_reuse, prove
from kvstore.client.local.writer import LocalWriter
from kvstore.client.match import ABSENT, ELSEWHERE, GENERATION, HERE_ALONE, NONE_BELOW, Match
from kvstore.client.prefix_cache import PrefixCache
from kvstore.cluster.lookup_plan import Stretch
from kvstore.device.host_memory import copy, empty
from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys, tag_of
from kvstore.model.replica import ADDRESS, REPLICATED_INFO, TIERS, Tier
from kvstore.model.retention import REPLICATED, Retention
from kvstore.model.shard import Shard
from kvstore.shm.counters import CARRY, LOOKUP, ONE_GET, PUT, PUT_ASYNC, REUSE_SAMPLED, SessionCounters
from kvstore.shm.header import Header
from kvstore.wire.control import CHECKSUMS
from kvstore.wire.data import ChainQuery

# x86-64 keeps the order of stores, so equal words before and after a copy prove the bytes in between. On other
# architectures the checksums must prove them.
ORDERED = platform.machine() in ("x86_64", "AMD64")
_REPLICAS: Final = Header.replicas.position
WHOLE_BYTES: Final = 4 << 20  # bytes of whole pages that a shard reads at a time, or one page if that is larger


class LocalCache(PrefixCache):
    """A prefix cache that reads index, records and pages in place. The daemon is needed only to write, and to promote
    pages from a lower tier."""

    def __init__(
        self,
        node: LocalNode,
        layout: Layout,
        salt: str,
        adapter: str,
        verify: bool,
        replicas: int | None = None,
    ) -> None:
        super().__init__(layout, salt, adapter, replicas)
        self._node = node
        self._counters: tuple[SessionCounters | None, int] = None, 0  # the counters of gets, and their row
        self._closed = layout.attention == "full"
        self._chain = ChainQuery(layout.fingerprint, salt, adapter, self.frame_class, self._closed)
        self._peer_caching = PeerCaching(node, self._chain)
        self._verify = verify or not ORDERED
        self._pool_tag: tuple[bytes | None, bytes] = None, b""  # the pool's secret, and this root's tag under it

    @property
    def node(self) -> LocalNode:
        """The node that this cache reads."""
        return self._node

    def _tag(self) -> bytes:
        """Return the suffix that this root's keys have in the pool that was mapped last."""
        mapped, (secret, tag) = self._node.last, self._pool_tag
        if mapped is not None and mapped.secret is not secret:
            tag = tag_of(mapped.secret, self.root)
            self._pool_tag = mapped.secret, tag
        return tag

    # --- reading ----------------------------------------------------------------------------------------------------

    def lookup(self, tokens: Any, extras: Sequence[bytes] | None = None) -> Match:
        """Return the longest stored prefix: in this node's tiers, and then on other nodes. Copies and leases
        nothing."""
        start_ns = time.monotonic_ns()
        mapped = self._node.mapped()
        keys = self._matchable_keys(tokens, extras)
        pages, below, requested = 0, NONE_BELOW, len(keys.hashes)
        if mapped is not None:
            pages = stored_pages(mapped, keys, self._closed)[0]
            if pages < requested:
                pages, below = stored_beyond(mapped, keys, pages, self._closed, readable=True)
            mapped.counters.took(LOOKUP, start_ns)
            if pages < requested and (stretches := self.peer_stretches(keys, pages)):
                return self._match_with_peers(stretches, pages, requested, below)
        return Match(pages * self._page_tokens, pages, "" if pages == requested else ABSENT, None, below)

    def peer_stretches(self, keys: Keys, pages: int, budget: TimeBudget | None = None) -> list[Stretch]:
        """Return which other nodes of the pool have the pages after the first ``pages``."""
        peer_reader = self._node.peer_reader
        return peer_reader.find(self._chain, keys, pages, (), budget) if peer_reader is not None else []

    def _match_with_peers(
        self, stretches: list[Stretch], pages: int, requested: int, below: Mapping[Tier, int]
    ) -> Match:
        """Return the match of the first ``pages`` on this node, followed by the pages of other nodes."""
        nodes, tiers, pages = dict[str, int](), dict(below), pages + stretches[-1].stop
        for stretch in stretches:
            nodes[stretch.node] = nodes.get(stretch.node, 0) + stretch.stop - stretch.start
            for number, tier in enumerate(TIERS):
                if tier != Tier.DRAM and (count := stretch.tiers.count(number)):
                    tiers[tier] = tiers.get(tier, 0) + count
        return Match(pages * self._page_tokens, pages, "" if pages == requested else ABSENT, None, tiers, nodes)

    def get(
        self, tokens: Any, out: Any = None, *, extras: Sequence[bytes] | None = None, verify: bool | None = None
    ) -> Match:
        """Copy the longest stored prefix into ``out`` or a new array: from DRAM, lower tiers, and other nodes."""
        now_ns = time.monotonic_ns()
        node = self._node
        is_sampled = False  # some gets are timed
        if now_ns > node.check_ns:
            node.recheck(now_ns)
            is_sampled = True
        mapped = node.mapped()
        keys = self._matchable_keys(tokens, extras)
        requested = len(keys.hashes)
        if out is not None and (match := self._to_device(keys, out, verify)) is not None:
            return match
        target = rows_to_fill(out, self.page_bytes, requested) if out is not None else None
        if mapped is None or not requested:
            return self._missed(requested, out)
        pages, below, nodes, reason, budget = 0, NONE_BELOW, HERE_ALONE, "", None
        for _ in (0, 1):  # try twice if a page is moved or evicted between the lookup and the copy
            runs, proven, reason = prove(mapped, keys, self.page_bytes, self._closed)
            if target is None or out is None:  # the second try may find more pages
                budget = budget or TimeBudget()
                pages_max = proven if not reason else self._pages_max(mapped, keys, proven, reason, budget)
                target = empty((pages_max, self.page_bytes))
            if failpoint.ACTIVE:
                failpoint.hit("client.reading")
            if is_sampled and not now_ns % REUSE_SAMPLED:
                count_reuse(mapped.counters, runs, proven, now_ns)
            pages, changed = copy_runs(runs, target, now_ns)
            if self._verify if verify is None else verify:
                pages, reason = verify_copies(mapped, runs, target, pages, reason, self.layout.layers)
            if changed:
                reason = GENERATION
            if reason != GENERATION:
                break
        if reason:
            checked = self._verify if verify is None else verify
            if reason in ELSEWHERE and target is not None:
                pages, below, reason = self._read_below(mapped, keys, target, pages, reason, checked)
            from_below, from_node, from_hbm = sum(below.values()), pages, below.get(Tier.HBM, 0)
            if reason in ELSEWHERE and target is not None and node.peer_reader is not None:
                rest = target[pages:]
                pages, below, nodes, reason = self._read_from_peers(
                    node.peer_reader, keys, rest, pages, below, checked, budget or TimeBudget()
                )
            if reason:
                node.missed(reason)
            row = mapped.row(self.frame_class)
            mapped.counters.got(row, requested, from_node - from_below, from_below - from_hbm, reason, from_hbm)
        else:
            counters, row = self._counters
            if counters is not mapped.counters:
                counters, row = self._counters = mapped.counters, mapped.row(self.frame_class)
            word = counters.words[row] + ONE_GET + pages
            if word < CARRY:
                counters.words[row] = word
            else:
                counters.carry(row, word)
        if is_sampled:
            mapped.counters.timed(mapped.row(self.frame_class), now_ns)
        data = target[:pages] if out is None and target is not None else None
        return Match(pages * self._page_tokens, pages, reason, data, below, nodes)

    def get_async(
        self, tokens: Any, out: Any = None, *, extras: Sequence[bytes] | None = None, verify: bool | None = None
    ) -> Future[Match]:
        """Start a ``get`` in another thread."""
        return self._node.workers.submit(self.get, tokens, out, extras=extras, verify=verify)

    def prefetch(self, tokens: Any, timeout_s: float = 5.0, extras: Sequence[bytes] | None = None) -> Match:
        """Fetch pages of other nodes, promote pages of lower tiers, and return the match in DRAM."""
        check_seconds(timeout_s, "timeout_s")
        mapped, pages = self._node.mapped(), 0
        keys = self._matchable_keys(tokens, extras)
        self._fetch(keys, timeout_s)
        if mapped is not None:
            pages = stored_pages(mapped, keys, self._closed)[0]
            if pages_below(mapped, keys, pages, self._closed):  # otherwise the node has no page of this root to count
                self._name(mapped)
                promote(mapped, keys, self._closed, time.monotonic() + timeout_s)
                pages = stored_pages(mapped, keys, self._closed)[0]
        return Match(pages * self._page_tokens, pages, "" if pages == len(keys) else ABSENT)

    def _missed(self, requested: int, out: Any) -> Match:
        if requested:
            self._node.missed(ABSENT)
        data = np.empty((0, self.page_bytes), np.uint8) if out is None else None
        return Match(0, 0, ABSENT if requested else "", data)

    # --- reading pages that are not in DRAM -------------------------------------------------------------------------

    def _pages_max(self, mapped: MappedNode, keys: Keys, proven: int, reason: str, budget: TimeBudget) -> int:
        """Return the largest number of pages that a get can return, if the first ``proven`` pages are in DRAM and the
        next one is not for ``reason``."""
        if reason not in ELSEWHERE:
            return proven
        pages = stored_beyond(mapped, keys, proven, self._closed)[0]
        return pages + sum(stretch.stop - stretch.start for stretch in self.peer_stretches(keys, pages, budget))

    def _fetch(self, keys: Keys, timeout_s: float) -> None:
        """Fetch the pages of ``keys`` that are only on other nodes into this node's DRAM."""
        self._peer_caching.fetch(keys, TimeBudget(timeout_s, local_wait_s=timeout_s), self._name_within)

    def _read_from_peers(
        self,
        peer_reader: PeerReader,
        keys: Keys,
        target: Rows,
        pages: int,
        below: Mapping[Tier, int],
        verify: bool,
        budget: TimeBudget,
    ) -> tuple[int, Mapping[Tier, int], Mapping[str, int], str]:
        """Read the pages after the first ``pages`` from other nodes into ``target``.

        Pages that are worth caching here are received in frames of this node, and copied from there. The others are
        received directly in ``target``.

        Returns:
            The number of pages, their number by tier and by other node, and why there are no more.
        """
        start, result = pages, FetchResult()
        cached = self._peer_caching.pages_worth_caching(peer_reader, keys[pages : pages + len(target)])
        if cached:
            fetched = self._peer_caching.fetch(keys[: pages + cached], budget, self._name_within)
            mapped, copied = self._node.mapped(), 0
            if mapped is not None:
                copied, _ = copy_proven(mapped, keys[pages : pages + cached], target, self._chain, verify)
            pages, target = pages + copied, target[copied:]
            result = fetched if copied >= fetched.pages else result
        direct = peer_reader.read(self._chain, keys, target, pages, budget)
        peer_reader.history.add(keys.links[start : pages + direct.pages])
        result.add(direct)
        pages += direct.pages
        tiers = Counter(below) + Counter({tier: n for tier, n in result.tiers.items() if tier != Tier.DRAM})
        return pages, tiers, result.nodes or HERE_ALONE, "" if pages == len(keys) else ABSENT

    def _read_below(
        self, mapped: MappedNode, keys: Keys, target: Rows, pages: int, reason: str, verify: bool
    ) -> tuple[int, Mapping[Tier, int], str]:
        """Read the pages after the first ``pages`` from the lower tiers into ``target``.

        DRAM is read again if a page has been promoted since. It is also read again if the layout is not
        prefix-closed, since its pages may be spread over the tiers.

        Returns:
            The number of pages, their number by lower tier, and why there are no more.
        """
        limit, has_retried = min(len(keys), len(target)), False
        below: dict[Tier, int] = {}
        while reason in ELSEWHERE and pages < limit:
            rest, rows = keys[pages:limit], target[pages:limit]
            count, tier_reason = self._read_lower_tiers(mapped, rest, rows, below)
            pages += count
            reason = tier_reason if count or tier_reason != ABSENT else reason
            is_spread = bool(count) and not self._closed
            if tier_reason not in ELSEWHERE or not (is_spread or (tier_reason != ABSENT and not has_retried)):
                break
            has_retried = has_retried or not is_spread
            rest, rows = rest[count:], rows[count:]
            copied, reason = copy_proven(mapped, rest, rows, self._chain, verify)
            pages += copied
        return pages, below, reason or ("" if pages == len(keys) else ABSENT)

    def _read_lower_tiers(self, mapped: MappedNode, keys: Keys, rows: Rows, below: dict[Tier, int]) -> tuple[int, str]:
        """Read the leading pages of ``keys`` into ``rows``. Each tier continues where the next faster tier ends. Add
        the number of pages from each tier to ``below``. Return how many pages were read, and why no more."""
        pages, reason = 0, ABSENT
        for tier, reader in mapped.below.items():
            count, tier_reason = self._read_tier(mapped, reader, keys, rows)
            if count:
                pages, below[tier] = pages + count, below.get(tier, 0) + count
                keys, rows = keys[count:], rows[count:]
            reason = tier_reason if count or tier_reason != ABSENT else reason
            if tier_reason not in ELSEWHERE:
                break
        return pages, reason

    def _read_tier(self, mapped: MappedNode, reader: LowerReader, keys: Keys, rows: Rows) -> tuple[int, str]:
        """Read the leading pages of ``keys`` from one tier into ``rows``. Return how many were read, and why no
        more."""
        located = locate(mapped, reader, keys[: len(rows)], self._closed)
        if not located:
            return 0, ABSENT
        read = reader.start(located, keys, self.frame_class, rows)
        self._name(mapped, as_hint=True)
        hint_read(mapped, read.addresses)  # while the devices are reading
        pages, reason = read.result(mapped.timeout_s)
        if read.damaged:
            report_damaged(mapped, read.damaged)
        return pages, reason

    # --- writing ----------------------------------------------------------------------------------------------------

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
        """Store pages, and return how many are new. Without ``wait``, pages are published where that is possible, and
        the node seals them later."""
        start_ns = time.monotonic_ns()
        # The usual case, with fewer calls: no hints, and one copy.
        is_plain = retention == () and replicas is None and self.replicas is None
        is_plain = is_plain and self._node.writable().words[_REPLICAS] <= 1
        keys = self._page_keys(tokens, extras) if is_plain else self._keys_to_store(tokens, extras, retention, replicas)
        put = self._start_put(keys, pages, checksum, wait)
        new = put.result()
        if wait and keys.hints and keys.hints[0] & REPLICATED:
            put.wait_for_copies()
        put.mapped.counters.took(PUT, start_ns)
        return new

    def put_async(
        self,
        tokens: Any,
        pages: Any,
        extras: Sequence[bytes] | None = None,
        *,
        checksum: bool = False,
        retention: Retention | Sequence[Retention] = (),
        replicas: int | None = None,
    ) -> LocalPut:
        """Start storing pages. Return a future with the number of new pages."""
        start_ns = time.monotonic_ns()
        put = self._start_put(self._keys_to_store(tokens, extras, retention, replicas), pages, checksum, True)
        put.mapped.counters.took(PUT_ASYNC, start_ns)
        put.leave()
        return put

    def _start_put(self, keys: Keys, pages: Any, checksum: bool, wait: bool) -> LocalPut:
        rows = any_rows(pages, self.page_bytes, len(keys.hashes))
        mapped = self._node.writable()
        if (mapped.secret, keys.tag) != self._pool_tag:
            keys = mapped.in_pool(keys)
        if not mapped.is_named(self.root):
            self._name(mapped)
        publishes = not wait and mapped.publishes
        count_stored = stored_or_published if publishes else stored_pages
        stored, last = count_stored(mapped, keys, self._closed)
        below = pages_below(mapped, keys, stored, self._closed) if stored < len(rows) else ()
        if stored and keys.hints and keys.hints[0] & REPLICATED and _has_one_replica(mapped, last):
            want_copies(mapped, keys.hashes[:stored], owed=True)
        put = LocalPut(mapped, keys, self.frame_class, CHECKSUMS if checksum else 0, below, publishes)
        if stored < len(rows):
            if last is not None:
                mapped.dram.mark_used(last)  # so that the parent of the new pages is not evicted to make room for them
            put.send(rows, stored)
        return put

    def _copies(self, replicas: int | None) -> int:
        """Return how many copies a put asks for. Raises InvalidRequest, and NodeUnavailable if the node is not ready
        and decides."""
        copies = super()._copies(replicas)
        if replicas or self.replicas:
            mapped = self._node.writable() if copies > 1 else None
            if mapped is not None and not mapped.words[_REPLICAS]:
                raise InvalidRequest("replicas", f"must be 1, because node {self._node.name} is in no pool (got 2)")
            return copies
        return self._node.writable().words[_REPLICAS] or 1

    def _name(self, mapped: MappedNode, as_hint: bool = False, timeout_s: float | None = None) -> None:
        """Send the node the tenant and layout of this cache's root, if it does not have them."""
        name_root(mapped, self.root, self.layout, self.salt, self.adapter, as_hint, timeout_s)

    def _name_within(self, mapped: MappedNode, timeout_s: float) -> None:
        self._name(mapped, timeout_s=timeout_s)

    # --- leases and layers ------------------------------------------------------------------------------------------

    def _lease(self, keys: Keys, ttl_s: float) -> LocalLease:
        timeout_s = self._node.timeout_s
        self._fetch(keys, timeout_s)
        self._peer_caching.copy_from_engines(keys, TimeBudget(timeout_s, local_wait_s=timeout_s), self._name_within)
        return LocalLease(self._node, self.layout, keys, ttl_s, self._name)

    def _writer(self, shard: Shard, keys: Keys, ttl_s: float, group: str | int | None) -> LocalWriter:
        return LocalWriter(self._node, shard, keys, ttl_s, group, self._name)

    def _reader(self, keys: Keys, timeout_s: float) -> LocalReader:
        self._fetch(keys, timeout_s)
        return LocalReader(self._node, self.layout, keys, timeout_s, self._name)

    # --- device memory and shards -----------------------------------------------------------------------------------

    def _get_to_device(self, keys: Keys, rows: DeviceRows, verify: bool | None) -> Match:
        """Copy pages into device memory. The leading pages are copied directly from the node's or an engine's memory,
        all others through a bounce buffer. Pages that must be verified all go through the bounce buffer."""
        pages, hbm, reason = 0, 0, ABSENT
        if not (self._verify if verify is None else verify):
            pages, hbm, reason = near_to_device(self._node, keys, rows, self._chain)
        if reason not in ELSEWHERE or pages == len(keys):
            return Match(pages * self._page_tokens, pages, reason, None, {Tier.HBM: hbm})
        rest = super()._get_to_device(keys[pages:], rows[pages:], verify)
        below = {Tier.HBM: hbm + rest.tiers.get(Tier.HBM, 0), Tier.NVME: rest.tiers.get(Tier.NVME, 0)}
        pages += rest.pages
        return Match(pages * self._page_tokens, pages, rest.reason, None, below, rest.nodes)

    def _get_shard(self, keys: Keys, shard: Shard, target: Rows | None, verify: bool | None) -> Match:
        """Copy a shard's part of the leading pages into ``target`` or a new array."""
        requested, is_allocated = len(keys), target is None
        self._fetch(keys, self._node.timeout_s)
        if target is None:  # pages that are sealed after this lookup are ignored
            keys = keys[: self.lookup(keys).pages]
            target = empty((len(keys), shard.nbytes))
        node, now_ns = self._node, time.monotonic_ns()
        if now_ns > node.check_ns:
            node.recheck(now_ns)
        mapped, checked = node.mapped(), self._verify if verify is None else verify
        keys = mapped.in_pool(keys) if mapped is not None else keys
        pages, below, reason = 0, NONE_BELOW, ABSENT
        if mapped is not None and not checked:
            pages, reason = copy_shard(mapped, keys, shard, target, self._chain, now_ns)
        if mapped is not None and pages < len(keys) and reason in ELSEWHERE:
            count, tiers, reason = self._get_shard_from_pages(keys[pages:], shard, target[pages:], checked)
            pages, below = pages + count, {tier: tiers[tier] for tier in mapped.below}
        elif pages < requested:
            node.missed(reason or ABSENT)
        reason = "" if pages == requested else reason or ABSENT
        data = target[:pages] if is_allocated else None
        return Match(pages * self.layout.page_tokens, pages, reason, data, below)

    def _get_shard_from_pages(
        self, keys: Keys, shard: Shard, rows: Rows, verify: bool
    ) -> tuple[int, Counter[Tier], str]:
        """Read whole pages, and copy the shard's part of each into ``rows``. Return how many pages, how many from each
        tier, and why no more."""
        parts = shard.unpacked(rows)
        step = max(1, WHOLE_BYTES // self.page_bytes)
        whole = empty((min(step, len(keys)), self.page_bytes))
        pages, tiers = 0, Counter[Tier]()
        while True:
            match = self.get(keys[pages : pages + step], whole, verify=verify)
            copy(parts[pages : pages + match.pages], shard.part(whole[: match.pages]))
            pages, tiers = pages + match.pages, tiers + Counter(match.tiers)
            if match.reason or pages == len(keys):
                return pages, tiers, match.reason


def _has_one_replica(mapped: MappedNode, last: bytes | None) -> bool:
    """Return whether the last stored page, at this packed address in DRAM, was put with one replica."""
    if last is None:
        return False
    extent_number, frame, _ = ADDRESS.unpack(last)
    extent = mapped.dram.extent(extent_number)
    return extent is not None and not int(extent.info[frame]) & REPLICATED_INFO
