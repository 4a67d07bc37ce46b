"""Greedy answers over a hand-off are those of plain transformers: eager and lazy, out of the arena and through the DRAM
tier, layer by layer and whole, with a pool and without; and where an answer moves on to another engine.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from engine.model.request import Grain, Role, Source, Timing
from engine.shell.engine import Engine
from tests.helpers.engines.tokens import (
    MAIN,
    PLACES,
    Answer,
    Lab,
    Tokens,
    check_answer,
    keys_of,
    prompt,
    to_nvme,
    within,
)
from tests.helpers.processes import Machine, check_laws

FAMILIES = (*MAIN, "tiny-gemma2", "tiny-gpt-oss", "tiny-mistral")
PAGES = (16, 32, 64)
CHUNKS = (64, 24, 512)
LATE_S = 60.0  # for a mover that may not report before its answer is over
LONG = 120  # tokens of an answer that still runs when it is to move
WAYS = list(itertools.product(Timing, Source, Grain))
# Every way with a pool and without; families, pages and chunks take turns, so that each way meets each of them in one
# of the tests below.
CASES = [
    (*way, pool, FAMILIES[(i + 3 * turn) % 6], PAGES[(i + turn) % 3], CHUNKS[(i // 3 + turn) % 3])
    for turn, pool in enumerate((True, False))
    for i, way in enumerate(WAYS)
]


@pytest.fixture(params=PLACES, ids=str)
def lab(request: pytest.FixtureRequest, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(machine, monkeypatch, request.param) as here:
        yield here


def check_moved(lab: Lab, answer: Answer, source: Engine) -> None:
    """The other engine computed the prompt, and its KV came here, unless the pool had all of it by then."""
    assert answer.usage.prefill_engine == lab.address_of(source)
    usage, prompt_tokens = answer.usage, len(answer.request.tokens)
    assert usage.moved_bytes > 0 or sum(answer.cached.values()) == prompt_tokens, usage
    assert usage.computed_tokens == 0


def config_of(way: tuple[Timing, Source, Grain], **config: object) -> dict[str, object]:
    return {"handoff": way[0], "source": way[1], "grain": way[2], **config}


# --- every way --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("handoff", "source", "grain", "pool", "preset", "page", "chunk"), CASES)
def test_every_way_of_a_handoff(
    lab: Lab, handoff: Timing, source: Source, grain: Grain, pool: bool, preset: str, page: int, chunk: int
) -> None:
    """Cold; then prompts that begin with those, of which both engines find the beginning where there is a pool."""
    store = lab.store() if pool else None
    way = config_of((handoff, source, grain), page_tokens=page, chunk_tokens=chunk)
    # Slow enough that layers come one by one while others decode.
    prefill, decode = lab.pair(preset, store, link="20MB/s", **way)
    prompts = [prompt(i, n) for i, n in enumerate((1, page - 1, page, page + 1, 2 * page + 5, 200))]
    for answer in lab.answers(decode, prompts, 6):
        check_moved(lab, answer, prefill)
        if handoff is Timing.EAGER:
            assert answer.cached == {}
    longer = [np.concatenate([tokens, prompt(50 + i, 20)]) for i, tokens in enumerate(prompts)]
    for tokens, answer in zip(prompts, lab.answers(decode, longer, 6), strict=True):
        check_moved(lab, answer, prefill)
        if pool and len(tokens) >= page:
            assert sum(answer.cached.values()) >= len(tokens) // page * page
    if store is not None:
        check_laws(store)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("with_pool", ["prefill", "decode"])
def test_only_one_of_both_has_a_pool(lab: Lab, way: tuple[Timing, Source, Grain], with_pool: str) -> None:
    preset = FAMILIES[WAYS.index(way) % 6]
    store = lab.store()
    how = config_of(way)
    prefill = lab.engine(preset, store if with_pool == "prefill" else None, role=Role.PREFILL, **how)
    asks = {"prefill": (lab.address_of(prefill),), "local_prefill_tokens": 0}
    decode = lab.engine(preset, store if with_pool == "decode" else None, role=Role.DECODE, **asks, **how)
    prompts = [prompt(60, 75), prompt(61, 32), prompt(60, 100)]
    for answer in lab.answers(decode, prompts, 5):
        assert answer.usage.prefill_engine == lab.address_of(prefill)


@pytest.mark.parametrize("way", WAYS)
def test_prompts_of_full_pages_that_are_stored(lab: Lab, way: tuple[Timing, Source, Grain]) -> None:
    """Either engine loads all of it: the one that prefills computes one token, and nothing is stored a second time."""
    preset = FAMILIES[WAYS.index(way) % 6]
    store = lab.store(nvme=True)
    prefill, decode = lab.pair(preset, store, **config_of(way))
    tokens = prompt(75, 64)
    lab.answers(decode, [tokens], 3)
    pages = store.stats()["tiers"]["dram"]["pages"]
    for tier in ("dram", "nvme"):
        lab.settle()  # or it shares frames with a request that ends behind its answer
        answer = lab.answers(decode, [tokens], 3)[0]
        usage = answer.usage
        assert answer.cached == {tier: 64} and usage.prefill_cached_tokens == {tier: 63}, usage
        assert (usage.computed_tokens, usage.moved_bytes) == (0, 0)
        assert store.stats()["tiers"]["dram"]["pages"] == (pages if tier == "dram" else 0)
        asks = {"prefill": (lab.address_of(prefill),), "local_prefill_tokens": 0}
        bare = lab.engine(preset, None, role=Role.DECODE, **asks, **config_of(way))
        pulled = lab.answers(bare, [tokens], 3)[0]  # the last page when its last token is computed
        assert pulled.usage.moved_bytes == 4 * sum(layout.page_bytes for layout in decode.pool.layouts)
        to_nvme(store)


@pytest.mark.parametrize("way", WAYS)
def test_prefixes_that_are_on_nvme_alone(lab: Lab, way: tuple[Timing, Source, Grain]) -> None:
    """Both engines read them there. What is written behind them needs them in DRAM, and is found there later."""
    preset = MAIN[WAYS.index(way) % 3]
    store = lab.store(nvme=True)
    prefill, decode = lab.pair(preset, store, **config_of(way))
    first, longer = prompt(70, 70), prompt(70, 140)
    lab.answers(decode, [first], 3)
    to_nvme(store)
    again = lab.answers(decode, [first], 3)[0]
    assert again.cached == {"nvme": 64}
    answer = lab.answers(decode, [longer], 3)[0]
    assert answer.usage.prefill_engine == lab.address_of(prefill)
    assert sum(answer.usage.prefill_cached_tokens.values()) >= 64
    within("its pages are stored", lambda: store.cache(decode.layout).lookup(keys_of(decode, store, longer)).pages == 8)
    to_nvme(store)
    assert lab.answers(decode, [longer], 3)[0].cached == {"nvme": 128}


@pytest.mark.parametrize("handoff", Timing)
@pytest.mark.parametrize("source", Source)
def test_sixteen_ragged_handoffs(lab: Lab, handoff: Timing, source: Source) -> None:
    """More than the decode engine has frames for, and some that it may not take from the pool."""
    preset = {Timing.EAGER: "tiny-llama", Timing.LAZY: "tiny-mla"}[handoff]
    small = 60 * lab.engine(preset, page_tokens=16).layout.page_bytes
    way = config_of((handoff, source, Grain.LAYER), arena=small, link="30MB/s")
    _, decode = lab.pair(preset, lab.store(), **way)
    asked = [lab.ask(decode, prompt(80 + i, 1 + (i * 53) % 190), 10, use_pool=i % 4 > 0) for i in range(16)]
    for answer in asked:
        check_answer(answer)


@pytest.mark.parametrize("preset", MAIN)
def test_a_request_says_how(lab: Lab, preset: str) -> None:
    """What a request names counts, and not how the engine was started; one that names no engine is computed here."""
    prefill, decode = lab.pair(preset, lab.store(), handoff=Timing.EAGER, source=Source.ARENA)
    here = lab.answers(decode, [prompt(90, 50)], 4, prefill=())[0]
    assert here.usage.prefill_engine == "" and here.usage.computed_tokens == 50
    for i, (handoff, source, grain) in enumerate(WAYS):
        how = {"handoff": handoff, "source": source, "grain": grain}
        check_moved(lab, lab.answers(decode, [prompt(91 + i, 45)], 4, **how)[0], prefill)
    both = lab.engine(preset, None, role=Role.BOTH)
    check_moved(lab, lab.answers(both, [prompt(89, 45)], 4, prefill=(lab.address_of(prefill),))[0], prefill)


# --- what a decode engine computes itself -----------------------------------------------------------------------------


@pytest.mark.parametrize("preset", MAIN)
def test_short_rests_are_computed_at_once(lab: Lab, preset: str) -> None:
    """A decode engine asks nobody for a few tokens: of a short prompt, or of a long one that is stored but for them."""
    store = lab.store()
    prefill, decode = lab.pair(preset, store, local_prefill_tokens=40)
    short = lab.answers(decode, [prompt(110, 40)], 4)[0]
    assert (short.usage.prefill_engine, short.usage.computed_tokens) == ("", 40)
    check_moved(lab, lab.answers(decode, [prompt(111, 150)], 4)[0], prefill)
    rest = lab.answers(decode, [np.concatenate([prompt(111, 144), prompt(112, 39)])], 4)[0]
    assert (rest.usage.prefill_engine, rest.usage.computed_tokens) == ("", 39)
    assert rest.cached == {"dram": 144}


@pytest.mark.parametrize("preset", MAIN)
@pytest.mark.parametrize("way", [WAYS[0], WAYS[3], WAYS[6]])
def test_conversations_over_handoffs(lab: Lab, preset: str, way: tuple[Timing, Source, Grain]) -> None:
    """The decode engine stores what it generates: the next turn finds it, wherever its prompt is computed."""
    store = lab.store()
    prefill, decode = lab.pair(preset, store, **config_of(way))
    tokens = prompt(120, 37)
    for turn in range(3):
        answer = lab.answers(decode, [tokens], 40)[0]
        check_moved(lab, answer, prefill)
        history = np.concatenate([tokens, np.array(answer.tokens, np.uint32)])
        stored = (len(history) - 1) // 16
        assert stored * 16 > len(tokens) + 16
        pages = keys_of(decode, store, history)
        within("the answer is stored", lambda k=pages, n=stored: store.cache(decode.layout).lookup(k).pages == n)
        tokens = np.concatenate([history, prompt(121 + turn, 30)])
        after = lab.answers(prefill_free(lab, preset, decode), [tokens], 3)[0]
        assert after.cached == {"dram": stored * 16}, "by an engine that computed none of it"


@pytest.mark.parametrize("count", [1, 40])
def test_an_answer_that_ends_before_its_mover_reports_is_stored(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Its client does not wait for the mover, and the next turn finds all of it."""
    store, told = lab.store(), threading.Event()
    asks = {"prefill": (lab.address_of(lab.engine("tiny-qwen3", None)),), "local_prefill_tokens": 0}
    decode = lab.engine("tiny-qwen3", store, role=Role.DECODE, **asks)
    settle = decode.stagings.settle

    def settle_late() -> None:
        assert told.wait(LATE_S), "the answer waits for its mover"
        settle()

    monkeypatch.setattr(decode.stagings, "settle", settle_late)
    tokens = prompt(125, 37)
    answer = lab.answers(decode, [tokens], count)[0]
    history = np.concatenate([tokens, np.array(answer.tokens, np.uint32)])
    keys, stored = keys_of(decode, store, history), (len(history) - 1) // 16
    assert store.cache(decode.layout).lookup(keys).pages == 0
    told.set()
    within("the answer is stored", lambda: store.cache(decode.layout).lookup(keys).pages == stored)


