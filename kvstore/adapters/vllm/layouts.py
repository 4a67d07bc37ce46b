"""vLLM's model in the store's terms: layouts and shards of its pages, and everything that distinguishes their keys.

vLLM's cache is one tensor per layer, ``[blocks, kv_heads, block_size, content]``, with K and V packed in content (MLA:
one head, with latent and rope). Layers that keep the same tokens (all of them, or those of a window) are a group. A
page holds ``page_blocks`` consecutive blocks of a sequence, for all layers of a group. vLLM may split a group into
several tables of blocks; pages do not depend on that.

The keys of pages depend on the tokens and on these digests: of the weights, of a request's LoRA and salt, and of the
images and other media in a page. Weights are identified without reading gigabytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from math import lcm
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from kvstore.adapters.vllm.blocks import PagedGroup, PagedModel
from kvstore.adapters.weights import add_weights
from kvstore.model.layout import Layout
from kvstore.model.replica import SHARDS_MAX
from kvstore.model.shard import Shard

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


PAGE_TOKENS_MIN = 64  # minimum tokens of a page if the number of blocks is not set
LORAS_MAX = 4096  # LoRAs whose digests are kept
PLAIN_DTYPES = ("auto", "float16", "bfloat16", "float32")  # cache dtypes that need no further description

# --- Digests in keys --------------------------------------------------------------------------------------------------


def has_media_names(config: VllmConfig) -> bool:
    """Return whether every engine of vLLM gives the same name to the same media. If both of vLLM's caches are off, it
    numbers the media of each request, so media of two requests may have the same name."""
    media_config = config.model_config.multimodal_config
    has_prefix_cache = bool(config.cache_config.enable_prefix_caching)
    return has_prefix_cache or media_config is None or media_config.mm_processor_cache_gb > 0


def media_digests(request: Request, page_tokens: int) -> list[bytes] | None:
    """Return, for each full page, a digest of the names and positions of its media; ``b""`` for a page without media.
    Return None if the request has no media."""
    features = request.mm_features
    if not features:
        return None
    pages: list[list[tuple[str, str, int, int]]] = [[] for _ in range(request.num_tokens // page_tokens)]
    for feature in features:
        start, length = feature.mm_position.offset, feature.mm_position.length
        last = min(len(pages) - 1, (start + max(length, 1) - 1) // page_tokens)
        for page in range(start // page_tokens, last + 1):
            pages[page].append((feature.modality, feature.identifier, start - page * page_tokens, length))
    return [hashlib.blake2b(json.dumps(media).encode(), digest_size=16).digest() if media else b"" for media in pages]


def weights_digest(config: VllmConfig) -> str:
    """Return a digest of the model's config, the quantisation of its cache, and its weights (the size, beginning and
    end of each file)."""
    model = config.model_config
    digest = hashlib.blake2b(digest_size=16)
    facts = {"config": model.hf_config.to_dict(), "quantization": model.quantization, "seed": None}
    if config.load_config.load_format == "dummy":
        facts["seed"] = model.seed
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    if (cache_dtype := config.cache_config.cache_dtype) not in PLAIN_DTYPES:
        digest.update(f"kept as {cache_dtype}".encode())
    add_weights(digest, model.model)
    return digest.hexdigest()


class LoraDigests:
    """Digests of LoRAs. Each is computed at its first use, which is when vLLM loads the LoRA. Used by one thread."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, str], str] = {}

    def of(self, lora: LoRARequest) -> str:
        """Return a LoRA's digest. The files are read again if vLLM loads the LoRA again, in place or under another id,
        so the digest then changes if they have changed.

        Raises:
            OSError: the LoRA's files cannot be read.
        """
        identity = lora.lora_int_id, lora.lora_path
        lora_digest = None if lora.load_inplace else self._digests.get(identity)
        if lora_digest is None:
            digest = hashlib.blake2b(digest_size=16)
            add_weights(digest, lora.lora_path)
            if len(self._digests) >= LORAS_MAX:
                self._digests.clear()
            lora_digest = self._digests[identity] = digest.hexdigest()
        return lora_digest


def adapter_of(request: Request, loras: LoraDigests, era: str = "") -> str:
    """Return the adapter part of the roots of a request's pages, which separates them from other pages of the tenant.

    It depends on the request's LoRA, its ``cache_salt``, and the engine's era, which is "" until the first reset. It is
    a digest, because users choose the salt: no salt, of any length, can equal another user's LoRA.

    Raises:
        OSError: the LoRA's files cannot be read.
    """
    lora, salt = request.lora_request, request.cache_salt
    if lora is None and not salt and not era:
        return ""
    facts = [[lora.lora_name, lora.lora_path, loras.of(lora)] if lora else [], salt or "", *([era] if era else [])]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


