"""Lossy replicas: their layouts, the exact format, how far decoded elements may be off, and every shape of buffer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
from engine.memory.compression import EXACT_DTYPES, Codec, decode, encode, lossy_layout
from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout

GQA = Layout(model="m", layers=3, kv_heads=4, head_dim=16, dtype="bfloat16", page_tokens=8)
MLA = Layout(model="m", layers=3, mla_latent=24, mla_rope=9, dtype="float32", page_tokens=8)
LATENT = replace(MLA, mla_rope=0)
CODECS = list(Codec)
# Largest error of rounding to the dtype: relative, and of its subnormal numbers.
ROUNDING = {"float32": (2.0**-24, 2.0**-150), "float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}


def values_of(layout: Layout, pages: int, seed: int, low: int = -12, high: int = 6) -> torch.Tensor:
    """``[pages, *shape]`` of the layout's dtype; each token of each head of its own magnitude, 2^low to 2^high."""
    generator = torch.Generator().manual_seed(seed)
    shape = (pages, *layout.shape)
    magnitude = torch.randint(low, high + 1, (*shape[:-1], 1), generator=generator).float().exp2()
    return (torch.randn(shape, generator=generator) * magnitude).to(EXACT_DTYPES[layout.dtype])


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(len(values), -1).view(torch.uint8)


def vectors_of(layout: Layout) -> list[int]:
    return [layout.head_dim] * 2 if layout.head_dim else [n for n in (layout.mla_latent, layout.mla_rope) if n]


