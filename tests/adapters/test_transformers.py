"""``prefix_cache`` around ``generate``: the tokens of plain ``generate``, and how much of a prompt was loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import kvstore
from engine.compute.presets import build
from kvstore.adapters.transformers import PromptCache, prefix_cache
from kvstore.errors import InvalidRequest
from tests.helpers.nursery import ROOT
from tests.helpers.processes import Machine, wait_until

PAGE, NEW, PROMPT = 16, 20, 100
FULL = PROMPT // PAGE
PRESETS = ("tiny-llama", "tiny-qwen3", "tiny-mla")

torch.set_num_threads(1)  # tests share two cores

ANOTHER_PROCESS = """
import json, sys, torch, kvstore
from engine.compute.presets import build
from kvstore.adapters.transformers import prefix_cache
torch.set_num_threads(1)
preset, node, tokens = json.loads(sys.argv[1])
with kvstore.connect(node) as store:
    cached = prefix_cache(build(preset, 0).eval(), store, page_tokens=16)
    found = cached.generate(torch.tensor([tokens]), max_new_tokens=20, do_sample=False)
    print(json.dumps([cached.last.pages, found[0].tolist()]))
"""


@cache
def model_of(preset: str) -> Any:
    """Random weights, the same in every process. Nobody changes this one."""
    return build(preset, 0).eval()


def prompt(seed: int, tokens: int = PROMPT) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (1, tokens)))


def plain(preset: str, tokens: torch.Tensor) -> list[int]:
    """What the model answers without a store, prompt and answer."""
    answer: torch.Tensor = model_of(preset).generate(tokens, max_new_tokens=NEW, do_sample=False)
    return list(answer[0].tolist())


def asked(cached: PromptCache, tokens: torch.Tensor) -> list[int]:
    answer: torch.Tensor = cached.generate(tokens, max_new_tokens=NEW, do_sample=False)
    return list(answer[0].tolist())


def pages_found(cached: PromptCache) -> int:
    assert cached.last is not None
    return cached.last.pages


def over(store: kvstore.Store, preset: str = "tiny-llama") -> PromptCache:
    return prefix_cache(model_of(preset), store, page_tokens=PAGE)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_repeated_prompt_is_loaded_and_its_answer_is_the_same(machine: Machine, preset: str) -> None:
    machine.serve("n")
    cached = over(machine.connect("n"), preset)
    want = plain(preset, prompt(1))
    assert asked(cached, prompt(1)) == want and pages_found(cached) == 0
    assert asked(cached, prompt(1)) == want and pages_found(cached) == FULL
    # A chat goes on: the answer's pages are found, too. And only a prefix is, where another prompt begins alike.
    chat = torch.cat([torch.tensor([want]), prompt(2, 9)], dim=1)
    assert asked(cached, chat) == plain(preset, chat) and pages_found(cached) == (len(want) - 1) // PAGE
    other = torch.cat([prompt(1)[:, : 2 * PAGE + 3], prompt(3)], dim=1)
    assert asked(cached, other) == plain(preset, other) and pages_found(cached) == 2


def test_the_last_token_is_computed_also_where_all_are_stored(machine: Machine) -> None:
    machine.serve("n")
    cached = over(machine.connect("n"))
    whole = prompt(1, 4 * PAGE)
    assert asked(cached, whole) == asked(cached, whole) == plain("tiny-llama", whole)
    assert pages_found(cached) == 3


def test_another_process_finds_it_and_other_weights_or_salts_do_not(machine: Machine) -> None:
    machine.serve("n")
    store = machine.connect("n")
    want = asked(over(store, "tiny-qwen3"), prompt(1))
    arguments = json.dumps(["tiny-qwen3", "n", prompt(1)[0].tolist()])
    command = [sys.executable, "-c", ANOTHER_PROCESS, arguments]
    said = subprocess.run(command, env=machine.env(), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout) == [FULL, want]

    salted = prefix_cache(model_of("tiny-qwen3"), store, page_tokens=PAGE, salt="other")
    assert asked(salted, prompt(1)) == want and pages_found(salted) == 0
    changed = build("tiny-qwen3", 0).eval()
    cached = prefix_cache(changed, store, page_tokens=PAGE)
    asked(cached, prompt(1))
    assert pages_found(cached) == FULL
    with torch.no_grad():
        changed.model.layers[0].self_attn.v_proj.weight[0, 0] += 1
    asked(cached, prompt(1))
    assert pages_found(cached) == 0, "a trained model has other pages"


def test_a_zeroed_page_is_found_and_computed_again(machine: Machine) -> None:
    config = machine.logs / "node.toml"
    config.write_text("[node]\nverify_reads = true\n")
    machine.serve("n", dram="64MiB", config=str(config))
    store = machine.connect("n")
    cached = over(store)
    want = asked(cached, prompt(1))

    def stamped() -> bool:
        stats = store.stats()
        return bool(stats["scrubber"]["pages_stamped"] >= stats["tiers"]["dram"]["pages"] > 0)

    wait_until("all pages have checksums", stamped)
    pages = stored_pages(cached, prompt(1))
    overwrite(machine.folder("n") / "segment", pages[2].tobytes())
    assert asked(cached, prompt(1)) == want
    assert pages_found(cached) == 2


def test_the_judge_sees_a_wrong_page() -> None:
    """A page of zeros that is stored as if it were right changes the answer: the tests above can fail."""
    with kvstore.open() as right, kvstore.open() as wrong:
        first = over(right)
        want = asked(first, prompt(1))
        pages = stored_pages(first, prompt(1))
        pages[2] = 0
        second = over(wrong)
        wrong.cache(second.layout).put(prompt(1)[0, : FULL * PAGE], pages)
        assert asked(second, prompt(1)) != want and pages_found(second) == FULL


def test_a_killed_node_costs_computation(machine: Machine) -> None:
    daemon = machine.serve("n")
    cached = over(machine.connect("n", timeout_s=1.0))
    want = asked(cached, prompt(1))
    daemon.kill()
    assert asked(cached, prompt(1)) == want, "reads go on"
    assert asked(cached, prompt(2)) == plain("tiny-llama", prompt(2))
    machine.serve("n")
    assert asked(cached, prompt(1)) == want and pages_found(cached) == FULL


def test_a_node_elsewhere_that_is_gone_costs_computation(machine: Machine) -> None:
    daemon = machine.serve("n", dram="64MiB", listen=f"unix:{machine.logs / 'api.sock'}")
    with kvstore.connect(f"kv+unix://{machine.logs / 'api.sock'}", 2.0) as store:
        cached = over(store)
        want = asked(cached, prompt(1))
        assert asked(cached, prompt(1)) == want and pages_found(cached) == FULL
        daemon.kill()
        assert asked(cached, prompt(1)) == want and cached.last is None


def stored_pages(cached: PromptCache, tokens: torch.Tensor) -> Any:
    data = cached._cache.get(tokens[0]).data
    assert data is not None and len(data) == FULL
    return data.copy()


def overwrite(file: Path, old: bytes) -> None:
    """Zero what ``file`` has of these bytes, in place."""
    place = file.read_bytes().find(old)
    assert place >= 0
    with file.open("r+b", buffering=0) as segment:
        segment.seek(place)
        segment.write(bytes(len(old)))


# --- what is refused --------------------------------------------------------------------------------------------------


def small(family: str, kind: Any = AutoModelForCausalLM, **config: Any) -> Any:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 64}
    return kind.from_config(AutoConfig.for_model(family, **sizes, **config)).eval()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: model_of("tiny-mistral"), "does not keep the keys and values of all tokens"),
        (lambda: model_of("tiny-gemma2"), "does not keep the keys and values of all tokens"),
        (lambda: small("mamba"), "does not keep|no keys and values"),
        (lambda: small("t5", AutoModelForSeq2SeqLM, num_layers=1, d_model=32, d_kv=16, d_ff=32), "has an encoder"),
        (
            lambda: small(
                "llama",
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                intermediate_size=32,
            ),
            "by the length of the prompt",
        ),
        (lambda: build("tiny-llama", 0).train(), "training mode"),
        (lambda: torch.nn.Linear(2, 2), "must be a transformers model"),
    ],
)
def test_models_that_are_refused(make: Any, reason: str) -> None:
    with kvstore.open() as store, pytest.raises(InvalidRequest, match=reason) as refused:
        prefix_cache(make(), store)
    assert refused.value.field == "model"


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("input_ids", {"input_ids": torch.zeros(2, 8, dtype=torch.int64)}),
        ("input_ids", {"input_ids": torch.zeros(8, dtype=torch.int64)}),
        ("attention_mask", {"attention_mask": torch.tensor([[0] + 7 * [1]])}),
        ("inputs_embeds", {"inputs_embeds": torch.zeros(1, 8, 64)}),
        ("num_beams", {"num_beams": 2}),
        ("num_return_sequences", {"num_return_sequences": 2}),
        ("use_cache", {"use_cache": False}),
        ("cache_implementation", {"cache_implementation": "static"}),
        ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 3}),
    ],
)
def test_calls_that_are_refused(field: str, changes: dict[str, Any]) -> None:
    with kvstore.open() as store:
        cached = over(store)
        with pytest.raises(InvalidRequest) as refused:
            cached.generate(**{"input_ids": prompt(1, 8), **changes})
        assert refused.value.field == field
        with pytest.raises(InvalidRequest, match="page_tokens"):
            prefix_cache(model_of("tiny-llama"), store, page_tokens=0)
