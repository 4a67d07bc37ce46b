"""The engine: one thread that computes, and the calls that other threads make to it.

In each turn, the engine's thread handles the events that other threads have posted. Then it asks ``engine.state`` which
sequences get frames, and which forward to run. A forward computes the next token of every sequence that decodes, and as
many prompt tokens as fit in addition. The role decides which requests the engine accepts, but not how they run. Other
threads load pages from the pool, receive hand-offs, and serve pulls. They reach the engine's thread only through its
inbox.

``check_request`` refuses requests that can never be served with this model and this memory. ``describe`` makes the
document that ``Engine.status`` returns.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.compute.kernels import kernel_for
from engine.compute.models import Model
from engine.compute.omp_threads import run_in_own_thread
from engine.compute.runner import runner_of
from engine.compute.sampling import check
from engine.compute.torch_errors import computing_on
from engine.config import EngineConfig
from engine.memory.compression import codecs
from engine.memory.device_staging import stagings_of
from engine.memory.mounting import arenas_of
from engine.model.layouts import explain_mismatch
from engine.model.observer import Observer
from engine.model.piece import Piece
from engine.model.request import Cancel, Emit, PrefillEvent, Request, Role, RoleOrder, Timing
from engine.pool.store import Pool
from engine.pool.work import Work
from engine.shell.migration import check_target
from engine.shell.performer import EnginePerformer, Inbox
from engine.state import events as ev
from engine.state import integrity
from engine.state.admission import Admission
from engine.state.engine_state import EngineState
from engine.state.migration import TAKE_S
from engine.state.rules import GroupRules, Rules, ring_frames
from engine.state.sequences import Phase
from engine.text.tokenizer import Detokenizer
from engine.transfer.remote_prefill import Peer, Peers
from engine.transfer.serve import Prefills
from kvstore import boundary
from kvstore.client.store import Store
from kvstore.device.base import DeviceLost
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NodeUnavailable, VersionMismatch
from kvstore.model.layout import Layout
from kvstore.model.retention import as_ranges


def memory_frames(
    arena_bytes: int, layouts: Sequence[Layout], windows: Sequence[int], chunk_tokens: int, batch_max: int
) -> tuple[int, ...]:
    """Divide the memory between the cache groups. Returns the number of frames of each group.

    Every group after the first has a window. It gets rings for ``batch_max`` sequences, with two limits: half of the
    memory (but at least one ring), and the number of pages of all layers that fit in the memory. So the first group
    gets at least that number of frames.

    Raises:
        InvalidRequest: not even one page fits.
    """
    page_bytes = sum(layout.page_bytes for layout in layouts)
    pages_max = arena_bytes // page_bytes
    if not pages_max:
        raise InvalidRequest("arena", f"must fit a page of {page_bytes} bytes (got {arena_bytes} bytes)")
    other_frames = []
    for layout, window in list(zip(layouts, windows, strict=True))[1:]:
        ring = ring_frames(window, chunk_tokens, layout.page_tokens)
        other_frames.append(min(pages_max, batch_max * ring, max(ring, arena_bytes // 2 // layout.page_bytes)))
    other_bytes = sum(frames * layout.page_bytes for frames, layout in zip(other_frames, layouts[1:], strict=True))
    return (arena_bytes - other_bytes) // layouts[0].page_bytes, *other_frames


def check_request(request: Request, model: Model, rules: Rules, answers: bool) -> None:
    """Refuse a request that can never be served.

    Raises:
        InvalidRequest: the prompt is empty or contains ids outside the model's vocabulary; the tokens exceed the
            model's context or the arena; or the sampling, the hints or the deadline are invalid. Names the field.
    """
    check(request.sampling)
    tokens = request.tokens
    if not len(tokens):
        raise InvalidRequest("tokens", "must not be empty")
    if int(tokens.max()) >= model.geometry.vocab_size:
        index = int(tokens.argmax())
        raise InvalidRequest("tokens", f"id {tokens[index]} at {index} is not in 0..{model.geometry.vocab_size - 1}")
    if not 0 <= request.generated < len(tokens):
        raise InvalidRequest("generated", f"must be in 0..{len(tokens) - 1} (got {request.generated})")
    max_tokens = request.sampling.max_tokens
    if answers and request.generated >= max_tokens:
        raise InvalidRequest("generated", f"must be less than max_tokens={max_tokens} (got {request.generated})")
    total = request.prompt_tokens + (max_tokens if answers else request.generated)
    if total > model.context_tokens_max:
        parts = f"{request.prompt_tokens} tokens and max_tokens={max_tokens}"
        raise InvalidRequest("tokens", f"{parts} exceed the context of {model.context_tokens_max}")
    if not rules.holds(total):
        raise InvalidRequest("tokens", f"{total} tokens do not fit the arena of {rules.tokens_max}")
    if request.adapter:
        raise InvalidRequest("adapter", f"this engine does not support adapters (got {request.adapter!r})")
    as_ranges(request.retention)
    if not 0 < request.deadline_s < 1e6:
        raise InvalidRequest("deadline_s", f"must be positive seconds (got {request.deadline_s!r})")


def describe(engine: Engine) -> dict[str, Any]:
    """Return the document of ``Engine.status``. Any thread may call this: it only reads."""
    config, model, admission, state, pool = engine.config, engine.model, engine.admission, engine.state, engine.pool
    arena = engine.arenas.groups[0]
    sequences = [state.roster.sequences.get(number) for number in list(admission.numbers.values())]
    frames = state.roster.frames
    phases = Counter(Phase.WAITING if sequence is None else sequence.phase for sequence in sequences)
    return {
        "role": str(admission.role),
        "role_set_by": admission.role_set_by,
        "role_order": admission.order._asdict(),  # the last order of a leading conductor
        "draining": admission.draining,
        "model": model.name,
        "device": str(model.device),
        "ended": str(state.stopped) if state.stopped is not None else "",
        "graphs": engine.graphs,
        "attention": kernel_for(arena.layout, arena.device).line,
        "model_path": str(Path(config.model).resolve()) if Path(config.model).is_dir() else None,
        "layout": {
            "fingerprint": arena.layout.fingerprint.hex(),
            "page_tokens": arena.layout.page_tokens,
            "page_bytes": arena.layout.page_bytes,
            "fields": asdict(arena.layout),
        },
        "groups": [
            {
                "layers": each.layout.layers,
                "window": group.window,
                "page_bytes": each.layout.page_bytes,
                "frames": each.frames_total,
                "frames_unused": each.frames_free,
            }
            for each, group in zip(engine.arenas.groups, state.rules.groups, strict=True)
        ],
        "context_tokens_max": model.context_tokens_max,
        "frames": {
            "total": arena.frames_total,
            "free": frames.free,  # includes frames of kept pages, which are evicted when a frame is needed
            "kept": frames.kept,
            "shared": frames.shared,
            "tokens_max": state.rules.tokens_max,  # of one sequence; 0 for no limit
            "kv_tokens_max": 0 if state.rules.window else arena.frames_total * arena.layout.page_tokens,  # in total
            "kv_tokens": (arena.frames_total - frames.free) * arena.layout.page_tokens,  # in frames of sequences
        },
        "mounted": {"segment": engine.mounted.number, "why_not": engine.mounted.why},
        "kept_pages": {"found": frames.reused, "evicted": frames.evicted, "demoted": engine.performer.pages.demoted},
        "requests": {phase.name.lower(): phases[phase] for phase in Phase if phase is not Phase.ENDED},
        "batch_max": config.batch_max,
        "chunk_tokens": config.chunk_tokens,
        "prefills_held": len(engine.prefills),
        "side_steps": engine.performer.sides.steps,
        "speeds": {
            "step_ms": 1e3 * state.speeds.step_s,
            "prefill_tokens_per_s": state.speeds.prefill_tokens_per_s,
            "hook_us_per_layer": 1e6 * pool.hook_s / max(1, pool.hook_layers),
        },
        "pool": {"node": pool.store.name if pool.store else None, "up": pool.up, "failures": pool.failures},
        "membership": engine.membership(),
    }


IDLE_S = 0.05
QUIET_S = 2.0  # how long a stopping engine waits for threads that still use frames
STOP_S = 30.0

_DECIDED = boundary.StateGuard("state/engine")  # an unexpected error ends the process: the state cannot be trusted

log = logging.getLogger("kvstore.engine")


class Engine:
    """An engine: a model on one device, with an arena for KV.

    Life: constructed (has memory, idle) -> ``start`` -> requests -> ``stop``, which fails unfinished requests.
    Every method may be called from any thread.

    Args:
        home: a store of the node of this machine, in which the engine mounts its arena. The session of this store
            belongs to the arena, so the store has no other use.

    Attributes:
        membership: returns what ``status`` reports about this engine's membership in a pool.
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
        self.layout = layouts[0]  # engines with equal first layouts have equal layouts of the other groups, too
        self.observer = observer or Observer()
        self.membership: Callable[[], dict[str, Any]] = dict
        windows = [group.window for group in groups]
        frames, *other_frames = memory_frames(config.arena, layouts, windows, config.chunk_tokens, config.batch_max)
        members, k_dim, device = [group.layers for group in groups], model.geometry.k_dim, str(model.device)
        self.arenas, self.mounted = arenas_of(
            layouts, members, [frames, *other_frames], k_dim, device, home, config.unmounted
        )
        self.arena = self.arenas.groups[0]
        self.stagings = stagings_of(self.arenas)
        self.pool = Pool(store, layouts, self.stagings, config.compress)
        self.pool.check()
        codec_by_name = codecs(self.layout)
        self.inbox = Inbox()
        self.prefills = Prefills(self.stagings, codec_by_name, self.inbox.post)
        self.admission = Admission(config.role, config.requests_max)
        self._entry = threading.Lock()  # guards ``Admission``
        self.state = EngineState(
            Rules(
                frames=frames,
                kept_max=int(config.keep_pages * min([frames, *other_frames])),
                layers=model.geometry.layers,
                page_tokens=config.page_tokens,
                chunk_tokens=config.chunk_tokens,
                batch_max=config.batch_max,
                local_prefill_tokens=config.local_prefill_tokens,
                prefill=config.prefill,
                window=windows[0],
                other_groups=tuple(GroupRules(*each) for each in zip(other_frames, windows[1:], strict=True)),
            )
        )
        self._peers = Peers(connect)
        self._runner = run_in_own_thread(partial(runner_of, model, self.arenas, config.batch_max))
        self.performer = EnginePerformer(
            config,
            model.geometry.vocab_size,
            frozenset(model.eos_ids),
            codec_by_name,
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
        self._fatal = ""  # the error that ended the engine's thread
        self._prefill_engines: tuple[str, ...] = ()  # of the pool
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the engine's threads."""
        self.pool.start()
        self._thread.start()

    def stop(self) -> None:
        """Fail unfinished requests, and end all threads."""
        self._stopping = self.admission.draining = True
        if self._thread.ident is not None:
            self._thread.join(STOP_S)
        self.performer.stop()
        self.mounted.end("the engine has ended", logging.DEBUG)
        self.pool.stop()
        self.stagings.close()

    def set_prefill_engines(self, engines: tuple[str, ...]) -> None:
        """Replace the addresses of the engines that now compute prompts for others."""
        self._prefill_engines = engines
        self.inbox.post(ev.EnginesFound(time.monotonic(), engines))

    @property
    def graphs(self) -> str:
        """How decoding steps use CUDA graphs, or why they do not."""
        return self._runner.graphs

    @property
    def alive(self) -> bool:
        """True while the engine's thread runs."""
        return self._thread.is_alive()

    def check(self) -> None:
        """Assert the invariants of an idle engine. In each arena, exactly the frames without a page are free."""
        integrity.check(self.state)
        frames = self.state.roster.frames
        for arena, unused in zip(self.arenas.groups, [frames.unused, *frames.other_unused], strict=True):
            arena.check()
            assert arena.frames_free == unused

    def remains(self) -> dict[str, int]:
        """Return the number of ids, sequences, prefills and frames still in use, by name. An idle engine has none."""
        kept_pages = self.state.roster.frames.kept
        counts = {
            "ids": len(self.admission.numbers),
            "sequences": len(self.state.roster.sequences),
            "prefills": len(self.prefills),
            "frames": sum(arena.frames_total - arena.frames_free - kept_pages for arena in self.arenas.groups),
        }
        return {name: count for name, count in counts.items() if count}

    # --- calls ------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, emit: Emit) -> Cancel:
        """Begin to answer a prompt. Threads of the engine call ``emit`` with every event; ``emit`` must not block.

        Returns:
            A function that cancels this request. A later request with the same id is not affected.

        Raises:
            InvalidRequest: ``check_request`` refuses the request, the role is prefill, or the id is in use.
            TooManyCalls: the engine has the maximum number of requests.
            NodeUnavailable: the engine has ended or is being drained.
        """
        return self._enter(request, emit, 0.0, answers=True)

    def prefill(self, request: Request, layout: Layout, hold_s: float, emit: Callable[[PrefillEvent], None]) -> Cancel:
        """Begin to compute a prompt for another engine. Its pages have ``layout``.

        Once the prompt is computed, its frames are held for ``hold_s`` seconds, so that the other engine can pull it.
        The engine's own setting is the maximum, and is used if ``hold_s`` is 0. Returns a function that cancels.

        Raises:
            VersionMismatch: the layouts differ; the text names the fields.
            InvalidRequest, TooManyCalls, NodeUnavailable: as for ``submit``, but the wrong role is decode.
        """
        if layout.fingerprint != self.layout.fingerprint:
            raise VersionMismatch(explain_mismatch(self.layout, layout))
        hold_s_max = self.config.hold_s
        return self._enter(request, emit, min(hold_s, hold_s_max) if hold_s > 0 else hold_s_max, answers=False)

    def pull(
        self, request_id: str, token_start: int, codec: str, timeout_s: float, beat: Callable[[], None] = lambda: None
    ) -> Generator[Piece, None, None]:
        """Return the KV of a prefill, in pieces; ``Prefills.pull`` has the details."""
        return self.prefills.pull(request_id, token_start, codec, timeout_s, beat)

    def release(self, request_id: str) -> bool:
        """End a prefill that is no longer needed. Returns True if there was one with this id."""
        work = self.prefills.release(request_id)
        if work is not None:
            self._cancel(work.number)
        return work is not None

    def cancel(self, request_id: str) -> bool:
        """Cancel a request. Returns True if there was one with this id."""
        number = self.admission.numbers.get(request_id)
        if number is not None:
            self._cancel(number)
        return number is not None

    def _cancel(self, number: int) -> None:
        self.inbox.post(ev.Cancelled(time.monotonic(), number))

    def status(self) -> dict[str, Any]:
        """Return the engine's configuration, load and speed, as values that JSON can represent."""
        return describe(self)

    def set_role(self, role: Role, order: RoleOrder | None = None) -> None:
        """Change which requests the engine accepts. Raises the errors of ``Admission.set_role``."""
        with self._entry:
            self.admission.set_role(role, order)
            self.admission.draining = self.admission.draining or bool(self._fatal)

    def migrate(self, request_id: str, target: str) -> bool:
        """Move a running request to the engine at ``target``. The client's stream continues.

        Returns False if no answer with this id is running, or if it ended before the other engine took it. After an
        error the answer continues here.

        Raises:
            KVStoreError: the other engine is unreachable or refuses the request.
            DeadlineExceeded: the other engine did not take the request in time.
        """
        number = self.admission.numbers.get(request_id)
        if number is None:
            return False
        self._check_target(target)
        call, reply = next(self._numbers), Future[bool]()
        self.performer.calls[call] = reply
        self.inbox.post(ev.Migrate(time.monotonic(), number, target, call))
        try:
            return reply.result(2 * TAKE_S)
        except TimeoutError:
            raise DeadlineExceeded(f"this engine did not handle the call within {2 * TAKE_S:g} s") from None
        finally:
            self.performer.calls.pop(call, None)

    def drain(self, target: str | None, timeout_s: float) -> int:
        """Refuse new requests, and wait at most ``timeout_s`` until no request runs.

        If there is a ``target``, running answers are moved to that engine. Returns the number of requests that still
        run at the end.
        """
        self.admission.draining = True
        deadline = time.monotonic() + timeout_s
        if target is not None and self.admission.numbers:
            try:
                self._check_target(target)
                self.inbox.post(ev.Drain(time.monotonic(), target))
            except KVStoreError as error:
                log.warning("running answers continue here, because %s refuses them: %s", target, error)
        while self.admission.draining and self.admission.numbers and time.monotonic() < deadline:
            time.sleep(IDLE_S)
        self.inbox.post(ev.Drain(time.monotonic(), None))
        return len(self.admission.numbers)

    def _check_target(self, address: str) -> None:
        target: Any = self._peers[address]
        check_target(target, address, self.layout)

    def _enter(self, request: Request, emit: Callable[[Any], None], hold_s: float, answers: bool) -> Cancel:
        if (error := self._fatal_error()) is not None:
            raise error
        self.admission.check(answers)
        check_request(request, self.model, self.state.rules, answers)
        text = Detokenizer(self.model.tokenizer, request.sampling.stop) if answers else None
        cache = self.pool.cache(request.page_salt, request.adapter) if request.use_pool else None
        work = Work(next(self._numbers), request, emit, text, self.layout.page_tokens, cache, answers, self.state.rules)
        stored = 0
        if answers and request.prefill is None and (self.config.prefill or self._prefill_engines):
            stored = self.pool.count_stored(work, work.prompt // work.page_tokens, arenas=True) * work.page_tokens
        with self._entry:
            self.admission.enter(request.id, work.number)
        self.performer.works[work.number] = work
        if not answers:
            self.prefills.add(work)
        self.inbox.post(
            ev.Submitted(
                work.started_s,
                work.number,
                request.id,
                prompt=work.prompt,
                generated=request.generated,
                tokens_max=request.sampling.max_tokens,
                deadline_s=work.deadline_s,
                role=self.admission.role,
                answers=answers,
                hold_s=hold_s,
                engines=request.prefill,
                stored=stored,
                lazy=(request.handoff or self.config.handoff) is Timing.LAZY,
                stopped=work.stopped,
                names=work.page_names(),
            )
        )
        if (error := self._fatal_error()) is not None:  # the thread may have ended before it could see this request
            work.fail(error)
        return partial(self._cancel, work.number)

    def _fatal_error(self) -> NodeUnavailable | None:
        return NodeUnavailable(self._fatal) if self._fatal else None

    def _forget(self, request_id: str) -> None:
        with self._entry:
            self.admission.leave(request_id)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # our own bug: the engine computes nothing more, and every caller gets an error
            self._fatal = f"engine stopped after an internal error: {type(error).__name__}: {error}"
            self.admission.draining = True
            self.state.stopped = self.state.stopped or NodeUnavailable(self._fatal)
            self.mounted.end(self._fatal)
            self.performer.abandon(NodeUnavailable(self._fatal))
            with self._entry:
                self.admission.numbers.clear()
            raise

    def _serve(self) -> None:
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        idle_s = 0.0
        while not self._stopping:
            with _DECIDED:
                for event in self.inbox.take(idle_s):
                    self._guarded(partial(self.performer.handle, event))
                idle_s = 0.0 if self._guarded(self.performer.turn) else IDLE_S
        self.performer.handle(ev.Stop(time.monotonic()))
        until_s = time.monotonic() + QUIET_S
        while self.remains() and time.monotonic() < until_s:
            for event in self.inbox.take(IDLE_S):
                self._guarded(partial(self.performer.handle, event))
        log.info("ended; %d of %d frames free", self.state.roster.frames.free, self.arena.frames_total)

    def _guarded(self, action: Callable[[], bool | None]) -> bool:
        """Run ``action``. Returns its result, or False if the device is lost.

        If the device is lost, all requests fail, and the engine refuses new ones.
        """
        try:
            with computing_on(self.arena.device):
                return bool(action())
        except DeviceLost as error:
            log.error("the engine can no longer serve requests: %s", error)
            self.performer.handle(ev.DeviceFailed(time.monotonic(), ev.device_failed(error)))
            return False
