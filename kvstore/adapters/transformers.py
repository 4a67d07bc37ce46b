"""Hugging Face transformers: ``generate`` that loads the KV cache of a prompt's stored prefix, and stores the rest.

::

    from kvstore.adapters.transformers import prefix_cache

    cached = prefix_cache(model, kvstore.connect())
    output = cached.generate(**inputs, max_new_tokens=64)  # as model.generate

Pages hold what ``DynamicCache`` holds, so every model is served whose layers all keep the keys and values of all
tokens. Whether two processes run the same model is told by a digest of the weights and the config.
"""

from __future__ import annotations

import json
import logging
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import xxhash
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvstore.errors import InvalidRequest, LeaseBroken, Unavailable
from kvstore.model.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.match import Match
    from kvstore.client.store import Store

_log = logging.getLogger(__name__)

PROBE_TOKENS = 8
# Keys and values of the same tokens, computed in batches of another length: apart by rounding, or by attention to
# later tokens, which makes them as far apart as they are long.
APART_MAX = 0.05
# These turn a key by how long the prompt gets, so that the KV of its first tokens depends on those after them.
ROPE_BY_LENGTH = ("dynamic", "longrope")
# Of a config: what does not change any number that a model computes.
CONFIG_IGNORED = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
# What generate can be told that one growing cache cannot follow, and what it must be left at.
SETTINGS_LEFT = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic"),
    "prompt_lookup_num_tokens": (None,),
    "assistant_model": (None,),
    "past_key_values": (None,),
}


def prefix_cache(model: PreTrainedModel, store: Store, *, salt: str = "", page_tokens: int = 64) -> PromptCache:
    """Let ``model`` reuse the KV cache of prompts that ``store`` has. Runs the model on a few tokens, and reads all its
    weights once.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        salt: another salt never sees these pages.
        page_tokens: tokens of a page; only full pages are stored.

    Raises:
        InvalidRequest: "model", and why it is not served: layers with a sliding window, a state or no cache of their
            own, an encoder, quantised weights, adapters; or a number that makes no sense.
    """
    return PromptCache(model, store, salt, page_tokens)


