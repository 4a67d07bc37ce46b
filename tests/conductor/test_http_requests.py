"""What goes with a reply over HTTP: the id of its request, whether to ask again, the end of its connection."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx2
import numpy as np
import pytest

from engine.conductor.http.connection import HttpPatience
from engine.conductor.http.openai_errors import refusal_of
from kvstore.errors import DeadlineExceeded
from tests.helpers.api import Certificates, identities_file
from tests.helpers.backend import spawn_backend
from tests.helpers.conductors import ConductorProcess, client_of, serve_conductor
from tests.helpers.http_server import (
    CALL_S,
    WORDS,
    RunningServer,
    ask,
    head_of,
    post,
    read_all,
    refused,
    replies_in,
    serve_openai,
)
from tests.helpers.processes import Machine, wait_until

ROUTES = {"/healthz": lambda: (200, "text/plain", "ok\n"), "/metrics": lambda: (200, "text/plain", "up 1\n")}
BODY = json.dumps(WORDS).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serve_openai(ROUTES) as running:
        yield running


# --- headers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["a", "trace-7/span:1.2_3=+", "x" * 128])
def test_a_request_keeps_the_id_that_its_client_gave(server: RunningServer, given: str) -> None:
    response = post(server, WORDS, **{"X-Request-Id": given})
    assert response.headers["x-request-id"] == given and response.json()["id"].startswith("cmpl-")
    assert server.answers.requests[-1].id.startswith(given)
    for body, status in ((WORDS | {"model": "none"}, 404), (WORDS | {"model": "busy"}, 429), (b"{", 400)):
        response = post(server, body, **{"X-Request-Id": given})
        assert response.status_code == status and response.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", 'a"b', "<a>", "é"])
def test_an_id_that_is_long_or_not_plain_is_not_taken_up(server: RunningServer, given: str) -> None:
    with server.connect(CALL_S) as connection:
        line = "X-Request-Id: " + given
        connection.sendall(head_of(len(BODY), "Connection: close", line) + BODY)
        found = read_all(connection)
    (id,) = re.findall(rb"(?i)\r\nx-request-id: ([^\r]*)\r\n", found)
    assert found.startswith(b"HTTP/1.1 200 ") and id.startswith(b"cmpl-")


@pytest.mark.parametrize(
    ("model", "status", "again"),
    [("busy", 429, "true"), ("gone", 503, "true"), ("bug", 500, "false"), ("none", 404, "false")],
)
def test_a_refusal_says_whether_to_ask_again(server: RunningServer, model: str, status: int, again: str) -> None:
    response = post(server, WORDS | {"model": model})
    assert (response.status_code, response.headers["x-should-retry"]) == (status, again)


def test_a_missed_deadline_is_not_asked_again() -> None:
    refusal = refusal_of(DeadlineExceeded("late"))
    assert (refusal.status, refusal.headers["x-should-retry"]) == (504, "false")


def test_no_reply_tells_what_serves(server: RunningServer) -> None:
    with server.connect(CALL_S) as connection:
        connection.sendall(b"NOT HTTP AT ALL\r\n\r\n")
        garbage = read_all(connection)
    replies = [
        post(server, WORDS),
        post(server, b"{"),
        post(server, WORDS | {"model": "bug"}),
        httpx2.get(f"{server.url}/no"),
    ]
    assert {reply.headers["Server"] for reply in replies} == {"kvstore"}
    assert b"\r\nServer: kvstore\r\n" in garbage and b"aiohttp" not in garbage


# --- how long a connection is kept -------------------------------------------------------------------------------


def test_an_idle_connection_is_kept_longer_than_headers_may_take() -> None:
    patience = HttpPatience(headers_s=1.5, keepalive_s=60.0)
    with serve_openai(ROUTES, patience) as server, server.connect(CALL_S) as used, server.connect(CALL_S) as silent:
        used.sendall(head_of(len(BODY)) + BODY)
        assert used.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert read_all(silent) == b"", "a connection without a request is closed after headers_s"
        time.sleep(0.5)
        used.sendall(head_of(len(BODY)) + BODY)
        assert used.recv(65536).startswith(b"HTTP/1.1 200 ")
        used.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        assert read_all(used) == b"", "the next request's headers have headers_s from their first byte on"


def test_an_idle_connection_is_closed_after_its_setting() -> None:
    with serve_openai(ROUTES, HttpPatience(keepalive_s=0.5)) as server, server.connect(CALL_S) as used:
        used.sendall(head_of(len(BODY)) + BODY)
        assert used.recv(65536).startswith(b"HTTP/1.1 200 ") and read_all(used) == b""


def test_new_connections_are_shown_a_certificate_that_was_renewed(tmp_path: Path) -> None:
    made: dict[str, Certificates] = {}
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        made[name] = Certificates(tmp_path / name)
    served = tmp_path / "served"
    shutil.copytree(tmp_path / "old", served)

    def trusts(server: RunningServer, name: str) -> bool:
        trust = ssl.create_default_context(cafile=made[name].path("ca.pem"))
        try:
            with trust.wrap_socket(server.connect(CALL_S), server_hostname="localhost") as connection:
                return ask(connection, "a") == 200
        except ssl.SSLError:
            return False

    keys = identities_file(tmp_path)
    with serve_openai(identities=keys, tls_cert=served / "server.pem", tls_key=served / "server.key") as server:
        assert trusts(server, "old") and not trusts(server, "new")
        for name in ("server.key", "server.pem"):
            shutil.copy(made["new"].path(name), served / "draft")
            (served / "draft").chmod(0o600)
            (served / "draft").rename(served / name)
        wait_until("the new one is shown", lambda: trusts(server, "new"), CALL_S)
        assert not trusts(server, "old")


# --- draining --------------------------------------------------------------------------------------------------------


def test_a_server_that_drains_refuses_new_requests_and_closes_their_connections() -> None:
    with serve_openai(ROUTES) as server, server.connect(CALL_S) as old, server.connect(CALL_S) as running:
        old.sendall(head_of(len(BODY)) + BODY)
        assert old.recv(65536).startswith(b"HTTP/1.1 200 ")
        hanging = json.dumps(WORDS | {"model": "hangs"}).encode()
        running.sendall(head_of(len(hanging)) + hanging)
        wait_until("it runs", lambda: server.answers.open["hangs"] == 1)
        server.http.drain()
        for connection in (old, server.connect(CALL_S)):
            with contextlib.closing(connection):
                connection.sendall(head_of(len(BODY)) + BODY)
                found = read_all(connection)
                ((status, body),) = replies_in(found)
                assert status == 503 and json.loads(body)["error"]["code"] == "draining"
                assert b"\r\nConnection: close\r\n" in found and b"\r\nx-should-retry: true\r\n" in found
        response = httpx2.get(f"{server.url}/healthz")
        assert response.status_code == 200 and response.headers["Connection"] == "close"
        assert server.answers.open["hangs"] == 1, "what runs goes on"


def conductor_of(machine: Machine, folder: Path, url: str, **flags: str) -> ConductorProcess:
    settings = folder / "conductor.toml"
    settings.write_text(f"[conductor]\nbackend = [{json.dumps(url)}]\n")
    return serve_conductor(machine, config=str(settings), http="127.0.0.1:0", **flags)


def test_a_conductor_that_is_told_to_end_answers_what_runs_and_nothing_new(machine: Machine, tmp_path: Path) -> None:
    backend = spawn_backend(machine).wait_ready()
    conductor = conductor_of(machine, tmp_path, backend.words(), drain_s="60")
    url = f"http://{conductor.http}"
    wait_until("the back end is known", lambda: httpx2.get(f"{url}/v1/models").json()["data"])
    backend.tell(traits={"step_s": 0.03})
    host, _, port = conductor.http.rpartition(":")
    asked = json.dumps({"model": "words", "prompt": "abc", "max_tokens": 100, "stream": True}).encode()
    with socket.create_connection((host, int(port)), CALL_S) as running, httpx2.Client(base_url=url) as kept:
        assert kept.get("/readyz").text == "ready\n"
        running.sendall(head_of(len(asked), "Connection: close") + asked)
        first = running.recv(65536)
        conductor.signal(signal.SIGTERM)
        wait_until("it drains", lambda: httpx2.get(f"{url}/readyz").text == "draining\n", CALL_S)
        for client in (kept, httpx2.Client(base_url=url)):
            response = client.post("/v1/completions", json={"model": "words", "prompt": "abc", "max_tokens": 2})
            assert refused(response, 503)["code"] == "draining" and response.headers["Connection"] == "close"
        with client_of(conductor) as over_grpc, pytest.raises(grpc.RpcError, match="draining"):
            over_grpc.answer(np.arange(20, dtype=np.uint32))
        rest = read_all(running)
    assert (first + rest).count(b"data: ") > 50 and b"data: [DONE]" in rest
    assert conductor.wait(CALL_S) == 0
