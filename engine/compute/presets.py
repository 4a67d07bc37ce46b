"""Presets: models whose weights are drawn from a seed, so that everything runs without a download.

The tiny presets answer in milliseconds on one core. Together they cover what attention must support: grouped heads,
normed keys, MLA, soft caps, sliding windows and sinks. The small presets have 50 M parameters or more and serve for
measurements. All use the byte-level tokenizer: ``vocab_size`` is 256 bytes and two special tokens.

The weights have a standard deviation of 0.1 or more, far above that of a usual initialisation. With the usual 0.02 a
layer would hardly change its input, attention would be flat, and tests would not notice a wrong page. Windows are small
and not multiples of a page.

A paced preset computes nothing and sleeps as long as a cost model says, for benchmarks of everything around the model.
It is real in all other respects: a step writes KV of every layer into the frames and calls the hooks of its batch. So
pages are reserved, written, sealed and handed over layer by layer. A conductor predicts with the same cost model
(``Costs``), where each chunk has ``n`` tokens after ``c`` earlier ones::

    step_s = alone_s * (1 + each * decoding) + sum over chunks of n / tokens_per_s * (1 + (c + n / 2) / context_even)

The paced KV of a token in layer ``i`` is the token's number plus ``i``, in every element. The next token is a hash of
the KV of all earlier tokens, read from the frames. So an answer depends only on its prompt (``paced_answer``), and a
page with wrong contents changes the answer.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from engine.compute.paged_cache import Batch, Slice
from engine.memory.arena import Arenas
from engine.text.tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The cost model of a simulated model, see the module's docstring.

    Attributes:
        tokens_per_s: the prefill speed for a prompt without context.
        context_even: the number of context tokens at which prefill takes twice as long per token.
        alone_s: the fixed time of a decoding step.
        each: the additional time for each sequence that decodes, as a share of ``alone_s``.
    """

    tokens_per_s: float
    context_even: float
    alone_s: float
    each: float

    def step_s(self, parts: Sequence[tuple[int, int]], decoding: int) -> float:
        """Return the time of a step in seconds.

        Args:
            parts: the chunks, as ``(tokens before, tokens)``.
            decoding: the number of sequences that decode.
        """
        chunks_s = (count / self.tokens_per_s * (1 + (start + count / 2) / self.context_even) for start, count in parts)
        return sum(chunks_s) + (self.alone_s * (1 + self.each * decoding) if decoding else 0.0)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The recipe for one model.

    Attributes:
        family: the model type of transformers.
        std: the standard deviation of the weights.
        head_norm: the weight of the norms of queries and keys. With 1, scores would be as flat as with std 0.02.
        config: fields of the config that differ from the family's defaults.
        pace: the cost model if the model is simulated by sleeping; None if it is computed.
    """

    family: str
    std: float
    head_norm: float = 2.0
    config: Mapping[str, Any] = field(default_factory=dict)
    pace: Pace | None = None

    def __post_init__(self) -> None:
        assert self.std >= 0.1, "smaller weights hide wrong pages from tests"


_BYTES = {
    "vocab_size": ByteTokenizer.vocab_size,
    "eos_token_id": ByteTokenizer.EOS,
    "bos_token_id": ByteTokenizer.BOS,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_TINY = {
    **_BYTES,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
}
_TINY_MLA = {
    **{name: value for name, value in _TINY.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # One layer of experts after two dense ones.
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "num_mtp_layers": 0,
}
_SMALL = {
    **_BYTES,
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 16384,
}
_SMALL_MLA = {
    **{name: value for name, value in _SMALL.items() if name != "head_dim"},
    "num_key_value_heads": 8,
    "kv_lora_rank": 192,
    "q_lora_rank": 256,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 12,  # no experts: the time of a step must not depend on routing
    "num_mtp_layers": 0,
}
# The cost model of FAST'25: a model of 70 B computes a prompt of 12,000 tokens in 1.7 s. Here one token stands for 32
# of its tokens, and five seconds of its time pass in one. So a page of 16 tokens stands for a block of 512.
PACED_TOKENS = 32  # tokens of the large model that one token of the paced model stands for
_PACE = Pace(tokens_per_s=7000 / PACED_TOKENS * 5, context_even=120_000 / PACED_TOKENS, alone_s=0.02, each=0.01)
_PACED = {**_TINY, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096}

PRESETS: Mapping[str, Preset] = {
    "tiny-llama": Preset(family="llama", std=0.2, config=_TINY),
    "tiny-qwen3": Preset(
        family="qwen3", std=0.2, config={**_TINY, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    ),
    "tiny-mla": Preset(family="deepseek_v3", std=0.2, config=_TINY_MLA),
    "tiny-mistral": Preset(family="mistral", std=0.2, config={**_TINY, "sliding_window": 40}),
    "tiny-gemma2": Preset(
        family="gemma2",
        std=0.2,
        config={**_TINY, "num_hidden_layers": 4, "sliding_window": 40, "query_pre_attn_scalar": 16},
    ),
    "tiny-gemma3": Preset(  # five layers with a window, then one without
        family="gemma3_text",
        std=0.2,
        head_norm=1.0,  # this family's norms add 1 to the weight
        config={**_TINY, "num_hidden_layers": 6, "sliding_window": 40, "query_pre_attn_scalar": 16},
    ),
    "tiny-gpt-oss": Preset(
        family="gpt_oss",
        std=0.2,
        config={
            **_TINY,
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 2048,
            },
        },
    ),
    "paced-llama": Preset(family="llama", std=0.2, config=_PACED, pace=_PACE),
    "small-llama": Preset(family="llama", std=0.1, config=_SMALL),
    "small-qwen3": Preset(family="qwen3", std=0.1, config=_SMALL),
    "small-mla": Preset(family="deepseek_v3", std=0.1, config=_SMALL_MLA),
}


def build(name: str, seed: int) -> PreTrainedModel:
    """Build the causal language model of preset ``name`` in float32 on the CPU.

    A seed gives the same weights on every machine.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    preset = PRESETS[name]
    config = AutoConfig.for_model(preset.family, **preset.config)
    net: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    for parameter_name, parameter in net.named_parameters():
        if parameter.dim() >= 2 or parameter_name.endswith(
            ("bias", "sinks")
        ):  # all other parameters scale norms and keep their values
            fill(parameter, preset.std, f"{seed}/{parameter_name}")
        elif parameter_name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.data.fill_(preset.head_norm)
    return net


