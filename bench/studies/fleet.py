"""Fleet: nodes, paced engines and a conductor as real processes, and requests that are sent on a schedule.

A paced engine (``engine.compute.presets``) writes, reads and hands over real pages, but sleeps instead of computing KV.
So eight of them run on two cores. One token represents ``PACED_TOKENS`` tokens of a large model, a page of 16 tokens
represents 512, and a second represents five seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt

from engine.bench.processes import READY_S, EngineProcess
from engine.compute.presets import PACED_TOKENS, PRESETS, Pace, paced_answer
from engine.model.request import Role
from engine.simulator.generate import QUICK_SESSIONS, conversations
from kvstore.bench.find import catalog
from kvstore.bench.harness import BenchFailed
from kvstore.bench.processes import Child, Daemon, cpu_s, environment
from kvstore.bench.stage import MIB, Stage, wait_for
from kvstore.client.remote.admin import document
from kvstore.errors import NodeUnavailable
from kvstore.pb import conductor_pb2 as pb
from kvstore.pb import conductor_pb2_grpc, engine_pb2, store_pb2

MODEL: Final = "paced-llama"
PAGE_TOKENS: Final = 16
NODE_BYTES: Final = 32 * MIB  # 1,024 pages
EXTENT_BYTES: Final = 16 * MIB
ARENA_BYTES: Final = 64 * MIB
ANSWER_S: Final = 120.0
KNOWN_S: Final = 30.0
WARM_UP: Final = 3  # prompts per engine, from which the engine measures its speed
WARM_TOKENS: Final = 200

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class FleetRequest:
    """A request, sent ``at_s`` seconds after the start, for an answer of ``answer_tokens`` tokens."""

    at_s: float
    tokens: Tokens
    answer_tokens: int


@dataclass
class FleetAnswer:
    """The outcome of a request. ``failure`` is empty if the request was answered or refused. Times are counted from the
    scheduled start of the request."""

    request: FleetRequest
    refused: bool = False
    failure: str = ""
    route: dict[str, Any] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0
    found_tokens: int = 0
    computed_tokens: int = 0

    @property
    def token_s(self) -> float:
        """Mean seconds between two tokens."""
        gaps = len(self.token_ids) - 1
        return (self.last_s - self.first_s) / gaps if gaps > 0 else 0.0


def pace() -> Pace:
    """Return the pace of the engines."""
    preset_pace = PRESETS[MODEL].pace
    assert preset_pace is not None
    return preset_pace


def conversation(seconds: float, load: float, engines: int, seed: int) -> list[FleetRequest]:
    """Generate a conversation workload. ``load`` is the computation of its prompts without any reuse, as a share of
    what ``engines`` engines can compute."""

    def scaled(rate: float, requests: int) -> list[FleetRequest]:
        trace = conversations(requests, rate=rate, seed=seed, shape=QUICK_SESSIONS)
        return [
            FleetRequest(
                each.timestamp_ms / 1e3,
                each.tokens()[::PACED_TOKENS] % 256,
                max(1, round(each.output_tokens / PACED_TOKENS)),
            )
            for each in trace
        ]

    lengths = [len(each.tokens) for each in scaled(10.0, 2000)]
    rate = load * engines / float(np.mean([pace().step_s([(0, length)], 0) for length in lengths]))
    return [each for each in scaled(rate, int(2 * rate * seconds) + 1) if each.at_s < seconds]


class PacedFleet:
    """Nodes and engines, for one conductor after the other.

    Life: made, with all processes ready -> ``warm_up`` -> ``conductor``, one at a time -> ended with ``scene``.

    Args:
        roles: the role of each engine; engines are distributed evenly over the nodes.
        settings: additional settings of every engine.
    """

    def __init__(self, stage: Stage, scene: ExitStack, roles: Sequence[Role], nodes: int, **settings: object) -> None:
        stage.clear()
        self._shm_dir = stage.settings.shm_dir
        self._catalog = catalog(stage, scene)
        node_settings = {"catalog": self._catalog, "listen": "127.0.0.1:0", "eviction": "lru"}
        self.nodes: list[Daemon] = [stage.daemon(scene, NODE_BYTES, EXTENT_BYTES, node_settings) for _ in range(nodes)]
        common = {"model": MODEL, "page_tokens": PAGE_TOKENS, "arena": ARENA_BYTES, "chunk_tokens": 64, "batch_max": 4}
        common |= {"keep_pages": 0}  # all reuse comes from the pool, as the conductor predicts
        self.engines = []
        for number, role in enumerate(roles):
            place = {"role": str(role), "node": self.nodes[number % nodes].name, "name": f"e{number}"}
            flags = {**common, "threads": 1, "catalog": self._catalog, **place, **settings}
            self.engines.append(scene.enter_context(EngineProcess(number, self._shm_dir, flags)))
        for engine in self.engines:
            engine.ready()

    def warm_up(self) -> None:
        """Let every engine compute a few prompts that no later request repeats."""
        for number, engine in enumerate(self.engines):
            for turn in range(WARM_UP):
                tokens = np.random.default_rng((number, turn)).integers(0, 256, WARM_TOKENS).astype(np.uint32)
                engine.answer(tokens, use_pool=False)

    def cpu_s(self) -> list[float]:
        """Return the CPU seconds that each engine has used."""
        return [cpu_s(engine.pid) for engine in self.engines]

    @contextlib.contextmanager
    def conductor(self, **settings: object) -> Iterator[FleetConductor]:
        """Run a conductor inside the context. At the start it lists all engines and nodes."""
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        child = Child(
            "a conductor",
            ["conductor", "--log-level=warning", f"--catalog={self._catalog}", *flags],
            environment(self._shm_dir),
        )
        try:
            address = child.line(READY_S).partition(", grpc on ")[2].partition(",")[0].split()[0]
            conductor = FleetConductor(address)
            expected = len(self.engines), len(self.nodes)
            wait_for(lambda: conductor.members() == expected, "the conductor does not list all members", KNOWN_S)
            yield conductor
        except NodeUnavailable as error:
            raise BenchFailed(str(error)) from None
        finally:
            child.ask_to_end()
            child.wait()


class FleetConductor:
    """A running conductor, and its clients."""

    def __init__(self, address: str) -> None:
        self._address = address

    def status(self) -> dict[str, Any]:
        """Return the conductor's status document."""
        with grpc.insecure_channel(self._address) as channel:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            status: dict[str, Any] = document(stub.Status(store_pb2.Empty(), timeout=KNOWN_S))
            return status

    def members(self) -> tuple[int, int]:
        """Return how many engines and nodes the conductor lists."""
        status = self.status()
        return len(status["engines"]), len(status["nodes"])

    def ask(self, requests: Sequence[FleetRequest]) -> list[FleetAnswer]:
        """Send each request at its time, and wait for all answers. Raises BenchFailed if one fails."""
        answers = asyncio.run(self._ask(requests))
        for each in answers:
            if each.failure:
                raise BenchFailed(f"a request failed: {each.failure}")
        return answers

    async def _ask(self, requests: Sequence[FleetRequest]) -> list[FleetAnswer]:
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            start_s = time.monotonic()
            return await asyncio.gather(*(_answer(stub, each, start_s) for each in requests))


