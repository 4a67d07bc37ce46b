"""The ``--node`` option, which selects a command's node, equal for all commands."""

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
    """Return nodes of this machine for a shell's completion, ignoring unreadable folders."""
    found = list_nodes(os.environ.get("KVSTORE_SHM_DIR") or "/dev/shm")
    named = [one for one in found if one[0].startswith(incomplete) and not one[0].startswith("embedded-")]
    return [CompletionItem(name, help="" if alive else "not running") for name, alive in named]
