"""``kvstore verify``: check a node's records, index, pages and conservation laws, whether it runs or not; or a pool."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import kvstore
from kvstore import config as configuration
from kvstore.cli.node import node_option
from kvstore.cli.output import json_option, print_json
from kvstore.cli.verify_cluster import verify_cluster
from kvstore.client.connect import SHM_DIR
from kvstore.client.remote.endpoint import is_remote
from kvstore.config.values import parse_nvme
from kvstore.errors import InvalidRequest
from kvstore.tier.folder import NodeFolder, list_nodes


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
    help="An NVMe target of a node that is not running, where shared memory does not name it (after a reboot).",
)
@click.option("--timeout", "timeout_s", default=600.0, show_default=True, help="Seconds the sweep may take.")
@click.option("--cluster", is_flag=True, help="Every node of a pool, and what its directory lists.")
@click.option("--catalog", metavar="URL", help="The pool's catalog: file:PATH, etcd://HOST:PORT,...")
@click.option("--pool", metavar="NAME", help="Which pool of that catalog.  [default: default]")
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

    A running node drops damaged pages with their descendants and counts them. Of a node that is not running (--node
    with its name, or --folder) nothing is changed, and no daemon can start it meanwhile. Exit code 1 where anything was
    found; what the next start puts right anyhow is told, and is no finding.

    With --cluster all running nodes of a pool do so, and say whether the directory lists what they have.
    """
    if not 0 < timeout_s < 1e9:
        raise InvalidRequest("--timeout", f"must be positive seconds, not {timeout_s!r}")
    if cluster or catalog is not None or pool is not None:
        if not cluster or node is not None or folder is not None or targets:
            raise InvalidRequest("--cluster", "goes with --catalog and --pool, and with nothing that names a node")
        return _verify_cluster(catalog, pool, timeout_s, as_json)
    if node is not None and folder is not None:
        raise InvalidRequest("--folder", "names a node, and so does --node: give one")
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
    """The folder of the node of this machine that has this name and no daemon; None where there is none."""
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
    from kvstore.service.verify.stopped import verify_devices, verify_folder  # only here: it loads the daemon's parts

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
        click.echo("The next start puts right:")
    for repair in result["repairs"]:
        click.echo(f"  {repair}")
