"""An NVMe device that does not answer, below a real daemon: it costs what lies on it, and nothing else waits for it."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore import Store
from kvstore.errors import Unavailable
from kvstore.failpoint import STALL
from tests.helpers.content import FEW, SMALL, chain, mismatch
from tests.helpers.nvme.files import silent
from tests.helpers.nvme.nodes import (
    NODE,
    PROMPT_PAGES,
    check_closed,
    check_findings,
    check_sound,
    configure,
    nvme,
    save_all,
    target,
)
from tests.helpers.processes import WAIT_S, Daemon, Machine, put, wait_until

ANSWER_S = 5.0  # the other device, on a slow, busy machine, needs less
OBJECTS = 6
ROUND = 10  # prompts
OLD, NEW = range(60), range(1000, 1060)  # prompts of each layout, stored before and during the silence


def serve(machine: Machine, size: str = "6MiB", answer_s: float = ANSWER_S, **more: Any) -> Daemon:
    """A node with two devices, which saves at once; what is put in a test fits its DRAM."""
    devices = [f"{target(machine, number)}:{size}" for number in range(2)]
    settings: dict[str, Any] = {"dram": "64MiB", "extent": "1MiB", "demote_at": 0.0, "nvme_answer_s": answer_s, **more}
    return machine.serve(NODE, failpoint=STALL, **configure(machine, nvme=devices, **settings))


def device_of(machine: Machine, name: str) -> Path:
    """Where this object's head lies."""
    found = [path for path in (target(machine, 0), target(machine, 1)) if name.encode() in path.read_bytes()]
    assert len(found) == 1, found
    return found[0]


class Probe:
    """Somebody who puts, looks up and gets small prompts all the time, and notes his longest wait."""

    def __init__(self, machine: Machine) -> None:
        self._store = machine.connect(NODE)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.longest_s = 0.0
        self.rounds = 0
        self.wrong = ""
        self._thread.start()

    def _run(self) -> None:
        cache = self._store.cache(SMALL)
        while not self._ended.is_set():
            seed = 5000 + self.rounds % 50
            keys = chain(seed, 2)
            for step in (partial(put, self._store, seed, 2), partial(cache.lookup, keys), partial(cache.get, keys)):
                since = time.monotonic()
                done: Any = step()
                self.longest_s = max(self.longest_s, time.monotonic() - since)
            self.wrong = self.wrong or mismatch(done, keys, SMALL)
            self.rounds += 1
            time.sleep(0.01)

    def end(self) -> None:
        """No more."""
        self._ended.set()
        self._thread.join()


def delete(store: Store, name: str, outcomes: dict[str, str]) -> None:
    """Delete an object, and note what is said."""
    try:
        outcomes[name] = f"{store.delete(name)} gone"
    except Unavailable as error:
        outcomes[name] = str(error)


@pytest.mark.slow
def test_a_silent_device_costs_what_lies_on_it(machine: Machine) -> None:
    serve(machine)
    store = machine.connect(NODE)
    for seed in OLD:  # more than NVMe holds, of two classes: pages leave, and move
        put(store, seed, PROMPT_PAGES)
        put(store, seed, PROMPT_PAGES, FEW)
    names = [f"object-{number}" for number in range(OBJECTS)]
    for name in names:
        assert store.put(name, name.encode() * 100)
    wait_until("objects are saved", lambda: nvme(store)["pages"] > 0)
    save_all(store, 1)
    device = device_of(machine, names[0])
    there = [name for name in names if device_of(machine, name) == device]
    probe, outcomes = Probe(machine), dict[str, str]()
    wait_until("the probe is at work", lambda: probe.rounds > 5)
    with silent(device):
        stores = [machine.connect(NODE) for _ in names]
        deleting = [threading.Thread(target=delete, args=(*pair, outcomes)) for pair in zip(stores, names, strict=True)]
        for thread in deleting:
            thread.start()
        since, saved = time.monotonic(), store.stats()["counters"]["pages_saved"]
        for seed in NEW:
            put(store, seed, PROMPT_PAGES)
            put(store, seed, PROMPT_PAGES, FEW)
        for thread in deleting:
            thread.join(20 * ANSWER_S)
        assert time.monotonic() - since < 20 * ANSWER_S, "somebody waited for the device"
        wait_until("the device counts as failed", lambda: str(device) in nvme(store)["state"])
        wait_until("the other device is written to", lambda: store.stats()["counters"]["pages_saved"] > saved)
        probe.end()
        check_findings(store)
    assert probe.rounds > 20 and not probe.wrong, probe.wrong
    assert probe.longest_s < ANSWER_S, f"a client waited {probe.longest_s:.1f} s"
    assert {name: "reboot" in said for name, said in outcomes.items()} == {name: name in there for name in names}
    check_closed(store, dict.fromkeys((*OLD, *NEW), PROMPT_PAGES))
    check_closed(store, dict.fromkeys((*OLD, *NEW), PROMPT_PAGES), FEW)
    assert store.contains(names) == [False] * len(names)
    check_sound(store)