def unpacked(lossy: torch.Tensor, layout: Layout) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Bytes of elements and float64 scales of each vector, read as the docstring of the module says."""
    rows = lossy.view(len(lossy), *layout.shape[:3], -1)
    parts, start = [], 0
    for elements in vectors_of(layout):
        scale = rows[..., start + elements : start + elements + 2].contiguous().view(torch.bfloat16).double()
        parts.append((rows[..., start : start + elements], scale))
        start += elements + 2
    assert start == rows.shape[-1]
    return parts


def assert_near(layout: Layout, codec: Codec, values: torch.Tensor) -> None:
    lossy = encode(bytes_of(values), layout, codec)
    back = decode(lossy, layout, codec).view(values.dtype).view(values.shape)
    relative, least = ROUNDING[layout.dtype]
    start = 0
    for elements, (_, scale) in zip(vectors_of(layout), unpacked(lossy, layout), strict=True):
        x, y = (side[..., start : start + elements].double() for side in (values, back))
        allowed = 0.5001 * scale
        error = (x - y).abs()
        assert (error <= allowed + (x.abs() + allowed) * relative + least).all()
        # Not more of it than needed: the scale follows from the largest element.
        largest = x.abs().amax(-1, keepdim=True)
        assert (scale <= (largest / 127).clamp(min=2.0**-126) * (1 + 2**-7)).all()
        assert ((scale == 0) == (largest == 0)).all()
        start += elements


# --- Layouts -------------------------------------------------------------------------------------------------------


def test_no_two_kinds_of_page_share_a_fingerprint() -> None:
    exact = [replace(GQA, dtype=dtype, group=group) for dtype in EXACT_DTYPES for group in ("", "window")]
    lossy = [lossy_layout(layout, codec) for layout in exact for codec in CODECS]
    prints = {layout.fingerprint for layout in exact + lossy}
    assert len(prints) == len(exact) * 2
    assert lossy_layout(GQA, "int8").fingerprint == lossy_layout(replace(GQA), Codec.INT8).fingerprint


@pytest.mark.parametrize(
    ("layout", "codec", "reason"),
    [
        (GQA, "int4", "must be one of int8"),
        (GQA, "fp8", "must be one of int8"),  # which there was once
        (replace(GQA, attention="state"), "int8", "state"),
        (replace(GQA, dtype="int8"), "int8", "dtype must be .*got int8"),
        (replace(GQA, dtype="float8_e4m3fn"), "int8", "dtype must be .*got float8_e4m3fn"),
        (lossy_layout(GQA, "int8"), "int8", "dtype must be .*got int8"),
        (replace(GQA, head_dim=2), "int8", "8 bytes would not become shorter .got 8."),
    ],
)
def test_layouts_that_do_not_permit_it_are_refused(layout: Layout, codec: str, reason: str) -> None:
    pages = np.zeros((1, layout.page_bytes), np.uint8)
    for refused in (lambda: lossy_layout(layout, codec), lambda: encode(pages, layout, codec)):
        with pytest.raises(InvalidRequest, match=reason) as caught:
            refused()
        assert caught.value.field == "compression"


def test_a_store_never_takes_one_for_the_other(tmp_path: Path) -> None:
    tokens = np.arange(3 * GQA.page_tokens, dtype=np.uint32)
    pages = bytes_of(values_of(GQA, 3, 1)).numpy()
    with kvstore.open(dram="64MiB", shm_dir=tmp_path) as store:
        exact, lossy = store.cache(GQA), store.cache(lossy_layout(GQA, "int8"))
        assert lossy.put(lossy.keys(tokens), encode(pages, GQA, "int8")) == 3
        assert exact.lookup(tokens).pages == 0
        assert exact.put(exact.keys(tokens), pages) == 3
        assert not set(exact.keys(tokens).hashes) & set(lossy.keys(tokens).hashes)
        out = np.zeros((3, lossy.layout.page_bytes), np.uint8)
        assert lossy.get(lossy.keys(tokens), out).pages == 3
        assert np.array_equal(out, encode(pages, GQA, "int8"))


# --- Format and error ----------------------------------------------------------------------------------------------


def test_bytes_are_what_the_docstring_says() -> None:
    layout = Layout(model="m", layers=1, head_dim=2, dtype="float32", page_tokens=1)
    token = np.array([[127, -2, 0, 0]], np.float32)
    assert encode(token, layout, "int8").tobytes() == bytes.fromhex("7ffe 803f 0000 0000")
    assert decode(encode(token, layout, "int8"), layout, "int8").view(np.float32).tolist() == token.tolist()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", EXACT_DTYPES)
@pytest.mark.parametrize("layout", [GQA, MLA, LATENT], ids=["gqa", "mla", "latent"])
def test_error_is_within_its_bound(layout: Layout, dtype: str, codec: Codec) -> None:
    layout = replace(layout, dtype=dtype)
    values = values_of(layout, 4, 7)
    values[1, :, :, 3] = 0
    assert_near(layout, codec, values)
    zeros = decode(encode(bytes_of(values), layout, codec), layout, codec).view(values.dtype).view(values.shape)
    assert not zeros[1, :, :, 3].any()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", EXACT_DTYPES)
def test_error_is_within_its_bound_at_both_ends_of_the_range(dtype: str, codec: Codec) -> None:
    layout = replace(GQA, dtype=dtype)
    about = torch.finfo(EXACT_DTYPES[dtype])
    values = values_of(layout, 2, 9, low=-24 if dtype == "float16" else -148, high=-14 if dtype == "float16" else -120)
    values[1] = values_of(layout, 1, 9, low=10 if dtype == "float16" else 122, high=10 if dtype == "float16" else 122)
    values = values.clamp(about.min, about.max)
    values[1, ..., 0] = about.max
    values[1, ..., 1] = about.min
    values[0, ..., 2] = about.smallest_normal / 2
    assert_near(layout, codec, values)
    back = decode(encode(bytes_of(values), layout, codec), layout, codec).view(values.dtype)
    assert torch.isfinite(back).all()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(CODECS),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=8, max_size=8),
)
def test_any_finite_vector_stays_within_its_bound(codec: Codec, numbers: list[float]) -> None:
    layout = Layout(model="m", layers=1, head_dim=4, dtype="float32", page_tokens=1)
    assert_near(layout, codec, torch.tensor(numbers, dtype=torch.float32).view(1, 1, 1, 1, 8))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", EXACT_DTYPES)
def test_what_is_not_finite_is_refused(dtype: str, wrong: float, codec: Codec) -> None:
    layout = replace(GQA, dtype=dtype)
    values = values_of(layout, 2, 3)
    values[1, 2, 3, 7, 31] = wrong
    with pytest.raises(InvalidRequest, match="NaN or infinity") as caught:
        encode(bytes_of(values), layout, codec)
    assert caught.value.field == "pages"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("scale", ["c07f", "807f"])  # NaN, infinity
def test_a_scale_that_is_not_finite_is_refused(scale: str, codec: Codec) -> None:
    lossy = encode(bytes_of(values_of(GQA, 1, 3)), GQA, codec).numpy()
    lossy[0, 16:18] = list(bytes.fromhex(scale))
    with pytest.raises(InvalidRequest, match="scale"):
        decode(lossy, GQA, codec)


# --- Parts of pages and buffers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", [GQA, MLA], ids=["gqa", "mla"])
def test_layers_heads_and_tokens_are_the_same_bytes_as_in_whole_pages(layout: Layout, codec: Codec) -> None:
    pages, small = bytes_of(values_of(layout, 5, 2)), lossy_layout(layout, codec)
    whole = encode(pages, layout, codec)
    back = decode(whole, layout, codec)
    ranges = [(layout.byte_range(layer), small.byte_range(layer)) for layer in range(layout.layers)]
    ranges += [(layout.byte_range(1, *heads), small.byte_range(1, *heads)) for heads in [(0, layout.kv_heads), (0, 1)]]
    for side in (ranges[0], ranges[-1]):  # three tokens of one head
        start, lossy_start = side[0][0], side[1][0]
        ranges.append(((start, start + 3 * layout.token_bytes), (lossy_start, lossy_start + 3 * small.token_bytes)))
    for (start, stop), (lossy_start, lossy_stop) in ranges:
        assert torch.equal(encode(pages[:, start:stop], layout, codec), whole[:, lossy_start:lossy_stop])
        assert torch.equal(decode(whole[:, lossy_start:lossy_stop], layout, codec), back[:, start:stop])


def test_strided_frames_in_and_out() -> None:
    arena = values_of(GQA, 6, 5)
    whole = encode(bytes_of(arena), GQA, "int8")
    layer = encode(arena[1:5, 2], GQA, "int8")  # [frames, heads, tokens, content]
    assert layer.shape == (4, GQA.kv_heads, GQA.page_tokens, 36) and layer.dtype == torch.uint8
    sent = layer.flatten(1)
    assert torch.equal(sent, whole[1:5].view(4, 3, -1)[:, 2])
    target = torch.zeros_like(arena)
    # Contiguous rows as they arrive, into the frames of one layer; and into every second frame.
    assert decode(sent, GQA, "int8", out=target[1:5, 2]) is not None
    exact = decode(whole, GQA, "int8").view(torch.bfloat16).view(6, *GQA.shape)
    assert torch.equal(target[1:5, 2], exact[1:5, 2])
    assert not target[:, :2].any() and not target[0].any() and not target[5].any()
    decode(whole[:3], GQA, "int8", out=target[::2])
    assert torch.equal(target[::2], exact[:3])


def _array(shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    return np.zeros(shape, np.uint8)


SMALL = lossy_layout(GQA, "int8").page_bytes
PROTECTED = _array((2, SMALL))
PROTECTED.flags.writeable = False
