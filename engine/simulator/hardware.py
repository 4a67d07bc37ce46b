"""Hardware and models: how long a prompt, a decode step and a transfer take, by a roofline.

A computation takes the longer of two times: that of its arithmetic, and that of the memory that it reads (Williams,
Waterman and Patterson, "Roofline", 2009). For a model with ``P`` active parameters, and ``A`` operations of attention
for each pair of a token and an earlier token::

    prompt_s = fixed_s + max((2 P n + A n (c + n / 2)) / compute, weights / memory)
    step_s   = fixed_s + max((weights + kv c) / memory, (2 P n + A c) / compute)

``n`` is the number of tokens to compute (of sequences in a step), ``c`` the number of tokens before them (of all
sequences together), ``kv`` the bytes of KV per token. ``compute`` and ``memory`` are the peak rates of the engine's
GPUs, times the fractions in ``Efficiency``. The peak rates are those of the vendors' data sheets, for dense bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeVar

from engine.conductor.state.candidates import FAR, HERE, HOST, NVME, ZONE, Priors
from kvstore.errors import InvalidRequest

GB: Final = 10**9
WEIGHT_BYTES: Final = 2  # bfloat16
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU: operations per second, bytes per second of its memory, and the bytes of that memory."""

    flops: float
    memory_bytes_per_s: float
    memory_bytes: float


