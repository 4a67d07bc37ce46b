"""The statistics of a node as one dict, for ``kvstore status``, ``kvstore tiers`` and ``Store.stats``.

Some numbers come from the node: its decisions (frames, evictions, demotions) since this daemon started. The others come
from clients, which count their own operations (pages requested, hit, missed, bytes read and put; see ``shm.counters``).
A connected client's numbers count from its connection on, even across restarts of the daemon.

``bytes_in`` and ``bytes_out`` of a tier count all transfers, with clients and with other tiers. For example,
``nvme.bytes_in`` is part of ``dram.bytes_out``.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvstore.cluster.page_mover import fit_for, missing_here
from kvstore.cluster.peer_links import PeersFile
from kvstore.model.replica import FRAME_ALIGN, FrameState, Tier
from kvstore.node.event_log import fit_into_message
from kvstore.node.node import Node
from kvstore.node.operator.device_paths import paths_of
from kvstore.node.performer import Performer
from kvstore.shm.counters import LATENCY_BOUNDS_S, Histogram
from kvstore.shm.header import DaemonState
from kvstore.state.frames import Extent, Segment
from kvstore.state.mounts import Mounts
from kvstore.state.node_state import NodeState
from kvstore.state.space import Space
from kvstore.tier.nvme.devices import today

_EVICTED = "evicted_"
PEERS_MAX: Final = 64  # in one answer, which has to fit a message
TENANTS_BYTES, TENANTS_MAX = 32 << 10, 200  # in one answer, which has to fit a message


def node_stats(node: Node) -> dict[str, Any]:
    """Return all numbers of the node. The module describes them."""
    return node.look(partial(_stats, node))


def _stats(node: Node, performer: Performer, state: NodeState) -> dict[str, Any]:
    totals = node.sessions.totals()
    clients = totals.counts
    return {
        "name": node.config.name,
        "pid": os.getpid(),
        "incarnation": f"{performer.header.incarnation:016x}",
        "state": DaemonState(performer.header.state).name.lower(),
        "uptime_s": (time.monotonic_ns() - node.started_ns) / 1e9,
        "tiers": {**_hbm(state.mounts, clients), "dram": _dram(node, clients), **_nvme(node, clients)},
        "clients": clients,
        "latency": {name: _latency(histogram) for name, histogram in totals.latency.items()},
        "sessions": len(state.sessions),
        "sessions_connected": sum(s.connected for s in state.sessions.values()),
        "leases": len(state.leases),
        "reservations": len(state.pending),
        "index": {
            "epoch": performer.header.epoch,
            "used_bytes": performer.index.used_bytes(),
            "rebuilds": dict(performer.index.rebuilds),
        },
        "counters": dict(state.counters),
        **_tenants(state),
        "unclaimed_bytes": state.tenants.unclaimed(),
        "queues": _queues(node),
        "peers": peer_transports(node.folder),
        "devices": paths_of(tuple(str(target.path) for target in node.config.nvme)).look(),
        "event_log": {"entries": node.events.entries, "overwritten": node.events.overwritten},
    }


def _latency(histogram: Histogram) -> dict[str, Any]:
    """``buckets``: [upper end in seconds, operations] of each bucket that is not empty. The last one ends at None."""
    ends = (*LATENCY_BOUNDS_S, None)
    buckets = [[end, count] for end, count in zip(ends, histogram.counts, strict=True) if count]
    return {"count": sum(histogram.counts), "sum_s": histogram.sum_s, "buckets": buckets}


def _queues(node: Node) -> dict[str, int]:
    """Return the length of each queue. ``kvstore_queue_length`` in ``node.operator.metrics`` explains them."""
    pools = [pool for space in node.state.spaces.values() for pool in space.segment.pools.values()]
    return {
        "copies": node.state.tiering.copies.under_way,
        "unsaved": sum(len(pool.unsaved) for pool in pools),
        "ready": sum(len(pool.ready) for pool in pools),
        "checksums": len(node.waiting.unstamped),
        "scan": max(0, node.scan.pages - node.scan.pages_done),
    }


def _tenants(state: NodeState) -> dict[str, Any]:
    """Return ``tenants``, with as many of the largest tenants as fit an answer, and the number of the others."""
    sizes: Counter[str] = Counter()
    for salt, _, size, *_ in tenant_rows(state):
        sizes[salt] += size
    largest = [salt for salt, _ in sizes.most_common(TENANTS_MAX)]
    stats = tenants_stats(state, largest)
    listed = dict(fit_into_message(((salt, stats[salt]) for salt in largest), TENANTS_BYTES)) if largest else {}
    return {"tenants": listed, "tenants_left_off": len(sizes) - len(listed)}


def tenant_rows(state: NodeState) -> list[tuple[str, str, int, int | None, int, int]]:
    """Return (salt, tier, bytes, quota, pages refused, pages evicted for the quota) for every tenant and tier. The
    caller holds the node's mutex."""
    rows: list[tuple[str, str, int, int | None, int, int]] = []
    for name, holdings in ((str(tier), holdings) for tier, holdings in state.tenants.holdings.items()):
        rows += [
            (share.salt, name, share.bytes, share.quota, share.refused, share.evicted)
            for share in holdings.shares.values()
            if share.salt is not None and (share.pages or name != Tier.HBM)
        ]
    return rows


