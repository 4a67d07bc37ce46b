"""Pages stay in the arena when their request has ended: the next prompt that begins alike has them, and says the same.

``hbm`` in what an answer found are tokens of these pages.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine.model.observer import Observer
from engine.model.request import Role
from engine.shell.engine import Engine
from engine.state import integrity
from engine.state.sequences import Frames, Phase, Sequence
from tests.helpers.engines.tokens import EXACT, MAIN, Lab, Tokens, check_answer, keys_of, prompt
from tests.helpers.processes import Machine, wait_until

PAGE = 16
WINDOWED = ("tiny-gpt-oss", "tiny-gemma2")  # sliding windows beside full attention, sinks, soft caps


@pytest.fixture(params=EXACT, ids=str)
def lab(request: pytest.FixtureRequest, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(machine, monkeypatch, request.param) as here:
        yield here


def full(tokens: Tokens) -> int:
    """Tokens of a prompt that pages may be found for: all but the last one, in whole pages."""
    return (len(tokens) - 1) // PAGE * PAGE


def keeper(lab: Lab, preset: str = "tiny-llama", store: Any = None, frames: int = 0, **config: Any) -> Engine:
    """An engine that keeps pages; with so many frames."""
    if frames:
        config["arena"] = frames * lab.engine(preset).layout.page_bytes
    return lab.engine(preset, store, **{"keep_pages": 1.0, **config})


def kept(one: Engine) -> int:
    """Pages that it keeps."""
    return int(one.status()["frames"]["kept"])


# --- which pages are kept, and which are evicted: decisions -----------------------------------------------------------


def sequence(number: int, names: str, tokens: int) -> Sequence:
    """One whose pages have these names, a letter each; of the last page one token is there."""
    pages = -(-tokens // PAGE)
    made = Sequence(number, str(number), tokens, 0, 1, pages, True, 0.0, 1e6, page_tokens=PAGE)
    made.names = [name.encode() for name in names.split()]
    return made


def computed(frames: Frames, one: Sequence, shared: int = 0) -> list[int]:
    """It has its frames, and all of its tokens in them. The pages that were evicted for it."""
    evicted = frames.take(one, shared)
    one.cached, one.phase = one.prompt, Phase.DECODING
    frames.reached(one)
    return evicted


def test_the_worked_example() -> None:
    frames = Frames(8, 8)
    first, second, third = (sequence(n, f"a b {n}", 3 * PAGE + 1) for n in (1, 2, 3))
    computed(frames, first)
    assert frames.find_shared(second) == (2, False) and computed(frames, second, 2) == []
    assert (frames.free, frames.shared) == (2, 2)
    frames.give_back(first)
    assert (frames.free, frames.kept) == (4, 1)
    frames.check([second], 8)
    frames.give_back(second)
    assert (frames.free, frames.kept) == (8, 4) and list(frames._kept) == [b"1", b"2", b"b", b"a"]
    other = sequence(4, "", 4 * PAGE)
    assert computed(frames, other) == []
    assert frames.find_shared(third) == (2, False) and frames.fits(third, 2)
    assert computed(frames, third, 2) == [2, 4], "the last pages of the first and of the second"
    frames.check([other, third], 8)
    assert (frames.free, frames.reused, frames.evicted) == (0, 2, 2)


def test_frames_of_kept_pages_are_as_good_as_free_but_for_those_it_shares() -> None:
    frames = Frames(6, 6)
    computed(frames, one := sequence(1, "a b c d", 4 * PAGE))
    frames.give_back(one)
    again = sequence(2, "a b c x y", 6 * PAGE + 1)
    assert frames.free == 6 and frames.find_shared(again) == (3, False) and not frames.fits(again, 3), "7 pages"
    again.pages = 6
    assert frames.fits(again, 3) and computed(frames, again, 3) == [3]


def test_pages_computed_twice_are_kept_once() -> None:
    """Nobody waits where another engine waits for him: two compute the same, and one goes on longer."""
    frames = Frames(12, 12)
    one, two = sequence(1, "a b", 2 * PAGE), sequence(2, "a b c", 3 * PAGE)
    computed(frames, one)
    computed(frames, two)
    assert (one.listed, two.listed, two.whole) == (2, 0, 3)
    assert frames.give_back(two) == ([2, 3], [0, 1, 4]), "its own a and b are gone, and c stays behind theirs"
    frames.check([one], 12)
    frames.give_back(one)
    assert (frames.kept, frames.unused) == (3, 9) and frames.match(sequence(3, "a b c", 4 * PAGE)) == 3


@pytest.mark.parametrize("kept_max", [0, 2])
def test_no_more_are_kept_than_may_be(kept_max: int) -> None:
    frames = Frames(8, kept_max)
    computed(frames, one := sequence(1, "a b c d", 4 * PAGE))
    freed, stay = frames.give_back(one)
    assert (sorted(freed), stay) == ([2, 3], [0, 1]) if kept_max else (sorted(freed), stay) == ([0, 1, 2, 3], [])
    frames.check([], 8)


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [*MAIN, *WINDOWED])
def test_repeats_parts_and_next_turns(lab: Lab, preset: str) -> None:
    """Without a pool: what is found was kept. Pages that an answer filled are, too."""
    one = keeper(lab, preset, chunk_tokens=256)  # so that rings of frames hold all of it
    tokens = prompt(70, 90)
    first = lab.answers(one, [tokens], 40)[0]
    again = lab.answers(one, [tokens], 40)[0]
    assert first.cached == {} and again.cached == {"hbm": full(tokens)} and again.tokens == first.tokens
    aligned = lab.answers(one, [tokens[: 5 * PAGE]], 4)[0]
    assert aligned.cached == {"hbm": 4 * PAGE}, "the last page has the token that is computed"
    branch = np.concatenate([tokens[:50], prompt(71, 30)])
    assert lab.answers(one, [branch], 4)[0].cached == {"hbm": 48}
    history = np.concatenate([tokens, np.array(first.tokens, np.uint32)])
    turn = np.concatenate([history, prompt(72, 20)])
    assert lab.answers(one, [turn], 20)[0].cached == {"hbm": (len(history) - 1) // PAGE * PAGE}
    about = one.status()
    assert about["frames"]["free"] == about["frames"]["total"] and about["kept_pages"]["found"] == 5 + 4 + 3 + 8
    assert about["kept_pages"]["evicted"] == 0


def test_the_rest_comes_from_the_pool(lab: Lab) -> None:
    """Another engine has computed more of it."""
    store = lab.store()
    one, other = keeper(lab, store=store), lab.engine("tiny-llama", store)
    long = prompt(75, 10 * PAGE + 3)
    lab.answers(one, [long[: 4 * PAGE + 1]], 2)
    lab.answers(other, [long], 2)
    assert lab.answers(one, [long], 4)[0].cached == {"hbm": 4 * PAGE, "dram": 6 * PAGE}


@pytest.mark.parametrize("other", [{"salt": "b"}, {"use_pool": False}, {"allow_lossy": True}])
def test_who_finds_nothing_and_leaves_nothing(lab: Lab, other: dict[str, object]) -> None:
    """Another tenant's pages are his; who leaves the pool alone, or allows lossy KV, keeps apart."""
    one, tokens = keeper(lab), prompt(77, 70)
    lab.answers(one, [tokens], 4)
    before = kept(one)
    assert lab.answers(one, [tokens], 4, **other)[0].cached == {}
    lab.settle()
    assert kept(one) == (2 * before if "salt" in other else before)
    again = lab.answers(one, [tokens], 4, **other)[0]
    assert again.cached == ({"hbm": full(tokens)} if "salt" in other else {})


