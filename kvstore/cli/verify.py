"""``kvstore verify``: checks records, index, pages and conservation laws of a running or stopped node.

With ``--cluster`` every node of a pool verifies its pages, and checks that the directory lists them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import click

import kvstore
from kvstore import config as configuration
from kvstore.addresses import SHM_DIR
from kvstore.cli.cluster import ASK_S, ask, dial, members_of
from kvstore.cli.node import node_option
from kvstore.cli.output import duration_text, json_option, print_json, print_table
from kvstore.client.admin import AdminVerbs
from kvstore.client.remote.endpoint import is_remote
from kvstore.cluster.catalog.schema import DataEntry
from kvstore.cluster.data_connection import DataConnection
from kvstore.cluster.directory_messages import read_state
from kvstore.config.reading import parse_nvme
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.model.prefix import Keys
from kvstore.node.cluster.data_server import server_by_node
from kvstore.shm.folder import NodeFolder, list_nodes
from kvstore.wire.data import FrameKind

ANSWER_S: Final = 65.0  # deadline of one reply: a data server waits up to a minute for its daemon
NODES_AT_ONCE: Final = 64


class _NodeCalls(AdminVerbs):
    """The admin calls of a node, through its data server."""

    def __init__(self, connection: DataConnection) -> None:
        self._connection = connection

    def status(self) -> dict[str, Any]:
        """Return the state of the node's part of the directory."""
        return read_state(self._connection, ASK_S)

    def heard(self) -> dict[str, Any]:
        """Return what the directory lists for the node's pages; see ``node.cluster.directory_audit``."""
        return self._admin("heard")

    def in_pool(self, keys: Keys) -> Keys:
        """Return ``keys`` unchanged: a data server does not support this call."""
        return keys

    def _admin(self, call: str, **arguments: Any) -> dict[str, Any]:
        request = json.dumps({"call": call, **arguments}).encode()
        return ask(self._connection, FrameKind.CHECK, FrameKind.CHECKED, ANSWER_S, request)


def verify_cluster(url: str, pool: str, timeout_s: float, as_json: bool) -> int:
    """Verify the pool and print the findings; return 1 if there are any.

    Raises:
        Unavailable: the catalog is not responding.
    """
    nodes, _, entries, _ = asyncio.run(members_of(url, pool))
    server_of = server_by_node(nodes, entries)
    servers = [server_of[name] for name in sorted(server_of)]
    with ThreadPoolExecutor(min(NODES_AT_ONCE, len(servers)) or 1) as threads:
        reports = list(threads.map(lambda server: _verify_node(server, pool, timeout_s), servers))
    daemons = {each.name for each in nodes}
    findings = [
        f"{each.name}: the catalog lists no data server, so other nodes cannot read its pages"
        for each in nodes
        if each.name not in server_of
    ]
    findings += [
        f"{each.node}: another node has the same name: the data server at {', '.join(each.addresses)}"
        for each in entries
        if each.incarnation and each.incarnation != server_of[each.node].incarnation
    ]
    for report in reports:
        findings += _findings(report, server_of.keys(), report["node"] in daemons)
    if as_json:
        print_json({"catalog": url, "pool": pool, "clean": not findings, "nodes": reports, "findings": findings})
    else:
        _print_cluster(reports, findings)
    return 1 if findings else 0


def _verify_node(server: DataEntry, pool: str, timeout_s: float) -> dict[str, Any]:
    """Return the replies of a node. ``error`` is the reason why some are missing."""
    report: dict[str, Any] = {"node": server.node, "error": "", "directory": None, "verified": None, "heard": None}
    try:
        with closing(dial(server, pool, "kvstore verify", silence_s=ANSWER_S)) as connection:
            node = _NodeCalls(connection)
            report["directory"] = node.status()
            report["verified"] = node.verify(timeout_s)
            report["heard"] = node.heard()
    except KVStoreError as error:
        report["error"] = str(error)
    return report


def _findings(report: dict[str, Any], members: Collection[str], daemon: bool) -> list[str]:
    """Return the findings about one node, one line each."""
    findings: list[str] = []
    if report["error"]:
        answers = report["directory"] is not None
        error = report["error"].removeprefix(f"{report['node']}: ")
        findings.append(error if answers else f"its data server is not responding ({error})")
    elif not daemon:
        findings.append("the catalog does not list its daemon")
    directory, verified, heard = (report[name] or {} for name in ("directory", "verified", "heard"))
    if directory and directory["peers"] != sorted(members):
        findings.append(f"its data server lists the members {', '.join(directory['peers']) or 'none'}")
    findings += [
        f"its directory lists pages of {name}, which is not a member"
        for name in directory.get("heard_ago_s", ())
        if name not in members
    ]
    if verified.get("pages_damaged"):
        findings.append(f"{verified['pages_damaged']} pages were damaged, and dropped")
    findings += verified.get("findings", ())
    if heard.get("reason"):
        findings.append(heard["reason"])
    for owner, each in heard.get("owners", {}).items():
        if each["error"]:
            findings.append(f"{owner} did not return its list: {each['error']}")
        if each["missing"] or each["stale"]:
            lists = f"{each['missing']} of its {each['entries']} entries, and lists {each['stale']} that are stale"
            findings.append(f"{owner} does not list {lists}")
    return [f"{report['node']}: {line}" for line in findings]