def tenants_stats(state: NodeState, salts: Iterable[str] | None = None) -> dict[str, Any]:
    """Return, for each of ``salts`` (None: all salts), the pages, bytes, quota, evicted and refused pages in each tier,
    and the number of ``pins``. The caller holds the node's mutex."""
    pins = Counter(pin["salt"] for pin in state.pins.listing())
    return {salt: {**tiers, "pins": pins[salt]} for salt, tiers in state.tenants.stats(salts).items()}


def pins_stats(state: NodeState) -> dict[str, Any]:
    """Return all pins, and the bytes per tier that they keep from eviction. The caller holds the node's mutex."""
    pins = state.pins
    return {"pins": pins.listing(), "bytes": {str(tier): size for tier, size in pins.kept_bytes.items()}}


def _hbm(mounts: Mounts, clients: Mapping[str, int]) -> dict[str, Any]:
    """Return ``{"hbm": {...}}``: the memory that engines have mounted, and whose contents they choose. Empty if no
    memory is mounted."""
    segments = mounts.segments.values()
    if not segments:
        return {}
    classes: list[dict[str, Any]] = [
        {
            "page_bytes": segment.frame_class.page_bytes,
            "page_tokens": segment.frame_class.page_tokens,
            "layers": segment.frame_class.layers,
            "extents": 1,
            "frames": {"free": segment.frames - segment.pages, "sealed": segment.pages},
        }
        for segment in segments
    ]
    about = {
        **_empty_tier(mounts.counters, "engine"),
        "capacity_bytes": sum(segment.frames * segment.frame_class.page_bytes for segment in segments),
        "used_bytes": sum(segment.pages * segment.frame_class.page_bytes for segment in segments),
        "extents": len(mounts.segments),
        "pages": sum(segment.pages for segment in segments),
        "frames": {state: sum(kind["frames"][state] for kind in classes) for state in ("free", "sealed")},
        "classes": classes,
        "bytes_in": mounts.counters["published_bytes"],
        "bytes_out": clients["read_hbm_bytes"],
        "hit_ratio": _ratio(clients["hit_hbm"], clients["pages_asked"]),
    }
    return {"hbm": about}


def _dram(node: Node, clients: Mapping[str, int]) -> dict[str, Any]:
    segment, counters = node.state.segment, node.state.counters
    return {
        "populated_bytes": len(segment.populated) * segment.extent_bytes,
        **_tier(node.state.space, counters, node.config.eviction),
        "demoted": counters["demoted"],  # pages that were evicted from DRAM and are stored on NVMe
        "bytes_in": clients["put_bytes"] + counters["bytes_promoted"],
        "bytes_out": clients["read_dram_bytes"] + counters["bytes_saved"],
        "hit_ratio": _ratio(clients["hit_dram"], clients["pages_asked"]),
    }


