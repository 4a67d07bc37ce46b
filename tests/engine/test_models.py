"""Models of engines: presets, directories, what is refused, and what a layout says of them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from engine.compute import models as engine_models
from engine.compute.models import Model, dtype_on, load_model
from engine.compute.presets import PRESETS
from engine.compute.probe import probe, refuse_kind
from engine.text.tokenizer import ByteTokenizer
from kvstore.errors import InvalidRequest

TINY = sorted(name for name in PRESETS if name.startswith("tiny-"))
TEXT = "The store keeps pages of keys and values, so that a prompt is computed once."


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny() -> Model:
    return load_model("tiny-llama")


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory) -> Path:
    """A directory as models are published in: config, one safetensors file, a tokenizer that is byte-level BPE."""
    path = tmp_path_factory.mktemp("published") / "my-llama"
    tiny.net.save_pretrained(path)
    save_tokenizer(path)
    return path


@pytest.fixture
def directory(saved, tmp_path) -> Path:
    """A copy, to be spoilt."""
    return Path(shutil.copytree(saved, tmp_path / "my-llama"))


def save_tokenizer(path: Path, vocab_size: int = 258) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(path)


def refusal(spec: object, **arguments: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        load_model(str(spec), **arguments)
    assert "\n" not in caught.value.reason
    return caught.value


def greedy(model: Model, text: str, count: int) -> list[int]:
    ids = torch.tensor([model.tokenizer.encode(text)])
    made = model.net.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return made[0, ids.shape[1] :].tolist()


# --- Presets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_preset_is_a_model_whose_answers_depend_on_the_prompt(name):
    model = load_model(name)
    assert model.name == name and model.dtype == "float32" and model.device == torch.device("cpu")
    assert model.geometry.vocab_size == ByteTokenizer.vocab_size and model.eos_ids == (ByteTokenizer.EOS,)
    assert model.context_tokens_max >= 8192
    assert not model.net.training and not any(weights.requires_grad for weights in model.net.parameters())
    one, other = greedy(model, TEXT, 48), greedy(model, TEXT.replace("store", "stare"), 48)
    assert len(set(one)) >= 12, "no answer that repeats one token"
    assert sum(a == b for a, b in zip(one, other, strict=True)) < 40


def test_a_layout_is_the_models_geometry_and_names_its_weights():
    llama, mla = load_model("tiny-llama"), load_model("tiny-mla")
    layout = llama.layout(16)
    assert (layout.model, layout.revision) == ("tiny-llama", "seed-0")
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.page_tokens) == (3, 2, 16, 16)
    assert layout.weights_digest == llama.weights_digest and layout.dtype == "float32"
    assert "rope_theta" in layout.rope
    latent = mla.layout(32)
    assert (latent.mla_latent, latent.mla_rope, latent.kv_heads, latent.head_dim) == (32, 16, 1, 0)
    with pytest.raises(InvalidRequest, match="page_tokens"):
        llama.layout(0)


def test_a_seed_gives_the_same_weights_and_another_seed_others():
    first, again, other = load_model("tiny-llama"), load_model("tiny-llama"), load_model("tiny-llama", seed=1)
    assert first.weights_digest == again.weights_digest
    head = first.net.lm_head.weight.numpy().tobytes()
    assert hashlib.sha256(head).hexdigest()[:16] == "bd5c50d8aa0438e5", "what it is on every machine"
    assert other.weights_digest != first.weights_digest
    assert other.layout(16).fingerprint != first.layout(16).fingerprint
    gpu = torch.device("cuda", 0)
    assert [dtype_on(gpu, kind) for kind in (torch.float16, torch.float32, None)] == ["float16", "bfloat16", "bfloat16"]
    assert dtype_on(torch.device("cpu"), torch.float16) == load_model("tiny-llama", dtype="auto").dtype == "float32"
    short = load_model("tiny-llama", dtype="bfloat16")
    assert short.net.dtype == torch.bfloat16 and short.layout(16).dtype == "bfloat16"
    assert short.layout(16).page_bytes * 2 == first.layout(16).page_bytes


# --- Directories -----------------------------------------------------------------------------------------------------


def test_where_a_directory_lies_does_not_matter_but_every_weight_does(saved, directory):
    before = load_model(str(saved)).layout(16)
    assert load_model(str(directory)).layout(16).fingerprint == before.fingerprint
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"][5] += 1e-3
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert load_model(str(directory)).layout(16).fingerprint != before.fingerprint


def test_a_config_that_changes_numbers_changes_the_layout(directory):
    before = load_model(str(directory)).layout(16)
    edit_config(directory, rms_norm_eps=1e-3)
    after = load_model(str(directory)).layout(16)
    assert after.weights_digest != before.weights_digest and after.rope == before.rope
    edit_config(directory, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    assert load_model(str(directory)).layout(16).rope != before.rope


def test_large_files_are_sampled_and_say_so(directory, monkeypatch):
    whole = load_model(str(directory)).weights_digest
    monkeypatch.setattr(engine_models, "WHOLE_BYTES_MAX", 1000)
    sampled = load_model(str(directory)).weights_digest
    assert sampled.startswith("sampled-") and not sampled.endswith(whole)
    assert load_model(str(directory)).weights_digest == sampled
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert load_model(str(directory)).weights_digest != sampled


# --- What is refused -------------------------------------------------------------------------------------------------


def edit_config(directory: Path, **fields: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ("config.json", "lacks config.json"),
        ("model.safetensors", "lacks model.safetensors"),
        ("tokenizer.json", "lacks a tokenizer"),
    ],
)
def test_a_directory_says_what_it_lacks(directory, lost, named):
    (directory / lost).unlink()
    error = refusal(directory)
    assert error.field == "model" and named in error.reason


def test_pickles_are_not_opened(directory):
    weights = load_file(directory / "model.safetensors")
    torch.save(weights, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    assert "pytorch_model.bin" in refusal(directory).reason


def test_an_index_names_files_beside_it_only(directory):
    (directory / "model.safetensors").rename(directory.parent / "model.safetensors")
    for name in ("../model.safetensors", "weights.bin", 3):
        index = {"weight_map": {"model.norm.weight": name}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "not a safetensors file next to it" in refusal(directory).reason
    (directory / "model.safetensors.index.json").write_text("{")
    assert "not an index" in refusal(directory).reason


def test_weights_that_are_not_there_are_not_made_up(directory):
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert "layers.1.mlp.up_proj" in refusal(directory).reason


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_spoilt_file_is_refused(directory, file):
    content = (directory / file).read_bytes()
    (directory / file).write_bytes(content[: len(content) // 2])
    assert refusal(directory).field == "model"
    (directory / file).write_bytes(b"[]")
    assert refusal(directory).field == "model"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "t5"}, "t5: has an encoder"),
        ({"model_type": "whisper"}, "whisper: has an encoder"),
        ({"model_type": "llava"}, "llava: takes vision"),
        ({"model_type": "gemma3"}, "gemma3: takes vision"),
        ({"model_type": "mamba"}, "mamba: keeps recurrent state"),
        ({"model_type": "rwkv"}, "rwkv: keeps recurrent state"),
        ({"model_type": "falcon_h1"}, "falcon_h1: keeps recurrent state"),
        ({"model_type": "qwen3_next"}, "qwen3_next: keeps recurrent state"),
        ({"model_type": "minimax"}, "linear_attention"),
        ({"model_type": "gemma3n_text"}, "share the KV"),
        ({"model_type": "llama4_text"}, "chunked_attention"),
        ({"model_type": "deepseek_v32"}, "indexed_attention"),
        ({"model_type": "vit"}, "not a causal language model"),
        ({"model_type": "no-such-family"}, "no-such-family"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised weights"),
        ({"model_type": "llama", "hidden_size": "wide"}, "hidden_size"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "length of the prompt"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_a_kind_that_is_not_handled_is_refused_by_name_before_weights_are_looked_for(tmp_path, config, named):
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = refusal(tmp_path)
    assert error.field == "model" and named in error.reason


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("family", "extra", "named"),
    [
        ("bloom", {}, "does not attend through the attention interface"),
        ("doge", {}, "mask of its own"),
        ("diffllama", {}, "more than once"),
        ("bert", {}, "later tokens"),
        ("gemma4_text", {"vocab_size_per_layer_input": 64}, "must be equal"),
        ("mimo_v2_flash", {"num_key_value_heads": 1}, "numbers must be equal"),
        ("openai-gpt", {}, "no keys and values"),
        ("stablelm", {}, "does not pass forward arguments"),
        ("jetmoe", {"num_key_value_heads": 1}, "between the cache and attention"),
    ],
)
def test_what_a_config_does_not_say_the_run_shows(family, extra, named):
    config = AutoConfig.for_model(family, **{**SIZES, **extra})
    refuse_kind(config)
    net = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(InvalidRequest, match=named):
        probe(net)


def test_attention_that_differs_from_the_formula_is_refused(tiny):
    """A model that scales its scores behind the interface's back: only its logits tell."""
    net = load_model("tiny-llama").net
    attention = net.model.layers[1].self_attn
    forward = attention.forward

    def turned(*args, **kwargs):
        hidden, weights = forward(*args, **kwargs)
        return (hidden if kwargs.get("past_key_values") is None else hidden * 1.2), weights

    attention.forward = turned
    with pytest.raises(InvalidRequest, match="not supported"):
        probe(net)
    assert probe(tiny.net) == tiny.geometry
    assert tiny.net.config._attn_implementation == "sdpa", "put back"
