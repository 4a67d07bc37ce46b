"""Generators of request traces: conversations, a mix of short and long prompts, batch jobs, agents, and phases.

With its defaults, ``conversations`` matches the conversation trace that was published with Mooncake (FAST'25), as a
cache sees it. The table compares 12,031 requests by ``trace.statistics`` and a replay with LRU. The generated values
are the mean of the seeds 0 to 4, and their range:

==================================  ========  =========  ===================
                                    recorded  generated  range
==================================  ========  =========  ===================
input tokens, mean                  12,035    12,147     11,910 - 12,520
output tokens, mean                 343       344        340 - 348
blocks used once                    .758      .716       .709 - .723
reuse gap, s, p50                   114       112        111 - 114
block hit ratio, infinite cache     .366      .387       .383 - .393
block hit ratio, LRU 1,000 blocks   .044      .041       .040 - .042
block hit ratio, LRU 5,859 blocks   .136      .141       .132 - .148
block hit ratio, LRU 10,000 blocks  .211      .222       .212 - .231
block hit ratio, LRU 50,000 blocks  .355      .374       .370 - .380
P(next turn | 1 turn so far)        .30       .31        .30 - .32
P(next turn | 2)                    .39       .40        .38 - .42
P(next turn | 3)                    .49       .49        .46 - .51
P(next turn | 4)                    .56       .59        .56 - .62
P(next turn | 5)                    .60       .59        .56 - .63
P(next turn | 6)                    .66       .62        .58 - .66
==================================  ========  =========  ===================

The probabilities in ``ConversationShape.next_turn`` are higher (.34 .44 .55 ...), because further turns of the last
sessions come after the end of the trace.

The other generators are:

- ``bimodal``: unrelated prompts, short and long ones, some with a common prefix.
- ``scans``: conversations, interrupted by batch jobs that read long documents once.
- ``agents``: trees of calls. A few applications, of different popularity, each have a long system prompt. A session
  calls the model many times, seconds apart, and may fork other sessions, which continue from the same call.
- ``shifts``: phases of different kinds of requests, which have no blocks in common.

The trace depends only on the arguments: generators use PCG64 streams, no hash of Python, and no clock. Their memory
grows with the number of active sessions, not with the number of requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from math import exp, log
from typing import Final

import numpy as np

from engine.simulator.trace import BLOCK_TOKENS, TraceRequest
from kvstore.errors import InvalidRequest

RATE_MIN, RATE_MAX = 1e-6, 1e6


def check(name: str, value: float, least: float, most: float = 2**53) -> None:
    """Check the range of an argument.

    Raises:
        InvalidRequest: the value is out of range. The field is ``name``.
    """
    if not least <= value <= most:  # also true for NaN
        raise InvalidRequest(name, f"must be between {least:g} and {most:g} (got {value})")


def check_arguments(requests: int, rate: float, seed: int) -> None:
    """Check the arguments that all generators have. Raises InvalidRequest if one is out of range."""
    check("requests", requests, 0)
    check("rate", rate, RATE_MIN, RATE_MAX)
    check("seed", seed, 0)


def lognormal(random: np.random.Generator, mean: float, sigma: float) -> int:
    """Draw a length of at least 1. ``mean`` belongs to the distribution, ``sigma`` to its logarithm."""
    return 1 + int(mean * exp(-sigma * sigma / 2) * random.lognormal(0, sigma))


def gamma(random: np.random.Generator, mean: float, shape: float) -> int:
    """Draw a length of at least 1."""
    return 1 + int(random.gamma(shape, mean / shape))


def blocks_of(tokens: int) -> int:
    """Return the number of blocks of a prompt. The last may be partial."""
    return -(-tokens // BLOCK_TOKENS)


RATE_DEFAULT = 3.4  # requests per second, as in the recorded trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationShape:
    """The parameters of conversations. The defaults give the table above. Lengths are in tokens.

    The first prompt of a session is the system prompt and an opening text. Every further prompt is the previous prompt,
    its answer, and a new text. Lengths of texts are log-normal (mean, and sigma of the logarithm), and those of answers
    are gamma (mean and shape). The time from one prompt to the next of a session is ``pause_s_min`` plus a log-normal
    time (median and sigma).
    """

    tick_ms: int = 3000  # timestamps are multiples of this
    system_tokens: int = 880  # the same for all sessions; every request begins with its full blocks (one, by default)
    opening_tokens_mean: float = 10_800
    opening_tokens_sigma: float = 1.3
    text_tokens_mean: float = 1_200
    text_tokens_sigma: float = 2.1
    output_tokens_mean: float = 343
    output_tokens_shape: float = 1.9
    pause_s_min: float = 24
    pause_s_median: float = 120
    pause_s_sigma: float = 1.35
    next_turn: tuple[float, ...] = (0.34, 0.44, 0.55, 0.64, 0.66, 0.69, 0.78)  # P(next | 1, 2, ... turns so far)
    context_tokens: int = 126_000  # the longest prompt; a text that would exceed it is cut, and the session ends

    def __post_init__(self) -> None:
        check("tick_ms", self.tick_ms, 1)
        check("system_tokens", self.system_tokens, 0)
        for name in ("opening", "text", "output"):
            check(f"{name}_tokens_mean", getattr(self, f"{name}_tokens_mean"), 1)
        for name in ("opening_tokens_sigma", "text_tokens_sigma", "pause_s_min", "pause_s_sigma"):
            check(name, getattr(self, name), 0)
        check("output_tokens_shape", self.output_tokens_shape, 0.01)
        check("pause_s_median", self.pause_s_median, 0.001)
        check("context_tokens", self.context_tokens, self.system_tokens + 1)
        if not self.next_turn:
            raise InvalidRequest("next_turn", "must have at least one probability")
        for probability in self.next_turn:
            check("next_turn", probability, 0, 1)


# Lengths as in the recorded trace, but with short pauses, for rounds that last only minutes.
QUICK_SESSIONS: Final = ConversationShape(tick_ms=1, pause_s_min=1.0, pause_s_median=3.0, pause_s_sigma=0.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class BimodalShape:
    """The parameters of a mix of short and long prompts. Lengths are in tokens, and log-normal."""

    long_ratio: float = 0.2  # the share of long prompts
    short_tokens_mean: float = 1_500
    short_output_tokens_mean: float = 300
    long_tokens_mean: float = 24_000
    long_output_tokens_mean: float = 500
    tokens_sigma: float = 0.5
    prefix_ratio: float = 0.5  # the share of requests that begin with a common prefix, in addition to their length
    prefixes: int = 16  # the number of common prefixes, which are equally likely
    prefix_tokens: int = 1_024  # the length of each prefix, in full blocks
    context_tokens: int = 128_000  # the longest prompt; a text that would exceed it is cut

    def __post_init__(self) -> None:
        check("long_ratio", self.long_ratio, 0, 1)
        check("prefix_ratio", self.prefix_ratio, 0, 1)
        for name in ("short", "short_output", "long", "long_output"):
            check(f"{name}_tokens_mean", getattr(self, f"{name}_tokens_mean"), 1)
        check("tokens_sigma", self.tokens_sigma, 0)
        check("prefixes", self.prefixes, 1)
        check("prefix_tokens", self.prefix_tokens, 0)
        if self.prefix_tokens % BLOCK_TOKENS:
            raise InvalidRequest("prefix_tokens", f"must be a multiple of {BLOCK_TOKENS} (got {self.prefix_tokens})")
        check("context_tokens", self.context_tokens, self.prefix_tokens + 1)


RECORDED_LIKE = ConversationShape()
ONE_IN_FIVE_LONG = BimodalShape()


def conversations(
    requests: int, *, rate: float = RATE_DEFAULT, seed: int = 0, shape: ConversationShape = RECORDED_LIKE
) -> Iterator[TraceRequest]:
    """Yield ``requests`` turns of many sessions, in order of arrival, ``rate`` per second (Poisson over the ticks).

    Each arrival is the turn that is overdue for longest, or begins a new session if no turn is due. A turn repeats the
    full blocks of the previous turn. A block that was partial has more tokens now, so it has a new id.

    Raises:
        InvalidRequest: an argument is out of range.
    """
    check_arguments(requests, rate, seed)
    return islice(_turns(rate, np.random.Generator(np.random.PCG64(seed)), shape), requests)


def bimodal(
    requests: int, *, rate: float = RATE_DEFAULT, seed: int = 0, shape: BimodalShape = ONE_IN_FIVE_LONG
) -> Iterator[TraceRequest]:
    """Yield ``requests`` unrelated prompts, ``rate`` per second (Poisson), short or long, some with a common prefix.

    Raises:
        InvalidRequest: an argument is out of range.
    """
    check_arguments(requests, rate, seed)
    return islice(_prompts(rate, np.random.Generator(np.random.PCG64(seed)), shape), requests)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A future prompt of a session: its number, its length, and the blocks that it repeats from the previous prompt."""

    number: int
    input_tokens: int
    repeated_ids: tuple[int, ...]


