"""Arguments of ``generate``: each combination gives the tokens of plain ``generate``, or is refused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)

import kvstore
from engine.compute.presets import build
from kvstore.adapters.transformers import PromptCache, prefix_cache
from kvstore.adapters.transformers.models import FREE_FIELDS, NEUTRAL_FIELDS
from kvstore.errors import InvalidRequest

PAGE, NEW, TOKENS = 4, 6, 64
FAMILIES = ("llama", "gpt2", "tiny-mla")
PROMPT = torch.arange(5, 28)[None]  # 23 tokens, 5 full pages that may be loaded

torch.set_num_threads(1)  # tests share two cores


@cache
def model_of(family: str) -> Any:
    """Random weights in float32. Tests put back whatever they change."""
    torch.manual_seed(1)
    if family.startswith("tiny-"):
        return build(family, 0).eval()
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": TOKENS}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    more = {"intermediate_size": 32} if family == "llama" else {}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **special, **more)).eval()


@pytest.fixture
def cached() -> Iterator[PromptCache]:
    with kvstore.open() as store:
        yield prefix_cache(model_of("llama"), store, page_tokens=PAGE)


def config_with(fields: dict[str, Any], config: GenerationConfig | None = None) -> GenerationConfig:
    """A config that transformers has not checked yet, as after an assignment."""
    made = GenerationConfig(**config.to_dict()) if config else GenerationConfig()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def tokens_of(output: Any) -> list[Any]:
    """Prompt and answer."""
    sequences: torch.Tensor = output if isinstance(output, torch.Tensor) else output.sequences
    return list(sequences.tolist())


def plain(model: Any, prompt: torch.Tensor = PROMPT, **call: Any) -> list[Any]:
    """Tokens of ``generate`` without a store."""
    torch.manual_seed(0)
    return tokens_of(model.generate(prompt.clone(), **{"max_new_tokens": NEW, **call}))


def asked(cached: PromptCache, prompt: torch.Tensor = PROMPT, **call: Any) -> list[Any]:
    torch.manual_seed(0)
    return tokens_of(cached.generate(prompt.clone(), **{"max_new_tokens": NEW, **call}))


def check_store_is_right(cached: PromptCache) -> None:
    """What earlier calls have stored is what plain calls compute."""
    assert asked(cached) == plain(cached._model)


# --- all combinations -------------------------------------------------------------------------------------------------


class _Favour(LogitsProcessor):
    """Makes one token likelier."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 9] += 2
        return scores


FREE = {
    "do_sample": [True, False],
    "temperature": [0.7, 1.3],
    "top_k": [0, 5],
    "top_p": [0.8],
    "min_p": [0.1],
    "typical_p": [0.9],
    "repetition_penalty": [1.3],
    "encoder_repetition_penalty": [1.2],
    "no_repeat_ngram_size": [2],
    "bad_words_ids": [[[7]], [[8, 9]]],
    "suppress_tokens": [[3, 4]],
    "begin_suppress_tokens": [[5]],
    "sequence_bias": [[[[9], 3.0]]],
    "min_new_tokens": [3],
    "min_length": [25],
    "max_new_tokens": [1, 3],
    "max_length": [26],
    "eos_token_id": [2, [2, 9], 27],
    "forced_eos_token_id": [2],
    "exponential_decay_length_penalty": [(2, 1.5)],
    "renormalize_logits": [True],
    "watermarking_config": [WatermarkingConfig()],
    "return_dict_in_generate": [True],
    "output_scores": [True],
    "output_logits": [True],
    "logits_processor": [LogitsProcessorList([_Favour()])],
    "stopping_criteria": [StoppingCriteriaList([MaxLengthCriteria(25)])],
    "attention_mask": [torch.ones_like(PROMPT), None],
    "disable_compile": [True],
}
DANGEROUS = {
    "pad_token_id": [0, 2, 7, 13],
    "num_beams": [1, 2],
    "num_return_sequences": [1, 2],
    "num_beam_groups": [1, 2],
    "use_cache": [True, False, None],
    "cache_implementation": [None, "dynamic", "static", "offloaded", "quantized", "hybrid"],
    "cache_config": [None, {"nbits": 4}],
    "prompt_lookup_num_tokens": [None, 2],
    "assistant_early_exit": [1],
    "prefill_chunk_size": [3],
    "penalty_alpha": [0.6],
    "guidance_scale": [1.5],
    "token_healing": [True],
    "output_attentions": [True],
    "output_hidden_states": [True, False],
    "attention_mask": [
        torch.tensor([[0] * 4 + [1] * 19]),
        torch.ones(1, 24, dtype=torch.int64),
        torch.ones(1, 6, dtype=torch.int64),
        torch.ones(1, 1, 23, 23, dtype=torch.int64),
        torch.ones_like(PROMPT).bool(),
    ],
    "position_ids": [None, torch.arange(23)[None], torch.arange(23)[None] + 5],
    "inputs_embeds": [None, torch.zeros(1, 23, 32)],
    "token_type_ids": [None, torch.zeros_like(PROMPT)],
    "past_key_values": [None],
    "synced_gpus": [None, False, True],
    "logits_to_keep": [1],
    "custom_generate": [None, "nobody/nothing"],
    "unheard_of": [None, 1],
}
ALL = {name: [*FREE.get(name, ()), *DANGEROUS.get(name, ())] for name in (*FREE, *DANGEROUS)}
ARGUMENTS = {"attention_mask", "logits_processor", "stopping_criteria", *list(DANGEROUS)[-8:]}
FIELDS = {name: values for name, values in ALL.items() if name not in ARGUMENTS}