GPUS: Final[Mapping[str, Gpu]] = MappingProxyType(
    {
        "a100": Gpu(flops=312e12, memory_bytes_per_s=2039e9, memory_bytes=80 * GB),
        "a800": Gpu(flops=312e12, memory_bytes_per_s=2039e9, memory_bytes=80 * GB),
        "h100": Gpu(flops=989e12, memory_bytes_per_s=3350e9, memory_bytes=80 * GB),
        "h200": Gpu(flops=989e12, memory_bytes_per_s=4800e9, memory_bytes=141 * GB),
        "mi300x": Gpu(flops=1307e12, memory_bytes_per_s=5300e9, memory_bytes=192 * GB),
        "gb200": Gpu(flops=2500e12, memory_bytes_per_s=8000e9, memory_bytes=186 * GB),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a model costs.

    Attributes:
        parameters: all parameters; ``active``: those that compute one token.
        attention_flops: operations for each pair of a token and an earlier token, in all layers.
        kv_bytes: bytes of KV per token, in all layers.
    """

    parameters: float
    active: float
    layers: int
    attention_flops: float
    kv_bytes: int

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.parameters * WEIGHT_BYTES


def _attention(layers: int, heads: int, head_dim: int) -> float:
    """Two products of one multiplication and one addition, for each layer, head and channel."""
    return 4.0 * layers * heads * head_dim


MODELS: Final[Mapping[str, ModelShape]] = MappingProxyType(
    {
        # Llama 2 7B: every head has its own KV.
        "7b-mha": ModelShape(
            parameters=6.74e9, active=6.74e9, layers=32, attention_flops=_attention(32, 32, 128), kv_bytes=524288
        ),
        # Llama 3.1 8B: 8 KV heads for 32 heads.
        "8b-gqa": ModelShape(
            parameters=8.03e9, active=8.03e9, layers=32, attention_flops=_attention(32, 32, 128), kv_bytes=131072
        ),
        # Llama 3.1 70B: 8 KV heads for 64 heads.
        "70b-gqa": ModelShape(
            parameters=70.6e9, active=70.6e9, layers=80, attention_flops=_attention(80, 64, 128), kv_bytes=327680
        ),
        # DeepSeek-V3: 576 channels of latent KV per layer; 128 heads with 192 channels of queries and 128 of values.
        "671b-mla": ModelShape(
            parameters=671e9, active=37e9, layers=61, attention_flops=2.0 * 61 * 128 * (192 + 128), kv_bytes=70272
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """A link in one direction: its usable bytes per second, and the seconds before the first byte."""

    bytes_per_s: float
    latency_s: float


# Usable rates: the nominal rate, less the usual overhead of its protocol.
LINKS: Final[Mapping[str, LinkSpeed]] = MappingProxyType(
    {
        "nvlink": LinkSpeed(bytes_per_s=360e9, latency_s=1e-5),  # NVLink 4, of 450 GB/s
        "nvlink-a800": LinkSpeed(bytes_per_s=160e9, latency_s=1e-5),  # of 200 GB/s
        "pcie4": LinkSpeed(bytes_per_s=25e9, latency_s=1e-5),
        "pcie5": LinkSpeed(bytes_per_s=50e9, latency_s=1e-5),
        "cxl": LinkSpeed(bytes_per_s=28e9, latency_s=1e-5),  # CXL 2.0 over 16 lanes
        "rdma-100": LinkSpeed(bytes_per_s=11.5e9, latency_s=2e-5),
        "rdma-200": LinkSpeed(bytes_per_s=23e9, latency_s=2e-5),
        "rdma-400": LinkSpeed(bytes_per_s=46e9, latency_s=2e-5),
        "rdma-800": LinkSpeed(bytes_per_s=92e9, latency_s=2e-5),  # two adapters of 400 Gbit/s
        "ethernet-10": LinkSpeed(bytes_per_s=1.1e9, latency_s=1e-4),
        "ethernet-100": LinkSpeed(bytes_per_s=8e9, latency_s=1e-4),  # TCP on a few cores
        "nvme": LinkSpeed(bytes_per_s=6e9, latency_s=1e-4),  # one drive over four lanes of PCIe 4
        "nvme-of": LinkSpeed(bytes_per_s=5e9, latency_s=2e-4),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Assumed, or fitted to measurements: which fractions of the peak rates are reached, and the fixed times.

    Attributes:
        compute, memory: fractions of the peak rates. The defaults lie in the range that engines report for large
            prompts and batches.
        prompt_s, step_s: seconds of a prompt and of a decode step that neither rate explains.
        kv_share: fraction of a GPU's memory that weights and KV may use.
    """

    compute: float = 0.55
    memory: float = 0.8
    prompt_s: float = 0.01
    step_s: float = 0.004
    kv_share: float = 0.9


ASSUMED: Final = Efficiency()


@dataclass(frozen=True, slots=True)
class Roofline:
    """The times of one model on an engine of ``gpus`` GPUs."""

    model: ModelShape
    gpu: Gpu
    gpus: int
    efficiency: Efficiency = ASSUMED

    @property
    def compute(self) -> float:
        """Operations per second of the engine."""
        return self.gpu.flops * self.gpus * self.efficiency.compute

    @property
    def memory(self) -> float:
        """Bytes per second of the engine's memory."""
        return self.gpu.memory_bytes_per_s * self.gpus * self.efficiency.memory

    @property
    def kv_tokens_max(self) -> int:
        """How many tokens of KV fit into the engine's memory, in addition to the weights."""
        free = self.gpu.memory_bytes * self.gpus * self.efficiency.kv_share - self.model.weight_bytes
        return max(0, int(free / self.model.kv_bytes))

    def prompt_s(self, tokens: float, cached: float) -> float:
        """Return the seconds to compute ``tokens`` tokens after ``cached`` others."""
        model = self.model
        flops = 2 * model.active * tokens + model.attention_flops * tokens * (cached + tokens / 2)
        return self.efficiency.prompt_s + max(flops / self.compute, self._weights(tokens) / self.memory)

    def step_terms(self, batch: int) -> tuple[float, float]:
        """Return ``(a, b)``: a decode step takes ``a + b c`` seconds if its sequences have ``c`` tokens in all."""
        model = self.model
        read = self._weights(batch) / self.memory, model.kv_bytes / self.memory
        arithmetic = 2 * model.active * batch / self.compute, model.attention_flops / self.compute
        slower = read if read[0] >= arithmetic[0] else arithmetic
        return self.efficiency.step_s + slower[0], max(read[1], arithmetic[1])

    def _weights(self, tokens: float) -> float:
        """Bytes of the weights that these tokens use: a mixture of experts reads few of them for few tokens."""
        return min(self.model.parameters, max(1.0, tokens) * self.model.active) * WEIGHT_BYTES

    def priors(self, places: Mapping[str, float], context_tokens: float = 4096) -> Priors:
        """Return what a conductor assumes of such engines.

        Args:
            places: bytes per second by the place of pages; see ``Priors``.
            context_tokens: the usual length of a sequence, from which the cost of one more sequence follows.
        """
        model, (alone_s, of_context) = self.model, self.step_terms(1)
        of_one = self.step_terms(2)[0] - alone_s + of_context * context_tokens
        defaults = Priors().bytes_per_s
        return Priors(
            prefill_tokens_per_s=self.compute / (2 * model.active),
            prefill_fixed_s=self.efficiency.prompt_s,
            context_even=2 * model.active / model.attention_flops,
            step_alone_s=alone_s,
            step_each=of_one / alone_s,
            bytes_per_s={place: places.get(place, defaults[place]) for place in (HERE, NVME, HOST, ZONE, FAR)},
        )


def gpus_needed(model: ModelShape, gpu: Gpu, efficiency: Efficiency = ASSUMED) -> int:
    """Return the smallest power of two of GPUs whose memory is at most two thirds full of weights."""
    gpus = 1
    while gpu.memory_bytes * gpus * efficiency.kv_share * 2 / 3 < model.weight_bytes:
        gpus *= 2
    return gpus


def choose(field: str, known: Mapping[str, Value], name: str) -> Value:
    """Return an entry of a table.

    Raises:
        InvalidRequest: there is none with this name.
    """
    if name not in known:
        raise InvalidRequest(field, f"must be one of {', '.join(known)} (got {name!r})")
    return known[name]
