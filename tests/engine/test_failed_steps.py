"""A step that cannot be computed costs the requests in it, and nobody else: no byte of it is found later, by anyone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from engine.compute.paged_cache import Batch
from engine.compute.torch_errors import StepFault
from engine.model.piece import Piece
from engine.model.request import Failed, Grain, PrefillEvent, Request, Role, Timing
from engine.shell.engine import Engine
from engine.state import engine_state
from kvstore.device.base import DeviceLost
from kvstore.errors import InvalidRequest, KVStoreError, NodeUnavailable, OutOfSpace, Unavailable
from tests.helpers.engines.device import DeviceHost
from tests.helpers.engines.tokens import Lab, Tokens, check_answer, keys_of, prompt, within
from tests.helpers.pool import patient
from tests.helpers.processes import Machine, check_laws

PRESET = "tiny-llama"
ERRORS: dict[str, tuple[Callable[[], BaseException], type[KVStoreError]]] = {
    "device memory": (lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), OutOfSpace),
    "host memory": (lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory"), OutOfSpace),
    "python": (MemoryError, OutOfSpace),
    "library": (lambda: RuntimeError("CUDA error: CUBLAS_STATUS_INTERNAL_ERROR"), Unavailable),
    "driver": (lambda: OutOfSpace("cuEventCreate: CUDA_ERROR_OUT_OF_MEMORY"), OutOfSpace),
}


@pytest.fixture(params=["cpu", "device"])
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DeviceHost | None:
    return DeviceHost(monkeypatch) if request.param == "device" else None


@pytest.fixture
def lab(machine: Machine, monkeypatch: pytest.MonkeyPatch, host: DeviceHost | None) -> Iterator[Lab]:
    patient(monkeypatch)
    with Lab(machine, monkeypatch) as here:
        yield here


@contextmanager
def failing(
    one: Engine, error: Callable[[], BaseException], holds: Callable[[Batch, int], bool]
) -> Iterator[list[int]]:
    """A forward of it that comes there (with that batch, in that layer) leaves nonsense in its frames, and that error.
    Yields how many sequences each of those had."""
    write, failed = Batch.write, list[int]()

    def writes(self: Batch, layer: int, content: torch.Tensor) -> None:
        fails = self.arenas is one.arenas and holds(self, layer)
        write(self, layer, torch.full_like(content, 1e4) if fails else content)
        if fails:
            failed.append(len(self.slices))
            raise error()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Batch, "write", writes)
        yield failed


def from_token(start: int, layer: int = 1) -> Callable[[Batch, int], bool]:
    """In that layer, once a sequence of it is so long."""
    return lambda batch, at: at == layer and any(part.stop > start for part in batch.slices)


def stored(one: Engine, store: Any, tokens: Tokens) -> int:
    return int(store.cache(one.layout).lookup(keys_of(one, store, tokens)).tokens)


@pytest.mark.parametrize("kind", ERRORS)
def test_a_chunk_that_fails_costs_its_request_and_leaves_what_was_whole_before(lab: Lab, kind: str) -> None:
    """Half-way through its layers, while they stream out: no page of that chunk is kept, or in the pool."""
    store = lab.store()
    one = lab.engine(PRESET, store, keep_pages=1.0)
    tokens = prompt(1, 200)
    error, told = ERRORS[kind]
    with failing(one, error, from_token(128)) as failed:
        answer = lab.ask(one, tokens).wait()
        assert type(answer.error) is told and failed == [1]
        assert kind == "driver" or "could not be computed" in str(answer.error)
        lab.settle()
        assert stored(one, store, tokens) == 128 and one.status()["frames"]["kept"] == 8
        lab.answers(one, [prompt(2, 100)], 4)
    (again,) = lab.answers(one, [tokens], 4)
    assert again.cached == {"hbm": 128} and one.alive and not one.status()["ended"]
    other = lab.engine(PRESET, store)
    assert lab.answers(other, [tokens], 4)[0].cached == {"dram": 192}
    check_laws(store)


def test_all_requests_of_the_step_fail_and_those_beside_it_go_on(lab: Lab) -> None:
    """Answers fail in the middle of a page; their whole pages stay, the one they were at does not."""
    one = lab.engine(PRESET, keep_pages=1.0, batch_max=3)
    asked = [lab.ask(one, prompt(10 + i, 40), 400) for i in range(3)]
    waiting = lab.ask(one, prompt(13, 40), 6)  # for a place in the batch
    for answer in asked:
        answer.wait(10)
    with failing(one, ERRORS["library"][0], lambda batch, layer: layer == 1 and len(batch.slices) == 3) as failed:
        for answer in asked:
            answer.wait()
            assert type(answer.error) is Unavailable and len(answer.tokens) < 400
        check_answer(waiting)
        assert failed == [3]
    for answer in asked:
        history = np.concatenate([answer.request.tokens, np.array(answer.tokens, np.uint32)])
        (again,) = lab.answers(one, [history], 4)
        assert again.cached == {"hbm": (len(history) - 1) // 16 * 16}


@pytest.mark.parametrize("preset", [PRESET, "tiny-mistral"])
def test_a_prefill_that_fails_while_its_layers_are_pulled(lab: Lab, preset: str) -> None:
    """Who asked for it computes what is missing."""
    source, decode = lab.pair(preset, None, handoff=Timing.EAGER, grain=Grain.LAYER)
    with failing(source, MemoryError, from_token(100)) as failed:
        answer = lab.ask(decode, prompt(30, 200), 6)
        check_answer(answer)
        assert failed and 72 <= answer.usage.computed_tokens <= 200
    lab.settle()
    source_told = list[PrefillEvent]()
    with failing(source, MemoryError, from_token(100)):
        source.prefill(Request(id="x", tokens=prompt(31, 200)), source.layout, 5.0, source_told.append)
        within("it is told", lambda: source_told and isinstance(source_told[-1], Failed))


def test_an_answer_whose_layers_still_come_fails_alone(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a side batch: its frames are another one's only when its mover has ended."""
    come = threading.Event()
    _, decode = lab.pair(PRESET, chunk_tokens=512)
    pull = type(lab.connect("engine-0:1")).pull

    def late_last(self: Any, *asked: Any, **how: Any) -> Iterator[Piece]:
        for piece in pull(self, *asked, **how):
            if piece.layer == decode.layout.layers - 1:
                come.wait(20)
            yield piece

    monkeypatch.setattr(engine_state, "arrives_in_time", lambda there, layers, layer_s: there.layers == layers)
    neighbour = lab.ask(decode, prompt(40, 40), 600, prefill=()).wait(5)
    monkeypatch.setattr(type(lab.connect("engine-0:1")), "pull", late_last)
    with failing(decode, MemoryError, lambda batch, layer: layer == 0 and batch.after is None is not batch.before):
        answer = lab.ask(decode, prompt(41, 100), 80).wait()
        assert isinstance(answer.error, OutOfSpace) and decode.status()["side_steps"] == 1
        assert decode.remains()["sequences"] >= 1
    come.set()
    decode.cancel(neighbour.request.id)
    assert neighbour.wait().reason == "cancelled"
    lab.settle()
    lab.answers(decode, [prompt(41, 100)], 6)


