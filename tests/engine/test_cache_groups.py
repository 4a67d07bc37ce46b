"""A model that mixes sliding windows with full attention has two cache groups: pages and frames of their own for each
kind of layer. The layers with a window keep a ring of frames per sequence, and of what is stored they load and hand
over what their window needs. Answers stay those of plain transformers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from engine.model.observer import Observer
from engine.model.request import Grain, Role, Source, Timing
from engine.shell.engine import Engine
from engine.state.rules import GroupRules, Rules
from engine.state.sequences import Frames, Phase, Sequence
from kvstore import Store
from kvstore.errors import InvalidRequest
from tests.helpers.engines.tokens import (
    CPU,
    TOLERANCE,
    Lab,
    Tokens,
    check_answer,
    distance,
    prompt,
    served,
    to_nvme,
    within,
)
from tests.helpers.processes import Machine, check_laws

PAGE, CHUNK = 16, 24


class Mixed(NamedTuple):
    """A preset, and by hand: layers that see all and that have a window, the window, frames of a ring (what 24 tokens
    and the window before them can touch), pages that the window needs behind 320 tokens."""

    preset: str
    full: int
    windowed: int
    window: int
    ring: int
    needed: int


GEMMA2 = Mixed("tiny-gemma2", 2, 2, 40, 5, 3)  # tokens 280 to 319: pages 17 to 19
GEMMA3 = Mixed("tiny-gemma3", 1, 5, 40, 5, 3)
GPT_OSS = Mixed("tiny-gpt-oss", 2, 2, 24, 4, 2)  # tokens 296 to 319: pages 18 and 19
MIXED = [GEMMA2, GEMMA3, GPT_OSS]
WAYS = list(itertools.product(Timing, Source, Grain))
# Every way with one model. The other two models share the ways: each has every pair of a timing, a source and a grain.
EVEN, ODD = [0, 3, 5, 6], [1, 2, 4, 7]
MODELS_AND_WAYS = [
    *((GEMMA2, *way) for way in WAYS),
    *((GEMMA3, *WAYS[number]) for number in EVEN),
    *((GPT_OSS, *WAYS[number]) for number in ODD),
]
# Tokens of an answer after a prompt of 300 or 320 tokens: the ring reuses frames of the prompt's window for two pages,
# or for one and part of the next. ``test_a_sequence_has_all_frames_of_one_group_and_a_ring_of_the_other`` goes on
# until a ring has been used up more than once.
ANSWER_TOKENS = 20
HOW = {"chunk_tokens": CHUNK, "page_tokens": PAGE}


@pytest.fixture
def lab(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(machine, monkeypatch, CPU) as here:
        yield here


@pytest.fixture(params=MIXED, ids=lambda one: one.preset)
def mixed(request: pytest.FixtureRequest) -> Mixed:
    found: Mixed = request.param
    return found


def layer_bytes(mixed: Mixed) -> int:
    """Of one layer of a page: all layers are alike."""
    return served(mixed.preset).layout(PAGE).layer_bytes


def pages_bytes(mixed: Mixed, full: int, windowed: int) -> int:
    """Of so many pages of either group."""
    return (full * mixed.full + windowed * mixed.windowed) * layer_bytes(mixed)


class GroupFramesSeen(Observer):
    """The most frames of each group that were in use after a step."""

    engine: Engine | None = None
    most = (0, 0)

    def stepped(self, decoding: int, chunk_tokens: int, seconds: float) -> None:
        """See Observer."""
        if self.engine is not None:
            full, window = (arena.frames_total - arena.frames_free for arena in self.engine.arenas.groups)
            self.most = max(self.most[0], full), max(self.most[1], window)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_sequence_has_all_frames_of_one_group_and_a_ring_of_the_other(lab: Lab, mixed: Mixed) -> None:
    """Two sequences of up to 502 tokens, at the same time, in memory that would hold one whole."""
    arena = pages_bytes(mixed, 2 * 32, 2 * mixed.ring)
    assert arena < pages_bytes(mixed, 2 * 32, 2 * 32)
    seen = GroupFramesSeen()
    one = lab.engine(mixed.preset, observer=seen, batch_max=2, arena=arena, keep_pages=1.0, **HOW)
    seen.engine = one
    assert [each.frames_total for each in one.arenas.groups] == [2 * 32, 2 * mixed.ring]
    lab.answers(one, [prompt(i, 400 + i) for i in range(3)], 100)
    assert seen.most == (2 * 32, 2 * mixed.ring), "501 and 502 tokens have 32 pages"
    lab.answers(one, [prompt(9, 21)] * 2, 9)  # what fits into a ring shares and keeps its pages, as ever
    assert one.state.roster.frames.kept == 1
    with pytest.raises(InvalidRequest, match="do not fit the arena"):
        lab.ask(one, prompt(1, 1000), 100)


def test_frames_of_all_groups_are_counted() -> None:
    """Random sequences come and go, with rings and with names: no frame of either group is lost or had twice."""
    draw = np.random.default_rng(3)
    rules = Rules(frames=40, layers=2, page_tokens=16, chunk_tokens=24, batch_max=9, other_groups=(GroupRules(17, 40),))
    frames = Frames(rules.frames, 17, [17])
    here: list[Sequence] = []
    for number in range(600):
        tokens = int(draw.integers(1, 300))
        (pages, *beside), windows = rules.frames_for(tokens), rules.windows_for(tokens)
        chain = draw.integers(2)
        names = [] if any(windows) else [f"{chain}.{page}".encode() for page in range(tokens // 16)]
        made = Sequence(number, str(number), tokens, 0, 1, pages, True, 0.0, 1e6, page_tokens=16)
        made.other_pages, made.windows, made.names, made.span = tuple(beside), windows, names, -(-tokens // 16)
        shared = frames.match(made)
        if frames.fits(made, shared):
            frames.take(made, shared)
            made.cached, made.phase = tokens, Phase.DECODING
            frames.reached(made)
            here.append(made)
            tables = [made.full_table(), *made.full_other_tables()]
            assert [len(set(table)) for table in tables] == [pages, *beside] and len(tables[1]) == made.span
        while here and (draw.integers(3) == 0 or len(here) == rules.batch_max):
            frames.give_back(here.pop(int(draw.integers(len(here)))))
        frames.check(here, 40, [17])
    for one in here:
        frames.give_back(one)
    frames.check([], 40, [17])
    assert (frames.free, frames.other_unused[0] + frames.kept) == (40, 17) and frames.reused and frames.evicted


# --- the pool ---------------------------------------------------------------------------------------------------------


def stored(one: Engine, store: Store, tokens: Tokens) -> int:
    """Tokens before the longest boundary that both groups have."""
    cache = store.cache(one.pool.layouts)
    return cache.lookup(cache.keys(tokens)).tokens


@pytest.mark.parametrize("tier", ["dram", "nvme", "restarted"])
def test_hits_load_what_each_group_needs(lab: Lab, mixed: Mixed, tier: str) -> None:
    store = lab.store(nvme=True)
    one = lab.engine(mixed.preset, store, **HOW)
    prompts = [prompt(20, 320), prompt(21, 327), prompt(22, 200)]
    assert not any(answer.cached for answer in lab.answers(one, prompts, ANSWER_TOKENS))
    if tier != "dram":
        lab.settle()
        to_nvme(store)
    if tier == "restarted":
        one.stop()
        store.close()
        lab.engines.clear()
        lab.stores.clear()  # so that the next one takes the same files
        store = lab.store(nvme=True)
        one = lab.engine(mixed.preset, store, **HOW)
    told = "nvme" if tier == "restarted" else tier
    for tokens, full in ((prompts[0], 20), (prompts[1], 20), (prompts[2], 12)):
        answer = lab.answers(one, [tokens], ANSWER_TOKENS)[0]
        assert answer.cached == {told: min(full * PAGE, len(tokens) - 1)}
        assert answer.usage.computed_tokens == len(tokens) - sum(answer.cached.values())
        assert answer.usage.loaded_bytes == pages_bytes(mixed, full, mixed.needed)
    part = np.concatenate([prompt(20, 230), prompt(23, 100)])  # 224 tokens are 14 pages
    answer = lab.answers(one, [part], ANSWER_TOKENS)[0]
    assert answer.cached == {told: 224} and answer.usage.computed_tokens == 106
    assert answer.usage.loaded_bytes == pages_bytes(mixed, 14, mixed.needed)


def test_a_hit_is_the_longest_boundary_that_both_groups_have(lab: Lab, mixed: Mixed) -> None:
    """Of the group with a window the pool has pages 0 to 9, and 14 on; of the other one all 20."""
    tokens, from_where = prompt(24, 330), lab.store()
    cache = from_where.cache(lab.engine(mixed.preset, from_where, **HOW).pool.layouts)
    lab.answers(next(iter(lab.engines.values())), [tokens], 2)
    store = lab.store()
    one = lab.engine(mixed.preset, store, **HOW)
    copied_pages(cache, store, one, tokens, [page for page in range(20) if not 10 <= page < 14])
    answer = lab.answers(one, [tokens], 8)[0]
    assert answer.cached == {"dram": 320}
    cut = np.concatenate([tokens[: 15 * PAGE], prompt(25, 40)])  # its window reaches pages that are not there
    answer = lab.answers(one, [cut], 8)[0]
    assert answer.cached == {"dram": 160} and answer.usage.loaded_bytes == pages_bytes(mixed, 10, mixed.needed)


def copied_pages(cache: object, store: Store, one: Engine, tokens: Tokens, windowed: list[int], zero: int = -1) -> None:
    """Have a store take all pages of the first group from another one, and these of the second; one of them zeroed."""
    from kvstore.client.grouped_cache import GroupedCache

    assert isinstance(cache, GroupedCache)
    to = store.cache(one.pool.layouts)
    keys, mine = cache.keys(tokens), to.keys(tokens)
    for group, pages in enumerate((list(range(keys.pages(0))), windowed)):
        for page in pages:
            found = cache.groups[group].get(keys.parts(group, range(page, page + 1))[0]).data
            if found is None or not len(found):  # of a chain, a page is found with those before it
                found = cache.groups[group].get(keys.parts(group, range(page + 1))[0]).data[-1:]  # type: ignore[index]
            row = np.zeros_like(found) if group and page == zero else found
            (put,) = mine.parts(group, range(page, page + 1))
            assert to.groups[group].put(put, row, wait=True) == 1


def test_a_page_of_the_window_that_is_wrong_changes_the_answer(lab: Lab, mixed: Mixed) -> None:
    """One that the window needs; one that it does not is never read."""
    tokens, from_where = prompt(26, 323), lab.store()
    first = lab.engine(mixed.preset, from_where, **HOW)
    lab.answers(first, [tokens], 2)
    cache = from_where.cache(first.pool.layouts)
    for zero, right in ((20 - mixed.needed, False), (19 - mixed.needed, True)):
        store = lab.store()
        one = lab.engine(mixed.preset, store, **HOW)
        copied_pages(cache, store, one, tokens, list(range(20)), zero)
        answer = lab.ask(one, tokens, 8).wait()
        assert answer.cached == {"dram": 320}
        if right:
            check_answer(answer)
        else:
            assert distance(answer) > 10 * TOLERANCE


def test_turns_go_on_at_other_engines_and_after_a_migration(lab: Lab, mixed: Mixed) -> None:
    """The pages that a ring overwrites are stored before: the next turn and another engine find them all."""
    store = lab.store()
    one, other = (lab.engine(mixed.preset, store, **HOW) for _ in range(2))
    answer = lab.answers(one, [prompt(30, 150)], 100)[0]
    history = np.concatenate([prompt(30, 150), np.array(answer.tokens, np.uint32)])
    pages = (len(history) - 1) // PAGE
    within("all of it is stored", lambda: stored(one, store, history) == pages * PAGE)
    turn = lab.answers(other, [np.concatenate([history, prompt(31, 20)])], 5)[0]
    assert turn.cached == {"dram": pages * PAGE}
    moving = lab.ask(one, prompt(32, 150), 100)
    moving.wait(3)
    assert one.migrate(moving.request.id, lab.address_of(other))
    check_answer(moving)
    check_laws(store)


@pytest.mark.parametrize(
    ("mixed", "chunk"),
    [(GEMMA3, 1), (GEMMA2, 7), (GPT_OSS, 7), *itertools.product(MIXED, (48, 300))],
    ids=lambda value: getattr(value, "preset", value),
)
def test_chunks_of_any_size_beside_others(lab: Lab, mixed: Mixed, chunk: int) -> None:
    one = lab.engine(mixed.preset, lab.store(), chunk_tokens=chunk, page_tokens=PAGE, batch_max=3)
    prompts = [prompt(35 + i, count) for i, count in enumerate((16, 33, 170, 250))]
    for pool in (False, True, True):
        lab.answers(one, prompts, 12, use_pool=pool)


# --- hand-offs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mixed", "handoff", "source", "grain"),
    MODELS_AND_WAYS,
    ids=lambda value: getattr(value, "preset", None),
)
def test_a_handoff_sends_what_each_group_needs(
    lab: Lab, mixed: Mixed, handoff: Timing, source: Source, grain: Grain
) -> None:
    store = lab.store() if source is Source.DRAM else None
    prefill, decode = lab.pair(mixed.preset, store, handoff=handoff, source=source, grain=grain, **HOW)
    token = layer_bytes(mixed) // PAGE
    for count in (300, 320, 20):
        answer = lab.answers(decode, [prompt(50 + count, count)], max(ANSWER_TOKENS, mixed.window + 5 - count))[0]
        assert answer.usage.prefill_engine == lab.address_of(prefill)
        assert answer.usage.computed_tokens == 0
        windowed = count - max(0, count - mixed.window) // PAGE * PAGE
        came = answer.usage.moved_bytes + answer.usage.loaded_bytes  # a lazy one may find all of it in the pool
        wanted = token * (mixed.full * count + mixed.windowed * windowed)
        assert came == wanted or (store is not None and wanted < came <= wanted + pages_bytes(mixed, 0, 1))


def test_a_handoff_that_breaks_off_is_computed_here(lab: Lab, mixed: Mixed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the window has come, and what was loaded before may be overwritten: nothing of it is used."""
    store = lab.store()
    lab.answers(lab.engine(mixed.preset, store, **HOW), [prompt(60, 200)], 2)
    prefill = lab.engine(mixed.preset, role=Role.PREFILL, **HOW)
    asks = {"prefill": (lab.address_of(prefill),), "local_prefill_tokens": 0}
    decode = lab.engine(mixed.preset, store, role=Role.DECODE, **asks, **HOW)
    sent: list[int] = []
    for staging in prefill.stagings.groups:

        def some(frame: int, count: int, layer: int, send: object = staging.send_layer) -> object:
            sent.append(layer)
            if len(sent) > 3:
                raise InvalidRequest("layer", "enough")
            return send(frame, count, layer)  # type: ignore[operator]

        monkeypatch.setattr(staging, "send_layer", some)
    answer = lab.answers(decode, [prompt(60, 330)], ANSWER_TOKENS)[0]
    assert len(sent) > 3 and answer.usage.prefill_engine == ""
    assert sum(answer.cached.values()) + answer.usage.computed_tokens >= 330


