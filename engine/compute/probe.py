"""The probe: it runs a model on a few tokens to find the shape and use of the model's KV.

An engine can serve a model if each layer passes its keys and values to ``Cache.update`` and attends through the
attention interface of transformers, and if the model passes forward arguments on to that interface. Any other model is
refused: by its config and class before weights are read (`refuse_kind`), or by what a run shows (`probe`).

The run uses a packed input, as engines do. One row has the same few tokens twice, and only position ids distinguish the
two copies; attention uses the plain formula. The logits of both copies must equal the logits of a normal run. If they
differ, the model attends in a way that an engine cannot reproduce.
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
# With these rope types, keys depend on the length of the prompt. Prompts of other lengths cannot use them.
ROPE_BY_LENGTH = ("dynamic", "longrope")
TOKENS = 12
# The largest relative error of the packed run's logits, in float32 and in shorter types.
ERROR_MAX, ERROR_SHORT_MAX = 0.01, 0.3
MEDIA = ("vision", "image", "audio", "video", "speech")


class CacheGroup(NamedTuple):
    """Layers of a model whose KV is stored in the same way.

    ``window``: the number of tokens that a token sees in these layers; 0 if it sees all.
    """

    layers: tuple[int, ...]
    window: int


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The shape of a model's KV.

    Each token has, in each layer, ``kv_heads`` keys of ``k_dim`` elements and as many values of ``v_dim`` elements. If
    ``is_mla``, there is one head. Its key is the latent and its value is the rotated key, as the cache receives them;
    the model then makes the keys and values of all its heads from these two.

    Attributes:
        windows: for each layer, the number of tokens that a token sees, itself included; 0 if it sees all.
        vocab_size: the number of logits per token.
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
        """One or two cache groups: first the layers that see all tokens, then the layers with a window.

        KV before a window can be dropped. The largest window counts for all layers of the second group.
        """
        full = tuple(layer for layer, window in enumerate(self.windows) if not window or self.is_mla)
        windowed = tuple(layer for layer in range(self.layers) if layer not in full)
        groups = CacheGroup(full, 0), CacheGroup(windowed, max(self.windows))
        return tuple(group for group in groups if group.layers)


def refuse_kind(config: PreTrainedConfig) -> None:
    """Refuse a model if its config or its class shows that engines do not support it.

    Raises:
        InvalidRequest: "model", with the model type and the feature that is not supported.
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
            _refuse(kind, f"layer {layer} is {layer_type!r}; supported are {' and '.join(LAYER_TYPES)}")
    if shared := getattr(config, "num_kv_shared_layers", 0):
        _refuse(kind, f"{shared} of its layers share the KV of another (num_kv_shared_layers)")
    if getattr(config, "attention_chunk_size", None):
        _refuse(kind, "attends in chunks (attention_chunk_size)")
    if getattr(config, "use_bidirectional_attention", None) or getattr(config, "is_causal", True) is False:
        _refuse(kind, "attends to later tokens as well")
    if rope := sorted(_rope_types(config) & {*ROPE_BY_LENGTH}):
        _refuse(kind, f"rotates keys by the length of the prompt (rope_type {rope[0]!r}): its pages cannot be reused")
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        _refuse(kind, "its config has no num_hidden_layers")


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """Return the rope types that the config names: one for all layers, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    per_type = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(terms.get("rope_type", "default")) for terms in (parameters, *per_type)}


def _sub_configs(config: PreTrainedConfig) -> dict[str, object]:
    """Return the configs inside this one by the name of their field, for example "text_config"."""
    return {
        name: value
        for name, value in vars(config).items()
        if name.endswith("_config") and (isinstance(value, dict) or hasattr(value, "model_type"))
    }


def probe(net: PreTrainedModel) -> Geometry:
    """Run ``net`` on a few tokens and return its geometry. The net's attention implementation is restored afterwards.

    Raises:
        InvalidRequest: "model", with the layer and the feature that is not supported.
    """
    kind, implementation = net.config.model_type, net.config._attn_implementation
    record = _Record(kind, net.config.num_hidden_layers)
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
                past_key_values=_Cache(record),
                use_cache=True,
                record=record,
            ).logits.float()
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, InvalidRequest):
            raise
        _refuse(kind, f"cannot run on a cache of keys and values: {type(error).__name__}: {one_line(error)}")
    finally:
        net.set_attn_implementation(implementation)
    for layer in range(record.layers):
        if layer not in record.updates:
            _refuse(kind, f"layer {layer} passes no keys and values to the cache")
        if layer not in record.calls:
            _refuse(kind, f"layer {layer} does not attend through the attention interface of transformers")
    geometry = _geometry(net.config, record, int(own.shape[-1]))
    if not torch.isfinite(own).all():
        _refuse(kind, "gives logits that are not finite")
    relative_error = float((packed - own.repeat(1, 2, 1)).norm() / own.repeat(1, 2, 1).norm())
    if not relative_error <= (ERROR_MAX if net.dtype == torch.float32 else ERROR_SHORT_MAX):
        _refuse(
            kind, f"attends in a way that is not supported: packed logits are off by {relative_error:.2g} of their size"
        )
    return geometry


@dataclass(frozen=True)
class _Update:
    """The shapes ``[batch, heads, tokens, dim]`` of the keys and values that one layer passed to the cache."""

    k: tuple[int, ...]
    v: tuple[int, ...]


@dataclass(frozen=True)
class _Call:
    """The shapes of the keys and values with which one layer called attention, and the window that it passed."""

    k: tuple[int, ...]
    v: tuple[int, ...]
    window: int


@dataclass
class _Record:
    """The calls of one run, by layer."""

    kind: str
    layers: int
    updates: dict[int, _Update] = field(default_factory=dict)
    calls: dict[int, _Call] = field(default_factory=dict)


class _Cache(Cache):
    """A cache that records what each layer passes to it. It refuses everything except one pair of keys and values per
    layer."""

    def __init__(self, record: _Record) -> None:
        super().__init__(layers=[DynamicLayer() for _ in range(record.layers)])
        self._record = record

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind, updates = self._record.kind, self._record.updates
        if layer_idx >= self._record.layers:
            _refuse(kind, f"layer {layer_idx} caches keys and values, but there are only {self._record.layers} layers")
        if layer_idx in updates:
            _refuse(kind, f"layer {layer_idx} caches keys and values more than once")
        updates[layer_idx] = _Update(tuple(key_states.shape), tuple(value_states.shape))
        return key_states, value_states

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(self._record.kind, f"layer {layer_idx} keeps the state of a convolution")

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> NoReturn:
        _refuse(self._record.kind, f"layer {layer_idx} keeps recurrent state")

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> NoReturn:
        _refuse(self._record.kind, f"layer {layer_idx} caches keys of an indexer (sparse attention)")


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    record: _Record | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by the plain formula and record the call. Query, key and value are ``[1, heads, 2 * TOKENS, dim]``."""
    layer = getattr(module, "layer_idx", None)
    if record is None or layer is None:
        name = type(module).__name__
        _refuse(name, "does not pass forward arguments or the number of its layer to the attention function")
    if layer in record.calls:
        _refuse(record.kind, f"layer {layer} attends more than once per token")
    if layer not in record.updates:
        _refuse(record.kind, f"layer {layer} attends to keys and values that it does not cache (shared with another?)")
    if attention_mask is not None:
        _refuse(record.kind, f"layer {layer} attends with a mask of its own")
    if getattr(module, "is_causal", True) is False:
        _refuse(record.kind, f"layer {layer} attends to later tokens as well")
    record.calls[layer] = _Call(tuple(key.shape), tuple(value.shape), int(sliding_window or 0))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1).float(), value.repeat_interleave(groups, dim=1).float()
    scores = query.float() @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    row = torch.arange(2 * TOKENS, device=query.device)
    distance = row[:, None] - row
    same_copy = row[:, None] // TOKENS == row // TOKENS
    visible = (distance >= 0) & same_copy & (distance < (sliding_window or 2 * TOKENS))
    scores = scores.masked_fill(~visible, -torch.inf)
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.float().view(1, -1, 1, 1).expand(1, -1, 2 * TOKENS, 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : 2 * TOKENS]
    return (weights @ value).to(query.dtype).transpose(1, 2).contiguous(), None


