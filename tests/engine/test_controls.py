"""Controls: wrong KV changes what an engine says. Without these, answers that agree would prove little.

The store proves whose a page is by its tokens, so wrong bytes are put there under the right keys, and an engine loads
them as it loads any page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.model.request import Finished, Request, Role, Sampling, Token, Usage
from engine.shell.engine import Engine
from kvstore import Layout, Store
from tests.helpers.engines import tokens as engine_tokens
from tests.helpers.engines.tokens import (
    CPU,
    MAIN,
    TOLERANCE,
    Answer,
    Expected,
    Lab,
    Tokens,
    check_answer,
    distance,
    expected,
    prompt,
    served,
    to_nvme,
)
from tests.helpers.processes import Machine

PAGE = 16
PAGES = 5
TOKENS = prompt(900, PAGES * PAGE + 3)
OTHER = prompt(901, PAGES * PAGE + 3)
WRONG = 100 * TOLERANCE  # logits that are off by more are wrong, and not another order of sums
Pages = npt.NDArray[np.float32]  # [pages, layers, kv_heads, tokens, content]
Doctor = Callable[[str, Pages, Pages], Pages]


@pytest.fixture
def lab(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(machine, monkeypatch) as here:
        yield here


# --- what is wrong with them ------------------------------------------------------------------------------------------


@cache
def layout_of(preset: str) -> Layout:
    return served(preset).layout(PAGE)


def keys_in(preset: str, pages: Pages) -> Pages:
    """A view of what positions turn: K, of MLA the rope key."""
    layout = layout_of(preset)
    return pages[..., layout.mla_latent :] if layout.mla_latent else pages[..., : layout.head_dim]


def zeroed(preset: str, pages: Pages, other: Pages) -> Pages:
    """A page of zeros."""
    pages[2] = 0
    return pages


def another_prompts(preset: str, pages: Pages, other: Pages) -> Pages:
    """A page of another prompt, of the same place in it."""
    pages[2] = other[2]
    return pages


def another_place(preset: str, pages: Pages, other: Pages) -> Pages:
    """A page of this prompt stands twice. (Two that change places would be right: keys know where they are.)"""
    pages[2] = pages[1]
    return pages


def layers_swapped(preset: str, pages: Pages, other: Pages) -> Pages:
    """The layers of every page have changed places."""
    return pages[:, ::-1]


def one_layer(preset: str, pages: Pages, other: Pages) -> Pages:
    """One layer of one page is another prompt's."""
    pages[3, 1] = other[3, 1]
    return pages


