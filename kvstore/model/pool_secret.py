"""PoolSecret: what keeps the page keys of two roots apart.

The chain of a prompt (``model.prefix``) is an xxh3 over token ids: an attacker finds tokens for a given hash at once.
So half of a page's key is not a hash of tokens: it is the *tag* of its root, 8 bytes of BLAKE2b keyed with a secret
that the pool drew. Tokens do not change it, and a client without the secret cannot tell, or find by trying names of
adapters, which roots have equal tags. Pages of two roots therefore never have one key, whatever either of them stores.
Inside a root 8 bytes of the chain remain, which are enough for keys that other roots do not have to trust::

    chain   9f8e7d6c5b4a3928 1706f5e4d3c2b1a0      any client that knows salt, layout and tokens can compute it
    tag                      5d0c77e1a9b3f264      of (secret, root)
    key     9f8e7d6c5b4a3928 5d0c77e1a9b3f264      what index, records and NVMe headers hold
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import Final

import numpy as np

SECRET_BYTES: Final = 16
TAG_BYTES: Final = 8
ARRAY_PAGES: Final = 128  # from this many on, an array is faster


@lru_cache(maxsize=4096)
def tag_of(secret: bytes, root: bytes) -> bytes:
    """The last 8 bytes of the keys of all pages of ``root``."""
    return hashlib.blake2b(root, key=secret, digest_size=TAG_BYTES, person=b"kvstore.tag").digest()


@lru_cache(maxsize=4096)
def veil_of(secret: bytes, root: bytes) -> int:
    """What the directory of a pool mixes (xor) into the fingerprints of a root's pages.

    Owners do so for each caller, by the root that it names and may read. Only nodes know ``secret``, so a caller
    cannot ask under one root for pages of another one: what would hit them differs by two veils.
    """
    digest = hashlib.blake2b(root, key=secret, digest_size=8, person=b"kvstore.veil").digest()
    return int.from_bytes(digest, "little")


def tagged(links: list[bytes], tag: bytes) -> list[bytes]:
    """Keys of pages with these hashes of the chain. Keys that have the tag already stay as they are."""
    if len(links) < ARRAY_PAGES:
        return [link[:-TAG_BYTES] + tag for link in links]
    keys = np.frombuffer(bytearray().join(links), np.uint64).reshape(-1, 2)
    keys[:, 1] = np.frombuffer(tag, np.uint64)
    return list(struct.unpack("16s" * len(links), keys.data))  # three times as fast as one by one
