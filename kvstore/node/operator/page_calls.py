"""Admin calls about stored pages: which there are, and which shall leave."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.model.replica import Address, Tier, hint_in, position_of
from kvstore.model.retention import priority_of, ttl_s_of
from kvstore.node.event_log import fitted
from kvstore.node.node import Node
from kvstore.node.operator import page_filter
from kvstore.node.operator.named_pages import raw_keys, raw_root
from kvstore.node.operator.page_filter import Ints, PageFilter, Stored
from kvstore.state import events as ev
from kvstore.state.operator_evict import CHILDREN, UNSAVED

EVICT_STEP = 64  # pages of one event: two or three milliseconds, so that clients get their turns
EVICT_PAUSE_S = 0.0005
SAVE_LOOK_S = 0.05  # how often pages that have to be saved first are tried again
SAVE_WAIT_S = 20.0  # and for how long
SAVE_SILENCE_S = 5.0  # or until none could leave for this long
COPY_SILENCE_S = 1.0  # the same limit for pages that are being copied now; one with a new child never can leave
EVICT_S = 40.0  # of one call: its caller waits a minute at most
PAGES_LIMIT_MAX = 250  # of one answer
LISTED_MAX = 200  # pages that an eviction's answer names
NAMES_MAX = 100  # tenants and models that it counts by name; the rest together
NAMES_BYTES = 24 * 1024  # and that many bytes of names as JSON of each
OTHERS = "(others)"
TIME = "time"  # why pages stayed: there were too many for one call
ORDERS = ("coldest", "recent", "place")


class PageAdmin:
    """Lives with ``Admin``. ``wake``: there are pages to save."""

    def __init__(self, node: Node, wake: Callable[[], None]) -> None:
        self._node = node
        self._wake = wake

    def pages(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"limit", "tier", "order", "salt", "age_s", "keys", "after"} -> {"total", "bytes", "pages", "next"}.

        ``after`` is the ``next`` of the answer before, absent at the end. Pages that come and go between two answers
        may be missed, or told twice.
        """
        limit = _number(request, "limit", 100, int)
        order, after = request.get("order", ORDERS[0]), request.get("after", "0")
        if order not in ORDERS:
            raise InvalidRequest("order", f"must be one of {', '.join(ORDERS)} (got {order!r})")
        if not isinstance(after, str) or not after.isdecimal() or len(after) > 12:
            raise InvalidRequest("after", f"must be the `next` of another answer (got {after!r})")
        now_ns = time.monotonic_ns()
        wish = self._wish(request, "all")
        found = page_filter.stored(self._node, wish.tiers, now_ns)
        fits = np.flatnonzero(wish.fits(found, now_ns))
        size = int(found.page_bytes[fits].sum())
        start, stop = int(after), int(after) + min(limit, PAGES_LIMIT_MAX)
        shown = _ordered(found, fits, order, stop)[start:stop]
        names = self._names()
        pages = fitted(_described(found, i, names, now_ns) for i in shown.tolist())
        stop = start + len(pages)
        return {"total": len(fits), "bytes": size, "pages": pages, **({"next": str(stop)} if stop < len(fits) else {})}

    def evict(self, request: dict[str, Any]) -> dict[str, Any]:
        """See ``AdminVerbs.evict``."""
        want = _amount(request)
        wish = self._wish(request, "dram")
        dry_run = request.get("dry_run", False)
        if not isinstance(dry_run, bool):
            raise InvalidRequest("dry_run", f"must be true or false (got {dry_run!r})")
        if want is None and wish.age_s is None and wish.roots is None and wish.keys is None:
            raise InvalidRequest("evict", "say what or how much: pages, bytes, percent, age_s, salt or keys")
        now_ns = time.monotonic_ns()
        found = page_filter.stored(self._node, wish.tiers, now_ns)
        fits = wish.fits(found, now_ns)
        may, stayed = page_filter.leaving(found, fits)
        chosen = page_filter.enough(found, may, want, fits)
        if len(chosen) < len(may):
            stayed = {}  # there was enough
        names = self._names()
        if dry_run:
            return {**_summed(found, chosen, names), "stayed": stayed, "dry_run": True}
        gone, more = self._leave(found, chosen, save=wish.tiers == (Tier.DRAM,))
        reasons = Counter(stayed) + more
        return {**_summed(found, gone, names), "stayed": dict(reasons), "dry_run": False}

    def _leave(self, found: Stored, chosen: Ints, save: bool) -> tuple[Ints, Counter[str]]:
        """Make these pages leave, in this order; which did, and why others did not. What has to be saved first is tried
        again while it goes on."""
        gone: list[int] = []
        kept: Counter[str] = Counter()  # in passes before the last one
        began = progress = time.monotonic()
        left, parent, stop_s = chosen.tolist(), page_filter.parents(found).tolist(), began + EVICT_S
        stayed = self._pass(found, left, save, gone, stop_s)
        while True:
            now = time.monotonic()
            progress = now if len(stayed) < len(left) else progress
            silence_s = self._silence_s(set(stayed.values()))
            if now > began + SAVE_WAIT_S or now - progress >= silence_s:
                return chosen[np.isin(chosen, gone)], kept + Counter(stayed.values())
            kept += Counter(reason for reason in stayed.values() if reason not in (UNSAVED, CHILDREN))
            left = [i for i in left if stayed.get(i) in (UNSAVED, CHILDREN)]
            self._wake()
            time.sleep(SAVE_LOOK_S)
            stayed = self._pass_again(found, parent, left, save, gone, stop_s)

    def _pass_again(
        self, found: Stored, parent: list[int], left: list[int], save: bool, gone: list[int], stop_s: float
    ) -> dict[int, str]:
        """Try these once more: first what none of them hangs on, then what only hung on what left. Most wait for their
        children; to ask for each of them as often as for those would keep the node from saving them."""
        above = {parent[i] for i in left}
        stayed = self._pass(found, [i for i in left if i not in above], save, gone, stop_s)
        held, rest = {parent[i] for i in stayed}, []
        for i in left:  # children first
            if i in held:
                stayed[i] = CHILDREN
                held.add(parent[i])
            elif i in above:
                rest.append(i)
        return stayed | self._pass(found, rest, save, gone, stop_s)

    def _silence_s(self, reasons: set[str]) -> float:
        """How long to wait for a page to leave, where pages stayed for these reasons."""
        if TIME in reasons or self._node.nvme is None:
            return 0.0
        return SAVE_SILENCE_S if UNSAVED in reasons else COPY_SILENCE_S if CHILDREN in reasons else 0.0

    def _pass(self, found: Stored, left: list[int], save: bool, gone: list[int], stop_s: float) -> dict[int, str]:
        """Try each of these once; why those that stayed did."""
        stayed: dict[int, str] = {}
        for tier in np.unique(found.tier[left]):
            mine = [i for i in left if found.tier[i] == tier]
            for start in range(0, len(mine), EVICT_STEP):
                if self._node.ending:
                    raise Unavailable("the node is stopping")
                step = mine[start : start + EVICT_STEP]
                if time.monotonic() > stop_s:
                    stayed |= dict.fromkeys(mine[start:], TIME)
                    break
                addresses = [_address(found, i) for i in step]
                detail = self._node.handle(ev.EvictChosen(time.monotonic_ns(), addresses, save)).detail
                gone += [step[place] for place in detail["gone"]]
                stayed |= {step[place]: reason for place, reason in detail["stayed"].items()}
                time.sleep(EVICT_PAUSE_S)
        return stayed

    def _wish(self, request: dict[str, Any], tier: str) -> PageFilter:
        tiers = page_filter.parse_tiers(request.get("tier", tier))
        age_s = _number(request, "age_s", None, float) if request.get("age_s") is not None else None
        salt, roots = request.get("salt"), None
        if salt is not None:
            if not isinstance(salt, str):
                raise InvalidRequest("salt", f"must be text (got {salt!r})")
            roots = self._roots(salt, tiers)
        if request.get("keys") is None:
            return PageFilter(tiers, age_s, roots)
        keys = page_filter.first_words(raw_keys(request["keys"]))
        root = page_filter.first_words([raw_root(request.get("root"))])  # keys can be forged, roots cannot
        return PageFilter(tiers, age_s, root if roots is None else np.intersect1d(roots, root), keys)

    def _roots(self, salt: str, tiers: tuple[Tier, ...]) -> page_filter.Words:
        """Roots of a tenant. Roots without a name belong to the tenant ""."""
        named = self._node.look(lambda _, state: state.tenants.named.all())
        roots = page_filter.first_words([root for root, name in named.items() if name.salt == salt])
        if salt:
            return roots
        stored = page_filter.stored(self._node, tiers, time.monotonic_ns())
        return np.union1d(roots, np.setdiff1d(stored.root, page_filter.first_words(list(named))))

    def _names(self) -> dict[int, tuple[str, str]]:
        """First 8 bytes of a root -> (tenant, model)."""
        named = self._node.look(lambda _, state: state.tenants.named.all())
        return {
            int.from_bytes(root[:8], "little"): (name.salt, str(name.about.get("model", "")))
            for root, name in named.items()
        }


