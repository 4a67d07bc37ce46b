"""Identifies the weights in a folder without reading gigabytes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")
SAMPLED = 1 << 20  # bytes of a file's beginning, and of its end


def folder_digest(where: str) -> str:
    """Return a digest of a model's folder: its config, and the sizes, beginnings and ends of its weights; "" if it is
    not a folder.

    Raises:
        OSError: its files cannot be read.
    """
    folder = Path(where)
    if not where or not folder.is_dir():
        return ""
    digest = hashlib.blake2b(digest_size=16)
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    add_weights(digest, where)
    return digest.hexdigest()


def given_digest(host: str, where: str) -> str:
    """Return the digest of a folder that a setting of ``host``'s adapter names.

    Raises:
        ValueError: it is not a folder, or its files cannot be read; the message names the host's adapter.
    """
    try:
        found = folder_digest(where)
    except OSError as error:
        raise ValueError(f"kvstore for {host}: weights in {where!r} cannot be read: {error}") from error
    if not found:
        raise ValueError(f"kvstore for {host}: there is no folder {where!r}")
    return found


def add_weights(digest: Any, where: str) -> None:
    """Add the weights in a folder to a digest; does nothing if there are none."""
    folder = Path(where)
    for pattern in WEIGHT_FILES if folder.is_dir() else ():
        for path in sorted(folder.glob(pattern)):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(SAMPLED))
                file.seek(max(0, size - SAMPLED))
                digest.update(file.read(SAMPLED))
