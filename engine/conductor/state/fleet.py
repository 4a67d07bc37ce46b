"""Fleet: the engines that requests can go to, and how busy each is.

How busy an engine is has two sources. Of its own requests the conductor knows all: it sends them, and sees every token
come back. What others send to the same engine is seen in the engine's reports alone. A report is the answer to a
question, and says as many requests as there were at some moment between the two; the conductor remembers how many of
its own were there when it asked, and takes the rest for the others'. So a report that is late cannot hide what was
decided meanwhile, and nothing is counted twice.

A request's life here: sent -> its first token has come (it decodes) -> ended.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from typing import Final

from engine.model.request import Role

AVOID_S: Final = 5.0  # an engine that did not answer gets nothing for so long, unless it reports
SILENT_S: Final = 3.0  # an engine whose last report is older than this gets requests only if no other can


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAbout:
    """What an engine says of itself in the catalog, and does not change while it lives.

    Attributes:
        name: unique in the pool; the conductor's name for it.
        address: of its gRPC API.
        node: whose pool it reads and writes; empty: none.
        host, zone: where it is; empty: not known.
        layout: fingerprint of its pages. Engines of one fingerprint can hand over to each other.
        page_tokens: of its pages.
        kv_bytes: of one token, in its pages.
        batch_max: sequences that it decodes together.
        tokens_max: that fit its memory together; 0: not known.
        context_max: tokens of one sequence; 0: not known.
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
    tokens_max: int = 0
    context_max: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What an engine answers when it is asked how busy it is.

    Attributes:
        waiting: requests whose prompt is not computed yet.
        running: requests that decode.
        prefill_tokens_per_s, step_s: as it has measured; 0: not yet.
    """

    role: Role
    draining: bool = False
    waiting: int = 0
    running: int = 0
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0


@dataclass(slots=True)
class EngineWork:
    """One request at one engine, for as long as the engine has to do with it.

    Attributes:
        prefill_s: what its prompt takes there, by prediction; 0: the prompt is computed elsewhere.
        tokens: that it holds there, at its end.
        sent_s: when it was sent.
        decodes: the answer is made here.
        ends_s: when that will be complete, by prediction.
        computed: its prompt is.
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
        works: requests of ours that it has to do with.
        waiting: those of them whose prompt it computes, or will.
        ends: of those that it answers or will answer, when that is over, by prediction; sorted.
        tokens: that these hold.
        others_waiting, others_running: requests that somebody else has sent.
        prompts_done_s: when it will have computed what it has of ours, by prediction.
        avoided_until_s: it did not answer, and gets nothing before.
        asked: our requests that were there when it was asked for its next report: (waiting, running).
    """

    about: EngineAbout
    role: Role
    reported_s: float
    draining: bool = False
    works: dict[int, EngineWork] = field(default_factory=dict)
    waiting: int = 0
    ends: list[float] = field(default_factory=list)
    tokens: int = 0
    others_waiting: int = 0
    others_running: int = 0
    prompts_done_s: float = 0.0
    avoided_until_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    asked: tuple[int, int] | None = None

    @property
    def prefills(self) -> bool:
        """Whether it computes prompts for others."""
        return self.role is not Role.DECODE

    @property
    def answers(self) -> bool:
        """Whether it answers requests."""
        return self.role is not Role.PREFILL

    def wait_s(self, now_s: float, prompt_s: float) -> float:
        """Until it can begin to compute a prompt that is sent now. Of others' prompts only their number is known: each
        is taken for one that lasts ``prompt_s``.
        """
        return max(0.0, self.prompts_done_s - now_s) + self.others_waiting * prompt_s

    def running_at(self, moment_s: float) -> int:
        """Requests that it will answer at that moment, if nothing else is sent. Others' are taken to stay."""
        return self.others_running + len(self.ends) - bisect_right(self.ends, moment_s)

    def add(self, work: EngineWork) -> None:
        """One more."""
        self.works[work.number] = work
        self.prompts_done_s = max(self.prompts_done_s, work.sent_s) + work.prefill_s
        self.waiting += work.prefill_s > 0
        if work.decodes:
            insort(self.ends, work.ends_s)
            self.tokens += work.tokens

    def computed(self, work: EngineWork, now_s: float, ends_s: float) -> None:
        """Its prompt is. What is left is what the prompts that are left take: errors of prediction do not add up."""
        work.computed = True
        if work.prefill_s:
            self.waiting -= 1
            left_s = sum(other.prefill_s for other in self.works.values() if not other.computed)
            self.prompts_done_s = min(self.prompts_done_s, now_s + left_s)
        if work.decodes:
            del self.ends[bisect_left(self.ends, work.ends_s)]
            work.ends_s = ends_s
            insort(self.ends, ends_s)

    def remove(self, work: EngineWork, now_s: float) -> None:
        """It is over here."""
        if not work.computed:
            self.computed(work, now_s, work.ends_s)
        del self.works[work.number]
        if work.decodes:
            del self.ends[bisect_left(self.ends, work.ends_s)]
            self.tokens -= work.tokens


