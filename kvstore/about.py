"""The version of ``kvstore``, and the entry points of installed packages that extend it.

Both come from the metadata of the installed package. A checkout that was never installed has no metadata. There they
come from ``pyproject.toml``, from which an installation would make them, so the same commands work in both.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Final

PACKAGE: Final = "kvstore"
UNKNOWN: Final = "0+unknown"  # neither installed, nor a checkout

_PROJECT_FILE: Final = Path(__file__).resolve().parents[1] / "pyproject.toml"


@cache
def version() -> str:
    """The version of ``kvstore``, or ``UNKNOWN``."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return str(_checkout().get("version", UNKNOWN))


def entry_points(group: str) -> dict[str, EntryPoint]:
    """The entry points of ``group`` by name, of all installed packages and, in a checkout, of this one."""
    own: dict[str, str] = {}
    try:
        metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        own = _checkout().get("entry-points", {}).get(group, {})
    ours = {name: EntryPoint(name, value, group) for name, value in own.items()}
    return {**ours, **{entry.name: entry for entry in metadata.entry_points(group=group)}}


def _checkout() -> dict[str, Any]:
    """The table ``project`` of the checkout's file; empty if this is not a checkout."""
    try:
        project: dict[str, Any] = tomllib.loads(_PROJECT_FILE.read_text())["project"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return {}
    return project if project.get("name") == PACKAGE else {}
