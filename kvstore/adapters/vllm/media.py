"""Images and other media of a prompt, as part of the keys of the pages that they are in."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


def media_have_names(config: VllmConfig) -> bool:
    """Whether vLLM calls the same media the same in every engine. With neither of its caches it numbers them by
    request, and two requests may have the same name."""
    about = config.model_config.multimodal_config
    return bool(config.cache_config.enable_prefix_caching) or about is None or about.mm_processor_cache_gb > 0


def media_of(request: Request, page_tokens: int) -> list[bytes] | None:
    """Of each full page a digest of the media inside, by their names and places, ``b""`` where none; None: no media."""
    features = request.mm_features
    if not features:
        return None
    named: list[list[tuple[str, str, int, int]]] = [[] for _ in range(request.num_tokens // page_tokens)]
    for each in features:
        start, length = each.mm_position.offset, each.mm_position.length
        last = min(len(named) - 1, (start + max(length, 1) - 1) // page_tokens)
        for page in range(start // page_tokens, last + 1):
            named[page].append((each.modality, each.identifier, start - page * page_tokens, length))
    return [hashlib.blake2b(json.dumps(its).encode(), digest_size=16).digest() if its else b"" for its in named]
