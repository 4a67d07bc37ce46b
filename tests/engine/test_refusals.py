"""What an engine refuses it refuses clearly, and goes on: engines that do not fit, requests that cannot be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine.compute import presets
from engine.compute.models import Model, load_model
from engine.model.request import Done, Request, Role, Sampling
from engine.shell.engine import Engine
from kvstore.errors import InvalidRequest, VersionMismatch
from tests.helpers.engines.tokens import InProcess, Lab, check_answer, prompt, served, within
from tests.helpers.processes import Machine

PRESET = "tiny-llama"


@pytest.fixture
def lab(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(machine, monkeypatch) as here:
        yield here


# --- engines that do not fit ------------------------------------------------------------------------------------------


def other_rope(monkeypatch: pytest.MonkeyPatch) -> Model:
    """The same preset, whose positions turn faster."""
    preset = presets.PRESETS[PRESET]
    config = {**preset.config, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    with monkeypatch.context() as patch:
        patch.setattr(presets, "PRESETS", {PRESET: dataclasses.replace(preset, config=config)})
        return load_model(PRESET)


def serves_prefills(one: Engine) -> bool:
    """It computes a prompt for somebody who fits."""
    request = Request(id="fits", tokens=prompt(1, 40), sampling=Sampling(max_tokens=4))
    *_, last = InProcess(one).prefill(request, one.layout)
    one.release("fits")
    return isinstance(last, Done) and last.handoff.computed_tokens + sum(last.handoff.cached_tokens.values()) == 40


@pytest.mark.parametrize("differs", ["page_tokens", "weights", "dtype", "rope", "model"])
def test_engines_that_do_not_fit_say_so(lab: Lab, monkeypatch: pytest.MonkeyPatch, differs: str) -> None:
    """Refused at the hand-off, with both fingerprints and every field that differs; both engines go on."""
    other: dict[str, Any] = {
        "page_tokens": lambda: {"page_tokens": 32},
        "weights": lambda: {"served": served(PRESET, 1), "seed": 1},
        "dtype": lambda: {"served": served(PRESET, 0, "bfloat16"), "dtype": "bfloat16"},
        "rope": lambda: {"served": other_rope(monkeypatch)},
        "model": lambda: {"served": served("tiny-qwen3")},
    }[differs]()
    fields = {
        "page_tokens": {"page_tokens": ("16", "32")},
        "weights": {"revision": ("seed-0", "seed-1"), "weights_digest": ()},
        "dtype": {"dtype": ("float32", "bfloat16"), "weights_digest": ()},
        "rope": {"rope": ("5000",), "weights_digest": ()},
        "model": {"model": (PRESET, "tiny-qwen3"), "kv_heads": ("2", "4"), "head_dim": ("16", "32")},
    }[differs]
    store = lab.store()
    prefill = lab.engine(PRESET, store, role=Role.PREFILL, **other)
    asks = {"prefill": (lab.address_of(prefill),), "local_prefill_tokens": 0}
    decode = lab.engine(PRESET, store, role=Role.DECODE, **asks)
    for handoff in ("eager", "lazy"):
        error = lab.ask(decode, prompt(2, 90), 4, handoff=handoff).wait().error
        assert isinstance(error, VersionMismatch)
        for layout in (prefill.layout, decode.layout):
            assert layout.fingerprint.hex() in str(error)
        for name, values in fields.items():
            for value in (name, *values):
                assert value in str(error)
        same = {field.name for field in dataclasses.fields(decode.layout)} - {*differing(prefill, decode)}
        assert not [name for name in same if f"{name}:" in str(error)], "only what differs is said"
    # Both go on. What one of them stored is nothing to the other, although both have the same store.
    assert serves_prefills(prefill)
    assert lab.answers(decode, [prompt(1, 40)], 4, prefill=())[0].cached == {}


def differing(one: Engine, other: Engine) -> list[str]:
    names = [field.name for field in dataclasses.fields(one.layout)]
    return [name for name in names if getattr(one.layout, name) != getattr(other.layout, name)]


# --- requests that cannot be ------------------------------------------------------------------------------------------

BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "empty": ("tokens", {"tokens": np.empty(0, np.uint32)}),
    "beyond the context": ("tokens", {"tokens": np.zeros(8192, np.uint32)}),
    "beyond the context with its answer": ("tokens", {"tokens": np.zeros(8100, np.uint32), "max_tokens": 93}),
    "beyond the arena": ("tokens", {"tokens": np.zeros(3000, np.uint32)}),
    "out of vocabulary": ("tokens", {"tokens": np.array([1, 2, 258, 3], np.uint32)}),
    "far out of vocabulary": ("tokens", {"tokens": np.array([2**32 - 1], np.uint32)}),
    "nothing but an answer": ("generated", {"generated": 20}),
    "generated less than nothing": ("generated", {"generated": -1}),
    "all generated": ("generated", {"generated": 8}),
    "late before it began": ("deadline_s", {"deadline_s": 0.0}),
    "no tokens wanted": ("sampling.max_tokens", {"max_tokens": 0}),
    "cold": ("sampling.temperature", {"temperature": -0.1}),
    "hot": ("sampling.temperature", {"temperature": float("inf")}),
    "a nucleus of nothing": ("sampling.top_p", {"top_p": 0.0}),
    "a nucleus of more than all": ("sampling.top_p", {"top_p": 1.1}),
    "a stop of nothing": ("sampling.stop", {"stop": ("",)}),
}


def made(request_id: str = "bad", **wrong: Any) -> Request:
    """A request of 20 tokens for 8 more, but for what is wrong."""
    names = {field.name for field in dataclasses.fields(Sampling)}
    sampling = Sampling(**{"max_tokens": 8, **{name: value for name, value in wrong.items() if name in names}})
    rest = {name: value for name, value in wrong.items() if name not in names}
    return Request(**{"id": request_id, "tokens": prompt(3, 20), "sampling": sampling, **rest})


def test_bad_requests_are_refused_by_field(lab: Lab) -> None:
    """Nothing of them stays, also where they would only be prefilled here, and beside a request that runs."""
    one = lab.engine(PRESET, lab.store(), arena=150 * 12288)
    running = lab.ask(one, prompt(4, 30), 60)
    for name, (field, wrong) in BAD.items():
        with pytest.raises(InvalidRequest) as refused:
            one.submit(made(**wrong), lambda event: None)
        assert refused.value.field == field, f"{name}: {refused.value}"
        if field == "tokens":
            with pytest.raises(InvalidRequest) as refused:
                one.prefill(made(**wrong), one.layout, 0.0, lambda event: None)
            assert refused.value.field == field, f"{name}: {refused.value}"
    check_answer(running)
    lab.answers(one, [prompt(3, 20)], 8)


def test_the_largest_request_that_fits(lab: Lab) -> None:
    """Prompt and answer fill the arena to the last token; one more does not fit."""
    page = lab.engine(PRESET).layout.page_bytes
    one = lab.engine(PRESET, lab.store(), arena=10 * page)
    assert lab.answers(one, [prompt(5, 150)], 10)[0].usage.computed_tokens == 150
    with pytest.raises(InvalidRequest, match="do not fit the arena of 160"):
        one.submit(made(tokens=prompt(5, 151), max_tokens=10), lambda event: None)


def test_the_wrong_role_and_the_wrong_id(lab: Lab) -> None:
    prefill, decode = lab.pair(PRESET, lab.store())
    with pytest.raises(InvalidRequest, match="role"):
        prefill.submit(made(), lambda event: None)
    with pytest.raises(InvalidRequest, match="role"):
        decode.prefill(made(), decode.layout, 0.0, lambda event: None)
    running = lab.ask(decode, prompt(6, 100), 80).wait(2)
    with pytest.raises(InvalidRequest) as refused:
        decode.submit(made(running.request.id), lambda event: None)
    assert refused.value.field == "request_id"
    for where, field in ((7, "token_start"), (4096, "token_start")):
        assert serve_held(prefill)
        with pytest.raises(InvalidRequest) as refused:
            next(prefill.pull("held", where, "none", 1.0))
        assert refused.value.field == field
        prefill.release("held")
        within("its frames are back", lambda: not len(prefill.prefills))
    with pytest.raises(InvalidRequest) as refused:
        next(prefill.pull("nobody", 0, "none", 1.0))
    assert refused.value.field == "request_id"
    check_answer(running)


def serve_held(one: Engine) -> bool:
    """A finished prefill that is held, under the id "held"."""
    request = Request(id="held", tokens=prompt(7, 40), sampling=Sampling(max_tokens=4))
    return isinstance([*InProcess(one).prefill(request, one.layout)][-1], Done)
