"""Seeded request traces of our own: multi-turn conversations, and a bimodal mix of short and long prompts.

`conversations` with its defaults has what a cache sees of the conversation trace published with Mooncake (FAST'25).
Over 12,031 requests, by `trace.statistics` and an LRU replay; generated: mean of seeds 0 to 4, and their range:

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

(The probabilities asked for are higher, .34 .44 .55 ...: of the last sessions of a trace, no further turn is seen.)

`engine.simulator.mixtures` has other shapes. All generators are pure functions of their arguments: one PCG64 stream
per part, no Python hash, no clock. Their memory grows with the sessions that are still active, not with the requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from math import log
from typing import Final

import numpy as np

from engine.simulator.drawing import blocks_of, check, check_arguments, gamma, lognormal
from engine.simulator.trace import BLOCK_TOKENS, TraceRequest
from kvstore.errors import InvalidRequest

RATE_DEFAULT = 3.4  # requests per second, as recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationShape:
    """How conversations go; the defaults give the table above. Lengths are in tokens.

    A session's first prompt is the system prompt and an opening text; every further prompt is the previous one, its
    answer, and a new text. Texts are log-normal (mean, and sigma of the logarithm), answers gamma (mean and shape).
    The pause from one prompt to the session's next is `pause_s_min` plus a log-normal time (median and sigma).
    """

    tick_ms: int = 3000  # arrivals are stamped in multiples of this
    system_tokens: int = 880  # shared by all sessions; its full blocks (one, by default) open every request
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
    context_tokens: int = 126_000  # no prompt is longer: a text is cut, a session that would need more ends

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
            raise InvalidRequest("next_turn", "must hold at least one probability")
        for probability in self.next_turn:
            check("next_turn", probability, 0, 1)


# The recorded conversation's lengths; sessions go on within seconds, as a simulated or a live round is short.
QUICK_SESSIONS: Final = ConversationShape(tick_ms=1, pause_s_min=1.0, pause_s_median=3.0, pause_s_sigma=0.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class BimodalShape:
    """A mix of short and long prompts. Lengths are in tokens, log-normal with these means and this sigma."""

    long_ratio: float = 0.2  # share of long prompts
    short_tokens_mean: float = 1_500
    short_output_tokens_mean: float = 300
    long_tokens_mean: float = 24_000
    long_output_tokens_mean: float = 500
    tokens_sigma: float = 0.5
    prefix_ratio: float = 0.5  # share of requests that open with a common prefix, which adds to their length
    prefixes: int = 16  # the pool it is drawn from, each as likely
    prefix_tokens: int = 1_024  # length of each, whole blocks
    context_tokens: int = 128_000  # no prompt is longer: its text is cut

    def __post_init__(self) -> None:
        check("long_ratio", self.long_ratio, 0, 1)
        check("prefix_ratio", self.prefix_ratio, 0, 1)
        for name in ("short", "short_output", "long", "long_output"):
            check(f"{name}_tokens_mean", getattr(self, f"{name}_tokens_mean"), 1)
        check("tokens_sigma", self.tokens_sigma, 0)
        check("prefixes", self.prefixes, 1)
        check("prefix_tokens", self.prefix_tokens, 0)
        if self.prefix_tokens % BLOCK_TOKENS:
            raise InvalidRequest("prefix_tokens", f"must be a multiple of {BLOCK_TOKENS}, is {self.prefix_tokens}")
        check("context_tokens", self.context_tokens, self.prefix_tokens + 1)


RECORDED_LIKE = ConversationShape()
ONE_IN_FIVE_LONG = BimodalShape()


def conversations(
    requests: int, *, rate: float = RATE_DEFAULT, seed: int = 0, shape: ConversationShape = RECORDED_LIKE
) -> Iterator[TraceRequest]:
    """`requests` turns of many sessions, in order of arrival, `rate` of them per second (Poisson over the ticks).

    Each arrival is the turn that has been due for longest, or else opens a new session. A turn repeats its
    predecessor's full blocks; the block that was only partly filled has more in it now, so its id is another.

    Raises:
        InvalidRequest: an argument is out of range.
    """
    check_arguments(requests, rate, seed)
    return islice(_turns(rate, np.random.Generator(np.random.PCG64(seed)), shape), requests)


def bimodal(
    requests: int, *, rate: float = RATE_DEFAULT, seed: int = 0, shape: BimodalShape = ONE_IN_FIVE_LONG
) -> Iterator[TraceRequest]:
    """`requests` unrelated prompts, Poisson arrivals at `rate` per second: short or long, with a common prefix or not.

    Raises:
        InvalidRequest: an argument is out of range.
    """
    check_arguments(requests, rate, seed)
    return islice(_prompts(rate, np.random.Generator(np.random.PCG64(seed)), shape), requests)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A prompt that is due, or will be: its length, and the blocks it repeats from the one before."""

    number: int
    input_tokens: int
    repeated_ids: tuple[int, ...]


def _turns(rate: float, random: np.random.Generator, shape: ConversationShape) -> Iterator[TraceRequest]:
    shared_ids = tuple(range(shape.system_tokens // BLOCK_TOKENS))
    blocks = len(shared_ids)  # block ids given out so far
    to_come: list[tuple[float, int, _Turn]] = []  # heap by due time; the serial number orders turns due together
    arrival_ms = 0.0
    for serial in count():
        arrival_ms += random.exponential(1000 / rate)
        now_ms = int(arrival_ms) // shape.tick_ms * shape.tick_ms
        if to_come and to_come[0][0] <= now_ms:
            turn = heapq.heappop(to_come)[2]
        else:
            turn = _Turn(1, _opening(random, shape), shared_ids)
        fresh = blocks_of(turn.input_tokens) - len(turn.repeated_ids)
        ids = (*turn.repeated_ids, *range(blocks, blocks + fresh))
        blocks += fresh
        output_tokens = gamma(random, shape.output_tokens_mean, shape.output_tokens_shape)
        yield TraceRequest(now_ms, turn.input_tokens, output_tokens, ids)
        following = _following(random, shape, turn, output_tokens, ids)
        if following is not None:
            pause_s = shape.pause_s_min + random.lognormal(log(shape.pause_s_median), shape.pause_s_sigma)
            heapq.heappush(to_come, (now_ms + 1000 * pause_s, serial, following))


def _opening(random: np.random.Generator, shape: ConversationShape) -> int:
    text_tokens = lognormal(random, shape.opening_tokens_mean, shape.opening_tokens_sigma)
    return min(shape.system_tokens + text_tokens, shape.context_tokens)


def _following(
    random: np.random.Generator, shape: ConversationShape, turn: _Turn, output_tokens: int, ids: tuple[int, ...]
) -> _Turn | None:
    """The session's next turn, or None where it ends."""
    so_far = min(turn.number, len(shape.next_turn))
    if random.random() >= shape.next_turn[so_far - 1]:
        return None
    history_tokens = turn.input_tokens + output_tokens
    if history_tokens >= shape.context_tokens:
        return None
    text_tokens = lognormal(random, shape.text_tokens_mean, shape.text_tokens_sigma)
    input_tokens = min(history_tokens + text_tokens, shape.context_tokens)
    return _Turn(turn.number + 1, input_tokens, ids[: turn.input_tokens // BLOCK_TOKENS])


def _prompts(rate: float, random: np.random.Generator, shape: BimodalShape) -> Iterator[TraceRequest]:
    prefix_blocks = shape.prefix_tokens // BLOCK_TOKENS
    blocks = shape.prefixes * prefix_blocks  # block ids given out so far: the pool's come first
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