@st.composite
def some_of(draw: Any, pool: dict[str, list[Any]], most: int) -> dict[str, Any]:
    """A few names of a pool, and a value of each."""
    names = draw(st.lists(st.sampled_from(sorted(pool)), max_size=most, unique=True))
    return {name: draw(st.sampled_from(pool[name])) for name in names}


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    family=st.sampled_from(FAMILIES),
    call=some_of(ALL, 4),
    config=st.none() | some_of(FIELDS, 2),
    of_model=some_of(FIELDS, 1),
)
@pytest.mark.filterwarnings("ignore")
def test_any_call_gives_the_tokens_of_plain_generate_or_is_refused(
    family: str, call: dict[str, Any], config: dict[str, Any] | None, of_model: dict[str, Any]
) -> None:
    model = model_of(family)
    before = model.generation_config
    model.generation_config = config_with(of_model, before)
    try:
        if config is not None:
            call = {**call, "generation_config": config_with(config)}
        with kvstore.open() as store:
            cached = prefix_cache(model, store, page_tokens=PAGE)
            # First alone, then over what the first has stored; whatever the call stores is what plain calls compute.
            for _ in range(2):
                try:
                    tokens = asked(cached, **call)
                except ValueError as error:  # InvalidRequest is one
                    if not isinstance(error, InvalidRequest):
                        with pytest.raises(type(error)):
                            plain(model, **call)
                else:
                    assert tokens == plain(model, **call)
            model.generation_config = before
            check_store_is_right(cached)
    finally:
        model.generation_config = before


def test_calls_with_free_arguments_are_served_from_the_store() -> None:
    """The test above may not pass because all is refused."""
    with kvstore.open() as store:
        cached = prefix_cache(model_of("llama"), store, page_tokens=PAGE)
        asked(cached)
        for name, values in FREE.items():
            for value in values:
                call = {"do_sample": True, name: value}
                if name == "max_length":
                    call["max_new_tokens"] = None
                assert asked(cached, **call) == plain(model_of("llama"), **call), name
                assert cached.last is not None and cached.last.pages == 5, name


# --- one by one -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["argument", "config", "model"])
@pytest.mark.parametrize(
    ("field", "value", "named"),
    [("pad_token_id", 7, "attention_mask"), ("num_beams", 3, "num_beams")],
)
def test_what_generate_would_use_is_refused_wherever_it_is_set(
    cached: PromptCache, monkeypatch: pytest.MonkeyPatch, where: str, field: str, value: Any, named: str
) -> None:
    """The effective config counts: an argument over the given config over the model's."""
    call: dict[str, Any] = {}
    if where == "argument":
        call = {field: value}
    elif where == "config":
        call = {"generation_config": config_with({field: value})}
    else:
        own = config_with({field: value}, cached._model.generation_config)
        monkeypatch.setattr(cached._model, "generation_config", own)
        call = {"generation_config": GenerationConfig(do_sample=False)}
    with pytest.raises(InvalidRequest) as refused:
        asked(cached, **call)
    assert refused.value.field == named
    monkeypatch.undo()
    check_store_is_right(cached)


