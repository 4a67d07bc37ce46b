"""A collector of OpenTelemetry spans: OTLP over HTTP, as a real one takes it."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Listens from the beginning to ``close``. ``hold`` makes it swallow requests without an answer."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.paths: set[str] = set()
        self.hold = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                while collector.hold.is_set() and not collector._closed.wait(0.05):
                    pass
                collector.paths.add(self.path)
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        self._closed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a daemon that did not wait for us
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def spans(self) -> list[Span]:
        """All that came."""
        return [s for r in list(self.requests) for rs in r.resource_spans for ss in rs.scope_spans for s in ss.spans]

    def named(self, name: str) -> list[Span]:
        """Those of this name."""
        return [span for span in self.spans if span.name == name]

    def resources(self) -> dict[str, str]:
        """What the last sender says of itself."""
        found = self.requests[-1].resource_spans[0].resource.attributes
        return {attribute.key: attribute.value.string_value for attribute in found}

    def close(self) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)


def attributes(span: Span) -> dict[str, Any]:
    """A span's attributes as Python values."""
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}