class EngineFleet:
    """All engines.

    Attributes:
        engines: by name.
    """

    def __init__(self) -> None:
        self.engines: dict[str, FleetEngine] = {}

    def found(self, about: EngineAbout, role: Role, now_s: float) -> None:
        """An engine is there, or says something else of itself. Its requests stay."""
        known = self.engines.get(about.name)
        if known is None:
            self.engines[about.name] = FleetEngine(about, role, now_s)
        else:
            known.about, known.role = about, role

    def lost(self, name: str) -> list[int]:
        """An engine has gone. Returns the requests that it had to do with."""
        engine = self.engines.pop(name, None)
        return list(engine.works) if engine is not None else []

    def asking(self, name: str) -> None:
        """It is asked for a report now."""
        engine = self.engines[name]
        engine.asked = engine.waiting, len(engine.ends)

    def reported(self, name: str, report: LoadReport, now_s: float) -> None:
        """It has answered. One that answers again is avoided no longer."""
        engine = self.engines.get(name)
        if engine is None or engine.asked is None:
            return
        waiting, running = engine.asked
        engine.others_waiting = max(0, report.waiting - max(waiting, engine.waiting))
        engine.others_running = max(0, report.running - max(running, len(engine.ends)))
        engine.role, engine.draining, engine.reported_s = report.role, report.draining, now_s
        engine.prefill_tokens_per_s = report.prefill_tokens_per_s or engine.prefill_tokens_per_s
        engine.step_s = report.step_s or engine.step_s
        engine.asked, engine.avoided_until_s = None, 0.0

    def failed(self, name: str, now_s: float) -> None:
        """It did not answer."""
        engine = self.engines.get(name)
        if engine is not None:
            engine.asked, engine.avoided_until_s = None, now_s + AVOID_S

    def first_token(self, number: int, names: tuple[str, ...], now_s: float, ends_s: float) -> None:
        """A request's prompt is computed: an engine that only computed it has done its part."""
        for engine, work in self._at(number, names):
            if work.decodes:
                engine.computed(work, now_s, ends_s)
            else:
                engine.remove(work, now_s)

    def ended(self, number: int, names: tuple[str, ...], now_s: float) -> None:
        """A request is over, whatever became of it."""
        for engine, work in self._at(number, names):
            engine.remove(work, now_s)

    def _at(self, number: int, names: tuple[str, ...]) -> list[tuple[FleetEngine, EngineWork]]:
        found = [self.engines[name] for name in names if name in self.engines]
        return [(engine, engine.works[number]) for engine in found if number in engine.works]

    def usable(self, now_s: float) -> list[FleetEngine]:
        """Engines that requests can go to, in the order of their names. Silent ones only where all are silent."""
        open_to = [
            engine
            for _, engine in sorted(self.engines.items())
            if not engine.draining and engine.avoided_until_s <= now_s
        ]
        heard = [engine for engine in open_to if now_s - engine.reported_s <= SILENT_S]
        return heard or open_to
