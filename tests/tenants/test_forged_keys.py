"""Forged keys: what a stranger can do who finds tokens for any page key he has seen. See ``tests.helpers.forging``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

import kvstore
from kvstore import Keys, Layout, PrefixCache, Store
from kvstore.errors import InvalidRequest
from kvstore.model.objects import key_hash, object_root
from kvstore.model.replica import ADDRESS_BYTES
from tests.helpers.forging import PAGE_TOKENS, tokens_for

LAYOUT = Layout(model="forged", layers=2, kv_heads=2, head_dim=32, dtype="uint8", page_tokens=PAGE_TOKENS)
PROMPT = np.arange(3 * PAGE_TOKENS, dtype=np.uint32)


@pytest.fixture
def store() -> Iterator[Store]:
    with kvstore.open(dram="16MiB") as made:
        yield made


@pytest.fixture
def victim(store: Store) -> PrefixCache:
    return store.cache(LAYOUT, salt="victim")


@pytest.fixture
def thief(store: Store) -> PrefixCache:
    return store.cache(LAYOUT, salt="thief")


class Ended(Exception):
    """A writer gives up."""


def pages(count: int, byte: int) -> npt.NDArray[np.uint8]:
    return np.full((count, LAYOUT.page_bytes), byte, np.uint8)


def batched(raw: bytearray) -> list[bytes]:
    """Addresses, one by one."""
    return [bytes(raw[i : i + ADDRESS_BYTES]) for i in range(0, len(raw), ADDRESS_BYTES)]


def forged(thief: PrefixCache, wanted: Keys) -> Keys:
    """The thief's keys of tokens that make these keys, as far as tokens can."""
    links = wanted.links
    parents = [thief.root, *links[:-1]]
    keys = thief.keys(np.concatenate([tokens_for(link, before) for link, before in zip(links, parents, strict=True)]))
    assert keys.links == links and not set(keys.hashes) & set(wanted.hashes)
    return keys


def sound(store: Store) -> bool:
    return store.verify()["findings"] == []


def test_a_lookup_tells_nothing_about_another_root(victim: PrefixCache, thief: PrefixCache) -> None:
    keys = victim.keys(PROMPT)
    theirs = forged(thief, keys)
    assert (victim.put(keys, pages(3, 1)), thief.lookup(theirs).pages, thief.get(theirs).pages) == (3, 0, 0)
    assert thief.get(theirs).reason == thief.get(thief.keys(PROMPT)).reason  # as of what nobody has
    assert thief.prefetch(theirs).pages == 0
    with thief.lease(theirs) as lease:
        assert lease.pages == []
    assert thief.put(theirs, pages(3, 2)) == 3
    found = victim.get(keys).data
    assert found is not None and (found == 1).all()


def test_a_chain_that_goes_on_with_another_s_keys(store: Store, victim: PrefixCache, thief: PrefixCache) -> None:
    """Of the thief's chain the first page is his own, the second has a key of the victim's."""
    keys = victim.keys(PROMPT)
    victim.put(keys, pages(3, 1))
    own = thief.keys(PROMPT[:PAGE_TOKENS]).links
    mixed = thief.keys(np.concatenate([PROMPT[:PAGE_TOKENS], tokens_for(keys.links[1], own[0])]))
    assert mixed.links == [*own, keys.links[1]]
    assert (thief.lookup(mixed).pages, thief.put(mixed, pages(2, 2)), thief.lookup(mixed).pages) == (0, 2, 2)
    found = thief.get(mixed)
    assert found.pages == 2 and found.data is not None and (found.data == 2).all()
    assert sound(store)


def test_nobody_takes_another_root_s_pin_off(store: Store, victim: PrefixCache, thief: PrefixCache) -> None:
    keys = victim.keys(PROMPT)
    theirs = forged(thief, keys)
    victim.put(keys, pages(3, 1))
    store.pin(keys, 60)
    with pytest.raises(InvalidRequest):
        store.unpin(keys=theirs)
    with pytest.raises(InvalidRequest):
        store.pin(theirs, 60)
    assert store.evict(keys=theirs)["pages"] == 0
    assert [pin["salt"] for pin in store.pins()["pins"]] == ["victim"]
    assert store.unpin(keys=keys) == {"unpinned": 1}


def test_what_a_put_says_is_there_is_there(store: Store, victim: PrefixCache, thief: PrefixCache) -> None:
    """The thief knows what will be put, and has put pages of these keys before."""
    keys = victim.keys(PROMPT)
    thief.put(forged(thief, keys[:2]), pages(2, 2))
    stored = victim.put(keys, pages(3, 1))
    assert victim.lookup(keys).pages == victim.get(keys).pages == stored == 3
    assert sound(store)


def test_shards_of_one_group_are_of_one_root(victim: PrefixCache, thief: PrefixCache) -> None:
    """Groups are names that anybody can say: a stranger must not join the frames of another root's pages."""
    keys = victim.keys(PROMPT)
    theirs = forged(thief, keys)

    with (
        pytest.raises(Ended),
        victim.writer(keys, rank=0, ranks=2, group="g") as ours,
        thief.writer(theirs, rank=1, ranks=2, group="g") as stranger,
    ):
        assert not set(batched(ours._raw)) & set(batched(stranger._raw))
        raise Ended


def test_a_key_inside_a_new_chain_that_is_taken_ends_it(store: Store, victim: PrefixCache) -> None:
    """Of one root too: a page that took another's place in the index would make it uncount what hangs on it."""
    keys = victim.keys(PROMPT)
    victim.put(keys, pages(3, 1))
    first = victim.keys(PROMPT[::-1][: 2 * PAGE_TOKENS].copy())
    tokens = np.concatenate([first.tokens, tokens_for(keys.links[1], first.links[1]), PROMPT[:PAGE_TOKENS]])
    again = victim.keys(tokens)
    assert again.hashes[2] == keys.hashes[1]
    assert victim.put(again, pages(4, 3)) == 2
    assert sound(store)
    for evicted in (keys, again):
        store.evict(keys=evicted)
        assert sound(store)


def test_an_object_of_any_name_can_be_stored(store: Store, thief: PrefixCache) -> None:
    for number in range(64):
        name = f"name-{number}"
        try:
            tokens = tokens_for(key_hash(object_root("victim"), name.encode()), thief.root)
        except AssertionError:
            continue  # three keys in four are those of no page of 16 tokens
        break
    assert thief.put(tokens, pages(1, 2)) == 1
    assert store.put(name, b"value", salt="victim") and bytes(store.get(name, salt="victim")) == b"value"
