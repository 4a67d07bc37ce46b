"""The connector's planner with vLLM's own requests, in vLLM's environment: what is found is printed, as a line of JSON.

``found``: tokens, by what was asked after one prompt with an image was stored.
``kinds``, ``loras``, ``kept`` and ``told``: see there.
"""

from __future__ import annotations

import gc
import json
import tempfile
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, SchedulerOutput
from vllm.v1.request import Request

import kvstore
from kvstore.adapters.vllm import kv_events
from kvstore.adapters.vllm.blocks import PagedGroup, PagedModel, RootCaches
from kvstore.adapters.vllm.kv_events import StoredBlocks
from kvstore.adapters.vllm.layouts import weights_digest
from kvstore.adapters.vllm.scheduler import Planner
from kvstore.model.shard import Shard

LAYOUT = kvstore.Layout(model="m", layers=2, kv_heads=1, head_dim=8, dtype="float32", page_tokens=64, group="vllm")
TOKENS = list(range(3, 303))


def paged(has_media_names: bool = True) -> PagedModel:
    """One group of full attention."""
    group = PagedGroup(LAYOUT, ("0", "1"), (0, 0), 32, 2, Shard(LAYOUT, 0, 1, 0, 1))
    return PagedModel((group,), 64, True, has_media_names)


def request(name: str, image: str = "", at: int = 80, how: dict[str, Any] | None = None, **more: Any) -> Request:
    """300 tokens, of which 30 may be an image's. ``how``: it is sampled."""
    place = PlaceholderRange(offset=at, length=30)
    features = [MultiModalFeatureSpec(data=None, modality="image", identifier=image, mm_position=place)]
    sampling = SamplingParams(max_tokens=100, **(how or {}))
    return Request(name, TOKENS, sampling, None, mm_features=features if image else None, **more)


def output(requests: list[Request], tokens: int) -> SchedulerOutput:
    """A step in which each of these has so many tokens computed."""
    made = SchedulerOutput.make_empty()
    names = [each.request_id for each in requests]
    computed = [each.num_computed_tokens for each in requests]
    nobody: list[Any] = [None] * len(names)
    made.scheduled_cached_reqs = CachedRequestData(names, set(), [], {}, nobody, computed, [1] * len(names))
    made.num_scheduled_tokens = dict.fromkeys(names, tokens)
    made.kv_connector_block_state = KVConnectorBlockState(set(names), lambda _: (list(range(1, 20)),), {})
    return made


def found(store: kvstore.Store) -> dict[str, int | None]:
    """Tokens, by what was asked."""
    planner = Planner(store, paged(), "", can_load=True, can_save=True, boundary_tokens=1024)
    first = request("first", "cat")
    before = planner.match(first, 0)
    (move,) = planner.step(output([first], 300)).saves
    caches = RootCaches(store, [LAYOUT], "")
    for keys in move.groups[0].parts:
        caches.of(move.adapter).groups[0].put(keys, np.zeros((len(keys), LAYOUT.page_bytes), np.uint8))
    asked = {
        "the same": request("a", "cat"),
        "another image": request("b", "dog"),
        "another place": request("c", "cat", 81),
        "no image": request("d"),
        "two pages": request("e", "cat", 120),
        "prompt logits": request("h", "cat", how={"prompt_logprobs": 1}),
        "without caches": request("i", "cat", how={"skip_reading_prefix_cache": True}),
        "embeddings": request("f", prompt_embeds=torch.zeros(300, 4), prompt_is_token_ids=[False] * 300),
    }
    answers = {what: planner.match(each, 0) for what, each in asked.items()}
    nameless = Planner(store, paged(False), "", can_load=True, can_save=True, boundary_tokens=1024)
    return {"before": before, **answers, "nameless": nameless.match(request("g", "cat"), 0)}