def _number(request: dict[str, Any], field: str, default: Any, kind: type) -> Any:
    value = request.get(field, default)
    good = isinstance(value, int) if kind is int else isinstance(value, int | float)
    if not good or isinstance(value, bool) or not 0 <= value <= 1 << 62 or (kind is int and value < 1):
        what = "a positive whole number" if kind is int else "a number, not negative"
        raise InvalidRequest(field, f"must be {what} (got {value!r})")
    return value


def _amount(request: dict[str, Any]) -> tuple[str, float] | None:
    given = [unit for unit in ("pages", "bytes", "percent") if request.get(unit) is not None]
    if len(given) > 1:
        raise InvalidRequest(given[1], f"cannot be said together with {given[0]}")
    if not given:
        return None
    amount = _number(request, given[0], None, float if given[0] == "percent" else int)
    if given[0] == "percent" and not 0 < amount <= 100:
        raise InvalidRequest("percent", f"must be above 0 and at most 100 (got {amount!r})")
    return given[0], amount


def _ordered(found: Stored, fits: Ints, order: str, stop: int) -> Ints:
    """The first ``stop`` of these pages, and more: of those of one age by their places, whatever ``stop`` is."""
    if order == "place":
        return fits
    age = found.used_ns[fits] if order == "coldest" else -found.used_ns[fits]
    if stop < len(fits):
        part = np.flatnonzero(age <= np.partition(age, stop)[stop])
        fits, age = fits[part], age[part]
    return fits[np.argsort(age, kind="stable")]


