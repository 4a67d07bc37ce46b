"""PacedFleet: nodes, paced engines and a conductor as real processes, and requests that are sent at their times.

A paced engine (``engine.compute.presets``) writes, reads and hands over real pages; what it computes is slept. So eight
of them run on two cores. A token represents ``PACED_TOKENS`` of a large model's, a page of 16 represents 512 of them,
and a second represents five of its seconds.
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
WARM_UP: Final = 3  # prompts of every engine, so that it knows how fast it is
WARM_TOKENS: Final = 200

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class FleetAsk:
    """A request: when it is sent, after the first one, and what it asks."""

    at_s: float
    tokens: Tokens
    answer: int


@dataclass
class FleetAnswer:
    """What became of it. ``failure`` is empty where it was answered or refused."""

    asking: FleetAsk
    refused: bool = False
    failure: str = ""
    route: dict[str, Any] = field(default_factory=dict)
    drawn: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0
    found: int = 0
    computed: int = 0

    @property
    def token_s(self) -> float:
        """Between two tokens, in the mean."""
        return (self.last_s - self.first_s) / (len(self.drawn) - 1) if len(self.drawn) > 1 else 0.0


def pace() -> Pace:
    """Return the pace of the engines."""
    found = PRESETS[MODEL].pace
    assert found is not None
    return found


def conversation(seconds: float, load: float, engines: int, seed: int) -> list[FleetAsk]:
    """A generated conversation workload. With ``load`` 1, ``engines`` engines would just compute its prompts without
    any reuse."""

    def scaled(rate: float, requests: int) -> list[FleetAsk]:
        made = conversations(requests, rate=rate, seed=seed, shape=QUICK_SESSIONS)
        return [
            FleetAsk(
                each.timestamp_ms / 1e3,
                each.tokens()[::PACED_TOKENS] % 256,
                max(1, round(each.output_tokens / PACED_TOKENS)),
            )
            for each in made
        ]

    lengths = [len(each.tokens) for each in scaled(10.0, 2000)]
    rate = load * engines / float(np.mean([pace().step_s([(0, length)], 0) for length in lengths]))
    return [each for each in scaled(rate, int(2 * rate * seconds) + 1) if each.at_s < seconds]


class PacedFleet:
    """Life: made (all processes started) -> ready -> conductors, one at a time, asked -> ended with ``scene``.

    Args:
        roles: of the engines, in order; they share the nodes evenly.
        settings: of every engine, in addition to the usual ones.
    """

    def __init__(self, stage: Stage, scene: ExitStack, roles: Sequence[Role], nodes: int, **settings: object) -> None:
        stage.clear()
        self._shm_dir = stage.settings.shm_dir
        self._catalog = catalog(stage, scene)
        given = {"catalog": self._catalog, "listen": "127.0.0.1:0", "eviction": "lru"}
        self.nodes: list[Daemon] = [stage.daemon(scene, NODE_BYTES, EXTENT_BYTES, given) for _ in range(nodes)]
        usual = {"model": MODEL, "page_tokens": PAGE_TOKENS, "arena": ARENA_BYTES, "chunk_tokens": 64, "batch_max": 4}
        usual |= {"keep_pages": 0}  # what is found comes from the pool, so that a route is worth what it is predicted
        self.engines = []
        for number, role in enumerate(roles):
            place = {"role": str(role), "node": self.nodes[number % nodes].name, "name": f"e{number}"}
            flags = {**usual, "threads": 1, "catalog": self._catalog, **place, **settings}
            self.engines.append(scene.enter_context(EngineProcess(number, self._shm_dir, flags)))
        for engine in self.engines:
            engine.ready()

    def warm_up(self) -> None:
        """Every engine that answers computes a few prompts, which are not found again."""
        for number, engine in enumerate(self.engines):
            for turn in range(WARM_UP):
                tokens = np.random.default_rng((number, turn)).integers(0, 256, WARM_TOKENS).astype(np.uint32)
                engine.answer(tokens, use_pool=False)

    def cpu_s(self) -> list[float]:
        """Processor seconds that each engine has taken."""
        return [cpu_s(engine.pid) for engine in self.engines]

    @contextlib.contextmanager
    def conductor(self, **settings: object) -> Iterator[FleetConductor]:
        """A conductor that knows all engines and nodes."""
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        child = Child(
            "a conductor",
            ["conductor", "--log-level=warning", f"--catalog={self._catalog}", *flags],
            environment(self._shm_dir),
        )
        try:
            address = child.line(READY_S).partition(", grpc on ")[2].partition(",")[0].split()[0]
            made = FleetConductor(address, child.pid)
            wait_for(lambda: made.knows(len(self.engines), len(self.nodes)), "the conductor does not know all", KNOWN_S)
            yield made
        except NodeUnavailable as error:
            raise BenchFailed(str(error)) from None
        finally:
            child.ask_to_end()
            child.wait()


class FleetConductor:
    """A conductor that runs, and those who ask it. ``pid``: of its process."""

    def __init__(self, address: str, pid: int) -> None:
        self._address = address
        self.pid = pid

    def status(self) -> dict[str, Any]:
        """What it says of itself."""
        with grpc.insecure_channel(self._address) as channel:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            found: dict[str, Any] = document(stub.Status(store_pb2.Empty(), timeout=KNOWN_S))
            return found

    def knows(self, engines: int, nodes: int) -> bool:
        """Return whether the conductor knows this number of engines."""
        status = self.status()
        return (len(status["engines"]), len(status["nodes"])) == (engines, nodes)

    def ask(self, requests: Sequence[FleetAsk]) -> list[FleetAnswer]:
        """Send all of them, each at its time, and wait for the answers.

        Raises:
            BenchFailed: one failed, or an answer is not what it has to be.
        """
        answers = asyncio.run(self._ask(requests))
        for each in answers:
            if each.failure:
                raise BenchFailed(f"a request failed: {each.failure}")
        return answers

    async def _ask(self, requests: Sequence[FleetAsk]) -> list[FleetAnswer]:
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            begun_s = time.monotonic()
            return await asyncio.gather(*(_answered(stub, each, begun_s) for each in requests))


async def _answered(stub: Any, asking: FleetAsk, begun_s: float) -> FleetAnswer:
    """The answer to one request. Times count from when it should have been sent."""
    due_s = begun_s + asking.at_s
    await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    sampling = engine_pb2.Sampling(max_tokens=asking.answer, ignore_eos=True)
    said = engine_pb2.SubmitRequest(tokens=asking.tokens.astype("<u4").tobytes(), sampling=sampling)
    done = FleetAnswer(asking)
    try:
        async for reply in stub.Submit(pb.RouteRequest(request=said), timeout=ANSWER_S):
            if reply.HasField("route"):
                done.route = document(reply.route)
            elif reply.HasField("tokens"):
                done.last_s = time.monotonic() - due_s
                done.first_s = done.first_s or done.last_s
                done.drawn += [token.id for token in reply.tokens.tokens]
            elif reply.HasField("finished"):
                usage = reply.finished.usage
                cached = usage.prefill_cached_tokens if usage.prefill_engine else usage.cached_tokens
                done.found, done.computed = sum(cached.values()), len(asking.tokens) - sum(cached.values())
    except grpc.aio.AioRpcError as error:
        done.refused = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        done.failure = "" if done.refused else f"{error.code().name}: {error.details()}"
    return done


def check(answers: Sequence[FleetAnswer]) -> None:
    """Raises BenchFailed where an answer is not the one that follows from its prompt."""
    for each in answers:
        if not each.refused and each.drawn != paced_answer(each.asking.tokens.tolist(), each.asking.answer):
            raise BenchFailed(f"a prompt of {len(each.asking.tokens)} tokens has a wrong answer: {each.drawn}")


def say(line: str) -> None:
    """Told while it is measured: a table like this takes minutes."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
