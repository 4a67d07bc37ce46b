"""Trains the demo's model on this project's documents: ``python -m engine.demo.train``.

A few million parameters, in half an hour of one processor. The same documents, seed, versions and processor give the
same weights, bit for bit: one thread computes, and every chance is drawn from the seed. What is written is a model as
Hugging Face lays it out, and a recipe that says how.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from engine.demo.corpus import ROOT, documents, messages, questions

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

FOLDER: Final = Path(__file__).resolve().parent / "kvstore-docs"
END: Final = "<|end|>"
SPECIAL: Final = (END, "<|system|>", "<|user|>", "<|assistant|>")
TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NORM_MAX: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides the weights, beside the documents."""

    seed: int = 1
    steps: int = 700
    vocabulary: int = 3072
    hidden: int = 192
    layers: int = 8
    heads: int = 6
    kv_heads: int = 3
    inner: int = 512
    context_tokens: int = 8192
    # A step: so many windows of so many tokens; the last part of all steps sees longer ones.
    windows: int = 4
    window_tokens: int = 512
    long_windows: int = 2
    long_window_tokens: int = 1024
    long_part: float = 0.15
    rate: float = 0.02  # of Muon, for the matrices
    rate_rest: float = 0.004  # of AdamW, for embeddings and norms
    decay: float = 0.1
    warm_up: float = 0.03
    cool_down: float = 0.6


def make_tokenizer(texts: dict[str, str], recipe: Recipe) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the documents, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts.values(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        additional_special_tokens=list(SPECIAL[1:]),
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=recipe.context_tokens,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> PreTrainedModel:
    """A small Llama with weights from the seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.inner,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden // recipe.heads,
        max_position_embeddings=recipe.context_tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    net: PreTrainedModel = LlamaForCausalLM(config)
    return net


def streams(
    texts: dict[str, str], tokenizer: PreTrainedTokenizerFast, chance: random.Random
) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens of all documents and of all chats about them: once per turn, each time in another order and wording."""
    ids = {name: tokenizer.encode(f"{text}{END}") for name, text in texts.items()}
    while True:
        names = list(texts)
        chance.shuffle(names)
        chats = [messages(asked, texts, chance) for asked in questions(texts, chance)]
        chance.shuffle(chats)
        talk = [tokenizer.encode(str(tokenizer.apply_chat_template(chat, tokenize=False))) for chat in chats]
        yield list(itertools.chain(*(ids[name] for name in names))), list(itertools.chain(*talk))


def batches(
    texts: dict[str, str], tokenizer: PreTrainedTokenizerFast, recipe: Recipe, chance: random.Random
) -> Iterator[list[list[int]]]:
    """Windows of tokens, one more than are predicted: a quarter of them of documents, the others of chats."""
    found = streams(texts, tokenizer, chance)
    prose, talk = next(found)
    long_from = int(recipe.steps * (1 - recipe.long_part))
    seen = 0
    for step in range(recipe.steps):
        count, length = recipe.windows, recipe.window_tokens
        if step >= long_from:
            count, length = recipe.long_windows, recipe.long_window_tokens
        windows = []
        for index in range(count):
            source = prose if (step * count + index) % 4 == 0 else talk
            start = chance.randrange(max(1, len(source) - length - 1))
            windows.append(source[start : start + length + 1])
        yield windows
        seen += count * length
        if seen > len(talk):
            prose, talk = next(found)
            seen = 0


def scale(step: int, recipe: Recipe) -> float:
    """Of the learning rates: up, level, and down to nothing."""
    up = (step + 1) / max(1.0, recipe.warm_up * recipe.steps)
    down = (recipe.steps - step) / max(1.0, recipe.cool_down * recipe.steps)
    return min(1.0, up, down)


def optimizers(net: PreTrainedModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between embeddings and logits, AdamW for the rest."""
    import torch

    matrices = [weight for name, weight in net.named_parameters() if weight.dim() == 2 and "embed" not in name]
    chosen = {id(weight) for weight in matrices}
    rest = [weight for weight in net.parameters() if id(weight) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=recipe.rate, weight_decay=recipe.decay),
        torch.optim.AdamW(rest, lr=recipe.rate_rest, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def fit(net: PreTrainedModel, given: Iterator[list[list[int]]], recipe: Recipe, say: Any) -> float:
    """Teach it; the loss at the end, a mean over the last steps."""
    import torch

    kinds = optimizers(net, recipe)
    rates = [kind.param_groups[0]["lr"] for kind in kinds]
    losses: list[float] = []
    began_s = time.monotonic()
    net.train()
    for step, windows in enumerate(given):
        ids = torch.tensor(windows)
        for kind, rate in zip(kinds, rates, strict=True):
            kind.param_groups[0]["lr"] = rate * scale(step, recipe)
        logits = net(input_ids=ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), NORM_MAX)
        for kind in kinds:
            kind.step()
            kind.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0 or step + 1 == recipe.steps:
            say(f"step {step}: loss {losses[-1]:.3f}, {time.monotonic() - began_s:.0f} s")
    last = losses[-20:]
    return sum(last) / len(last)


def train(folder: Path, recipe: Recipe, say: Any) -> dict[str, Any]:
    """Train, write everything into ``folder``, and return the recipe as it was written."""
    import tokenizers
    import torch
    import transformers

    torch.set_num_threads(1)  # sums of several threads come in several orders
    torch.use_deterministic_algorithms(True)
    texts = documents()
    tokenizer = make_tokenizer(texts, recipe)
    net = make_model(tokenizer, recipe)
    say(f"{sum(weight.numel() for weight in net.parameters())} parameters")
    loss = fit(net, batches(texts, tokenizer, recipe, random.Random(recipe.seed)), recipe, say)
    folder.mkdir(parents=True, exist_ok=True)
    net.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.copy(ROOT / "LICENSE", folder / "LICENSE")
    written = {
        "made by": "python -m engine.demo.train",
        "licence": "Apache-2.0, as the documents that it learned from",
        "recipe": asdict(recipe),
        "documents": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()},
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "parameters": sum(weight.numel() for weight in net.parameters()),
        "loss": round(loss, 4),
        "weights_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
    }
    (folder / "recipe.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return written


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="The folder to write.")
@click.option("--steps", type=click.IntRange(1), default=Recipe.steps, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=Recipe.seed, show_default=True)
def main(out: Path, steps: int, seed: int) -> None:
    """Train the demo's model on this project's documents, and write it as Hugging Face lays models out."""
    written = train(out, Recipe(steps=steps, seed=seed), click.echo)
    click.echo(f"loss {written['loss']}, weights {written['weights_sha256']}")


if __name__ == "__main__":
    main()
