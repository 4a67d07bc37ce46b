"""Conversion between messages of store.proto and the client library's caches and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvstore.client.match import Match
from kvstore.client.prefix_cache import PrefixCache
from kvstore.client.store import Store
from kvstore.errors import InvalidRequest
from kvstore.model.prefix import Keys
from kvstore.model.replica import KEY_BYTES, Tier
from kvstore.model.retention import RANGES_SENT_MAX, hints_of
from kvstore.node.node import Node
from kvstore.pb import store_pb2 as pb
from kvstore.wire.grpc import check_text, layout_of, retention_of

PAGES_MAX: Final = 1 << 16  # of one call: bounds its memory and its reply


@dataclass(frozen=True)
class PromptPages:
    """The pages that a request names: consecutive pages of one cache. ``orphan``: the parent is not stored here.

    Requests and replies name pages by the links of their chain. The tag, the other half of a pool's keys, is not sent
    to callers.
    """

    cache: PrefixCache
    keys: Keys
    orphan: bool = False


def prompt_of(store: Store, node: Node, pages: pb.Pages, *, to_match: bool) -> PromptPages:
    """Return the pages of a request. The call hashes tokens and may look up the parent, so it blocks.

    Args:
        to_match: return the pages that a prompt can match, which excludes the page with its last token. Otherwise
            return all full pages.

    Raises:
        InvalidRequest: a field is not valid. The error names it.
    """
    if not pages.HasField("layout"):
        raise InvalidRequest("pages.layout", "is missing")
    layout = layout_of(pages.layout)
    check_text("salt", pages.salt)
    check_text("adapter", pages.adapter)
    if len(pages.tokens) % 4 or not pages.tokens:
        raise InvalidRequest("tokens", f"must be non-empty little-endian uint32 (got {len(pages.tokens)} bytes)")
    tokens = np.frombuffer(pages.tokens, "<u4")
    full = len(tokens) // layout.page_tokens
    if full > PAGES_MAX:
        raise InvalidRequest("tokens", f"must be at most {PAGES_MAX} pages (got {full}): send the rest with a parent")
    if pages.whole_pages and len(tokens) % layout.page_tokens:
        raise InvalidRequest("tokens", f"must be whole pages of {layout.page_tokens} (got {len(tokens)} tokens)")
    if pages.extras and len(pages.extras) != full:
        raise InvalidRequest("extras", f"must be {full} values, one per full page, or none")
    extras = list(pages.extras) or None
    cache = store.cache(layout, pages.salt, pages.adapter, pages.replicas or None)
    if to_match and not pages.whole_pages:
        full = (len(tokens) - 1) // layout.page_tokens
        extras = extras[:full] if extras is not None else None
    used = np.ascontiguousarray(tokens[: full * layout.page_tokens])
    hints = _hints(pages, full, layout.page_tokens)
    if not pages.parent:
        return PromptPages(cache, store.in_pool(Keys.of(used, layout.page_tokens, cache.root, extras)).hinted(hints))
    if len(pages.parent) != KEY_BYTES:
        raise InvalidRequest("parent", f"must be a key of {KEY_BYTES} bytes (got {len(pages.parent)})")
    chain = Keys.of(used, layout.page_tokens, pages.parent, extras)
    keys = store.in_pool(Keys(layout.page_tokens, cache.root, pages.parent, chain.links, chain.tokens, chain.extras))
    orphan = keys.parent != cache.root and root_of(node, keys.parent) != cache.root
    return PromptPages(cache, keys.hinted(hints), orphan)


def _hints(pages: pb.Pages, count: int, page_tokens: int) -> bytes:
    if not pages.retention:
        return b""
    return hints_of(retention_of(pages.retention), count, page_tokens, RANGES_SENT_MAX)


def root_of(node: Node, key: bytes) -> bytes | None:
    """Return the root of the page with this key, which is stored or being written; None if there is none."""

    def look(performer: Any, state: Any) -> bytes | None:
        index = performer.index
        for address in (*(index.find(tier, key) for tier in index.tiers), index.find_pending(key)):
            table = performer.tables.get(address.extent) if address is not None else None
            if table is not None and address.frame < len(table.rows):
                record = table.record(address.frame)
                if record.key == key:
                    root: bytes = record.root
                    return root
        return None

    return node.look(look)


def lookup_reply(match: Match, prompt: PromptPages, with_keys: bool = True) -> pb.LookupReply:
    """Return a match as a message."""
    keys = prompt.keys.links if with_keys else ()
    nvme_pages = match.tiers.get(Tier.NVME, 0)
    return pb.LookupReply(pages=match.pages, tokens=match.tokens, nvme_pages=nvme_pages, reason=match.reason, keys=keys)


def keys_in_pool(store: Store, request: dict[str, Any]) -> dict[str, Any]:
    """Return an admin request whose ``keys`` are the pool's keys.

    Callers without shared memory name pages by links, because they do not have the pool's secret."""
    keys, root = request.get("keys"), request.get("root")
    if not isinstance(keys, list) or not isinstance(root, str):
        return request
    try:
        root_bytes, links = bytes.fromhex(root), [bytes.fromhex(key) for key in keys]
    except (ValueError, TypeError):
        return request  # the call itself refuses such a request
    if any(len(key) != KEY_BYTES for key in (root_bytes, *links)):
        return request
    pool_keys = store.in_pool(Keys(1, root_bytes, root_bytes, links, np.zeros(0, np.uint32), None))
    return {**request, "keys": [key.hex() for key in pool_keys.hashes]}