def test_kept_pages_of_an_engine_that_stores_lossy_ones_are_exact(lab: Lab) -> None:
    """What the pool has of this prompt is an int8 replica, which this request does not allow; what is kept differs."""
    store, tokens = lab.store(), prompt(78, 70)
    one = keeper(lab, store=store, compress="int8")
    lab.answers(one, [tokens], 4)
    assert lab.answers(one, [tokens], 4)[0].cached == {"hbm": full(tokens)}
    assert not store.cache(one.layout).lookup(tokens).pages and store.stats()["tiers"]["dram"]["pages"]


def handed_over(lab: Lab, decode: Engine, tokens: Tokens) -> None:
    """Answer it until all pages are kept: not where an answer is over before the mover of its KV has said its end."""

    def answered() -> bool:
        lab.answers(decode, [tokens], 8)
        lab.settle()
        return kept(decode) == len(tokens) // PAGE

    wait_until("its pages are kept", answered)


@pytest.mark.parametrize("preset", MAIN)
def test_both_ends_of_a_hand_off_keep_its_pages(lab: Lab, preset: str) -> None:
    prefill, decode = lab.pair(preset, keep_pages=1.0)
    tokens = prompt(79, 5 * PAGE + 3)
    first = lab.answers(decode, [tokens], 8)[0]
    assert first.usage.prefill_engine and first.cached == {} and first.usage.moved_bytes
    handed_over(lab, decode, tokens)
    assert kept(prefill) == 5
    again = lab.answers(decode, [tokens], 8)[0]
    assert again.cached == again.usage.prefill_cached_tokens == {"hbm": 5 * PAGE}
    assert 0 < again.usage.moved_bytes < first.usage.moved_bytes / 5, "the last tokens alone"