# --- Layouts ----------------------------------------------------------------------------------------------------------


def paged_model(config: VllmConfig, cache: KVCacheConfig, page_blocks: int) -> PagedModel:
    """Return the model that this engine serves.

    Args:
        page_blocks: blocks of a page. 0 stands for the number that makes ``PAGE_TOKENS_MIN`` tokens, at least one.

    Raises:
        ValueError: pages cannot hold this model's cache. The message says why.
    """
    layers_by_spec: dict[Any, list[tuple[str, int]]] = {}  # each layer with the table that lists its blocks
    for table, group in enumerate(cache.kv_cache_groups):
        spec = group.kv_cache_spec
        _check_spec(spec)
        layers_by_spec.setdefault(spec, []).extend((name, table) for name in group.layer_names)
    parallel = config.parallel_config
    if config.speculative_config is not None:
        raise _refusal("the layers of a draft model are not stored: leave out speculative_config")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise _refusal("context parallelism, which spreads a page over several workers, is not supported")
    workers = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if workers > SHARDS_MAX:
        raise _refusal(f"at most {SHARDS_MAX} workers can write one page (got {workers})")
    if len(layers_by_spec) > 1 and parallel.pipeline_parallel_size > 1:
        raise _refusal("pipeline stages are not supported for a model with several cache groups")
    block_tokens = lcm(*(spec.block_size for spec in layers_by_spec))
    page_tokens = block_tokens * (page_blocks or max(1, PAGE_TOKENS_MIN // block_tokens))
    is_single = len(layers_by_spec) == 1
    groups = tuple(_group(config, spec, page_tokens, layers, is_single) for spec, layers in layers_by_spec.items())
    reports_blocks = len(cache.kv_cache_groups) == 1 and groups[0].layout.attention == "full"
    return PagedModel(groups, page_tokens, reports_blocks, has_media_names(config))


def _check_spec(spec: Any) -> None:
    """Raise ValueError if pages cannot hold a cache of this kind."""
    kind = type(spec)
    if kind not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec):
        raise _refusal(f"the cache must be full attention or sliding windows (got {kind.__name__})")
    if kind is SlidingWindowSpec:
        if spec.extra_retained_tokens:
            raise _refusal("windows that keep more tokens than they attend to are not supported")
    elif spec.sliding_window or spec.attention_chunk_size:
        raise _refusal("windows need vLLM's hybrid cache manager, which is disabled")


def _group(
    config: VllmConfig, spec: Any, page_tokens: int, layers: list[tuple[str, int]], is_single: bool
) -> PagedGroup:
    """Return the group of these layers, each given with its table. ``is_single``: the model has no other group, so
    pipeline stages may share the pages."""
    model, parallel = config.model_config, config.parallel_config
    ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    is_mla = isinstance(spec, MLAAttentionSpec)
    heads = 1 if is_mla else model.get_total_num_kv_heads() if is_single or ranks > 1 else spec.num_kv_heads
    if not is_mla and max(1, heads // ranks) != spec.num_kv_heads:
        raise _refusal(f"a worker must have equal KV heads of all layers (got {spec.num_kv_heads} of {heads})")
    content: dict[str, Any] = {"mla_latent": spec.head_size} if is_mla else {"head_dim": spec.head_size}
    if isinstance(spec, SlidingWindowSpec):
        content |= {"attention": "window", "window": spec.sliding_window}
    layout = Layout(
        model=model.model,
        revision=getattr(model.hf_config, "_commit_hash", None) or model.revision or "",
        weights_digest=weights_digest(config),
        layers=model.get_total_num_hidden_layers() if is_single else len(layers),
        kv_heads=heads,
        dtype=str(spec.dtype).removeprefix("torch."),
        page_tokens=page_tokens,
        group="vllm",
        **content,
    )
    rank = parallel.rank % ranks if ranks > 1 else 0
    stage = parallel.rank // ranks if stages > 1 else 0
    layers = sorted(layers, key=lambda layer: [int(number) for number in re.findall(r"\d+", layer[0])])
    names, tables = zip(*layers, strict=True)
    block_tokens = spec.block_size
    shard = Shard(layout, rank, ranks, stage, stages)
    return PagedGroup(layout, names, tables, block_tokens, page_tokens // block_tokens, shard)


def _refusal(reason: str) -> ValueError:
    return ValueError(f"KVStoreConnector: {reason}")
