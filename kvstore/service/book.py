"""The node's book: names of roots, and pins. Files in the node's folder, gone with a reboot.

It outlives kill -9: it is written before whoever asked for the change hears of it. A name is a line at the end of
``names``, so that one of many thousands costs no more than the first; pins are few, and written as a whole.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.state import events as ev
from kvstore.state.node_state import NodeState
from kvstore.tier.folder import NodeFolder
from kvstore.tier.plain_files import open_plain, read_plain, remove

log = logging.getLogger("kvstore.node")

NAMES, PINS = "names", "pins"


def add_name(folder: NodeFolder, incarnation: int, root: bytes, about: Mapping[str, Any]) -> None:
    """One more name."""
    path = folder.path / NAMES
    if not path.is_file() or path.is_symlink():
        _replace(path, _head(incarnation))
    # Lines begin with their end: one that a kill cut short spoils no other.
    with open(open_plain(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0) as file:
        file.write(b"\n" + _line(root, about))


def write_names(folder: NodeFolder, incarnation: int, named: Mapping[bytes, Mapping[str, Any]]) -> None:
    """These names, and no others."""
    lines = [_head(incarnation), *(_line(root, about) for root, about in named.items())]
    _replace(folder.path / NAMES, b"\n".join(lines))


def write_pins(folder: NodeFolder, incarnation: int, pins: list[dict[str, Any]]) -> None:
    """These pins, and no others."""
    document = {"incarnation": f"{incarnation:016x}", "pins": pins}
    _replace(folder.path / PINS, json.dumps(document).encode())


def read_names(folder: NodeFolder, incarnation: int) -> dict[bytes, dict[str, Any]]:
    """The names of this incarnation, as far as they can be read; those of another are removed."""
    path, named = folder.path / NAMES, dict[bytes, dict[str, Any]]()
    try:
        lines = read_plain(path).split(b"\n")
    except FileNotFoundError:
        return named
    if lines[0] != _head(incarnation):
        remove(path)
        return named
    for line in filter(None, lines[1:]):
        try:
            about = json.loads(line)
            named[bytes.fromhex(about.pop("root"))] = {**about, "salt": str(about["salt"])}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.error("a name of a tenant cannot be read and is lost: %s", error)
    return named


def restore_pins(state: NodeState, folder: NodeFolder, incarnation: int) -> None:
    """Pins of the daemon before, those that have not run out. Before anything may leave."""
    now_ns, now_s = time.monotonic_ns(), time.time()
    for number, keys, root, until_s in _read_pins(folder.path / PINS, incarnation):
        if until_s > now_s:
            until_ns = now_ns + int((until_s - now_s) * 1e9)
            state.handle(ev.Pin(now_ns, number, keys, root, until_ns, until_s, restore=True))


def _read_pins(path: Path, incarnation: int) -> list[tuple[int, list[bytes], bytes, float]]:
    try:
        document = json.loads(read_plain(path))
        if document["incarnation"] != f"{incarnation:016x}":
            return []
        return [
            (int(pin["pin"]), _keys(pin["keys"]), bytes.fromhex(pin["root"]), float(pin["until"]))
            for pin in document["pins"]
        ]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.error("pins cannot be read and are lost: %s", error)
        return []


def _keys(text: str) -> list[bytes]:
    raw = bytes.fromhex(text)
    return [raw[i : i + 16] for i in range(0, len(raw), 16)]


def _head(incarnation: int) -> bytes:
    return f"incarnation {incarnation:016x}".encode()


def _line(root: bytes, about: Mapping[str, Any]) -> bytes:
    return json.dumps({"root": root.hex(), **about}).encode()  # in ASCII, without a line end inside


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_name(f"{path.name}.new")
    remove(fresh)
    descriptor = open_plain(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    os.replace(fresh, path)
