"""``kvstore serve``: the node daemon of this machine."""

from __future__ import annotations

import sys
from typing import Any

import click

from kvstore import config as configuration
from kvstore.cli.output import json_option, print_json
from kvstore.cli.settings import with_settings
from kvstore.service import daemon


@click.command()
@click.option("--config", "path", type=click.Path(dir_okay=False), help="A TOML file; flags and env go before it.")
@json_option
@with_settings
def serve(path: str | None, as_json: bool, **flags: Any) -> None:
    """Run the node daemon of this machine until SIGTERM.

    Prints one line when it serves. After kill -9 or SIGTERM the next start finds every sealed page again;
    after a restart of the machine those that were saved to NVMe. docs/config.md explains the settings; each may also
    stand in the file, or in the environment (KVSTORE_DRAM=8GiB).
    """
    settings = configuration.load(path, flags=flags).node

    def announce(line: str) -> None:
        if as_json:
            print_json({"ready": True, "name": settings.name, "line": line})
        else:
            click.echo(line)
        sys.stdout.flush()

    daemon.serve(settings, announce)
