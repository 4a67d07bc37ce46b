"""Lossy replicas in engines: used only where a request allows it, counted apart, and never stored as exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.memory.compression import lossy_layout
from engine.model.request import Grain, Source, Timing
from kvstore.errors import InvalidRequest
from tests.helpers.engines.tokens import MAIN, Lab, Tokens, check_answer, distance, prompt, to_nvme, within
from tests.helpers.processes import Machine

NEAR = 1.0  # of logits of 5 or so: int8 errs by half a scale of 1/127 of a vector's largest element


@pytest.fixture
def lab(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(machine, monkeypatch) as here:
        yield here


def whole_pages(tokens: Tokens, page: int = 16) -> int:
    """Tokens of the pages that a prompt can hit."""
    return (len(tokens) - 1) // page * page


@pytest.mark.parametrize("preset", MAIN)
def test_the_pool_holds_lossy_pages_for_who_allows_them(lab: Lab, preset: str) -> None:
    store, tokens = lab.store(nvme=True), prompt(1, 100)
    one = lab.engine(preset, store, compress="int8")
    check_answer(lab.ask(one, tokens))  # computed, so exact
    lossy = store.cache(lossy_layout(one.layout, "int8"))
    within("lossy pages are stored", lambda: lossy.lookup(tokens).tokens == whole_pages(tokens))
    assert store.cache(one.layout).lookup(tokens).tokens == 0
    assert lossy.page_bytes < one.layout.page_bytes * 0.4

    strict = lab.ask(one, tokens)
    check_answer(strict)
    assert strict.cached == {}, "nobody allowed lossy pages"
    lax = lab.ask(one, tokens, allow_lossy=True).wait()
    assert lax.cached == {"dram-int8": whole_pages(tokens)}
    assert 0 < distance(lax) < NEAR
    to_nvme(store)
    lax = lab.ask(one, tokens, allow_lossy=True).wait()
    assert lax.cached == {"nvme-int8": whole_pages(tokens)}


def test_what_is_computed_from_lossy_pages_is_never_exact(lab: Lab) -> None:
    store, tokens = lab.store(), prompt(2, 90)
    writes_lossy = lab.engine("tiny-llama", store, compress="int8")
    writes_exact = lab.engine("tiny-llama", store)
    check_answer(lab.ask(writes_lossy, tokens[:50]))
    longer = lab.ask(writes_lossy, tokens, 40, allow_lossy=True).wait()
    assert longer.cached == {"dram-int8": 48}
    exact, lossy = store.cache(writes_exact.layout), store.cache(lossy_layout(writes_exact.layout, "int8"))
    within("its pages are lossy", lambda: lossy.lookup(tokens).tokens == whole_pages(tokens))
    assert exact.lookup(tokens).tokens == 0
    check_answer(lab.ask(writes_exact, tokens))  # whose pages are exact, and used before lossy ones
    within("exact pages", lambda: exact.lookup(tokens).tokens == whole_pages(tokens))
    both = lab.ask(writes_lossy, tokens, allow_lossy=True)
    check_answer(both)
    assert both.cached == {"dram": whole_pages(tokens)}


@pytest.mark.parametrize("handoff", list(Timing))
@pytest.mark.parametrize("grain", list(Grain))
def test_a_hand_off_is_lossy_where_the_request_allows_it(lab: Lab, handoff: Timing, grain: Grain) -> None:
    tokens = prompt(3, 100)
    prefill, decode = lab.pair("tiny-qwen3", None, compress="int8", handoff=handoff, grain=grain, source=Source.DRAM)
    strict = lab.ask(decode, tokens)
    check_answer(strict)
    lax = lab.ask(decode, tokens, allow_lossy=True).wait()
    assert lax.usage.prefill_engine == lab.address_of(prefill)
    assert lax.usage.moved_bytes < 0.4 * strict.usage.moved_bytes
    assert lax.tokens[0] == strict.tokens[0], "the first token is the other engine's"
    assert 0 < float((lax.logits[1] - strict.logits[1]).abs().max()) < NEAR


def test_a_layout_that_does_not_permit_it_is_refused(lab: Lab) -> None:
    with pytest.raises(InvalidRequest, match="compress"):
        lab.engine("tiny-llama", None, compress="int4")
