"""LocalCache: the pages of one layout, salt and adapter on a node of this machine."""

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
from kvstore.client.local.hints import hint_read, name_root, promote, report_damaged
from kvstore.client.local.index_lookup import locate, pages_below, stored_beyond, stored_or_published, stored_pages
from kvstore.client.local.lease import LocalLease
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.local.peer_caching import Keeping
from kvstore.client.local.peer_reads import Brought, Elsewhere, Patience
from kvstore.client.local.put import LocalPut
from kvstore.client.local.reader import LocalReader
from kvstore.client.local.tier_reader import LowerReader
from kvstore.client.local.verify_hit import copy_runs, count_reuse, prove
from kvstore.client.local.writer import LocalWriter
from kvstore.client.match import ABSENT, ELSEWHERE, GENERATION, HERE_ALONE, NONE_BELOW, Match
from kvstore.client.prefix_cache import PrefixCache
from kvstore.cluster.directory import TIERS
from kvstore.cluster.lookup_plan import Stretch
from kvstore.device.host_memory import copy, empty
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys, tag_of
from kvstore.model.replica import Tier
from kvstore.model.retention import Retention
from kvstore.model.shard import Shard
from kvstore.shm.counters import CARRY, LOOKUP, ONE_GET, PUT, PUT_ASYNC, REUSE_SAMPLED, SessionCounters
from kvstore.wire.control import CHECKSUMS
from kvstore.wire.data import ChainQuery

# x86-64 keeps stores in order, so equal words before and after a copy prove the bytes in between. Other architectures
# need the checksums for that.
ORDERED = platform.machine() in ("x86_64", "AMD64")
WHOLE_BYTES: Final = 4 << 20  # of whole pages read at a time for a shard, or one page if that is larger