def prefill_free(lab: Lab, preset: str, like: Engine) -> Engine:
    """An engine that asks nobody, over the same store."""
    return lab.engine(preset, like.pool.store, role=Role.BOTH)


# --- moving on --------------------------------------------------------------------------------------------------------


def migrated(lab: Lab, source: Engine, target: Engine, tokens: Tokens) -> Answer:
    """An answer that began at one engine and goes on at another. Asked again where it was over too soon for that."""
    for _ in range(10):
        answer = lab.ask(source, tokens, LONG)
        answer.wait(3)
        within(
            "its KV has arrived", lambda: not any(one.attempt for one in list(source.state.roster.sequences.values()))
        )
        moved = source.migrate(answer.request.id, lab.address_of(target))
        check_answer(answer)
        if moved:
            return answer
    pytest.fail("no answer ran for long enough")


@pytest.mark.parametrize("preset", MAIN)
@pytest.mark.parametrize("pool", ["shared", "none"])
def test_an_answer_goes_on_at_another_engine(lab: Lab, preset: str, pool: str) -> None:
    store = lab.store() if pool == "shared" else None
    engines = [lab.engine(preset, store), lab.engine(preset, store, page_tokens=16)]
    for i, count in enumerate((1, 16, 75)):
        answer = migrated(lab, *engines, prompt(130 + i, count))
        assert answer.usage.completion_tokens == LONG and answer.usage.prompt_tokens == count
        engines.reverse()


