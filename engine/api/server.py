"""EngineServer: the gRPC server of an engine, in a thread and an event loop of its own.

Identities, limits, deadlines and what errors are called are those of a node's API: the same gate.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import grpc.aio
from grpc_health.v1 import health

from engine.api.metrics import Tally
from engine.api.service import Engine, EngineCalls, Served
from engine.api.wire import SERVICE
from engine.config import EngineConfig
from kvstore.service.api.methods import GateOthers, serving
from kvstore.service.api.server import add_others, log_unexpected, options
from kvstore.serving import listening
from kvstore.serving.gate import CALLS_OUTSIDE, Gate
from kvstore.serving.identities import Identities
from kvstore.serving.lanes import Threads
from kvstore.serving.loop import LoopServer
from kvstore.serving.weighing import weighed

GRACE_S: Final = 2.0  # for calls under way when the engine ends
PING_MS_MIN: Final = ("grpc.http2.min_ping_interval_without_data_ms", 1000)  # its clients watch it closely
MESSAGE_BYTES_ALL: Final = 256 << 20  # large requests, all together


class EngineServer(LoopServer):
    """Serves from ``start`` to ``stop``.

    Raises:
        InvalidRequest: what is configured would let strangers in, or show tokens; names the setting and the remedy.
    """

    def __init__(self, config: EngineConfig, engine: Engine, model: Served, tally: Tally) -> None:
        super().__init__("engine-api", Identities(config.identities))
        self._plan = listening.plan(config, self.identities)
        self._config = config
        self._engine = engine
        self._model = model
        self._tally = tally
        self._alive: health.aio.HealthServicer | None = None

    def retire(self) -> None:
        """Say by the health service that others should be asked. Calls are served as before."""
        if self._loop is not None and self._alive is not None:
            leaving = self._alive.enter_graceful_shutdown()
            with contextlib.suppress(RuntimeError):
                asyncio.run_coroutine_threadsafe(leaving, self._loop)

    async def _run(self, stopping: asyncio.Event) -> None:
        asyncio.get_running_loop().set_exception_handler(log_unexpected)
        config, threads = self._config, Threads()
        gate = Gate(self.identities, threads, config.rpcs_max, config.request_s_max, MESSAGE_BYTES_ALL)
        calls = EngineCalls(config, self._engine, self._model, self._tally)
        with contextlib.ExitStack() as ends:
            ends.callback(threads.close)
            ends.callback(calls.close)
            server = grpc.aio.server(
                options=list(
                    {**dict(options(config.rpcs_max, config.rpcs_max)), PING_MS_MIN[0]: PING_MS_MIN[1]}.items()
                ),
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
            server.add_generic_rpc_handlers(
                (serving(gate, SERVICE, weighed(SERVICE, unary), weighed(SERVICE, sending)),)
            )
            self._alive = await add_others(server, SERVICE)
            self.addresses = self._plan.bind(server)
            await server.start()
            self._gate = gate
            self._started.set()
            measuring = asyncio.create_task(gate.keep_looking())
            try:
                await stopping.wait()
            finally:
                measuring.cancel()
                await self._alive.enter_graceful_shutdown()
                await server.stop(GRACE_S)
                self._plan.unlink()
