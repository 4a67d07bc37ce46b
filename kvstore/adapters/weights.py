"""Which weights a folder has, told apart without reading gigabytes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")
SAMPLED = 1 << 20  # bytes of a file's front, and of its end


def folder_digest(where: str) -> str:
    """A digest of a model's folder: of its config, and of its weights' sizes, fronts and ends. "": it is no folder.

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
    """The digest of a folder that a setting of ``host``'s adapter names.

    Raises:
        ValueError: it is no folder, or its files cannot be read; the message names the host's adapter.
    """
    try:
        found = folder_digest(where)
    except OSError as error:
        raise ValueError(f"kvstore for {host}: weights in {where!r} cannot be read: {error}") from error
    if not found:
        raise ValueError(f"kvstore for {host}: there is no folder {where!r}")
    return found


def add_weights(digest: Any, where: str) -> None:
    """Have a digest tell the weights in a folder; nothing, where there is none."""
    folder = Path(where)
    for pattern in WEIGHT_FILES if folder.is_dir() else ():
        for path in sorted(folder.glob(pattern)):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(SAMPLED))
                file.seek(max(0, size - SAMPLED))
                digest.update(file.read(SAMPLED))
