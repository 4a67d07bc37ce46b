"""Greedy answers of one engine are those of plain transformers, token for token and logit for logit, whatever of the
prompt was stored, in which tier, and in which pieces the rest was computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from engine.model.observer import Observer
from engine.model.request import Usage
from engine.pool import keys as stored_pages
from engine.pool import store as store_side
from engine.shell.engine import Engine
from kvstore import Store
from kvstore.errors import InvalidRequest
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

CHUNKS = (512, 24, 100)  # all at once; less than most pages; no multiple of any
SPECIAL = ("tiny-gemma2", "tiny-gpt-oss", "tiny-mistral")  # soft caps, windows, sinks
CASES = [
    *((preset, page, CHUNKS[(i + j) % 3]) for i, preset in enumerate(MAIN) for j, page in enumerate((16, 32, 64))),
    *((preset, (16, 32, 64)[i], CHUNKS[i]) for i, preset in enumerate(SPECIAL)),
]


@pytest.fixture(params=PLACES, ids=str)
def lab(request: pytest.FixtureRequest, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    # A node that answers late is a busy machine here, and not one to leave out: what is stored is counted below.
    monkeypatch.setattr(store_side, "LOOK_TIMEOUT_S", 10.0)
    monkeypatch.setattr(stored_pages, "SILENT_S", 10.0)
    with Lab(machine, monkeypatch, request.param) as here:
        yield here


class Steps(Observer):
    """What an engine did: (sequences that decoded, prompt tokens computed) of each step, and how requests ended."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.outcomes: list[str] = []

    def ended(self, outcome: str, usage: Usage) -> None:
        """See Observer."""
        self.outcomes.append(outcome)

    def stepped(self, decoding: int, chunk_tokens: int, seconds: float) -> None:
        """See Observer."""
        self.steps.append((decoding, chunk_tokens))


def ragged(page: int) -> list[Tokens]:
    """Prompts around the edges of pages."""
    return [prompt(i, count) for i, count in enumerate((1, page - 1, page, page + 1, 3 * page, 3 * page + 7, 150))]


