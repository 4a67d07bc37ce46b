"""A proxy of an engine's gRPC API, in this process: its reports can be held back, and its answers made endless."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from engine.api.wire import SERVICE
from kvstore.pb import engine_pb2
from tests.helpers.conductors import ANSWER_S

CALLS = 16
PIECE = "x" * (64 << 10)  # the text of a token of an endless answer
FLOOD_BYTES = 512 << 20  # where nobody holds it up, it ends here


class EngineProxy:
    """Passes calls on to a real engine. Life: made (it serves) -> ``close``.

    Attributes:
        passes: where it is cleared, reports wait until it is set. They were true when they were asked for.
        floods: answers are endless, and made here.
        asked: reports.
        told_bytes: of endless answers.
    """

    def __init__(self, engine: str) -> None:
        self.passes, self.floods = threading.Event(), False
        self.passes.set()
        self.asked = self.told_bytes = 0
        self._channel = grpc.insecure_channel(engine)
        handlers = {
            "Status": grpc.unary_unary_rpc_method_handler(self._status),
            "Submit": grpc.unary_stream_rpc_method_handler(self._submit),
        }
        self._server = grpc.server(ThreadPoolExecutor(CALLS), options=[("grpc.http2.max_ping_strikes", 0)])
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        """Nothing is answered any more."""
        self.passes.set()
        self._server.stop(0).wait(ANSWER_S)
        self._channel.close()

    def _status(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        self.asked += 1
        try:
            report: bytes = self._channel.unary_unary(f"/{SERVICE}/Status")(message, timeout=ANSWER_S)
        except grpc.RpcError as error:
            context.abort(error.code(), "the engine does not answer")
        self.passes.wait(ANSWER_S)
        return report

    def _submit(self, message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        if self.floods:
            yield from self._flood()
            return
        try:
            call = self._channel.unary_stream(f"/{SERVICE}/Submit")(message, timeout=ANSWER_S)
            context.add_callback(call.cancel)
            yield from call
        except grpc.RpcError as error:
            context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
            context.abort(error.code(), error.details() or "the engine does not answer")

    def _flood(self) -> Iterator[bytes]:
        for index in range(FLOOD_BYTES // len(PIECE)):
            token = engine_pb2.Token(id=1, index=index, text=PIECE)
            yield engine_pb2.SubmitReply(tokens=engine_pb2.Tokens(tokens=[token])).SerializeToString()
            self.told_bytes += len(PIECE)
