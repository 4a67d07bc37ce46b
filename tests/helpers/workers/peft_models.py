"""Models that real PEFT and accelerate have changed, each given to ``prefix_cache``: a line of JSON.

By what was done: "" where the model is served and its tokens are those of plain ``generate``, or why it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import accelerate
import peft
import torch

import kvstore
from engine.compute.presets import build
from kvstore.adapters.transformers import PromptCache, prefix_cache
from kvstore.errors import InvalidRequest

PAGE, PROMPT = 16, torch.arange(3, 76)[None]
LORA = {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj"], "init_lora_weights": False}


def answer(model: Any) -> list[int]:
    """Tokens of prompt and answer."""
    tokens: torch.Tensor = model.generate(input_ids=PROMPT, max_new_tokens=8, do_sample=False)
    return list(tokens[0].tolist())


def asked(cached: PromptCache, model: Any, pages: int) -> None:
    """The tokens of plain ``generate``, with this number of pages loaded."""
    assert answer(cached) == answer(model)
    assert cached.last is not None and cached.last.pages == pages, cached.last


def lora(model: Any) -> Any:
    """As most callers do."""
    return peft.get_peft_model(model, peft.LoraConfig(**LORA)).eval()


def changed(change: Callable[[Any], Any]) -> str:
    """Before and after the change."""
    torch.manual_seed(0)
    model = build("tiny-llama", 0).eval()
    with kvstore.open() as store:
        cached = prefix_cache(model, store, page_tokens=PAGE)
        asked(cached, model, 0)
        asked(cached, model, PROMPT.shape[1] // PAGE)
        changed_model = change(model)
        try:
            asked(cached, model, 0)
            if changed_model is not model:
                asked(prefix_cache(changed_model, store, page_tokens=PAGE), changed_model, PROMPT.shape[1] // PAGE)
        except InvalidRequest as error:
            assert error.field == "model"
            return error.reason
    return ""


def added(model: Any) -> Any:
    """By the method that transformers has for it."""
    model.add_adapter(peft.LoraConfig(**LORA))
    return model.eval()


def switched_off(model: Any) -> Any:
    """With layers that add nothing for now."""
    model.add_adapter(peft.LoraConfig(**LORA))
    model.disable_adapters()
    return model.eval()


def injected(model: Any) -> Any:
    """Without a mark on the model."""
    return peft.inject_adapter_in_model(peft.LoraConfig(**LORA), model).eval()


def merged(model: Any) -> Any:
    """With layers that can be unmerged."""
    adapted = lora(model)
    adapted.merge_adapter()
    return adapted.base_model.model


def scaled(model: Any) -> Any:
    """By vectors in place of matrices."""
    config = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], init_ia3_weights=False)
    return peft.get_peft_model(model, config).eval().base_model.model


def prompted(model: Any) -> Any:
    """Layers of attention that are not PEFT's tuner layers."""
    config = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).eval().base_model


def moved(model: Any) -> Any:
    """By accelerate, as for a model on several devices."""
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)  # so that no page is found
    for layer in model.model.layers:
        accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.AlignDevicesHook(execution_device="cpu"))
    return model


CHANGES: dict[str, Callable[[Any], Any]] = {
    "the model of PEFT": lora,
    "the model below it": lambda model: lora(model).base_model.model,
    "added": added,
    "switched off": switched_off,
    "injected": injected,
    "merged": merged,
    "scaled": scaled,
    "prompted": prompted,
    "merged and unloaded": lambda model: lora(model).merge_and_unload(),
    "moved": moved,
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({what: changed(change) for what, change in CHANGES.items()}))
