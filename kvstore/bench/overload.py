"""Row of overload: how many calls a node answers in time at one, two and four times the load that it can answer.

Calls of tenants with tokens (lookups, small reads, small objects) arrive at a fixed rate, whether those before them
were answered or not, each with a deadline. Goodput is what was answered within it. The load comes from this process on
one core, the node has another. One time the load is the highest rate of which nearly all calls are answered in time.

There are two kinds of clients, and a line for each. Those that ``wait`` do what gRPC's own do: no more calls than the
node allows are under way on a connection, the others wait in line and are given up at their deadline; and where a call
is refused with a hint, the connection sends nothing until then. Those that ``hammer`` send every call at once.
"""

from __future__ import annotations

import os
import selectors
import statistics
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from kvstore.bench.content import BenchWork, Content
from kvstore.bench.grpc import connected, free_port, identities_file, token_of
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, result
from kvstore.bench.http2 import Connection, call_headers, message_of, trailer
from kvstore.bench.stage import MIB, Stage
from kvstore.pb import store_pb2 as pb
from kvstore.rpc.data_messages import digest_of
from kvstore.rpc.grpc_errors import RETRY_KEY

TENANTS: Final = ("a", "b", "c", "d")
CONNECTIONS: Final = 16
PAGES: Final = 8  # of 4 KiB, in every lookup and read
OBJECT_BYTES: Final = 4096
EXTENT_BYTES: Final = 8 * MIB  # tenants' pages and objects are of several geometries
DEADLINE_S: Final = 0.5
LOADS: Final = (1, 2, 4)
RATE_FIRST, RATE_STEP, RATE_MAX = 200.0, 1.25, 20_000.0
IN_TIME: Final = 0.98  # of the calls, where a rate counts as one that the node can answer
PROBE_S, LOAD_S, LOAD_S_QUICK = 1.5, 4.0, 1.0
PROBES: Final = 2
REST_S: Final = 0.3  # between two loads
BURST: Final = 64  # calls sent before what came is looked at
GIVEN_UP: Final = "given up"  # by the client, before it was sent
REFUSED: Final = "8"


class Clients(StrEnum):
    """What clients do who have more calls than are answered."""

    HAMMER = "hammer"
    WAIT = "wait"


@dataclass
class Outcome:
    """One load: ``good`` calls were answered within the deadline.

    ``ended``: grpc-status, "" for calls that gRPC did not take, or ``GIVEN_UP`` -> calls.
    """

    seconds: float
    good: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)
    node_cpu_s: float = 0.0

    @property
    def goodput(self) -> float:
        """Per second."""
        return self.good / self.seconds


