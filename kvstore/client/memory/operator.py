"""Operator: the admin calls that a store in memory answers, each a dict in and one out, as a node answers them."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

from kvstore.client.memory.pool import MemoryHold, MemoryPage, MemoryPool, Name, room_of
from kvstore.errors import InvalidRequest
from kvstore.model.retention import priority_of, ttl_s_of

ORDERS: Final = ("coldest", "recent", "place")
PIN_TTL_S_MAX: Final = 30 * 86_400.0
EVENTS_LIMIT_MAX: Final = 10_000
EVENTS_WAIT_S_MAX: Final = 1.0
LOOK_S: Final = 0.01

Request = dict[str, Any]


class Operator:
    """The table of calls. Lives with its store; threads may share it."""

    def __init__(self, pool: MemoryPool) -> None:
        self._pool = pool
        self._calls: dict[str, Callable[[Request], dict[str, Any]]] = {
            "evict": self._evict,
            "pages": self._pages,
            "pin": self._pin,
            "unpin": self._unpin,
            "pins": self._pins,
            "events": self._events,
            "explain": self._explain,
            "layouts": self._layouts,
        }

    def call(self, name: str, request: Request) -> dict[str, Any]:
        """Carry out a call. Raises InvalidRequest where there is none, or an argument makes no sense."""
        found = self._calls.get(name)
        if found is None:
            raise InvalidRequest("call", f"a store in memory has no {name!r}, only {', '.join(self._calls)}")
        return found(request)

    # --- pages ------------------------------------------------------------------------------------------------------

    def _evict(self, request: Request) -> dict[str, Any]:
        unit = next((unit for unit in ("pages", "bytes", "percent") if request.get(unit) is not None), "")
        amount: Any = request.get(unit)
        if unit == "percent" and (not _is_number(amount) or not 0 < amount <= 100):
            raise InvalidRequest("percent", f"must be above 0 and at most 100, not {amount!r}")
        with self._pool.held() as now_ns:
            fits = self._fitting(request, now_ns)
            want = sum(page.data.nbytes for page in fits) * amount / 100 if unit == "percent" else amount
            gone, stayed = self._leaving(fits, "pages" if unit == "pages" else "bytes", want)
            by: dict[str, dict[str, dict[str, int]]] = {"by_tier": {}, "by_tenant": {}, "by_model": {}}
            for page in gone:
                owner = self._pool.owners[page.name[0]]
                for group, label in (("by_tier", "dram"), ("by_tenant", owner.salt), ("by_model", owner.model)):
                    entry = by[group].setdefault(label, {"pages": 0, "bytes": 0})
                    entry["pages"] += 1
                    entry["bytes"] += page.data.nbytes
            if not request["dry_run"]:
                for page in gone:
                    self._pool.drop(page, "evicted", "request")
        size, listed = sum(page.data.nbytes for page in gone), [{"key": _hex(p), "tier": "dram"} for p in gone]
        return {
            "pages": len(gone),
            "bytes": size,
            **by,
            "listed": listed,
            "stayed": stayed,
            "dry_run": request["dry_run"],
        }

    def _leaving(
        self, fits: list[MemoryPage], unit: str, want: float | None
    ) -> tuple[list[MemoryPage], dict[str, int]]:
        """Those that may leave, in that order, until it is enough; and how many others may not, by reason."""
        children = {page.name: page.children for page in self._pool.pages.values()}
        gone: list[MemoryPage] = []
        taken, left = 0, fits
        while True:
            stayed: Counter[str] = Counter()
            rest: list[MemoryPage] = []
            for page in left:
                if want is not None and taken >= want:
                    return gone, {}
                reason = self._pool.why_not(page)
                if reason not in ("", "children") or children[page.name]:
                    stayed[reason or "children"] += 1
                    rest.append(page)
                    continue
                gone.append(page)
                taken += 1 if unit == "pages" else page.data.nbytes
                if page.parent is not None:
                    children[page.parent] -= 1
            if len(rest) == len(left):
                return gone, dict(stayed)
            left = rest

    def _pages(self, request: Request) -> dict[str, Any]:
        order, after = request.get("order", ORDERS[0]), request.get("after", "0")
        if order not in ORDERS:
            raise InvalidRequest("order", f"must be one of {', '.join(ORDERS)}, not {order!r}")
        if not isinstance(after, str) or not after.isdecimal():
            raise InvalidRequest("after", f"must be the `next` of another answer, not {after!r}")
        with self._pool.held() as now_ns:
            fits = self._fitting(request, now_ns)
            if order == "recent":
                fits.reverse()
            elif order == "place":
                fits.sort(key=lambda page: (page.name[0], page.position))
            stop = int(after) + request["limit"]
            told = [self._described(page, now_ns) for page in fits[int(after) : stop]]
        size = sum(page.data.nbytes for page in fits)
        more = {"next": str(stop)} if stop < len(fits) else {}
        return {"total": len(fits), "bytes": size, "pages": told, **more}

    def _described(self, page: MemoryPage, now_ns: int) -> dict[str, Any]:
        owner = self._pool.owners[page.name[0]]
        return {
            "key": _hex(page),
            "root": page.name[0].hex(),
            "parent": (page.parent or page.name[:1])[-1].hex(),
            "tier": "dram",
            "position": page.position,
            "priority": priority_of(page.hint),
            "ttl_s": ttl_s_of(page.hint),
            "bytes": page.data.nbytes,
            "tokens": page.tokens,
            "unused_s": round((now_ns - page.used_ns) / 1e9, 3),
            "tenant": owner.salt,
            "model": owner.model,
            "holds": page.children,
            "leased": bool(page.leases),
            "pinned": bool(page.pins),
        }

    def _fitting(self, request: Request, now_ns: int) -> list[MemoryPage]:
        """Pages that a request describes, the least recently used first."""
        tier, age_s, salt = request.get("tier", "all"), request.get("age_s"), request.get("salt")
        if tier not in ("dram", "nvme", "all"):
            raise InvalidRequest("tier", f"must be dram, nvme or all, not {tier!r}")
        if age_s is not None and (not _is_number(age_s) or age_s < 0):
            raise InvalidRequest("age_s", f"must be a number, not negative, not {age_s!r}")
        if salt is not None and not isinstance(salt, str):
            raise InvalidRequest("salt", f"must be text, not {salt!r}")
        pages: Iterable[MemoryPage] = self._pool.pages.values() if tier != "nvme" else ()
        wanted = set(_names(request)) if request.get("keys") is not None else None
        return [
            page
            for page in pages
            if (wanted is None or page.name in wanted)
            and (age_s is None or page.used_ns <= now_ns - int(age_s * 1e9))
            and (salt is None or self._pool.owners[page.name[0]].salt == salt)
        ]

    def _explain(self, request: Request) -> dict[str, Any]:
        with self._pool.held():
            pages = [self._pool.pages.get(name) for name in _names(request)]
            told = [_fact(page) for page in pages]
        age_s = (time.monotonic_ns() - self._pool.started_ns) / 1e9
        return {"pages": told, "elsewhere": [], "events_s": round(age_s, 3), "scanning": False}

    def _layouts(self, request: Request) -> dict[str, Any]:
        model = request.get("model")
        found: dict[str, dict[str, Any]] = {}
        with self._pool.held():
            counted = Counter(page.name[0] for page in self._pool.pages.values())
            for root, owner in self._pool.owners.items():
                if owner.layout is not None and model in (None, owner.model):
                    about = {"fingerprint": owner.fingerprint, "layout": owner.layout, "tenants": set(), "pages": 0}
                    entry = found.setdefault(owner.fingerprint, about)
                    entry["tenants"].add(owner.salt)
                    entry["pages"] += counted[root]
        told = [{**entry, "tenants": len(entry["tenants"])} for entry in found.values()]
        return {"layouts": sorted(told, key=lambda entry: -entry["pages"]), "left_off": 0}

    # --- pins -------------------------------------------------------------------------------------------------------

    def _pin(self, request: Request) -> dict[str, Any]:
        names, ttl_s = _names(request), request["ttl_s"]
        if not _is_number(ttl_s) or not 0 < ttl_s <= PIN_TTL_S_MAX:
            raise InvalidRequest("ttl_s", f"must be seconds, more than zero and at most {PIN_TTL_S_MAX:.0f}")
        with self._pool.held() as now_ns:
            pages: list[MemoryPage] = []
            for name in names:
                page = self._pool.pages.get(name)
                if page is None:
                    break
                pages.append(page)
            if not pages or pages[0].parent is not None:
                raise InvalidRequest("keys", "none of these pages is stored from the start of the chain")
            number = secrets.randbits(32) | 1
            self._pool.pins[number] = MemoryHold(pages, now_ns + int(ttl_s * 1e9))
            for page in pages:
                page.pins += 1
        size = sum(room_of(page.data) for page in pages)
        return {"pin": number, "pages": len(pages), "bytes": size, "until": time.time() + ttl_s}

    def _unpin(self, request: Request) -> dict[str, Any]:
        with self._pool.held():
            if "pin" in request:
                numbers = [number for number in self._pool.pins if str(number) == str(request["pin"])]
            else:
                last = set(_names(request))
                numbers = [number for number, pin in self._pool.pins.items() if pin.pages[-1].name in last]
            if not numbers:
                raise InvalidRequest("pin" if "pin" in request else "keys", "there is no such pin")
            for number in numbers:
                self._pool.end_pin(number)
        return {"unpinned": len(numbers)}

    def _pins(self, request: Request) -> dict[str, Any]:
        with self._pool.held() as now_ns:
            told = [self._pin_told(number, pin, now_ns) for number, pin in self._pool.pins.items()]
            kept = {page.name: room_of(page.data) for pin in self._pool.pins.values() for page in pin.pages}
        return {"pins": told, "bytes": {"dram": sum(kept.values())}}

    def _pin_told(self, number: int, pin: MemoryHold, now_ns: int) -> dict[str, Any]:
        root = pin.pages[0].name[0]
        return {
            "pin": number,
            "salt": self._pool.owners[root].salt,
            "root": root.hex(),
            "pages": len(pin.pages),
            "bytes": sum(room_of(page.data) for page in pin.pages),
            "tiers": {"dram": len(pin.pages)},
            "until": time.time() + (pin.until_ns - now_ns) / 1e9,
            "last": _hex(pin.pages[-1]),
        }

    # --- events -----------------------------------------------------------------------------------------------------

    def _events(self, request: Request) -> dict[str, Any]:
        after, limit, wait_s = request.get("after"), request["limit"], request["wait_s"]
        if after is not None and (not isinstance(after, int) or isinstance(after, bool) or after < 0):
            raise InvalidRequest("after", f"must be the number of an event, not {after!r}")
        if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= EVENTS_LIMIT_MAX:
            raise InvalidRequest("limit", f"must be from 1 to {EVENTS_LIMIT_MAX}, not {limit!r}")
        if not _is_number(wait_s) or not 0 <= wait_s <= EVENTS_WAIT_S_MAX:
            raise InvalidRequest("wait_s", f"must be from 0 to {EVENTS_WAIT_S_MAX:g}, not {wait_s!r}")
        deadline = time.monotonic() + wait_s
        while True:
            with self._pool.held():
                after = self._pool.last_event if after is None else min(after, self._pool.last_event)
                told = [event for event in self._pool.events if event["seq"] > after][:limit]
            if told or time.monotonic() >= deadline:
                break
            time.sleep(LOOK_S)
        lost = told[0]["seq"] - after - 1 if told else 0
        return {"events": told, "next": told[-1]["seq"] if told else after, "lost": lost}


def _names(request: Request) -> list[Name]:
    """The pages that a request names, see ``client.admin.keys_argument``."""
    root = bytes.fromhex(request["root"])
    return [(root, bytes.fromhex(key)) for key in request["keys"]]


def _fact(page: MemoryPage | None) -> dict[str, Any]:
    if page is None:
        return {"tiers": []}
    return {
        "tiers": ["dram"],
        **({"leased": True} if page.leases else {}),
        **({"pinned": True} if page.pins else {}),
    }


def _hex(page: MemoryPage) -> str:
    return page.name[1].hex()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