def _nvme(node: Node, clients: Mapping[str, int]) -> dict[str, Any]:
    """Return ``{"nvme": {...}}``; empty if the node has no targets. If every target failed, the tier has size 0."""
    config, space, counters = node.config, node.state.spaces.get(Tier.NVME), node.state.counters
    if not config.nvme:
        return {}
    written = node.nvme.devices.written_today(today()) if node.nvme is not None else 0
    numbers = (
        _tier(space, space.pages.counters, config.eviction) if space is not None else _empty_tier({}, config.eviction)
    )
    about = {
        **numbers,
        "state": _nvme_state(node, written),
        "demoted_pages": counters["pages_saved"],
        "demoted_bytes": counters["bytes_saved"],
        "promoted_pages": counters["pages_promoted"],
        "promoted_bytes": counters["bytes_promoted"],
        "bytes_in": counters["bytes_saved"],
        "bytes_out": clients["read_nvme_bytes"] + counters["bytes_promoted"],
        "hit_ratio": _ratio(clients["hit_nvme"], clients["pages_asked"]),
        "write_bytes_per_day": config.nvme_write_bytes_per_day,
        "written_today_bytes": written,
        "devices": _devices(node, space),
    }
    return {"nvme": about}


def _tier(space: Space, counters: Mapping[str, int], policy: str) -> dict[str, Any]:
    """Return the numbers that every tier has."""
    ages = {f"p{percent}": age_quantile(space.departures.ages, percent / 100) for percent in (50, 90)}
    return {
        **_contents(space.segment),
        "eviction": policy,
        "evicted": _evicted(counters),
        "extents_reclaimed": counters.get("extents_reclaimed", 0),
        "age_at_eviction_s": ages,
        "ages_at_eviction": dict(space.departures.ages),  # pages by bit length of the age, see ``age_quantile``
        "ages_at_eviction_sum_s": space.departures.ages_sum_s,
    }


def _evicted(counters: Mapping[str, int]) -> dict[str, int]:
    return {name.removeprefix(_EVICTED): n for name, n in counters.items() if name.startswith(_EVICTED) and n}


def _empty_tier(counters: Mapping[str, int], policy: str) -> dict[str, Any]:
    """Return what ``_tier`` returns, for a tier without a space."""
    ages = {"p50": None, "p90": None}
    return {
        **_contents(Segment(FRAME_ALIGN, 0)),
        "eviction": policy,
        "evicted": _evicted(counters),
        "extents_reclaimed": 0,
        "age_at_eviction_s": ages,
        "ages_at_eviction": {},
        "ages_at_eviction_sum_s": 0,
    }


def _contents(segment: Segment) -> dict[str, Any]:
    frames: Counter[str] = Counter()
    classes: list[dict[str, Any]] = []
    for pool in segment.pools.values():
        counts = _frames(pool.extents.values())
        frames.update(counts)
        classes.append(
            {
                "page_bytes": pool.frame_class.page_bytes,
                "page_tokens": pool.frame_class.page_tokens,
                "layers": pool.frame_class.layers,
                "extents": len(pool.extents),
                "frames": counts,
            }
        )
    return {
        "capacity_bytes": segment.bound * segment.extent_bytes,
        "used_bytes": sum(kind["frames"]["sealed"] * kind["page_bytes"] for kind in classes),
        "failed_bytes": len(segment.failed) * segment.extent_bytes,
        "extent_bytes": segment.extent_bytes,
        "extents": len(segment.extents),
        "extents_vacant": len(segment.vacant),
        "extents_quarantined": len(segment.quarantined),
        "pages": frames["sealed"],
        "frames": dict(frames),
        "classes": classes,
    }


