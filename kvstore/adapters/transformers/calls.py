"""Which calls of ``generate`` are served: those whose arguments leave the KV of the prompt as it is.

The generation config is built as ``generate`` builds it, and every field of it is either free, because it only acts on
logits, lengths and outputs, or has to be neutral. A field or an argument that is not listed here is refused, so that
one which a later version of transformers adds is refused as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        # without effect on one sequence and a cache that grows; `pad_token_id` is compared with the prompt
        *("bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "disable_compile"),
        *("early_stopping", "length_penalty", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size"),
    )
)
# What these fields have to be; all others that are not free have to be None or False.
NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "num_beam_groups"), (None, 1)),
    "diversity_penalty": (None, 0.0),
    "use_cache": (True,),
}
# Arguments beside those of the config that may have any value; the mask is compared with the prompt.
FREE_ARGUMENTS = frozenset(
    ("attention_mask", "generation_config", "logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria")
) | {"streamer", "tokenizer"}
_NO_CONFIG = "must be a GenerationConfig of transformers, or None"


def check_call(model: PreTrainedModel, input_ids: Any, settings: dict[str, Any]) -> None:
    """Let a call pass, or refuse it. Changes nothing.

    Raises:
        InvalidRequest: names the argument or field that could change the KV of the prompt, or that is not known.
    """
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or not input_ids.shape[1]:
        raise InvalidRequest("input_ids", "must be a tensor of shape [1, tokens]")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise InvalidRequest("input_ids", f"must be integers (got {input_ids.dtype})")
    if len(input_ids) != 1:
        raise InvalidRequest(
            "input_ids", f"must be one prompt, since prompts are padded together (got {len(input_ids)})"
        )
    given = settings.get("generation_config")
    if given is not None and type(given) is not GenerationConfig:
        raise InvalidRequest("generation_config", f"{_NO_CONFIG} (got {type(given).__name__})")
    others = {name: value for name, value in settings.items() if name not in FREE_ARGUMENTS}
    _check_fields({name: value for name, value in others.items() if hasattr(model.generation_config, name)})
    try:
        config, arguments = model._prepare_generation_config(given, **others)  # type: ignore[operator]
    except (ValueError, TypeError) as error:
        raise InvalidRequest("generation_config", f"is refused by transformers: {error}".splitlines()[0]) from error
    _check_fields(vars(config))
    for name, value in arguments.items():
        if value is not None and not (name == "synced_gpus" and value is False):
            raise InvalidRequest(name, f"is not served: pages are of token ids alone (got {_short(value)})")
    _check_mask(input_ids, settings.get("attention_mask"), config.pad_token_id)


def _check_fields(fields: dict[str, Any]) -> None:
    """Raises InvalidRequest where a field of a generation config may change what is cached."""
    for name, value in fields.items():
        if not (name.startswith("_") or name in FREE_FIELDS or _is_neutral(name, value)):
            raise InvalidRequest(name, f"is not served, as it may change what is cached (got {_short(value)})")


def _is_neutral(name: str, value: Any) -> bool:
    return any(type(value) is type(each) and value == each for each in NEUTRAL_FIELDS.get(name, (None, False)))


def _check_mask(input_ids: torch.Tensor, mask: Any, padding: Any) -> None:
    """Raises InvalidRequest where a token of the prompt is hidden from others, or ``generate`` would guess so."""
    if mask is None:
        if padding is not None and bool(torch.isin(input_ids, torch.as_tensor(padding, device=input_ids.device)).any()):
            raise InvalidRequest("attention_mask", "must be given for a prompt with the padding token in it")
    elif not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape:
        # A mask of another length makes `generate` take the prompt for what follows the loaded tokens.
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise InvalidRequest("attention_mask", f"must be a tensor of the shape of input_ids (got {shape})")
    elif not bool((mask == 1).all()):
        raise InvalidRequest("attention_mask", "hides tokens; prompts without padding are served")


def _short(value: Any) -> str:
    return type(value).__name__ if isinstance(value, torch.Tensor) else repr(value)[:80]
