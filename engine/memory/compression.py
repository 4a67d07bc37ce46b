"""Compression: lossy replicas of pages, int8 with a scale for each vector, as pages of a layout of their own.

A vector belongs to one token in one head of one layer: K, or V, or with MLA the latent, or the rope part. Each is
stored as one byte per element followed by its scale, a bfloat16: ``x`` is ``element * scale``. So a token's content
only becomes shorter, and the order ``[layer][kv_head][token][content]`` stays: layers, heads (TP shards) and tokens (a
partial last page) are byte ranges of a lossy page as they are of an exact one.

Lossy pages belong to ``lossy_layout(exact, codec)``. Its fingerprint differs, hence the root and every key: neither a
lookup nor a hand-off can take one for the other. A reader of lossy pages asks for them by that layout.

Worked example: ``kv_heads=8, head_dim=128, dtype=bfloat16``: a token's content is ``2 * 128 * 2`` = 512 bytes, lossy
``2 * (128 + 2)`` = 260 bytes: 128 of K, its scale, 128 of V, its scale. The lossy layout says ``head_dim=130, int8``.

Error of an element, with ``scale = max|vector| / 127`` rounded up to a bfloat16: ``0.5001 * scale``. The result of
decode is rounded to the exact dtype after that. Vectors of zeros come back as zeros. NaN and infinity are refused: a
page that holds them is wrong already, and int8 has no code for them.

Lossy: a codec for replicas that may lose precision, bound to a layout. See ``engine.memory.compression``.
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

SCALE_BYTES = 2  # bfloat16: the range of float32, and its product with 8 bits is exact in float32
SCALE_MIN = 2.0**-126  # so that 1 / scale is finite
BLOCK_BYTES = 1 << 20  # exact bytes converted at a time: scratch memory for them stays in a core's cache
EXACT_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Codec(StrEnum):
    """How an element becomes a byte."""

    INT8 = "int8"


_LARGEST = 127.0  # of an element


@dataclass(frozen=True)
class _Vectors:
    """``count`` vectors of ``elements`` each, one after the other in the content of a token."""

    exact_start: int  # in elements
    lossy_start: int  # in bytes
    count: int
    elements: int

    def of(self, values: torch.Tensor, lossy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """These vectors: ``[..., count, elements]`` of ``values``; of ``lossy`` their bytes and their scales' bytes."""
        x = values.narrow(-1, self.exact_start, self.count * self.elements)
        row = self.elements + SCALE_BYTES
        rows = lossy.narrow(-1, self.lossy_start, self.count * row).unflatten(-1, (self.count, row))
        elements = rows.narrow(-1, 0, self.elements)
        return x.unflatten(-1, (self.count, self.elements)), elements, rows.narrow(-1, self.elements, SCALE_BYTES)


@dataclass(frozen=True)
class _Form:
    """What both functions need of a layout and a codec."""

    dtype: torch.dtype
    exact_token_bytes: int
    lossy_token_bytes: int
    vectors: tuple[_Vectors, ...]


def lossy_layout(layout: Layout, codec: str) -> Layout:
    """The layout of pages that ``encode`` makes of pages of ``layout``. Equal for equal arguments, on every machine.

    Raises:
        InvalidRequest: names ``compression``: no such codec, or the layout does not permit it: one byte per element
            already, state of a recurrent layer instead of K and V, or so few elements that nothing would be saved.
    """
    kind = _codec(codec)
    if layout.attention == "state":
        raise _refused("pages of recurrent state are read as a whole and multiply an error; only K and V permit it")
    if layout.dtype not in EXACT_DTYPES:
        raise _refused(f"a layout of dtype {layout.dtype} does not permit it; {', '.join(EXACT_DTYPES)} do")
    lossy = replace(
        layout,
        dtype=str(kind),
        head_dim=_widened(layout.head_dim),
        mla_latent=_widened(layout.mla_latent),
        mla_rope=_widened(layout.mla_rope),
        # The exact dtype is what decode gives back; the exact group tells cache groups of one model apart.
        group=f"lossy-{kind}/{layout.dtype}/{layout.group}",
    )
    if lossy.token_bytes >= layout.token_bytes:
        raise _refused(f"a token of {layout.token_bytes} bytes would become one of {lossy.token_bytes}")
    return lossy