def test_what_a_handoff_did_not_bring_is_not_stored(lab: Lab, mixed: Mixed) -> None:
    """A ring has frames for a page more than the window needs: what lies there is not put in the name of that page."""
    store = lab.store()
    how = {"local_prefill_tokens": 0, **HOW}
    prefill = lab.engine(mixed.preset, role=Role.PREFILL, **HOW)  # it has no pool: who decodes stores what it can
    decode = lab.engine(mixed.preset, store, role=Role.DECODE, prefill=(lab.address_of(prefill),), **how)
    lab.answers(decode, [prompt(95, 320)], 20)
    other = lab.engine(mixed.preset, store, **HOW)
    within("what came is stored", lambda: stored(other, store, prompt(95, 320)) == 320)
    cut = np.concatenate([prompt(95, 304), prompt(96, 30)])  # the window behind 304 tokens has one page more
    assert lab.answers(other, [cut], 8)[0].cached == {}


@pytest.mark.parametrize("grain", Grain)
@pytest.mark.parametrize(("asks", "asked"), [(512, CHUNK), (CHUNK, 512)])
def test_handoffs_between_engines_with_other_chunks(
    lab: Lab, mixed: Mixed, grain: Grain, asks: int, asked: int
) -> None:
    """Who has no ring does not get what one with a ring has overwritten, and computes the prompt. The other way round
    all is there."""
    prefill = lab.engine(mixed.preset, role=Role.PREFILL, chunk_tokens=asked, page_tokens=PAGE)
    to = {"prefill": (lab.address_of(prefill),), "local_prefill_tokens": 0, "grain": grain}
    decode = lab.engine(mixed.preset, role=Role.DECODE, chunk_tokens=asks, page_tokens=PAGE, **to)
    answer = lab.answers(decode, [prompt(90, 320)], ANSWER_TOKENS)[0]
    assert answer.usage.prefill_engine == (to["prefill"][0] if asks == CHUNK else "")
    assert answer.usage.computed_tokens == (0 if asks == CHUNK else 320)
