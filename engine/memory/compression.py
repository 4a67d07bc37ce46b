"""Compression: lossy replicas of pages, with int8 elements and a scale for each vector.

A vector is the K or the V of one token in one head of one layer (with MLA, the latent or the rope part). It is stored
as one byte per element, followed by its scale, a bfloat16. An element is ``byte * scale``. Only the content of a token
becomes shorter. The order ``[layer][kv_head][token][content]`` is the same, so layers, heads (shards) and tokens (of a
last page that is not full) are byte ranges of a lossy page, too.

Lossy pages have the layout ``lossy_layout(exact, codec)``. Its fingerprint differs from the exact layout's, and so do
the root and every key. A lookup or a hand-off can therefore not confuse lossy and exact pages.

Worked example: with ``kv_heads=8, head_dim=128, dtype=bfloat16``, the content of a token has ``2 * 128 * 2`` = 512
bytes. The lossy content has ``2 * (128 + 2)`` = 260 bytes: 128 of K, its scale, 128 of V, its scale. The lossy layout
has ``head_dim=130, dtype=int8``.

The error of an element is at most ``0.5001 * scale``, where ``scale = max|vector| / 127``, rounded up to a bfloat16.
After that, ``decode`` rounds to the exact dtype. A vector of zeros stays zero. NaN and infinity are refused: int8 has
no code for them, and a page that contains them is wrong already.

``Lossy`` is a codec for one exact layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.device.host_memory import empty
from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout

SCALE_BYTES = 2  # a bfloat16 has the range of float32, and its product with 8 bits is exact in float32
SCALE_MIN = 2.0**-126  # so that 1 / scale is finite
BLOCK_BYTES = 1 << 20  # exact bytes converted at a time, so that scratch memory fits a core's cache
EXACT_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Codec(StrEnum):
    """The ways in which elements are stored as bytes."""

    INT8 = "int8"


_ELEMENT_MAX = 127.0


@dataclass(frozen=True)
class _Vectors:
    """``count`` consecutive vectors of ``elements`` elements each, in the content of a token."""

    exact_start: int  # in elements
    lossy_start: int  # in bytes
    count: int
    elements: int

    def of(self, values: torch.Tensor, lossy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the vectors as views: ``[..., count, elements]`` of ``values``, then bytes and scales of ``lossy``."""
        x = values.narrow(-1, self.exact_start, self.count * self.elements)
        row = self.elements + SCALE_BYTES
        rows = lossy.narrow(-1, self.lossy_start, self.count * row).unflatten(-1, (self.count, row))
        elements = rows.narrow(-1, 0, self.elements)
        return x.unflatten(-1, (self.count, self.elements)), elements, rows.narrow(-1, self.elements, SCALE_BYTES)


@dataclass(frozen=True)
class _Form:
    """The sizes and vectors of a token, for encoding and decoding."""

    dtype: torch.dtype
    exact_token_bytes: int
    lossy_token_bytes: int
    vectors: tuple[_Vectors, ...]


def lossy_layout(layout: Layout, codec: str) -> Layout:
    """Return the layout of the pages that ``encode`` makes from pages of ``layout``.

    The result is the same on every machine.

    Raises:
        InvalidRequest (field ``compression``): there is no such codec, or it does not suit the layout. It does not suit
            one-byte elements, pages of recurrent state, or a layout whose tokens would not become shorter.
    """
    kind = _codec(codec)
    if layout.attention == "state":
        raise _refusal("recurrent state would multiply the error of each element; only K and V can be compressed")
    if layout.dtype not in EXACT_DTYPES:
        raise _refusal(f"the layout's dtype must be one of {', '.join(EXACT_DTYPES)} (got {layout.dtype})")
    lossy = replace(
        layout,
        dtype=str(kind),
        head_dim=_widened(layout.head_dim),
        mla_latent=_widened(layout.mla_latent),
        mla_rope=_widened(layout.mla_rope),
        # The group name includes the dtype of the decoded pages, and the original group so that a model's cache groups
        # stay distinct.
        group=f"lossy-{kind}/{layout.dtype}/{layout.group}",
    )
    if lossy.token_bytes >= layout.token_bytes:
        raise _refusal(f"a token of {layout.token_bytes} bytes would not become shorter (got {lossy.token_bytes})")
    return lossy


