"""The file ``secret`` of a node's folder: the secret of its pool, for the programs that map the node.

It names the incarnation of the memory that it belongs to, and is there before the header says that incarnation. Where
it is absent or damaged, the keys of that memory cannot be made: its pages are lost, and the next start makes it anew.
"""

from __future__ import annotations

import secrets
import struct
from typing import Final

from kvstore.model.pool_secret import SECRET_BYTES
from kvstore.tier.folder import NodeFolder
from kvstore.tier.plain_files import read_plain

_FILE: Final = struct.Struct(f"<8sQ{SECRET_BYTES}s")
_MAGIC: Final = b"KVSECRT1"


def new_secret() -> bytes:
    """A secret for a pool that is just made."""
    return secrets.token_bytes(SECRET_BYTES)


def write_secret(folder: NodeFolder, incarnation: int, secret: bytes) -> None:
    """Put it there. Raises OutOfSpace where there is no memory for it."""
    folder.new_file(folder.secret, _FILE.size, _FILE.pack(_MAGIC, incarnation, secret))


def read_secret(folder: NodeFolder, incarnation: int) -> bytes | None:
    """That of this incarnation; None where there is none."""
    try:
        magic, owner, secret = _FILE.unpack(read_plain(folder.secret))
    except (OSError, struct.error):
        return None
    return bytes(secret) if (magic, owner) == (_MAGIC, incarnation) else None
