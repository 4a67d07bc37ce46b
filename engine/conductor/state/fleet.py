"""Fleet: the engines that requests can go to, and how busy each is.

How busy an engine is comes from two sources. The conductor knows all of its own requests: it sends them, and sees
every token come back. Requests that other conductors and clients send to the same engine are seen only in the engine's
reports. A report answers a question, and counts the requests at some moment between the two; the conductor remembers
how many of its own were there when it asked, and attributes the rest to other callers. So a late report cannot hide
what was decided in the meantime, and nothing is counted twice.

Whether an engine is there comes from three sources. Its reports and its tokens are signs of life. An engine that did
not answer a question is silent, and gets requests only when others are much busier. One that failed on a request gets
none for a while; the first time a report ends that, because the network may have been at fault.

An engine's role has one source: its reports, in their order. An ordered role is believed once a report confirms it.
While an order is under way, or after the engine refused a request because of its role, its role is ``unsure``: the
engine gets nothing until it answers a question that was asked after that.

A request's life here: sent -> its first token has come (it decodes) -> ended.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from engine.model.request import NO_ORDER, Role, RoleOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAbout:
    """What an engine says of itself in the catalog; it stays the same for the engine's life.

    Attributes:
        name: unique in the pool; the conductor's name for it.
        address: of its gRPC API.
        node: whose pool it reads and writes; empty: no node.
        host, zone: where it is; empty: not known.
        layout: fingerprint of its pages. Engines with one fingerprint can hand over to each other.
        page_tokens: of its pages.
        kv_bytes: KV of one token, in its pages.
        batch_max: sequences that it decodes together.
        chunk_tokens: prompt tokens that it computes in one step; 0: not known.
        tokens_max: tokens of one sequence that fit in its memory; 0: not known.
        kv_tokens_max: tokens of all its sequences together; 0: not known.
        context_max: the longest sequence, in tokens; 0: not known.
        lanes: prompts that it computes at the same time, each as fast as a single one.
        egress_bytes_per_s: what may leave a remote cluster, which appears here as one engine that computes prompts; 0:
        not a remote cluster. ``address`` is then its conductor's.
        foreign: not an engine of ours. It computes what it answers and is not part of a pool; ``node`` names its own
        cache.
    """

    name: str
    address: str
    model: str
    layout: str
    page_tokens: int
    kv_bytes: int
    node: str = ""
    host: str = ""
    zone: str = ""
    batch_max: int = 64
    chunk_tokens: int = 0
    tokens_max: int = 0
    kv_tokens_max: int = 0
    context_max: int = 0
    lanes: int = 1
    egress_bytes_per_s: float = 0.0
    foreign: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What an engine answers when it is asked how busy it is.

    Attributes:
        order: the last order of a leader that it carried out.
        waiting: requests whose prompt is not computed yet.
        running: requests that decode.
        kv_tokens: tokens in its memory.
        prefill_tokens_per_s, step_s: as it measured; 0: not measured yet.
    """

    role: Role
    order: RoleOrder = NO_ORDER
    draining: bool = False
    waiting: int = 0
    running: int = 0
    kv_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0


@dataclass(slots=True)
class EngineWork:
    """One request at one engine, for as long as the engine is involved in it.

    Attributes:
        prefill_s: predicted time for its prompt there; 0: the prompt is computed elsewhere.
        tokens: that it will hold there at its end.
        sent_s: when it was sent.
        decodes: the answer is made here.
        ends_s: when the answer will be complete, by prediction.
        computed: True once its prompt is computed.
    """

    number: int
    prefill_s: float
    tokens: int
    sent_s: float
    decodes: bool
    ends_s: float
    computed: bool = False


