"""Layout: the geometry of a page, and the fingerprint that decides who may share pages.

Bytes of a page are ordered ``[layer][kv_head][token][content]``. Worked example: Llama-3.1-8B with ``layers=32,
kv_heads=8, head_dim=128, dtype=bfloat16, page_tokens=64`` packs K and V of one head and token as
``content = 2 * 128`` elements, 512 bytes. One head of a layer is ``64 * 512`` = 32 KiB, a layer 256 KiB, a page
8 MiB. Layer 3, heads 2..4 are the byte range ``[3 * 262144 + 2 * 32768, 3 * 262144 + 4 * 32768)``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

from kvstore.errors import InvalidRequest

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
ATTENTION_KINDS = ("full", "window", "state")
# Limits above any published model. They refuse a mistyped number before it results in a huge page.
PAGE_TOKENS_MAX = 4096
LAYERS_MAX = 1024
PAGE_BYTES_MAX = 1 << 30


@dataclass(frozen=True)
class Layout:
    """Page geometry of one cache group of one model. Two stores share pages only if every field is equal.

    GQA and MHA: ``kv_heads`` and ``head_dim``; the content of a token is K and V packed, ``2 * head_dim`` elements.
    MLA: ``mla_latent`` and ``mla_rope`` elements per token (DeepSeek-V2, section 2.1.2: the compressed latent and
    the decoupled RoPE key), with ``kv_heads=1`` and ``head_dim=0``; all TP ranks have a copy of the one head.
    Sliding windows: ``attention="window"``; a token attends to the last ``window`` tokens, including itself. States
    (Mamba and the like): ``attention="state"``; a page holds, for each head, ``2 * head_dim`` elements of the state
    after its last token. A layout of any other shape states its size in bytes, with ``dtype="uint8"``. ``group``
    distinguishes groups of a model whose other fields are equal.

    Raises:
        InvalidRequest: a field is out of range; the error names it.
    """

    model: str
    layers: int
    kv_heads: int = 1
    head_dim: int = 0
    dtype: str = "bfloat16"
    page_tokens: int = 64
    revision: str = ""
    weights_digest: str = ""
    mla_latent: int = 0
    mla_rope: int = 0
    attention: str = "full"
    window: int = 0
    rope: str = ""
    group: str = ""

    def __post_init__(self) -> None:
        _require(isinstance(self.model, str) and self.model != "", "layout.model", "must be a non-empty string")
        for name in ("revision", "weights_digest", "attention", "rope", "group", "dtype"):
            _require(isinstance(getattr(self, name), str), f"layout.{name}", "must be a string")
        _integer(self, "layers", 1, LAYERS_MAX)
        _integer(self, "kv_heads", 1, 4096)
        _integer(self, "head_dim", 0, 65536)
        _integer(self, "page_tokens", 1, PAGE_TOKENS_MAX)
        _integer(self, "mla_latent", 0, 1 << 20)
        _integer(self, "mla_rope", 0, 1 << 20)
        _integer(self, "window", 0, 1 << 31)
        _require(
            self.dtype in DTYPE_BYTES, "layout.dtype", f"must be one of {', '.join(DTYPE_BYTES)} (got {self.dtype!r})"
        )
        _require(self.attention in ATTENTION_KINDS, "layout.attention", f"must be one of {', '.join(ATTENTION_KINDS)}")
        if self.mla_latent:
            _require(self.head_dim == 0, "layout.head_dim", "must be 0 with mla_latent: MLA stores no K and V heads")
            _require(self.kv_heads == 1, "layout.kv_heads", "must be 1 with mla_latent: MLA has one latent head")
        else:
            _require(self.head_dim > 0, "layout.head_dim", "must be positive without mla_latent")
            _require(self.mla_rope == 0, "layout.mla_rope", "needs mla_latent")
        _require(
            (self.attention == "window") == (self.window > 0),
            "layout.window",
            f"must be positive with attention='window', and 0 without (got {self.window})",
        )
        _require(
            self.page_bytes <= PAGE_BYTES_MAX,
            "layout.page_tokens",
            f"must give pages of at most {PAGE_BYTES_MAX} bytes (got {self.page_bytes})",
        )

    @cached_property
    def token_bytes(self) -> int:
        """The size in bytes of one token in one head of one layer (K and V packed, or latent and rope)."""
        elements = self.mla_latent + self.mla_rope if self.mla_latent else 2 * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]

    @property
    def _entries(self) -> int:
        """The number of entries per head and layer of a page: one per token, or a single one for a state."""
        return 1 if self.attention == "state" else self.page_tokens

    @cached_property
    def head_bytes(self) -> int:
        """The size in bytes of one head of one layer of a page."""
        return self._entries * self.token_bytes

    @cached_property
    def layer_bytes(self) -> int:
        """The size in bytes of one layer of a page."""
        return self.kv_heads * self.head_bytes

    @cached_property
    def page_bytes(self) -> int:
        """The size in bytes of a page: all layers of ``page_tokens`` tokens."""
        return self.layers * self.layer_bytes

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """``(layers, kv_heads, page_tokens, content elements)`` of a page; for a state ``page_tokens`` is 1."""
        return self.layers, self.kv_heads, self._entries, self.token_bytes // DTYPE_BYTES[self.dtype]

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that are equal if and only if every field is equal, on every machine and version."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.blake2b(text.encode(), digest_size=16, person=b"kvstore.layout").digest()

    def byte_range(self, layer: int, head_start: int = 0, head_stop: int | None = None) -> tuple[int, int]:
        """Return the bytes ``[start, stop)`` of a page that hold heads ``head_start`` to ``head_stop`` (exclusive) of
        ``layer``.

        Raises:
            InvalidRequest: the layer or the heads are not in this layout.
        """
        stop = self.kv_heads if head_stop is None else head_stop
        in_range = hasattr(layer, "__index__") and 0 <= layer < self.layers
        _require(in_range, "layer", f"must be in 0..{self.layers - 1} (got {layer!r})")
        _require(
            0 <= head_start < stop <= self.kv_heads,
            "heads",
            f"must be in 0..{self.kv_heads} (got {head_start}..{stop})",
        )
        start = layer * self.layer_bytes
        return start + head_start * self.head_bytes, start + stop * self.head_bytes

    def held_heads(self, rank: int, ranks: int) -> tuple[int, int]:
        """Return the heads ``[start, stop)`` that shard ``rank`` of ``ranks`` uses. With fewer heads than ranks (MLA,
        or TP > kv_heads), several ranks use each head.

        Raises:
            InvalidRequest: ``rank`` is not below ``ranks``, or neither of ``ranks`` and heads divides the other.
        """
        _require(0 <= rank < ranks, "rank", f"must be in 0..{ranks - 1} (got {rank})")
        if ranks <= self.kv_heads:
            _require(self.kv_heads % ranks == 0, "ranks", f"must divide the {self.kv_heads} kv_heads (got {ranks})")
            share = self.kv_heads // ranks
            return rank * share, (rank + 1) * share
        _require(
            ranks % self.kv_heads == 0, "ranks", f"must be a multiple of the {self.kv_heads} kv_heads (got {ranks})"
        )
        head = rank // (ranks // self.kv_heads)
        return head, head + 1

    def shard_heads(self, rank: int, ranks: int) -> tuple[int, int] | None:
        """Return the heads ``[start, stop)`` that shard ``rank`` of ``ranks`` writes, or None if it writes nothing.
        Only the lowest rank that uses a head writes it.

        Raises:
            InvalidRequest: as ``held_heads``.
        """
        heads = self.held_heads(rank, ranks)
        return heads if ranks <= self.kv_heads or rank % (ranks // self.kv_heads) == 0 else None

    def shard_layers(self, stage: int, stages: int) -> tuple[int, int]:
        """Return the layers ``[start, stop)`` of pipeline stage ``stage`` of ``stages``. If the layers do not divide
        evenly, the first stages have one more.

        Raises:
            InvalidRequest: ``stage`` is not below ``stages``, or there are more stages than layers.
        """
        _require(0 <= stage < stages, "stage", f"must be in 0..{stages - 1} (got {stage})")
        _require(stages <= self.layers, "stages", f"must be at most {self.layers}, the number of layers (got {stages})")
        share, rest = divmod(self.layers, stages)
        start = stage * share + min(stage, rest)
        return start, start + share + (stage < rest)


def _require(condition: bool, field: str, reason: str) -> None:
    if not condition:
        raise InvalidRequest(field, reason)


def _integer(layout: Layout, name: str, low: int, high: int) -> None:
    value = getattr(layout, name)
    ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    _require(ok, f"layout.{name}", f"must be an integer in {low}..{high} (got {value!r})")