def _frames(extents: Iterable[Extent]) -> dict[str, int]:
    """Count frames by state. Extents count free and sealed frames as they change; the other states are rare, and are
    counted here."""
    counts = dict.fromkeys([state.name.lower() for state in FrameState], 0)
    for extent in extents:
        counts["free"] += len(extent.free)
        counts["sealed"] += extent.sealed
        if len(extent.free) + extent.sealed != extent.frames:
            for state in (FrameState.RESERVED, FrameState.RETIRING, FrameState.QUARANTINED):
                counts[state.name.lower()] += extent.count(state)
    return counts


def _devices(node: Node, space: Space | None) -> list[dict[str, Any]]:
    """Return one entry per NVMe target, in the order of the configuration."""
    devices = node.nvme.devices if node.nvme is not None else None
    pages: Counter[str] = Counter()
    used: Counter[str] = Counter()
    for extent in space.segment.extents.values() if space is not None else ():
        assert devices is not None, "a space with extents has devices"
        path = devices.place(extent.position)[0].disk.path
        pages[path] += extent.sealed
        used[path] += extent.sealed * extent.pool.frame_class.page_bytes
    opened = {device.disk.path: device for device in devices.devices} if devices is not None else {}
    entries = []
    for path, size_bytes in ((str(target.path), target.size) for target in node.config.nvme):
        device, failure = opened.get(path), node.nvme_failures.get(path, "")
        direct = device is not None and device.disk.direct
        state = f"failed: {failure}" if failure else "ready" if direct else "ready, buffered (no O_DIRECT)"
        entries.append(
            {
                "path": path,
                "state": state,
                "direct": direct,
                "capacity_bytes": device.positions * device.extent_bytes if device is not None else 0,
                "size_bytes": size_bytes,
                "used_bytes": used[path],
                "pages": pages[path],
            }
        )
    return entries


def _nvme_state(node: Node, written_today_bytes: int) -> str:
    """Return ``ready`` or ``scanning 40 %``, then the failed targets with their reasons, and whether the day's writes
    are used up."""
    parts = [f"{path} failed: {reason}" for path, reason in node.nvme_failures.items()]
    if len(parts) < len(node.config.nvme):
        scan = node.scan
        parts.insert(0, f"scanning {100 * scan.pages_done // scan.pages} %" if scan.under_way else "ready")
        if 0 < node.config.nvme_write_bytes_per_day <= written_today_bytes:
            parts.append("today's writes are used up")
    return "; ".join(parts)


def age_quantile(ages: Mapping[int, int], share: float) -> float | None:
    """Return the age at eviction (seconds since the last use) that ``share`` of the evicted pages did not exceed; None
    if none was evicted.

    ``ages`` counts pages by the bit length of their age in whole seconds: 0 is less than a second, 1 is one second, b
    is from 2^(b-1) up to 2^b. Pages are assumed to be spread evenly inside a bucket, so the answer is correct within a
    factor of two. ``{0: 50, 3: 50}`` has its median at 1 s and its 0.9 quantile at 4 + 0.8 * 4 = 7.2 s.
    """
    rank = share * sum(ages.values())
    for bucket, count in sorted(ages.items()):
        if 0 < rank <= count:
            start, stop = (1 << bucket >> 1, 1 << bucket) if bucket else (0, 1)
            return start + (stop - start) * rank / count
        rank -= count
    return None


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def peer_transports(folder: Path) -> dict[str, dict[str, str]]:
    """Return, for each node and transport, why its pages cannot be read over that transport, or "" if they can. The
    answer follows from what both ends declare."""
    view = PeersFile(folder).look()
    if view is None:
        return {}
    ours = missing_here()
    others = [peer for name, peer in sorted(view.peers.items()) if name != view.node]
    return {peer.name: fit_for(ours, peer.transports) for peer in others[:PEERS_MAX]}