class PromptCache:
    """A model and its pages in a store. Changes neither the model nor its config.

    Where the weights have been changed since (by a step of training, say), its pages are others.

    Attributes:
        layout: of the pages.
        last: how much of the last prompt was found; None: the store did not answer.
    """

    def __init__(self, model: PreTrainedModel, store: Store, salt: str = "", page_tokens: int = 64) -> None:
        _check_kind(model)
        self.last: Match | None = None
        self._model = model
        self._store = store
        self._salt = salt
        self._page_tokens = page_tokens
        self._refresh()

    def generate(self, input_ids: torch.Tensor, **settings: Any) -> Any:
        """``model.generate`` for one prompt, whose stored prefix is loaded; full pages of prompt and answer are stored.

        A store that does not answer, has no room, or has lost a page costs computation, and nothing else.

        Args:
            input_ids: ``[1, tokens]``, without padding.
            settings: as ``model.generate`` takes them.

        Raises:
            InvalidRequest: several prompts, padding, other inputs than text, beams, several answers, another cache, an
                assistant; or the model is in training mode.
        """
        self._check_prompt(input_ids, settings)
        if self._stamp != _stamp(self._model):
            self._refresh()
        past = DynamicCache(config=self._model.config)
        self.last = found = self._load(input_ids[0], past)
        output = self._model.generate(input_ids=input_ids, past_key_values=past, **settings)  # type: ignore[operator]
        sequence = output if isinstance(output, torch.Tensor) else output.sequences
        self._save(sequence[0, : past.get_seq_length()], past.layers, found.pages if found else 0)
        return output

    def _load(self, tokens: torch.Tensor, past: DynamicCache) -> Match | None:
        """Load what is stored of a prompt, but never its last token, into ``past``. None: the store does not answer."""
        try:
            found = self._cache.get(tokens)
        except Unavailable as error:
            _log.warning("the store does not answer, the whole prompt is computed: %s", error)
            return None
        if found:
            pages = torch.from_numpy(found.data).view(self._dtype).view(-1, *self.layout.shape)
            for layer, device in enumerate(self._devices):
                packed = pages[:, layer].to(device).transpose(0, 1).flatten(1, 2)[None]  # [1, heads, tokens, content]
                past.update(*packed.split(self._dims, dim=-1), layer)
        return found

    def _save(self, tokens: torch.Tensor, layers: Sequence[Any], pages_loaded: int) -> None:
        """Store the full pages of ``tokens``, which ``layers`` hold, but for those that are stored."""
        if len(tokens) // self._page_tokens <= pages_loaded:
            return
        try:
            with self._cache.writer(tokens) as writer:
                for page in writer.pages_new:
                    part = slice(page * self._page_tokens, (page + 1) * self._page_tokens)
                    both = [(layer.keys[0, :, part], layer.values[0, :, part]) for layer in layers]
                    writer.write_page(page, torch.stack([torch.cat(pair, dim=-1).cpu() for pair in both]))
        except (Unavailable, LeaseBroken) as error:
            _log.warning("new pages are not stored: %s", error)

    def _check_prompt(self, input_ids: Any, settings: dict[str, Any]) -> None:
        """Raises InvalidRequest where ``generate`` is asked for what is not served."""
        if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or not input_ids.shape[1]:
            raise InvalidRequest("input_ids", "must be a tensor of shape [1, tokens]")
        if len(input_ids) != 1:
            reason = (
                f"are {len(input_ids)} prompts; one at a time is served, the others find what the first have stored"
            )
            raise InvalidRequest("input_ids", reason)
        for name, value in settings.items():
            if isinstance(value, torch.Tensor) and name != "attention_mask":
                raise InvalidRequest(name, "is not served: pages are of token ids alone")
        config = settings.get("generation_config") or self._model.generation_config
        for name, allowed in SETTINGS_LEFT.items():
            if (value := settings.get(name, getattr(config, name, None))) not in allowed:
                raise InvalidRequest(name, f"{value!r} is not served: one cache that grows is loaded and stored")
        mask, padding = settings.get("attention_mask"), getattr(config, "pad_token_id", None)
        if mask is not None and not bool((mask == 1).all()):
            raise InvalidRequest("attention_mask", "hides tokens; a prompt without padding is served")
        if mask is None and padding is not None and bool((input_ids == padding).any()):
            raise InvalidRequest("attention_mask", "must be given for a prompt with the padding token in it")

    def _refresh(self) -> None:
        """Look at the model: the shape of its cache, and which model it is."""
        stamp = _stamp(self._model)
        layers = _probe(self._model)
        first = layers[0]
        assert first.keys is not None and first.values is not None
        heads, dims = first.keys.shape[1], (first.keys.shape[3], first.values.shape[3])
        self._dims, self._dtype = dims, first.keys.dtype
        self._devices = [layer.keys.device for layer in layers if layer.keys is not None]
        config = self._model.config
        is_mla = dims[0] != dims[1]
        self.layout = Layout(
            model=Path(config._name_or_path).name or config.model_type,
            weights_digest=_digest(self._model),
            dtype=str(self._dtype).removeprefix("torch."),
            layers=len(layers),
            kv_heads=heads,
            head_dim=0 if is_mla else dims[0],
            mla_latent=dims[0] if is_mla else 0,
            mla_rope=dims[1] if is_mla else 0,
            page_tokens=self._page_tokens,
            group="transformers",
        )
        self._cache = self._store.cache(self.layout, salt=self._salt)
        self._stamp = stamp


# --- Which models -----------------------------------------------------------------------------------------------------