def devices_of(machine: Machine, store: Store, seeds: range) -> dict[int, set[Path]]:
    """Where the pages of each prompt lie: their headers name their keys."""
    data = {path: path.read_bytes() for path in (target(machine, 0), target(machine, 1))}
    keys = {seed: store.in_pool(chain(seed, PROMPT_PAGES)).hashes for seed in seeds}
    return {seed: {path for path in data for key in keys[seed] if key in data[path]} for seed in seeds}


def decided(store: Store, pages: int) -> bool:
    """So many pages are on NVMe, or on their way there."""
    found = nvme(store)
    return bool(found["pages"] + found["frames"]["reserved"] == pages)


@pytest.mark.slow
def test_another_device_goes_on_while_one_is_silent(machine: Machine) -> None:
    """Its loads and saves end while the silent one is still waited for, which it is for an hour."""
    serve(machine, "16MiB", answer_s=3600.0)
    store, theirs = machine.connect(NODE), machine.connect(NODE)
    for seed in OLD:
        put(store, seed, PROMPT_PAGES)
    save_all(store, 1)
    where = devices_of(machine, store, OLD)
    device = next(iter(where[OLD[0]]))
    here, elsewhere = ([seed for seed in OLD if (device in where[seed]) == on_it] for on_it in (True, False))
    assert len(here) > 5 and len(elsewhere) > 5
    with silent(device):
        for seed in here[:3]:
            match = theirs.cache(SMALL).prefetch(chain(seed, PROMPT_PAGES), timeout_s=0.2)
            assert match.tiers.get("dram", 0) == 0, "its device answers"
        for seed in elsewhere:
            match = store.cache(SMALL).prefetch(chain(seed, PROMPT_PAGES), timeout_s=WAIT_S)
            assert match.tiers == {"dram": PROMPT_PAGES}, f"prompt {seed} waits for the silent device"
        saved, put_pages = nvme(store)["pages"], 0
        for first in range(NEW.start, NEW.stop, ROUND):
            put_pages += sum(put(store, seed, PROMPT_PAGES) for seed in range(first, first + ROUND))
            wait_until("they are saved, or on their way", partial(decided, store, saved + put_pages))
        # The pages of one round may be on their way to the silent device, but no others.
        others = saved + put_pages - ROUND * PROMPT_PAGES
        wait_until("all others are saved", lambda: nvme(store)["pages"] >= others)
        assert str(device) not in nvme(store)["state"], "it does not count as failed yet"
        check_findings(store)
    for seed in here:
        assert store.cache(SMALL).prefetch(chain(seed, PROMPT_PAGES), timeout_s=WAIT_S).tiers == {"dram": PROMPT_PAGES}
    save_all(store, 1)
    check_closed(store, dict.fromkeys((*OLD, *NEW), PROMPT_PAGES))
    check_sound(store)


@pytest.mark.slow
@pytest.mark.parametrize("silent_at_end", (0, 1))
def test_a_silent_device_at_the_end_and_at_a_start(silent_at_end: int, machine: Machine) -> None:
    daemon = serve(machine, "16MiB")
    store = machine.connect(NODE)
    for seed in OLD:
        put(store, seed, PROMPT_PAGES)
    save_all(store, 1)
    device = target(machine, silent_at_end)
    with silent(device):
        for seed in NEW:
            put(store, seed, PROMPT_PAGES)
        since = time.monotonic()
        assert daemon.terminate() == 0
        assert time.monotonic() - since < 20 * ANSWER_S
        again = machine.serve(NODE, failpoint=STALL)
        state = nvme(machine.connect(NODE))["state"]
        assert str(device) in state and "did not answer" in state, state
        assert again.terminate() == 0
    machine.serve(NODE, failpoint=STALL)
    store = machine.connect(NODE)
    assert str(device) not in nvme(store)["state"]
    found = check_closed(store, dict.fromkeys((*OLD, *NEW), PROMPT_PAGES))
    assert found >= len(NEW) * PROMPT_PAGES
    check_sound(store)
