"""What a client can make the HTTP server hold, and what it does with anything that is no request."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.conductor.http.connection import HttpPatience
from engine.conductor.http.server import BODY_BYTES_MAX
from tests.helpers.http_server import BIG_TEXT, RunningServer, head_of, read_all, replies_in, serve_openai
from tests.helpers.processes import wait_until

ENDS_S = 10.0  # ten times as long as the server is told to wait here
HURRIED = HttpPatience(headers_s=1.0, keepalive_s=1.0, body_s=1.0, stall_s=1.0)
WORDS = json.dumps({"model": "words", "prompt": "a", "max_tokens": 2}).encode()
SEED = 7
ROUNDS, CLIENTS = 300, 16
BUFFERS_BYTES = 32 << 20  # more than a kernel keeps for one connection; a fraction of what "floods" has


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serve_openai(patience=HURRIED, routes={"/healthz": lambda: (200, "text/plain", "ok\n")}) as running:
        yield running


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HT", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nA: b"])
def test_headers_that_do_not_come_end_the_connection(server: RunningServer, sent: bytes) -> None:
    with server.connect(ENDS_S) as connection:
        connection.sendall(sent)
        assert read_all(connection) == b""


def test_headers_that_drip_end_it_as_soon(server: RunningServer) -> None:
    with server.connect(0.05) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\n")

        def dripped() -> bool:
            try:
                connection.sendall(b"A: b\r\n")
                return connection.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        wait_until("it is cut off", dripped, ENDS_S)


def test_a_body_that_does_not_come_is_told_so(server: RunningServer) -> None:
    with server.connect(ENDS_S) as connection:
        connection.sendall(head_of(100) + b'{"model"')
        ((status, body),) = replies_in(read_all(connection))
        assert status == 408 and json.loads(body)["error"]["code"] == "request_timeout"


def test_a_client_that_reads_nothing_costs_what_its_connection_holds_and_is_cut_off(server: RunningServer) -> None:
    asked = json.dumps({"model": "floods", "prompt": "a", "stream": True}).encode()
    with server.connect() as connection:
        connection.sendall(head_of(len(asked)) + asked)
        wait_until("it flows", lambda: server.answers.drawn["floods"])
        wait_until("its answer has ended", lambda: not server.answers.open["floods"], ENDS_S)
        assert server.answers.drawn["floods"] * len(BIG_TEXT) < BUFFERS_BYTES


def test_large_requests_are_refused_before_they_are_read(server: RunningServer) -> None:
    with server.connect(ENDS_S) as connection:
        connection.sendall(head_of(BODY_BYTES_MAX + 1))
        assert b" 413 " in connection.recv(65536)
    with server.connect(ENDS_S) as connection:  # of unknown length
        connection.sendall(head_of(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"))
        piece = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        try:
            for _ in range(BODY_BYTES_MAX // (1 << 20) + 1):
                connection.sendall(piece)
        except ConnectionError:
            pass
        assert b" 413 " in connection.recv(65536)
    for head in (head_of(0, f"A: {'b' * 9000}"), head_of(0, *(f"A{number}: b" for number in range(200)))):
        with server.connect(ENDS_S) as connection:
            connection.sendall(head)
            ((status, body),) = replies_in(read_all(connection))
            assert status in (400, 431) and json.loads(body)["error"]["type"] == "invalid_request_error"


# --- Anything at all -------------------------------------------------------------------------------------------------


def mangled(chance: random.Random, data: bytes) -> bytes:
    """``data`` with something wrong with it."""
    found = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(found) + 1)
        stop = min(len(found), start + chance.randint(0, 12))
        match chance.randrange(4):
            case 0:
                found[start:stop] = chance.randbytes(stop - start)
            case 1:
                del found[start:stop]
            case 2:
                found[start:start] = found[start:stop] * chance.randint(1, 3)
            case _:
                found[start:stop] = chance.choice((b"\r\n", b"\0", b'"', b"{", b"]", b"null", b"-1", b"1e999", b"\xff"))
    return bytes(found)


def a_value(chance: random.Random, depth: int = 2) -> object:
    """Any JSON value."""
    plain = (None, True, 0, -1, 1 << 80, 1.5, "", "words", "\ud800", "a\0b", [], {}, "x" * 300)
    if depth and chance.random() < 0.4:
        inner = [a_value(chance, depth - 1) for _ in range(chance.randrange(3))]
        return inner if chance.random() < 0.5 else {str(value)[:9]: value for value in inner}
    return chance.choice(plain)


def a_request(chance: random.Random) -> bytes:
    """One that is wrong as a document, or as HTTP."""
    path, asked = chance.choice(
        (
            ("/v1/completions", {"model": "words", "prompt": "a", "max_tokens": 2}),
            ("/v1/completions", {"model": "words", "prompt": [[1], [2]], "max_tokens": 2, "stream": True, "n": 2}),
            ("/v1/chat/completions", {"model": "words", "messages": [{"role": "user", "content": "a"}]}),
        )
    )
    names = (*asked, "n", "stop", "seed", "stream_options", "kvstore", "logit_bias", "tools", "user", "temperature")
    for _ in range(chance.randrange(3)):
        asked[chance.choice(names)] = a_value(chance)
    body = json.dumps(asked).encode()
    if chance.random() < 0.3:
        body = mangled(chance, body)
    request = head_of(len(body), "Connection: close", path=path) + body
    return mangled(chance, request) if chance.random() < 0.3 else request


def test_whatever_is_sent_the_server_answers_in_its_shape_and_stays_open(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(SEED)
    requests = [a_request(chance) for _ in range(ROUNDS)]

    def send(request: bytes) -> list[tuple[int, bytes]]:
        with server.connect(ENDS_S) as connection:
            connection.sendall(request)
            return replies_in(read_all(connection))

    with ThreadPoolExecutor(CLIENTS) as clients:  # some wait for what does not come
        replies = list(clients.map(send, requests))
    seen = {status for found in replies for status, _ in found}
    for request, found in zip(requests, replies, strict=True):
        for status, body in found:
            assert status in (200, 400, 401, 403, 404, 405, 408, 413, 415, 431), (request, status, body)
            if status != 200:
                error = json.loads(body)["error"]
                assert set(error) == {"message", "type", "param", "code"} and error["message"], (request, body)
    assert {200, 400, 404} <= seen
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    wait_until("nothing is left of it", lambda: not +server.answers.open)
    with server.connect(ENDS_S) as connection:
        connection.sendall(head_of(len(WORDS), "Connection: close") + WORDS)
        ((status, _),) = replies_in(read_all(connection))
        assert status == 200