def encode(pages: Any, layout: Layout, codec: str, out: Any = None) -> Any:
    """Encode exact KV: pages, or whole layers, heads or tokens of pages.

    Args:
        pages: a numpy array or torch tensor of any dtype. Its last axis is contiguous and has whole tokens, for example
            ``[pages, page_bytes]``, ``[pages, layer_bytes]`` or ``[frames, heads, tokens, content]``. Other axes may be
            strided.
        layout: the exact layout.
        out: the buffer to fill, with the leading shape of ``pages``, or contiguous with the same number of tokens.
            If None, a new uint8 buffer like ``pages`` is made, with ``lossy_layout(...).token_bytes`` for each token.

    The call also uses scratch memory of a few times ``BLOCK_BYTES``.

    Returns:
        The filled buffer.

    Raises:
        InvalidRequest (field ``compression``): as for ``lossy_layout``.
        InvalidRequest (field ``pages``): the pages contain NaN, infinity or an incomplete token. The contents of
            ``out`` are undefined.
        InvalidRequest (field ``out``): the buffer does not fit. Its contents are undefined.
    """
    form = _form(layout, codec)
    out, source, target = _pair(pages, form.exact_token_bytes, out, form.lossy_token_bytes)
    _by_blocks(_encode_block, form, source, target)
    return out


def decode(pages: Any, layout: Layout, codec: str, out: Any = None) -> Any:
    """Decode lossy KV to approximately the exact KV. ``layout`` is the exact layout.

    The arguments, result and errors are as for ``encode``, with ``pages`` and ``out`` exchanged. An element beyond the
    range of the exact dtype becomes its largest number. A scale that is not finite is refused. Only checksums detect
    other damage.
    """
    form = _form(layout, codec)
    out, source, target = _pair(pages, form.lossy_token_bytes, out, form.exact_token_bytes)
    _by_blocks(_decode_block, form, target, source)
    return out


# --- One block -----------------------------------------------------------------------------------------------------


def _encode_block(form: _Form, exact: torch.Tensor, lossy: torch.Tensor, values: torch.Tensor) -> None:
    """Encode ``exact [..., bytes]`` into ``lossy [..., bytes]``. ``values [..., elements]``, float32, is scratch."""
    typed = _as_elements(exact, form.dtype)
    values.copy_(exact.contiguous().view(form.dtype) if typed is None else typed)
    for part in form.vectors:
        x, elements, scales = part.of(values, lossy)
        amax = x.abs().amax(-1, keepdim=True)
        if not torch.isfinite(amax).all():
            raise InvalidRequest("pages", "must not contain NaN or infinity, which a lossy page cannot represent")
        zero = amax == 0
        scale = _round_up(amax.div(_ELEMENT_MAX).clamp_(min=SCALE_MIN))
        x.mul_(scale.reciprocal().masked_fill_(zero, 0))
        elements.view(torch.int8).copy_(x.round_())
        scales.copy_(scale.masked_fill_(zero, 0).bfloat16().view(torch.uint8))


def _decode_block(form: _Form, exact: torch.Tensor, lossy: torch.Tensor, values: torch.Tensor) -> None:
    """Decode ``lossy [..., bytes]`` into ``exact [..., bytes]``."""
    top = torch.finfo(form.dtype).max
    for part in form.vectors:
        x, elements, scales = part.of(values, lossy)
        scale = scales.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
        largest = scale.amax().item() * _ELEMENT_MAX
        x.copy_(elements.view(torch.int8))
        x.mul_(scale)
        if not largest <= top:
            if not torch.isfinite(scale).all():
                raise InvalidRequest("pages", "must not contain a scale that is not finite")
            x.clamp_(-top, top)  # because the scale was rounded up, the largest elements may be out of range
    typed = _as_elements(exact, form.dtype)
    if typed is None:
        exact.copy_(values.to(form.dtype).view(torch.uint8))
    else:
        typed.copy_(values)


