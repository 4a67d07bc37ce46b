"""Quarantine: positions of the segment that nobody may have yet, because a writer that lives may store there.

A start that finds an extent's tables beyond belief cannot tell which of its frames were granted to whom. What it can
tell is which sessions there were: until each of them has given up its lock, the position is not carved. The file
``quarantine`` says so to the daemons that follow, so it is there before the tables go, and goes after the last lock.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Mapping
from typing import Final

import xxhash

from kvstore.errors import OutOfSpace
from kvstore.tier.folder import NodeFolder
from kvstore.tier.plain_files import read_plain, remove

Held = dict[int, set[int]]
"""Position -> sessions that may write there."""

NAME: Final = "quarantine"


def read_quarantine(folder: NodeFolder, incarnation: int) -> Held | None:
    """What an earlier start of this incarnation wrote down. None: something that cannot be read."""
    try:
        digest, _, text = read_plain(folder.path / NAME).partition(b"\n")
    except FileNotFoundError:
        return {}
    try:
        if digest != xxhash.xxh3_64_hexdigest(text).encode():
            return None
        stored = json.loads(text)
        if int(stored["incarnation"], 16) != incarnation:
            return {}
        return {int(at): {int(session, 16) for session in sessions} for at, sessions in stored["positions"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def write_quarantine(folder: NodeFolder, incarnation: int, held: Mapping[int, Iterable[int]]) -> None:
    """These positions, and no others.

    Raises:
        OSError: it cannot be written; what was there before stays.
    """
    if not held:
        remove(folder.path / NAME)
        return
    positions = {str(at): [f"{session:016x}" for session in sorted(sessions)] for at, sessions in held.items()}
    text = json.dumps({"incarnation": f"{incarnation:016x}", "positions": positions}).encode()
    text = xxhash.xxh3_64_hexdigest(text).encode() + b"\n" + text
    try:
        folder.new_file(folder.path / NAME, len(text), text)
    except OutOfSpace as error:
        raise OSError(errno.ENOSPC, str(error)) from None
