"""What the store loses costs time and changes no token: pages evicted or damaged, a node killed in the middle."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.model.request import Source
from engine.shell.engine import Engine
from kvstore import Store
from tests.helpers.engines.tokens import (
    ANSWER_S,
    MAIN,
    Lab,
    Tokens,
    check_answer,
    keys_of,
    prompt,
    to_nvme,
    within,
)
from tests.helpers.nvme.nodes import reboot
from tests.helpers.processes import Machine, check_laws, wait_until

PAGES = (16, 32, 64)
NODE = "n"
LOOKED_S = 3.0  # an engine sees that its node is back


@pytest.fixture
def lab(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(machine, monkeypatch) as here:
        yield here


def found(one: Engine, store: Store, tokens: Tokens) -> int:
    """Tokens that a request will find: pages whole; of the last token only its logits are missing."""
    if len(tokens) < one.layout.page_tokens:
        return 0
    return min(store.cache(one.layout).lookup(keys_of(one, store, tokens)).tokens, len(tokens) - 1)


# --- pages that are gone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nvme", [False, True])
@pytest.mark.parametrize("number", range(6))
def test_any_subset_is_evicted(lab: Lab, nvme: bool, number: int) -> None:
    """Prompts that share prefixes; random parts of them leave DRAM, NVMe, or both; each is asked for again."""
    chance = random.Random(f"{number}/{nvme}")
    preset, page = MAIN[number % 3], PAGES[(number + nvme) % 3]
    store = lab.store(nvme=nvme)
    one = lab.engine(preset, store, page_tokens=page, chunk_tokens=chance.choice((24, 64, 512)))
    trunk = prompt(number, 3 * page + 5)
    prompts = [trunk] + [
        np.concatenate([trunk[: cut * page], prompt(10 + cut, 3 * page + cut)]) for cut in (0, 1, 2, 3)
    ]
    lab.answers(one, prompts, 4)
    hits = set()
    for _ in range(4):
        for _ in range(chance.randint(1, 4)):
            keys = keys_of(one, store, chance.choice(prompts))
            start = chance.randrange(len(keys))
            part = keys[start : chance.randint(start + 1, len(keys))]
            store.evict(keys=part, tier=chance.choice(("dram", "nvme", "all") if nvme else ("dram", "all")))
        for tokens in chance.sample(prompts, len(prompts)):
            there = found(one, store, tokens)
            answer = lab.answers(one, [tokens], 4)[0]
            hit = sum(answer.cached.values())
            assert hit >= there, "what the answer before stores may arrive in between"
            assert answer.usage.computed_tokens == len(tokens) - hit
            hits.add(there // page)
    assert len(hits) >= 3, f"too tame: {hits}"
    check_laws(store)


@pytest.mark.parametrize("preset", MAIN)
def test_a_damaged_page_on_nvme_is_a_hole(lab: Lab, preset: str) -> None:
    """A page in the middle whose bytes do not hold: what is before it is used, the rest computed and stored again."""
    store = lab.store(nvme=True)
    one = lab.engine(preset, store)
    for seed, hole in ((40, 2), (41, 0), (42, 5)):
        tokens = prompt(seed, 100)
        lab.answers(one, [tokens], 4)
        row = bytes(store.cache(one.layout).get(keys_of(one, store, tokens)[hole : hole + 1]).data)
        to_nvme(store)
        for path in lab.machine.logs.glob("nvme-*"):
            spoil(path, row)
        answer = lab.answers(one, [tokens], 4)[0]
        assert answer.cached == ({"nvme": hole * 16} if hole else {})
        stored_again(lab, one, tokens)
    check_laws(store)


def stored_again(lab: Lab, one: Engine, tokens: Tokens) -> None:
    """All pages of it are found, once the node has dropped what is damaged, and taken in what was published."""
    pages = len(tokens) // 16

    def found() -> bool:
        return sum(lab.answers(one, [tokens], 4)[0].cached.values()) == 16 * pages

    wait_until("it is stored again", found)


def spoil(path: Path, row: bytes) -> None:
    """Change one byte in the middle of where a device holds these bytes."""
    with open(path, "r+b", buffering=0) as file:
        place = file.read().find(row[: len(row) // 2])
        assert place >= 0, "the page is on NVMe"
        file.seek(place + len(row) // 2)
        byte = file.read(1)
        file.seek(place + len(row) // 2)
        file.write(bytes([byte[0] ^ 0xFF]))


# --- a node that is killed --------------------------------------------------------------------------------------------


def node(lab: Lab, **flags: str) -> Store:
    """A daemon, and our way to it."""
    lab.machine.serve(NODE, **flags)
    return lab.machine.connect(NODE, 2.0)


def kill(machine: Machine) -> None:
    """kill -9."""
    assert machine.processes[-1].kill() == -9


def restarted(lab: Lab, store: Store, *engines: Engine) -> None:
    """The node is back, and the engines know."""
    lab.machine.serve(NODE)
    store.wait_ready()
    wait_until("the engines see it", lambda: all(one.pool.up for one in engines), 10 * LOOKED_S)


def check_node(lab: Lab) -> None:
    """The laws hold. Asked by a session of its own: engines renew the one that they share with the test."""
    check_laws(lab.machine.connect(NODE))


@pytest.mark.parametrize("chunk", [16, 512])
def test_a_killed_node_holds_nobody_up(lab: Lab, chunk: int) -> None:
    """What is asked at once behind the kill is read out of its memory and answered long before a write would end."""
    lab.machine.serve(NODE)
    store = lab.machine.connect(NODE, 2 * ANSWER_S)
    one = lab.engine("tiny-llama", store, chunk_tokens=chunk)
    tokens = prompt(57, 200)
    stored_again(lab, one, tokens[:100])
    kill(lab.machine)
    answer = lab.answers(one, [tokens], 40)[0]
    assert sum(answer.cached.values()) == 96
    assert not one.pool.up


@pytest.mark.parametrize("number", range(2))
def test_node_killed_again_and_again(lab: Lab, number: int) -> None:
    """At random moments of a stream of requests with common prefixes; it is started again each time."""
    chance = random.Random(number)
    store = node(lab)
    prefill, decode = lab.pair("tiny-llama", store, source=Source.DRAM)
    both = lab.engine("tiny-llama", store, chunk_tokens=32)
    for _ in range(2):
        asked = []
        for i in range(12):
            tokens = np.concatenate([prompt(70 + i % 3, 16 * chance.randint(0, 8)), prompt(80 + i, 25)])
            asked.append(lab.ask(chance.choice((both, decode)), tokens, chance.randint(2, 40)))
        time.sleep(chance.random() * 0.3)
        kill(lab.machine)
        for answer in asked:
            check_answer(answer)
        restarted(lab, store, prefill, decode, both)
    check_node(lab)


@pytest.mark.parametrize("end", ["terminated", "killed"])
def test_pages_that_outlived_a_reboot(lab: Lab, end: str) -> None:
    """Shared memory is gone, NVMe is not: a new engine of a new process of the node hits there."""
    flags = {"dram": "16MiB", "nvme": f"{lab.machine.logs / 'disk'}:32MiB"}
    store = node(lab, **flags)
    one = lab.engine("tiny-qwen3", store)
    prompts = [prompt(95 + i, 40 + 30 * i) for i in range(3)]
    lab.answers(one, prompts, 4)
    to_nvme(store)
    daemon = lab.machine.processes[-1]
    assert daemon.terminate() == 0 if end == "terminated" else daemon.kill() == -9
    lab.answers(one, prompts, 4)
    reboot(lab.machine, NODE)
    lab.answers(one, prompts, 4)
    lab.machine.serve(NODE, **flags)
    fresh = lab.machine.connect(NODE)
    within("the scan is done", lambda: "scanning" not in fresh.stats()["tiers"]["nvme"]["state"])
    two = lab.engine("tiny-qwen3", fresh)
    for tokens, answer in zip(prompts, lab.answers(two, prompts, 4), strict=True):
        assert answer.cached == {"nvme": (len(tokens) - 1) // 16 * 16}
    lab.answers(one, prompts, 4)
