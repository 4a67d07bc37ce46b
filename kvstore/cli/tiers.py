"""``kvstore tiers``: shows contents, hit ratio and evictions of each tier of a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

import kvstore
from kvstore.cli.node import node_option
from kvstore.cli.output import bytes_text, duration_text, json_option, print_json, print_pairs, print_table
from kvstore.model.replica import FrameState, Tier

Tiers = Mapping[str, Mapping[str, Any]]


@click.command()
@node_option
@json_option
def tiers(node: str | None, as_json: bool) -> None:
    """Show contents, hit ratio and evictions of each tier of a node.

    Hit ratios cover the pages that clients requested; every client counts them since it connected. Evictions are
    counted since the daemon started. Ages are seconds since the last use of an evicted page.
    """
    with kvstore.connect(node) as store:
        stats = store.stats()
    if as_json:
        shown = ("name", "state", "tiers", "clients", "peers", "devices")
        print_json({name: stats[name] for name in shown if name in stats})
        return
    if stats["state"] == "down":
        print_pairs(of_files(stats))
        return
    tiers_shown: Tiers = {str(tier): stats["tiers"][tier] for tier in Tier if tier in stats["tiers"]}  # fastest first
    _print_contents(tiers_shown)
    click.echo()
    _print_flow(tiers_shown)
    click.echo()
    print_pairs({**_more(tiers_shown, stats["clients"]), **of_peers(stats), **of_devices(stats)})


def frame_states(tiers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the frame states of these tiers, in the order of a frame's lifecycle. A remote node sends them in any
    order."""
    ordered = [state.name.lower() for state in FrameState]
    states = {state for about in tiers for state in about["frames"]}
    return [state for state in ordered if state in states] + sorted(states.difference(ordered))


def of_peers(stats: Mapping[str, Any]) -> dict[str, object]:
    """Describe the transports to each other node, one line per node."""
    return {f"pages from {name}": ways_text(about) for name, about in stats.get("peers", {}).items()}


def of_devices(stats: Mapping[str, Any]) -> dict[str, object]:
    """Describe the devices of the node's machine and the ways to copy to and from them, in one line."""
    about = stats.get("devices")
    if about is None:
        return {}
    names = ", ".join(f"{name} ({model})" for name, model in about["devices"].items())
    return {"devices": f"none: {about['missing']}" if about["missing"] else f"{names}; {ways_text(about['paths'])}"}


def of_announcing(stats: Mapping[str, Any]) -> dict[str, object]:
    """Describe the announcements to other nodes, if there is a pool."""
    about = stats.get("announcing")
    if about is None:
        return {}
    return {
        "announces": about["fault"] or f"to {about['owners']} nodes, {about['queued']} pages queued",
        "membership": membership_text(stats["membership"]),
    }


def of_replicas(stats: Mapping[str, Any]) -> dict[str, object]:
    """Describe the second copies on other nodes, if there is a pool."""
    about = stats.get("replicas")
    if about is None:
        return {}
    owed, reason = about["owed_pages"], about["reason"]
    rest = f"{owed} pages are owed{f': {reason}' if reason else ''}" if owed else "none is owed"
    rate = about["background_bytes_per_s"]
    limit = f" of at most {bytes_text(rate)}/s" if rate else ""
    return {
        "second copies": f"{about['copied_pages']} pages copied, {rest}",
        "background": f"{bytes_text(about['background_bytes'])}{limit}, waited {about['background_waited_s']:.1f} s",
    }


def membership_text(about: Mapping[str, Any]) -> str:
    """Return the age of each membership task's last success, or the tasks that fail and why."""
    tasks = {name: task for name, task in about.items() if name != "fault"}
    failing = [
        f"{name} has failed for {duration_text(task['failing_s'])}: {task['error']}"
        for name, task in tasks.items()
        if task["failing_s"] is not None
    ]
    ages = ((name, task["succeeded_ago_s"]) for name, task in tasks.items())
    successes = [f"{name} {'not yet' if age is None else duration_text(age) + ' ago'}" for name, age in ages]
    return "; ".join(failing) or ", ".join(successes)


def ways_text(about: Mapping[str, str]) -> str:
    """Return the names of the ways that work, and the reason for each one that does not."""
    working = ", ".join(name for name, reason in about.items() if not reason) or "no way"
    return "; ".join([working, *(f"{name}: {reason}" for name, reason in about.items() if reason)])