def encode(pages: Any, layout: Layout, codec: str, out: Any = None) -> Any:
    """Exact bytes to lossy ones: whole pages, layers, heads or tokens of them.

    Args:
        pages: numpy array or torch tensor, any dtype; its last axis, contiguous, has whole tokens: ``[pages,
            page_bytes]``, ``[pages, layer_bytes]``, ``[frames, heads, tokens, content]``, strided if need be.
        layout: the exact one.
        out: is filled; of the same leading shape, or contiguous and of as many tokens. None: a new uint8 one like
            ``pages``, each token ``lossy_layout(...).token_bytes``.

    Returns:
        ``out``. Memory beyond it is bounded by a few ``BLOCK_BYTES``.

    Raises:
        InvalidRequest: ``compression``: as ``lossy_layout``; ``pages``: NaN or infinity in it, or no whole tokens;
            ``out``: does not fit. What ``out`` holds then is undefined.
    """
    form = _form(layout, codec)
    out, source, target = _paired(pages, form.exact_token_bytes, out, form.lossy_token_bytes)
    _by_blocks(_encode_block, form, source, target)
    return out


def decode(pages: Any, layout: Layout, codec: str, out: Any = None) -> Any:
    """Lossy bytes back to bytes of the exact layout's dtype, near what they were.

    Args, returns and raises as ``encode``, the other way round; ``layout`` is the exact one here too. Elements beyond
    the exact dtype's largest number become that. A scale that no encode wrote is refused; other damage is not
    noticed: that is what checksums are for.
    """
    form = _form(layout, codec)
    out, source, target = _paired(pages, form.lossy_token_bytes, out, form.exact_token_bytes)
    _by_blocks(_decode_block, form, target, source)
    return out


# --- One block -----------------------------------------------------------------------------------------------------


def _encode_block(form: _Form, exact: torch.Tensor, lossy: torch.Tensor, values: torch.Tensor) -> None:
    """``exact [..., bytes]`` into ``lossy [..., bytes]``; ``values [..., elements]`` float32 is scratch."""
    typed = _viewed(exact, form.dtype)
    values.copy_(exact.contiguous().view(form.dtype) if typed is None else typed)
    for part in form.vectors:
        x, elements, scales = part.of(values, lossy)
        amax = x.abs().amax(-1, keepdim=True)
        if not torch.isfinite(amax).all():
            raise InvalidRequest("pages", "hold NaN or infinity, which a lossy page cannot")
        zero = amax == 0
        scale = _rounded_up(amax.div(_LARGEST).clamp_(min=SCALE_MIN))
        x.mul_(scale.reciprocal().masked_fill_(zero, 0))
        elements.view(torch.int8).copy_(x.round_())
        scales.copy_(scale.masked_fill_(zero, 0).bfloat16().view(torch.uint8))


def _decode_block(form: _Form, exact: torch.Tensor, lossy: torch.Tensor, values: torch.Tensor) -> None:
    """Decode ``lossy [..., bytes]`` into ``exact [..., bytes]``."""
    top = torch.finfo(form.dtype).max
    for part in form.vectors:
        x, elements, scales = part.of(values, lossy)
        scale = scales.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
        largest = scale.amax().item() * _LARGEST
        x.copy_(elements.view(torch.int8))
        x.mul_(scale)
        if not largest <= top:
            if not torch.isfinite(scale).all():
                raise InvalidRequest("pages", "hold a scale that is not finite, which no encode wrote")
            x.clamp_(-top, top)  # the largest element times a scale that was rounded up
    typed = _viewed(exact, form.dtype)
    if typed is None:
        exact.copy_(values.to(form.dtype).view(torch.uint8))
    else:
        typed.copy_(values)


def _rounded_up(scale: torch.Tensor) -> torch.Tensor:
    """Positive float32 to the bfloat16 next above, as float32: then no element exceeds the largest."""
    return scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000).view(torch.float32)


