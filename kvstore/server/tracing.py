"""Tracing: OpenTelemetry spans of a daemon's work, sent over OTLP/HTTP to ``otlp_endpoint``.

``with tracing.span("kvstore.demote", pages=7) as span: ... span.set_attribute("bytes", 458752)`` costs a function call
if no endpoint is configured. The packages (the ``otel`` extra) are imported only if one is.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from kvstore import about
from kvstore.errors import InvalidRequest

SPANS_WAITING_MAX = 2048  # further spans are dropped
EXPORT_TIMEOUT_S = 5.0
FLUSH_S = 3.0


class TraceSpan(Protocol):
    """A span as ``span`` yields it."""

    def set_attribute(self, key: str, value: Any) -> None:
        """Add an attribute."""
        ...


class _NoSpan:
    """The span that is used if tracing is off. Stateless, so one instance is enough."""

    def __enter__(self) -> _NoSpan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""

    def set_attribute(self, key: str, value: Any) -> None:
        """Do nothing."""


_NO_SPAN = _NoSpan()
_tracer: Any = None
_provider: Any = None
_propagator: Any = None
_kinds: Any = None


def configure(endpoint: str, node: str) -> None:
    """Send spans of this process to ``endpoint`` (such as ``http://127.0.0.1:4318``) until ``shutdown``.

    Raises:
        InvalidRequest: the packages are not installed.
    """
    global _tracer, _provider, _propagator, _kinds
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError as error:
        raise InvalidRequest("otlp_endpoint", f"needs the extra kvstore[otel]: {error}") from None
    resource = Resource.create({"service.name": "kvstore", "service.instance.id": node})
    _provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)
    _provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=SPANS_WAITING_MAX))
    _kinds = SpanKind
    _propagator = TraceContextTextMapPropagator()
    _tracer = _provider.get_tracer("kvstore", about.version())


def shutdown() -> None:
    """Send waiting spans, for at most ``FLUSH_S``, and make no more spans."""
    global _tracer, _provider
    provider, _tracer, _provider = _provider, None, None
    if provider is not None:
        thread = threading.Thread(target=provider.shutdown, name="kvstore-tracing", daemon=True)
        thread.start()
        thread.join(FLUSH_S)  # its own deadline is half a minute


def enabled() -> bool:
    """True if spans are made."""
    return _tracer is not None


def span(name: str, traceparent: str | None = None, **attributes: Any) -> AbstractContextManager[TraceSpan]:
    """Make a span around the body of a ``with``. An exception marks the span as failed, and is passed on.

    Args:
        traceparent: for a call from another process, the header that names the parent span (W3C Trace Context); "" if
            the call has none. None: the work was not called by another process.
    """
    tracer = _tracer
    if tracer is None:
        return _NO_SPAN
    kind, context = _kinds.INTERNAL, None
    if traceparent is not None:
        kind, context = _kinds.SERVER, _propagator.extract({"traceparent": traceparent})
    made: AbstractContextManager[TraceSpan] = tracer.start_as_current_span(name, context, kind, attributes)
    return made
