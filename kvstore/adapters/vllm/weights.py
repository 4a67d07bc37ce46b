"""Which weights a model and its LoRAs have, told apart without reading gigabytes."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from kvstore.adapters.weights import add_weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

LORAS_MAX = 4096  # whose digests are kept
PLAIN_DTYPES = ("auto", "float16", "bfloat16", "float32")  # of caches; what others store, their tensors do not tell


def weights_digest(config: VllmConfig) -> str:
    """A digest of the model's config, of how its cache is quantised, and of its weights: of a folder's files their
    sizes, fronts and ends."""
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
    """Of LoRAs, each taken when it is asked for first, as vLLM loads it then. Of one thread."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, str], str] = {}

    def of(self, lora: LoRARequest) -> str:
        """Another one where the files at the same path are others, and it is loaded anew: by another id, or in place.

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
