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
@click.option("--eviction", help="Policy by which pages leave: lru or another known one.  [default: lru]")
@click.option("--extent", help="Bytes of one extent; the largest page must fit.  [default: a sixteenth of --dram]")
@click.option("--kv-events", help="ZMQ address to publish KV events at: tcp://127.0.0.1:5557.  [default: none]")
@click.option("--kv-events-replay", help="ZMQ address to replay missed KV events at.  [default: none]")
@click.option("--http", help="HOST:PORT of /healthz, /readyz and /metrics.  [default: none]")
@click.option(
    "--listen",
    multiple=True,
    metavar="HOST:PORT|unix:PATH",
    help="Where the gRPC API listens; may repeat. Beyond loopback it asks for TLS and identities.  [default: none]",
)
@click.option("--tls-cert", metavar="FILE", help="Certificate (and chain) that the gRPC API shows, PEM.")
@click.option("--tls-key", metavar="FILE", help="Its private key, PEM.")
@click.option("--tls-client-ca", metavar="FILE", help="Authorities whose client certificates are asked for, PEM.")
@click.option("--identities", metavar="FILE", help="TOML file of who may call the gRPC API, and for which salts.")
@click.option("--config", "path", type=click.Path(dir_okay=False), help="A TOML file; flags and env go before it.")
@json_option
def serve(path: str | None, as_json: bool, nvme: tuple[str, ...], listen: tuple[str, ...], **flags: Any) -> None:
    """Run the node daemon of this machine until SIGTERM.

    Prints one line when it serves. After kill -9 or SIGTERM the next start finds every sealed page again;
    after a restart of the machine those that were saved to NVMe.
    """
    settings = configuration.load(path, flags={**flags, "nvme": nvme or None, "listen": listen or None}).node

    def announce(line: str) -> None:
        if as_json:
            print_json({"ready": True, "name": settings.name, "line": line})
        else:
            click.echo(line)
        sys.stdout.flush()

    daemon.serve(settings, announce)
