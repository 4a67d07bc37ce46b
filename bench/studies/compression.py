"""Rows about lossy replicas: how fast pages are packed and unpacked, what is saved, and what it does to logits.

The error is measured as an engine would meet it: a prompt is prefilled, its full pages go through a codec, and what
follows is computed over both, the exact pages and the lossy ones, from the same tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.compute.models import Model, load_model
from engine.compute.paged_cache import Batch, Slice
from engine.compute.presets import PRESETS
from engine.compute.probe import probe
from engine.compute.runner import Runner
from engine.memory.arena import Arena
from engine.memory.compression import EXACT_DTYPES, Codec, decode, encode, lossy_layout
from kvstore.bench.content import LAYOUTS
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, alternate, result, speeds
from kvstore.bench.stage import MIB, Stage
from kvstore.model import layout as layout_module
from kvstore.model import prefix as prefix_module
from kvstore.model.layout import Layout

BATCH_PAGES = 16
WALK_BYTES, WALK_BYTES_QUICK = 512 * MIB, 64 * MIB  # of exact pages: far more than caches hold
STEPS = 48  # per round
SEED = 11
MODELS = ("small-llama", "small-qwen3", "small-mla")
MODELS_QUICK = ("tiny-llama", "tiny-qwen3", "tiny-mla")
PROMPT_TOKENS, POSITIONS, PAGE_TOKENS = 1024, 64, 64
CHUNK_TOKENS = 512
LEARNING_RATE = 2e-3
TRAINED_STEPS, TRAINED_STEPS_QUICK = 300, 2
# In addition to the codecs: the pages rounded to bfloat16, an error that every server takes without a thought.
YARDSTICK = "bfloat16"
KINDS = (*(str(codec) for codec in Codec), YARDSTICK)


# --- Speed and bytes -----------------------------------------------------------------------------------------------


class Packing:
    """Batches of exact pages, what a codec makes of them, and room for a copy and for what comes back."""

    def __init__(self, layout: Layout, codec: str, walk_bytes: int) -> None:
        self.layout, self.codec = layout, codec
        self.lossy = lossy_layout(layout, codec)
        batches = max(2, walk_bytes // (BATCH_PAGES * layout.page_bytes))
        shape = (batches, BATCH_PAGES, layout.page_bytes)
        dtype = EXACT_DTYPES[layout.dtype]
        one = torch.randn(shape[1] * shape[2] // dtype.itemsize, generator=torch.Generator().manual_seed(SEED)).to(
            dtype
        )
        self.source = one.view(torch.uint8).view(1, *shape[1:]).repeat(batches, 1, 1)
        self.target = torch.zeros(shape, dtype=torch.uint8)
        self.packed = torch.zeros((*shape[:2], self.lossy.page_bytes), dtype=torch.uint8)

    def prepare(self, step: int) -> int:
        """Which batch is next."""
        return step % len(self.source)

    def memcpy(self, batch: int) -> None:
        """Limit: the exact bytes, copied."""
        self.target[batch].copy_(self.source[batch])

    def encode(self, batch: int) -> None:
        """Exact to lossy."""
        encode(self.source[batch], self.layout, self.codec, self.packed[batch])

    def decode(self, batch: int) -> None:
        """Lossy to exact."""
        decode(self.packed[batch], self.layout, self.codec, self.target[batch])

    def verify(self) -> None:
        """Raises BenchFailed where a batch came back further off than one part in eight of a vector's largest."""
        dtype = EXACT_DTYPES[self.layout.dtype]
        for batch in range(len(self.source)):
            self.decode(batch)
            want, got = (side[batch].view(dtype).float() for side in (self.source, self.target))
            if not bool(((want - got).abs() <= want.abs().amax() / 8).all()):
                raise BenchFailed(f"{self.codec}: batch {batch} came back wrong")


