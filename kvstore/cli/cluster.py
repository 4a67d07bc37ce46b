"""Who is in a cluster, as its catalog tells."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from kvstore import config as configuration
from kvstore.catalog import schema
from kvstore.catalog.connect import to_catalog
from kvstore.catalog.schema import DataEntry, EngineEntry, NodeEntry
from kvstore.cli.output import bytes_text, print_json, print_table


def cluster(url: str, pool: str, as_json: bool) -> None:
    """Print the members of a pool."""
    nodes, engines, servers = asyncio.run(_members(url, pool))
    if as_json:
        members = {
            "nodes": [asdict(each) for each in nodes],
            "engines": [asdict(each) for each in engines],
            "data": [asdict(each) for each in servers],
        }
        print_json({"catalog": url, "pool": pool, "members": members})
        return
    rows = [("node", each.name, each.host, _first(each.addresses), _sizes(each)) for each in nodes]
    rows += [
        ("engine", each.name, each.host, _first(each.addresses), f"{each.role}, {each.model} on {each.device}")
        for each in engines
    ]
    rows += [("data", each.name, each.host, _first(each.addresses), f"pages of {each.node}") for each in servers]
    print_table(("member", "name", "host", "address", "what"), rows)


async def _members(url: str, pool: str) -> tuple[list[NodeEntry], list[EngineEntry], list[DataEntry]]:
    access = configuration.load().node  # the environment says how to prove ourselves to etcd
    async with to_catalog(url, access) as catalog:
        nodes = await catalog.listing(schema.folder(pool, NodeEntry))
        engines = await catalog.listing(schema.folder(pool, EngineEntry))
        servers = await catalog.listing(schema.folder(pool, DataEntry))
    return (
        schema.decode_all(NodeEntry, nodes.entries),
        schema.decode_all(EngineEntry, engines.entries),
        schema.decode_all(DataEntry, servers.entries),
    )


def _sizes(node: NodeEntry) -> str:
    return " + ".join(f"{bytes_text(size)} {tier.upper()}" for tier, size in node.capacity_bytes.items())


def _first(addresses: tuple[str, ...]) -> str:
    return addresses[0] if addresses else "this host only"