def _round_up(scale: torch.Tensor) -> torch.Tensor:
    """Round positive float32 up to bfloat16, as float32, so that no element exceeds ``_ELEMENT_MAX``."""
    return scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000).view(torch.float32)


def _as_elements(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a view of the bytes as elements; None if they are not aligned to elements."""
    size = dtype.itemsize
    if exact.storage_offset() % size or any(stride % size for stride in exact.stride()[:-1]):
        return None
    return exact.view(dtype)


# --- All blocks ----------------------------------------------------------------------------------------------------

_Convert = Callable[[_Form, torch.Tensor, torch.Tensor, torch.Tensor], None]


def _by_blocks(convert: _Convert, form: _Form, exact: torch.Tensor, lossy: torch.Tensor) -> None:
    """Call ``convert`` for all tokens of ``exact [..., tokens, bytes]`` and ``lossy``, a block at a time."""
    tokens = exact.shape[:-1].numel()
    block = max(1, BLOCK_BYTES // form.exact_token_bytes)
    elements = form.exact_token_bytes // form.dtype.itemsize
    with torch.inference_mode():
        scratch = torch.empty(min(tokens, block) * elements, dtype=torch.float32, device=exact.device)
        for part, lossy_part in _blocks(exact, lossy, block):
            shape = (*part.shape[:-1], elements)
            convert(form, part, lossy_part, scratch[: part.shape[:-1].numel() * elements].view(shape))


def _blocks(exact: torch.Tensor, lossy: torch.Tensor, block: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield matching parts of both tensors: at most ``block`` tokens each, and as large as the strides permit."""
    tokens = exact.shape[:-1].numel()
    if tokens <= block:
        if tokens:
            yield exact, lossy
        return
    step = block // (tokens // exact.shape[0])
    for start in range(0, exact.shape[0], max(1, step)):
        if step:
            yield exact[start : start + step], lossy[start : start + step]
        else:
            yield from _blocks(exact[start], lossy[start], block)


# --- Buffers -------------------------------------------------------------------------------------------------------


def _pair(pages: Any, page_token: int, out: Any, out_token: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return the output buffer, and both buffers as bytes ``[..., tokens, token bytes]``.

    If ``out`` is None, a buffer is allocated. The two views have the same leading shape.
    """
    source = _tokens(pages, page_token, "pages")
    if out is None:
        shape = (*source.shape[:-2], source.shape[-2] * out_token)
        if isinstance(pages, np.ndarray):
            out = empty(shape)
        else:
            out = torch.empty(shape, dtype=torch.uint8, device=source.device)
    elif isinstance(out, np.ndarray) and not out.flags.writeable:
        raise InvalidRequest("out", "must be writable")
    target = _tokens(out, out_token, "out")
    if source.shape[:-1] != target.shape[:-1]:
        if source.shape[:-1].numel() != target.shape[:-1].numel():
            tokens = source.shape[:-1].numel()
            got = target.shape[:-1].numel()
            raise InvalidRequest("out", f"must have {tokens} tokens of {out_token} bytes (got {got})")
        if target.is_contiguous():
            target = target.view(*source.shape[:-1], out_token)
        elif source.is_contiguous():
            source = source.view(*target.shape[:-1], page_token)
        else:
            raise InvalidRequest("out", "must be contiguous, or have the leading shape of pages")
    return out, source, target


def _tokens(buffer: Any, token_bytes: int, field: str) -> torch.Tensor:
    """Return a view of the buffer as bytes ``[..., tokens, token_bytes]``."""
    if isinstance(buffer, np.ndarray):
        is_usable = buffer.ndim > 0 and buffer.strides[-1] == buffer.itemsize and min(buffer.strides) >= 0
        if not is_usable and buffer.size:  # strides of an empty array have no meaning
            raise InvalidRequest(field, "must have a contiguous last axis and no negative strides")
        flat = torch.from_numpy(_as_writable(buffer.view(np.uint8)))
    elif isinstance(buffer, torch.Tensor):
        if buffer.ndim == 0 or buffer.stride(-1) != 1:
            raise InvalidRequest(field, "must have a contiguous last axis")
        flat = buffer.detach().view(torch.uint8)
    else:
        raise InvalidRequest(field, f"must be a numpy array or a torch tensor (got {type(buffer).__name__})")
    if flat.shape[-1] % token_bytes:
        reason = f"must have whole tokens of {token_bytes} bytes in its last axis (got {flat.shape[-1]} bytes)"
        raise InvalidRequest(field, reason)
    rows: torch.Tensor = flat.unflatten(-1, (flat.shape[-1] // token_bytes, token_bytes))
    return rows


class _Alias:
    """The memory of a read-only array, declared writable, because torch warns about read-only arrays.

    The tensor is only read.
    """

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array  # keeps the memory alive
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _as_writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array if array.flags.writeable else np.asarray(_Alias(array))


# --- Layouts -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _form(layout: Layout, codec: str) -> _Form:
    lossy = lossy_layout(layout, codec)
    widths = [(2, layout.head_dim)] if layout.head_dim else [(1, layout.mla_latent), (1, layout.mla_rope)]
    vectors: list[_Vectors] = []
    exact_start = lossy_start = 0
    for count, elements in widths:
        if elements:
            vectors.append(_Vectors(exact_start, lossy_start, count, elements))
            exact_start += count * elements
            lossy_start += count * (elements + SCALE_BYTES)
    assert lossy_start == lossy.token_bytes, "the vectors of a token add up to its lossy layout"
    dtype = EXACT_DTYPES[layout.dtype]
    return _Form(dtype, layout.token_bytes, lossy.token_bytes, tuple(vectors))


def _widened(elements: int) -> int:
    return elements + SCALE_BYTES if elements else 0


def _codec(codec: str) -> Codec:
    try:
        return Codec(codec)
    except ValueError:
        raise _refusal(f"must be one of {', '.join(Codec)} (got {codec!r})") from None


def _refusal(reason: str) -> InvalidRequest:
    return InvalidRequest("compression", reason)


Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Lossy:
    """A codec between pages of the layout ``exact`` and lossy pages of ``layout``."""

    name: str
    exact: Layout
    layout: Layout

    @classmethod
    def of(cls, exact: Layout, name: str) -> Lossy | None:
        """Return the codec of this name; None for "none". Raises InvalidRequest if it does not suit the layout."""
        return None if name in ("", "none") else cls(name, exact, lossy_layout(exact, name))

    def encode(self, rows: Bytes) -> Bytes:
        """Encode exact rows of whole tokens, ``[n, bytes]``."""
        out: Bytes = encode(rows, self.exact, self.name)
        return out

    def decode(self, rows: Bytes, out: Bytes | None = None) -> Bytes:
        """Decode lossy rows of whole tokens, ``[n, bytes]``."""
        exact: Bytes = decode(rows, self.exact, self.name, out)
        return exact


def codecs(exact: Layout) -> Mapping[str, Lossy | None]:
    """Return all codecs that suit this layout, by name. The names "none" and "" mean exact pages (None)."""
    codec_by_name: dict[str, Lossy | None] = {"": None, "none": None}
    for name in Codec:
        try:
            codec_by_name[name] = Lossy.of(exact, name)
        except InvalidRequest:
            continue
    return codec_by_name