def _check_kind(model: Any) -> None:
    """Raises InvalidRequest where the config says that the KV cache of a prefix is not all, or not always the same."""
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise InvalidRequest("model", f"{type(model).__name__} is no model of transformers that generates text")
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        _refuse(model, "has an encoder, whose output is no part of the pages")
    if getattr(config, "quantization_config", None):
        _refuse(model, "has quantised weights")
    if getattr(model, "_hf_peft_config_loaded", False):
        _refuse(model, "has adapters that can be switched; merge them into the weights")
    parameters = getattr(config, "rope_parameters", None) or {}
    for terms in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if (kind := terms.get("rope_type")) in ROPE_BY_LENGTH:
            _refuse(model, f"turns keys by how long the prompt gets (rope_type {kind!r})")
    for number, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is not DynamicLayer:
            _refuse(model, f"layer {number} does not keep the keys and values of all tokens ({layer!r})")


def _probe(model: PreTrainedModel) -> list[DynamicLayer]:
    """The cache after a few tokens.

    Raises:
        InvalidRequest: it is not one of keys and values alike in all layers, which depend on the tokens before alone.
    """
    if model.training:
        _refuse(model, "is in training mode: call model.eval()")
    if any(tensor.is_meta for tensor in _tensors(model)):
        _refuse(model, "has weights that are not in memory")
    embedding: Any = model.get_input_embeddings()
    tokens = (torch.arange(2 * PROBE_TOKENS, device=embedding.weight.device) * 7 % embedding.num_embeddings)[None]
    past, longer = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tokens[:, :PROBE_TOKENS], past_key_values=past, use_cache=True)
        model(input_ids=tokens, past_key_values=longer, use_cache=True)
    layers: list[DynamicLayer] = []
    for number, (layer, other) in enumerate(zip(past.layers, longer.layers, strict=True)):
        if type(layer) is not DynamicLayer or type(other) is not DynamicLayer or layer.keys is None:
            _refuse(model, f"layer {number} has no keys and values of its own")
        assert layer.values is not None and other.keys is not None and other.values is not None
        if layer.keys.ndim != 4 or layer.keys.shape[:3] != layer.values.shape[:3] or layer.keys.shape[0] != 1:
            _refuse(model, f"layer {number} caches {tuple(layer.keys.shape)} and {tuple(layer.values.shape)}")
        for ours, theirs in ((layer.keys, other.keys), (layer.values, other.values)):
            apart = (theirs[:, :, :PROBE_TOKENS].float() - ours.float()).norm() / ours.float().norm()
            if not float(apart) <= APART_MAX:
                _refuse(model, f"layer {number} caches other keys and values where more tokens follow")
        layers.append(layer)
    kinds = {(layer.keys.shape, layer.values.shape, layer.keys.dtype, layer.values.dtype) for layer in layers}  # type: ignore[union-attr]
    if len(kinds) != 1:
        _refuse(model, "has layers whose keys and values differ in shape or type")
    keys, values, *_ = kinds.pop()
    if keys != values and keys[1] != 1:
        _refuse(model, f"has keys of {keys[3]} elements and values of {values[3]} in {keys[1]} heads")
    return layers


def _refuse(model: PreTrainedModel, reason: str) -> NoReturn:
    raise InvalidRequest("model", f"{type(model).__name__} {reason}")


# --- Which model it is ------------------------------------------------------------------------------------------------


def _tensors(model: PreTrainedModel) -> list[torch.Tensor]:
    """All that it computes with."""
    return [*model.parameters(), *model.buffers()]


def _stamp(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Another one where the weights may be others: torch counts what is written into a tensor."""
    return [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in _tensors(model)]


def _digest(model: PreTrainedModel) -> str:
    """Over names, types, shapes and bytes of all weights, and over the config."""
    terms = {name: value for name, value in model.config.to_diff_dict().items() if name not in CONFIG_IGNORED}
    digest = xxhash.xxh3_128(json.dumps([type(model).__name__, terms], sort_keys=True, default=str).encode())
    for name, tensor in sorted(chain(model.named_parameters(), model.named_buffers())):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
