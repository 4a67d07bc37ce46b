"""Which model an engine serves, in the store's words: the layout of its pages, and which shard of them a worker has.

vLLM's cache is one tensor per layer, ``[blocks, kv_heads, block_size, content]`` with K and V packed in content
(MLA: one head, latent and rope). A page is the same for ``page_blocks`` consecutive blocks of a sequence and all
layers.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvstore.model.layout import Layout
from kvstore.model.shard import Shard

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvstore.client.prefix_cache import PrefixCache
    from kvstore.client.store import Store

ROOTS_MAX = 1024  # of salts and adapters, whose caches are kept ready
PAGE_TOKENS_MIN = 64  # what a page has at least, where nobody says how many blocks it has
# Of a model's folder: what tells its weights apart without reading gigabytes.
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")
SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True)
class PagedModel:
    """What one engine serves.

    Attributes:
        layers: names of the layers whose cache this process has, as the model runs them.
        shard: the part of a page that this process has.
        block_size: tokens of a block. ``page_blocks``: blocks of a page.
    """

    layout: Layout
    layers: tuple[str, ...]
    block_size: int
    page_blocks: int
    shard: Shard


class RootCaches:
    """The caches of one tenant, by the adapter part of their roots. Of one thread."""

    def __init__(self, store: Store, layout: Layout, salt: str) -> None:
        self._store = store
        self._layout = layout
        self._salt = salt
        self._caches: dict[str, PrefixCache] = {}

    def of(self, adapter: str) -> PrefixCache:
        """Made when it is asked for first."""
        found = self._caches.get(adapter)
        if found is None:
            if len(self._caches) >= ROOTS_MAX:
                self._caches.clear()
            found = self._caches[adapter] = self._store.cache(self._layout, self._salt, adapter)
        return found


def adapter_of(request: Request) -> str:
    """What keeps this request's pages apart from others of its tenant: its LoRA and its ``cache_salt``.

    A digest, as users choose the salt: none looks like another's LoRA, however long it is.
    """
    lora, salt = request.lora_request, request.cache_salt
    if lora is None and not salt:
        return ""
    told = [[lora.lora_name, lora.lora_path] if lora else [], salt or ""]
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest()


def served(config: VllmConfig, cache: KVCacheConfig, page_blocks: int) -> PagedModel:
    """What this engine serves.

    Args:
        page_blocks: 0: as many as make a page of 64 tokens, at least one.

    Raises:
        ValueError: pages cannot hold what this model keeps; says what.
    """
    groups = cache.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        raise _refused(f"the model has {len(groups)} cache groups ({kinds}), one of full attention is served")
    (group,) = groups
    spec, parallel = group.kv_cache_spec, config.parallel_config
    if not isinstance(spec, FullAttentionSpec) or spec.sliding_window or spec.attention_chunk_size:
        raise _refused(f"its cache is {type(spec).__name__}, full attention over all tokens is served")
    if config.speculative_config is not None:
        raise _refused("the layers of a draft model are not stored: leave out speculative_config")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise _refused("context parallelism spreads one page over several workers")
    ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    mla = isinstance(spec, MLAAttentionSpec)
    block = spec.block_size
    page_blocks = page_blocks or max(1, PAGE_TOKENS_MIN // block)
    model = config.model_config
    heads = 1 if mla else model.get_total_num_kv_heads()
    content: dict[str, Any] = {"mla_latent": spec.head_size} if mla else {"head_dim": spec.head_size}
    layout = Layout(
        model=model.model,
        revision=getattr(model.hf_config, "_commit_hash", None) or model.revision or "",
        weights_digest=_weights(config),
        layers=model.get_total_num_hidden_layers(),
        kv_heads=heads,
        dtype=str(spec.dtype).removeprefix("torch."),
        page_tokens=block * page_blocks,
        group="vllm",
        **content,
    )
    rank = parallel.rank % ranks if ranks > 1 else 0
    stage = parallel.rank // ranks if stages > 1 else 0
    names = sorted(group.layer_names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    return PagedModel(layout, tuple(names), block, page_blocks, Shard(layout, rank, ranks, stage, stages))


def _weights(config: VllmConfig) -> str:
    """A digest of the model's config and of its weights: of a folder's files their sizes, fronts and ends."""
    model = config.model_config
    digest = hashlib.blake2b(digest_size=16)
    about = {"config": model.hf_config.to_dict(), "quantization": model.quantization, "seed": None}
    if config.load_config.load_format == "dummy":
        about["seed"] = model.seed
    digest.update(json.dumps(about, sort_keys=True, default=str).encode())
    folder = Path(model.model)
    for pattern in WEIGHT_FILES if folder.is_dir() else ():
        for path in sorted(folder.glob(pattern)):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(SAMPLE_BYTES))
                file.seek(max(0, size - SAMPLE_BYTES))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _refused(reason: str) -> ValueError:
    return ValueError(f"KVStoreConnector: {reason}")