def turned(preset: str, pages: Pages, other: Pages) -> Pages:
    """Keys stand one position later than they are: turned by one more step."""
    keys = torch.from_numpy(keys_in(preset, pages).copy())
    rotary = served(preset).net.model.rotary_emb
    cos, sin = (part[0, 0, : keys.shape[-1] // 2].numpy() for part in rotary(keys, torch.tensor([[1]])))
    length = np.sqrt(cos**2 + sin**2)  # YaRN makes keys longer, once
    cos, sin = np.tile(cos / length, 2), np.tile(sin / length, 2)
    half = keys.shape[-1] // 2
    rotated = np.concatenate([-keys[..., half:].numpy(), keys[..., :half].numpy()], axis=-1)
    keys_in(preset, pages)[:] = keys.numpy() * cos + rotated * sin
    return pages


def shifted(preset: str, pages: Pages, other: Pages) -> Pages:
    """Every token has the key of the one before it."""
    keys = keys_in(preset, pages)
    flat = np.moveaxis(keys, 0, 2)  # [layers, kv_heads, pages, tokens, dim]
    rows = np.roll(flat.reshape(*flat.shape[:2], -1, flat.shape[-1]), 1, axis=2)
    keys[:] = np.moveaxis(rows.reshape(flat.shape), 2, 0)
    return pages


DOCTORS = (zeroed, another_prompts, another_place, layers_swapped, one_layer, turned, shifted)


# --- the way through the store ----------------------------------------------------------------------------------------


def stored(lab: Lab, preset: str) -> tuple[Pages, Pages]:
    """The true pages of both prompts, as an engine wrote them."""
    store = lab.store()
    one = lab.engine(preset, store, page_tokens=PAGE)
    found = []
    for answer in lab.answers(one, [TOKENS, OTHER], 1):
        found.append(pages_of(one, store, answer.request.tokens))
        assert len(found[-1]) == PAGES
    return found[0], found[1]


def pages_of(one: Engine, store: Store, tokens: Tokens) -> Pages:
    """All pages of a prompt, with the layers of all cache groups in the model's order."""
    cache = store.cache(one.pool.layouts)
    keys = cache.keys(tokens)
    found = []
    for group, each in enumerate(cache.groups):
        parts = [each.get(part) for part in keys.parts(group, range(keys.pages(group)))]
        rows = np.concatenate([match.data for match in parts if match.data is not None])
        found.append(rows.view(np.float32).reshape(keys.pages(group), *each.layout.shape))
    return np.stack([found[group][:, number] for group, number in one.pool.places], axis=1)


def put_pages(one: Engine, store: Store, tokens: Tokens, pages: Pages) -> None:
    """The inverse."""
    groups = []
    for group in range(len(one.pool.layouts)):
        layers = [layer for layer, place in enumerate(one.pool.places) if place[0] == group]
        groups.append(np.ascontiguousarray(pages[:, layers]).reshape(len(pages), -1).view(np.uint8))
    cache = store.cache(one.pool.layouts)
    assert cache.put(cache.keys(tokens), groups, wait=True) == (len(pages),) * len(groups)


def planted(lab: Lab, preset: str, pages: Pages, nvme: bool = False) -> Engine:
    """An engine over a fresh store that has these pages under the keys of ``TOKENS``."""
    store = lab.store(nvme=nvme)
    one = lab.engine(preset, store, page_tokens=PAGE)
    put_pages(one, store, TOKENS, pages)
    if nvme:
        to_nvme(store)
    return one


def check_wrong(preset: str, answer: Answer) -> None:
    """Its logits are not those of ``generate``, and neither are its tokens."""
    assert distance(answer) > WRONG
    assert tuple(answer.tokens) != expected(preset, TOKENS, len(answer.tokens)).tokens
    with pytest.raises(AssertionError, match="logits are off by"):
        check_answer(answer)


@pytest.mark.parametrize("preset", [*MAIN, "tiny-gpt-oss"])
def test_wrong_pages_change_the_answer(lab: Lab, preset: str) -> None:
    true, other = stored(lab, preset)
    right = lab.answers(planted(lab, preset, true), [TOKENS], 12)[0]
    assert right.cached == {"dram": PAGES * PAGE}, "true pages that came this way are right"
    for doctor in DOCTORS:
        answer = lab.ask(planted(lab, preset, doctor(preset, true.copy(), other)), TOKENS, 12).wait()
        assert answer.cached == {"dram": PAGES * PAGE}, doctor.__name__
        check_wrong(preset, answer)


def test_wrong_pages_from_nvme_change_the_answer(lab: Lab) -> None:
    true, other = stored(lab, "tiny-mla")
    assert lab.answers(planted(lab, "tiny-mla", true, nvme=True), [TOKENS], 12)[0].cached == {"nvme": PAGES * PAGE}
    answer = lab.ask(planted(lab, "tiny-mla", another_prompts("tiny-mla", true, other), nvme=True), TOKENS, 12).wait()
    assert answer.cached == {"nvme": PAGES * PAGE}
    check_wrong("tiny-mla", answer)


@pytest.mark.parametrize("preset", MAIN)
def test_wrong_pages_change_what_is_handed_over(lab: Lab, preset: str) -> None:
    """The prefill engine finds them; the decode engine has nothing but what it is given."""
    true, other = stored(lab, preset)
    for pages, right in ((true, True), (turned(preset, true.copy(), other), False)):
        prefill = planted(lab, preset, pages)
        prefill.set_role(Role.PREFILL)
        asks = {"prefill": (lab.address_of(prefill),), "local_prefill_tokens": 0}
        answer = lab.ask(lab.engine(preset, role=Role.DECODE, **asks), TOKENS, 12).wait()
        assert answer.usage.prefill_cached_tokens == {"dram": PAGES * PAGE}
        if right:
            check_answer(answer)
        else:
            check_wrong(preset, answer)


@pytest.mark.parametrize("preset", [*MAIN, "tiny-gpt-oss"])
def test_turning_keys_is_one_position(lab: Lab, preset: str) -> None:
    """The control is what it says: keys of the first layer are, turned, those of the same tokens one position later."""
    true, other = stored(lab, preset)
    store = lab.store()
    one = lab.engine(preset, store, page_tokens=PAGE)
    later = np.concatenate([prompt(902, 1), TOKENS])
    lab.answers(one, [later], 1)
    moved = pages_of(one, store, later)
    ours = keys_in(preset, turned(preset, true.copy(), other))[0, 0, :, :-1]
    np.testing.assert_allclose(ours, keys_in(preset, moved)[0, 0, :, 1:], atol=1e-4)
    assert np.abs(ours - keys_in(preset, true)[0, 0, :, :-1]).max() > 0.1


# --- the judge --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gap", "right"), [(TOLERANCE / 2, True), (TOLERANCE * 2, False)])
def test_only_ties_are_forgiven(monkeypatch: pytest.MonkeyPatch, gap: float, right: bool) -> None:
    """The reference says 3, closely before 5, and after a 5 it says 7: an answer of 5 and 7 needs a tie."""
    after = np.append(TOKENS, np.uint32(5))
    first, second = torch.zeros(1, 10), torch.zeros(1, 10)
    first[0, [3, 5]], second[0, 7] = torch.tensor([2.0, 2.0 - gap]), 1.0
    known = {
        ("none", TOKENS.tobytes(), CPU): Expected((3, 4), torch.cat([first, second])),
        ("none", after.tobytes(), CPU): Expected((7,), second),
    }
    monkeypatch.setattr(engine_tokens, "_expected", known)
    request = Request(id="tie", tokens=TOKENS, sampling=Sampling(max_tokens=2))
    answer = Answer("none", request, {0: first[0], 1: second[0]})
    for event in (Token(5, 0), Token(7, 1), Finished("length", Usage(prompt_tokens=len(TOKENS)))):
        answer.emit(event)
    if right:
        check_answer(answer)
    else:
        with pytest.raises(AssertionError, match="no tie"):
            check_answer(answer)