def speed(stage: Stage, name: str, bar: Bar | None, codec: str, dtype: str) -> list[Result]:
    """Packing and unpacking 2 MiB pages with one thread / memcpy of the exact bytes; and the bytes of a page."""
    quick = stage.settings.quick
    layout = Layout(**{**asdict(LAYOUTS["2m"]), "dtype": dtype})
    packing = Packing(layout, codec, WALK_BYTES_QUICK if quick else WALK_BYTES)
    variants = {"memcpy": packing.memcpy, "encode": packing.encode, "decode": packing.decode}
    with one_thread():
        for batch in range(len(packing.source)):
            packing.encode(batch)
        steps = range(6 if quick else STEPS)
        seconds = alternate(variants, steps, stage.settings.rounds, packing.prepare, lambda variant, value: None)
        packing.verify()
    step_bytes = BATCH_PAGES * layout.page_bytes
    limit = speeds(seconds["memcpy"], step_bytes)
    lines = [
        result(
            f"{name}.{variant}",
            Kind.SPEED,
            speeds(seconds[variant], step_bytes),
            limit,
            bar=bar,
            limit_is="memcpy of the exact bytes, one thread",
            details={"page_bytes": layout.page_bytes, "dtype": dtype},
        )
        for variant in ("encode", "decode")
    ]
    return [*lines, _saved(f"{name}.bytes", layout, packing.lossy, {})]


def _saved(name: str, exact: Layout, lossy: Layout, details: dict[str, Any]) -> Result:
    about = "bytes of an exact page"
    return result(name, Kind.COUNT, [lossy.page_bytes], [exact.page_bytes], limit_is=about, details=details)


# --- Logits --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogitError:
    """How far logits computed over lossy pages are from those over exact ones, at ``positions`` positions of a text.

    Attributes:
        std: of the exact logits of a position, mean over positions: what the errors are to be compared with.
        kl_mean, kl_max: Kullback-Leibler divergence of the lossy from the exact distribution of a position, nats.
        argmax_same: positions whose most likely token is the same.
        greedy_same: tokens that two greedy answers have in common from the start, of ``positions`` generated.
    """

    model: str
    codec: str
    positions: int
    std: float
    max_abs: float
    mean_abs: float
    kl_mean: float
    kl_max: float
    argmax_same: int
    greedy_same: int


def there_and_back(pages: torch.Tensor, layout: Layout, codec: str) -> torch.Tensor:
    """What comes back of ``pages [n, *layout.shape]``."""
    if codec == YARDSTICK:
        return pages.bfloat16().to(pages.dtype)
    back: torch.Tensor = decode(encode(pages, layout, codec), layout, codec)
    return back.view(pages.dtype).view(pages.shape)


def packed_layout(layout: Layout, codec: str) -> Layout:
    """Layout of pages that went through a codec or the yardstick."""
    return replace(layout, dtype=codec) if codec == YARDSTICK else lossy_layout(layout, codec)


class Continued:
    """One prompt in several sequences: the first exact, each other with the full pages gone through a codec."""

    def __init__(self, model: Model, tokens: Sequence[int], positions: int, codecs: Sequence[str]) -> None:
        self.layout = model.layout(PAGE_TOKENS)
        self.positions = positions
        self.prompt = len(tokens) - positions
        assert self.prompt % PAGE_TOKENS == 0, "all pages of the prompt are full"
        self.tokens = np.asarray(tokens, np.int64)
        pages = -(-len(tokens) // PAGE_TOKENS)
        self.arena = Arena(self.layout, pages * (1 + len(codecs)), model.geometry.k_dim)
        self.runner = Runner(model, self.arena)
        self.frames = [self._take(pages) for _ in range(1 + len(codecs))]
        exact = self.frames[0]
        for start in range(0, self.prompt, CHUNK_TOKENS):
            self._forward([Slice(exact, start, self.tokens[start : min(start + CHUNK_TOKENS, self.prompt)])])
        full = self.prompt // PAGE_TOKENS
        for codec, frames in zip(codecs, self.frames[1:], strict=True):
            self.arena.pages[frames[:full]] = there_and_back(self.arena.pages[exact[:full]], self.layout, codec)

    def logits(self, sequence: int) -> torch.Tensor:
        """``[positions, vocab]`` after each token of the text that follows the prompt."""
        frames = self.frames[sequence]
        at = range(self.prompt, self.prompt + self.positions)
        return self._forward([Slice(frames, i, self.tokens[i : i + 1]) for i in at])

    def greedy(self) -> list[list[int]]:
        """``positions`` tokens that each sequence answers, from the first token after the prompt on."""
        answers: list[list[int]] = [[] for _ in self.frames]
        last = [int(self.tokens[self.prompt])] * len(self.frames)
        for i in range(self.positions):
            slices = [
                Slice(frames, self.prompt + i, np.array([token], np.int64))
                for frames, token in zip(self.frames, last, strict=True)
            ]
            last = self._forward(slices).argmax(-1).tolist()
            for answer, token in zip(answers, last, strict=True):
                answer.append(token)
        return answers

    def _forward(self, slices: list[Slice]) -> torch.Tensor:
        return self.runner.forward(Batch(self.arena, slices))

    def _take(self, pages: int) -> torch.Tensor:
        frames = self.arena.take(pages)
        assert frames is not None, "the arena was made for this number"
        return frames


def logit_errors(
    model: Model,
    codecs: Sequence[str] = KINDS,
    prompt_tokens: int = PROMPT_TOKENS,
    positions: int = POSITIONS,
) -> list[LogitError]:
    """One per codec: a prompt of ``prompt_tokens``, whole pages of them, and ``positions`` tokens after it.

    Raises:
        InvalidRequest: ``compression``: no such codec, or the model's pages do not permit it.
    """
    text = _text(model, prompt_tokens + positions)
    both = Continued(model, text, positions, codecs)
    answers = both.greedy()
    exact = both.logits(0).double()
    found = []
    for number, codec in enumerate(codecs, start=1):
        lossy = both.logits(number).double()
        error = (lossy - exact).abs()
        p, q = exact.log_softmax(-1), lossy.log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1)
        same = [a == b for a, b in zip(answers[0], answers[number], strict=True)]
        found.append(
            LogitError(
                model=model.name,
                codec=str(codec),
                positions=positions,
                std=exact.std(-1).mean().item(),
                max_abs=error.max().item(),
                mean_abs=error.mean().item(),
                kl_mean=kl.mean().item(),
                kl_max=kl.max().item(),
                argmax_same=int((exact.argmax(-1) == lossy.argmax(-1)).sum()),
                greedy_same=[*same, False].index(False),
            )
        )
    return found


