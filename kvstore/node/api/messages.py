"""Wire: between the messages of store.proto and what the client library takes: caches, keys."""

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

PAGES_MAX: Final = 1 << 16  # of one call: what is kept of it while it runs, and its reply, are bounded


@dataclass(frozen=True)
class PromptPages:
    """What a request's ``Pages`` mean: consecutive pages in one cache. ``orphan``: their parent is not stored here.

    Callers name pages, and are told of them, by the links of their chain; the rest of a pool's keys is not shown to
    them.
    """

    cache: PrefixCache
    keys: Keys
    orphan: bool = False


def prompt_of(store: Store, node: Node, pages: pb.Pages, *, to_match: bool) -> PromptPages:
    """The pages of a request. Blocks: it hashes, and may look the parent up.

    Args:
        to_match: the pages that a prompt can match, all but the one with its last token; else all full pages.

    Raises:
        InvalidRequest: names the field.
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
        raise InvalidRequest("tokens", f"{full} pages, one call names {PAGES_MAX} at most: continue after a parent")
    if pages.whole_pages and len(tokens) % layout.page_tokens:
        raise InvalidRequest("tokens", f"must be whole pages of {layout.page_tokens} (got {len(tokens)} tokens)")
    if pages.extras and len(pages.extras) != full:
        raise InvalidRequest("extras", f"must be {full} values, one per full page, or none")
    extras = list(pages.extras) or None
    cache = store.cache(layout, pages.salt, pages.adapter)
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
    """The root of the page of that key, stored or being written; None where there is none."""

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
    """A match as a message."""
    keys = prompt.keys.links if with_keys else ()
    nvme_pages = match.tiers.get(Tier.NVME, 0)
    return pb.LookupReply(pages=match.pages, tokens=match.tokens, nvme_pages=nvme_pages, reason=match.reason, keys=keys)


def keys_in_pool(store: Store, request: dict[str, Any]) -> dict[str, Any]:
    """A document whose ``keys`` may be links, as callers who share no memory make them, with those of the pool."""
    keys, root = request.get("keys"), request.get("root")
    if not isinstance(keys, list) or not isinstance(root, str):
        return request
    try:
        named, links = bytes.fromhex(root), [bytes.fromhex(key) for key in keys]
    except (ValueError, TypeError):
        return request  # which the call itself refuses
    if any(len(key) != KEY_BYTES for key in (named, *links)):
        return request
    found = store.in_pool(Keys(1, named, named, links, np.zeros(0, np.uint32), None))
    return {**request, "keys": [key.hex() for key in found.hashes]}
