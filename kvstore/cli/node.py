"""The ``--node`` option, which selects the node of a command."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from kvstore.shm.folder import list_nodes

_Command = TypeVar("_Command", bound=Callable[..., Any])

HELP = (
    "NAME of a node on this machine, kv://HOST:PORT or kv+unix:///PATH; credentials in KVSTORE_TOKEN, KVSTORE_TLS_CA "
    "and so on.  [default: $KVSTORE_NODE, else the only one on this machine]"
)


def node_option(command: _Command) -> _Command:
    """Add the option; the command receives it as ``node``, for ``kvstore.connect``."""
    return click.option("--node", metavar="ADDRESS", help=HELP, shell_complete=node_names)(command)


def node_names(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the nodes of this machine for a shell's completion. Unreadable folders are ignored."""
    nodes = list_nodes(os.environ.get("KVSTORE_SHM_DIR") or "/dev/shm")
    return [
        CompletionItem(name, help="" if alive else "not running")
        for name, alive in nodes
        if name.startswith(incomplete) and not name.startswith("embedded-")
    ]