def overload(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Goodput at four times the load over goodput at one time."""
    stage.clear()
    quick = stage.settings.quick
    with ExitStack() as exits:
        calls = _Calls(stage, exits)
        rate = RATE_FIRST
        if set(ended := calls.load(rate / 10, 1.0).ended) != {"0"}:
            raise BenchFailed(f"calls of a node with little to do ended with {dict(ended)}")
        while not quick and rate < RATE_MAX and calls.in_time(rate * RATE_STEP):
            rate *= RATE_STEP
        seconds = LOAD_S_QUICK if quick else LOAD_S
        rounds: dict[Clients, dict[int, list[Outcome]]] = {kind: {times: [] for times in LOADS} for kind in Clients}
        for _ in range(stage.settings.rounds):
            for kind in Clients:
                for times in LOADS:
                    rounds[kind][times].append(calls.load(times * rate, seconds, kind))
    return [_line(f"{name}.{kind}", bar, rate, outcomes) for kind, outcomes in rounds.items()]


def _line(name: str, bar: Bar | None, rate: float, rounds: dict[int, list[Outcome]]) -> Result:
    """Of one kind of clients."""
    goodput = {times: [outcome.goodput for outcome in outcomes] for times, outcomes in rounds.items()}
    details: dict[str, object] = {"rate": rate, "deadline_s": DEADLINE_S}
    for times, outcomes in rounds.items():
        details[f"goodput_{times}x"] = statistics.median(goodput[times])
        details[f"statuses_{times}x"] = dict(sum((outcome.ended for outcome in outcomes), Counter[str]()))
        details[f"node_cpu_s_{times}x"] = statistics.median(outcome.node_cpu_s for outcome in outcomes)
        answered = [latency for outcome in outcomes for latency in outcome.latencies_s]
        details[f"latency_s_p50_{times}x"] = statistics.median(answered) if answered else None
    limit_is = "goodput at the highest rate that is answered in time"
    return result(name, Kind.RATE, goodput[4], goodput[1], bar=bar, limit_is=limit_is, details=details)


class _Job(NamedTuple):
    """One call of a tenant."""

    method: str
    token: str
    message: bytes


@dataclass
class _Channel:
    """A connection, and the calls of its client."""

    connection: Connection
    waiting: deque[tuple[float, _Job]] = field(default_factory=deque)  # since when
    began: dict[int, float] = field(default_factory=dict)  # by stream
    paused_until: float = 0.0

    def send(self, kind: Clients, now: float) -> int:
        """What is to be sent now; how many calls were given up."""
        given_up = 0
        room = self.connection.streams_max - len(self.began) if now >= self.paused_until else 0
        while self.waiting and (kind is Clients.HAMMER or room > 0 or now - self.waiting[0][0] >= DEADLINE_S):
            since, job = self.waiting.popleft()
            left_s = DEADLINE_S - (now - since)
            if left_s <= 0 and kind is Clients.WAIT:
                given_up += 1
                continue
            stream = self.connection.open(call_headers(job.method, max(0.001, left_s), job.token))
            self.connection.send(stream, job.message)
            self.began[stream] = since
            room -= 1
        if self.connection.to_write:
            self.connection.flush()
        return given_up

    def take(self, outcome: Outcome) -> None:
        """What came. Raises BenchFailed where the connection has ended."""
        for stream, status, block in self.connection.poll():
            now = time.perf_counter()
            took_s = now - self.began.pop(stream)
            outcome.ended[status] += 1
            if status == "0":
                outcome.latencies_s.append(took_s)
                outcome.good += took_s <= DEADLINE_S
            elif status == REFUSED:
                self.paused_until = now + int(trailer(block, RETRY_KEY.encode()) or 0) / 1000
        if self.connection.closed:
            raise BenchFailed("the node closed a connection")


class _Calls:
    """A node with a core of its own, its tenants' calls as bytes, and connections to send them over."""

    def __init__(self, stage: Stage, exits: ExitStack) -> None:
        folder = exits.enter_context(tempfile.TemporaryDirectory())
        port = free_port()
        settings = {
            "listen": f"127.0.0.1:{port}",
            "identities": identities_file(Path(folder) / "identities.toml", TENANTS),
        }
        daemon = stage.daemon(exits, 64 * MIB, EXTENT_BYTES, settings)
        exits.enter_context(_cores(daemon.pid))
        self._daemon = daemon
        self._jobs = [job for tenant in TENANTS for job in _jobs(f"kv://127.0.0.1:{port}", tenant)]
        self._channels = [_Channel(Connection("127.0.0.1", port)) for _ in range(CONNECTIONS)]
        for channel in self._channels:
            exits.callback(channel.connection.close)

    def in_time(self, rate: float) -> bool:
        """Whether nearly all calls at this rate are answered in time; a machine that stood still may try again."""
        return any(self.load(rate, PROBE_S).goodput >= IN_TIME * rate for _ in range(PROBES))

    def load(self, rate: float, seconds: float, kind: Clients = Clients.HAMMER) -> Outcome:
        """Calls at this rate for so long. Raises BenchFailed where a call never ends, or this process cannot bring
        them."""
        outcome, cpu_s = Outcome(seconds), self._daemon.cpu_s()
        total, come, start = int(rate * seconds), 0, time.perf_counter()
        end = start + seconds + DEADLINE_S + 5.0
        with selectors.DefaultSelector() as selector:
            for channel in self._channels:
                channel.paused_until = 0.0
                selector.register(channel.connection, selectors.EVENT_READ, channel)
            while come < total or any(channel.began or channel.waiting for channel in self._channels):
                now = time.perf_counter()
                if now > end:
                    under_way = sum(len(channel.began) for channel in self._channels)
                    raise BenchFailed(f"{under_way} of {total} calls did not end, {total - come} were not sent")
                due = min(total, int((now - start) * rate), come + BURST)
                for number in range(come, due):
                    job = self._jobs[number // CONNECTIONS % len(self._jobs)]
                    self._channels[number % CONNECTIONS].waiting.append((start + number / rate, job))
                come = due
                for channel in self._channels:
                    outcome.ended[GIVEN_UP] += channel.send(kind, now)
                for key, _ in selector.select(0.0 if come < total and come / rate < now - start else 0.001):
                    key.data.take(outcome)
        outcome.node_cpu_s = self._daemon.cpu_s() - cpu_s
        outcome.ended += Counter()  # without what did not happen
        time.sleep(REST_S)
        return outcome


def _jobs(address: str, tenant: str) -> Iterator[_Job]:
    """A tenant's calls; what they read is stored."""
    work = BenchWork("4k", seed=12, chains=1, pages=PAGES)
    with connected(address, token_of(tenant)) as store:
        cache = store.cache(work.layout, salt=tenant)
        keys = work.keys(cache, 0)
        rows = np.zeros((PAGES, work.layout.page_bytes), np.uint8)
        Content(work.layout.page_bytes).fill(rows, keys.hashes)
        cache.put(keys, rows)
        if cache.lookup(keys).pages != PAGES:
            raise BenchFailed("the pages to be read were not stored")
        pages = cache.named(keys)  # type: ignore[attr-defined]
    value = bytes(OBJECT_BYTES)
    begin = pb.PutObjectBegin(key="k", salt=tenant, size_bytes=len(value), replace=True)
    for method, request in (
        ("Lookup", pb.LookupRequest(pages=pages)),
        ("Read", pb.ReadRequest(pages=pages)),
        ("ContainsObjects", pb.ObjectKeys(keys=["k"], salt=tenant)),
        ("PutObject", pb.PutObjectRequest(begin=begin, data=value, data_xxh3=digest_of(memoryview(value)))),
    ):
        yield _Job(f"/kvstore.v1.Store/{method}", token_of(tenant), message_of(request.SerializeToString()))


@contextmanager
def _cores(pid: int) -> Iterator[None]:
    """The node on one core, this process on another, until the end. On a machine of one core they share it."""
    before = os.sched_getaffinity(0)
    mine, theirs = min(before), max(before)
    for task in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(task), {theirs})
    os.sched_setaffinity(0, {mine})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
