"""EngineServer: the gRPC API of an engine.

Identities, limits, deadlines and error names are those of a node's API: the same gate.
"""

from __future__ import annotations

import contextlib
from typing import Final

import grpc

from engine.api.metrics import EngineTally
from engine.api.pulling import PullServer
from engine.api.service import EngineCalls, Owners, Served, ServedEngine
from engine.api.wire import SERVICE
from engine.config import EngineConfig
from kvstore.server.gate import Gate
from kvstore.server.grpc_server import Limits, LoopServer, serving
from kvstore.server.request_cost import weighed

PING_MS_MIN: Final = 1000  # its clients watch it closely
MESSAGE_BYTES_ALL: Final = 256 << 20  # large requests, all together


class EngineServer(LoopServer):
    """Serves from ``start`` to ``stop``."""

    def __init__(self, config: EngineConfig, engine: ServedEngine, model: Served, tally: EngineTally) -> None:
        limits = Limits(
            rpcs_max=config.rpcs_max,
            call_s_max=config.request_s_max,
            buffer_bytes=MESSAGE_BYTES_ALL,
            streams_max=config.rpcs_max,
            ping_ms_min=PING_MS_MIN,
        )
        super().__init__("engine-api", SERVICE, config, limits)
        self._served = config, engine, model, tally
        self._owners = Owners(config.requests_max)
        self._pulls = PullServer(config, engine, self.identities.find, self._owners.find)

    def start(self) -> None:
        """See ``LoopServer``; then the data connections, next to each address."""
        super().start()
        self._pulls.start(self.addresses)

    def stop(self) -> None:
        """See ``LoopServer``."""
        super().stop()
        self._pulls.stop()

    def _open(self, gate: Gate, ends: contextlib.ExitStack) -> grpc.GenericRpcHandler:
        self._calls = calls = EngineCalls(*self._served, self._owners, lambda: self._pulls.port)
        unary = {
            "Release": calls.release,
            "Cancel": calls.cancel,
            "Status": calls.status,
            "SetRole": calls.set_role,
            "Migrate": calls.migrate,
            "Drain": calls.drain,
        }
        sending = {"Submit": calls.submit, "Prefill": calls.prefill}
        return serving(gate, SERVICE, weighed(SERVICE, unary), weighed(SERVICE, sending))

    def _calls_ended(self) -> None:
        self._calls.close()
