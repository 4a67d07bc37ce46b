"""Rows about lossy replicas: the speed of packing and unpacking, the bytes saved, and the error of logits.

The error is measured as it occurs in an engine. A prompt is prefilled, and a codec encodes and decodes its full pages.
Then the same following tokens are computed over the exact pages and over the lossy ones.
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
WALK_BYTES, WALK_BYTES_QUICK = 512 * MIB, 64 * MIB  # of exact pages: much more than the caches
STEPS = 48  # steps per round
SEED = 11
MODELS = ("small-llama", "small-qwen3", "small-mla")
MODELS_QUICK = ("tiny-llama", "tiny-qwen3", "tiny-mla")
PROMPT_TOKENS, POSITIONS, PAGE_TOKENS = 1024, 64, 64
CHUNK_TOKENS = 512
LEARNING_RATE = 2e-3
TRAINED_STEPS, TRAINED_STEPS_QUICK = 300, 2
# Compared like a codec: pages rounded to bfloat16, an error that every server accepts.
YARDSTICK = "bfloat16"
KINDS = (*(str(codec) for codec in Codec), YARDSTICK)


# --- Speed and bytes -----------------------------------------------------------------------------------------------


class Packing:
    """Batches of exact pages, their packed form, and memory for a copy or for the decoded pages."""

    def __init__(self, layout: Layout, codec: str, walk_bytes: int) -> None:
        self.layout, self.codec = layout, codec
        self.lossy = lossy_layout(layout, codec)
        batches = max(2, walk_bytes // (BATCH_PAGES * layout.page_bytes))
        shape = (batches, BATCH_PAGES, layout.page_bytes)
        dtype = EXACT_DTYPES[layout.dtype]
        batch = torch.randn(shape[1] * shape[2] // dtype.itemsize, generator=torch.Generator().manual_seed(SEED)).to(
            dtype
        )
        self.source = batch.view(torch.uint8).view(1, *shape[1:]).repeat(batches, 1, 1)
        self.target = torch.zeros(shape, dtype=torch.uint8)
        self.packed = torch.zeros((*shape[:2], self.lossy.page_bytes), dtype=torch.uint8)

    def prepare(self, step: int) -> int:
        """Return the number of the next batch."""
        return step % len(self.source)

    def memcpy(self, batch: int) -> None:
        """Copy the exact bytes: the limit."""
        self.target[batch].copy_(self.source[batch])

    def encode(self, batch: int) -> None:
        """Encode exact pages to lossy ones."""
        encode(self.source[batch], self.layout, self.codec, self.packed[batch])

    def decode(self, batch: int) -> None:
        """Decode lossy pages to exact ones."""
        decode(self.packed[batch], self.layout, self.codec, self.target[batch])

    def verify(self) -> None:
        """Raise BenchFailed if an element differs from the exact one by more than an eighth of its batch's largest
        element."""
        dtype = EXACT_DTYPES[self.layout.dtype]
        for batch in range(len(self.source)):
            self.decode(batch)
            exact, decoded = (pages[batch].view(dtype).float() for pages in (self.source, self.target))
            if not bool(((exact - decoded).abs() <= exact.abs().amax() / 8).all()):
                raise BenchFailed(f"{self.codec}: batch {batch} was decoded to wrong values")


def speed(stage: Stage, name: str, bar: Bar | None, codec: str, dtype: str) -> list[Result]:
    """Measure packing and unpacking of 2 MiB pages with one thread, compared with memcpy of the exact bytes; and the
    bytes of a packed page."""
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
    return [*lines, _bytes_result(f"{name}.bytes", layout, packing.lossy, {})]


def _bytes_result(name: str, exact: Layout, lossy: Layout, details: dict[str, Any]) -> Result:
    about = "bytes of an exact page"
    return result(name, Kind.COUNT, [lossy.page_bytes], [exact.page_bytes], limit_is=about, details=details)


# --- Logits --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogitError:
    """The difference between logits over lossy pages and over exact pages, at ``positions`` positions of a text.

    Attributes:
        std: standard deviation of the exact logits of a position, as a mean over positions: the scale of the errors.
        kl_mean, kl_max: Kullback-Leibler divergence of the lossy from the exact distribution of a position, in nats.
        argmax_same: number of positions with the same most likely token.
        greedy_same: number of equal tokens at the start of two greedy answers of ``positions`` tokens.
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


