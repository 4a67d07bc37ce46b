"""``kvstore verify``: check a node's records, index, pages and conservation laws."""

from __future__ import annotations

import time
from typing import Any

import click

import kvstore
from kvstore.cli.output import json_option, print_json
from kvstore.errors import DeadlineExceeded

POLL_S = 0.05


@click.command()
@click.option("--node", help="Name of the node.  [default: $KVSTORE_NODE, else the only one on this machine]")
@click.option("--timeout", "timeout_s", default=600.0, show_default=True, help="Seconds the sweep may take.")
@json_option
def verify(node: str | None, timeout_s: float, as_json: bool) -> int:
    """Verify the checksum of every page, every record and index entry, and the conservation laws.

    Damaged pages are dropped with their descendants and counted. Exit code 1 where anything was found.
    """
    with kvstore.connect(node) as store:
        before = store.admin("scrub_status")
        sweep = store.admin("scrub")["sweep"]
        deadline = time.monotonic() + timeout_s
        while (now := store.admin("scrub_status"))["sweeps"] < sweep:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"the sweep was not finished within {timeout_s:g} s")
            time.sleep(POLL_S)
        findings = store.admin("verify")["findings"]
        counters = store.stats()["counters"]
    dropped = now["pages_damaged"] - before["pages_damaged"]
    result: dict[str, Any] = {
        "pages_verified": now["pages_scrubbed"] - before["pages_scrubbed"],
        "pages_damaged": dropped,
        "findings": findings,
        "damage_since_start": {name: n for name, n in counters.items() if name.startswith("damaged_")},
    }
    if as_json:
        print_json(result)
    else:
        click.echo(
            f"{result['pages_verified']} pages verified, {dropped} damaged and dropped, {len(findings)} findings"
        )
        for finding in findings:
            click.echo(finding)
    return 1 if dropped or findings else 0
