"""``kvstore serve``: runs a node daemon on this machine."""

from __future__ import annotations

from typing import Any

import click

from kvstore import config as configuration
from kvstore.cli.output import say
from kvstore.cli.settings import with_settings
from kvstore.config import NodeConfig
from kvstore.node import daemon


@click.command()
@with_settings(NodeConfig)
def serve(path: str | None, as_json: bool, **flags: Any) -> None:
    """Run a node daemon on this machine until SIGTERM.

    It prints one line when it is ready. After kill -9 or SIGTERM the next start finds every sealed page again. After a
    reboot it finds those that were saved to NVMe. docs/config.md explains the settings; each can also be set in the
    file, or in the environment (KVSTORE_DRAM=8GiB).
    """
    settings = configuration.load(path, flags=flags).node

    def announce(line: str) -> None:
        say(as_json, {"ready": True, "name": settings.name, "line": line}, line)

    daemon.serve(settings, announce)
