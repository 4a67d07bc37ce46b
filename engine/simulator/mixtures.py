"""Traces of other shapes than one kind of conversation: what evicts a cache's useful pages, or changes what is useful.

``scans``: conversations, and now and then a batch job that reads long documents once, one after the other.
``agents``: trees. A few applications, each with a long system prompt of its own and its own popularity; a session calls
    the model again within seconds, many times, and forks sub-sessions that go on from where it stands.
``shifts``: what is asked changes altogether: conversations, then unrelated prompts over popular prefixes, then
    conversations of another pace; nothing of one phase comes back in another.

As in ``generate``: pure functions of their arguments; block ids are chained, and those of the parts do not meet.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from math import log

import numpy as np

from engine.simulator.drawing import blocks_of, check, check_arguments, gamma, lognormal
from engine.simulator.generate import (
    RATE_DEFAULT,
    BimodalShape,
    ConversationShape,
    bimodal,
    conversations,
)
from engine.simulator.trace import BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanShape:
    """Batch jobs beside conversations. Lengths are in tokens, log-normal with this mean and sigma."""

    conversations: ConversationShape = ConversationShape()
    job_ratio: float = 0.004  # chance that a batch job begins after a request
    job_documents: int = 40  # in a row, at the pace of the trace
    document_tokens_mean: float = 40_000
    document_tokens_sigma: float = 0.6
    output_tokens_mean: float = 200

    def __post_init__(self) -> None:
        check("job_ratio", self.job_ratio, 0, 1)
        check("job_documents", self.job_documents, 1)
        check("document_tokens_mean", self.document_tokens_mean, 1)
        check("document_tokens_sigma", self.document_tokens_sigma, 0)
        check("output_tokens_mean", self.output_tokens_mean, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentShape:
    """Agents. Lengths are in tokens; a session's calls are `pause_s_min` plus a log-normal time apart."""

    applications: int = 24  # the n-th is asked for in proportion to 1 / n
    system_tokens_mean: float = 6_000
    task_tokens_mean: float = 2_000
    step_tokens_mean: float = 700  # what a call adds: the answer before it, and what a tool said
    output_tokens_mean: float = 150
    tokens_sigma: float = 0.8
    again_ratio: float = 0.9  # chance that a session calls again
    fork_ratio: float = 0.08  # chance that a call also forks a session, which goes on from there
    pause_s_min: float = 1
    pause_s_median: float = 6
    pause_s_sigma: float = 1.3
    context_tokens: int = 126_000

    def __post_init__(self) -> None:
        check("applications", self.applications, 1)
        for name in ("system", "task", "step", "output"):
            check(f"{name}_tokens_mean", getattr(self, f"{name}_tokens_mean"), 1)
        check("again_ratio", self.again_ratio, 0, 1)
        check("fork_ratio", self.fork_ratio, 0, 1)
        for name in ("tokens_sigma", "pause_s_min", "pause_s_sigma"):
            check(name, getattr(self, name), 0)
        check("pause_s_median", self.pause_s_median, 0.001)
        check("context_tokens", self.context_tokens, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftShape:
    """Phases of ``phase_requests`` requests each, in this order, repeated."""

    phase_requests: int = 3_000
    slow: ConversationShape = ConversationShape()
    unrelated: BimodalShape = BimodalShape(prefixes=200, prefix_tokens=8_192, prefix_ratio=0.8)
    quick: ConversationShape = ConversationShape(pause_s_min=3, pause_s_median=15, opening_tokens_mean=4_000)

    def __post_init__(self) -> None:
        check("phase_requests", self.phase_requests, 1)


ONE_JOB_IN_250 = ScanShape()
TWO_DOZEN_APPLICATIONS = AgentShape()
THREE_PHASES = ShiftShape()


def scans(
    requests: int, *, rate: float = RATE_DEFAULT, seed: int = 0, shape: ScanShape = ONE_JOB_IN_250
) -> Iterator[TraceRequest]:
    """`requests` prompts, `rate` of them per second: conversations, interrupted by jobs that read documents once.

    Raises:
        InvalidRequest: an argument is out of range.
    """
    check_arguments(requests, rate, seed)
    return islice(_interrupted(requests, rate, seed, shape), requests)


def agents(
    requests: int, *, rate: float = RATE_DEFAULT, seed: int = 0, shape: AgentShape = TWO_DOZEN_APPLICATIONS
) -> Iterator[TraceRequest]:
    """`requests` calls of many agents, Poisson arrivals at `rate` per second.

    Each arrival is the call that has been due for longest, or else opens a new session.

    Raises:
        InvalidRequest: an argument is out of range.
    """
    check_arguments(requests, rate, seed)
    return islice(_calls(rate, np.random.Generator(np.random.PCG64(seed)), shape), requests)


def shifts(
    requests: int, *, rate: float = RATE_DEFAULT, seed: int = 0, shape: ShiftShape = THREE_PHASES
) -> Iterator[TraceRequest]:
    """`requests` prompts at `rate` per second, of another kind in every phase.

    Raises:
        InvalidRequest: an argument is out of range.
    """
    check_arguments(requests, rate, seed)
    return islice(_phases(rate, seed, shape), requests)


def _interrupted(requests: int, rate: float, seed: int, shape: ScanShape) -> Iterator[TraceRequest]:
    """Conversations have the even block ids, documents the odd ones. A document takes the arrival of a conversation's
    request, which comes later instead, so that the trace keeps its rate."""
    random = np.random.Generator(np.random.PCG64(seed + 1))
    talk = conversations(requests, rate=rate, seed=seed, shape=shape.conversations)
    blocks, late_ms = 0, 0
    for request in talk:
        arrival_ms = request.timestamp_ms + late_ms
        ids = tuple(2 * block for block in request.block_ids)
        yield replace(request, timestamp_ms=arrival_ms, block_ids=ids)
        if random.random() < shape.job_ratio:
            for _ in range(shape.job_documents):
                late_ms += int(random.exponential(1000 / rate))
                tokens = lognormal(random, shape.document_tokens_mean, shape.document_tokens_sigma)
                fresh = range(blocks, blocks + blocks_of(tokens))
                blocks = fresh.stop
                answer = gamma(random, shape.output_tokens_mean, 2)
                ids = tuple(2 * block + 1 for block in fresh)
                yield TraceRequest(request.timestamp_ms + late_ms, tokens, answer, ids)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that is due, or will be: its length, and the blocks it repeats."""

    input_tokens: int
    repeated_ids: tuple[int, ...]


def _calls(rate: float, random: np.random.Generator, shape: AgentShape) -> Iterator[TraceRequest]:
    systems: list[_Call] = []
    blocks = 0  # block ids given out so far: the system prompts' come first
    for _ in range(shape.applications):
        tokens = min(lognormal(random, shape.system_tokens_mean, shape.tokens_sigma), shape.context_tokens)
        full = tokens // BLOCK_TOKENS
        systems.append(_Call(tokens, tuple(range(blocks, blocks + full))))
        blocks += full
    popularity = np.cumsum(1 / np.arange(1, shape.applications + 1))
    to_come: list[tuple[float, int, _Call]] = []  # heap by due time; the serial number orders calls due together
    serial = count()
    now_ms = 0.0
    while True:
        now_ms += random.exponential(1000 / rate)
        if to_come and to_come[0][0] <= now_ms:
            call = heapq.heappop(to_come)[2]
        else:
            system = systems[int(np.searchsorted(popularity, random.random() * popularity[-1], side="right"))]
            call = _longer(system, lognormal(random, shape.task_tokens_mean, shape.tokens_sigma), shape)
        fresh = blocks_of(call.input_tokens) - len(call.repeated_ids)
        ids = (*call.repeated_ids, *range(blocks, blocks + fresh))
        blocks += fresh
        answer_tokens = gamma(random, shape.output_tokens_mean, 2)
        yield TraceRequest(int(now_ms), call.input_tokens, answer_tokens, ids)
        sessions = int(random.random() < shape.again_ratio) + int(random.random() < shape.fork_ratio)
        for _ in range(sessions if call.input_tokens < shape.context_tokens else 0):
            stands = _Call(call.input_tokens, ids[: call.input_tokens // BLOCK_TOKENS])
            following = _longer(stands, lognormal(random, shape.step_tokens_mean, shape.tokens_sigma), shape)
            pause_s = shape.pause_s_min + random.lognormal(log(shape.pause_s_median), shape.pause_s_sigma)
            heapq.heappush(to_come, (now_ms + 1000 * pause_s, next(serial), following))


def _longer(call: _Call, tokens: int, shape: AgentShape) -> _Call:
    return _Call(min(call.input_tokens + tokens, shape.context_tokens), call.repeated_ids)


def _phases(rate: float, seed: int, shape: ShiftShape) -> Iterator[TraceRequest]:
    """Each phase begins where the one before ended, with block ids above all that were given out."""
    begin_ms = blocks = 0
    for phase in count():
        begin = begin_ms, blocks
        for request in _phase(phase, rate, seed, shape):
            ids = tuple(begin[1] + block for block in request.block_ids)
            begin_ms = begin[0] + request.timestamp_ms
            blocks = max(blocks, max(ids) + 1)
            yield replace(request, timestamp_ms=begin_ms, block_ids=ids)


def _phase(phase: int, rate: float, seed: int, shape: ShiftShape) -> Iterator[TraceRequest]:
    requests, seed = shape.phase_requests, seed + phase
    match phase % 3:
        case 0:
            return conversations(requests, rate=rate, seed=seed, shape=shape.slow)
        case 1:
            return bimodal(requests, rate=rate, seed=seed, shape=shape.unrelated)
        case _:
            return conversations(requests, rate=rate, seed=seed, shape=shape.quick)
