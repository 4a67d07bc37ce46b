"""Simulation of a serving cluster: the conductor's own decisions, over engines whose times a model predicts.

The conductor is the real ``ConductorState``, and nodes evict by the real policies. Engines, links and time are
simulated as discrete events. ``docs/scheduling.md`` describes the model and what it leaves out.

An engine works in steps. A step decodes one token of every running sequence, and computes one chunk of a prompt if one
is due. The number of running sequences changes only when a sequence begins or ends. Between these moments steps need no
events of their own: the step number ``k`` takes ``B + b n k`` seconds, because each of the ``n`` sequences grows by a
token per step, so ``k`` steps take ``B k + b n k^2 / 2``.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

import numpy as np

from engine.conductor.state import events as ev
from engine.conductor.state import instructions as do
from engine.conductor.state.conductor_state import ConductorRules, ConductorState
from engine.conductor.state.engine_table import EngineAbout, LoadReport
from engine.conductor.state.routed_requests import Route
from engine.model.request import Request, Role, Sampling
from engine.simulator.cache import key_of
from engine.simulator.cluster import HBM_CACHE_SHARE, ClusterSpec, EngineCache, NodeCaches, Port, transfer
from engine.simulator.hardware import ASSUMED, LINKS, Efficiency
from engine.simulator.trace import BLOCK_TOKENS, TraceRequest
from kvstore.cluster.directory import GONE, AnnounceBatch
from kvstore.errors import InvalidRequest
from kvstore.model.replica import TIERS, Tier

LAYOUT: Final = "layout"
TENANT: Final = "tenant"
TICK_S: Final = 0.05  # a conductor looks at waiting requests this often
REPORT_S: Final = 1.0  # with several conductors, engines report this often
NEVER_S: Final = 1e5  # the trace has ended this long ago, and requests still run: the simulation is wrong
GAP_STEPS: Final = 50  # classes of gaps per factor of e
EPS: Final = 1e-9
DEFAULT_RULES: Final = ConductorRules()
MARKS: Final = {"dram": TIERS.index(Tier.DRAM), "nvme": TIERS.index(Tier.NVME), "hbm": TIERS.index(Tier.HBM)}


@dataclass(slots=True)
class Served:
    """One request of the trace, and what became of it. Times are in seconds of the simulation.

    Attributes:
        cached: tokens of the prompt that were not computed, by the tier that had them.
        engine: the engine that computed the prompt; ``answered_by``: the one that answered.
        predicted_first_s: what the conductor predicted for the time to the first token.
    """

    number: int
    arrived_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    conductor: int = 0
    refused: str = ""
    sent_s: float = -1.0
    first_s: float = -1.0
    end_s: float = -1.0
    engine: str = ""
    answered_by: str = ""
    cached: dict[str, int] = field(default_factory=dict)
    predicted_first_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds of a token after the first; 0 if there is none."""
        return (self.end_s - self.first_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt at the engine that computes it.

    Attributes:
        ready_s: when its cached pages are in the engine's memory.
        compute_s: seconds of the computation alone, in ``chunks`` chunks.
        chunks: the chunks that are left.
        chunk_s: seconds of one chunk.
    """

    served: Served
    route: Route
    ready_s: float
    compute_s: float
    chunks: float
    chunk_s: float
    started_s: float = 0.0


class Gaps:
    """How often each gap between two tokens occurred, in classes of two percent."""

    def __init__(self) -> None:
        self.counts: dict[int, float] = {}

    def add(self, gap_s: float, times: float) -> None:
        """Count a gap."""
        self.add_class(round(math.log(max(gap_s, 1e-6)) * GAP_STEPS), times)

    def add_class(self, number: int, times: float) -> None:
        """Count gaps of one class."""
        self.counts[number] = self.counts.get(number, 0.0) + times

    def percentile(self, percent: float) -> float:
        """Return the gap, in seconds, that this share of all gaps does not exceed; 0 if there are none."""
        left = percent / 100 * sum(self.counts.values())
        for each in sorted(self.counts):
            left -= self.counts[each]
            if left <= 0:
                return math.exp(each / GAP_STEPS)
        return 0.0


class _Engine:
    """One engine. ``advance`` brings it to a moment; ``next_s`` says when something ends there."""

    def __init__(self, name: str, node: str, role: Role, spec: ClusterSpec, efficiency: Efficiency) -> None:
        self.name, self.node, self.role = name, node, role
        self.roofline = spec.roofline(efficiency)
        self.chunk_tokens, self.batch_max = spec.chunk_tokens, spec.batch_max
        self.kv_max = self.roofline.kv_tokens_max
        self.kv_used = 0
        self.hbm = EngineCache(int(self.kv_max * HBM_CACHE_SHARE) // BLOCK_TOKENS)
        self.host_port = Port(LINKS[spec.host_link], spec.gpus_of_engine)
        self.local_port = Port(LINKS[spec.local], spec.gpus_of_engine)
        self.prompts: deque[_Prompt] = deque()
        self.current: _Prompt | None = None
        self.joining: deque[tuple[float, Served]] = deque()  # computed elsewhere, and waiting for memory
        self.running: list[tuple[float, int, Served]] = []  # a heap by the step at which the sequence ends
        self.steps = 0.0
        self.context = 0.0  # tokens of all running sequences
        self.now_s = 0.0
        self.version = 0
        self.prefill_busy_s = self.decode_busy_s = 0.0
        self.gaps = Gaps()

    def fits(self, served: Served) -> bool:
        """Return whether there is memory and a place for one more sequence."""
        taken = self.kv_used + served.input_tokens + served.output_tokens
        return taken <= self.kv_max and len(self.running) < self.batch_max

    def _step_terms(self) -> tuple[float, float]:
        """Return ``(B, b n)`` of the module's docstring, from now on."""
        batch = len(self.running)
        if not batch:
            return (self.current.chunk_s if self.current is not None else 0.0), 0.0
        alone_s, each_s = self.roofline.step_terms(batch)
        chunk_s = self.current.chunk_s if self.current is not None and self.chunk_tokens else 0.0
        return alone_s + each_s * self.context + chunk_s, each_s * batch

    @property
    def _stalled(self) -> bool:
        """True while a prompt is computed at once, and running sequences wait for it."""
        return self.current is not None and (not self.chunk_tokens or not self.running)

    def _duration_s(self, steps: float) -> float:
        first_s, growth_s = self._step_terms()
        return first_s * steps + growth_s * steps * steps / 2

    def next_s(self) -> float:
        """Return when the next sequence or prompt ends here; infinite if none does."""
        if self._stalled:
            assert self.current is not None
            return self.now_s + self.current.chunks * self.current.chunk_s
        steps = self.running[0][0] - self.steps if self.running else math.inf
        if self.current is not None:
            steps = min(steps, self.current.chunks)
        return self.now_s + self._duration_s(max(0.0, steps)) if steps < math.inf else math.inf

    def advance(self, now_s: float) -> None:
        """Let time pass. Nothing ends before ``now_s``."""
        passed_s = now_s - self.now_s
        self.now_s = now_s
        if passed_s <= 0 or (self.current is None and not self.running):
            return
        if self._stalled:
            assert self.current is not None
            self.current.chunks -= passed_s / self.current.chunk_s
            self.prefill_busy_s += passed_s
            return
        first_s, growth_s = self._step_terms()
        if growth_s > 0:
            root = math.sqrt(first_s * first_s + 2 * growth_s * passed_s)
            steps = 2 * passed_s / (first_s + root)
        else:
            steps = passed_s / first_s
        batch = len(self.running)
        self.steps += steps
        self.context += steps * batch
        self.gaps.add(passed_s / steps, steps * batch)
        if self.current is not None:
            self.current.chunks -= steps
            chunks_s = steps * self.current.chunk_s
            self.prefill_busy_s += chunks_s
            passed_s -= chunks_s
        self.decode_busy_s += passed_s

    def join(self, served: Served) -> None:
        """Begin to decode. The first token is there; the memory is already counted."""
        heapq.heappush(self.running, (self.steps + max(0, served.output_tokens - 1), served.number, served))
        self.context += served.input_tokens + 1

    def take_ended(self) -> list[Served]:
        """Remove the sequences that have all their tokens."""
        ended = []
        while self.running and self.running[0][0] <= self.steps + 1e-6:
            served = heapq.heappop(self.running)[2]
            self.context = max(0.0, self.context - served.input_tokens - served.output_tokens)
            self.kv_used -= served.input_tokens + served.output_tokens
            ended.append(served)
        if not self.running:
            self.context = 0.0
        return ended


class _Node:
    """A host with a pool, or, without one, an engine's own memory as the conductor sees it."""

    def __init__(self, name: str, host: str, spec: ClusterSpec, ports: tuple[Port, Port, Port]) -> None:
        self.name, self.host = name, host
        self.out, self.into, self.drive = ports
        self.caches = NodeCaches(spec, self.changed) if spec.pool else None
        self._batches = count()
        self._pending: list[tuple[int, int]] = []

    def changed(self, tier: str, new: Sequence[int], gone: Sequence[int]) -> None:
        """Remember what the conductors have to hear."""
        mark = MARKS[tier]
        self._pending += [(block, mark | GONE) for block in gone]
        self._pending += [(block, mark) for block in new]

    def batch(self) -> AnnounceBatch | None:
        """Return what changed since the last batch; None if nothing did."""
        if not self._pending:
            return None
        pages = np.array([key_of(block) for block, _ in self._pending], np.uint64)
        marks = np.array([mark for _, mark in self._pending], np.uint8)
        self._pending = []
        number = next(self._batches)
        return AnnounceBatch(self.name, 1, number, pages, marks, whole=number == 0)


class ServeSimulation:
    """One run. Equal arguments give equal results.

    Args:
        rules: of the conductors; their priors come from the cluster.
        efficiency: of the engines. ``assumed``: what the conductors assume of them, if that differs.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        rules: ConductorRules = DEFAULT_RULES,
        efficiency: Efficiency = ASSUMED,
        assumed: Efficiency | None = None,
    ) -> None:
        self.spec = spec
        rules = replace(rules, priors=spec.priors(assumed or efficiency))
        self.conductors = [ConductorState(rules) for _ in range(spec.conductors)]
        self.now_s = 0.0
        self.served: list[Served] = []
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._unsent = [0] * spec.conductors
        self._ticking = [False] * spec.conductors
        self._open = 0
        self.hosts = [
            (Port(LINKS[spec.fabric], spec.adapters), Port(LINKS[spec.fabric], spec.adapters),
             Port(LINKS[spec.drive], spec.drives))
            for _ in range(spec.hosts)
        ]  # fmt: skip
        self.nodes: dict[str, _Node] = {}
        self.engines: dict[str, _Engine] = {}
        for number in range(spec.engines):
            host = number // spec.engines_per_host
            node = f"n{host}" if spec.pool else f"n{number}"
            if node not in self.nodes:
                self.nodes[node] = _Node(node, f"h{host}", spec, self.hosts[host])
            role = Role.BOTH if not spec.prefill else Role.PREFILL if number < spec.prefill else Role.DECODE
            self.engines[f"e{number}"] = _Engine(f"e{number}", node, role, spec, efficiency)
        for state in self.conductors:
            for each in self.nodes.values():
                state.handle(ev.NodeFound(0.0, each.name, each.host, "z"))
            for engine in self.engines.values():
                state.handle(ev.EngineFound(0.0, self._about(engine), engine.role))
        if spec.pool and spec.remote:  # one of them orders nodes to copy hot prefixes
            self.conductors[0].handle(ev.LeadershipChanged(0.0, leads=True, revision=1))

    def _about(self, engine: _Engine) -> EngineAbout:
        spec = self.spec
        return EngineAbout(
            name=engine.name, address=engine.name, model=spec.model, layout=LAYOUT, page_tokens=BLOCK_TOKENS,
            kv_bytes=spec.shape.kv_bytes, node=engine.node, host=self.nodes[engine.node].host, zone="z",
            batch_max=spec.batch_max, chunk_tokens=spec.chunk_tokens, tokens_max=engine.kv_max,
            kv_tokens_max=engine.kv_max,
        )  # fmt: skip

    # --- time -------------------------------------------------------------------------------------------------------

    def _at(self, when_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._later, (when_s, next(self._order), what))

    def run(self, trace: Iterable[TraceRequest], progress: Callable[[int], None] | None = None) -> list[Served]:
        """Serve all requests of a trace, and return them in order of arrival.

        Args:
            progress: is called with the number of requests that have arrived, now and then.

        Raises:
            InvalidRequest: the requests of the trace are not in order of arrival.
        """
        last_s = 0.0
        for number, request in enumerate(trace):
            arrived_s = request.timestamp_ms / 1e3
            if arrived_s < last_s:
                raise InvalidRequest("trace", f"request {number} must not arrive before the one before it")
            last_s = arrived_s
            self._run_until(arrived_s)
            if progress is not None and number % 64 == 0:
                progress(number)
            served = Served(
                number, arrived_s, request.input_tokens, max(1, request.output_tokens), request.block_ids,
                number % len(self.conductors),
            )  # fmt: skip
            self.served.append(served)
            self._arrive(served)
            if number == 0 and len(self.conductors) > 1:
                self._report()
        while self._open:
            assert self.now_s < last_s + NEVER_S and self._later, f"{self._open} requests never end"
            self._run_until(self._later[0][0])
        return self.served

    def _run_until(self, until_s: float) -> None:
        while self._later and self._later[0][0] <= until_s:
            self.now_s, _, what = heapq.heappop(self._later)
            what()
        self.now_s = max(self.now_s, until_s)

    # --- conductors -------------------------------------------------------------------------------------------------

    def _arrive(self, served: Served) -> None:
        full = served.input_tokens // BLOCK_TOKENS
        pages = np.array([key_of(block) for block in served.blocks[:full]], np.uint64)
        tokens = np.broadcast_to(np.uint32(0), served.input_tokens)  # decisions use only their number
        request = Request(
            id=str(served.number), tokens=tokens, model=self.spec.model, tenant=TENANT,
            sampling=Sampling(max_tokens=served.output_tokens),
        )  # fmt: skip
        self._open += 1
        self._unsent[served.conductor] += 1
        self._tell(served.conductor, ev.RequestArrived(self.now_s, served.number, request, {LAYOUT: pages}))
        self._tick(served.conductor)

    def _tick(self, conductor: int) -> None:
        """Look at waiting requests again soon, while there are any."""
        if self._unsent[conductor] and not self._ticking[conductor]:
            self._ticking[conductor] = True

            def tick() -> None:
                self._ticking[conductor] = False
                self._tell(conductor, ev.Ticked(self.now_s))
                self._tick(conductor)

            self._at(self.now_s + TICK_S, tick)

    def _report(self) -> None:
        """Let every engine tell every conductor how busy it is, again and again."""
        for number in range(len(self.conductors)):
            for engine in self.engines.values():
                waiting = len(engine.prompts) + (engine.current is not None)
                report = LoadReport(
                    role=engine.role, waiting=waiting, running=len(engine.running), kv_tokens=engine.kv_used
                )
                self._tell(number, ev.ReportRequested(self.now_s, engine.name))
                self._tell(number, ev.LoadReported(self.now_s, engine.name, report))
        self._at(self.now_s + REPORT_S, self._report)

    def _tell(self, conductor: int, event: ev.ConductorEvent) -> None:
        for instruction in self.conductors[conductor].handle(event):
            match instruction:
                case do.Send():
                    self._unsent[conductor] -= 1
                    self._send(self.served[instruction.number], instruction.route)
                case do.Refuse():
                    self._unsent[conductor] -= 1
                    self._open -= 1
                    self.served[instruction.number].refused = instruction.why
                case do.CopyPrefix() | do.PrefetchPrefix():
                    self._move_pages(conductor, instruction)
                case _:
                    raise AssertionError(f"the simulation does not perform {instruction}")

    def _announce(self, node: _Node) -> None:
        batch = node.batch()
        if batch is not None:
            for number in range(len(self.conductors)):
                self._tell(number, ev.PagesReported(self.now_s, batch))

    def _move_pages(self, conductor: int, order: do.CopyPrefix | do.PrefetchPrefix) -> None:
        """Carry out an order: pages of another node, or of NVMe, come into a node's memory."""
        node, blocks = self.nodes[order.node], self.served[order.number].blocks[: order.pages]
        if isinstance(order, do.CopyPrefix):
            source = self.nodes[order.source]
            assert source.caches is not None
            stored = sum(source.caches.match(self._ms, blocks))
            done_s = transfer(stored * self.spec.page_bytes, self.now_s, source.out, node.into)
        else:
            assert node.caches is not None
            upper, lower = node.caches.match(self._ms, blocks)
            stored = upper + lower
            done_s = transfer(lower * self.spec.page_bytes, self.now_s, node.drive)

        def done() -> None:
            assert node.caches is not None
            node.caches.store(self._ms, blocks[:stored])
            self._announce(node)
            self._tell(conductor, ev.PageOrderEnded(self.now_s, order.order))

        self._at(done_s, done)

    @property
    def _ms(self) -> int:
        return int(self.now_s * 1e3)

    # --- engines ----------------------------------------------------------------------------------------------------

    def _send(self, served: Served, route: Route) -> None:
        served.sent_s = self.now_s
        served.predicted_first_s = self.now_s - served.arrived_s + route.first_token_s
        engine = self.engines[route.computing.engine.about.name]
        served.engine, served.answered_by = engine.name, route.answering.engine.about.name
        cached, ready_s = self._load(engine, served, route.computing.donor)
        compute_s = engine.roofline.prompt_s(served.input_tokens - cached, cached)
        chunks = -(-(served.input_tokens - cached) // engine.chunk_tokens) if engine.chunk_tokens else 1
        self._advance(engine)
        engine.prompts.append(_Prompt(served, route, ready_s, compute_s, chunks, compute_s / chunks))
        self._schedule(engine)

    def _load(self, engine: _Engine, served: Served, donor: str) -> tuple[int, float]:
        """Find the prompt's prefix, and begin to load it. Returns its tokens, and when they are in the engine."""
        blocks = served.blocks[: served.input_tokens // BLOCK_TOKENS]
        node, page_bytes, last = self.nodes[engine.node], self.spec.page_bytes, served.input_tokens - 1
        found = {"hbm": engine.hbm.match(blocks)}
        ready_s, total = self.now_s, found["hbm"]
        if node.caches is not None:
            upper, lower = node.caches.match(self._ms, blocks)
            found["dram"] = max(0, upper - total)
            found["nvme"] = max(0, upper + lower - max(upper, total))
            ready_s = transfer(found["nvme"] * page_bytes, ready_s, node.drive)
            ready_s = transfer((found["dram"] + found["nvme"]) * page_bytes, ready_s, engine.host_port)
            total = max(total, upper + lower)
            other = self.nodes.get(donor)
            if self.spec.remote and other is not None and other is not node and other.caches is not None:
                theirs = sum(other.caches.match(self._ms, blocks))
                found["remote"] = max(0, theirs - total)
                size = found["remote"] * page_bytes
                arrives_s = transfer(size, self.now_s, other.out, node.into)
                ready_s = max(ready_s, transfer(size, arrives_s, engine.host_port))
                total = max(total, theirs)
        cached = min(total * BLOCK_TOKENS, last)
        for tier, pages in found.items():
            tokens = min(pages * BLOCK_TOKENS, last - sum(served.cached.values()))
            if tokens:
                served.cached[tier] = tokens
        return cached, ready_s

    def _advance(self, engine: _Engine) -> None:
        """Bring an engine to now, and handle what ended there."""
        engine.advance(self.now_s)
        for served in engine.take_ended():
            served.end_s = self.now_s
            self._end(engine, served)
        current = engine.current
        if current is not None and current.chunks <= 1e-6:
            engine.current = None
            if not engine.chunk_tokens and engine.running:
                engine.gaps.add(current.compute_s, len(engine.running))
            self._computed(engine, current)
        self._fill(engine)

    def _fill(self, engine: _Engine) -> None:
        """Admit what waits, while there is memory."""
        while engine.joining and engine.fits(engine.joining[0][1]):
            served = engine.joining.popleft()[1]
            engine.kv_used += served.input_tokens + served.output_tokens
            self._first(engine, served)
        while engine.current is None and engine.prompts:
            prompt = engine.prompts[0]
            served = prompt.served
            answers = served.answered_by == engine.name
            if prompt.ready_s > self.now_s + EPS or (answers and not engine.fits(served)):
                return
            engine.prompts.popleft()
            if answers:
                engine.kv_used += served.input_tokens + served.output_tokens
            prompt.started_s = self.now_s
            engine.current = prompt

    def _schedule(self, engine: _Engine) -> None:
        """Wake up when the next thing ends at this engine."""
        self._fill(engine)
        engine.version += 1
        version, when_s = engine.version, engine.next_s()
        if engine.current is None and engine.prompts and engine.prompts[0].ready_s > self.now_s + EPS:
            when_s = min(when_s, engine.prompts[0].ready_s)

        def wake() -> None:
            if engine.version == version:
                self._advance(engine)
                self._schedule(engine)

        if when_s < math.inf:
            self._at(max(when_s, self.now_s), wake)

    def _computed(self, engine: _Engine, prompt: _Prompt) -> None:
        """The prompt is computed: store its pages, and answer here or elsewhere."""
        served = prompt.served
        node, blocks = self.nodes[engine.node], served.blocks[: served.input_tokens // BLOCK_TOKENS]
        new, gone = engine.hbm.store(blocks)
        if node.caches is None:
            node.changed("hbm", new, gone)
        else:
            node.caches.store(self._ms, blocks)
        if served.answered_by == engine.name:
            self._first(engine, served)
        else:
            self._hand_over(engine, prompt)
        self._announce(node)

    def _hand_over(self, engine: _Engine, prompt: _Prompt) -> None:
        """Move the KV to the engine that answers. Layer by layer, the move begins with the computation."""
        served, spec = prompt.served, self.spec
        other = self.engines[served.answered_by]
        size = served.input_tokens * spec.shape.kv_bytes
        here, there = self.nodes[engine.node], self.nodes[other.node]
        ports = (engine.local_port, other.local_port) if here.host == there.host else (here.out, there.into)
        begin_s = prompt.started_s if spec.layerwise else self.now_s
        arrives_s = transfer(size, begin_s, *ports)
        if spec.layerwise:  # the last layer leaves after it is computed
            layer_s = size / spec.shape.layers / min(port.bytes_per_s for port in ports)
            arrives_s = max(arrives_s, self.now_s + layer_s + ports[0].latency_s)

        def arrived() -> None:
            other.joining.append((self.now_s, served))
            self._advance(other)
            self._schedule(other)

        self._at(arrives_s, arrived)

    def _first(self, engine: _Engine, served: Served) -> None:
        served.first_s = self.now_s
        engine.join(served)
        self._tell(served.conductor, ev.FirstToken(self.now_s, served.number))

    def _end(self, engine: _Engine, served: Served) -> None:
        self._open -= 1
        cached = sum(served.cached.values())
        self._tell(served.conductor, ev.AnswerEnded(self.now_s, served.number, served.output_tokens, cached))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeReport:
    """What a run brought. Times are in seconds, ratios between 0 and 1.

    Attributes:
        good: requests that met both limits; a refused request met none. ``goodput``: such requests per second of the
            trace. ``goodput_per_gpu``: per second and GPU.
        hits: tokens of prompts that were not computed, by tier; ``computed``: the others.
        gpu_s: seconds of GPUs for prompts, for decoding, and idle until the last token.
        links: by link, the bytes that it moved and the share of the time in which it was busy.
        prediction_error: the median of ``|predicted / real - 1|`` of the conductor's predicted first tokens.
    """

    policy: str
    requests: int
    refused: int
    seconds: float
    ttft: dict[str, float]
    tpot: dict[str, float]
    gap: dict[str, float]
    good: int
    goodput: float
    goodput_per_gpu: float
    hits: dict[str, int]
    computed: int
    gpu_s: dict[str, float]
    links: dict[str, dict[str, float]]
    prediction_error: float


PERCENTILES: Final = (50, 90, 99)


def report(
    simulation: ServeSimulation, policy: str, first_token_s: float = math.inf, token_s: float = math.inf
) -> ServeReport:
    """Summarise a run against limits for the first token and for the mean time of later ones."""
    served = simulation.served
    answered = [each for each in served if not each.refused]
    arrived_s = max((each.arrived_s for each in served), default=0.0) - (served[0].arrived_s if served else 0.0)
    end_s = max((each.end_s for each in answered), default=0.0)
    good = sum(each.ttft_s <= first_token_s and each.tpot_s <= token_s for each in answered)
    hits: Counter[str] = Counter()
    for each in answered:
        hits.update(each.cached)
    spec, engines = simulation.spec, simulation.engines.values()
    gpus = spec.engines * spec.gpus_of_engine
    prefill_s = sum(each.prefill_busy_s for each in engines) * spec.gpus_of_engine
    decode_s = sum(each.decode_busy_s for each in engines) * spec.gpus_of_engine
    gaps = Gaps()
    for engine in engines:
        for number, times in engine.gaps.counts.items():
            gaps.add_class(number, times)
    links: dict[str, dict[str, float]] = {}
    named = [(f"{host} {way}", port) for host, ports in enumerate(simulation.hosts)
             for way, port in zip(("out", "in", "drive"), ports, strict=True)]  # fmt: skip
    for name, port in named:
        if port.moved:
            links[name] = {"bytes": port.moved, "busy": port.busy_s / max(end_s, EPS)}
    errors = [abs(each.predicted_first_s / each.ttft_s - 1) for each in answered if each.ttft_s > 0]
    seconds = max(arrived_s, EPS)
    return ServeReport(
        policy=policy,
        requests=len(served),
        refused=len(served) - len(answered),
        seconds=end_s,
        ttft=_percentiles([each.ttft_s for each in answered]),
        tpot=_percentiles([each.tpot_s for each in answered if each.output_tokens > 1]),
        gap={f"p{percent}": gaps.percentile(percent) for percent in PERCENTILES},
        good=good,
        goodput=good / seconds,
        goodput_per_gpu=good / seconds / gpus,
        hits=dict(sorted(hits.items())),
        computed=sum(each.input_tokens for each in answered) - sum(hits.values()),
        gpu_s={"prefill": prefill_s, "decode": decode_s, "idle": max(0.0, end_s * gpus - prefill_s - decode_s)},
        links=links,
        prediction_error=float(np.median(errors)) if errors else 0.0,
    )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"mean": 0.0, **{f"p{percent}": 0.0 for percent in PERCENTILES}}
    return {
        "mean": float(np.mean(values)),
        **{f"p{percent}": float(np.percentile(values, percent)) for percent in PERCENTILES},
    }
