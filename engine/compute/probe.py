"""Probe: finds out what a model does with its KV by running it on one token, not by reading its config.

Engines serve models that hand keys and values of every layer to ``Cache.update`` and attend through transformers'
attention interface, with forward arguments passed on to it. Any other model is refused by name: by config and class,
before weights are read (`refuse_kind`), or by what a run shows (`probe`).

The run is packed, as in engines: the same few tokens twice in one row, told apart only by position ids, with attention
by the plain formula. Both must give the logits that the model gives unpacked, else it attends in some other way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicLayer

from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ATTENTION = "kvstore_probe"
LAYER_TYPES = ("full_attention", "sliding_attention")
# A rotation that depends on the prompt's length makes keys that a longer or shorter prompt cannot use.
ROPE_BY_LENGTH = ("dynamic", "longrope")
TOKENS = 12
# How far logits of the packed run may be from the model's own, relative to those, in float32 and in shorter types.
APART_MAX, APART_SHORT_MAX = 0.01, 0.3
MEDIA = ("vision", "image", "audio", "video", "speech")


class CacheGroup(NamedTuple):
    """Layers of a model whose KV is kept in the same way. ``window``: tokens that they see, 0 if they see
    everything.
    """

    layers: tuple[int, ...]
    window: int


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """KV of one model: per layer and token ``kv_heads`` keys of ``k_dim`` and values of ``v_dim`` elements.

    With ``is_mla`` those are the latent (k) and the rotated key (v) of the one head, as the cache receives them; the
    model makes keys and values of all its heads from them afterwards.

    Attributes:
        windows: per layer, how many tokens one sees, itself included; 0: all.
        vocab_size: logits per token.
    """

    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    is_mla: bool
    windows: tuple[int, ...]
    vocab_size: int

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Layers whose KV is kept in the same way, those with the longest view first: layers that see everything, and
        layers with a window, before which KV can be dropped. The largest window stands for all."""
        everything = tuple(layer for layer, window in enumerate(self.windows) if not window or self.is_mla)
        windowed = tuple(layer for layer in range(self.layers) if layer not in everything)
        found = CacheGroup(everything, 0), CacheGroup(windowed, max(self.windows))
        return tuple(group for group in found if group.layers)


