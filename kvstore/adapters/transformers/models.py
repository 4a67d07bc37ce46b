"""Checks that decide which models and calls are served, and the digest that identifies a model.

``check_call`` accepts a call of ``generate`` if its arguments do not change the KV of the prompt. It builds the
generation config as ``generate`` does. Each field of the config is either free, because it only affects logits, lengths
and outputs, or must have a neutral value. A field or argument that is not listed here is refused, including those that
a later version of transformers adds.

``ForwardRecord`` records the inputs that the model receives while one cache is filled, and refuses unusual ones.

``check_kind`` and ``probe`` accept a model by its type, its config and a trial run. ``ModelStamp`` shows before each
call whether the model still computes the same. It refuses everything that changes activations and cannot be part of a
digest: hooks, modules that are neither torch's nor transformers', replaced methods, compiled or quantised modules.
Everything else is part of the digest: weights, buffers, attributes of modules, the config and the precision of matrix
products. So models that differ in any of these have separate pages.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import xxhash
from torch.nn.modules import module as torch_module
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from torch.nn import Module

# --- Which calls are served -------------------------------------------------------------------------------------------

# Fields of the generation config that may have any value: none of them changes a key or a value of a token.
FREE_FIELDS = frozenset(
    (
        # when the answer ends
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"),
        *("eos_token_id", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
        # which token is chosen
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
        *("epsilon_cutoff", "eta_cutoff", "repetition_penalty", "encoder_repetition_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "renormalize_logits"),
        *("remove_invalid_values", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "watermarking_config"),
        # what is returned
        *("output_scores", "output_logits", "return_dict_in_generate"),
        # without effect on a single sequence and a growing cache; `_check_mask` compares `pad_token_id` with the prompt
        *("bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "disable_compile"),
        *("early_stopping", "length_penalty", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size"),
    )
)
# Values that these fields may have. All other fields that are not free must be None or False.
NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "num_beam_groups"), (None, 1)),
    "diversity_penalty": (None, 0.0),
    "use_cache": (True,),
}
# Arguments, in addition to the config's fields, that may have any value. `_check_mask` compares the mask with the
# prompt.
FREE_ARGUMENTS = frozenset(
    ("attention_mask", "generation_config", "logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria")
) | {"streamer", "tokenizer"}
_NO_CONFIG = "must be a GenerationConfig of transformers, or None"


def check_call(model: PreTrainedModel, input_ids: Any, settings: dict[str, Any]) -> None:
    """Accept a call of ``generate``, or refuse it. Changes nothing.

    Raises:
        InvalidRequest: an argument or a field of the config could change the KV of the prompt, or is unknown. The error
            names it.
    """
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or not input_ids.shape[1]:
        raise InvalidRequest("input_ids", "must be a tensor of shape [1, tokens]")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise InvalidRequest("input_ids", f"must be integers (got {input_ids.dtype})")
    if len(input_ids) != 1:
        raise InvalidRequest(
            "input_ids", f"must be one prompt, since prompts are padded together (got {len(input_ids)})"
        )
    own_config = settings.get("generation_config")
    if own_config is not None and type(own_config) is not GenerationConfig:
        raise InvalidRequest("generation_config", f"{_NO_CONFIG} (got {type(own_config).__name__})")
    checked = {name: value for name, value in settings.items() if name not in FREE_ARGUMENTS}
    _check_fields({name: value for name, value in checked.items() if hasattr(model.generation_config, name)})
    try:
        config, arguments = model._prepare_generation_config(own_config, **checked)  # type: ignore[operator]
    except (ValueError, TypeError) as error:
        raise InvalidRequest("generation_config", f"is refused by transformers: {error}".splitlines()[0]) from error
    _check_fields(vars(config))
    for name, value in arguments.items():
        if value is not None and not (name == "synced_gpus" and value is False):
            raise InvalidRequest(name, f"is not served: pages depend on token ids alone (got {_short(value)})")
    _check_mask(input_ids, settings.get("attention_mask"), config.pad_token_id)


def _check_fields(fields: dict[str, Any]) -> None:
    """Raise InvalidRequest if a field of a generation config may change the cached keys and values."""
    for name, value in fields.items():
        if not (name.startswith("_") or name in FREE_FIELDS or _is_neutral(name, value)):
            raise InvalidRequest(name, f"is not served, as it may change what is cached (got {_short(value)})")


def _is_neutral(name: str, value: Any) -> bool:
    neutral_values = NEUTRAL_FIELDS.get(name, (None, False))
    return any(type(value) is type(neutral) and value == neutral for neutral in neutral_values)


def _check_mask(input_ids: torch.Tensor, mask: Any, padding: Any) -> None:
    """Raise InvalidRequest if a mask hides a token of the prompt from other tokens, or if ``generate`` would make such
    a mask because the prompt contains a ``padding`` token."""
    if mask is None:
        if padding is not None and bool(torch.isin(input_ids, torch.as_tensor(padding, device=input_ids.device)).any()):
            raise InvalidRequest("attention_mask", "must be given for a prompt that contains the padding token")
    elif not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape:
        # With a mask of another length `generate` would treat the prompt as the continuation of the loaded tokens.
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise InvalidRequest("attention_mask", f"must be a tensor of the shape of input_ids (got {shape})")
    elif not bool((mask == 1).all()):
        raise InvalidRequest("attention_mask", "must not hide tokens: only prompts without padding are served")


def _short(value: Any) -> str:
    return type(value).__name__ if isinstance(value, torch.Tensor) else repr(value)[:80]


# --- Which inputs the model receives ----------------------------------------------------------------------------------

AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "ipu", "maia", "privateuseone")
# Inputs of a forward pass that change no key and no value, in addition to the cache, the tokens, their positions and
# the mask.
FREE_INPUTS = frozenset(("use_cache", "logits_to_keep", "return_dict", "cache_position"))


def autocast_device() -> str:
    """Return a device type for which autocast is on; "" if there is none."""
    return next((device for device in AUTOCAST_DEVICES if torch.is_autocast_enabled(device)), "")


class ForwardRecord:
    """The inputs of the forward passes that fill one cache. It is a forward pre-hook of the model during one call of
    ``generate``.

    Pages are stored under the tokens recorded here. The tokens that ``generate`` returns may differ: a logits
    processor, a stopping criterion or a streamer can write into the sequence.

    Args:
        past: the cache. Passes with another cache, for example those of other threads, are not recorded.
        tokens: the tokens whose keys and values the cache already holds, ``[tokens]``.
    """

    def __init__(self, past: DynamicCache, tokens: torch.Tensor) -> None:
        self._past = past
        self._tokens_loaded = len(tokens)
        self._tokens = [tokens]
        self._positions: list[torch.Tensor] = []
        self._masks: list[torch.Tensor] = []
        self._problem = ""

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        """Record the inputs of a forward pass, before it. Changes nothing."""
        if inputs.get("past_key_values") is not self._past:
            return
        others = {name: value for name, value in inputs.items() if value is not None and name not in FREE_INPUTS}
        others.pop("past_key_values")
        tokens, positions = others.pop("input_ids", None), others.pop("position_ids", None)
        mask = others.pop("attention_mask", None)
        if args or others:
            self._problem = f"the model is given {', '.join(others) or 'arguments without names'}"
        elif tokens is None or tokens.ndim != 2 or len(tokens) != 1:
            self._problem = "the model is not given one sequence of tokens"
        elif module.training or autocast_device():
            self._problem = "training mode or autocast was switched on"
        else:
            self._tokens.append(tokens[0].to(self._tokens[0].device, copy=True))
            if positions is not None:
                self._positions.append(positions.flatten())
            if mask is not None:
                self._masks.append((mask == 1).all() if mask.ndim == 2 else mask.new_zeros((), dtype=torch.bool))

    def tokens(self) -> torch.Tensor:
        """Return the tokens whose keys and values the cache holds.

        Raises:
            ValueError: other calls may compute other keys and values for these tokens. The message says why.
        """
        tokens = torch.cat(self._tokens)
        if self._positions and not self._problem:
            positions = torch.cat(self._positions)
            if not torch.equal(positions, torch.arange(self._tokens_loaded, len(tokens), device=positions.device)):
                self._problem = "tokens have other positions"
        if not all(bool(mask) for mask in self._masks):
            self._problem = "tokens are hidden from other tokens"
        for layer in self._past.layers:
            if type(layer) is not DynamicLayer or layer.keys is None or layer.keys.shape[::2] != (1, len(tokens)):
                self._problem = self._problem or "the cache does not hold the tokens that were computed"
        if self._problem:
            raise ValueError(self._problem)
        return tokens


# --- Which models are served ------------------------------------------------------------------------------------------

PROBE_TOKENS = 8
# Largest relative difference of keys and values of the same tokens in prompts of two lengths. They differ by rounding,
# or, if attention sees later tokens, by as much as their own size.
DIFFERENCE_MAX = 0.05
# These kinds of rope rotate keys by the prompt's length, so that the KV of the first tokens depends on later tokens.
ROPE_BY_LENGTH = ("dynamic", "longrope")
# Attributes of a config and of a module that change no number that a model computes.
CONFIG_IGNORED = frozenset(
    ("_name_or_path", "_commit_hash", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
) | {"model_type"}  # the class is in the digest
MODULE_IGNORED = frozenset(vars(torch.nn.Module())) | {
    *("_is_hf_initialized", "_hf_hook", "_old_forward", "generation_config", "hf_device_map", "name_or_path"),
    *("training", "warnings_issued"),
}
# Packages whose modules compute what their type and attributes say. The model's own package is added to these.
KNOWN_PACKAGES = ("torch.nn.", "transformers.")
# The module of hooks that only record. transformers keeps them after a call that requested hidden states or attentions.
RECORDING_HOOKS = "transformers.utils.output_capturing"
# Elements of each tensor that are compared before each call, because torch does not count writes to `tensor.data`.
SAMPLE_ELEMENTS = 4096


def check_kind(model: Any) -> None:
    """Accept a model if its type and config show that its layers keep the keys and values of all tokens.

    Raises:
        InvalidRequest: the model is not served. The field is "model", and the message says why.
    """
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise InvalidRequest("model", f"must be a transformers model that generates text (got {type(model).__name__})")
    if type(model).generate is not GenerationMixin.generate:
        _refuse(model, "has its own generate method")
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        _refuse(model, "has an encoder, whose output is not part of the pages")
    if getattr(config, "quantization_config", None):
        _refuse(model, "has quantised weights")
    parameters = getattr(config, "rope_parameters", None) or {}
    for terms in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if (kind := terms.get("rope_type")) in ROPE_BY_LENGTH:
            _refuse(model, f"rotates keys by the length of the prompt (rope_type {kind!r})")
    for number, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is not DynamicLayer:
            _refuse(model, f"layer {number} does not keep the keys and values of all tokens ({layer!r})")


def probe(model: PreTrainedModel) -> list[DynamicLayer]:
    """Run the model on a few tokens, and return the layers of the cache.

    Raises:
        InvalidRequest: keys and values differ in shape or type from layer to layer, or depend on later tokens.
    """
    embedding: Any = model.get_input_embeddings()
    tokens = (torch.arange(2 * PROBE_TOKENS, device=embedding.weight.device) * 7 % embedding.num_embeddings)[None]
    past, longer = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tokens[:, :PROBE_TOKENS], past_key_values=past, use_cache=True)
        model(input_ids=tokens, past_key_values=longer, use_cache=True)
    layers: list[DynamicLayer] = []
    for number, (layer, other) in enumerate(zip(past.layers, longer.layers, strict=True)):
        if type(layer) is not DynamicLayer or type(other) is not DynamicLayer or layer.keys is None:
            _refuse(model, f"layer {number} does not have its own keys and values")
        assert layer.values is not None and other.keys is not None and other.values is not None
        if layer.keys.ndim != 4 or layer.keys.shape[:3] != layer.values.shape[:3] or layer.keys.shape[0] != 1:
            _refuse(model, f"layer {number} caches {tuple(layer.keys.shape)} and {tuple(layer.values.shape)}")
        for short, long in ((layer.keys, other.keys), (layer.values, other.values)):
            difference = (long[:, :, :PROBE_TOKENS].float() - short.float()).norm() / short.float().norm()
            if not float(difference) <= DIFFERENCE_MAX:  # also true for NaN
                _refuse(model, f"layer {number} caches different keys and values if more tokens follow")
        layers.append(layer)
    shapes_and_types = {
        (layer.keys.shape, layer.values.shape, layer.keys.dtype, layer.values.dtype)  # type: ignore[union-attr]
        for layer in layers
    }
    if len(shapes_and_types) != 1:
        _refuse(model, "has layers whose keys and values differ in shape or type")
    keys_shape, values_shape, *_ = shapes_and_types.pop()
    if keys_shape != values_shape and keys_shape[1] != 1:
        _refuse(model, f"has keys of {keys_shape[3]} elements and values of {values_shape[3]} in {keys_shape[1]} heads")
    return layers


def _refuse(model: Any, reason: str) -> NoReturn:
    raise InvalidRequest("model", f"{type(model).__name__} {reason}")


# --- The identity of a model ------------------------------------------------------------------------------------------


class ModelStamp:
    """The state of a model at one moment. If two stamps are equal, the model computes the same keys and values.

    A stamp keeps references to all modules, weights, buffers and their storages. So their addresses cannot be reused,
    and a later stamp can be compared by address. Torch does not count writes to ``tensor.data``. They are detected if
    they change one of a few thousand evenly spread elements of the tensor. So an update of a layer is detected, and a
    write to a single element may be missed.

    Raises:
        InvalidRequest: something in the model changes activations and cannot be part of a digest, or autocast is on.
            The field is "model" or "autocast".
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if device := autocast_device():
            raise InvalidRequest("autocast", f"must be off, since it changes keys and values (on for {device!r})")
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            _refuse(model, "runs under forward hooks of all modules")
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._modules: list[Module] = []
        self._configs: dict[int, tuple[PreTrainedConfig, str]] = {}  # configs and their digests, by id
        self._facts: list[Any] = [_precision()]
        for name, module in model.named_modules(remove_duplicate=False):
            _check_module(model, name, module)
            self._modules.append(module)
            kind = type(module)
            self._facts.append([name, _name_of(kind), _name_of(kind.forward), *self._attributes(module)])
            for tensors in (module._parameters, module._buffers):
                self._tensors += ((f"{name}.{own}", tensor) for own, tensor in tensors.items() if tensor is not None)
            for own, value in vars(module).items():
                if own not in MODULE_IGNORED:
                    self._tensors += ((f"{name}.{own}", tensor) for tensor in _tensors_in(value))
        for name, tensor in self._tensors:
            _check_tensor(model, name, tensor)
        self._storages = [tensor.untyped_storage() for _, tensor in self._tensors]
        self._tensor_states = [
            (name, id(tensor), tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape, tensor.stride())
            for name, tensor in self._tensors
        ]
        self._sample = self._sample_digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelStamp) and self._compared() == other._compared()

    __hash__ = None  # type: ignore[assignment]

    def digest(self) -> str:
        """Return a digest of the modules, the config, and the names, types, shapes and bytes of all weights and
        buffers. Reads all weights once."""
        digest = xxhash.xxh3_128(json.dumps(self._facts).encode())
        contents: dict[int, bytes] = {}
        for name, tensor in sorted(self._tensors, key=lambda entry: entry[0]):
            if id(tensor) not in contents:
                data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                contents[id(tensor)] = xxhash.xxh3_128(data).digest()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(contents[id(tensor)])
        return digest.hexdigest()

    def _compared(self) -> tuple[Any, ...]:
        return [id(module) for module in self._modules], self._tensor_states, self._facts, self._sample

    def _attributes(self, module: Module) -> Iterator[Any]:
        """Yield the name and value of each attribute of a module that may change what the module computes."""
        for name, value in sorted(vars(module).items()):
            if not (name in MODULE_IGNORED or (name.startswith("_") and isinstance(module, PreTrainedModel))):
                yield [name, self._config_digest(value) if isinstance(value, PreTrainedConfig) else _plain(value)]

    def _config_digest(self, config: PreTrainedConfig) -> str:
        """Return a digest of a config. Most modules share one config, so its digest is computed once."""
        if (entry := self._configs.get(id(config))) is not None:
            return entry[1]
        _check_attention(config)
        digest = xxhash.xxh3_128_hexdigest(json.dumps(_plain(config)).encode())
        self._configs[id(config)] = config, digest
        return digest

    def _sample_digest(self) -> bytes:
        """Return a digest of about ``SAMPLE_ELEMENTS`` elements of each tensor, and of all elements of small
        tensors."""
        samples: dict[torch.device, dict[int, torch.Tensor]] = {}  # by device and tensor
        for _, tensor in self._tensors:
            flat = tensor.detach().flatten()
            step = max(1, len(flat) // SAMPLE_ELEMENTS) | 1  # an even step could sample a single column of a matrix
            samples.setdefault(tensor.device, {})[id(tensor)] = flat[::step].contiguous().view(torch.uint8)
        digest = xxhash.xxh3_128()
        for device_samples in samples.values():
            digest.update(torch.cat(list(device_samples.values())).cpu().numpy().data)
        return digest.digest()


def _check_module(model: PreTrainedModel, name: str, module: Module) -> None:
    """Raise InvalidRequest if a module's type, attributes and tensors do not determine what it computes."""
    kind, where, attributes = type(module), f"module {name!r}" if name else "itself", vars(module)
    packages = (*KNOWN_PACKAGES, f"{type(model).__module__.partition('.')[0]}.")
    if not f"{kind.__module__}.".startswith(packages):
        _refuse(model, f"has an unknown module: {where} is a {_name_of(kind)}")
    if not all(f"{source}.".startswith((*packages, "torch.")) for source in _source_modules(kind.forward)):
        _refuse(model, f"has a method that was replaced ({where}: forward of {_name_of(kind)})")
    if module.training:
        _refuse(model, f"is in training mode: call model.eval() ({where})")
    if attributes.get("hf_quantizer") is not None:
        _refuse(model, f"has quantised weights ({where})")
    if attributes.get("_hf_peft_config_loaded") or _is_adapter(module):
        _refuse(model, f"has switchable adapters: merge them into the weights ({where})")
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        if type(hook) is not ForwardRecord and getattr(hook, "__module__", "") != RECORDING_HOOKS:
            _refuse(model, f"has forward hooks, which may change what is computed ({where}: {hook!r})")
    if module._compiled_call_impl is not None:
        _refuse(model, f"is compiled, which changes numbers ({where})")
    # accelerate replaces these methods. They still compute the same if its hook only moves activations.
    replaceable = ("to", "cuda", *(("forward",) if _is_device_hook(attributes.get("_hf_hook")) else ()))
    for own, value in attributes.items():
        if callable(value) and callable(getattr(kind, own, None)) and own not in replaceable:
            _refuse(model, f"has a method that was replaced ({where}: {own})")


def _source_modules(function: Any) -> Iterator[str]:
    """Yield the modules that define a function and all functions that it wraps. A decorator may copy the name of the
    function that it wraps, so the names come from the functions' globals."""
    while function is not None:
        yield getattr(function, "__globals__", {}).get("__name__", "")
        function = getattr(function, "__wrapped__", None)


def _is_adapter(module: Module) -> bool:
    """Return whether a module is an adapter layer, such as PEFT's. A whole model has a method of the same name."""
    return hasattr(module, "disable_adapters") and not isinstance(module, PreTrainedModel)


def _is_device_hook(hook: Any) -> bool:
    """Return whether a hook is accelerate's and only moves activations between the devices of a model."""
    if getattr(type(hook), "__module__", "") != "accelerate.hooks":
        return False
    if type(hook).__name__ == "SequentialHook":
        return all(map(_is_device_hook, hook.hooks))
    return type(hook).__name__ == "AlignDevicesHook" and not hook.offload


def _check_tensor(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidRequest if a stamp could not detect changes of a tensor."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_quantized or tensor.layout != torch.strided:
        _refuse(model, f"has weights that are not plain tensors: {name} is a {_name_of(type(tensor))}")
    if tensor.is_meta:
        _refuse(model, f"has weights that are not in memory ({name})")
    if tensor.is_inference():
        _refuse(model, f"has weights created in inference mode, whose changes torch does not count ({name})")


def _check_attention(config: PreTrainedConfig) -> None:
    """Raise InvalidRequest if the attention is a function of another package than transformers."""
    name = config._attn_implementation
    for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        function = functions.get(name)
        while isinstance(function, functools.partial):
            function = function.func
        if function is not None and not function.__module__.startswith("transformers."):
            raise InvalidRequest("model", f"attention {name!r} is not transformers' own (got {_name_of(function)})")


def _precision() -> list[Any]:
    """Return the settings of this process that change the result of a matrix product."""
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):  # before torch 2.9
        return [torch.get_float32_matmul_precision(), str(torch.get_default_dtype())]
    products = backends.cuda.matmul, backends.mkldnn.matmul
    halves = "fp16_accumulation", "fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction"
    return [
        str(torch.get_default_dtype()),
        *(product.fp32_precision.replace("none", "ieee") for product in products),
        *(str(getattr(backends.cuda.matmul, f"allow_{name}", None)) for name in halves),
    ]


def _plain(value: Any) -> Any:
    """Return a value as JSON types, equal in every process. An object of another type is replaced by its type's
    name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, PreTrainedConfig):
        return [
            _name_of(type(value)),
            _plain({name: item for name, item in vars(value).items() if name not in CONFIG_IGNORED}),
        ]
    if isinstance(value, dict):
        return sorted([str(key), _plain(item)] for key, item in value.items())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, torch.dtype | Enum):
        return str(value)
    if isinstance(value, functools.partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    return _name_of(value if callable(value) and hasattr(value, "__qualname__") else type(value))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an attribute, in nested lists and dictionaries too. A module may keep tensors that it has
    not registered as parameters or buffers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _name_of(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