def full(tokens: Tokens, page: int) -> int:
    """The most that a hit may be: all full pages, of which a prompt's last token is computed all the same."""
    return min(len(tokens) // page * page, len(tokens) - 1)


def check_hits(answers: list[Answer], tier: str, page: int) -> None:
    """Everything that could be was loaded from that tier, and the rest computed."""
    for answer in answers:
        tokens = answer.request.tokens
        stored = full(tokens, page)
        assert answer.cached == ({tier: stored} if stored else {}), answer.request.id
        assert answer.usage.computed_tokens == len(tokens) - stored


# --- tiers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "page", "chunk"), CASES)
def test_cold_and_hits_of_every_tier(lab: Lab, preset: str, page: int, chunk: int) -> None:
    store = lab.store(nvme=True)
    one = lab.engine(preset, store, page_tokens=page, chunk_tokens=chunk)
    prompts = ragged(page)
    cold = lab.answers(one, prompts)
    assert all(answer.cached == {} for answer in cold)
    assert [answer.usage.computed_tokens for answer in cold] == [len(tokens) for tokens in prompts]
    check_hits(lab.answers(one, prompts), "dram", page)
    to_nvme(store)
    check_hits(lab.answers(one, prompts), "nvme", page)
    both_tiers(lab, one, store, page)
    partial(lab, one, page)


def both_tiers(lab: Lab, one: Engine, store: Store, page: int) -> None:
    """A prefix of it in DRAM, the rest on NVMe."""
    tokens = prompt(5, 3 * page + 7)
    assert store.cache(one.layout).prefetch(tokens[: 2 * page + 1]).pages == 2
    answer = lab.answers(one, [tokens])[0]
    assert answer.cached == {"dram": 2 * page, "nvme": page}


def partial(lab: Lab, one: Engine, page: int) -> None:
    """Prompts that begin as stored ones do: they end on a page, within one, in the first one, or go on."""
    for cut in (2 * page, page + 3, 5, 3 * page + 7):
        tokens = np.concatenate([prompt(5, cut), prompt(77, 2 * page)])
        answer = lab.answers(one, [tokens])[0]
        assert sum(answer.cached.values()) == cut // page * page
        assert answer.usage.computed_tokens == len(tokens) - cut // page * page


@pytest.mark.parametrize("chunk", [1, 7, 16, 48, 300])
@pytest.mark.parametrize("preset", MAIN)
def test_chunks_of_any_size(lab: Lab, preset: str, chunk: int) -> None:
    """With a pool and without one; alone and beside others."""
    store = lab.store()
    one = lab.engine(preset, store, chunk_tokens=chunk, page_tokens=16)
    prompts = [prompt(i, count) for i, count in enumerate((16, 33, 90))]
    for pool in (False, True):
        answers = lab.answers(one, prompts, 4, use_pool=pool)
        assert not any(answer.cached for answer in answers)
    assert store.stats()["tiers"]["dram"]["pages"] == sum(len(tokens) // 16 for tokens in prompts)


@pytest.mark.parametrize("preset", MAIN)
def test_engine_without_a_pool(lab: Lab, preset: str) -> None:
    one = lab.engine(preset, page_tokens=32)
    for _ in range(2):
        answers = lab.answers(one, [prompt(i, n) for i, n in enumerate((5, 64, 97))])
        assert all(answer.cached == {} and not answer.usage.written_bytes for answer in answers)


@pytest.mark.parametrize("preset", MAIN)
def test_a_tenant_sees_its_own_pages(lab: Lab, preset: str) -> None:
    """The same prompt under another salt is a miss, and answered the same."""
    one = lab.engine(preset, lab.store())
    tokens = prompt(3, 70)
    for salt in ("", "b"):
        assert lab.answers(one, [tokens], 4, salt=salt)[0].cached == {}
        assert lab.answers(one, [tokens], 4, salt=salt)[0].cached == {"dram": 64}
    with pytest.raises(InvalidRequest, match="adapter"):  # pages of the bare model are not an adapter's
        lab.ask(one, tokens, adapter="c")


# --- many at once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "page"), [*zip(MAIN, (16, 32, 64), strict=True), ("tiny-gpt-oss", 16)])
def test_sixteen_ragged_requests(lab: Lab, preset: str, page: int) -> None:
    """All decode together; then again as hits, of which some join late."""
    seen = Steps()
    store = lab.store()
    one = lab.engine(preset, store, page_tokens=page, chunk_tokens=128, batch_max=16, observer=seen, arena=48 << 20)
    prompts = [prompt(100 + i, 1 + (i * 37) % 211) for i in range(16)]
    asked = [lab.ask(one, tokens, 32) for tokens in prompts]
    for answer in asked:
        check_answer(answer)
    assert max(decoding for decoding, _ in seen.steps) == 16
    asked = [lab.ask(one, tokens, 8 + i % 8) for i, tokens in enumerate(prompts[:9])]
    asked[0].wait(3)
    asked += [lab.ask(one, tokens, 8) for tokens in prompts[9:]]
    for answer in asked:
        check_answer(answer)
        assert answer.cached == ({"dram": stored} if (stored := full(answer.request.tokens, page)) else {})
    check_laws(store)


def test_more_than_there_is_room_for(lab: Lab) -> None:
    """Frames for two or three at a time: the others wait, and what was used before is used again."""
    one = lab.engine("tiny-llama", lab.store(), page_tokens=16, arena=20 * served_page_bytes(lab))
    assert one.arena.frames_total == 20
    lab.answers(one, [prompt(200 + i, 20 + (i * 41) % 130) for i in range(14)], 10)


def served_page_bytes(lab: Lab) -> int:
    """Of a page of 16 tokens of tiny-llama."""
    return lab.engine("tiny-llama").layout.page_bytes


@pytest.mark.parametrize("preset", MAIN)
def test_chunks_are_packed_with_decode_steps(lab: Lab, preset: str) -> None:
    """Role both: a long prompt that comes while others decode shares steps with them and changes nothing."""
    seen = Steps()
    one = lab.engine(preset, lab.store(), chunk_tokens=32, observer=seen)
    asked = [lab.ask(one, prompt(300 + i, 30), 40) for i in range(3)]
    for answer in asked:
        answer.wait(2)
    asked.append(lab.ask(one, prompt(310, 200), 6))
    for answer in asked:
        check_answer(answer)
    mixed = [step for step in seen.steps if step[0] and step[1]]
    assert len(mixed) >= 3, seen.steps
    assert all(decoding + tokens <= 32 for decoding, tokens in seen.steps)


# --- answers that go on -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", MAIN)
@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_the_next_turn_of_a_conversation_hits_the_answer(lab: Lab, preset: str, tier: str) -> None:
    """Pages that decoding filled are stored: three turns, each of which begins with all before it."""
    store = lab.store(nvme=True)
    one = lab.engine(preset, store, page_tokens=16)
    tokens = prompt(400, 37)
    for turn in range(3):
        answer = lab.answers(one, [tokens], 45)[0]
        history = np.concatenate([tokens, np.array(answer.tokens, np.uint32)])
        # The last token was drawn and never computed.
        stored = (len(history) - 1) // 16
        keys = keys_of(one, store, history)
        within(
            f"{stored} pages are stored", lambda keys=keys, n=stored: store.cache(one.layout).lookup(keys).pages == n
        )
        if tier == "nvme":
            to_nvme(store)
        tokens = np.concatenate([history, prompt(401 + turn, 11)])
        after = lab.answers(one, [tokens], 3)[0]
        assert after.cached == {tier: stored * 16}, "pages of the answer, too"
        assert stored * 16 > len(answer.request.tokens) + 16


def test_a_prompt_longer_than_dram_is_stored_whole(lab: Lab) -> None:
    """Chunk by chunk, its first pages leave DRAM while the last ones come; and its next turn is stored behind it."""
    store = lab.store(nvme=True, dram="1MiB", extent="256KiB")
    one = lab.engine("tiny-llama", store, page_tokens=16, chunk_tokens=128)
    tokens = prompt(450, 1800)
    for turn in range(2):
        answer = lab.answers(one, [tokens], 3)[0]
        keys = keys_of(one, store, tokens)
        within("all of it is stored", lambda keys=keys: store.cache(one.layout).lookup(keys).pages == len(keys))
        assert sum(answer.cached.values()) == (1792 if turn else 0)
        tokens = np.concatenate([tokens, prompt(451, 300)])
    assert store.stats()["tiers"]["dram"]["pages"] < 1800 // 16
    check_laws(store)


@pytest.mark.parametrize("preset", MAIN)
def test_resumed_requests_go_on_where_they_were(lab: Lab, preset: str) -> None:
    """Asked with the first ``k`` tokens of the answer, at an engine that has the pages and at one that has nothing."""
    store = lab.store()
    warm, bare = lab.engine(preset, store), lab.engine(preset)
    tokens = prompt(500, 41)
    whole = lab.answers(warm, [tokens], 30)[0]
    for k in (1, 23, 29):
        known = np.concatenate([tokens, np.array(whole.tokens[:k], np.uint32)])
        for one in (warm, bare):
            rest = lab.answers(one, [known], 30, generated=k)[0]
            assert rest.tokens == whole.tokens[k:]
            assert rest.usage.prompt_tokens == len(tokens) and rest.usage.completion_tokens == 30
            assert bool(rest.cached) == (one is warm)


def test_an_answer_ends_with_the_end_of_sequence(lab: Lab) -> None:
    """Drawn at random until two draw it; asked again, those end there."""
    one = lab.engine("tiny-llama", lab.store())
    drawn = (lab.ask(one, prompt(600 + i, 20), 40, {"temperature": 1.5, "seed": i}).wait() for i in range(30))
    ended = list(itertools.islice((answer for answer in drawn if one.model.eos_ids[0] in answer.tokens), 2))
    assert ended
    for answer in ended:
        sampling = {"temperature": 1.5, "seed": answer.request.sampling.seed, "ignore_eos": False}
        again = lab.ask(one, answer.request.tokens, 40, sampling).wait()
        assert again.reason == "eos"
        assert again.tokens == answer.tokens[: answer.tokens.index(one.model.eos_ids[0])]