def refuse_kind(config: PreTrainedConfig) -> None:
    """Refuse a model if its config or its class shows that it is not handled.

    Raises:
        InvalidRequest: "model", with the kind and the feature that is not handled.
    """
    kind = config.model_type
    if config.is_encoder_decoder:
        _refuse(kind, "has an encoder and a decoder; only decoders are served")
    for media in MEDIA:
        if any(name.startswith(media) and value is not None for name, value in _sub_configs(config).items()):
            _refuse(kind, f"takes {media} as input; only text is served")
    quantized = getattr(config, "quantization_config", None)
    if quantized:
        how = quantized.get("quant_method", "?") if isinstance(quantized, dict) else type(quantized).__name__
        _refuse(kind, f"has quantised weights ({how})")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        _refuse(kind, "is not a causal language model of transformers")
    net_class = AutoModelForCausalLM._model_mapping[type(config)]
    if getattr(net_class, "_is_stateful", False):
        _refuse(kind, "keeps recurrent state in addition to keys and values")
    types = getattr(config, "layer_types", None) or ()
    for layer, layer_type in enumerate(types):
        if layer_type not in LAYER_TYPES:
            _refuse(kind, f"layer {layer} is {layer_type!r}; handled are {' and '.join(LAYER_TYPES)}")
    if shared := getattr(config, "num_kv_shared_layers", 0):
        _refuse(kind, f"{shared} of its layers share the KV of another (num_kv_shared_layers)")
    if getattr(config, "attention_chunk_size", None):
        _refuse(kind, "attends in chunks (attention_chunk_size)")
    if getattr(config, "use_bidirectional_attention", None) or getattr(config, "is_causal", True) is False:
        _refuse(kind, "attends to later tokens as well")
    if rope := sorted(_rope_types(config) & {*ROPE_BY_LENGTH}):
        _refuse(kind, f"rotates keys by how long the prompt gets (rope_type {rope[0]!r}): its pages cannot be reused")
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        _refuse(kind, "does not say num_hidden_layers")


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """The rope types of all layers, or of each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    per_type = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(terms.get("rope_type", "default")) for terms in (parameters, *per_type)}


def _sub_configs(config: PreTrainedConfig) -> dict[str, object]:
    """Configs inside this one, by the name of their field; "text" and the like are among them."""
    return {
        name: value
        for name, value in vars(config).items()
        if name.endswith("_config") and (isinstance(value, dict) or hasattr(value, "model_type"))
    }


def probe(net: PreTrainedModel) -> Geometry:
    """Run ``net`` on a few tokens and find its geometry. Its attention implementation is the same afterwards as before.

    Raises:
        InvalidRequest: "model", with the layer and the feature that is not handled.
    """
    kind, before = net.config.model_type, net.config._attn_implementation
    seen = _Seen(kind, net.config.num_hidden_layers)
    positions = torch.arange(TOKENS, device=net.device)[None]
    tokens = positions * 7 % net.config.vocab_size
    AttentionInterface.register(ATTENTION, _attend)
    try:
        with torch.inference_mode():
            own = net(input_ids=tokens, position_ids=positions, use_cache=False).logits.float()
            net.set_attn_implementation(ATTENTION)
            packed = net(
                input_ids=tokens.repeat(1, 2),
                position_ids=positions.repeat(1, 2),
                past_key_values=_Cache(seen),
                use_cache=True,
                seen=seen,
            ).logits.float()
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, InvalidRequest):
            raise
        _refuse(kind, f"does not run on a cache of keys and values: {type(error).__name__}: {one_line(error)}")
    finally:
        net.set_attn_implementation(before)
    for layer in range(seen.layers):
        if layer not in seen.updates:
            _refuse(kind, f"layer {layer} hands no keys and values to the cache")
        if layer not in seen.calls:
            _refuse(kind, f"layer {layer} does not attend through the attention interface of transformers")
    geometry = _geometry(net.config, seen, int(own.shape[-1]))
    if not torch.isfinite(own).all():
        _refuse(kind, "gives logits that are not finite")
    apart = float((packed - own.repeat(1, 2, 1)).norm() / own.repeat(1, 2, 1).norm())
    if not apart <= (APART_MAX if net.dtype == torch.float32 else APART_SHORT_MAX):
        _refuse(kind, f"attends in a way that is not handled: logits are {apart:.2g} of their size from its own")
    return geometry


@dataclass(frozen=True)
class _Update:
    """Shapes ``[batch, heads, tokens, dim]`` of what one layer cached."""

    k: tuple[int, ...]
    v: tuple[int, ...]


@dataclass(frozen=True)
class _Call:
    """The tensors that one layer attended to, and the window that it passed."""

    k: tuple[int, ...]
    v: tuple[int, ...]
    window: int


@dataclass
class _Seen:
    """Record of one run."""

    kind: str
    layers: int
    updates: dict[int, _Update] = field(default_factory=dict)
    calls: dict[int, _Call] = field(default_factory=dict)


class _Cache(Cache):
    """Records what each layer caches; refuses anything but the keys and values of one layer."""

    def __init__(self, seen: _Seen) -> None:
        super().__init__(layers=[DynamicLayer() for _ in range(seen.layers)])
        self._seen = seen

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind, seen = self._seen.kind, self._seen.updates
        if layer_idx >= self._seen.layers:
            _refuse(kind, f"layer {layer_idx} caches keys and values, and there are only {self._seen.layers} layers")
        if layer_idx in seen:
            _refuse(kind, f"layer {layer_idx} caches keys and values more than once")
        seen[layer_idx] = _Update(tuple(key_states.shape), tuple(value_states.shape))
        return key_states, value_states

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self._seen.kind, f"layer {layer_idx} keeps the state of a convolution")

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> NoReturn:
        _refuse(self._seen.kind, f"layer {layer_idx} keeps recurrent state")

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> NoReturn:
        _refuse(self._seen.kind, f"layer {layer_idx} caches keys of an indexer (sparse attention)")


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    seen: _Seen | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function that records its calls. Shapes ``[1, heads, 2 * TOKENS, dim]``."""
    layer = getattr(module, "layer_idx", None)
    if seen is None or layer is None:
        name = type(module).__name__
        _refuse(name, "does not pass forward arguments, or its layer's number, on to the attention function")
    if layer in seen.calls:
        _refuse(seen.kind, f"layer {layer} attends more than once per token")
    if layer not in seen.updates:
        _refuse(seen.kind, f"layer {layer} attends to keys and values that it does not cache (shared with another?)")
    if attention_mask is not None:
        _refuse(seen.kind, f"layer {layer} attends by a mask of its own")
    if getattr(module, "is_causal", True) is False:
        _refuse(seen.kind, f"layer {layer} attends to later tokens as well")
    seen.calls[layer] = _Call(tuple(key.shape), tuple(value.shape), int(sliding_window or 0))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1).float(), value.repeat_interleave(groups, dim=1).float()
    scores = query.float() @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    place = torch.arange(2 * TOKENS, device=query.device)
    ago = place[:, None] - place
    visible = (ago >= 0) & (place[:, None] // TOKENS == place // TOKENS) & (ago < (sliding_window or 2 * TOKENS))
    scores = scores.masked_fill(~visible, -torch.inf)
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.float().view(1, -1, 1, 1).expand(1, -1, 2 * TOKENS, 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : 2 * TOKENS]
    return (weights @ value).to(query.dtype).transpose(1, 2).contiguous(), None


def _geometry(config: PreTrainedConfig, seen: _Seen, vocab_size: int) -> Geometry:
    """The geometry, which all layers must share."""
    kind, first = seen.kind, seen.updates[0]
    for layer in range(seen.layers):
        update, call = seen.updates[layer], seen.calls[layer]
        if len(update.k) != 4 or len(update.v) != 4 or update.k[:3] != update.v[:3] or update.k[2] != 2 * TOKENS:
            _refuse(kind, f"layer {layer} caches tensors of shapes {list(update.k)} and {list(update.v)}")
        if update != first:
            ours, others = (f"{u.k[1]} heads of {u.k[3]} and {u.v[3]}" for u in (update, first))
            _refuse(kind, f"layer {layer} caches {ours} elements, layer 0 {others}; all must be equal")
        expanded = (call.k, call.v) != (update.k, update.v)
        if expanded and (update.k[1] != 1 or update.k[3] == update.v[3]):
            _refuse(kind, f"layer {layer} changes keys and values between the cache and attention")
        if not expanded and update.k[3] != update.v[3]:
            _refuse(kind, f"keys have {update.k[3]} elements and values {update.v[3]}; both must have as many")
    is_mla = (seen.calls[0].k, seen.calls[0].v) != (first.k, first.v)
    windows = tuple(_window(config, seen, layer) for layer in range(seen.layers))
    return Geometry(
        layers=seen.layers,
        kv_heads=first.k[1],
        k_dim=first.k[3],
        v_dim=first.v[3],
        is_mla=is_mla,
        windows=windows,
        vocab_size=vocab_size,
    )


def _window(config: PreTrainedConfig, seen: _Seen, layer: int) -> int:
    """The window that the layer passed to attention; its mask, made from ``layer_types``, must agree."""
    passed = seen.calls[layer].window
    types = getattr(config, "layer_types", None)
    masked = passed
    if types:
        masked = int(getattr(config, "sliding_window", 0) or 0) if types[layer] == "sliding_attention" else 0
    if passed != masked:
        _refuse(seen.kind, f"layer {layer} has a window of {masked or 'all'} tokens in its mask, and passes {passed}")
    return passed


def _refuse(kind: str, reason: str) -> NoReturn:
    raise InvalidRequest("model", f"{kind}: {reason}")


def one_line(error: BaseException) -> str:
    """An error's text in one line, not too long."""
    return " ".join(str(error).split())[:300]