def test_fields_that_are_not_known_are_refused(cached: PromptCache) -> None:
    """Each field that is not free: whatever a later version of transformers adds to them, too."""
    others = [name for name in vars(GenerationConfig()) if name not in FREE_FIELDS and not name.startswith("_")]
    assert len(others) > 20
    for name in [*others, "added_later"]:
        config = config_with({name: 3})
        with pytest.raises(ValueError, match=f"{name}|quantized|constraint|cache_impl|speculation") as refused:
            asked(cached, generation_config=config)
        assert isinstance(refused.value, InvalidRequest) or name != "added_later"
    assert set(NEUTRAL_FIELDS) <= set(others)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("attention_mask", {"attention_mask": torch.ones(1, 22, dtype=torch.int64)}),
        ("attention_mask", {"attention_mask": torch.ones(1, 24, dtype=torch.int64)}),
        ("attention_mask", {"attention_mask": [[1] * 23]}),
        ("position_ids", {"position_ids": torch.arange(23)[None] + 3}),
        ("position_ids", {"position_ids": list(range(23))}),
        ("past_key_values", {"past_key_values": ()}),
        ("inputs", {"inputs": PROMPT}),
        ("custom_generate", {"custom_generate": lambda *_, **__: PROMPT}),
        ("assistant_model", {"assistant_model": 1}),
        ("synced_gpus", {"synced_gpus": True}),
        ("use_cache", {"use_cache": False}),
        ("use_cache", {"use_cache": None}),
        ("unheard_of", {"unheard_of": 1}),
        ("generation_config", {"generation_config": {"num_beams": 1}}),
        ("cache_implementation", {"cache_implementation": "dynamic"}),
        ("output_attentions", {"output_attentions": True}),
    ],
)
def test_arguments_that_are_refused(cached: PromptCache, field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked(cached, **changes)
    assert refused.value.field == field


def test_prompts_of_floats_are_refused(cached: PromptCache) -> None:
    with pytest.raises(InvalidRequest, match=r"input_ids: must be integers \(got torch.float32\)"):
        cached.generate(PROMPT.float())


# --- what acts while tokens are generated -----------------------------------------------------------------------------


class _Rewrite(LogitsProcessor):
    """Writes into the sequence, where nobody is to write."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        input_ids[:, ::3] = 40
        return scores


class _Stop(StoppingCriteria):
    """Does something after each token, and goes on."""

    def __init__(self, act: Any) -> None:
        self._act = act

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self._act()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_pages_are_named_by_the_tokens_that_the_model_was_given(cached: PromptCache) -> None:
    asked(cached, logits_processor=LogitsProcessorList([_Rewrite()]))
    check_store_is_right(cached)
    rewritten = PROMPT.clone()
    rewritten[:, ::3] = 40
    assert asked(cached, rewritten) == plain(cached._model, rewritten)
    assert cached.last is not None and cached.last.pages == 0


def test_nothing_is_stored_where_the_model_changes_while_it_generates(
    cached: PromptCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cached._model
    weight = model.model.layers[0].self_attn.k_proj.weight
    kept = weight.detach().clone()

    def change() -> None:
        with torch.no_grad():
            weight.mul_(1.5)

    answer = asked(cached, max_new_tokens=12, stopping_criteria=StoppingCriteriaList([_Stop(change)]))
    with torch.no_grad():
        weight.copy_(kept)
    assert asked(cached, torch.tensor(answer)) == plain(model, torch.tensor(answer))
    assert cached.last is not None and cached.last.pages == 0


def test_nothing_is_stored_where_autocast_is_switched_on_while_it_generates(cached: PromptCache) -> None:
    on = torch.autocast("cpu", dtype=torch.bfloat16)
    entered = []

    def switch() -> None:
        if not entered:
            entered.append(on.__enter__())

    try:
        answer = asked(cached, max_new_tokens=12, stopping_criteria=StoppingCriteriaList([_Stop(switch)]))
    finally:
        on.__exit__(None, None, None)
    assert asked(cached, torch.tensor(answer)) == plain(cached._model, torch.tensor(answer))
    assert cached.last is not None and cached.last.pages == 0
