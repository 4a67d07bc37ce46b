"""``kvstore config``: the configuration that a node started now would have, and where each value comes from."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from kvstore import config as configuration
from kvstore.cli.output import json_option, print_json, print_table
from kvstore.cli.settings import value_text, with_settings
from kvstore.config import NodeConfig


@click.command()
@click.option("--config", "path", type=click.Path(dir_okay=False), help="A TOML file; flags and env go before it.")
@json_option
@with_settings
def config(path: str | None, as_json: bool, **flags: Any) -> None:
    """Show the configuration that ``serve`` would have, checked, and where each value comes from.

    Sources, strongest first: a flag, the environment (KVSTORE_DRAM), the file, the default. docs/config.md explains the
    settings. Nothing secret is shown: keys, certificates and tokens are files, and only their paths are settings.
    """
    found = configuration.load(path, flags=flags)
    if as_json:
        described = {
            setting.name: {
                "value": plain(getattr(found.node, setting.name)),
                "source": found.sources[f"node.{setting.name}"],
            }
            for setting in fields(NodeConfig)
        }
        print_json({"node": described})
        return
    rows = [
        (setting.name, value_text(setting.name, getattr(found.node, setting.name)), source)
        for setting in fields(NodeConfig)
        for source in [found.sources[f"node.{setting.name}"]]
    ]
    print_table(("setting", "value", "source"), rows)


def plain(value: Any) -> Any:
    """A setting's value as JSON has it: sizes in bytes, targets and quotas as text."""
    if isinstance(value, tuple):
        return [str(part) for part in value]
    return str(value) if isinstance(value, Path) else value
