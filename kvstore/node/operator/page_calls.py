"""The operators' calls that list stored pages and evict them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.model.replica import REPLICATED_INFO, TIERS, Address, Tier, hint_in, position_of
from kvstore.model.retention import priority_of, ttl_s_of
from kvstore.node.event_log import fit_into_message
from kvstore.node.node import Node
from kvstore.node.operator.named_pages import raw_bytes, raw_keys
from kvstore.node.operator.page_filter import (
    Ints,
    PageFilter,
    Stored,
    Words,
    evictable,
    first_of,
    first_words,
    parents,
    parse_tiers,
    stored_pages,
)
from kvstore.state import events as ev
from kvstore.state.operator_evict import CHILDREN, UNSAVED

EVICT_STEP = 64  # pages per event, which takes two or three milliseconds; clients are served between events
EVICT_PAUSE_S = 0.0005
SAVE_LOOK_S = 0.05  # pause before the next try of pages that had to be saved first
SAVE_WAIT_S = 20.0  # how long such pages are tried
SAVE_SILENCE_S = 5.0  # tries end earlier if no page was evicted for this time
COPY_SILENCE_S = 1.0  # the same limit while pages wait only for their children, since a new child might never leave
EVICT_S = 40.0  # the longest call; callers wait a minute
PAGES_LIMIT_MAX = 250  # pages in one answer
LISTED_MAX = 200  # pages listed in the answer of an eviction
NAMES_MAX = 100  # number of tenants, or models, listed by name; the others are added up
NAMES_BYTES = 24 * 1024  # bytes of these names as JSON; one limit for tenants and one for models
OTHERS = "(others)"
TIME = "time"  # the reason of pages that stay because the call took too long
ORDERS = ("coldest", "recent", "place")


class PageAdmin:
    """The calls ``pages`` and ``evict``. ``wake`` is called when there are pages to save."""

    def __init__(self, node: Node, wake: Callable[[], None]) -> None:
        self._node = node
        self._wake = wake

    def pages(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer {"limit", "tier", "order", "salt", "age_s", "keys", "after"} with {"total", "bytes", "pages", "next"}.

        ``after`` is the ``next`` of the previous answer. The last answer has no ``next``. Pages that are added or
        removed between two answers might be missing or listed twice.
        """
        limit = _number(request, "limit", 100, int)
        order, after = request.get("order", ORDERS[0]), request.get("after", "0")
        if order not in ORDERS:
            raise InvalidRequest("order", f"must be one of {', '.join(ORDERS)} (got {order!r})")
        if not isinstance(after, str) or not after.isdecimal() or len(after) > 12:
            raise InvalidRequest("after", f"must be the `next` of another answer (got {after!r})")
        now_ns = time.monotonic_ns()
        page_filter = self._filter(request, "all")
        pages = stored_pages(self._node, page_filter.tiers, now_ns)
        matching = np.flatnonzero(page_filter.matches(pages, now_ns))
        size = int(pages.page_bytes[matching].sum())
        start, stop = int(after), int(after) + min(limit, PAGES_LIMIT_MAX)
        selected = _ordered(pages, matching, order, stop)[start:stop]
        names = self._names()
        listed = fit_into_message(_entry(pages, i, names, now_ns) for i in selected.tolist())
        stop = start + len(listed)
        following = {"next": str(stop)} if stop < len(matching) else {}
        return {"total": len(matching), "bytes": size, "pages": listed, **following}

    def evict(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out ``AdminVerbs.evict``."""
        amount = _amount(request)
        page_filter = self._filter(request, "dram")
        dry_run = request.get("dry_run", False)
        if not isinstance(dry_run, bool):
            raise InvalidRequest("dry_run", f"must be true or false (got {dry_run!r})")
        conditions = (amount, page_filter.age_s, page_filter.roots, page_filter.keys)
        if all(condition is None for condition in conditions):
            raise InvalidRequest("evict", "needs at least one of pages, bytes, percent, age_s, salt and keys")
        now_ns = time.monotonic_ns()
        pages = stored_pages(self._node, page_filter.tiers, now_ns)
        matching = page_filter.matches(pages, now_ns)
        candidates, stayed = evictable(pages, matching)
        chosen = first_of(pages, candidates, amount, matching)
        if len(chosen) < len(candidates):
            stayed = {}  # the amount was reached without them
        names = self._names()
        if dry_run:
            return {**_summary(pages, chosen, names), "stayed": stayed, "dry_run": True}
        evicted, reasons = self._evict(pages, chosen, save=page_filter.tiers == (Tier.DRAM,))
        return {**_summary(pages, evicted, names), "stayed": dict(Counter(stayed) + reasons), "dry_run": False}

    def _evict(self, pages: Stored, chosen: Ints, save: bool) -> tuple[Ints, Counter[str]]:
        """Evict these pages in this order. Return the evicted pages, and the number of other pages by reason.

        Pages that have to be saved first are tried again as long as some of them are evicted."""
        evicted: list[int] = []
        reasons: Counter[str] = Counter()  # of pages that are not tried again
        started = last_progress = time.monotonic()
        remaining, parent, stop_s = chosen.tolist(), parents(pages).tolist(), started + EVICT_S
        stayed = self._try_once(pages, remaining, save, evicted, stop_s)
        while True:
            now = time.monotonic()
            last_progress = now if len(stayed) < len(remaining) else last_progress
            silence_s = self._silence_s(set(stayed.values()))
            if now > started + SAVE_WAIT_S or now - last_progress >= silence_s:
                return chosen[np.isin(chosen, evicted)], reasons + Counter(stayed.values())
            reasons += Counter(reason for reason in stayed.values() if reason not in (UNSAVED, CHILDREN))
            remaining = [i for i in remaining if stayed.get(i) in (UNSAVED, CHILDREN)]
            self._wake()
            time.sleep(SAVE_LOOK_S)
            stayed = self._try_again(pages, parent, remaining, save, evicted, stop_s)

    def _try_again(
        self, pages: Stored, parent: list[int], remaining: list[int], save: bool, evicted: list[int], stop_s: float
    ) -> dict[int, str]:
        """Try the leaves among the remaining pages, then the pages whose children were all evicted.

        Most of the remaining pages wait for their children. Trying each of them every time would keep the node from
        saving the leaves."""
        inner = {parent[i] for i in remaining}
        stayed = self._try_once(pages, [i for i in remaining if i not in inner], save, evicted, stop_s)
        blocked, free = {parent[i] for i in stayed}, []
        for i in remaining:  # children come before their parents
            if i in blocked:
                stayed[i] = CHILDREN
                blocked.add(parent[i])
            elif i in inner:
                free.append(i)
        return stayed | self._try_once(pages, free, save, evicted, stop_s)

    def _silence_s(self, reasons: set[str]) -> float:
        """Return how long to wait for the next eviction, given the reasons why pages stayed."""
        if TIME in reasons or self._node.nvme is None:
            return 0.0
        return SAVE_SILENCE_S if UNSAVED in reasons else COPY_SILENCE_S if CHILDREN in reasons else 0.0

    def _try_once(
        self, pages: Stored, remaining: list[int], save: bool, evicted: list[int], stop_s: float
    ) -> dict[int, str]:
        """Try each page once. Add the evicted pages to ``evicted``, and return the reason for each of the others."""
        stayed: dict[int, str] = {}
        for tier in np.unique(pages.tier[remaining]):
            in_tier = [i for i in remaining if pages.tier[i] == tier]
            for start in range(0, len(in_tier), EVICT_STEP):
                if self._node.ending:
                    raise Unavailable("the node is stopping")
                step = in_tier[start : start + EVICT_STEP]
                if time.monotonic() > stop_s:
                    stayed |= dict.fromkeys(in_tier[start:], TIME)
                    break
                addresses = [_address(pages, i) for i in step]
                detail = self._node.handle(ev.EvictChosen(time.monotonic_ns(), addresses, save)).detail
                evicted += [step[place] for place in detail["gone"]]
                stayed |= {step[place]: reason for place, reason in detail["stayed"].items()}
                time.sleep(EVICT_PAUSE_S)
        return stayed

    def _filter(self, request: dict[str, Any], default_tier: str) -> PageFilter:
        tiers = parse_tiers(request.get("tier", default_tier))
        age_s = _number(request, "age_s", None, float) if request.get("age_s") is not None else None
        salt, roots = request.get("salt"), None
        if salt is not None:
            if not isinstance(salt, str):
                raise InvalidRequest("salt", f"must be text (got {salt!r})")
            roots = self._roots(salt, tiers)
        if request.get("keys") is None:
            return PageFilter(tiers, age_s, roots)
        keys = first_words(raw_keys(request["keys"]))
        root = first_words([raw_bytes(request, "root")])  # checked as well, because keys can be forged and roots cannot
        return PageFilter(tiers, age_s, root if roots is None else np.intersect1d(roots, root), keys)

    def _roots(self, salt: str, tiers: tuple[Tier, ...]) -> Words:
        """Return the first 8 bytes of a tenant's roots. Roots without a name belong to the tenant ""."""
        named = self._node.look(lambda _, state: state.tenants.named.all())
        roots = first_words([root for root, name in named.items() if name.salt == salt])
        if salt:
            return roots
        pages = stored_pages(self._node, tiers, time.monotonic_ns())
        return np.union1d(roots, np.setdiff1d(pages.root, first_words(list(named))))

    def _names(self) -> dict[int, tuple[str, str]]:
        """Return the tenant and the model of each root, by the root's first 8 bytes."""
        named = self._node.look(lambda _, state: state.tenants.named.all())
        return {
            int.from_bytes(root[:8], "little"): (name.salt, str(name.about.get("model", "")))
            for root, name in named.items()
        }


def _number(request: dict[str, Any], field: str, default: Any, kind: type) -> Any:
    value = request.get(field, default)
    is_number = isinstance(value, int) if kind is int else isinstance(value, int | float)
    if not is_number or isinstance(value, bool) or not 0 <= value <= 1 << 62 or (kind is int and value < 1):
        expected = "a positive whole number" if kind is int else "a number, at least 0"
        raise InvalidRequest(field, f"must be {expected} (got {value!r})")
    return value


def _amount(request: dict[str, Any]) -> tuple[str, float] | None:
    units = [unit for unit in ("pages", "bytes", "percent") if request.get(unit) is not None]
    if len(units) > 1:
        raise InvalidRequest(units[1], f"cannot be combined with {units[0]}")
    if not units:
        return None
    number = _number(request, units[0], None, float if units[0] == "percent" else int)
    if units[0] == "percent" and not 0 < number <= 100:
        raise InvalidRequest("percent", f"must be above 0 and at most 100 (got {number!r})")
    return units[0], number


def _ordered(pages: Stored, matching: Ints, order: str, stop: int) -> Ints:
    """Return at least the first ``stop`` of the matching pages, in order.

    Pages of equal age are in the order of their places, so that the order does not depend on ``stop``."""
    if order == "place":
        return matching
    age = pages.used_ns[matching] if order == "coldest" else -pages.used_ns[matching]
    if stop < len(matching):
        part = np.flatnonzero(age <= np.partition(age, stop)[stop])
        matching, age = matching[part], age[part]
    return matching[np.argsort(age, kind="stable")]


def _address(pages: Stored, i: int) -> Address:
    return Address(pages.views[int(pages.view[i])].number, int(pages.frame[i]), int(pages.generation[i]))


def _entry(pages: Stored, i: int, names: dict[int, tuple[str, str]], now_ns: int) -> dict[str, Any]:
    view = pages.views[int(pages.view[i])]
    record = view.record(int(pages.frame[i]))
    tenant, model = names.get(int(pages.root[i]), ("", ""))
    return {
        "key": record.key.hex(),
        "root": record.root.hex(),
        "parent": record.parent.hex(),
        "tier": str(view.tier),
        "address": list(_address(pages, i)),
        "position": position_of(int(pages.info[i])),
        "priority": priority_of(hint_in(int(pages.info[i]))),
        "ttl_s": ttl_s_of(hint_in(int(pages.info[i]))),
        "replicas": 2 if int(pages.info[i]) & REPLICATED_INFO else 1,
        "bytes": view.page_bytes,
        "tokens": view.page_tokens,
        "unused_s": round((now_ns - int(pages.used_ns[i])) / 1e9, 3),
        "tenant": tenant,
        "model": model,
        "holds": int(pages.holds[i]),
        "leased": bool(pages.leased[i]),
        "pinned": bool(pages.pinned[i]),
    }


def _summary(pages: Stored, places: Ints, names: dict[int, tuple[str, str]]) -> dict[str, Any]:
    """Return the part of an eviction's answer that describes these pages."""
    sizes, tiers = pages.page_bytes[places], np.array(TIERS)[pages.tier[places]]
    groups: dict[str, dict[str, dict[str, int]]] = {"by_tier": {}, "by_tenant": {}, "by_model": {}}
    roots, which = np.unique(pages.root[places], return_inverse=True)
    root_pages = np.bincount(which, minlength=len(roots))
    root_bytes = np.bincount(which, sizes, minlength=len(roots))
    for tier in np.unique(tiers).tolist():
        _add(groups["by_tier"], tier, int((tiers == tier).sum()), int(sizes[tiers == tier].sum()))
    for place, by in enumerate(("by_tenant", "by_model")):
        _add_names(groups[by], [names.get(root, ("", ""))[place] for root in roots.tolist()], root_pages, root_bytes)
    first = zip(places[:LISTED_MAX].tolist(), tiers[:LISTED_MAX].tolist(), strict=True)
    listed = [{"key": pages.key_bytes(i).hex(), "tier": tier} for i, tier in first]
    return {"pages": len(places), "bytes": int(sizes.sum()), **groups, "listed": listed}


def _add_names(sums: dict[str, dict[str, int]], names: list[str], pages: Ints, sizes: Any) -> None:
    """Add up pages and bytes by name. Only the names with the most pages are listed; the others are summed as
    ``OTHERS``."""
    totals: dict[str, list[int]] = {}
    for name, count, size in zip(names, pages.tolist(), sizes.tolist(), strict=True):
        entry = totals.setdefault(name, [0, 0])
        entry[0] += count
        entry[1] += int(size)
    ordered = sorted(totals, key=lambda name: -totals[name][0])
    listed = set(fit_into_message(ordered[:NAMES_MAX], NAMES_BYTES)) if ordered else set()
    for name in ordered:
        _add(sums, name if name in listed else OTHERS, *totals[name])


def _add(sums: dict[str, dict[str, int]], name: str, pages: int, size: int) -> None:
    entry = sums.setdefault(name, {"pages": 0, "bytes": 0})
    entry["pages"] += pages
    entry["bytes"] += size