def _text(model: Model, tokens: int) -> list[int]:
    """Return ``tokens`` token ids of English prose and code: two modules of the store."""
    text = inspect.getsource(layout_module) + inspect.getsource(prefix_module)
    ids = list(model.tokenizer.encode(text))[:tokens]
    if len(ids) < tokens:
        raise BenchFailed(f"the text has {len(ids)} tokens, {tokens} are needed")
    return ids


def logits(stage: Stage, name: str, bar: Bar | None, number: int) -> list[Result]:
    """Bytes of a page of ``MODELS[number]``, lossy / exact, a line per codec; the error of logits is in the details."""
    quick = stage.settings.quick
    model = load_model((MODELS_QUICK if quick else MODELS)[number])
    layout = model.layout(PAGE_TOKENS)
    with one_thread():
        found = logit_errors(model, prompt_tokens=256 if quick else PROMPT_TOKENS, positions=16 if quick else POSITIONS)
    return [_saved(f"{name}.{one.codec}", layout, packed_layout(layout, one.codec), asdict(one)) for one in found]


def trained(steps: int, length: int = PROMPT_TOKENS + POSITIONS) -> Model:
    """A byte-level Llama of 2 M parameters that learnt ``steps`` times two ``length`` tokens of Python's own library.

    Random weights attend to what happens to lie in their way; these show the error where attention means something.
    """
    base = load_model("tiny-llama")
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    torch.manual_seed(SEED)
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{**PRESETS["tiny-llama"].config, **sizes}))
    files = sorted(Path(inspect.getfile(inspect)).parent.glob("*.py"))
    corpus = base.tokenizer.encode("\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files))
    text = torch.from_numpy(np.asarray(corpus, np.int64))
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps + 1, pct_start=0.1)
    for step in range(steps):
        starts = torch.randint(0, len(text) - length, (2,))
        batch = torch.stack([text[start : start + length] for start in starts.tolist()])
        loss = net(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            click.echo(f"trained {step + 1} of {steps} steps, loss {loss.item():.2f} nats per byte", err=True)
    net.eval().requires_grad_(False)
    return replace(base, name=f"trained-{steps}", net=net, geometry=probe(net))


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes with the calling thread alone, as an engine with one core does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def learnt(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """``logits`` of a model that is trained here."""
    with one_thread():
        model = trained(TRAINED_STEPS_QUICK if stage.settings.quick else TRAINED_STEPS)
        found = logit_errors(model, prompt_tokens=192 if stage.settings.quick else PROMPT_TOKENS)
    layout = model.layout(PAGE_TOKENS)
    return [_saved(f"{name}.{one.codec}", layout, packed_layout(layout, one.codec), asdict(one)) for one in found]