def fill(tensor: torch.Tensor, std: float, seed: str) -> None:
    """Fill ``tensor`` in place with uniform numbers of mean 0 and standard deviation ``std``.

    The numbers, and so the weights digest, are the same on all processors: drawing from [0, 1) and the two steps after
    that are exact. A normal distribution needs logarithms, whose last bit differs between processors.
    """
    digest = hashlib.blake2b(seed.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    with torch.no_grad():
        tensor.uniform_(generator=generator).sub_(0.5).mul_(std * math.sqrt(12))


TOKENS: Final = 256  # tokens of an answer are bytes
NEXT_LOGIT: Final = 100.0  # the logit of the next token; the logits of all other tokens are 0
HASH_FACTOR: Final = 0x9E3779B97F4A7C15


class PacedRunner:
    """The runner of a paced preset, with the methods of a ``Runner``. Threads may run batches of their own at once."""

    graphs = "none: nothing is computed"

    def __init__(self, pace: Pace, vocab_size: int, arenas: Arenas) -> None:
        self._pace = pace
        self._vocab_size = vocab_size
        (self._arena,) = arenas.groups  # no paced preset has windows

    def forward(self, batch: Batch) -> torch.Tensor:
        """Sleep for the time of the step, write its KV, and return logits as ``Runner.forward`` does."""
        assert batch.arenas.groups == (self._arena,), "a batch over another arena"
        start_s = time.monotonic()
        chunks = [(part.start, part.count) for part in batch.slices if part.count > 1]
        step_s = self._pace.step_s(chunks, len(batch.slices) - len(chunks))
        layout = self._arena.layout
        content = batch.tokens[0].to(self._arena.pages.dtype)[:, None, None].expand(-1, *layout.shape[1::2])
        for layer in range(layout.layers):
            if batch.before is not None:
                batch.before(layer)
            _sleep_until(start_s + step_s * (layer + 1) / layout.layers)
            batch.write(layer, content + layer)
            if batch.after is not None:
                batch.after(layer)
        logits = torch.zeros((len(batch.slices), self._vocab_size))
        for row, part in enumerate(batch.slices):
            logits[row, self._next(part)] = NEXT_LOGIT
        return logits

    def _next(self, part: Slice) -> int:
        """Return the token after a slice. It is computed from the contents of the frames."""
        layout = self._arena.layout
        pages = part.tables[0, : -(-part.stop // layout.page_tokens)]
        content = self._arena.pages[pages, :, 0, :, 0].transpose(0, 1).reshape(layout.layers, -1)[:, : part.stop]
        tokens = content.to(torch.int64).numpy() - np.arange(layout.layers)[:, None]
        return paced_token(tokens.sum(axis=0) // layout.layers)


def paced_token(tokens: npt.NDArray[np.integer]) -> int:
    """Return the token that follows ``tokens``."""
    with np.errstate(over="ignore"):
        factors = np.arange(1, len(tokens) + 1, dtype=np.uint64) * np.uint64(HASH_FACTOR)
        digest = int(((tokens.astype(np.uint64) + np.uint64(1)) * (factors | np.uint64(1))).sum())
    return (digest >> 40) % TOKENS


def paced_answer(prompt: Iterable[int], count: int) -> list[int]:
    """Return the first ``count`` tokens of the answer to ``prompt``."""
    tokens = list(prompt)
    start = len(tokens)
    while len(tokens) < start + count:
        tokens.append(paced_token(np.array(tokens)))
    return tokens[start:]


def _sleep_until(deadline_s: float) -> None:
    remaining_s = deadline_s - time.monotonic()
    if remaining_s > 0:
        time.sleep(remaining_s)