async def _answer(stub: Any, request: FleetRequest, start_s: float) -> FleetAnswer:
    """Send a request when it is due, and return its answer."""
    due_s = start_s + request.at_s
    await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    sampling = engine_pb2.Sampling(max_tokens=request.answer_tokens, ignore_eos=True)
    message = engine_pb2.SubmitRequest(tokens=request.tokens.astype("<u4").tobytes(), sampling=sampling)
    answer = FleetAnswer(request)
    try:
        async for reply in stub.Submit(pb.RouteRequest(request=message), timeout=ANSWER_S):
            if reply.HasField("route"):
                answer.route = document(reply.route)
            elif reply.HasField("tokens"):
                answer.last_s = time.monotonic() - due_s
                answer.first_s = answer.first_s or answer.last_s
                answer.token_ids += [token.id for token in reply.tokens.tokens]
            elif reply.HasField("finished"):
                usage = reply.finished.usage
                cached = usage.prefill_cached_tokens if usage.prefill_engine else usage.cached_tokens
                answer.found_tokens = sum(cached.values())
                answer.computed_tokens = len(request.tokens) - answer.found_tokens
    except grpc.aio.AioRpcError as error:
        answer.refused = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        answer.failure = "" if answer.refused else f"{error.code().name}: {error.details()}"
    return answer


def check(answers: Sequence[FleetAnswer]) -> None:
    """Raise BenchFailed if an answer does not follow from its prompt."""
    for each in answers:
        expected = paced_answer(each.request.tokens.tolist(), each.request.answer_tokens)
        if not each.refused and each.token_ids != expected:
            raise BenchFailed(f"wrong answer to a prompt of {len(each.request.tokens)} tokens (got {each.token_ids})")


def say(line: str) -> None:
    """Print a line to stderr, because the measurement takes minutes."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
