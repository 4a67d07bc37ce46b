"""One frame of ``kvstore top``: two answers of ``stats`` into rates, and those into lines of text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.cli.output import bytes_text, duration_text, table_text
from kvstore.tier.counters import LATENCY_BOUNDS_S

TENANTS_SHOWN = 8
PERCENTILES = (50, 90, 99)
# What ``stats`` calls the counter of each operation that it has latencies of.
COUNTED_AS = {"get": "gets", "put": "puts", "put_async": "puts_async", "lookup": "lookups", "lease": "leases"}

Stats = Mapping[str, Any]


def document(now: Stats, before: Stats | None, elapsed_s: float) -> dict[str, Any]:
    """Rates per second between two answers, and what is now. Rates are None where there is no answer before, or it is
    that of another daemon, whose counters began anew. Of a node that is down only ``name`` and ``state`` are known."""
    about: dict[str, Any] = {"name": now.get("name", ""), "state": now.get("state", "")}
    if "clients" not in now:
        return about
    if before is not None and (before.get("pid"), before.get("incarnation")) != (now["pid"], now["incarnation"]):
        before = None
    clients = _Rates(now["clients"], before and before["clients"], elapsed_s)
    return {
        **about,
        "uptime_s": now["uptime_s"],
        "interval_s": elapsed_s if before is not None else None,
        "tiers": {tier: _tier(tier, now, before, clients, elapsed_s) for tier in now["tiers"]},
        "pages_asked_per_s": clients.per_s("pages_asked"),
        "missed_per_s": clients.group("missed_"),
        "operations": {
            name: {"per_s": clients.per_s(COUNTED_AS[name]), **_percentiles(now, before, name)}
            for name in now["latency"]
        },
        "tenants": _tenants(now),
        "tenants_left_off": now.get("tenants_left_off", 0) + max(0, len(now["tenants"]) - TENANTS_SHOWN),
        "clients": {name: now[name] for name in ("sessions_connected", "sessions", "leases", "reservations")},
        "queues": now["queues"],
    }


class _Rates:
    """Counters of two moments; one that is new began at 0."""

    def __init__(self, now: Mapping[str, Any], before: Mapping[str, Any] | None, elapsed_s: float) -> None:
        self._now, self._before, self._elapsed_s = now, before, max(elapsed_s, 1e-9)

    def grown(self, name: str) -> float | None:
        """By how much; None where that is not known."""
        return None if self._before is None else max(0, self._now.get(name, 0) - self._before.get(name, 0))

    def per_s(self, name: str) -> float | None:
        """The same, per second."""
        grown = self.grown(name)
        return None if grown is None else grown / self._elapsed_s

    def group(self, prefix: str = "") -> dict[str, float | None]:
        """Per second, all counters that begin so, by the rest of their names."""
        return {name.removeprefix(prefix): self.per_s(name) for name in self._now if name.startswith(prefix)}


def _tier(tier: str, now: Stats, before: Stats | None, clients: _Rates, elapsed_s: float) -> dict[str, Any]:
    about = now["tiers"][tier]
    old = before["tiers"].get(tier) if before is not None else None
    rates = _Rates(about, old, elapsed_s)
    hit, asked = clients.grown(f"hit_{tier}"), clients.grown("pages_asked")
    moved = {"promoted": "promoted_pages", "demoted": "demoted_pages"} if tier == "nvme" else {}
    return {
        "capacity_bytes": about["capacity_bytes"],
        "used_bytes": about["used_bytes"],
        "pages": about["pages"],
        "state": about.get("state", now["state"]),
        "hit_tokens_per_s": clients.per_s(tokens) if (tokens := f"hit_{tier}_tokens") in now["clients"] else None,
        "hit_ratio": hit / asked if hit is not None and asked else None,
        "in_bytes_per_s": rates.per_s("bytes_in"),
        "out_bytes_per_s": rates.per_s("bytes_out"),
        "evicted_per_s": _Rates(about["evicted"], old and old["evicted"], elapsed_s).group(),
        **{f"{name}_per_s": rates.per_s(counter) for name, counter in moved.items()},
    }


def _percentiles(now: Stats, before: Stats | None, name: str) -> dict[str, float | None]:
    """Of the operations between the two answers; of all there were where there is no earlier one."""
    buckets: dict[float | None, int] = dict(map(tuple, now["latency"][name]["buckets"]))
    for end, count in before["latency"][name]["buckets"] if before is not None else ():
        buckets[end] = buckets.get(end, 0) - count
    return {f"p{share}_s": quantile(buckets, share / 100) for share in PERCENTILES}


def quantile(buckets: Mapping[float | None, int], share: float) -> float | None:
    """Seconds that ``share`` of the operations took at most; None where there were none.

    Inside a bucket they are taken to be spread evenly; the last one, without an end, counts as its beginning.
    """
    ordered = sorted((end if end is not None else float("inf"), count) for end, count in buckets.items() if count > 0)
    left = share * sum(count for _, count in ordered)
    for end, count in ordered:
        if left <= count:
            at = bisect_left(LATENCY_BOUNDS_S, end)
            start = LATENCY_BOUNDS_S[at - 1] if at else 0.0
            return start + (end - start) * left / count if end != float("inf") else start
        left -= count
    return None


def _tenants(now: Stats) -> list[dict[str, Any]]:
    """The largest ones."""
    found = [
        {
            "tenant": salt,
            "bytes": sum(about[tier]["bytes"] for tier in now["tiers"] if tier in about),
            "pages": {tier: about[tier]["pages"] for tier in now["tiers"] if tier in about},
            "quota_bytes": {tier: about[tier]["quota_bytes"] for tier in now["tiers"] if tier in about},
            "pins": about["pins"],
        }
        for salt, about in now["tenants"].items()
    ]
    return sorted(found, key=lambda tenant: -tenant["bytes"])[:TENANTS_SHOWN]


# --- text -----------------------------------------------------------------------------------------------------------


def lines(frame: Mapping[str, Any], when: str) -> list[str]:
    """The frame for people."""
    head = f"kvstore top  {frame['name']}  {frame['state']}"
    if "tiers" not in frame:
        return [f"{head}  {when}", frame.get("error", "its daemon is not running; looking again")]
    interval_s = frame["interval_s"]
    over = (
        f"rates of the last {duration_text(interval_s)}" if interval_s is not None else "rates from the next frame on"
    )
    text = [f"{head}, up {duration_text(frame['uptime_s'])}  {when}  {over}", ""]
    text += [*_tier_table(frame["tiers"]), ""]
    text += [
        f"asked     {number_text(frame['pages_asked_per_s'])} pages/s; missed: {_rates_text(frame['missed_per_s'])}"
    ]
    text += [*_flow(frame["tiers"]), ""]
    text += [*_operation_table(frame["operations"]), ""]
    text += [*_tenant_table(frame["tenants"], frame["tenants_left_off"]), ""]
    clients = frame["clients"]
    text += [
        f"clients   {clients['sessions_connected']} connected, {clients['sessions']} known, "
        f"{clients['leases']} leases, {clients['reservations']} reservations",
        f"queues    {', '.join(f'{count} {name}' for name, count in frame['queues'].items())}",
    ]
    return text


def _tier_table(tiers: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            tier,
            bytes_text(about["capacity_bytes"]),
            bytes_text(about["used_bytes"]),
            f"{100 * about['used_bytes'] / about['capacity_bytes']:.0f} %" if about["capacity_bytes"] else "-",
            about["pages"],
            number_text(about["hit_tokens_per_s"]),
            "-" if about["hit_ratio"] is None else f"{about['hit_ratio']:.3f}",
            _size(about["in_bytes_per_s"]),
            _size(about["out_bytes_per_s"]),
            about["state"],
        )
        for tier, about in tiers.items()
    ]
    headers = "tier", "capacity", "used", "full", "pages", "hit tokens/s", "hit ratio", "in/s", "out/s", "state"
    return table_text(headers, rows).splitlines()


def _flow(tiers: Mapping[str, Any]) -> list[str]:
    found = [f"left {tier} {_rates_text(about['evicted_per_s'])} pages/s" for tier, about in tiers.items()]
    for about in tiers.values():
        if "demoted_per_s" in about:
            demoted, promoted = number_text(about["demoted_per_s"]), number_text(about["promoted_per_s"])
            found.append(f"moved     {demoted} demoted, {promoted} promoted pages/s")
    return found


def _rates_text(rates: Mapping[str, float | None]) -> str:
    """``12.5 space, 3 request``; those that stand still are left out."""
    return ", ".join(f"{number_text(rate)} {name}" for name, rate in sorted(rates.items()) if rate) or "0"


def _operation_table(operations: Mapping[str, Any]) -> list[str]:
    rows = [
        (name, number_text(about["per_s"]), *(_time(about[f"p{share}_s"]) for share in PERCENTILES))
        for name, about in operations.items()
    ]
    return table_text(("operation", "per s", *(f"p{share}" for share in PERCENTILES)), rows).splitlines()


def _tenant_table(tenants: Sequence[Mapping[str, Any]], left_off: int) -> list[str]:
    rows = [
        (
            name_text(about["tenant"]),
            bytes_text(about["bytes"]),
            ", ".join(f"{pages} {tier}" for tier, pages in about["pages"].items()),
            ", ".join(f"{bytes_text(size)} {tier}" for tier, size in about["quota_bytes"].items() if size) or "none",
            about["pins"],
        )
        for about in tenants
    ]
    more = [f"and {left_off} more"] if left_off else []
    return [*table_text(("tenant", "bytes", "pages", "quota", "pins"), rows).splitlines(), *more]


def name_text(tenant: str) -> str:
    """A tenant's name for a terminal: a salt is any text, and must not steer it."""
    shown = "".join(c if c.isprintable() else "?" for c in tenant[:40])
    return shown if shown else "(none)"


def number_text(rate: float | None) -> str:
    """A rate for people."""
    if rate is None:
        return "-"
    return f"{rate:.0f}" if rate >= 100 or rate == 0 else f"{rate:.1f}"


def _size(rate: float | None) -> str:
    return "-" if rate is None else bytes_text(rate)


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else duration_text(seconds)