def test_a_decode_engine_that_has_almost_all_asks_nobody(lab: Lab) -> None:
    prefill = lab.engine("tiny-llama", role=Role.PREFILL)
    asks = {"prefill": (lab.address_of(prefill),), "local_prefill_tokens": PAGE}
    decode = keeper(lab, role=Role.DECODE, **asks)
    tokens = prompt(80, 5 * PAGE + 3)
    handed_over(lab, decode, tokens)
    again = lab.answers(decode, [tokens], 4)[0]
    assert not again.usage.prefill_engine and again.usage.computed_tokens == 3


class Ends(Observer):
    """Ends a request in the middle of its prompt."""

    def __init__(self, steps: int) -> None:
        self.engine: Engine | None = None
        self._steps = steps

    def stepped(self, decoding: int, chunk_tokens: int, seconds: float) -> None:
        """See Observer."""
        self._steps -= 1
        if not self._steps:
            assert self.engine is not None
            (number,) = self.engine.state.roster.active
            self.engine.cancel(self.engine.state.roster.sequences[number].name)


def test_a_request_that_is_given_up_keeps_what_is_whole(lab: Lab) -> None:
    """The chunks that were computed, and not the one that was to come."""
    ends = Ends(2)
    one = ends.engine = keeper(lab, chunk_tokens=40, observer=ends)
    tokens = prompt(81, 150)
    assert lab.ask(one, tokens, 4).wait().reason == "cancelled"
    lab.settle()
    assert kept(one) == 4, "two chunks of 40 tokens, that end with a page"
    assert lab.answers(one, [tokens], 4)[0].cached == {"hbm": 4 * PAGE}


# --- when frames are needed -------------------------------------------------------------------------------------------


def test_a_page_that_the_pool_lost_is_there_before_its_frame_is_reused(lab: Lab) -> None:
    store = lab.store()
    one = keeper(lab, store=store, frames=24)
    tokens = prompt(84, 6 * PAGE + 3)
    lab.answers(one, [tokens], 4)
    keys = keys_of(one, store, tokens)
    cache = store.cache(one.layout)
    wait_until("it is stored", lambda: cache.lookup(keys).pages == 6)
    store.evict(pages=100)
    assert cache.lookup(keys).pages == 0
    assert lab.answers(one, [tokens], 4)[0].cached == {"hbm": 6 * PAGE}, "that is kept all the same"
    lab.answers(one, [prompt(85, 12 * PAGE + 3)], 4)
    assert cache.lookup(keys).pages == 0, "there is room for both"
    lab.answers(one, [prompt(86, 4 * PAGE + 3)], 4)
    wait_until("it was given to the pool", lambda: cache.lookup(keys).pages == 6)
    assert one.status()["kept_pages"]["demoted"] == 6 and one.status()["kept_pages"]["evicted"] == 0
    lab.answers(one, [prompt(87, 20 * PAGE + 3)], 4)
    assert lab.answers(one, [tokens], 4)[0].cached == {"dram": 6 * PAGE}


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_many_requests_in_few_frames(lab: Lab, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Repeats, next turns, branches, and some that are given up: all answers are right, and every law holds all the
    time."""
    chance = random.Random(12)
    one = keeper(lab, store=lab.store(), frames=40, keep_pages=share, chunk_tokens=48)
    turn = one.performer.turn

    def checked() -> bool:
        stepped = turn()
        integrity.check(one.state)
        return stepped

    monkeypatch.setattr(one.performer, "turn", checked)
    histories: list[Tokens] = [prompt(seed, 20) for seed in range(90, 94)]
    for _ in range(10):
        asked = []
        for _ in range(4):
            history = chance.choice(histories)
            cut = chance.choice((len(history), len(history), chance.randint(1, len(history))))
            more = prompt(chance.randint(1000, 9000), chance.choice((1, 9, 40)))
            asked.append(lab.ask(one, np.concatenate([history[:cut], more])[:400], chance.choice((1, 12, 30))))
        victim = chance.choice(asked) if chance.random() < 0.3 else None
        if victim is not None:
            victim.wait(1)
            one.cancel(victim.request.id)
        for answer in asked:
            answer.wait()
            if answer is not victim:
                check_answer(answer)
                histories.append(np.concatenate([answer.request.tokens, np.array(answer.tokens, np.uint32)]))
        histories = histories[-12:]
    lab.settle()
    about = one.status()
    assert about["frames"]["free"] == 40 and 0 < about["frames"]["kept"] <= 40 * share
    assert about["kept_pages"]["found"] > 40 and about["kept_pages"]["evicted"] > 40
