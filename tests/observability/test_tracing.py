"""Spans of a real daemon at a real collector; none of it where it is not asked for; a collector that is down."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kvstore.pb import store_pb2 as pb
from tests.helpers.api import Client, identities_file, pages_message, serve_api
from tests.helpers.collector import Collector, attributes
from tests.helpers.content import chain
from tests.helpers.processes import Machine, put, wait_until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    try:
        yield collector
    finally:
        collector.close()


def test_spans_of_start_calls_and_demotion(machine: Machine, collector: Collector, tmp_path: Path) -> None:
    identities = identities_file(tmp_path)
    flags = {"nvme": f"{tmp_path}/disk:64MiB", "demote_at": "0", "identities": identities}
    daemon, api = serve_api(machine, "traced", otlp_endpoint=collector.endpoint, **flags)
    store = machine.connect("traced")
    put(store, 1, 16)
    wait_until("the pages are saved", lambda: store.stats()["tiers"]["nvme"]["pages"] == 16)
    client = Client(api, "a-token")
    request = pb.LookupRequest(pages=pages_message(chain(1, 4), salt="a"))
    client.metadata += (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
    assert client.code("Lookup", request).name == "OK"
    client.metadata = (*client.metadata[:1], ("traceparent", "nonsense"))
    assert client.code("Lookup", request).name == "OK"
    request.pages.salt = "b"
    client.metadata = client.metadata[:1]
    assert client.code("Lookup", request).name == "PERMISSION_DENIED"
    client.close()
    assert daemon.terminate() == 0  # what waits is sent
    assert collector.paths == {"/v1/traces"}
    said = collector.resources()
    assert (said["service.name"], said["service.instance.id"]) == ("kvstore", "traced")
    (start,) = collector.named("kvstore.start")
    assert attributes(start)["node"] == "traced"
    saved = collector.named("kvstore.demote")
    assert sum(attributes(span)["pages"] for span in saved) == 16
    assert all(span.end_time_unix_nano > span.start_time_unix_nano for span in (start, *saved))
    propagated, alone, refused = collector.named("kvstore.grpc Lookup")
    assert (propagated.trace_id.hex(), propagated.parent_span_id.hex()) == (TRACE, PARENT)
    assert alone.parent_span_id == b"" and alone.trace_id.hex() != TRACE
    codes = [attributes(span)["rpc.grpc.status"] for span in (propagated, alone, refused)]
    assert codes == ["OK", "OK", "PERMISSION_DENIED"]
    assert [span.status.code == Status.STATUS_CODE_ERROR for span in (propagated, alone, refused)] == [
        False,
        False,
        True,
    ]
    assert propagated.kind == Span.SPAN_KIND_SERVER


def test_a_collector_that_is_down_does_no_harm(machine: Machine, collector: Collector) -> None:
    """Neither one that refuses, nor one that takes requests and never answers; and the queue has a bound."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        refusing = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    collector.hold.set()
    daemons = []
    for name, endpoint in (("refusing", refusing), ("silent", collector.endpoint)):
        daemon, api = serve_api(machine, name, otlp_endpoint=endpoint, log_format="json")
        client, request = Client(api), pb.LookupRequest(pages=pages_message(chain(1, 1)))
        for _ in range(100):
            assert client.call("Lookup", request).pages == 0
        assert put(machine.connect(name), 1, 8) == 8
        client.close()
        daemons.append(daemon)
    begin = time.monotonic()
    for daemon in daemons:
        daemon.signal(signal.SIGTERM)
    assert [daemon.wait() for daemon in daemons] == [0, 0]
    assert time.monotonic() - begin < 25, "they end all the same"
    assert all(len(daemon.errors.read_text().splitlines()) < 30 for daemon in daemons), daemons[0].trace()


def test_off_means_not_even_imported() -> None:
    script = (
        "import sys, kvstore; from kvstore.node import daemon; from kvstore.server import tracing\n"
        "with tracing.span('x', pages=1) as span: span.set_attribute('y', 2)\n"
        "print([name for name in sys.modules if 'opentelemetry' in name])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
