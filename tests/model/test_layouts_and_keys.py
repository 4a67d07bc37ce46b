"""Nouns: page geometry, fingerprints, chained keys. Golden values: keys are the same on every machine and version."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys, as_tokens, extra_digest, root_key
from kvstore.model.replica import FrameClass, RecordFormat, word_of
from kvstore.model.shard import Shard

GQA = Layout(model="meta-llama/Llama-3.1-8B", layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", page_tokens=64)
MLA = Layout(model="deepseek", layers=61, mla_latent=512, mla_rope=64, dtype="bfloat16", page_tokens=64)
QUIET = settings(derandomize=True, deadline=None, max_examples=100)


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_page_bytes_of_gqa_and_mla() -> None:
    assert (GQA.token_bytes, GQA.head_bytes, GQA.layer_bytes, GQA.page_bytes) == (512, 32768, 262144, 8 << 20)
    assert GQA.shape == (32, 8, 64, 256)
    assert (MLA.token_bytes, MLA.page_bytes) == (1152, 61 * 64 * 1152)


def test_byte_ranges_tile_the_page() -> None:
    ranges = [GQA.byte_range(layer, head, head + 2) for layer in range(32) for head in range(0, 8, 2)]
    assert ranges[0][0] == 0 and ranges[-1][1] == GQA.page_bytes
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    assert GQA.byte_range(3) == (3 * 262144, 4 * 262144)


@pytest.mark.parametrize(
    ("layer", "start", "stop", "field"), [(32, 0, 8, "layer"), (-1, 0, 8, "layer"), (0, 8, 9, "heads")]
)
def test_ranges_outside_the_page_are_refused(layer: int, start: int, stop: int, field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        GQA.byte_range(layer, start, stop)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_shards_tile_the_heads(ranks: int) -> None:
    shares = [GQA.shard_heads(rank, ranks) for rank in range(ranks)]
    assert [head for share in shares if share for head in range(*share)] == list(range(8))


def test_stages_tile_the_layers() -> None:
    for layers in (1, 4, 5, 61):
        layout = Layout(model="m", layers=layers, kv_heads=2, head_dim=8)
        for stages in range(1, min(layers, 9) + 1):
            parts = [layout.shard_layers(stage, stages) for stage in range(stages)]
            assert [layer for part in parts for layer in range(*part)] == list(range(layers))
            sizes = [stop - start for start, stop in parts]
            assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    for stage, stages, field in ((2, 2, "stage"), (-1, 2, "stage"), (0, 33, "stages")):
        with pytest.raises(InvalidRequest, match=f"^{field}: "):
            GQA.shard_layers(stage, stages)


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (8, 1), (1, 32), (4, 3), (16, 2)])
def test_shards_tile_the_page(ranks: int, stages: int) -> None:
    """Those that write give every byte once, in the order of the page; the others have what a lower rank has."""
    page = np.arange(GQA.page_bytes // 4, dtype=np.uint32).view(np.uint8).reshape(1, -1)
    seen = np.zeros_like(page)
    for number in range(ranks * stages):
        shard = Shard(GQA, number % ranks, ranks, number // ranks, stages)
        assert (shard.number, shard.count) == (number, ranks * stages)
        part = shard.part(page)
        assert part.shape == shard.unpacked(np.zeros((1, shard.nbytes), np.uint8)).shape and part.nbytes == shard.nbytes
        start, stop = GQA.byte_range(shard.layers[0], *shard.heads)
        assert (shard.offset, shard.width) == (start % GQA.layer_bytes, stop - start)
        np.testing.assert_array_equal(part[0, 0], page[0, start:stop])
        if shard.writes:
            assert not shard.part(seen).any()
            shard.part(seen)[:] = part
    np.testing.assert_array_equal(seen, page)


@pytest.mark.parametrize(
    ("cut", "field"),
    [
        ((0, 0), "ranks"),
        ((2, 2), "rank"),
        (("0", 2), "rank"),
        ((0, 2.0), "ranks"),
        ((0, 3), "ranks"),
        ((0, 1, 0, 0), "stages"),
        ((0, 1, None, 1), "stage"),
        ((0, 1, 0, True), "stages"),
        ((0, 1, 0, 33), "stages"),
    ],
)
def test_bad_shards(cut: tuple[Any, ...], field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        Shard(GQA, *cut)


def test_replicated_heads_have_one_writer() -> None:
    assert [MLA.shard_heads(rank, 4) for rank in range(4)] == [(0, 1), None, None, None]
    few = Layout(model="m", layers=1, kv_heads=2, head_dim=8)
    assert [few.shard_heads(rank, 4) for rank in range(4)] == [(0, 1), None, (1, 2), None]
    assert [few.held_heads(rank, 4) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [MLA.held_heads(rank, 4) for rank in range(4)] == [(0, 1)] * 4
    with pytest.raises(InvalidRequest, match="^ranks: "):
        GQA.shard_heads(0, 3)


CHANGES = {
    "model": "other", "layers": 31, "kv_heads": 4, "head_dim": 64, "dtype": "float16", "page_tokens": 32,
    "revision": "r1", "weights_digest": "d", "rope": "yarn", "group": "g", "attention": "state",
}  # fmt: skip


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_changes_the_fingerprint(field: str) -> None:
    fields = {name: getattr(GQA, name) for name in GQA.__dataclass_fields__}
    assert Layout(**fields).fingerprint == GQA.fingerprint
    assert Layout(**fields | {field: CHANGES[field]}).fingerprint != GQA.fingerprint


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""), ("layers", 0), ("layers", True), ("layers", 2000), ("kv_heads", -1), ("head_dim", 0),
        ("dtype", "float3"), ("page_tokens", 0), ("page_tokens", 4097), ("attention", "odd"), ("mla_rope", 64),
        ("window", 5),
    ],
)  # fmt: skip
def test_impossible_layouts_name_the_field(field: str, value: object) -> None:
    fields = {"model": "m", "layers": 2, "kv_heads": 2, "head_dim": 8} | {field: value}
    with pytest.raises(InvalidRequest) as refused:
        Layout(**fields)  # type: ignore[arg-type]
    assert refused.value.field == f"layout.{field}"


# --- keys -------------------------------------------------------------------------------------------------------------


def keys(tokens: object, page_tokens: int = 4, salt: str = "", extras: list[bytes] | None = None) -> Keys:
    return Keys.of(as_tokens(tokens), page_tokens, root_key(GQA, salt), extras)


def test_keys_are_golden() -> None:
    """These bytes may never change: pages on disk and on other machines are found by them."""
    assert GQA.fingerprint.hex() == "7806a48b3cccc065a1f66b7c62c86db3"
    assert root_key(GQA, "tenant", "adapter").hex() == "77f370789a79a21733fbbc5ca0f32ba3"
    assert [key.hex() for key in keys(range(8))] == [
        "7d5e215e1ac953a1ce827357d84ceb1f",
        "876d4e3c1f1282326f0b196ffac5fd6a",
    ]
    assert keys(range(4), extras=[b"image"]).hashes[0].hex() == "e11a5e51ebc7629b3caaa412bf817a39"


def test_keys_are_the_same_in_another_process() -> None:
    code = (
        "from kvstore.model.layout import Layout; from kvstore.model.prefix import Keys, as_tokens, root_key;"
        "l = Layout(model='m', layers=1, head_dim=8);"
        "print(Keys.of(as_tokens(range(8)), 4, root_key(l)).hashes[1].hex())"
    )
    layout = Layout(model="m", layers=1, head_dim=8)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == Keys.of(as_tokens(range(8)), 4, root_key(layout)).hashes[1].hex()


@QUIET
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.integers(1, 7))
def test_keys_of_any_kind_of_tokens_are_equal(tokens: list[int], page_tokens: int) -> None:
    expected = keys(tokens, page_tokens).hashes
    assert len(expected) == len(tokens) // page_tokens
    for kind in (np.uint32, np.int64, np.uint64):
        assert keys(np.array(tokens, kind), page_tokens).hashes == expected
    assert keys(tuple(tokens), page_tokens).hashes == expected


@QUIET
@given(st.lists(st.integers(0, 3), min_size=4, max_size=24), st.lists(st.integers(0, 3), min_size=4, max_size=24))
def test_keys_are_shared_exactly_as_far_as_tokens_are(one: list[int], two: list[int]) -> None:
    first, second = keys(one, 2), keys(two, 2)
    for page in range(min(len(first), len(second))):
        same = one[: 2 * page + 2] == two[: 2 * page + 2]
        assert (first.hashes[page] == second.hashes[page]) == same


def test_salts_adapters_and_media_have_chains_of_their_own() -> None:
    roots = {root_key(GQA), root_key(GQA, "a"), root_key(GQA, "b"), root_key(GQA, "a", "x"), root_key(GQA, "ax")}
    assert len(roots) == 5
    plain, media, other = keys(range(8)), keys(range(8), extras=[b"", b"1"]), keys(range(8), extras=[b"", b"2"])
    assert plain.hashes[0] == media.hashes[0] == other.hashes[0]
    assert len({plain.hashes[1], media.hashes[1], other.hashes[1]}) == 3
    assert extra_digest(b"1") != extra_digest(b"2") and extra_digest(b"") == bytes(16)


def test_slices_are_the_same_chain() -> None:
    whole = keys(range(20))
    part = whole[2:4]
    assert part.hashes == whole.hashes[2:4] and part.parent == whole.hashes[1] and whole[0:1].parent == whole.root
    width = len(whole.identity_bytes) // len(whole)
    assert part.identity_bytes == whole.identity_bytes[2 * width : 4 * width]
    assert len(whole[3:3]) == 0 and whole[3:3].identity_bytes == b""


def test_identity_is_what_a_record_keeps() -> None:
    named = keys(range(8), extras=[b"a", b""])
    row = named.identity_bytes[: 48 + 16]
    assert row[:16] == named.hashes[0] and row[16:32] == named.root and row[32:48] == extra_digest(b"a")
    assert np.frombuffer(row[48:], "<u4").tolist() == [0, 1, 2, 3]
    assert named.roots_and_extras(0, 2) == named.root + extra_digest(b"a") + named.root + bytes(16)


@pytest.mark.parametrize(
    "tokens",
    [[], "text", b"bytes", 5, [-1], [2**32], [0.5], [[1, 2]], np.zeros((2, 2), int), np.array([1.0]), [None], [2**70]],
)
def test_bad_tokens_name_the_field(tokens: object) -> None:
    with pytest.raises(InvalidRequest, match="^tokens: "):
        as_tokens(tokens)


def test_torch_tokens() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    assert keys(torch.arange(8)).hashes == keys(range(8)).hashes


# --- replicas ---------------------------------------------------------------------------------------------------------


def test_record_fields_do_not_overlap() -> None:
    for page_tokens, layers in ((1, 1), (16, 4), (63, 80), (64, 32)):
        record = RecordFormat(page_tokens, layers)
        assert 8 == record.identity.start < record.identity.stop <= record.parent.start
        assert record.parent.stop == record.info == record.identity_sum - 8 == record.lease_until_ns - 16
        assert record.group == record.checksums.start == record.lease_until_ns + 8
        assert record.row_bytes % 8 == 0 and record.row_bytes >= max(record.checksums.stop, record.writers + 64)


def test_frames_are_page_aligned() -> None:
    assert FrameClass(1, 1, 1).frame_bytes == 4096 and FrameClass(4097, 1, 1).frame_bytes == 8192
    assert word_of(5, 2) == 5 << 8 | 2  # type: ignore[arg-type]
