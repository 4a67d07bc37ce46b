"""``kvstore data``: the data server of a node."""

from __future__ import annotations

from typing import Any

import click

from kvstore import config as configuration
from kvstore.cli.output import say
from kvstore.cli.settings import with_settings
from kvstore.config import NodeConfig
from kvstore.node.cluster import data_server
from kvstore.node.cluster.data_child import SETTINGS


@click.command()
@click.option("--node", metavar="NAME", help="The node on this machine whose pages it serves.  [default: default]")
@click.option("--listen", metavar="HOST:PORT", help="Address to listen on.  [default: a free loopback port]")
@click.option("--child", is_flag=True, hidden=True, help="A daemon started it.")
@with_settings(NodeConfig, only=SETTINGS)
def data(path: str | None, as_json: bool, node: str | None, listen: str | None, child: bool, **flags: Any) -> None:
    """Serve the pages of a node on this machine to other nodes, until SIGTERM.

    It is a separate process, so pages are served even while the node's daemon is down. With --catalog a daemon starts
    one itself. To keep it running when the daemon stops, run it as a separate service, and give the daemon `--data
    none`. It prints one line when it is ready.
    """
    settings = configuration.load(path, flags={**flags, "name": node, "data": listen}).node

    def announce(line: str) -> None:
        say(as_json, {"ready": True, "name": settings.name, "line": line}, line)

    data_server.serve(settings, announce, child=child)
