"""Describes the model that an engine serves in the store's terms: the layouts of its pages, and a worker's shard of
them.

vLLM's cache is one tensor per layer, ``[blocks, kv_heads, block_size, content]`` with K and V packed in content
(MLA: one head, latent and rope). Layers that keep the same tokens (all, or those of a window) are a group. A page holds
``page_blocks`` consecutive blocks of a sequence for all layers of a group. vLLM may split a group into several, each
with its own table of blocks; pages do not depend on that.

Makes images and other media of a prompt part of the keys of their pages.

Identifies the weights of a model and its LoRAs without reading gigabytes.
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


def media_have_names(config: VllmConfig) -> bool:
    """Return whether vLLM gives the same media the same name in every engine. Without its caches it numbers media per
    request, and media of two requests may have the same name."""
    about = config.model_config.multimodal_config
    return bool(config.cache_config.enable_prefix_caching) or about is None or about.mm_processor_cache_gb > 0


def media_of(request: Request, page_tokens: int) -> list[bytes] | None:
    """Return for each full page a digest of its media, by their names and positions (``b""`` if none); None if there
    are no media."""
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


LORAS_MAX = 4096  # LoRAs whose digests are kept
PLAIN_DTYPES = ("auto", "float16", "bfloat16", "float32")  # cache dtypes whose tensors fully describe their contents


def weights_digest(config: VllmConfig) -> str:
    """Return a digest of the model's config, the quantisation of its cache, and its weights (the sizes, beginnings and
    ends of the folder's files)."""
    model = config.model_config
    digest = hashlib.blake2b(digest_size=16)
    about = {"config": model.hf_config.to_dict(), "quantization": model.quantization, "seed": None}
    if config.load_config.load_format == "dummy":
        about["seed"] = model.seed
    digest.update(json.dumps(about, sort_keys=True, default=str).encode())
    if (kept := config.cache_config.cache_dtype) not in PLAIN_DTYPES:
        digest.update(f"kept as {kept}".encode())
    add_weights(digest, model.model)
    return digest.hexdigest()


class LoraDigests:
    """Digests of LoRAs, each computed at first use, which is when vLLM loads the LoRA. Used by one thread."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, str], str] = {}

    def of(self, lora: LoRARequest) -> str:
        """Return a LoRA's digest. It changes if the files at the path have changed and vLLM loads the LoRA again, under
        another id or in place.

        Raises:
            OSError: its files cannot be read.
        """
        known = lora.lora_int_id, lora.lora_path
        found = None if lora.load_inplace else self._digests.get(known)
        if found is None:
            digest = hashlib.blake2b(digest_size=16)
            add_weights(digest, lora.lora_path)
            if len(self._digests) >= LORAS_MAX:
                self._digests.clear()
            found = self._digests[known] = digest.hexdigest()
        return found


PAGE_TOKENS_MIN = 64  # minimum tokens of a page if the number of blocks is not set


def adapter_of(request: Request, loras: LoraDigests, era: str = "") -> str:
    """Return what separates this request's pages from others of its tenant: its LoRA, its ``cache_salt``, and the
    engine's era, which is "" until a reset.

    It is a digest, because users choose the salt: no salt, of any length, can equal another user's LoRA.

    Raises:
        OSError: the LoRA's files cannot be read.
    """
    lora, salt = request.lora_request, request.cache_salt
    if lora is None and not salt and not era:
        return ""
    told = [[lora.lora_name, lora.lora_path, loras.of(lora)] if lora else [], salt or "", *([era] if era else [])]
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest()


def served(config: VllmConfig, cache: KVCacheConfig, page_blocks: int) -> PagedModel:
    """Return the model that this engine serves.

    Args:
        page_blocks: blocks of a page; 0 for as many as make 64 tokens, at least one.

    Raises:
        ValueError: pages cannot hold this model's cache; says why.
    """
    kinds: dict[Any, list[tuple[str, int]]] = {}  # spec -> its layers, and the tables of their blocks
    for table, group in enumerate(cache.kv_cache_groups):
        spec = group.kv_cache_spec
        _check_spec(spec)
        kinds.setdefault(spec, []).extend((name, table) for name in group.layer_names)
    parallel = config.parallel_config
    if config.speculative_config is not None:
        raise _refused("the layers of a draft model are not stored: leave out speculative_config")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise _refused("context parallelism, which spreads a page over several workers, is not supported")
    workers = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if workers > SHARDS_MAX:
        raise _refused(f"at most {SHARDS_MAX} workers can write one page (got {workers})")
    if len(kinds) > 1 and parallel.pipeline_parallel_size > 1:
        raise _refused("pipeline stages are not supported for a model with several cache groups")
    block = lcm(*(spec.block_size for spec in kinds))
    page_tokens = block * (page_blocks or max(1, PAGE_TOKENS_MIN // block))
    groups = tuple(_group(config, spec, page_tokens, named, len(kinds) == 1) for spec, named in kinds.items())
    by_blocks = len(cache.kv_cache_groups) == 1 and groups[0].layout.attention == "full"
    return PagedModel(groups, page_tokens, by_blocks, media_have_names(config))


def _check_spec(spec: Any) -> None:
    """Raise ValueError if pages cannot hold such a cache."""
    kind = type(spec)
    if kind not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec):
        raise _refused(f"the cache must be full attention or sliding windows (got {kind.__name__})")
    if kind is SlidingWindowSpec:
        if spec.extra_retained_tokens:
            raise _refused("windows that keep more tokens than they attend to are not supported")
    elif spec.sliding_window or spec.attention_chunk_size:
        raise _refused("windows need vLLM's hybrid cache manager, which is disabled")


def _group(config: VllmConfig, spec: Any, page_tokens: int, named: list[tuple[str, int]], alone: bool) -> PagedGroup:
    """Return the group of these layers. ``alone``: there is no other group, so pipeline stages may share it."""
    model, parallel = config.model_config, config.parallel_config
    ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    mla = isinstance(spec, MLAAttentionSpec)
    heads = 1 if mla else model.get_total_num_kv_heads() if alone or ranks > 1 else spec.num_kv_heads
    if not mla and max(1, heads // ranks) != spec.num_kv_heads:
        raise _refused(f"a worker must have equal KV heads of all layers (got {spec.num_kv_heads} of {heads})")
    content: dict[str, Any] = {"mla_latent": spec.head_size} if mla else {"head_dim": spec.head_size}
    if isinstance(spec, SlidingWindowSpec):
        content |= {"attention": "window", "window": spec.sliding_window}
    layout = Layout(
        model=model.model,
        revision=getattr(model.hf_config, "_commit_hash", None) or model.revision or "",
        weights_digest=weights_digest(config),
        layers=model.get_total_num_hidden_layers() if alone else len(named),
        kv_heads=heads,
        dtype=str(spec.dtype).removeprefix("torch."),
        page_tokens=page_tokens,
        group="vllm",
        **content,
    )
    rank = parallel.rank % ranks if ranks > 1 else 0
    stage = parallel.rank // ranks if stages > 1 else 0
    named = sorted(named, key=lambda each: [int(number) for number in re.findall(r"\d+", each[0])])
    names, tables = zip(*named, strict=True)
    block = spec.block_size
    return PagedGroup(layout, names, tables, block, page_tokens // block, Shard(layout, rank, ranks, stage, stages))


def _refused(reason: str) -> ValueError:
    return ValueError(f"KVStoreConnector: {reason}")