def _turns(rate: float, random: np.random.Generator, shape: ConversationShape) -> Iterator[TraceRequest]:
    shared_ids = tuple(range(shape.system_tokens // BLOCK_TOKENS))
    blocks = len(shared_ids)  # the number of block ids used so far
    future: list[tuple[float, int, _Turn]] = []  # a heap by due time; serial numbers order turns that are due together
    arrival_ms = 0.0
    for serial in count():
        arrival_ms += random.exponential(1000 / rate)
        now_ms = int(arrival_ms) // shape.tick_ms * shape.tick_ms
        if future and future[0][0] <= now_ms:
            turn = heapq.heappop(future)[2]
        else:
            turn = _Turn(1, _opening(random, shape), shared_ids)
        fresh = blocks_of(turn.input_tokens) - len(turn.repeated_ids)
        ids = (*turn.repeated_ids, *range(blocks, blocks + fresh))
        blocks += fresh
        output_tokens = gamma(random, shape.output_tokens_mean, shape.output_tokens_shape)
        yield TraceRequest(now_ms, turn.input_tokens, output_tokens, ids)
        next_turn = _next_turn(random, shape, turn, output_tokens, ids)
        if next_turn is not None:
            pause_s = shape.pause_s_min + random.lognormal(log(shape.pause_s_median), shape.pause_s_sigma)
            heapq.heappush(future, (now_ms + 1000 * pause_s, serial, next_turn))


def _opening(random: np.random.Generator, shape: ConversationShape) -> int:
    text_tokens = lognormal(random, shape.opening_tokens_mean, shape.opening_tokens_sigma)
    return min(shape.system_tokens + text_tokens, shape.context_tokens)


def _next_turn(
    random: np.random.Generator, shape: ConversationShape, turn: _Turn, output_tokens: int, ids: tuple[int, ...]
) -> _Turn | None:
    """Return the next turn of a session; None if the session ends."""
    turns = min(turn.number, len(shape.next_turn))
    if random.random() >= shape.next_turn[turns - 1]:
        return None
    history_tokens = turn.input_tokens + output_tokens
    if history_tokens >= shape.context_tokens:
        return None
    text_tokens = lognormal(random, shape.text_tokens_mean, shape.text_tokens_sigma)
    input_tokens = min(history_tokens + text_tokens, shape.context_tokens)
    return _Turn(turn.number + 1, input_tokens, ids[: turn.input_tokens // BLOCK_TOKENS])


def _prompts(rate: float, random: np.random.Generator, shape: BimodalShape) -> Iterator[TraceRequest]:
    prefix_blocks = shape.prefix_tokens // BLOCK_TOKENS
    blocks = shape.prefixes * prefix_blocks  # the number of block ids used so far; the first are those of prefixes
    now_s = 0.0
    while True:
        now_s += random.exponential(1 / rate)
        is_long = random.random() < shape.long_ratio
        input_mean = shape.long_tokens_mean if is_long else shape.short_tokens_mean
        output_mean = shape.long_output_tokens_mean if is_long else shape.short_output_tokens_mean
        input_tokens = lognormal(random, input_mean, shape.tokens_sigma)
        ids: tuple[int, ...] = ()
        if random.random() < shape.prefix_ratio:
            first = int(random.integers(shape.prefixes)) * prefix_blocks
            ids = tuple(range(first, first + prefix_blocks))
            input_tokens += shape.prefix_tokens
        input_tokens = min(input_tokens, shape.context_tokens)
        fresh = blocks_of(input_tokens) - len(ids)
        output_tokens = lognormal(random, output_mean, shape.tokens_sigma)
        yield TraceRequest(int(now_s * 1000), input_tokens, output_tokens, (*ids, *range(blocks, blocks + fresh)))
        blocks += fresh


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanShape:
    """The parameters of batch jobs between conversations. Lengths are in tokens, and log-normal."""

    conversations: ConversationShape = ConversationShape()
    job_ratio: float = 0.004  # the probability that a batch job begins after a request
    job_documents: int = 40  # the number of documents of a job, which arrive at the rate of the trace
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
    """The parameters of agents. Lengths are in tokens.

    The time from one call to the next of a session is ``pause_s_min`` plus a log-normal time (median and sigma).
    """

    applications: int = 24  # the popularity of the n-th is proportional to 1 / n
    system_tokens_mean: float = 6_000
    task_tokens_mean: float = 2_000
    step_tokens_mean: float = 700  # tokens that a call adds: the previous answer, and the output of a tool
    output_tokens_mean: float = 150
    tokens_sigma: float = 0.8
    again_ratio: float = 0.9  # the probability that a session calls again
    fork_ratio: float = 0.08  # the probability that a call also begins another session, which continues from it
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
    """The parameters of phases: slow conversations, unrelated prompts, quick conversations, repeated."""

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
    """Yield ``requests`` prompts, ``rate`` per second: conversations, and batch jobs that read documents once.

    Raises:
        InvalidRequest: an argument is out of range.
    """
    check_arguments(requests, rate, seed)
    return islice(_with_jobs(requests, rate, seed, shape), requests)


def agents(
    requests: int, *, rate: float = RATE_DEFAULT, seed: int = 0, shape: AgentShape = TWO_DOZEN_APPLICATIONS
) -> Iterator[TraceRequest]:
    """Yield ``requests`` calls of many agents, ``rate`` per second (Poisson).

    Each arrival is the call that is overdue for longest, or begins a new session if no call is due.

    Raises:
        InvalidRequest: an argument is out of range.
    """
    check_arguments(requests, rate, seed)
    return islice(_calls(rate, np.random.Generator(np.random.PCG64(seed)), shape), requests)


def shifts(
    requests: int, *, rate: float = RATE_DEFAULT, seed: int = 0, shape: ShiftShape = THREE_PHASES
) -> Iterator[TraceRequest]:
    """Yield ``requests`` prompts, ``rate`` per second, of another kind in every phase.

    Raises:
        InvalidRequest: an argument is out of range.
    """
    check_arguments(requests, rate, seed)
    return islice(_phases(rate, seed, shape), requests)


def _with_jobs(requests: int, rate: float, seed: int, shape: ScanShape) -> Iterator[TraceRequest]:
    """Yield conversations, with even block ids, and documents of jobs, with odd ones.

    Each document delays all later requests of conversations, so that the trace keeps its rate.
    """
    random = np.random.Generator(np.random.PCG64(seed + 1))
    blocks, delay_ms = 0, 0
    for request in conversations(requests, rate=rate, seed=seed, shape=shape.conversations):
        arrival_ms = request.timestamp_ms + delay_ms
        ids = tuple(2 * block for block in request.block_ids)
        yield replace(request, timestamp_ms=arrival_ms, block_ids=ids)
        if random.random() < shape.job_ratio:
            for _ in range(shape.job_documents):
                delay_ms += int(random.exponential(1000 / rate))
                tokens = lognormal(random, shape.document_tokens_mean, shape.document_tokens_sigma)
                fresh = range(blocks, blocks + blocks_of(tokens))
                blocks = fresh.stop
                answer = gamma(random, shape.output_tokens_mean, 2)
                ids = tuple(2 * block + 1 for block in fresh)
                yield TraceRequest(request.timestamp_ms + delay_ms, tokens, answer, ids)


@dataclass(frozen=True, slots=True)
class _Call:
    """A future call: its length, and the blocks that it repeats from the previous call."""

    input_tokens: int
    repeated_ids: tuple[int, ...]


def _calls(rate: float, random: np.random.Generator, shape: AgentShape) -> Iterator[TraceRequest]:
    systems: list[_Call] = []
    blocks = 0  # the number of block ids used so far; the first are those of system prompts
    for _ in range(shape.applications):
        tokens = min(lognormal(random, shape.system_tokens_mean, shape.tokens_sigma), shape.context_tokens)
        full = tokens // BLOCK_TOKENS
        systems.append(_Call(tokens, tuple(range(blocks, blocks + full))))
        blocks += full
    popularity = np.cumsum(1 / np.arange(1, shape.applications + 1))
    future: list[tuple[float, int, _Call]] = []  # a heap by due time; serial numbers order calls that are due together
    serial = count()
    now_ms = 0.0
    while True:
        now_ms += random.exponential(1000 / rate)
        if future and future[0][0] <= now_ms:
            call = heapq.heappop(future)[2]
        else:
            system = systems[int(np.searchsorted(popularity, random.random() * popularity[-1], side="right"))]
            call = _extend(system, lognormal(random, shape.task_tokens_mean, shape.tokens_sigma), shape)
        fresh = blocks_of(call.input_tokens) - len(call.repeated_ids)
        ids = (*call.repeated_ids, *range(blocks, blocks + fresh))
        blocks += fresh
        answer_tokens = gamma(random, shape.output_tokens_mean, 2)
        yield TraceRequest(int(now_ms), call.input_tokens, answer_tokens, ids)
        sessions = int(random.random() < shape.again_ratio) + int(random.random() < shape.fork_ratio)
        for _ in range(sessions if call.input_tokens < shape.context_tokens else 0):
            full_call = _Call(call.input_tokens, ids[: call.input_tokens // BLOCK_TOKENS])
            next_call = _extend(full_call, lognormal(random, shape.step_tokens_mean, shape.tokens_sigma), shape)
            pause_s = shape.pause_s_min + random.lognormal(log(shape.pause_s_median), shape.pause_s_sigma)
            heapq.heappush(future, (now_ms + 1000 * pause_s, next(serial), next_call))


def _extend(call: _Call, tokens: int, shape: AgentShape) -> _Call:
    return _Call(min(call.input_tokens + tokens, shape.context_tokens), call.repeated_ids)


def _phases(rate: float, seed: int, shape: ShiftShape) -> Iterator[TraceRequest]:
    """Yield the requests of all phases. A phase begins at the last request of the previous one, with new block ids."""
    now_ms = blocks = 0
    for phase in count():
        start_ms, first_block = now_ms, blocks
        for request in _phase(phase, rate, seed, shape):
            ids = tuple(first_block + block for block in request.block_ids)
            now_ms = start_ms + request.timestamp_ms
            blocks = max(blocks, max(ids) + 1)
            yield replace(request, timestamp_ms=now_ms, block_ids=ids)


def _phase(phase: int, rate: float, seed: int, shape: ShiftShape) -> Iterator[TraceRequest]:
    requests, seed = shape.phase_requests, seed + phase
    match phase % 3:
        case 0:
            return conversations(requests, rate=rate, seed=seed, shape=shape.slow)
        case 1:
            return bimodal(requests, rate=rate, seed=seed, shape=shape.unrelated)
        case _:
            return conversations(requests, rate=rate, seed=seed, shape=shape.quick)