def of_files(stats: Mapping[str, Any]) -> dict[str, object]:
    """Describe a node from its files while its daemon is down."""
    tiers = stats.get("tiers", {}).items()
    sizes = {
        tier: f"{bytes_text(about['capacity_bytes'])}, {bytes_text(about['populated_bytes'])} populated"
        for tier, about in tiers
    }
    pages, nvme_pages = stats.get("pages", 0), stats.get("nvme_pages", 0)
    return {"node": f"{stats['name']} (down)", **sizes, "pages": f"{pages} in DRAM, {nvme_pages} on NVMe"}


def _print_contents(tiers_shown: Tiers) -> None:
    """Print the capacity and frames of each tier, and below an NVMe tier its devices."""
    states = frame_states(list(tiers_shown.values()))
    rows: list[tuple[object, ...]] = []
    for tier, about in tiers_shown.items():
        sizes = bytes_text(about["capacity_bytes"]), bytes_text(about["used_bytes"])
        rows.append((tier, *sizes, about["pages"], *(about["frames"].get(state, 0) for state in states), _state(about)))
        for device in about.get("devices", ()):
            sizes = bytes_text(device["capacity_bytes"]), bytes_text(device["used_bytes"])
            rows.append((f"  {device['path']}", *sizes, device["pages"], *("-" for _ in states), device["state"]))
    print_table(("tier", "capacity", "used", "pages", *states, "state"), rows)


def _state(about: Mapping[str, Any]) -> str:
    """Return the state of a tier. An NVMe tier reports it; DRAM is ready with whatever memory it has."""
    populated = about.get("populated_bytes", about["capacity_bytes"])
    ready = "ready" if populated >= about["capacity_bytes"] else f"{bytes_text(populated)} populated"
    failed = f", {bytes_text(about['failed_bytes'])} failed" if about["failed_bytes"] else ""
    return f"{about.get('state', ready)}{failed}"


def _print_flow(tiers_shown: Tiers) -> None:
    """Print hits, bytes moved between tiers, and evictions by reason and age."""
    reasons = sorted({reason for about in tiers_shown.values() for reason in about["evicted"]})
    rows: list[tuple[object, ...]] = []
    for tier, about in tiers_shown.items():
        ages = about["age_at_eviction_s"]
        rows.append(
            (
                tier,
                "-" if about["hit_ratio"] is None else f"{about['hit_ratio']:.3f}",
                bytes_text(about["bytes_in"]),
                bytes_text(about["bytes_out"]),
                about["eviction"],
                *(about["evicted"].get(reason, 0) for reason in reasons),
                *("-" if ages[share] is None else duration_text(ages[share]) for share in ("p50", "p90")),
            )
        )
    evictions = (f"evicted: {reason}" for reason in reasons)
    print_table(("tier", "hit ratio", "in", "out", "policy", *evictions, "age p50", "age p90"), rows)


def _more(tiers_shown: Tiers, clients: Mapping[str, int]) -> dict[str, object]:
    missed = [f"{n} {name.removeprefix('missed_')}" for name, n in clients.items() if name.startswith("missed_") and n]
    pairs: dict[str, object] = {
        "pages asked": clients["pages_asked"],
        "pages missed": ", ".join(missed) or 0,
        "pages put": f"{clients['pages_put']} ({bytes_text(clients['put_bytes'])})",
    }
    if "nvme" in tiers_shown:
        nvme, cap = tiers_shown["nvme"], tiers_shown["nvme"]["write_bytes_per_day"]
        pairs |= {
            "demoted": f"{nvme['demoted_pages']} pages ({bytes_text(nvme['demoted_bytes'])}) saved to NVMe, "
            f"{tiers_shown['dram']['demoted']} of them left DRAM",
            "promoted": f"{nvme['promoted_pages']} pages ({bytes_text(nvme['promoted_bytes'])})",
            "written today": f"{bytes_text(nvme['written_today_bytes'])}, {_cap(cap)}",
        }
    return pairs


def _cap(write_bytes_per_day: int) -> str:
    return f"of {bytes_text(write_bytes_per_day)} allowed" if write_bytes_per_day else "no limit"
