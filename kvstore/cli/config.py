"""``kvstore config``: the configuration that a node started now would have, and where each value comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from kvstore import config as configuration
from kvstore.cli.output import json_option, print_json, print_table
from kvstore.config import NodeConfig, format_size
from kvstore.config.values import parse_size, parse_size_or_zero

_SIZES = (parse_size, parse_size_or_zero)


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """One option per setting, all of them text: what `load` reads."""
    for setting in reversed(fields(NodeConfig)):
        flag = f"--{setting.name.replace('_', '-')}"
        command = click.option(flag, setting.name, metavar="VALUE", help=f"As in `{setting.name} = VALUE`.")(command)
    return command


@click.command()
@click.option("--config", "path", type=click.Path(dir_okay=False), help="A TOML file; flags and env go before it.")
@json_option
@_with_flags
def config(path: str | None, as_json: bool, **flags: str | None) -> None:
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


def value_text(name: str, value: Any) -> str:
    """A setting's value as the file has it: ``"512MiB"``, ``0.5``, ``["a", "b"]``; ``none`` where it is not set."""
    parser = next(setting.metadata["parser"] for setting in fields(NodeConfig) if setting.name == name)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(_quoted(str(part)) for part in value)}]"
    if parser in _SIZES:
        return _quoted(format_size(value)) if value else "0"
    return _quoted(str(value)) if isinstance(value, str | Path) else str(value)


def plain(value: Any) -> Any:
    """A setting's value as JSON has it: sizes in bytes, targets and quotas as text."""
    if isinstance(value, tuple):
        return [str(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def _quoted(text: str) -> str:
    """A TOML string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
