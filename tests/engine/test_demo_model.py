"""The demo's model: what is committed is what its recipe tells of, and a recipe gives the same weights again."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.demo import train
from engine.demo.corpus import ROOT
from engine.demo.train import FOLDER, Recipe, batches, make_tokenizer

TEXTS = {
    "README.md": "# A store\nIt keeps pages. A page is immutable.\n\n## Lease\nA lease keeps a page for a while.\n",
    "docs/a.md": "# Tiers\n| tier | what |\n|---|---|\n| `dram` | memory of the machine |\n| `nvme` | a disk |\n",
}
SMALL = Recipe(steps=4, vocabulary=300, hidden=16, layers=1, heads=2, kv_heads=1, inner=32, windows=2, window_tokens=24)


def written() -> dict[str, Any]:
    """The recipe beside the weights."""
    found: dict[str, Any] = json.loads((FOLDER / "recipe.json").read_text())
    return found


def test_the_weights_are_those_of_the_recipe() -> None:
    told = written()
    weights = (FOLDER / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == told["weights_sha256"] and len(weights) < 8 << 20
    assert (FOLDER / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    config = json.loads((FOLDER / "config.json").read_text())
    recipe = Recipe(**told["recipe"])  # it still has all fields, and none else
    shape = config["hidden_size"], config["num_hidden_layers"], config["num_key_value_heads"]
    assert shape == (recipe.hidden, recipe.layers, recipe.kv_heads)
    assert "README.md" in told["documents"] and told["versions"].keys() == {"torch", "transformers", "tokenizers"}


def test_a_recipe_gives_the_same_weights_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, from the same documents; others from another seed."""
    monkeypatch.setattr(train, "documents", lambda: TEXTS)
    threads = torch.get_num_threads()
    try:
        made = [
            train.train(tmp_path / name, recipe, lambda line: None)
            for name, recipe in (("one", SMALL), ("two", SMALL), ("other", Recipe(**{**vars(SMALL), "seed": 2})))
        ]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    one, two, other = made
    assert one == two and one["documents"].keys() == TEXTS.keys()
    assert other["weights_sha256"] != one["weights_sha256"]
    for name in ("one", "two"):
        told = hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest()
        assert told == one["weights_sha256"]
    assert (tmp_path / "one" / "tokenizer.json").read_bytes() == (tmp_path / "two" / "tokenizer.json").read_bytes()


def test_windows_are_of_the_lengths_that_the_recipe_says() -> None:
    tokenizer = make_tokenizer(TEXTS, SMALL)
    found = list(batches(TEXTS, tokenizer, SMALL, random.Random(1)))
    *short, long = found
    assert len(found) == SMALL.steps and {len(windows) for windows in short} == {SMALL.windows}
    assert {len(window) for windows in short for window in windows} == {SMALL.window_tokens + 1}
    assert len(long) == SMALL.long_windows and len(long[0]) > SMALL.window_tokens + 1
    assert found == list(batches(TEXTS, tokenizer, SMALL, random.Random(1)))