def loras(store: kvstore.Store, folder: Path) -> dict[str, str]:
    """Roots of requests with a LoRA whose files change."""
    planner = Planner(store, paged(), "", can_load=True, can_save=True, boundary_tokens=1024)
    file, told = folder / "adapter_model.safetensors", {}

    def root(what: str, number: int, **more: Any) -> None:
        asked = request(what, lora_request=LoRARequest("one", number, str(folder), **more))
        planner.match(asked, 0)
        (move,) = planner.step(output([asked], 300)).saves
        told[what] = move.adapter

    file.write_bytes(b"first")
    root("first", 1)
    file.write_bytes(b"other")
    root("still loaded", 1)
    root("loaded by another id", 2)
    root("loaded in place", 1, load_inplace=True)
    return told


def kept(store: kvstore.Store) -> list[int]:
    """Requests of 1000 that the planner keeps when they are finished, and after a reset."""
    planner, counts = Planner(store, paged(), "kept", can_load=True, can_save=True, boundary_tokens=1024), []
    for ended in (planner.forget, lambda _: planner.reset()):
        requests = [request(str(number)) for number in range(1000)]
        refs = [weakref.ref(each) for each in requests]
        for each in requests:
            planner.match(each, 0)
        planner.step(output(requests, 300))
        names = requests[:]
        del requests, each
        for one in names:
            ended(one)
        del names, one
        gc.collect()
        counts.append(sum(ref() is not None for ref in refs))
    return counts


def told(store: kvstore.Store) -> dict[str, list[int]]:
    """Blocks that KV events tell of: stored and removed, after each thing that happened to a prompt of four pages."""
    stored = StoredBlocks.for_model(paged())
    planner = Planner(store, paged(), "told", can_load=True, can_save=True, boundary_tokens=1024, stored_blocks=stored)
    asked = request("first", block_hasher=get_request_block_hasher(32, sha256))
    caches, found = RootCaches(store, [LAYOUT], "told"), {}

    def tell(what: str) -> None:
        counts = Counter[str]()
        for _ in range(2 * kv_events.CHECKS_MAX):
            for event in planner.take_events():
                counts[type(event).__name__] += len(event.block_hashes)
        found[what] = [counts["BlockStored"], counts["BlockRemoved"]]

    planner.match(asked, 0)
    (move,) = planner.step(output([asked], 300)).saves
    tell("not there")
    for keys in move.groups[0].parts:
        caches.of("").groups[0].put(keys, np.zeros((len(keys), LAYOUT.page_bytes), np.uint8))
    planner.match(asked, 0)
    tell("there")
    planner.match(asked, 0)
    tell("found again")
    store.evict(2)
    tell("two have gone")
    most, kv_events.REPORTED_MAX = kv_events.REPORTED_MAX, 1
    tell("too many")
    planner.match(asked, 0)
    tell("too many again")
    kv_events.REPORTED_MAX = most
    planner.reset()
    tell("reset")
    assert stored is not None and not len(stored) and not stored._hashes
    return found


def kinds() -> list[str]:
    """How the cache may be quantised, without those that have the same pages as one before."""
    told: dict[str, str] = {}
    model = SimpleNamespace(model="m", hf_config=SimpleNamespace(to_dict=dict), quantization=None, seed=0)
    for kind in ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"):
        kept = {"model_config": model, "cache_config": SimpleNamespace(cache_dtype=kind)}
        config: Any = SimpleNamespace(**kept, load_config=SimpleNamespace(load_format="auto"))
        told.setdefault(weights_digest(config), kind)
    return list(told.values())


def main() -> None:
    """All of it."""
    init_none_hash(sha256)
    with (
        kvstore.open(dram="16MiB") as store,
        kvstore.open(dram="16MiB") as other,
        tempfile.TemporaryDirectory() as folder,
    ):
        roots = loras(store, Path(folder))
        print(
            json.dumps(
                {
                    "found": found(store),
                    "kinds": kinds(),
                    "loras": roots,
                    "kept": kept(store),
                    "told": told(other),
                }
            )
        )


if __name__ == "__main__":
    main()
