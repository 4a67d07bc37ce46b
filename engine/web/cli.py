"""The command ``kvstore web``."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
from contextlib import closing
from typing import TYPE_CHECKING

import click

import kvstore
from kvstore.cli.node import node_option
from kvstore.cli.output import json_option, say
from kvstore.cli.top import node_frames, pool_frames
from kvstore.config import parse_address
from kvstore.errors import InvalidRequest, NodeUnavailable

if TYPE_CHECKING:
    from engine.web.server import Frames


@click.command()
@node_option
@click.option("--http", default="127.0.0.1:8088", show_default=True, metavar="HOST:PORT", help="Where to serve pages.")
@click.option("--catalog", metavar="URL", help="Show a whole pool instead: file:PATH, etcd://HOST:PORT,...")
@click.option("--pool", default="default", show_default=True, help="The pool in that catalog.")
@json_option
def web(node: str | None, http: str, catalog: str | None, pool: str, as_json: bool) -> None:
    """Serve web pages: a live view of a node or a pool, and a what-if page that compares designs of clusters.

    The pages need no other site. They are served on loopback only, because they show all tenants; from another machine
    use `ssh -L 8088:127.0.0.1:8088 HOST`. Without a node, only the what-if page has contents.
    """
    host, port = parse_address(http, "http")
    if not _is_loopback(host):
        raise InvalidRequest("http", f"must be an address of loopback, because the pages show all tenants (got {host})")
    if catalog is not None and node is not None:
        raise InvalidRequest("--node", "cannot be combined with --catalog, which shows a whole pool")
    if catalog is not None:
        with closing(pool_frames(catalog, pool)) as frames:
            _run(frames, host, port, as_json)
        return
    try:
        store = kvstore.connect(node)
    except NodeUnavailable:
        if node is not None:
            raise
        _run(None, host, port, as_json)
        return
    with store:
        _run(node_frames(store.stats, store.name), host, port, as_json)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _run(frames: Frames | None, host: str, port: int, as_json: bool) -> None:
    try:
        from engine.web.server import serve
    except ImportError as error:
        raise InvalidRequest("http", "needs aiohttp: pip install 'kvstore[http]'") from error

    def ready(url: str) -> None:
        say(as_json, {"url": url}, f"kvstore web: {url}")

    async def until_signal() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        await serve(frames, host, port, ready, ended)

    asyncio.run(until_signal())