def _viewed(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Bytes as elements, in place; None where they do not lie at multiples of an element."""
    size = dtype.itemsize
    if exact.storage_offset() % size or any(stride % size for stride in exact.stride()[:-1]):
        return None
    return exact.view(dtype)


# --- All blocks ----------------------------------------------------------------------------------------------------

_Convert = Callable[[_Form, torch.Tensor, torch.Tensor, torch.Tensor], None]


def _by_blocks(convert: _Convert, form: _Form, exact: torch.Tensor, lossy: torch.Tensor) -> None:
    """``convert`` every token of ``exact [..., tokens, bytes]`` and ``lossy``, a block at a time."""
    tokens = exact.shape[:-1].numel()
    block = max(1, BLOCK_BYTES // form.exact_token_bytes)
    elements = form.exact_token_bytes // form.dtype.itemsize
    with torch.inference_mode():
        scratch = torch.empty(min(tokens, block) * elements, dtype=torch.float32, device=exact.device)
        for part, lossy_part in _blocks(exact, lossy, block):
            shape = (*part.shape[:-1], elements)
            convert(form, part, lossy_part, scratch[: part.shape[:-1].numel() * elements].view(shape))


def _blocks(exact: torch.Tensor, lossy: torch.Tensor, block: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Matching parts of at most ``block`` tokens each, as large as strides permit."""
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


def _paired(pages: Any, page_token: int, out: Any, out_token: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """``out``, made where None; source and target as bytes ``[..., tokens, token bytes]`` of one leading shape."""
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
            raise InvalidRequest("out", f"has {target.shape[:-1].numel()} tokens of {out_token} bytes, not {tokens}")
        if target.is_contiguous():
            target = target.view(*source.shape[:-1], out_token)
        elif source.is_contiguous():
            source = source.view(*target.shape[:-1], page_token)
        else:
            raise InvalidRequest("out", "must be contiguous, or of the leading shape of pages")
    return out, source, target


def _tokens(buffer: Any, token_bytes: int, field: str) -> torch.Tensor:
    """The buffer's own memory as bytes ``[..., tokens, token_bytes]``."""
    if isinstance(buffer, np.ndarray):
        lies_well = buffer.ndim > 0 and buffer.strides[-1] == buffer.itemsize and min(buffer.strides) >= 0
        if not lies_well and buffer.size:  # strides of an empty array mean nothing
            raise InvalidRequest(field, "must have a contiguous last axis and no negative strides")
        flat = torch.from_numpy(_unprotected(buffer.view(np.uint8)))
    elif isinstance(buffer, torch.Tensor):
        if buffer.ndim == 0 or buffer.stride(-1) != 1:
            raise InvalidRequest(field, "must have a contiguous last axis")
        flat = buffer.detach().view(torch.uint8)
    else:
        raise InvalidRequest(field, f"must be a numpy array or a torch tensor (got {type(buffer).__name__})")
    if flat.shape[-1] % token_bytes:
        raise InvalidRequest(
            field, f"a last axis of {flat.shape[-1]} bytes is not a multiple of {token_bytes}-byte tokens"
        )
    rows: torch.Tensor = flat.unflatten(-1, (flat.shape[-1] // token_bytes, token_bytes))
    return rows


class _Alias:
    """A read-only array's memory, for torch, which has no read-only tensors and warns. It is only read from."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array  # keeps the memory
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _unprotected(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
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
    assert lossy_start == lossy.token_bytes, "a token's vectors are what its layout says"
    dtype = EXACT_DTYPES[layout.dtype]
    return _Form(dtype, layout.token_bytes, lossy.token_bytes, tuple(vectors))


def _widened(elements: int) -> int:
    return elements + SCALE_BYTES if elements else 0


def _codec(codec: str) -> Codec:
    try:
        return Codec(codec)
    except ValueError:
        raise _refused(f"{codec!r} is not one of {', '.join(Codec)}") from None


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest("compression", reason)


Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Lossy:
    """Pages of ``exact`` as pages of ``layout``, and back."""

    name: str
    exact: Layout
    layout: Layout

    @classmethod
    def of(cls, exact: Layout, name: str) -> Lossy | None:
        """The codec of that name; None for "none". Raises InvalidRequest if the layout does not permit it."""
        return None if name in ("", "none") else cls(name, exact, lossy_layout(exact, name))

    def encode(self, rows: Bytes) -> Bytes:
        """Encode whole tokens ``[n, bytes]``, exact to lossy."""
        out: Bytes = encode(rows, self.exact, self.name)
        return out

    def decode(self, rows: Bytes, out: Bytes | None = None) -> Bytes:
        """And back."""
        exact: Bytes = decode(rows, self.exact, self.name, out)
        return exact


def codecs(exact: Layout) -> Mapping[str, Lossy | None]:
    """Every codec that this layout permits, by name; "none" and "" are exact."""
    found: dict[str, Lossy | None] = {"": None, "none": None}
    for name in Codec:
        try:
            found[name] = Lossy.of(exact, name)
        except InvalidRequest:
            continue
    return found