class LocalCache(PrefixCache):
    """A prefix cache that reads index, records and pages in place. Only writes, and pages to be brought up from a lower
    tier, need the daemon.
    """

    def __init__(self, node: LocalNode, layout: Layout, salt: str, adapter: str, verify: bool) -> None:
        super().__init__(layout, salt, adapter)
        self._node = node
        self._counted: tuple[SessionCounters | None, int] = None, 0  # where gets count
        self._closed = layout.attention == "full"
        self._wanted = ChainQuery(layout.fingerprint, salt, adapter, self.frame_class, self._closed)
        self._keeping = Keeping(node, self._wanted)
        self._verify = verify or not ORDERED
        self._pool: tuple[bytes | None, bytes] = None, b""  # its secret, and the tag of this root under it

    @property
    def node(self) -> LocalNode:
        """The node that this cache reads."""
        return self._node

    def _tag(self) -> bytes:
        """Return the suffix that this root's keys have in the pool that was mapped last."""
        return self._tag_in(self._node.last)

    def _tag_in(self, mapped: Mapped | None) -> bytes:
        if mapped is not None and mapped.secret is not self._pool[0]:
            self._pool = mapped.secret, tag_of(mapped.secret, self.root)
        return self._pool[1]

    # --- reading ----------------------------------------------------------------------------------------------------

    def lookup(self, tokens: Any, extras: Sequence[bytes] | None = None) -> Match:
        """See ``PrefixCache.lookup``."""
        start_ns = time.monotonic_ns()
        mapped = self._node.mapped()
        keys = self._matchable_keys(tokens, extras)
        pages, below, asked = 0, NONE_BELOW, len(keys.hashes)
        if mapped is not None:
            pages = stored_pages(mapped, keys, self._closed)[0]
            if pages < asked:
                pages, below = stored_beyond(mapped, keys, pages, self._closed, readable=True)
            mapped.counters.took(LOOKUP, start_ns)
            if pages < asked and (found := self.elsewhere(keys, pages)):
                return self._match_with(found, pages, asked, below)
        return Match(pages * self._page_tokens, pages, "" if pages == asked else ABSENT, None, below)

    def elsewhere(self, keys: Keys, pages: int, patience: Patience | None = None) -> list[Stretch]:
        """Return where other nodes of the pool have the pages after the first ``pages``."""
        elsewhere = self._node.elsewhere
        return elsewhere.seek(self._wanted, keys, pages, (), patience) if elsewhere is not None else []

    def _match_with(self, found: list[Stretch], pages: int, asked: int, below: Mapping[Tier, int]) -> Match:
        """Return the match of the first ``pages`` followed by these pages of other nodes."""
        nodes, tiers, pages = dict[str, int](), dict(below), pages + found[-1].stop
        for each in found:
            nodes[each.node] = nodes.get(each.node, 0) + each.stop - each.start
            for number, tier in enumerate(TIERS):
                if tier != Tier.DRAM and (count := each.tiers.count(number)):
                    tiers[tier] = tiers.get(tier, 0) + count
        return Match(pages * self._page_tokens, pages, "" if pages == asked else ABSENT, None, tiers, nodes)

    def get(
        self, tokens: Any, out: Any = None, *, extras: Sequence[bytes] | None = None, verify: bool | None = None
    ) -> Match:
        """See ``PrefixCache.get``."""
        now_ns = time.monotonic_ns()
        node = self._node
        timed = False
        if now_ns > node.check_ns:
            node.recheck(now_ns)
            timed = True
        mapped = node.mapped()
        keys = self._matchable_keys(tokens, extras)
        asked = len(keys.hashes)
        if out is not None and (match := self._to_device(keys, out, verify)) is not None:
            return match
        target = rows_to_fill(out, self.page_bytes, asked) if out is not None else None
        if mapped is None or not asked:
            return self._missed(asked, out)
        pages, below, nodes, reason, patience = 0, NONE_BELOW, HERE_ALONE, "", None
        for _ in (0, 1):  # again if a page moved or was evicted between index and copy
            runs, proven, reason = prove(mapped, keys, self.page_bytes, self._closed)
            if target is None or out is None:  # the second try may find more
                patience = patience or Patience()
                found = proven if not reason else self._found(mapped, keys, proven, reason, patience)
                target = empty((found, self.page_bytes))
            if failpoint.ACTIVE:
                failpoint.hit("client.reading")
            if timed and not now_ns % REUSE_SAMPLED:
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
                pages, below, reason = self._beyond(mapped, keys, target, pages, reason, checked)
            read, here, hbm = sum(below.values()), pages, below.get(Tier.HBM, 0)
            if reason in ELSEWHERE and target is not None and node.elsewhere is not None:
                others = node.elsewhere, keys, target[pages:], pages, below, checked, patience or Patience()
                pages, below, nodes, reason = self._from_others(*others)
            if reason:
                node.missed(reason)
            mapped.counters.got(mapped.row(self.frame_class), asked, here - read, read - hbm, reason, hbm)
        else:
            counters, row = self._counted
            if counters is not mapped.counters:
                counters, row = self._counted = mapped.counters, mapped.row(self.frame_class)
            word = counters.words[row] + ONE_GET + pages
            if word < CARRY:
                counters.words[row] = word
            else:
                counters.carry(row, word)
        if timed:
            mapped.counters.timed(mapped.row(self.frame_class), now_ns)
        data = target[:pages] if out is None and target is not None else None
        return Match(pages * self._page_tokens, pages, reason, data, below, nodes)

    def get_async(
        self, tokens: Any, out: Any = None, *, extras: Sequence[bytes] | None = None, verify: bool | None = None
    ) -> Future[Match]:
        """See ``PrefixCache.get_async``."""
        return self._node.workers.submit(self.get, tokens, out, extras=extras, verify=verify)

    def prefetch(self, tokens: Any, timeout_s: float = 5.0, extras: Sequence[bytes] | None = None) -> Match:
        """See ``PrefixCache.prefetch``."""
        check_seconds(timeout_s, "timeout_s")
        mapped, pages = self._node.mapped(), 0
        keys = self._matchable_keys(tokens, extras)
        self._gather(keys, timeout_s)
        if mapped is not None:
            pages = stored_pages(mapped, keys, self._closed)[0]
            if pages_below(mapped, keys, pages, self._closed):  # else nothing will be stored: tell the node nothing
                self._name(mapped)
                promote(mapped, keys, self._closed, time.monotonic() + timeout_s)
                pages = stored_pages(mapped, keys, self._closed)[0]
        return Match(pages * self._page_tokens, pages, "" if pages == len(keys) else ABSENT)

    def _missed(self, asked: int, out: Any) -> Match:
        if asked:
            self._node.missed(ABSENT)
        data = np.empty((0, self.page_bytes), np.uint8) if out is None else None
        return Match(0, 0, ABSENT if asked else "", data)

    # --- reading what is not in memory ------------------------------------------------------------------------------

    def _found(self, mapped: Mapped, keys: Keys, proven: int, reason: str, patience: Patience) -> int:
        """Return how many pages a get may return if memory has the first ``proven`` and lacks the next for
        ``reason``."""
        if reason not in ELSEWHERE:
            return proven
        pages = stored_beyond(mapped, keys, proven, self._closed)[0]
        return pages + sum(each.stop - each.start for each in self.elsewhere(keys, pages, patience))

    def _gather(self, keys: Keys, within_s: float) -> None:
        """Fetch the pages of ``keys`` that other nodes have into this machine's memory."""
        self._keeping.gather(keys, Patience(within_s, here_s=within_s), self._names)

    def _from_others(
        self,
        elsewhere: Elsewhere,
        keys: Keys,
        target: Rows,
        pages: int,
        below: Mapping[Tier, int],
        verify: bool,
        patience: Patience,
    ) -> tuple[int, Mapping[Tier, int], Mapping[str, int], str]:
        """Continue after ``pages`` with pages of other nodes; return how many, by tier and by node, and why not more.
        Pages to be cached here are received in frames of this node, the others directly in ``target``."""
        start, brought = pages, Brought()
        kept = self._keeping.worth(elsewhere, keys[pages : pages + len(target)])
        if kept:
            came = self._keeping.gather(keys[: pages + kept], patience, self._names)
            mapped, copied = self._node.mapped(), 0
            if mapped is not None:
                copied, _ = copy_proven(mapped, keys[pages : pages + kept], target, self._wanted, verify)
            pages, target = pages + copied, target[copied:]
            brought = came if copied >= came.pages else brought
        direct = elsewhere.read(self._wanted, keys, target, pages, patience)
        elsewhere.brought.add(keys.links[start : pages + direct.pages])
        brought.add(direct)
        pages += direct.pages
        tiers = Counter(below) + Counter({tier: n for tier, n in brought.tiers.items() if tier != Tier.DRAM})
        return pages, tiers, brought.nodes or HERE_ALONE, "" if pages == len(keys) else ABSENT

    def _beyond(
        self, mapped: Mapped, keys: Keys, target: Rows, pages: int, reason: str, verify: bool
    ) -> tuple[int, Mapping[Tier, int], str]:
        """Continue after ``pages`` from memory: with the tiers below, and with memory again if a page has moved there,
        or if the layout is not prefix-closed and its pages are spread over tiers.

        Returns the number of pages, how many came from each lower tier, and why not more.
        """
        limit, retried = min(len(keys), len(target)), False
        below: dict[Tier, int] = {}
        while reason in ELSEWHERE and pages < limit:
            rest, rows = keys[pages:limit], target[pages:limit]
            count, why = self._from_below(mapped, rest, rows, below)
            pages += count
            reason = why if count or why != ABSENT else reason
            scattered = bool(count) and not self._closed
            if why not in ELSEWHERE or not (scattered or (why != ABSENT and not retried)):
                break
            retried = retried or not scattered
            rest, rows = rest[count:], rows[count:]
            copied, reason = copy_proven(mapped, rest, rows, self._wanted, verify)
            pages += copied
        return pages, below, reason or ("" if pages == len(keys) else ABSENT)

    def _from_below(self, mapped: Mapped, keys: Keys, rows: Rows, below: dict[Tier, int]) -> tuple[int, str]:
        """Read the leading pages of ``keys`` into ``rows``, each tier continuing where the one above ends. Returns how
        many were read, and why not more; adds the number from each tier to ``below``."""
        pages, reason = 0, ABSENT
        for tier, reader in mapped.below.items():
            count, why = self._read(mapped, reader, keys, rows)
            if count:
                pages, below[tier] = pages + count, below.get(tier, 0) + count
                keys, rows = keys[count:], rows[count:]
            reason = why if count or why != ABSENT else reason
            if why not in ELSEWHERE:
                break
        return pages, reason

    def _read(self, mapped: Mapped, reader: LowerReader, keys: Keys, rows: Rows) -> tuple[int, str]:
        """Read the leading pages of ``keys`` from one tier into ``rows``; return how many, and why not more."""
        located = locate(mapped, reader, keys[: len(rows)], self._closed)
        if not located:
            return 0, ABSENT
        read = reader.start(located, keys, self.frame_class, rows)
        self._name(mapped, quietly=True)
        hint_read(mapped, read.addresses)  # while the devices are reading
        pages, why = read.result(mapped.timeout_s)
        if read.damaged:
            report_damaged(mapped, read.damaged)
        return pages, why

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
    ) -> int:
        """See ``PrefixCache.put``."""
        start_ns = time.monotonic_ns()
        put = self._start_put(self._keys_to_store(tokens, extras, retention), pages, checksum, wait)
        new = put.result()
        put.counters.took(PUT, start_ns)
        return new

    def put_async(
        self,
        tokens: Any,
        pages: Any,
        extras: Sequence[bytes] | None = None,
        *,
        checksum: bool = False,
        retention: Retention | Sequence[Retention] = (),
    ) -> LocalPut:
        """See ``PrefixCache.put_async``."""
        start_ns = time.monotonic_ns()
        put = self._start_put(self._keys_to_store(tokens, extras, retention), pages, checksum, True)
        put.counters.took(PUT_ASYNC, start_ns)
        put.leave()
        return put

    def _start_put(self, keys: Keys, pages: Any, checksum: bool, wait: bool) -> LocalPut:
        rows = any_rows(pages, self.page_bytes, len(keys.hashes))
        mapped = self._node.writable()
        keys = keys.with_tag(self._tag_in(mapped))
        self._name(mapped)
        publishes = not wait and LocalPut.may_publish(mapped)
        look = stored_or_published if publishes else stored_pages
        stored, last = look(mapped, keys, self._closed)
        known = pages_below(mapped, keys, stored, self._closed) if stored < len(rows) else ()
        put = LocalPut(mapped, keys, self.frame_class, CHECKSUMS if checksum else 0, known, publishes)
        if stored < len(rows):
            if last is not None:
                mapped.dram.mark_used(last)  # the parent of the new pages must not be evicted for them
            put.send(rows, stored)
        return put

    def _name(self, mapped: Mapped, quietly: bool = False, timeout_s: float | None = None) -> None:
        name_root(mapped, self.root, self.layout, self.salt, self.adapter, quietly, timeout_s)

    def _names(self, mapped: Mapped, timeout_s: float) -> None:
        self._name(mapped, timeout_s=timeout_s)

    # --- leases, and layers -----------------------------------------------------------------------------------------

    def _lease(self, keys: Keys, ttl_s: float) -> LocalLease:
        self._gather(keys, self._node.timeout_s)
        self._keeping.lift(keys, Patience(self._node.timeout_s, here_s=self._node.timeout_s), self._names)
        return LocalLease(self._node, self.layout, keys, ttl_s, self._name)

    def _writer(self, shard: Shard, keys: Keys, ttl_s: float, group: str | int | None) -> LocalWriter:
        return LocalWriter(self._node, shard, keys, ttl_s, group, self._name)

    def _reader(self, keys: Keys, timeout_s: float) -> LocalReader:
        self._gather(keys, timeout_s)
        return LocalReader(self._node, self.layout, keys, timeout_s, self._name)

    # --- memory of a device, and a shard's part of pages -------------------------------------------------------------

    def _get_to_device(self, keys: Keys, rows: DeviceRows, verify: bool | None) -> Match:
        """Copy directly from node or engine memory, as far as pages need no verification; other pages go through a
        bounce buffer."""
        pages, hbm, reason = 0, 0, ABSENT
        if not (self._verify if verify is None else verify):
            pages, hbm, reason = near_to_device(self._node, keys, rows, self._wanted)
        if reason not in ELSEWHERE or pages == len(keys):
            return Match(pages * self._page_tokens, pages, reason, None, {Tier.HBM: hbm})
        rest = super()._get_to_device(keys[pages:], rows[pages:], verify)
        below = {Tier.HBM: hbm + rest.tiers.get(Tier.HBM, 0), Tier.NVME: rest.tiers.get(Tier.NVME, 0)}
        pages += rest.pages
        return Match(pages * self._page_tokens, pages, rest.reason, None, below, rest.nodes)

    def _get_shard(self, keys: Keys, shard: Shard, target: Rows | None, verify: bool | None) -> Match:
        asked, allocated = len(keys), target is None
        self._gather(keys, self._node.timeout_s)
        if target is None:  # pages that are sealed from now on are not looked for
            keys = keys[: self.lookup(keys).pages]
            target = empty((len(keys), shard.nbytes))
        node, now_ns = self._node, time.monotonic_ns()
        if now_ns > node.check_ns:
            node.recheck(now_ns)
        mapped, checked = node.mapped(), self._verify if verify is None else verify
        keys = mapped.in_pool(keys) if mapped is not None else keys
        pages, below, reason = 0, NONE_BELOW, ABSENT
        if mapped is not None and not checked:
            pages, reason = copy_shard(mapped, keys, shard, target, self._wanted, now_ns)
        if mapped is not None and pages < len(keys) and reason in ELSEWHERE:
            count, tiers, reason = self._shard_of_whole(keys[pages:], shard, target[pages:], checked)
            pages, below = pages + count, {tier: tiers[tier] for tier in mapped.below}
        elif pages < asked:
            node.missed(reason or ABSENT)
        reason = "" if pages == asked else reason or ABSENT
        data = target[:pages] if allocated else None
        return Match(pages * self.layout.page_tokens, pages, reason, data, below)

    def _shard_of_whole(self, keys: Keys, shard: Shard, rows: Rows, verify: bool) -> tuple[int, Counter[Tier], str]:
        """Get a shard's part by reading whole pages; return how many, how many from each tier, and why not more."""
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
