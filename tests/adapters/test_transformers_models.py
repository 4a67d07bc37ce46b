"""Models that are changed after they were given to ``prefix_cache``: other pages, or a refusal, and no wrong tokens."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import kvstore
from engine.compute.presets import PRESETS, build
from kvstore.adapters.transformers import PromptCache, prefix_cache
from kvstore.errors import InvalidRequest

PAGE, NEW, PROMPT = 16, 8, torch.arange(3, 76)[None]
FULL = PROMPT.shape[1] // PAGE

torch.set_num_threads(1)  # tests share two cores


@pytest.fixture
def store() -> Iterator[kvstore.Store]:
    with kvstore.open() as made:
        yield made


@pytest.fixture
def cached(store: kvstore.Store) -> PromptCache:
    """Over a model of this test's own, with one prompt stored."""
    made = prefix_cache(build("tiny-llama", 0).eval(), store, page_tokens=PAGE)
    assert asked(made) == plain(made._model) and asked(made) == plain(made._model) and pages_found(made) == FULL
    return made


def plain(model: Any) -> list[int]:
    answer: torch.Tensor = model.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    return list(answer[0].tolist())


def asked(cached: PromptCache) -> list[int]:
    answer: torch.Tensor = cached.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    return list(answer[0].tolist())


def pages_found(cached: PromptCache) -> int:
    assert cached.last is not None
    return cached.last.pages


def other_weight(weight: torch.Tensor, seed: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) / 8)


# --- changed weights have other pages ---------------------------------------------------------------------------------


def test_weights_that_are_replaced_again_and_again_have_pages_of_their_own(cached: PromptCache) -> None:
    """Their addresses may be used again, at version 0."""
    projection = cached._model.model.layers[0].self_attn.k_proj
    for seed in range(12):
        projection.weight = other_weight(projection.weight, 2 * seed)
        projection.weight = other_weight(projection.weight, 2 * seed + 1)
        assert asked(cached) == plain(cached._model), seed
        assert pages_found(cached) == 0


def written(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)


