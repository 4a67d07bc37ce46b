"""Greedy answers of engines whose frames are a device's are those of plain transformers: no byte goes another way than
on a GPU. The device is a peer in host memory that copies as late as it may.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from engine.model.request import Grain, Role, Source, Timing
from kvstore.client.writer import Writer
from kvstore.errors import NodeUnavailable
from tests.helpers.engines.device import DeviceHost
from tests.helpers.engines.tokens import MAIN, Lab, check_answer, prompt, to_nvme, within
from tests.helpers.pool import patient
from tests.helpers.processes import Machine, check_laws

FAMILIES = (*MAIN, "tiny-gemma2", "tiny-gpt-oss", "tiny-mistral")
WAYS = list(itertools.product(Timing, Source, Grain))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> DeviceHost:
    return DeviceHost(monkeypatch)


@pytest.fixture
def lab(machine: Machine, monkeypatch: pytest.MonkeyPatch, host: DeviceHost) -> Iterator[Lab]:
    patient(monkeypatch)
    with Lab(machine, monkeypatch) as here:
        yield here


@pytest.mark.parametrize("preset", FAMILIES)
def test_cold_and_hits_of_every_tier(lab: Lab, preset: str) -> None:
    store = lab.store(nvme=True)
    at = FAMILIES.index(preset)
    settings = {"page_tokens": (16, 32, 64)[at % 3], "chunk_tokens": (64, 24, 512)[at % 3]}
    prompts = [prompt(i, count) for i, count in enumerate((1, 17, 64, 150))]
    assert all(answer.cached == {} for answer in lab.answers(lab.engine(preset, store, **settings), prompts))
    for tier in ("dram", "nvme"):
        if tier == "nvme":
            to_nvme(store)
        hits = lab.answers(lab.engine(preset, store, **settings), prompts)
        assert hits[-1].cached == {tier: 150 // settings["page_tokens"] * settings["page_tokens"]}
    check_laws(store)


@pytest.mark.parametrize(("timing", "source", "grain"), WAYS)
def test_every_way_of_a_handoff(lab: Lab, timing: Timing, source: Source, grain: Grain) -> None:
    at = WAYS.index((timing, source, grain))
    way = {"handoff": timing, "source": source, "grain": grain, "page_tokens": (16, 32, 64)[at % 3]}
    store = lab.store() if at % 2 == 0 or source is Source.DRAM else None
    _, decode = lab.pair(FAMILIES[at % len(FAMILIES)], store, link="20MB/s", chunk_tokens=(64, 24)[at % 2], **way)
    prompts = [prompt(i, count) for i, count in enumerate((1, 16, 65, 200))]
    for answer in lab.answers(decode, prompts, 6):
        assert answer.usage.computed_tokens == 0
    longer = [prompt(i, count + 20) for i, count in enumerate((1, 16, 65, 200))]
    lab.answers(decode, longer, 6)


def test_lossy_pages_and_an_answer_that_moves_on(lab: Lab) -> None:
    store = lab.store()
    one, other = lab.engine("tiny-llama", store), lab.engine("tiny-llama", store)
    moving = lab.ask(one, prompt(3, 100), 120)
    moving.wait(20)
    assert one.migrate(moving.request.id, lab.address_of(other))
    check_answer(moving)
    lossy = lab.engine("tiny-qwen3", store, compress="int8")
    for _ in range(2):
        answer = lab.ask(lossy, prompt(4, 200), allow_lossy=True).wait()
        assert answer.error is None and len(answer.tokens) == 8
    assert any(kind.endswith("int8") for kind in answer.cached), answer.cached


def test_a_layer_that_cannot_be_written_is_tried_once_and_the_answer_is_right(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = lab.engine("tiny-llama", lab.store(), chunk_tokens=64)
    asked: list[int] = []

    def write_layer(self: Writer, layer: int, data: object) -> None:
        asked.append(layer)
        raise NodeUnavailable("it is away")

    monkeypatch.setattr(Writer, "write_layer", write_layer)
    (answer,) = lab.answers(one, [prompt(8, 60)])
    assert asked == [0] and answer.usage.computed_tokens == 60
    within("its failure was counted", lambda: one.status()["pool"]["failures"] >= 1)


def test_a_device_that_is_lost_fails_the_requests_of_its_engine_and_nothing_else(lab: Lab, host: DeviceHost) -> None:
    store = lab.store()
    one, other = lab.engine("tiny-llama", store), lab.engine("tiny-llama", store)
    running = lab.ask(one, prompt(5, 50), 4000)
    running.wait(3)
    host.devices[0].lose()
    running.wait()
    assert isinstance(running.error, NodeUnavailable) and "host:0 is lost" in str(running.error)
    late = lab.ask(one, prompt(6, 20)).wait()
    assert isinstance(late.error, NodeUnavailable) and "lost its device" in str(late.error)
    within("the engine says so", lambda: "host:0 is lost" in one.status()["ended"])
    assert one.alive
    lab.answers(other, [prompt(5, 50), prompt(6, 20)])


def test_a_device_that_is_lost_during_a_handoff_costs_the_decoding_engine_its_answer_only(
    lab: Lab, host: DeviceHost
) -> None:
    _, decode = lab.pair("tiny-llama", None, link="20MB/s", handoff=Timing.EAGER)
    host.devices[0].lose()  # of the engine that computes for others
    answer = lab.ask(decode, prompt(7, 120))
    check_answer(answer)
    assert answer.usage.computed_tokens == 120 and decode.config.role is Role.DECODE
