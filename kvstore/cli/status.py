"""``kvstore status``: shows a node's capacity, use and counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

import kvstore
from kvstore.cli.cluster import cluster
from kvstore.cli.node import node_option
from kvstore.cli.output import bytes_text, duration_text, json_option, print_json, print_pairs
from kvstore.cli.tiers import frame_states, of_announcing, of_devices, of_files, of_peers, of_replicas


@click.command()
@node_option
@click.option("--catalog", metavar="URL", help="Show the members of a cluster instead: file:PATH, etcd://HOST:PORT,...")
@click.option("--pool", default="default", show_default=True, help="The pool in that catalog.")
@json_option
def status(node: str | None, catalog: str | None, pool: str, as_json: bool) -> None:
    """Show a node's capacity, use and counters; or the members of a cluster."""
    if catalog is not None:
        cluster(catalog, pool, as_json)
        return
    with kvstore.connect(node) as store:
        stats = store.stats()
    if as_json:
        print_json(stats)
        return
    if stats["state"] == "down":  # only the files of the node are available
        print_pairs(of_files(stats))
        return
    dram = stats["tiers"]["dram"]
    populated = f"{100 * dram['populated_bytes'] / dram['capacity_bytes']:.0f} % populated"
    hbm, nvme = stats["tiers"].get("hbm"), stats["tiers"].get("nvme")
    above = {} if hbm is None else {"hbm": f"{_use(hbm)}, {hbm['extents']} segments mounted by engines"}
    below = {} if nvme is None else {"nvme": f"{_use(nvme)}, {nvme['state']}"}
    pairs = {
        "node": f"{stats['name']} ({stats['state']}, pid {stats['pid']}, up {duration_text(stats['uptime_s'])})",
        **above,
        "dram": f"{_use(dram)}, {populated}",
        **below,
        "pages": dram["pages"] if nvme is None else f"{dram['pages']} in DRAM, {nvme['pages']} on NVMe",
        "frames": ", ".join(f"{dram['frames'][state]} {state}" for state in frame_states([dram])) or "none carved yet",
        "sessions": f"{stats['sessions_connected']} connected, {stats['sessions']} known",
        "leases": stats["leases"],
        "reservations": stats["reservations"],
        "index": f"epoch {stats['index']['epoch']}, {bytes_text(stats['index']['used_bytes'])}",
        "scrubber": ", ".join(f"{value} {name}" for name, value in stats["scrubber"].items()),
    }
    pairs |= of_announcing(stats) | of_replicas(stats) | of_peers(stats) | of_devices(stats)
    pairs |= dict(sorted(stats["counters"].items()))
    print_pairs(pairs)


def _use(tier: Mapping[str, Any]) -> str:
    return f"{bytes_text(tier['used_bytes'])} of {bytes_text(tier['capacity_bytes'])} in pages"