def test_an_answer_moves_many_times_in_a_crowd(lab: Lab) -> None:
    """Three engines pass two answers around while others decode there."""
    store = lab.store()
    engines = [lab.engine("tiny-llama", store) for _ in range(3)]
    crowd = [lab.ask(one, prompt(140 + i, 30 + i), 60) for i, one in enumerate(engines * 2)]
    moving = [lab.ask(engines[0], prompt(150 + i, 33), LONG) for i in range(2)]
    for at in range(2):
        for answer in moving:
            answer.wait(len(answer.tokens) + 5)
        here, there = engines[at], lab.address_of(engines[at + 1])
        works = list(here.performer.works.values())
        moved = [work.id for work in works if work.request.sampling.max_tokens == LONG]
        for request_id in moved:
            here.migrate(request_id, there)  # False where it has ended meanwhile
    for answer in [*crowd, *moving]:
        check_answer(answer)


@pytest.mark.parametrize("preset", MAIN)
def test_an_answer_that_came_by_handoff_moves_on(lab: Lab, preset: str) -> None:
    store = lab.store()
    _, decode = lab.pair(preset, store)
    other = lab.engine(preset, store)
    assert migrated(lab, decode, other, prompt(160, 90)).usage.prefill_engine
    # And back, to an engine that asks for what it does not find: the resumed request is a prompt like any other.
    back = migrated(lab, other, decode, prompt(161, 50))
    assert back.reason == "length"


@pytest.mark.parametrize("preset", MAIN)
def test_resumed_requests_over_handoffs(lab: Lab, preset: str) -> None:
    """The first token that the prefill engine draws is number ``k`` of the answer."""
    prefill, decode = lab.pair(preset, None, source=Source.ARENA)
    tokens = prompt(170, 40)
    whole = lab.answers(decode, [tokens], 20)[0]
    for k in (1, 9, 19):
        known = np.concatenate([tokens, np.array(whole.tokens[:k], np.uint32)])
        rest = lab.answers(decode, [known], 20, generated=k)[0]
        assert rest.usage.prefill_engine == lab.address_of(prefill)
        assert rest.tokens == whole.tokens[k:]
