"""The byte format of COPY: an order to another node to store copies of pages. No I/O.

The source orders, and the target pulls: it reserves frames, reads the pages from the source like any page of another
node, verifies and seals them. It answers when it has done so::

    COPY     length of the name u32, pages u32 | key of the page before the first one 16 | name, JSON |
             hint byte u8[pages] | a READ of these pages
    COPIED   as END: how many leading pages the target has now, and why not more

The name has ``source``, the node that has the pages, and ``about``: salt, adapter and layout of their root, as clients
name it. The key before the first page is the root if the first page begins its chain. Only its first half counts, as
for every key that leaves its node (``model.prefix``).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any, Final

from kvstore.errors import InvalidRequest
from kvstore.model.prefix import Keys
from kvstore.model.replica import KEY_BYTES
from kvstore.wire.data import ChainQuery, ReadRequest, unpack_read

NAME_BYTES_MAX: Final = 16 << 10
_HEAD: Final = struct.Struct(f"<II{KEY_BYTES}s")


@dataclass(frozen=True)
class CopyOrder:
    """An order to copy consecutive pages of one chain.

    Attributes:
        source: the node that has the pages.
        about: the description of their root that the target's daemon gets.
        keys: the pages, with hint bytes, and with the page before them.
    """

    source: str
    about: dict[str, Any]
    chain: ChainQuery
    keys: Keys

    def pack(self) -> list[bytes]:
        """Return the body of COPY, in parts. ``keys`` must have a hint byte for each page."""
        name = json.dumps({"source": self.source, "about": self.about}, separators=(",", ":")).encode()
        read = ReadRequest(self.chain, self.keys, 0, self.chain.frame_class.page_bytes)
        head = _HEAD.pack(len(name), len(self.keys), self.keys.before)
        return [head, name, self.keys.hints, *read.pack()]


def unpack_copy(body: memoryview) -> CopyOrder:
    """Return the order in this body.

    Raises:
        InvalidRequest: it is not valid. The error names the field.
    """
    if len(body) < _HEAD.size:
        raise InvalidRequest("copy", f"must have at least {_HEAD.size} bytes (got {len(body)})")
    name_bytes, pages, before = _HEAD.unpack_from(body)
    if name_bytes > NAME_BYTES_MAX or len(body) < _HEAD.size + name_bytes + pages:
        raise InvalidRequest("copy", f"must have a name and {pages} hints (got {len(body)} bytes)")
    try:
        name = json.loads(bytes(body[_HEAD.size : _HEAD.size + name_bytes]))
        source, about = name["source"], name["about"]
    except (ValueError, RecursionError, TypeError, KeyError):
        source = about = None
    if not isinstance(source, str) or not isinstance(about, dict):
        raise InvalidRequest("name", "must be a JSON object with a source and a description of the root")
    at = _HEAD.size + name_bytes
    hints = bytes(body[at : at + pages])
    read = unpack_read(body[at + pages :])
    if len(read.keys) != pages:
        raise InvalidRequest("pages", f"must be the number of hints, {pages} (got {len(read.keys)})")
    keys, root = read.keys, read.chain.root
    keys = Keys(keys.page_tokens, root, before, keys.links, keys.tokens, keys.extras, hints=hints)
    return CopyOrder(source, about, read.chain, keys)
