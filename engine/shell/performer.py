"""The performer: carries out the instructions of an engine's state, and reports the results as events.

``EnginePerformer`` runs in the engine's thread. Slow instructions run in other threads, which report through the
``Inbox``. ``StepRunner`` performs a ``Step``: it runs one forward and draws the next tokens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from engine.compute.kv_arrivals import Arrivals, Waits
from engine.compute.paged_cache import Batch, Slice
from engine.compute.runner import Forward, SideBatches
from engine.compute.sampling import choose_many
from engine.compute.torch_errors import StepFault
from engine.config import EngineConfig
from engine.memory.compression import Lossy
from engine.memory.mounting import MountedArena
from engine.memory.staging import Stagings
from engine.model.observer import Observer
from engine.model.request import Admitted, Done, HandOff, Progress
from engine.pool.keys import links_of
from engine.pool.loading import PrefixLoader
from engine.pool.pages import ArenaPages
from engine.pool.store import Chunk, Pool
from engine.pool.work import Work
from engine.shell.migration import Migration
from engine.state import events as ev
from engine.state import instructions as do
from engine.state.engine_state import EngineState
from engine.state.events import Event, StepFailed, Stepped
from engine.state.sequences import Phase
from engine.transfer.link import parse_link
from engine.transfer.remote_prefill import Fetch, Peers
from engine.transfer.serve import Prefills
from kvstore.device.base import DeviceLost
from kvstore.errors import KVStoreError


class Inbox:
    """Events of other threads, in the order in which they were posted.

    The maximum number of requests limits the number of events: each request has one call and a few threads.
    """

    def __init__(self) -> None:
        self._items: deque[Event | BaseException] = deque()
        self._changed = threading.Condition()

    def post(self, item: Event | BaseException) -> None:
        """Add an event. Any thread may call this. If ``item`` is an exception (our own bug), ``take`` raises it."""
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def take(self, timeout_s: float = 0.0) -> list[Event]:
        """Return and remove all events. Waits at most ``timeout_s`` for the first one."""
        with self._changed:
            if not self._items and timeout_s:
                self._changed.wait(timeout_s)
            items = list(self._items)
            self._items.clear()
        for item in items:
            if isinstance(item, BaseException):
                raise item
        return [item for item in items if isinstance(item, Event)]


STALL_S = 0.02  # how long a step waits in total for layers that were predicted to arrive in time


def next_token_slice(work: Work) -> Slice:
    """Return the slice of the last token of an answer, the only token whose KV is missing."""
    assert work.frames is not None
    return Slice(work.frames, work.length - 1, work.tokens[work.length - 1 : work.length])


def draw(works: Sequence[Work], logits: torch.Tensor) -> list[int]:
    """Draw the next token of each of ``works`` from ``logits [n, vocab]``."""
    return choose_many(logits, [work.request.sampling for work in works], [work.generated for work in works])


class StepRunner:
    """Runs the steps that the state has chosen."""

    def __init__(self, runner: Forward, stagings: Stagings, pool: Pool, eos: frozenset[int]) -> None:
        self._runner = runner
        self._stagings = stagings
        self._pool = pool
        self._eos = eos

    def run(
        self, step: do.Step, works: Mapping[int, Work], arrivals: Mapping[int, Arrivals], observer: Observer
    ) -> Stepped | StepFailed:
        """Run the forward pass, write pages to the pool, draw tokens, and send them to the clients.

        If the step fails, it seals no page and sends no token.

        Args:
            arrivals: sequence -> its KV that is still arriving.
        """
        decoding = [works[number] for number in step.decoding]
        chunks = [Chunk(works[part.sequence], part.start, part.stop, self._pool) for part in step.parts]
        for chunk in chunks:
            chunk.before()
        awaited = {work.number: (arrivals[work.number], work.prompt) for work in decoding if work.number in arrivals}
        waits = Waits(awaited, STALL_S)

        def after(layer: int) -> None:
            self._stagings.mark_computed(layer)
            for chunk in chunks:
                chunk.layer(layer)

        slices = [next_token_slice(work) for work in decoding] + [chunk.slice for chunk in chunks]
        start = time.monotonic()
        succeeded = False
        try:
            with StepFault() as fault:
                hooks = waits.before if awaited else None, after if chunks else None
                logits = self._runner.forward(Batch(self._stagings.arenas, slices, *hooks))
                self._stagings.finish()
                succeeded = True
            if not succeeded:
                with StepFault():  # raises if the device is lost: the library's error does not show that
                    self._stagings.finish()
        finally:
            for chunk in chunks:
                chunk.after(succeeded)
        if fault.error is not None:
            return StepFailed(time.monotonic(), fault.error)
        seconds = time.monotonic() - start
        chunk_tokens = sum(chunk.tokens for chunk in chunks)
        for chunk in chunks:
            chunk.work.cost.prefill_s += (seconds - waits.waited_s) * chunk.tokens / chunk_tokens
        observer.stepped(len(decoding), chunk_tokens, seconds)
        if waits.waited_s:
            observer.stalled(waits.waited_s)
        draw_rows = [(row, work) for row, work in enumerate(decoding) if work.number not in waits.missed]
        draw_rows += [
            (row, chunk.work)
            for row, (chunk, part) in enumerate(zip(chunks, step.parts, strict=True), len(decoding))
            if part.draws
        ]
        draw_works, tokens = [work for _, work in draw_rows], list[int]()
        with StepFault() as fault:
            if draw_works:
                rows = logits if len(draw_rows) == len(logits) else logits[[row for row, _ in draw_rows]]
                tokens = draw(draw_works, rows)
        if fault.error is not None:
            return StepFailed(time.monotonic(), fault.error)
        ends, names = self._record_tokens(draw_works, tokens)
        return Stepped(time.monotonic(), ends, frozenset(waits.missed), seconds, waits.waited_s, names)

    def _record_tokens(self, works: list[Work], tokens: list[int]) -> tuple[dict[int, str], dict[int, bytes]]:
        """Record the next token of each sequence, and send it to the client.

        Returns, by sequence, "eos" or "stop" if its token ends the answer, and the name of the page that its token
        completes.
        """
        ends: dict[int, str] = {}
        names: dict[int, bytes] = {}
        for work, token in zip(works, tokens, strict=True):
            if not work.answers:
                work.first_token = token
                continue
            if end := work.add_token(token, self._eos):
                ends[work.number] = end
            if name := work.new_page_name():
                names[work.number] = name
        return ends, names


LOADERS = 2

log = logging.getLogger("kvstore.engine")


class EnginePerformer:
    """Performs the instructions of one engine's state.

    Only the engine's thread uses the performer. Other threads may add to ``works`` before they post ``Submitted``, and
    to ``calls`` before they post ``Migrate``.

    Attributes:
        works: number -> the shell's data of a sequence, until ``EndSequence``.
        pages: the shell's data of each page.
        calls: number -> call that waits for an ``AnswerCall``.
        sides: runs the side batches.
    """

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        eos: frozenset[int],
        codecs: Mapping[str, Lossy | None],
        state: EngineState,
        runner: Forward,
        stagings: Stagings,
        mounted: MountedArena,
        pool: Pool,
        peers: Peers,
        prefills: Prefills,
        observer: Observer,
        forget: Callable[[str], None],
        inbox: Inbox,
    ) -> None:
        self.works: dict[int, Work] = {}
        self.calls: dict[int, Future[bool]] = {}
        self.sides = SideBatches(runner, stagings.arenas, state.rules.side_max)
        self._config = config
        self._vocab_size = vocab_size
        self._state = state
        self._stagings = stagings
        self.pages = ArenaPages(stagings.arenas, pool, mounted, stagings.finish)
        self._pool = pool
        self._prefix_loader = PrefixLoader(pool)
        self._peers = peers
        self._prefills = prefills
        self._codecs = codecs
        self._eos = eos
        self._observer = observer
        self._forget = forget
        self._inbox = inbox
        self._step = StepRunner(runner, stagings, pool, eos)
        self._link = parse_link(config.link)
        self._fetches: dict[int, Fetch] = {}
        self._migrations: dict[int, Migration] = {}
        self._loaders = ThreadPoolExecutor(LOADERS, "engine-load")
        self._verbs: dict[type, Callable[[Any], None]] = {
            do.LoadPrefix: self._load,
            do.EvictPages: lambda it: self.pages.evict(it.pages),
            do.OfferPages: lambda it: self.pages.offer(it.pages),
            do.AskPrefill: self._ask,
            do.MoveIn: lambda it: self._fetches[it.sequence].move(it.start),
            do.GiveUp: lambda it: self._fetches.pop(it.sequence).give_up(),
            do.Settle: self._settle,
            do.Dismiss: self._dismiss,
            do.Step: self._run_step,
            do.SideStep: self._run_side_step,
            do.Draw: self._draw,
            do.Recompute: lambda it: self.works[it.sequence].recompute_last(),
            do.StorePages: lambda it: self._pool.store_pages(self.works[it.sequence], it.pages),
            do.TellAdmitted: self._send_admitted,
            do.TellProgress: self._send_progress,
            do.Hold: self._hold,
            do.Close: lambda it: self._prefills.close(self.works[it.sequence]),
            do.PassOn: self._pass_on,
            do.Left: lambda it: self._observer.ended("migrated", self.works[it.sequence].usage()),
            do.CancelThere: lambda it: self._migrations[it.sequence].cancel(),
            do.AnswerCall: self._reply,
            do.Forget: lambda it: self._forget(self.works[it.sequence].id),
            do.Finish: self._finish,
            do.Fail: self._fail,
            do.GiveBack: lambda it: self.pages.give_back(self.works[it.sequence], it.freed, it.stay),
            do.EndSequence: self._drop,
        }

    def handle(self, event: ev.Event) -> None:
        """Pass an event to the state, and perform the instructions that follow."""
        if isinstance(event, ev.DeviceFailed):
            self.pages.hide(str(event.error))
        for instruction in self._state.handle(event):
            self._verbs[type(instruction)](instruction)

    def turn(self) -> bool:
        """Let the state choose the next step, and run it. Returns False if there was nothing to run."""
        self._pool.between_steps()
        arriving = {}
        for number, fetch in self._fetches.items():
            if self._state.roster.sequences[number].phase is Phase.DECODING:
                arriving[number] = fetch.arrivals.so_far(self.works[number].prompt)
        steps = self._state.steps
        self.handle(ev.Turn(time.monotonic(), arriving))
        return self._state.steps > steps

    def stop(self) -> None:
        """End the threads. Waits for their current work. All of it has deadlines."""
        self.sides.stop()
        self._loaders.shutdown(wait=True)

    def abandon(self, error: KVStoreError) -> None:
        """Fail all calls and requests, because the engine's thread has ended and its state cannot be trusted.

        Answers that another engine has taken continue there.
        """
        for call in list(self.calls.values()):
            if not call.done():
                call.set_exception(error)
        for fetch in self._fetches.values():
            fetch.give_up()
        for number, work in list(self.works.items()):
            sequence = self._state.roster.sequences.get(number)
            passing = sequence.passing if sequence is not None else None
            if passing is not None and passing.taken:
                continue
            if passing is not None and number in self._migrations:
                self._migrations[number].cancel()
            if work.progress is not None:
                work.progress.fail(error)
            work.fail(error)

    # --- prompts ----------------------------------------------------------------------------------------------------

    def _load(self, it: do.LoadPrefix) -> None:
        work = self.works[it.sequence]
        self.pages.take(work, [it.table, *it.other_tables], it.shared)

        def load() -> None:
            try:
                self.pages.clear(work)
                tokens = self._prefix_loader.load(work)
            except DeviceLost as error:
                self._inbox.post(ev.DeviceFailed(time.monotonic(), ev.device_failed(error)))
                tokens = 0
            except BaseException as error:
                self._inbox.post(error)
                raise
            if tokens > work.shared_pages * work.page_tokens:
                work.record_stored(0 if work.lossy or work.from_arenas else tokens // work.page_tokens)
            self._inbox.post(ev.PrefixLoaded(time.monotonic(), work.number, tokens))

        self._loaders.submit(load)

    def _run_step(self, it: do.Step) -> None:
        arrivals = {number: fetch.arrivals for number, fetch in self._fetches.items()}
        self.handle(self._step.run(it, self.works, arrivals, self._observer))

    def _run_side_step(self, it: do.SideStep) -> None:
        work = self.works[it.sequence]

        def done(result: torch.Tensor | BaseException | None) -> None:
            token, fault = None, StepFault()
            if isinstance(result, torch.Tensor):
                with fault:
                    token = draw([work], result[None])[0]
            elif isinstance(result, DeviceLost):
                self._inbox.post(ev.DeviceFailed(time.monotonic(), ev.device_failed(result)))
            elif isinstance(result, KVStoreError):
                fault.error = result
            elif result is not None:
                self._inbox.post(result)
                return
            self._inbox.post(ev.SideStepped(time.monotonic(), work.number, token, fault.error))

        arrivals = self._fetches[it.sequence].arrivals
        self.sides.add(next_token_slice(work), arrivals, work.prompt, work.deadline_s, done)

    def _draw(self, it: do.Draw) -> None:
        work, fetch = self.works[it.sequence], self._fetches.get(it.sequence)
        if fetch is not None and fetch.admitted is not None:
            work.cost.prefill_engine = fetch.address
            work.cost.prefill_cached = dict(fetch.admitted.cached_tokens)
            work.cost.prefill_s = fetch.handoff.prefill_ms / 1e3 if fetch.handoff is not None else 0.0
        end = work.add_token(it.token, self._eos)
        self.handle(ev.TokenDrawn(time.monotonic(), it.sequence, end, work.new_page_name()))

    # --- hand-offs --------------------------------------------------------------------------------------------------

    def _ask(self, it: do.AskPrefill) -> None:
        work = self.works[it.sequence]
        request, config = work.request, self._config
        name = config.compress if request.allow_lossy else "none"
        fetch = self._fetches[it.sequence] = Fetch(
            work,
            it.attempt,
            it.engine,
            self._peers,
            self._stagings,
            self._link,
            (name, self._codecs[name]),
            request.source or config.source,
            request.grain or config.grain,
            config.chunk_tokens,
            self._vocab_size,
            self._inbox.post,
        )
        fetch.begin(self._pool.layouts[0], config.hold_s)

    def _settle(self, it: do.Settle) -> None:
        work, fetch = self.works[it.sequence], self._fetches.pop(it.sequence)
        assert fetch.handoff is not None
        work.lossy = work.lossy or fetch.lossy
        work.record_loaded(work.prompt)
        work.record_stored(0 if work.lossy else fetch.handoff.stored)
        self._observer.handed_off(work.cost.moved_bytes, work.since_first_s())

    def _dismiss(self, it: do.Dismiss) -> None:
        work, fetch = self.works[it.sequence], self._fetches.pop(it.sequence)
        log.warning("prefill of %s by %s failed: %s", work.id, it.engine, it.error)
        work.lossy = work.lossy or fetch.lossy
        work.cost.prefill_engine, work.cost.prefill_cached = "", {}
        if fetch.moving:
            is_complete = fetch.arrivals.tokens_min() >= work.prompt
            work.record_loaded(work.prompt if is_complete else 0)
            if work.has_ring and not is_complete:  # all tokens of a ring are computed again
                work.cost.cached.clear()

    def _send_admitted(self, it: do.TellAdmitted) -> None:
        work = self.works[it.sequence]
        assert work.progress is not None
        work.progress.all_reached(it.cached // work.page_tokens * work.page_tokens)  # full pages only
        work.send(Admitted(work.prompt, dict(work.cost.cached), work.lossy))

    def _send_progress(self, it: do.TellProgress) -> None:
        self.works[it.sequence].send(Progress(it.tokens, self._state.speeds.prefill_tokens_per_s))

    def _hold(self, it: do.Hold) -> None:
        work = self.works[it.sequence]
        self._observer.ended("prefilled", work.usage())
        pages = work.prompt // work.page_tokens
        keys = links_of(work.cache, work.tokens[: work.prompt]) if work.cache and pages else []
        handoff = HandOff(
            request_id=work.id,
            pages=tuple(keys),
            stored=self._pool.count_stored(work, pages),
            tail_tokens=work.prompt - pages * work.page_tokens,
            first_token=work.first_token,
            generated=work.generated + 1,
            cached_tokens=dict(work.cost.cached),
            computed_tokens=work.cost.computed,
            prefill_ms=1e3 * work.cost.prefill_s,
        )
        work.send(Done(handoff))

    # --- migrations -------------------------------------------------------------------------------------------------

    def _pass_on(self, it: do.PassOn) -> None:
        work = self.works[it.sequence]
        migration = self._migrations[it.sequence] = Migration(work, self._peers, it.target, self._inbox.post)
        migration.start()

    def _reply(self, it: do.AnswerCall) -> None:
        call = self.calls.pop(it.call, None)
        if isinstance(it.result, KVStoreError):
            if call is not None:
                call.set_exception(it.result)
            else:
                log.warning("running answers continue here: %s", it.result)
        elif call is not None:
            call.set_result(it.result)

    # --- ends -------------------------------------------------------------------------------------------------------

    def _finish(self, it: do.Finish) -> None:
        work = self.works[it.sequence]
        self._observer.ended(it.reason, work.usage())
        work.finish(it.reason)

    def _fail(self, it: do.Fail) -> None:
        work = self.works[it.sequence]
        self._observer.ended("cancelled" if it.cancelled else "failed", work.usage())
        work.fail(it.error)

    def _drop(self, it: do.EndSequence) -> None:
        del self.works[it.sequence]
        self._migrations.pop(it.sequence, None)
