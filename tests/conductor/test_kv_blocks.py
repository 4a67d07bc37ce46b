"""Blocks of foreign engines as pages of ours: KV events in both encodings, and what no publisher should say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.conductor.state.kv_blocks import KV_OUTCOMES, KvBlocks
from kvstore.cluster.directory import GONE
from kvstore.model.prefix import Keys, fingerprints, root_of

LAYOUT = bytes(16)
TOKENS = list(range(1, 193))


def root(salt: str, adapter: str) -> bytes:
    return root_of(LAYOUT, salt, adapter)


def blocks(page_tokens: int = 16, bytes_max: int = 1 << 20) -> KvBlocks:
    return KvBlocks(page_tokens, root, bytes_max, Counter())


def pages_of(tokens: list[int], page_tokens: int = 16, salt: str = "", adapter: str = "") -> list[int]:
    """As the conductor asks for them."""
    keys = Keys.of(np.array(tokens, np.uint32), page_tokens, root(salt, adapter))
    return [int(page) for page in fingerprints(b"".join(keys.links))]


def stored(names: list[Any], parent: Any, tokens: list[int], medium: Any = "GPU", **more: Any) -> dict[str, Any]:
    size = len(tokens) // len(names)
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": size,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    } | more


def removed(names: list[Any], medium: Any = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": names, "medium": medium}


def chain(size: int, tokens: list[int] = TOKENS) -> list[dict[str, Any]]:
    """An event for each block of so many tokens; the hash of the block that ends at token n is n."""
    return [stored([end], end - size or None, tokens[end - size : end]) for end in range(size, len(tokens) + 1, size)]


def as_arrays(event: dict[str, Any]) -> list[Any]:
    return list(event.values())


def present(known: KvBlocks) -> set[int]:
    return {int(page) for page in known.all_pages()[0]}


def changes(known: KvBlocks) -> tuple[set[int], set[int]]:
    """The pages that the engine has gained, and those that it has lost."""
    pages, marks = known.changes()
    rows = list(zip(pages.tolist(), marks.tolist(), strict=True))
    return {page for page, mark in rows if not mark & GONE}, {page for page, mark in rows if mark & GONE}


@pytest.mark.parametrize("as_maps", [True, False])
@pytest.mark.parametrize(("block", "page"), [(16, 16), (32, 16), (16, 48), (24, 16), (64, 24)])
def test_blocks_of_any_size_are_the_pages_that_requests_ask_for(block: int, page: int, as_maps: bool) -> None:
    known = blocks(page)
    events = chain(block)
    assert not known.apply([0.0, events if as_maps else [as_arrays(each) for each in events], 0])
    whole = len(TOKENS) - len(TOKENS) % block
    assert changes(known) == (set(pages_of(TOKENS[:whole], page)), set())
    assert present(known) == set(pages_of(TOKENS[:whole], page))


def test_a_page_is_gone_with_any_of_its_blocks() -> None:
    known = blocks(48)
    known.apply([0.0, chain(16)])
    pages = pages_of(TOKENS, 48)
    known.changes()
    known.apply([0.0, [removed([32])]])
    assert changes(known) == (set(), {pages[0]})
    known.apply([0.0, [removed([96, 112])]])  # the last block of the second page, the first of the third
    assert present(known) == {pages[3]}
    known.apply([0.0, [removed(list(range(16, 193, 16)))]])
    assert present(known) == set() and known.nbytes == 0


def test_a_copy_on_another_medium_stays_when_the_first_goes() -> None:
    known = blocks()
    (page,) = pages_of(TOKENS[:16])
    known.apply([0.0, [stored([1], None, TOKENS[:16]), stored([1], None, [], "CPU", block_size=16)]])
    assert known.changes()[1].tolist() == [0, 1]
    known.apply([0.0, [removed([1])]])
    assert known.changes()[1].tolist() == [GONE] and present(known) == {page}
    known.apply([0.0, [removed([1], "CPU")]])
    assert known.changes()[1].tolist() == [1 | GONE] and known.nbytes == 0


def test_salts_and_adapters_have_pages_of_their_own() -> None:
    known = blocks()
    salted = [stored([1], None, TOKENS[:16], extra_keys=[["s"]]), stored([2], 1, TOKENS[16:32], extra_keys=[None])]
    known.apply([0.0, [*salted, stored([3], None, TOKENS[:16], lora_id=1, lora_name="a", extra_keys=[["a", "s"]])]])
    assert present(known) == {*pages_of(TOKENS[:32], salt="s"), *pages_of(TOKENS[:16], salt="s", adapter="a")}
    known.apply([0.0, [stored([4], None, TOKENS[:16], extra_keys=[[["image", 3]]]), stored([5], 4, TOKENS[:16])]])
    known.apply([0.0, [stored([6], None, TOKENS[:16], lora_id=1)]])
    assert known.counts["not_kept"] == 3, "they depend on more than we can say"


def test_what_hangs_on_nothing_known_is_left_out_and_counted() -> None:
    known = blocks()
    known.apply([0.0, chain(16)[2:]])
    assert present(known) == set() and known.counts["not_kept"] == 10
    known.apply([0.0, [stored([1], None, TOKENS[:16], group_idx=1)]])
    assert known.counts["other_group"] == 1 and known.nbytes == 0


def test_clearing_begins_again() -> None:
    known = blocks()
    assert known.apply([0.0, [*chain(16), {"type": "AllBlocksCleared"}, *chain(16)[:1]]])
    assert present(known) == set(pages_of(TOKENS[:16]))
    assert known.apply([0.0, [["AllBlocksCleared"]]]) and known.nbytes == 0


def test_memory_is_bounded() -> None:
    known = blocks(bytes_max=100_000)
    for number in range(1000):
        known.apply([0.0, [stored([number + 1], None, [number] * 16)]])
    assert known.nbytes <= 100_000 and known.counts["no_room"] > 500
    for number in range(1000):
        known.apply([0.0, [removed([number + 1])]])
    assert known.nbytes == 0 and not present(known)


def test_siblings_that_come_and_go_leave_nothing_with_their_parent() -> None:
    """A page that two blocks share is remembered at both, and forgotten at both."""
    known = blocks(32)
    known.apply([0.0, [stored([1], None, TOKENS[:16])]])
    for number in range(2, 500):
        known.apply([0.0, [stored([number], 1, [number] * 16), removed([number])]])
    assert not present(known) and not known._blocks[1].pages


BAD = [
    None,
    7,
    [],
    [0.0],
    [0.0, 7],
    {"events": 3},
    [0.0, [7]],
    [0.0, [[]]],
    [0.0, [[7]]],
    [0.0, [{"type": 7}]],
    [0.0, [["BlockStored"]]],
    [0.0, [stored([1.5], None, TOKENS[:16])]],
    [0.0, [stored([b""], None, TOKENS[:16])]],
    [0.0, [stored([b"x" * 65], None, TOKENS[:16])]],
    [0.0, [stored([1], None, ["a"] * 16)]],
    [0.0, [stored([1], None, [-1] * 16)]],
    [0.0, [stored([1], None, [1 << 32] * 16)]],
    [0.0, [stored([1], None, TOKENS[:16], block_size=0)]],
    [0.0, [stored([1], None, TOKENS[:16], medium=3)]],
    [0.0, [removed([[]])]],
    [0.0, [removed(7)]],  # type: ignore[arg-type]
]


@pytest.mark.parametrize("batch", BAD)
def test_what_is_no_event_is_counted_and_the_next_one_is_taken(batch: Any) -> None:
    known = blocks()
    assert not known.apply(batch)
    assert known.counts["malformed"] == 1
    known.apply([0.0, chain(16)])
    assert len(present(known)) == len(TOKENS) // 16


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=8) | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", "CPU"]),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=8), inner, max_size=6),
    max_leaves=30,
)  # fmt: skip
EVENTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockRemoved"]), "block_hashes": st.lists(st.integers(0, 9), max_size=3)},
    optional={
        "parent_block_hash": st.none() | st.integers(0, 9) | VALUES,
        "token_ids": st.lists(st.integers(0, 9), max_size=9) | VALUES,
        "block_size": st.integers(-1, 4) | VALUES,
        "medium": st.sampled_from(["GPU", "CPU"]) | VALUES,
        "extra_keys": VALUES,
        "lora_name": VALUES,
    },
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(EVENTS | VALUES, max_size=6) | VALUES, max_size=6))
def test_nothing_that_can_be_packed_does_harm(batches: list[Any]) -> None:
    known = blocks(4, bytes_max=4000)
    mirror: set[tuple[int, int]] = set()
    for batch in batches:
        if known.apply([0.0, batch]):
            mirror = _rows(*known.all_pages())
        for page, mark in zip(*(each.tolist() for each in known.changes()), strict=True):
            (mirror.discard if mark & GONE else mirror.add)((page, mark & ~GONE))
        assert 0 <= known.nbytes <= 4000 and set(known.counts) <= set(KV_OUTCOMES)
    assert mirror == _rows(*known.all_pages()), "who follows the changes knows all"


def _rows(pages: Any, marks: Any) -> set[tuple[int, int]]:
    return set(zip(pages.tolist(), marks.tolist(), strict=True))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 8)), max_size=40),
    st.sampled_from([(4, 4), (4, 8), (8, 4), (6, 4)]),
)
def test_no_page_is_told_of_that_is_not_whole(steps: list[tuple[bool, int]], sizes: tuple[int, int]) -> None:
    """Blocks of one chain come and go in any order."""
    block, page = sizes
    known, there = blocks(page), set[int]()
    pages = pages_of(TOKENS[: 8 * block], page)
    for comes, number in steps:
        if comes:
            event = stored([number], number - 1 or None, TOKENS[(number - 1) * block : number * block])
            known.apply([0.0, [event]])
            there |= {number} if number == 1 or number - 1 in known._blocks else set()
        else:
            known.apply([0.0, [removed([number])]])
            there.discard(number)
        whole = {
            pages[at]
            for at in range(len(pages))
            if set(range(at * page // block + 1, ((at + 1) * page - 1) // block + 2)) <= there
        }
        assert present(known) <= whole
