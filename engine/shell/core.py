"""Engine: one thread that computes, and everything around it.

Each turn of the thread takes what has changed (new requests, loaded prefixes, arrived hand-offs), admits who gets
frames, and runs one forward: the next token of every sequence that decodes, and as many prompt tokens as fit beside
them. The role decides what is accepted, not how it is run. Other threads load from the pool, bring hand-offs, and serve
pulls; they reach the computing thread through ``_inbox`` alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from engine.api.wire import explain_mismatch
from engine.compute.decode import SideBatches
from engine.compute.models import Model
from engine.compute.runner import Runner
from engine.compute.speeds import Speeds
from engine.config import EngineConfig
from engine.memory.arena import Arena
from engine.memory.lossy import codecs
from engine.model.observer import Observer
from engine.model.request import Cancel, Emit, Piece, PrefillEvent, Request, Role
from engine.moving.peers import Peer, Peers
from engine.moving.routes import Routes
from engine.moving.store_side import Pool
from engine.shell.admission import Admission, check_request, memory_frames
from engine.shell.migration import Migration
from engine.shell.prefill import Prefills
from engine.shell.sequence import Sequence, State
from engine.shell.status import describe
from engine.shell.step import Step
from engine.text.detokenizer import Detokenizer
from kvstore.client.store import Store
from kvstore.errors import InvalidRequest, KVStoreError, NodeUnavailable, TooManyCalls, VersionMismatch
from kvstore.model.layout import Layout

IDLE_S = 0.05
LOADERS = 2
STOP_S = 30.0

log = logging.getLogger("kvstore.engine")


class Engine:
    """Life: made (memory taken, nothing runs) -> ``start`` -> requests -> ``stop``, which fails what is still running.

    Every method may be called from any thread. Frames: free + those of ``_active``, ``_leaving`` and held prefills are
    all there are, checked when idle.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        store: Store | None,
        connect: Callable[[str], Peer],
        observer: Observer | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.role = config.role
        self.layout = model.layout(config.page_tokens)
        self.observer = observer or Observer()
        frames = memory_frames(config.arena, self.layout)
        self.arena = Arena(self.layout, frames, model.k_dim, str(model.device))
        self.pool = Pool(store, self.layout, self.arena, config.compress)
        self.pool.check()
        self.speeds = Speeds(self.layout.layers)
        runner = Runner(model, self.arena)
        forms = codecs(self.layout)
        self.prefills = Prefills(self.arena, self.pool, forms)
        self._sides = SideBatches(runner, self.arena, self._wake)
        self._peers = Peers(connect)
        self._routes = Routes(
            config, self._peers, self.arena, self.pool, forms, model.vocab_size, self.observer, self._wake
        )
        self._admission = Admission(self.arena, config.batch_max)
        self._eos = frozenset(model.eos_ids)
        self._step = Step(config, runner, self.arena, self.pool, self.prefills, self._sides, self.speeds)
        self._active: dict[Sequence, None] = {}  # have frames, in the order they got them
        self._parked: list[Sequence] = []  # lazy: computed elsewhere first, then they wait for frames
        self._leaving: list[Sequence] = []  # ended, their frames may still be written to
        self._known: dict[str, Sequence] = {}  # all that have not ended, held prefills among them
        self._entry = threading.Lock()
        self._inbox: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self.draining = False
        self._loaders = ThreadPoolExecutor(LOADERS, "engine-load")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Compute from now on."""
        self.pool.start()
        self._thread.start()

    def stop(self) -> None:
        """Fail what still runs, and end all threads."""
        self._stopping = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)
        self._loaders.shutdown(wait=True)
        self.pool.stop()

    def check(self) -> None:
        """Conservation of frames, for an engine that is idle: all that nobody has are free."""
        self.arena.check()
        holders = [*self._active, *self._leaving, *self.prefills.sequences()]
        held = sum(len(sequence.frames) for sequence in holders if sequence.frames is not None)
        assert held + self.arena.frames_free == self.arena.frames_total, (held, self.arena.frames_free)

    # --- what is asked of it ------------------------------------------------------------------------------------------

    def submit(self, request: Request, emit: Emit) -> Cancel:
        """Answer a prompt. ``emit`` is called for every event by the engine's thread, which it must not keep. Returns
        what cancels this request, and no later one of the same id.

        Raises:
            InvalidRequest: see ``check_request``; or the role is prefill, or the id is in use.
            TooManyCalls: as many requests as may be are here already.
            NodeUnavailable: the engine ends or is being drained.
        """
        if self.role is Role.PREFILL:
            raise InvalidRequest("role", "this engine computes prompts for others; ask one of role decode or both")
        sequence = self._made(request, emit, answers=True)
        self._post(lambda: self._submitted(sequence))
        return partial(self._cancel, sequence)

    def prefill(self, request: Request, layout: Layout, hold_s: float, emit: Callable[[PrefillEvent], None]) -> Cancel:
        """Compute a prompt for another engine, whose pages are of ``layout``. Returns what gives it up.

        Raises:
            VersionMismatch: the layouts differ; says in which fields.
            InvalidRequest, TooManyCalls, NodeUnavailable: as ``submit``; or the role is decode.
        """
        if layout.fingerprint != self.layout.fingerprint:
            raise VersionMismatch(explain_mismatch(self.layout, layout))
        if self.role is Role.DECODE:
            raise InvalidRequest("role", "this engine answers requests; ask one of role prefill or both")
        sequence = self._made(request, emit, answers=False)
        self.prefills.admit(sequence, min(hold_s, self.config.hold_s) if hold_s > 0 else self.config.hold_s)
        self._post(lambda: self._admission.add(sequence))
        return partial(self._cancel, sequence)

    def pull(self, request_id: str, token_start: int, codec: str, timeout_s: float) -> Generator[Piece, None, None]:
        """See ``Prefills.pull``."""
        return self.prefills.pull(request_id, token_start, codec, timeout_s)

    def release(self, request_id: str) -> bool:
        """A prefill is not needed any more. Whether there was one."""
        found = self.prefills.release(request_id)
        self._wake()
        return found

    def cancel(self, request_id: str) -> bool:
        """End a request. Whether there was one."""
        sequence = self._known.get(request_id)
        if sequence is not None:
            self._cancel(sequence)
        return sequence is not None

    def _cancel(self, sequence: Sequence) -> None:
        sequence.cancelled = True
        elsewhere = sequence.elsewhere
        if elsewhere is not None and sequence.state is State.LEFT:
            threading.Thread(target=self._cancel_there, args=(elsewhere,), name="engine-cancel", daemon=True).start()
        self._wake()

    @staticmethod
    def _cancel_there(elsewhere: Callable[[], object]) -> None:
        try:
            elsewhere()
        except KVStoreError as error:
            log.warning("an answer that went on elsewhere was not cancelled there: %s", error)

    def status(self) -> dict[str, Any]:
        """What the engine is, how busy, and how fast; plain values, ready for JSON."""
        return describe(self, [sequence.state for sequence in list(self._known.values())], self._sides.steps)

    def set_role(self, role: Role) -> None:
        """Accept other requests from now on; ends a drain."""
        self.role, self.draining = role, False

    def migrate(self, request_id: str, target: str) -> bool:
        """Have the engine at ``target`` go on with a request; its client sees no difference. Whether there was one."""
        sequence = self._known.get(request_id)
        if sequence is None or not sequence.answers:
            return False
        return Migration(self._peers[target], target, self.pool).ask(sequence, self._post, self._left, self._gone)

    def drain(self, target: str | None, timeout_s: float) -> int:
        """Accept nothing more; wait for what runs, moved to ``target`` where there is one. How many still run then."""
        self.draining = True
        deadline = time.monotonic() + timeout_s
        while self.draining and self._known and time.monotonic() < deadline:
            if target is not None:
                target = self._moved(target)
            time.sleep(IDLE_S)
        return len(self._known)

    def _moved(self, target: str) -> str | None:
        """Let what decodes go on at ``target``; None where that is not to be had."""
        for request_id, sequence in list(self._known.items()):
            if sequence.state is State.DECODING and sequence.answers:
                try:
                    self.migrate(request_id, target)
                except KVStoreError as error:
                    log.warning("what runs here stays, %s does not take it: %s", target, error)
                    return None
        return target

    def _made(self, request: Request, emit: Callable[[Any], None], answers: bool) -> Sequence:
        if self._stopping or self.draining:
            raise NodeUnavailable("this engine takes no new requests: it is being drained")
        check_request(request, self.model, self.layout, self.arena.frames_total, answers)
        text = Detokenizer(self.model.tokenizer, request.sampling.stop) if answers else None
        cache = self.pool.cache(request.salt, request.adapter) if request.use_pool else None
        sequence = Sequence(request, emit, text, self.layout.page_tokens, cache, answers)
        with self._entry:
            if request.id in self._known:
                raise InvalidRequest("request_id", f"{request.id} is in use here")
            if len(self._known) >= self.config.requests_max:
                raise TooManyCalls(f"{self.config.requests_max} requests are here already", retry_after_s=1.0)
            self._known[request.id] = sequence
        return sequence

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _post(self, what: Callable[[], None]) -> None:
        self._inbox.append(what)
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        while not self._stopping:
            while self._inbox:
                self._inbox.popleft()()
            self._sweep(time.monotonic())
            for sequence in self._admission.admit(len(self._active)):
                self._load(sequence)
            self._follow()
            if not self._step.run(list(self._active), self._next_token, self.observer):
                with self._changed:
                    if not self._inbox and not self._stopping:
                        self._changed.wait(IDLE_S)
        self._end_all()

    def _submitted(self, sequence: Sequence) -> None:
        if sequence.stopped:  # all was told by the engine that died
            self._finish(sequence, "stop")
        elif self._routes.choose(sequence, self.role) and self._routes.lazy(sequence):
            self._routes.begin(sequence)
            self._parked.append(sequence)
        else:
            self._admission.add(sequence)

    def _load(self, sequence: Sequence) -> None:
        self._active[sequence] = None
        sequence.state, sequence.loading = State.LOADING, True

        def load() -> None:
            try:
                tokens = self.pool.load(sequence)
            except BaseException as error:  # a mistake of ours: the engine's thread ends with it, loudly
                self._post(partial(_raise, error))
                raise
            finally:
                sequence.loading = False
            self._post(lambda: self._loaded(sequence, tokens))

        self._loaders.submit(load)

    def _loaded(self, sequence: Sequence, tokens: int) -> None:
        if sequence not in self._active:
            return  # it ended meanwhile
        sequence.cached = tokens
        sequence.stored_pages = 0 if sequence.lossy else tokens // sequence.page_tokens
        if not sequence.answers:
            sequence.compute_rest()
            self.prefills.loaded(sequence)
        elif not self._routes.go(sequence):
            sequence.compute_rest()

    def _follow(self) -> None:
        """Hand-offs: what has come of them since the last turn."""
        for sequence in [one for one in self._parked if self._routes.settled(one)]:
            self._parked.remove(sequence)
            self._admission.add(sequence)
        for sequence in list(self._active):
            if sequence not in self._sides:
                self._routes.follow(sequence, self._next_token, self._refused)

    def _refused(self, sequence: Sequence, error: KVStoreError) -> None:
        self.observer.ended("failed", sequence.usage())
        self._over(sequence)
        sequence.fail(error)

    def _next_token(self, sequence: Sequence, token: int) -> None:
        """One more token of a sequence was drawn."""
        if not sequence.answers:
            self._active.pop(sequence, None)
            self.observer.ended("prefilled", sequence.usage())
            self.prefills.complete(sequence, token)
            return
        sequence.state = State.DECODING
        reason = sequence.token(token, self._eos)
        if sequence.arrivals is None and sequence.cached // sequence.page_tokens > sequence.stored_pages:
            self.pool.append(sequence)
        if reason:
            self._finish(sequence, reason)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _sweep(self, now_s: float) -> None:
        """End what was cancelled or is late, and take back the frames of what has ended."""
        for sequence in [*self._admission.drop(now_s), *self._active, *self._parked]:
            if sequence.cancelled or sequence.expired(now_s):
                self.observer.ended("cancelled" if sequence.cancelled else "failed", sequence.usage())
                self._over(sequence)
                sequence.give_up()
                if not sequence.answers:
                    self.prefills.failed(sequence)
        for sequence in self.prefills.over(now_s):
            self._forget(sequence)
            self._leaving.append(sequence)
        self._leaving = [sequence for sequence in self._leaving if not self._given_back(sequence)]

    def _finish(self, sequence: Sequence, reason: str) -> None:
        self.observer.ended(reason, sequence.usage())
        self._over(sequence)
        sequence.finish(reason)  # last: its client may ask again under the same id

    def _over(self, sequence: Sequence) -> None:
        """It has no more part in anything; its client is told after this."""
        if sequence in self._parked:
            self._parked.remove(sequence)
        self._active.pop(sequence, None)
        if sequence.answers:
            self._forget(sequence)
            self._leaving.append(sequence)

    def _forget(self, sequence: Sequence) -> None:
        if self._known.get(sequence.id) is sequence:
            del self._known[sequence.id]

    def _left(self, sequence: Sequence) -> None:
        """Another engine goes on with it: its frames are free, its client stays."""
        if sequence not in self._active:
            return  # it ended meanwhile
        self._active.pop(sequence, None)
        self._leaving.append(sequence)
        self.observer.ended("migrated", sequence.usage())

    def _gone(self, sequence: Sequence) -> None:
        self._forget(sequence)

    def _given_back(self, sequence: Sequence) -> bool:
        """Whether its frames are back; not before every thread that may touch them is done."""
        over = self._routes.over(sequence)  # first: it gives a hand-off up, for which a side batch may wait
        if sequence.loading or sequence in self._sides or not over:
            return False
        if sequence.frames is not None:
            self.arena.give_back(sequence.frames)
            sequence.frames = None
        return True

    def _end_all(self) -> None:
        error: KVStoreError = NodeUnavailable("this engine has ended")
        for sequence in list(self._known.values()):
            self._over(sequence)
            sequence.fail(error)
            if not sequence.answers:
                self.prefills.failed(sequence)
        for sequence in self._leaving:  # or side batches would wait for what is on its way
            self._routes.over(sequence)
        self._sides.stop()
        log.info("ended; %d of %d frames free", self.arena.frames_free, self.arena.frames_total)


def _raise(error: BaseException) -> None:
    raise error
