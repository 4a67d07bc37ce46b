"""EngineServer: the gRPC server of an engine, in a thread and an event loop of its own.

Identities, limits, deadlines and what errors are called are those of a node's API: the same gate.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Final

import grpc.aio
from grpc_health.v1 import health

from engine.config import EngineConfig
from engine.metrics import Tally
from engine.service import Engine, EngineCalls, Served
from engine.wire import SERVICE
from kvstore.errors import InvalidRequest
from kvstore.service.api import listening
from kvstore.service.api.gate import CALLS_OUTSIDE, Gate, Threads
from kvstore.service.api.identities import Identities
from kvstore.service.api.methods import GateOthers, serving
from kvstore.service.api.server import add_others, log_unexpected, options
from kvstore.service.api.watching import Calls

START_S: Final = 10.0
GRACE_S: Final = 2.0  # for calls under way when the engine ends
STOP_S: Final = 10.0
PING_MS_MIN: Final = ("grpc.http2.min_ping_interval_without_data_ms", 1000)  # its clients watch it closely
MESSAGE_BYTES_ALL: Final = 256 << 20  # large requests, all together


class EngineServer:
    """Serves from ``start`` to ``stop``.

    Raises:
        InvalidRequest: what is configured would let strangers in, or show tokens; names the setting and the remedy.
    """

    def __init__(self, config: EngineConfig, engine: Engine, model: Served, tally: Tally) -> None:
        self.addresses: list[str] = []
        self.identities = Identities(config.identities)
        self._plan = listening.plan(config, self.identities)
        self._config = config
        self._engine = engine
        self._model = model
        self._tally = tally
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="engine-api", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._alive: health.aio.HealthServicer | None = None
        self._gate: Gate | None = None

    def start(self) -> None:
        """Listen and serve. ``addresses`` says where then. Raises InvalidRequest where an address cannot be had."""
        self._thread.start()
        if not self._started.wait(START_S):
            raise InvalidRequest("listen", f"did not begin within {START_S:g} s")
        if self._failure is not None:
            raise self._failure

    @property
    def calls(self) -> Calls | None:
        """What became of all calls; None before ``start``."""
        return self._gate.calls if self._gate is not None else None

    def reload(self) -> None:
        """Read the identities again. For a signal handler: it only asks the loop to."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self.identities.reload)

    def retire(self) -> None:
        """Say by the health service that others should be asked. Calls are served as before."""
        if self._loop is not None and self._alive is not None:
            leaving = self._alive.enter_graceful_shutdown()
            with contextlib.suppress(RuntimeError):
                asyncio.run_coroutine_threadsafe(leaving, self._loop)

    def stop(self) -> None:
        """Take no more calls, and end those under way: by themselves within ``GRACE_S``, or cancelled."""
        if self._loop is not None and self._stopping is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)
        if self._thread.ident is not None:
            self._thread.join(STOP_S)

    def _serve(self) -> None:
        try:
            asyncio.run(self._run())
        except InvalidRequest as error:
            if self._started.is_set():
                raise
            self._failure = error
            self._started.set()

    async def _run(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(log_unexpected)
        config, threads = self._config, Threads()
        gate = Gate(self.identities, threads, config.rpcs_max, config.request_s_max, MESSAGE_BYTES_ALL)
        calls = EngineCalls(config, self._engine, self._model, self._tally)
        with contextlib.ExitStack() as ends:
            ends.callback(threads.close)
            ends.callback(calls.close)
            server = grpc.aio.server(
                options=list({**dict(options(config.rpcs_max)), PING_MS_MIN[0]: PING_MS_MIN[1]}.items()),
                interceptors=[GateOthers(gate, SERVICE)],
                maximum_concurrent_rpcs=CALLS_OUTSIDE * config.rpcs_max,
            )
            unary = {
                "Release": calls.release,
                "Cancel": calls.cancel,
                "Status": calls.status,
                "SetRole": calls.set_role,
                "Migrate": calls.migrate,
                "Drain": calls.drain,
            }
            sending = {"Submit": calls.submit, "Prefill": calls.prefill, "Pull": calls.pull}
            server.add_generic_rpc_handlers((serving(gate, SERVICE, unary, sending),))
            self._alive = await add_others(server, SERVICE)
            self.addresses = self._plan.bind(server)
            await server.start()
            self._gate = gate
            self._started.set()
            try:
                await self._stopping.wait()
            finally:
                await self._alive.enter_graceful_shutdown()
                await server.stop(GRACE_S)
                self._plan.unlink()