def _address(found: Stored, i: int) -> Address:
    return Address(found.views[int(found.view[i])].number, int(found.frame[i]), int(found.generation[i]))


def _described(found: Stored, i: int, names: dict[int, tuple[str, str]], now_ns: int) -> dict[str, Any]:
    view = found.views[int(found.view[i])]
    record = view.record(int(found.frame[i]))
    tenant, model = names.get(int(found.root[i]), ("", ""))
    return {
        "key": record.key.hex(),
        "root": record.root.hex(),
        "parent": record.parent.hex(),
        "tier": str(view.tier),
        "address": list(_address(found, i)),
        "position": position_of(int(found.info[i])),
        "priority": priority_of(hint_in(int(found.info[i]))),
        "ttl_s": ttl_s_of(hint_in(int(found.info[i]))),
        "bytes": view.page_bytes,
        "tokens": view.page_tokens,
        "unused_s": round((now_ns - int(found.used_ns[i])) / 1e9, 3),
        "tenant": tenant,
        "model": model,
        "holds": int(found.holds[i]),
        "leased": bool(found.leased[i]),
        "pinned": bool(found.pinned[i]),
    }


def _summed(found: Stored, places: Ints, names: dict[int, tuple[str, str]]) -> dict[str, Any]:
    """What an eviction's answer says of these pages."""
    sizes, tiers = found.page_bytes[places], np.array(page_filter.TIERS)[found.tier[places]]
    groups: dict[str, dict[str, dict[str, int]]] = {"by_tier": {}, "by_tenant": {}, "by_model": {}}
    roots, which = np.unique(found.root[places], return_inverse=True)
    pages, size = np.bincount(which, minlength=len(roots)), np.bincount(which, sizes, minlength=len(roots))
    for tier in np.unique(tiers).tolist():
        _add(groups["by_tier"], tier, int((tiers == tier).sum()), int(sizes[tiers == tier].sum()))
    for place, by in enumerate(("by_tenant", "by_model")):
        _add_names(groups[by], [names.get(root, ("", ""))[place] for root in roots.tolist()], pages, size)
    listed = [{"key": found.key_bytes(i).hex(), "tier": tier} for i, tier in _first(places, tiers)]
    return {"pages": len(places), "bytes": int(sizes.sum()), **groups, "listed": listed}


def _first(places: Ints, tiers: Any) -> list[tuple[int, str]]:
    return list(zip(places[:LISTED_MAX].tolist(), tiers[:LISTED_MAX].tolist(), strict=True))


def _add_names(sums: dict[str, dict[str, int]], names: list[str], pages: Ints, size: Any) -> None:
    """Per name; those with most pages separately, the rest as ``OTHERS``."""
    together: dict[str, list[int]] = {}
    for name, count, of_bytes in zip(names, pages.tolist(), size.tolist(), strict=True):
        entry = together.setdefault(name, [0, 0])
        entry[0] += count
        entry[1] += int(of_bytes)
    most = sorted(together, key=lambda name: -together[name][0])[:NAMES_MAX]
    told = set(fitted(most, NAMES_BYTES)) if most else set()
    for name in sorted(together, key=lambda name: -together[name][0]):
        _add(sums, name if name in told else OTHERS, *together[name])


def _add(sums: dict[str, dict[str, int]], name: str, pages: int, size: int) -> None:
    entry = sums.setdefault(name, {"pages": 0, "bytes": 0})
    entry["pages"] += pages
    entry["bytes"] += size