def written_uncounted(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.weight.data += 0.1


def pointed_elsewhere(model: Any) -> None:
    weight = model.model.layers[0].self_attn.v_proj.weight
    weight.data = weight.data.clone() * 1.5


def buffer_changed(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.7)


def buffer_replaced(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.7


def module_replaced(model: Any) -> None:
    torch.manual_seed(3)
    model.model.layers[0].mlp.up_proj = nn.Linear(
        *model.model.layers[0].mlp.up_proj.weight.shape[::-1], bias=False
    ).eval()


def layers_swapped(model: Any) -> None:
    layers = model.model.layers
    layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp


def layers_shared(model: Any) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


def attribute_changed(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def norm_changed(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


def activation_replaced(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU().eval()


def other_type(model: Any) -> None:
    model.to(torch.bfloat16)


def other_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


CHANGES: list[Callable[[Any], None]] = [
    written,
    written_uncounted,
    pointed_elsewhere,
    buffer_changed,
    buffer_replaced,
    module_replaced,
    layers_swapped,
    layers_shared,
    attribute_changed,
    norm_changed,
    activation_replaced,
    other_type,
    other_attention,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_was_changed_has_pages_of_its_own(
    store: kvstore.Store, cached: PromptCache, change: Callable[[Any], None]
) -> None:
    """In the process that changed it, and in one that made it so from the start."""
    change(cached._model)
    assert asked(cached) == plain(cached._model) and pages_found(cached) == 0
    assert asked(cached) == plain(cached._model) and pages_found(cached) == FULL
    fresh = prefix_cache(build("tiny-llama", 0).eval(), store, page_tokens=PAGE)
    assert asked(fresh) == plain(fresh._model) and pages_found(fresh) == FULL


def test_a_model_that_is_as_it_was_finds_its_pages_again(cached: PromptCache) -> None:
    weight = cached._model.model.layers[0].self_attn.v_proj.weight
    kept = weight.detach().clone()
    written(cached._model)
    asked(cached)
    with torch.no_grad():
        weight.copy_(kept)
    assert asked(cached) == plain(cached._model) and pages_found(cached) == FULL


def test_models_that_share_other_layers_have_other_pages(store: kvstore.Store) -> None:
    """Layer 2 has the weights of layer 0 or of layer 1: the same tensors remain under the same names."""
    answers = []
    for source in (0, 1):
        config = AutoConfig.for_model("llama", **PRESETS["tiny-llama"].config)
        torch.manual_seed(4)
        model = AutoModelForCausalLM.from_config(config).eval()
        model.model.layers[2].mlp = model.model.layers[source].mlp
        cached = prefix_cache(model, store, page_tokens=PAGE)
        assert asked(cached) == plain(model) and pages_found(cached) == 0
        answers.append(cached.layout.weights_digest)
    assert len(set(answers)) == 2


def test_other_precision_of_products_has_other_pages(cached: PromptCache) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert asked(cached) == plain(cached._model) and pages_found(cached) == 0
    finally:
        torch.set_float32_matmul_precision(before)
    assert asked(cached) == plain(cached._model) and pages_found(cached) == FULL


def test_a_model_that_was_saved_and_loaded_finds_the_pages(
    store: kvstore.Store, cached: PromptCache, tmp_path: Path
) -> None:
    cached._model.save_pretrained(tmp_path / "other-name")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "other-name").eval()
    again = prefix_cache(loaded, store, page_tokens=PAGE)
    assert again.layout.weights_digest == cached.layout.weights_digest
    assert again.layout.model == "other-name", "the name is a part of the layout"


def test_hidden_states_that_were_asked_for_leave_hooks_that_are_served(cached: PromptCache) -> None:
    cached._model(PROMPT, output_hidden_states=True, output_attentions=True)
    assert any(module._forward_hooks for module in cached._model.modules())
    assert asked(cached) == plain(cached._model) and pages_found(cached) == FULL


def test_a_copy_of_the_model_finds_the_pages(store: kvstore.Store, cached: PromptCache) -> None:
    copied = prefix_cache(copy.deepcopy(cached._model), store, page_tokens=PAGE)
    assert asked(copied) == plain(cached._model) and pages_found(copied) == FULL


# --- what is refused --------------------------------------------------------------------------------------------------


class Switchable(nn.Module):
    """As PEFT's layers are: a weight, and a switch for what is added to it."""

    def __init__(self, base: nn.Linear, said: bool = True) -> None:
        super().__init__()
        self.base, self.added, self.on = base, nn.Linear(base.in_features, base.out_features), True
        if said:
            self.disable_adapters = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + (self.added(hidden) if self.on else 0)


def injected(model: Any, said: bool = True) -> None:
    attention = model.model.layers[0].self_attn
    attention.k_proj = Switchable(attention.k_proj, said).eval()


def injected_silently(model: Any) -> None:
    injected(model, said=False)


def hooked(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 2)


def hooked_before(model: Any) -> None:
    model.model.embed_tokens.register_forward_pre_hook(lambda module, args: (args[0] * 0 + 3,))


def forward_replaced(model: Any) -> None:
    old = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: old(hidden) * 2


def generate_replaced(model: Any) -> None:
    model.generate = lambda *args, **call: PROMPT


def sampling_replaced(model: Any) -> None:
    model._sample = lambda *args, **call: PROMPT


def trained(model: Any) -> None:
    model.model.layers[1].train()


def compiled(model: Any) -> None:
    model.model.layers[0].mlp.compile()


def parametrised(model: Any) -> None:
    nn.utils.parametrize.register_parametrization(model.model.layers[0].self_attn.k_proj, "weight", Doubled().eval())
    model.eval()


class Doubled(nn.Module):
    """A parametrisation."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def windowed(model: Any) -> None:
    model.config.layer_types = ["sliding_attention"] * model.config.num_hidden_layers
    model.config.sliding_window = 8


def turned_by_length(model: Any) -> None:
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic", "factor": 2.0}


def adapters_loaded(model: Any) -> None:
    model._hf_peft_config_loaded = True


def quantised(model: Any) -> None:
    model.config.quantization_config = {"quant_method": "something"}


def quantised_at_runtime(model: Any) -> None:
    torch.ao.quantization.quantize_dynamic(model.model.layers[0].mlp, {nn.Linear}, inplace=True)


def in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        model.model.norm.weight = nn.Parameter(torch.ones_like(model.model.norm.weight), requires_grad=False)


def on_meta(model: Any) -> None:
    model.model.norm.to("meta")


REFUSALS: list[tuple[Callable[[Any], None], str]] = [
    (injected, "an unknown module|switchable adapters"),
    (injected_silently, "an unknown module"),
    (hooked, "has forward hooks"),
    (hooked_before, "has forward hooks"),
    (forward_replaced, "method that was replaced .*forward"),
    (generate_replaced, "method that was replaced .*generate"),
    (sampling_replaced, "method that was replaced .*_sample"),
    (trained, "training mode"),
    (compiled, "is compiled"),
    (parametrised, "an unknown module"),
    (windowed, "does not keep the keys and values of all tokens"),
    (turned_by_length, "by the length of the prompt"),
    (adapters_loaded, "switchable adapters"),
    (quantised, "has quantised weights"),
    (quantised_at_runtime, "an unknown module"),
    (in_inference_mode, "created in inference mode"),
    (on_meta, "not in memory"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("change", "reason"), REFUSALS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_model_that_became_another_is_refused_at_the_next_call(
    store: kvstore.Store, cached: PromptCache, change: Callable[[Any], None], reason: str
) -> None:
    change(cached._model)
    for again in (lambda: asked(cached), lambda: prefix_cache(cached._model, store, page_tokens=PAGE)):
        with pytest.raises(InvalidRequest, match=reason) as refused:
            again()
        assert refused.value.field == "model"


def test_autocast_is_refused(store: kvstore.Store, cached: PromptCache) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for again in (lambda: asked(cached), lambda: prefix_cache(cached._model, store)):
            with pytest.raises(InvalidRequest, match="autocast: must be off.*cpu"):
                again()
    assert asked(cached) == plain(cached._model) and pages_found(cached) == FULL


def test_a_method_that_was_replaced_for_a_whole_class_is_refused(
    cached: PromptCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a wrapper that takes the name of what it wraps."""
    kind = type(cached._model.model.layers[0].mlp)
    wrapped = kind.forward
    monkeypatch.setattr(kind, "forward", functools.wraps(wrapped)(lambda self, hidden: wrapped(self, hidden) * 2))
    with pytest.raises(InvalidRequest, match="method that was replaced .*forward of"):
        asked(cached)
    monkeypatch.undo()
    assert asked(cached) == plain(cached._model) and pages_found(cached) == FULL


def test_hooks_of_all_modules_are_refused(cached: PromptCache) -> None:
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        with pytest.raises(InvalidRequest, match="hooks of all modules"):
            asked(cached)
    finally:
        hook.remove()


def test_attention_of_others_is_refused(cached: PromptCache) -> None:
    AttentionInterface.register("of-others", lambda *args, **inputs: None)
    try:
        cached._model.set_attn_implementation("of-others")
        with pytest.raises(InvalidRequest, match="not transformers' own"):
            asked(cached)
    finally:
        del AttentionInterface._global_mapping["of-others"]
    assert "of-others" not in ALL_ATTENTION_FUNCTIONS
