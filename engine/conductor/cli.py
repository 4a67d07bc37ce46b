"""``kvstore conductor``: run a conductor."""

from __future__ import annotations

from typing import Any

import click

from engine.conductor import config as configuration
from engine.conductor.config import ConductorConfig
from kvstore.cli.output import say
from kvstore.cli.settings import with_settings


@click.command()
@with_settings(ConductorConfig)
def conductor(path: str | None, as_json: bool, **flags: Any) -> None:
    """Run a conductor until SIGTERM. It sends each request to the engines that answer it soonest.

    --catalog or --engine names the engines. The conductor prints one line when it serves. Each setting may also be in
    the file under [conductor], or in the environment (KVSTORE_CONDUCTOR_POLICY=kv-centric). docs/conductor.md explains
    them.
    """
    settings, _ = configuration.load(path, flags=flags)
    from engine.conductor import daemon  # only here: the import loads gRPC

    def announce(ready: daemon.ConductorReady) -> None:
        say(as_json, ready.document, ready.line)

    daemon.serve(settings, announce)