def _geometry(config: PreTrainedConfig, record: _Record, vocab_size: int) -> Geometry:
    """Return the geometry that the run shows. Refuse the model if its layers differ."""
    kind, first = record.kind, record.updates[0]
    for layer in range(record.layers):
        update, call = record.updates[layer], record.calls[layer]
        if len(update.k) != 4 or len(update.v) != 4 or update.k[:3] != update.v[:3] or update.k[2] != 2 * TOKENS:
            _refuse(kind, f"layer {layer} caches tensors of shapes {list(update.k)} and {list(update.v)}")
        if update != first:
            own, others = (f"{u.k[1]} heads of {u.k[3]} and {u.v[3]}" for u in (update, first))
            _refuse(kind, f"layer {layer} caches {own} elements, but layer 0 caches {others}; all layers must be equal")
        expanded = (call.k, call.v) != (update.k, update.v)
        if expanded and (update.k[1] != 1 or update.k[3] == update.v[3]):
            _refuse(kind, f"layer {layer} changes keys and values between the cache and attention")
        if not expanded and update.k[3] != update.v[3]:
            _refuse(kind, f"keys have {update.k[3]} elements and values {update.v[3]}; these numbers must be equal")
    is_mla = (record.calls[0].k, record.calls[0].v) != (first.k, first.v)
    windows = tuple(_window(config, record, layer) for layer in range(record.layers))
    return Geometry(
        layers=record.layers,
        kv_heads=first.k[1],
        k_dim=first.k[3],
        v_dim=first.v[3],
        is_mla=is_mla,
        windows=windows,
        vocab_size=vocab_size,
    )


def _window(config: PreTrainedConfig, record: _Record, layer: int) -> int:
    """Return the window that the layer passed to attention. The config's ``layer_types``, from which transformers makes
    masks, must give the same window."""
    passed = record.calls[layer].window
    types = getattr(config, "layer_types", None)
    masked = passed
    if types:
        masked = int(getattr(config, "sliding_window", 0) or 0) if types[layer] == "sliding_attention" else 0
    if passed != masked:
        texts = (f"{window} tokens" if window else "all tokens" for window in (masked, passed))
        _refuse(record.kind, "layer {}: its mask shows {}, but it passes a window of {}".format(layer, *texts))
    return passed


def _refuse(kind: str, reason: str) -> NoReturn:
    raise InvalidRequest("model", f"{kind}: {reason}")


def one_line(error: BaseException) -> str:
    """Return the text of an error as one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]