def round_trip(pages: torch.Tensor, layout: Layout, codec: str) -> torch.Tensor:
    """Encode and decode ``pages [n, *layout.shape]``."""
    if codec == YARDSTICK:
        return pages.bfloat16().to(pages.dtype)
    decoded: torch.Tensor = decode(encode(pages, layout, codec), layout, codec)
    return decoded.view(pages.dtype).view(pages.shape)


def packed_layout(layout: Layout, codec: str) -> Layout:
    """Return the layout of pages in the form of a codec or of the yardstick."""
    return replace(layout, dtype=codec) if codec == YARDSTICK else lossy_layout(layout, codec)


class Continuations:
    """One prompt in several sequences: the first has exact pages, each other one the full pages of a codec's round
    trip."""

    def __init__(self, model: Model, tokens: Sequence[int], positions: int, codecs: Sequence[str]) -> None:
        self.layout = model.layout(PAGE_TOKENS)
        self.positions = positions
        self.prompt = len(tokens) - positions
        assert self.prompt % PAGE_TOKENS == 0, "the prompt has only full pages"
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
            self.arena.pages[frames[:full]] = round_trip(self.arena.pages[exact[:full]], self.layout, codec)

    def logits(self, sequence: int) -> torch.Tensor:
        """Return the logits ``[positions, vocab]`` after each token of the text that follows the prompt."""
        frames = self.frames[sequence]
        at = range(self.prompt, self.prompt + self.positions)
        return self._forward([Slice(frames, i, self.tokens[i : i + 1]) for i in at])

    def greedy(self) -> list[list[int]]:
        """Return the ``positions`` tokens of each sequence's greedy answer, which begins after the first token that
        follows the prompt."""
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
        assert frames is not None, "the arena has this number of frames"
        return frames


def logit_errors(
    model: Model,
    codecs: Sequence[str] = KINDS,
    prompt_tokens: int = PROMPT_TOKENS,
    positions: int = POSITIONS,
) -> list[LogitError]:
    """Return one error per codec, for a prompt of ``prompt_tokens`` (full pages) and ``positions`` tokens after it.

    Raises:
        InvalidRequest: ``compression``: there is no such codec, or it cannot encode the model's pages.
    """
    text = _text(model, prompt_tokens + positions)
    sequences = Continuations(model, text, positions, codecs)
    answers = sequences.greedy()
    exact = sequences.logits(0).double()
    errors = []
    for number, codec in enumerate(codecs, start=1):
        lossy = sequences.logits(number).double()
        error = (lossy - exact).abs()
        p, q = exact.log_softmax(-1), lossy.log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1)
        same = [a == b for a, b in zip(answers[0], answers[number], strict=True)]
        errors.append(
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
    return errors


def _text(model: Model, tokens: int) -> list[int]:
    """Return ``tokens`` token ids of English text and code, from the source of two modules of the store."""
    text = inspect.getsource(layout_module) + inspect.getsource(prefix_module)
    ids = list(model.tokenizer.encode(text))[:tokens]
    if len(ids) < tokens:
        raise BenchFailed(f"the text must have {tokens} tokens (got {len(ids)})")
    return ids


def logits(stage: Stage, name: str, bar: Bar | None, number: int) -> list[Result]:
    """Measure the page size in bytes of ``MODELS[number]``, lossy against exact, in one line per codec. The details
    have the error of logits."""
    quick = stage.settings.quick
    model = load_model((MODELS_QUICK if quick else MODELS)[number])
    layout = model.layout(PAGE_TOKENS)
    with one_thread():
        errors = logit_errors(
            model, prompt_tokens=256 if quick else PROMPT_TOKENS, positions=16 if quick else POSITIONS
        )
    return [
        _bytes_result(f"{name}.{each.codec}", layout, packed_layout(layout, each.codec), asdict(each))
        for each in errors
    ]


def train_model(steps: int, length: int = PROMPT_TOKENS + POSITIONS) -> Model:
    """Train a byte-level Llama of 2 M parameters for ``steps`` steps, each on two texts of ``length`` tokens from
    Python's standard library.

    With random weights attention is arbitrary. A trained model shows the error where attention has a meaning.
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
    """Let torch compute in the calling thread only, as in an engine with one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def trained_logits(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Measure the rows of ``logits`` for a model that is trained first."""
    with one_thread():
        model = train_model(TRAINED_STEPS_QUICK if stage.settings.quick else TRAINED_STEPS)
        errors = logit_errors(model, prompt_tokens=192 if stage.settings.quick else PROMPT_TOKENS)
    layout = model.layout(PAGE_TOKENS)
    return [
        _bytes_result(f"{name}.{each.codec}", layout, packed_layout(layout, each.codec), asdict(each))
        for each in errors
    ]
