"""Engine: one thread that computes, and the calls that reach it.

Each turn of the thread handles what has been posted, then asks ``engine.state`` what to run: which sequences get
frames, and one forward, the next token of every sequence that decodes and as many prompt tokens as fit in addition. The
role decides which requests are accepted, not how they run. Other threads load from the pool, bring hand-offs, and serve
pulls; they reach the computing thread only through its inbox.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from engine.compute.lost import translated
from engine.compute.models import Model
from engine.compute.runner import runner_of
from engine.compute.teams import apart
from engine.config import EngineConfig
from engine.memory.device_staging import stagings_of
from engine.memory.lossy import codecs
from engine.memory.mounting import arenas_of
from engine.model.layouts import explain_mismatch
from engine.model.observer import Observer
from engine.model.piece import Piece
from engine.model.request import Cancel, Emit, PrefillEvent, Request, Role, RoleOrder, Timing
from engine.moving.peers import Peer, Peers
from engine.moving.serve import Prefills
from engine.moving.store_side import Pool
from engine.moving.work import Work
from engine.shell.checks import check_request, memory_frames
from engine.shell.inbox import Inbox
from engine.shell.migration import check_target
from engine.shell.performer import EnginePerformer
from engine.shell.status import describe
from engine.state import events as ev
from engine.state import integrity
from engine.state.door import Door
from engine.state.engine_state import EngineState
from engine.state.passing import TAKE_S
from engine.state.rules import GroupRules, Rules
from engine.text.detokenizer import Detokenizer
from kvstore import boundary
from kvstore.client.store import Store
from kvstore.errors import DeadlineExceeded, KVStoreError, NodeUnavailable, VersionMismatch
from kvstore.model.layout import Layout
from kvstore.tier.device import DeviceLost

IDLE_S = 0.05
QUIET_S = 2.0  # for threads that still use frames when the engine ends
STOP_S = 30.0

_DECIDED = boundary.Decided("state/engine")  # its thread decides, and nothing is computed without it

log = logging.getLogger("kvstore.engine")


class Engine:
    """Life: made (memory taken, nothing runs) -> ``start`` -> requests -> ``stop``, which fails what is still running.

    Every method may be called from any thread.

    Args:
        home: a store of the node of this machine, which knows from it which pages the arena keeps. It is used for
            nothing else: its session is the arena's.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        store: Store | None,
        connect: Callable[[str], Peer],
        observer: Observer | None = None,
        home: Store | None = None,
    ) -> None:
        self.config = config
        self.model = model
        layouts, groups = model.layouts(config.page_tokens), model.geometry.groups
        self.layout = layouts[0]  # engines with the same one share those of the other groups, too
        self.observer = observer or Observer()
        self.membership: Callable[[], dict[str, Any]] = dict  # what ``status`` says of our place in a pool
        windows = [group.window for group in groups]
        frames, *beside = memory_frames(config.arena, layouts, windows, config.chunk_tokens, config.batch_max)
        members, k_dim, device = [group.layers for group in groups], model.geometry.k_dim, str(model.device)
        self.arenas, self.mounted = arenas_of(
            layouts, members, [frames, *beside], k_dim, device, home, config.unmounted
        )
        self.arena = self.arenas.groups[0]
        self.stagings = stagings_of(self.arenas)
        self.pool = Pool(store, layouts, self.stagings, config.compress)
        self.pool.check()
        forms = codecs(self.layout)
        self.inbox = Inbox()
        self.prefills = Prefills(self.stagings, forms, self.inbox.post)
        self.door = Door(config.role, config.requests_max)
        self._entry = threading.Lock()  # guards ``Door``
        self.state = EngineState(
            Rules(
                frames=frames,
                kept_max=int(config.keep_pages * min([frames, *beside])),
                layers=model.geometry.layers,
                page_tokens=config.page_tokens,
                chunk_tokens=config.chunk_tokens,
                batch_max=config.batch_max,
                local_prefill_tokens=config.local_prefill_tokens,
                prefill=config.prefill,
                window=windows[0],
                beside=tuple(GroupRules(*each) for each in zip(beside, windows[1:], strict=True)),
            )
        )
        self._peers = Peers(connect)
        self._runner = apart(partial(runner_of, model, self.arenas, config.batch_max))
        self.performer = EnginePerformer(
            config,
            model.geometry.vocab_size,
            frozenset(model.eos_ids),
            forms,
            self.state,
            self._runner,
            self.stagings,
            self.mounted,
            self.pool,
            self._peers,
            self.prefills,
            self.observer,
            self._forget,
            self.inbox,
        )
        self._numbers = itertools.count(1)
        self._stopping = False
        self._died = ""  # the error that ended it
        self._found: tuple[str, ...] = ()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Compute from now on."""
        self.pool.start()
        self._thread.start()

    def stop(self) -> None:
        """Fail what still runs, and end all threads."""
        self._stopping = self.door.draining = True
        if self._thread.ident is not None:
            self._thread.join(STOP_S)
        self.performer.stop()
        self.mounted.end("the engine has ended", logging.DEBUG)
        self.pool.stop()
        self.stagings.close()

    def found(self, engines: tuple[str, ...]) -> None:
        """Take the addresses of engines that compute prompts for others now; replaces the previous ones."""
        self._found = engines
        self.inbox.post(ev.EnginesFound(time.monotonic(), engines))

    @property
    def alive(self) -> bool:
        """True while it computes."""
        return self._thread.is_alive()

    def check(self) -> None:
        """Check what must hold in an idle engine, including that frames without contents are free."""
        integrity.check(self.state)
        frames = self.state.roster.frames
        for arena, unused in zip(self.arenas.groups, [frames.unused, *frames.beside], strict=True):
            arena.check()
            assert arena.frames_free == unused

    def remains(self) -> dict[str, int]:
        """What is here and must not be in an idle engine."""
        kept = self.state.roster.frames.kept
        counts = {
            "known": len(self.door.known),
            "sequences": len(self.state.roster.sequences),
            "held": len(self.prefills),
            "frames": sum(arena.frames_total - arena.frames_free - kept for arena in self.arenas.groups),
        }
        return {name: count for name, count in counts.items() if count}

    # --- calls ------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, emit: Emit) -> Cancel:
        """Answer a prompt. ``emit`` is called for every event by a thread of the engine, which it must not block.
        Returns a call that cancels this request, and no later one of the same id.

        Raises:
            InvalidRequest: see ``check_request``; or the role is prefill, or the id is in use.
            TooManyCalls: the engine has the maximum number of requests.
            NodeUnavailable: the engine ends or is being drained.
        """
        return self._enter(request, emit, 0.0, answers=True)

    def prefill(self, request: Request, layout: Layout, hold_s: float, emit: Callable[[PrefillEvent], None]) -> Cancel:
        """Compute a prompt for another engine, whose pages are of ``layout``. Returns a call that gives it up.

        Raises:
            VersionMismatch: the layouts differ; says in which fields.
            InvalidRequest, TooManyCalls, NodeUnavailable: as ``submit``; or the role is decode.
        """
        if layout.fingerprint != self.layout.fingerprint:
            raise VersionMismatch(explain_mismatch(self.layout, layout))
        most_s = self.config.hold_s
        return self._enter(request, emit, min(hold_s, most_s) if hold_s > 0 else most_s, answers=False)

    def pull(
        self, request_id: str, token_start: int, codec: str, timeout_s: float, beat: Callable[[], None] = lambda: None
    ) -> Generator[Piece, None, None]:
        """See ``Prefills.pull``."""
        return self.prefills.pull(request_id, token_start, codec, timeout_s, beat)

    def release(self, request_id: str) -> bool:
        """End a prefill that is no longer needed. Returns whether there was one."""
        work = self.prefills.release(request_id)
        if work is not None:
            self._cancel(work.number)
        return work is not None

    def cancel(self, request_id: str) -> bool:
        """End a request. Returns whether there was one."""
        number = self.door.known.get(request_id)
        if number is not None:
            self._cancel(number)
        return number is not None

    def _cancel(self, number: int) -> None:
        self.inbox.post(ev.Cancelled(time.monotonic(), number))

    def status(self) -> dict[str, Any]:
        """What the engine is, how busy, and how fast; plain values, ready for JSON."""
        performer, graphs = self.performer, self._runner.graphs
        about = self.config, self.model, self.arenas, self.mounted, self.pool, self.door, self.state, self.prefills
        told = describe(*about, performer.sides.steps, graphs, performer.pages.demoted)
        return {**told, "membership": self.membership()}

    def set_role(self, role: Role, order: RoleOrder | None = None) -> None:
        """Accept other requests from now on: see ``Door.set_role``."""
        with self._entry:
            self.door.set_role(role, order)
            self.door.draining = self.door.draining or bool(self._died)

    def migrate(self, request_id: str, target: str) -> bool:
        """Let the engine at ``target`` continue a request; its client sees no difference. Returns whether there was
        one.

        Raises:
            KVStoreError: the other engine is not there, or refuses it; it continues here.
            DeadlineExceeded: it was not taken in time; it continues here.
        """
        number = self.door.known.get(request_id)
        if number is None:
            return False
        self._check_target(target)
        call, answer = next(self._numbers), Future[bool]()
        self.performer.calls[call] = answer
        self.inbox.post(ev.Migrate(time.monotonic(), number, target, call))
        try:
            return answer.result(2 * TAKE_S)
        except TimeoutError:
            raise DeadlineExceeded(f"this engine did not get to it within {2 * TAKE_S:g} s") from None
        finally:
            self.performer.calls.pop(call, None)

    def drain(self, target: str | None, timeout_s: float) -> int:
        """Refuse new requests; wait for running ones, moved to ``target`` if given. Returns how many still run then."""
        self.door.draining = True
        deadline = time.monotonic() + timeout_s
        if target is not None and self.door.known:
            try:
                self._check_target(target)
                self.inbox.post(ev.Drain(time.monotonic(), target))
            except KVStoreError as error:
                log.warning("running answers stay here, %s refuses them: %s", target, error)
        while self.door.draining and self.door.known and time.monotonic() < deadline:
            time.sleep(IDLE_S)
        self.inbox.post(ev.Drain(time.monotonic(), None))
        return len(self.door.known)

    def _check_target(self, address: str) -> None:
        target: Any = self._peers[address]
        check_target(target, address, self.layout)

    def _enter(self, request: Request, emit: Callable[[Any], None], hold_s: float, answers: bool) -> Cancel:
        if (error := self._ended()) is not None:
            raise error
        self.door.check(answers)
        check_request(request, self.model, self.state.rules, answers)
        text = Detokenizer(self.model.tokenizer, request.sampling.stop) if answers else None
        cache = self.pool.cache(request.salt, request.adapter) if request.use_pool else None
        work = Work(next(self._numbers), request, emit, text, self.layout.page_tokens, cache, answers, self.state.rules)
        stored = 0
        if answers and request.prefill is None and (self.config.prefill or self._found):
            stored = self.pool.written(work, work.prompt // work.page_tokens, arenas=True) * work.page_tokens
        with self._entry:
            self.door.enter(request.id, work.number)
        self.performer.works[work.number] = work
        if not answers:
            self.prefills.add(work)
        self.inbox.post(
            ev.Submitted(
                work.begun_s,
                work.number,
                request.id,
                prompt=work.prompt,
                generated=request.generated,
                tokens_max=request.sampling.max_tokens,
                deadline_s=work.deadline_s,
                role=self.door.role,
                answers=answers,
                hold_s=hold_s,
                engines=request.prefill,
                stored=stored,
                lazy=(request.handoff or self.config.handoff) is Timing.LAZY,
                stopped=work.stopped,
                names=work.page_names(),
            )
        )
        if (error := self._ended()) is not None:  # in the meantime, and maybe before this one was known
            work.fail(error)
        return partial(self._cancel, work.number)

    def _ended(self) -> NodeUnavailable | None:
        return NodeUnavailable(self._died) if self._died else None

    def _forget(self, request_id: str) -> None:
        with self._entry:
            self.door.leave(request_id)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # our own bug: nothing is computed any more, and all callers are told
            self._died = f"engine stopped after an internal error: {type(error).__name__}: {error}"
            self.door.draining = True
            self.state.stopped = self.state.stopped or NodeUnavailable(self._died)
            self.mounted.end(self._died)
            self.performer.abandon(NodeUnavailable(self._died))
            with self._entry:
                self.door.known.clear()
            raise

    def _serve(self) -> None:
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        idle_s = 0.0
        while not self._stopping:
            with _DECIDED:
                for event in self.inbox.take(idle_s):
                    self._unless_lost(partial(self.performer.handle, event))
                idle_s = 0.0 if self._unless_lost(self.performer.turn) else IDLE_S
        self.performer.handle(ev.Stop(time.monotonic()))
        until_s = time.monotonic() + QUIET_S
        while self.remains() and time.monotonic() < until_s:
            for event in self.inbox.take(IDLE_S):
                self._unless_lost(partial(self.performer.handle, event))
        log.info("ended; %d of %d frames free", self.state.roster.frames.free, self.arena.frames_total)

    def _unless_lost(self, act: Callable[[], bool | None]) -> bool:
        """Run a function. A device that is lost on the way ends all requests here, and the engine then refuses new
        ones.
        """
        try:
            with translated(self.arena.device):
                return bool(act())
        except DeviceLost as error:
            log.error("no request can be served any more: %s", error)
            self.performer.handle(ev.DeviceFailed(time.monotonic(), ev.device_failed(error)))
            return False
