"""``kvstore verify``: check a node's records, index, pages and conservation laws."""

from __future__ import annotations

import click

import kvstore
from kvstore.cli.output import json_option, print_json


@click.command()
@click.option("--node", help="Name of the node.  [default: $KVSTORE_NODE, else the only one on this machine]")
@click.option("--timeout", "timeout_s", default=600.0, show_default=True, help="Seconds the sweep may take.")
@json_option
def verify(node: str | None, timeout_s: float, as_json: bool) -> int:
    """Verify the checksum of every page, every record and index entry, and the conservation laws.

    Damaged pages are dropped with their descendants and counted. Exit code 1 where anything was found.
    """
    with kvstore.connect(node) as store:
        result = store.verify(timeout_s)
    damaged, findings = result["pages_damaged"], result["findings"]
    if as_json:
        print_json(result)
    else:
        click.echo(
            f"{result['pages_verified']} pages verified, {damaged} damaged and dropped, {len(findings)} findings"
        )
        for finding in findings:
            click.echo(finding)
    return 1 if damaged or findings else 0