@dataclass(slots=True)
class FleetEngine:
    """One engine, as far as is known. ``EngineFleet`` alone changes it.

    Attributes:
        role: as it last reported, and ``order``: the last order of a leader that it had carried out.
        ordered: an order of ours for another role is under way. unsure: see above.
        works: our requests that it is involved in.
        waiting: those of them whose prompt it computes or will compute.
        ends: predicted ends of the requests that it answers or will answer, sorted.
        tokens: that these hold.
        others_waiting, others_running, others_tokens: requests of other callers, and what they hold.
        first_done_s: when it will have computed the first of our prompts there, by prediction.
        behind_s: seconds that the prompts after that one take. For an engine that computes several prompts at a time,
            both are those of one engine that is faster by that factor.
        scale: how much longer prompts take there than predicted, as measured.
        tokens_per_s: of prompts, and ``alone_s``: a decode step without its sequences, by its reports; 0: not known.
        heard_s: when it gave the last sign of life.
        known_s: when the question was asked that it answered with its role.
        silent: it was asked and did not answer, and there was no sign of life since.
        failures: consecutive requests on which it failed.
        avoided_until_s: it gets nothing before this moment.
        egress_free_s: when everything that is to leave a remote cluster will have left.
        asked: our requests that were there when it was asked for its next report, and when that was: (waiting,
            running, tokens that they hold, seconds).
    """

    about: EngineAbout
    role: Role
    heard_s: float
    known_s: float
    order: RoleOrder = NO_ORDER
    ordered: bool = False
    unsure: bool = False
    draining: bool = False
    works: dict[int, EngineWork] = field(default_factory=dict)
    waiting: int = 0
    ends: list[float] = field(default_factory=list)
    tokens: int = 0
    others_waiting: int = 0
    others_running: int = 0
    others_tokens: int = 0
    first_done_s: float = 0.0
    behind_s: float = 0.0
    scale: float = 1.0
    tokens_per_s: float = 0.0
    alone_s: float = 0.0
    silent: bool = False
    failures: int = 0
    avoided_until_s: float = 0.0
    egress_free_s: float = 0.0
    asked: tuple[int, int, int, float] | None = None

    @property
    def place_free_s(self) -> float:
        """When its batch has a place for one more request, by prediction; 0: it has one now."""
        beyond = len(self.ends) + self.others_running - self.about.batch_max
        return self.ends[min(beyond, len(self.ends) - 1)] if beyond >= 0 and self.ends else 0.0

    def memory_free_s(self, tokens: float) -> float:
        """When sequences that hold this many tokens have ended, by prediction; infinite: ours do not hold that much."""
        for ends_s, held in sorted((work.ends_s, work.tokens) for work in self.works.values() if work.decodes):
            tokens -= held
            if tokens <= 0:
                return ends_s
        return math.inf

    def add(self, work: EngineWork) -> None:
        """Record one more request."""
        self.works[work.number] = work
        if work.prefill_s:
            if self.waiting:
                self.behind_s += work.prefill_s / self.about.lanes
            else:
                self.first_done_s = work.sent_s + work.prefill_s / self.about.lanes
            self.waiting += 1
        if work.decodes:
            insort(self.ends, work.ends_s)
            self.tokens += work.tokens

    def computed(self, work: EngineWork, now_s: float, ends_s: float) -> None:
        """Record that its prompt is computed. The next one begins now: errors of prediction do not add up."""
        work.computed = True
        if work.prefill_s:
            self.waiting -= 1
            left = [other.prefill_s for other in self.works.values() if other.prefill_s and not other.computed]
            self.first_done_s = now_s + left[0] / self.about.lanes if left else now_s
            self.behind_s = sum(left[1:]) / self.about.lanes
        if work.decodes:
            del self.ends[bisect_left(self.ends, work.ends_s)]
            work.ends_s = ends_s
            insort(self.ends, ends_s)

    def remove(self, work: EngineWork, now_s: float) -> None:
        """Remove a request that is over here."""
        if not work.computed:
            self.computed(work, now_s, work.ends_s)
        del self.works[work.number]
        if work.decodes:
            del self.ends[bisect_left(self.ends, work.ends_s)]
            self.tokens -= work.tokens
