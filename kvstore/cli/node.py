"""The ``--node`` option: which node a command is about, the same for all commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])

HELP = (
    "NAME of a node of this machine, kv://HOST:PORT or kv+unix:///PATH; credentials by KVSTORE_TOKEN, KVSTORE_TLS_CA "
    "and so on.  [default: $KVSTORE_NODE, else the only one on this machine]"
)


def node_option(command: _Command) -> _Command:
    """The command receives it as ``node``, for ``kvstore.connect``."""
    return click.option("--node", metavar="ADDRESS", help=HELP)(command)
