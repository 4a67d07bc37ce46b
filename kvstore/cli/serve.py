"""``kvstore serve``: the node daemon of this machine."""

from __future__ import annotations

import sys
from typing import Any

import click

from kvstore import config as configuration
from kvstore.cli.output import json_option, print_json
from kvstore.service import daemon


@click.command()
@click.option("--name", help="What clients on this machine connect to.  [default: default]")
@click.option("--dram", help="Capacity of the DRAM segment, such as 512MiB or 8GiB.  [default: 512MiB]")
@click.option(
    "--nvme", multiple=True, metavar="PATH:SIZE", help="A file or block device below DRAM; may repeat.  [default: none]"
)
@click.option(
    "--format",
    "nvme_format",
    is_flag=True,
    default=None,
    help="Leave to make anew an NVMe target that holds something else.",
)
@click.option("--eviction", help="Policy by which pages leave: gittins, lru, slru, s3fifo or arc.  [default: gittins]")
@click.option("--extent", help="Bytes of one extent; the largest page must fit.  [default: a sixteenth of --dram]")
@click.option("--http", help="HOST:PORT of /healthz and /readyz.  [default: none]")
@click.option("--config", "path", type=click.Path(dir_okay=False), help="A TOML file; flags and env go before it.")
@json_option
def serve(path: str | None, as_json: bool, nvme: tuple[str, ...], **flags: Any) -> None:
    """Run the node daemon of this machine until SIGTERM.

    Prints one line when it serves. After kill -9 or SIGTERM the next start finds every sealed page again;
    after a restart of the machine those that were saved to NVMe.
    """
    settings = configuration.load(path, flags={**flags, "nvme": nvme or None}).node

    def announce(line: str) -> None:
        if as_json:
            print_json({"ready": True, "name": settings.name, "line": line})
        else:
            click.echo(line)
        sys.stdout.flush()

    daemon.serve(settings, announce)