def _print_cluster(reports: Sequence[dict[str, Any]], findings: Sequence[str]) -> None:
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


@click.command()
@node_option
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder of a node that is not running, such as /dev/shm/kvstore-NAME.",
)
@click.option(
    "--nvme",
    "targets",
    metavar="PATH:SIZE",
    multiple=True,
    help="An NVMe target of a node that is not running, if shared memory does not name it (after a reboot).",
)
@click.option("--timeout", "timeout_s", default=600.0, show_default=True, help="Seconds the sweep may take.")
@click.option("--cluster", is_flag=True, help="Verify every node of a pool, and its directory.")
@click.option("--catalog", metavar="URL", help="The pool's catalog: file:PATH, etcd://HOST:PORT,...")
@click.option("--pool", metavar="NAME", help="The pool in that catalog.  [default: default]")
@json_option
def verify(
    node: str | None,
    folder: Path | None,
    targets: tuple[str, ...],
    timeout_s: float,
    cluster: bool,
    catalog: str | None,
    pool: str | None,
    as_json: bool,
) -> int:
    """Verify the checksum of every page, every record and index entry, and the conservation laws.

    A running node drops damaged pages with their descendants and counts them. A node that is not running (--node with
    its name, or --folder) is not changed, and no daemon can start it in the meantime. Exit code 1 means that there are
    findings; problems that the next start repairs are printed, but are not findings.

    With --cluster all running nodes of a pool do this, and check that the directory lists their pages.
    """
    if not 0 < timeout_s < 1e9:
        raise InvalidRequest("--timeout", f"must be positive seconds (got {timeout_s!r})")
    if cluster or catalog is not None or pool is not None:
        if not cluster or node is not None or folder is not None or targets:
            raise InvalidRequest("--cluster", "takes only --catalog and --pool, and no option that names a node")
        return _verify_cluster(catalog, pool, timeout_s, as_json)
    if node is not None and folder is not None:
        raise InvalidRequest("--folder", "cannot be combined with --node: both name a node")
    name = node if node is not None else os.environ.get("KVSTORE_NODE")
    if folder is None and not (targets and node is None):
        folder = _stopped(name)
    if folder is None and not targets:
        return _verify_live(node, timeout_s, as_json)
    return _verify_stopped(folder, targets, as_json)


def _verify_cluster(catalog: str | None, pool: str | None, timeout_s: float, as_json: bool) -> int:
    settings = configuration.load().node
    url = catalog if catalog is not None else settings.catalog
    if not url:
        raise InvalidRequest("--catalog", "is needed with --cluster")
    return verify_cluster(url, pool if pool is not None else settings.pool, timeout_s, as_json)


def _stopped(name: str | None) -> Path | None:
    """Return the folder of the node with this name on this machine if its daemon is not running; else None."""
    if not name or is_remote(name):
        return None
    shm_dir = Path(os.environ.get("KVSTORE_SHM_DIR") or SHM_DIR)
    alive = dict(list_nodes(shm_dir)).get(name)
    return NodeFolder(shm_dir, name).path if alive is False else None


def _verify_live(node: str | None, timeout_s: float, as_json: bool) -> int:
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


def _verify_stopped(folder: Path | None, targets: Sequence[str], as_json: bool) -> int:
    from kvstore.node.verify_stopped import (
        verify_devices,
        verify_folder,
    )  # only here, because it loads parts of the daemon

    devices = [target for text in targets for target in parse_nvme(text, "--nvme")]
    try:
        result = verify_folder(folder, devices) if folder is not None else verify_devices(devices)
    except InvalidRequest as error:
        raise InvalidRequest("--folder" if error.field == "path" else error.field, error.reason) from None
    if as_json:
        print_json(result)
    else:
        _print(result)
    return 1 if result["findings"] else 0


def _print(result: dict[str, Any]) -> None:
    pages = result["pages_by_tier"]
    tiers = ", ".join(f"{count} in {tier}" for tier, count in pages.items())
    unstamped = result["pages_without_checksums"]
    click.echo(
        f"{result['name'] or 'targets'} ({result['state']}): {result['pages_verified']} pages verified"
        f"{f' ({tiers})' if len(pages) > 1 else ''}, {result['pages_damaged']} damaged, "
        f"{len(result['findings'])} findings{f', {unstamped} pages had no checksums yet' if unstamped else ''}"
    )
    for finding in result["findings"]:
        click.echo(finding)
    if result["repairs"]:
        click.echo("The next start repairs:")
    for repair in result["repairs"]:
        click.echo(f"  {repair}")
