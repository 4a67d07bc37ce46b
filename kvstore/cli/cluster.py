"""Members of a pool: lists them from the catalog, and connects to their data servers."""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any, Final

from kvstore import config as configuration
from kvstore.cli.output import bytes_text, duration_text, print_json, print_table
from kvstore.cli.tiers import ways_text
from kvstore.cluster.catalog import schema
from kvstore.cluster.catalog.connect import to_catalog
from kvstore.cluster.catalog.schema import ConductorEntry, DataEntry, EngineEntry, NodeEntry
from kvstore.cluster.data_connection import DataConnection, credentials_of
from kvstore.cluster.directory_messages import read_state
from kvstore.errors import KVStoreError, NodeUnavailable
from kvstore.wire.data import FrameKind, Hello, WireError

ASK_S: Final = 1.0

Pool = tuple[list[NodeEntry], list[EngineEntry], list[DataEntry], list[ConductorEntry]]


def cluster(url: str, pool: str, as_json: bool) -> None:
    """Print the members of a pool, and the state of each part of the directory."""
    nodes, engines, servers, conductors = asyncio.run(members_of(url, pool))
    servers.sort(key=lambda each: each.name)
    states = {each.name: _directory_state(each, pool) for each in servers}
    if as_json:
        members = {
            "nodes": [asdict(each) for each in nodes],
            "engines": [asdict(each) for each in engines],
            "conductors": [asdict(each) for each in conductors],
            "data": [{**asdict(each), "directory": states[each.name]} for each in servers],
        }
        print_json({"catalog": url, "pool": pool, "members": members})
        return
    rows = [("node", each.name, each.host, _first(each.addresses), _node_text(each)) for each in nodes]
    rows += [
        ("engine", each.name, each.host, _first(each.addresses), f"{each.role}, {each.model} on {each.device}")
        for each in engines
    ]
    rows += [("conductor", each.name, each.host, _first(each.addresses), each.policy) for each in conductors]
    rows += [
        ("data", each.name, each.host, _first(each.addresses), _directory_text(each, states[each.name]))
        for each in servers
    ]
    print_table(("member", "name", "host", "address", "what"), rows)


async def members_of(url: str, pool: str) -> Pool:
    """Return the members of a pool. The newest data servers are last. Raises Unavailable if the catalog does not
    answer."""
    access = configuration.load().node  # the environment has the credentials for etcd
    async with to_catalog(url, access) as catalog:
        nodes = await catalog.listing(schema.folder(pool, NodeEntry))
        engines = await catalog.listing(schema.folder(pool, EngineEntry))
        servers = await catalog.listing(schema.folder(pool, DataEntry))
        conductors = await catalog.listing(schema.folder(pool, ConductorEntry))
    return (
        schema.decode_all(NodeEntry, nodes.entries),
        schema.decode_all(EngineEntry, engines.entries),
        schema.decode_all(DataEntry, sorted(servers.entries, key=lambda each: each.revision)),
        schema.decode_all(ConductorEntry, conductors.entries),
    )


def _directory_state(server: DataEntry, pool: str) -> dict[str, Any] | None:
    """Return the state of a data server's part of the directory; None if the server is not responding or refuses the
    call."""
    try:
        with closing(dial(server, pool, "kvstore status")) as connection:
            return read_state(connection, ASK_S)
    except KVStoreError:
        return None


def dial(server: DataEntry, pool: str, caller: str, silence_s: float = ASK_S) -> DataConnection:
    """Connect to a data server with the credentials in the environment. Raises as ``DataConnection.open``."""
    credentials = credentials_of(os.environ)
    if server.tls and not credentials.server_name:
        credentials = replace(credentials, server_name=server.tls_name)
    hello = Hello(pool=pool, node=server.node, caller=caller, token=credentials.token, process=server.process)
    if not server.addresses:
        raise NodeUnavailable(f"{server.node}: its data server has no address")
    deadline_s = time.monotonic() + ASK_S
    return DataConnection.open(
        server.addresses[0],
        hello,
        credentials,
        tls=server.tls,
        plain_from=server.private_networks,
        deadline_s=deadline_s,
        silence_s=silence_s,
    )


def ask(
    connection: DataConnection, kind: FrameKind, reply: FrameKind, within_s: float, request: bytes = b""
) -> dict[str, Any]:
    """Send a request, and return the JSON object in the reply. Raises as ``DataConnection.call``."""
    body = connection.call(kind, request, reply=reply, deadline_s=time.monotonic() + within_s)
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise WireError(f"{kind.name}: the reply is not a JSON object")
    return document


def _directory_text(server: DataEntry, state: dict[str, Any] | None) -> str:
    """Describe the part of the directory that a data server owns, and the age of its oldest entries."""
    pages = f"pages of {server.node}, over {ways_text(server.transports)}"
    if state is None:
        return f"{pages}; not responding"
    ages = state.get("heard_ago_s", {}).items()
    oldest = max(ages, key=lambda item: item[1], default=None)
    since = f", {oldest[0]} last heard {duration_text(oldest[1])} ago" if oldest else ""
    heard = state.get("catalog_heard_ago_s")
    fault = (state.get("membership") or {}).get("fault", "")
    missing = state.get("ktls_missing", "")
    ktls = f"; TLS without the kernel: {missing}" if server.tls and missing else ""
    catalog = f", the catalog {duration_text(heard)} ago" if heard is not None else ""
    return (
        f"{pages}; {state.get('connections', 0)} connections; "
        f"lists {state.get('entries', 0)} of {len(ages)} nodes{since}{catalog}{ktls}{f'; {fault}' if fault else ''}"
    )


def _node_text(node: NodeEntry) -> str:
    sizes = " + ".join(f"{bytes_text(size)} {tier.upper()}" for tier, size in node.capacity_bytes.items())
    zone = f", zone {node.zone}" if node.zone else ""
    return f"{sizes}{zone}{', draining' if node.draining else ''}"


def _first(addresses: tuple[str, ...]) -> str:
    return addresses[0] if addresses else "this host only"
