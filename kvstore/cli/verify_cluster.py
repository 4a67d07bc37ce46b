"""``kvstore verify --cluster``: every node of a pool verifies its own, and what the directory knows of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, Final

import click

from kvstore.catalog.schema import DataEntry
from kvstore.cli.cluster import ASK_S, asked, dial, members_of
from kvstore.cli.output import duration_text, print_json, print_table
from kvstore.client.admin import AdminVerbs
from kvstore.errors import KVStoreError
from kvstore.model.prefix import Keys
from kvstore.service.cluster.view import serving
from kvstore.transfer.state_pages import read_state
from kvstore.transfer.tcp import DataConnection
from kvstore.transfer.wire import FrameKind

ANSWER_S: Final = 65.0  # for one answer of a node: it gives its daemon a minute
ASKED_AT_A_TIME: Final = 64


class _Asked(AdminVerbs):
    """A node as its data server lets others verify it."""

    def __init__(self, connection: DataConnection) -> None:
        self._connection = connection

    def status(self) -> dict[str, Any]:
        """What its part of the directory holds, and how old that is."""
        return read_state(self._connection, ASK_S)

    def heard(self) -> dict[str, Any]:
        """What the owners of its pages know of it; see ``service.cluster.heard``."""
        return self._admin("heard")

    def in_pool(self, keys: Keys) -> Keys:
        """See ``AdminVerbs``; not by way of a data server."""
        return keys

    def _admin(self, call: str, **arguments: Any) -> dict[str, Any]:
        request = json.dumps({"call": call, **arguments}).encode()
        return asked(self._connection, FrameKind.CHECK, FrameKind.CHECKED, ANSWER_S, request)


def verify_cluster(url: str, pool: str, timeout_s: float, as_json: bool) -> int:
    """Verify the pool and print what was found; 1 where anything was.

    Raises:
        Unavailable: the catalog does not answer.
    """
    nodes, _, entries, _ = asyncio.run(members_of(url, pool))
    read_from = serving(nodes, entries)
    servers = [read_from[name] for name in sorted(read_from)]
    with ThreadPoolExecutor(min(ASKED_AT_A_TIME, len(servers)) or 1) as threads:
        reports = list(threads.map(lambda server: _verified(server, pool, timeout_s), servers))
    daemons = {each.name for each in nodes}
    findings = [
        f"{each.name}: the catalog lists no data server: nobody reads its pages"
        for each in nodes
        if each.name not in read_from
    ]
    findings += [
        f"{each.node}: somebody else has that name, too: the data server at {', '.join(each.addresses)}"
        for each in entries
        if each.incarnation and each.incarnation != read_from[each.node].incarnation
    ]
    for report in reports:
        findings += _findings(report, read_from.keys(), report["node"] in daemons)
    if as_json:
        print_json({"catalog": url, "pool": pool, "clean": not findings, "nodes": reports, "findings": findings})
    else:
        _print(reports, findings)
    return 1 if findings else 0


def _verified(server: DataEntry, pool: str, timeout_s: float) -> dict[str, Any]:
    """What a node says of itself, as far as it answers; ``error``: why not of all."""
    report: dict[str, Any] = {"node": server.node, "error": "", "directory": None, "verified": None, "heard": None}
    try:
        with closing(dial(server, pool, "kvstore verify", silence_s=ANSWER_S)) as connection:
            node = _Asked(connection)
            report["directory"] = node.status()
            report["verified"] = node.verify(timeout_s)
            report["heard"] = node.heard()
    except KVStoreError as error:
        report["error"] = str(error)
    return report


def _findings(report: dict[str, Any], members: Collection[str], daemon: bool) -> list[str]:
    """What is wrong with one node, a line each."""
    found: list[str] = []
    if report["error"]:
        answers = report["directory"] is not None
        error = report["error"].removeprefix(f"{report['node']}: ")
        found.append(error if answers else f"its data server does not answer us ({error})")
    elif not daemon:
        found.append("the catalog does not list its daemon")
    directory, verified, heard = (report[name] or {} for name in ("directory", "verified", "heard"))
    if directory and directory["peers"] != sorted(members):
        found.append(f"its data server knows of {', '.join(directory['peers']) or 'nobody'}")
    found += [
        f"its directory lists pages of {name}, which is no member"
        for name in directory.get("heard_ago_s", ())
        if name not in members
    ]
    if verified.get("pages_damaged"):
        found.append(f"{verified['pages_damaged']} pages were damaged, and dropped")
    found += verified.get("findings", ())
    if heard.get("reason"):
        found.append(heard["reason"])
    for owner, each in heard.get("owners", {}).items():
        if each["error"]:
            found.append(f"cannot ask {owner} what it lists: {each['error']}")
        if each["missing"] or each["stale"]:
            lists = f"{each['missing']} of its {each['entries']} entries, and lists {each['stale']} that are stale"
            found.append(f"{owner} does not list {lists}")
    return [f"{report['node']}: {line}" for line in found]


def _print(reports: Sequence[dict[str, Any]], findings: Sequence[str]) -> None:
    rows = []
    for report in reports:
        directory, verified, heard = (report[name] or {} for name in ("directory", "verified", "heard"))
        owners = heard.get("owners", {}).values()
        ages = directory.get("heard_ago_s", {}).values()
        rows.append(
            (
                report["node"],
                verified.get("pages_verified", "-"),
                verified.get("pages_damaged", "-"),
                sum(each["missing"] for each in owners) if heard else "-",
                sum(each["stale"] for each in owners) if heard else "-",
                directory.get("entries", "-"),
                duration_text(max(ages)) if ages else "-",
                duration_text(age) if (age := directory.get("catalog_heard_ago_s")) is not None else "-",
            )
        )
    print_table(
        ("node", "pages", "damaged", "not listed", "listed stale", "lists", "nodes heard", "catalog heard"), rows
    )
    click.echo(f"{len(reports)} nodes, {len(findings)} findings")
    for finding in findings:
        click.echo(finding)