@pytest.mark.parametrize("error", [DeviceLost("gone"), torch.AcceleratorError("gone", 719), AssertionError("ours")])
def test_what_ends_more_than_a_step_is_raised(error: BaseException) -> None:
    fault = StepFault()
    with pytest.raises(type(error)), fault:
        raise error
    assert fault.error is None


@pytest.mark.parametrize("host", ["device"], indirect=True)
def test_a_device_that_is_lost_behind_an_error_of_a_library(lab: Lab, host: DeviceHost) -> None:
    one = lab.engine(PRESET)

    def error() -> BaseException:
        host.devices[0].lose()
        return RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED")

    with failing(one, error, from_token(0)):
        answer = lab.ask(one, prompt(60, 40)).wait()
        assert isinstance(answer.error, NodeUnavailable) and "host:0 is lost" in str(answer.error)
    within("the engine says so", lambda: "host:0 is lost" in one.status()["ended"])


@pytest.mark.parametrize("host", ["cpu"], indirect=True)
def test_a_mistake_of_ours_is_told_to_everybody(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread ends, whatever it was at: nobody waits for what will not come."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    one = lab.engine(PRESET, batch_max=2)
    told = list[PrefillEvent]()
    running = [lab.ask(one, prompt(70 + i, 40), 4000) for i in range(4)]
    running[0].wait(3)
    one.prefill(Request(id="x", tokens=prompt(75, 40)), one.layout, 5.0, told.append)
    puller = one.pull("x", 0, "none", 30.0)
    one.inbox.post(AssertionError("a mistake"))
    began_s = time.monotonic()
    for answer in running:
        answer.wait()
        assert isinstance(answer.error, NodeUnavailable) and "a mistake" in str(answer.error)
    assert isinstance(told[-1], Failed) and time.monotonic() - began_s < 5
    with pytest.raises((NodeUnavailable, InvalidRequest)):
        list(puller)
    within("the thread has ended", lambda: not one.alive)
    status = one.status()
    assert "a mistake" in status["ended"] and status["draining"]
    one.set_role(Role.BOTH)
    with pytest.raises(NodeUnavailable, match="a mistake"):
        lab.ask(one, prompt(76, 10))
    assert one.drain(None, 5.0) == 0 and not one.cancel(running[0].request.id)
    del lab.engines[lab.address_of(one)]  # it is idle for ever, and not tidy
    one.stop()
