"""``kvstore config``: shows the configuration of a node that would start now, and the source of each value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvstore import config as configuration
from kvstore.cli.output import print_json, print_table
from kvstore.cli.settings import value_text, with_settings
from kvstore.config import NodeConfig
from kvstore.config.reading import declarations


@click.command()
@with_settings(NodeConfig)
def config(path: str | None, as_json: bool, **flags: Any) -> None:
    """Check and show the configuration that ``serve`` would use, and the source of each value.

    Sources, strongest first: a flag, the environment (KVSTORE_DRAM), the file, the default. docs/config.md explains the
    settings. Nothing secret is shown: keys, certificates and tokens are files, and only their paths are settings.
    """
    loaded = configuration.load(path, flags=flags)
    settings = [
        (name, setting.parser, getattr(loaded.node, name), loaded.sources[f"node.{name}"])
        for name, setting in declarations(NodeConfig).items()
    ]
    if as_json:
        print_json({"node": {name: {"value": plain(value), "source": source} for name, _, value, source in settings}})
        return
    rows = [(name, value_text(parser, value), source) for name, parser, value, source in settings]
    print_table(("setting", "value", "source"), rows)


def plain(value: Any) -> Any:
    """Return a setting's value for JSON: sizes in bytes, targets and quotas as text."""
    if isinstance(value, tuple):
        return [str(part) for part in value]
    return str(value) if isinstance(value, Path) else value
