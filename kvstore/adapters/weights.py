"""Digests that identify the weights in a folder without reading gigabytes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")
SAMPLE_BYTES = 1 << 20  # read from the beginning of a file, and from its end


def folder_digest(path: str) -> str:
    """Return a digest of a model's folder; "" if ``path`` is not a folder.

    The digest covers the config, and the size, beginning and end of each file of weights.

    Raises:
        OSError: a file in the folder cannot be read.
    """
    folder = Path(path)
    if not path or not folder.is_dir():
        return ""
    digest = hashlib.blake2b(digest_size=16)
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    add_weights(digest, path)
    return digest.hexdigest()


def required_digest(host: str, path: str) -> str:
    """Return the digest of the folder that a setting of ``host``'s adapter names.

    Raises:
        ValueError: ``path`` is not a folder, or its files cannot be read. The message names the host.
    """
    try:
        digest = folder_digest(path)
    except OSError as error:
        raise ValueError(f"kvstore for {host}: weights in {path!r} cannot be read: {error}") from error
    if not digest:
        raise ValueError(f"kvstore for {host}: there is no folder {path!r}")
    return digest


def add_weights(digest: Any, folder_path: str) -> None:
    """Add the weights in a folder to a digest. A folder without weights adds nothing."""
    folder = Path(folder_path)
    for pattern in WEIGHT_FILES if folder.is_dir() else ():
        for path in sorted(folder.glob(pattern)):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(SAMPLE_BYTES))
                file.seek(max(0, size - SAMPLE_BYTES))
                digest.update(file.read(SAMPLE_BYTES))
