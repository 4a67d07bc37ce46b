"""Strangers and greedy tenants at the HTTP server of a conductor: others are answered as before."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.conductor.http import connection as http_connection
from engine.conductor.http import server as openai_server
from engine.conductor.http.openai_schema import SMALL_BYTES
from engine.conductor.http.prompts import PromptTokenizer
from tests.helpers.api import TENANTS, Certificates, identities_file
from tests.helpers.beacon import Beacon
from tests.helpers.http_server import CALL_S, WORDS, ask, head_of, key, read_all, serve_openai
from tests.helpers.processes import wait_until

DELAY_S_MAX = 1.0  # of a caller, less the stall that a beacon observed
WINDOW_S = 1.5


@contextlib.contextmanager
def beside(work: Callable[[threading.Event], object], threads: int = 1) -> Iterator[None]:
    """Do ``work`` in threads while the block runs; it ends when its event is set."""
    over = threading.Event()
    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(work, over) for _ in range(threads)]
        try:
            yield
        finally:
            over.set()
    for each in running:
        each.result()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few connections and requests, so that a test has more."""
    monkeypatch.setattr(http_connection, "CONNECTIONS_MAX", 60)
    monkeypatch.setattr(openai_server, "REQUESTS_MAX", 40)


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return identities_file(tmp_path, TENANTS)


@pytest.fixture
def tls(tmp_path: Path) -> tuple[dict[str, Path], ssl.SSLContext]:
    made = Certificates(tmp_path)
    trust = ssl.create_default_context(cafile=made.path("ca.pem"))
    trust.check_hostname = False
    return {"tls_cert": Path(made.path("server.pem")), "tls_key": Path(made.path("server.key"))}, trust


def test_half_sent_requests_of_one_tenant_leave_room_for_others(few: None, keys: str) -> None:
    with serve_openai(identities=keys) as server, contextlib.ExitStack() as opened:
        half = head_of(100, key("a")) + b"{"
        refused = 0
        for _ in range(50):
            connection = opened.enter_context(server.connect(CALL_S))
            connection.sendall(half)
            connection.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                refused += b" 429 " in connection.recv(65536)
        assert refused, "there were more than this tenant may have"
        with server.connect(CALL_S) as other:
            assert [ask(other, "b") for _ in range(20)] == [200] * 20


def test_two_tenants_have_equal_parts_of_requests_under_way(few: None, keys: str) -> None:
    hanging = json.dumps(WORDS | {"model": "hangs"}).encode()
    with serve_openai(identities=keys) as server, contextlib.ExitStack() as opened:
        for name in ("a", "b"):
            for _ in range(30):
                connection = opened.enter_context(server.connect(CALL_S))
                connection.sendall(head_of(len(hanging), key(name)) + hanging)
        wait_until(
            "all were looked at", lambda: sum(server.http.tally.ended.values()) + server.answers.open["hangs"] == 60
        )
        running = Counter(each.tenant for each in server.answers.requests)
        assert 0.4 < running["a"] / running.total() < 0.6, running


def test_large_bodies_that_do_not_come_hold_no_memory_of_another_tenant(
    keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_server, "BODIES_BYTES", 8 << 20)
    large = json.dumps(WORDS | {"user": "x" * (200 << 10), "max_tokens": 1}).encode()
    with serve_openai(identities=keys) as server, contextlib.ExitStack() as opened, server.connect(CALL_S) as other:
        for _ in range(20):
            connection = opened.enter_context(server.connect(CALL_S))
            connection.sendall(head_of(len(large), key("a")) + large[:100])
        wait_until("they wait", lambda: server.http.tally.requests_here == 20)
        assert [ask(other, "b", large) for _ in range(5)] == [200] * 5


def test_silent_strangers_make_room_for_a_newcomer_and_no_caller_loses_its_connection(few: None, keys: str) -> None:
    with serve_openai(identities=keys) as server, contextlib.ExitStack() as opened, server.connect(CALL_S) as early:
        assert ask(early, "a") == 200
        silent = [opened.enter_context(server.connect(CALL_S)) for _ in range(200)]
        for _ in range(10):
            with server.connect(CALL_S) as newcomer:
                assert ask(newcomer, "b") == 200
        assert ask(early, "a") == 200, "a caller's connection is not dropped for strangers"
        assert read_all(silent[0]) == b"", "the oldest one was"
        assert server.http.tally.connections <= 60
        silent[-1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            silent[-1].recv(1)


def test_handshakes_that_do_not_come_count_as_connections(
    few: None, keys: str, tls: tuple[dict[str, Path], ssl.SSLContext]
) -> None:
    files, trust = tls
    with serve_openai(identities=keys, **files) as server, contextlib.ExitStack() as opened:
        with trust.wrap_socket(server.connect(CALL_S), server_hostname="localhost") as early:
            assert ask(early, "a") == 200
            silent = [opened.enter_context(server.connect(CALL_S)) for _ in range(200)]
            for one in silent[::2]:
                one.sendall(b"\x16\x03\x01")  # the begin of a handshake
            for _ in range(5):
                with trust.wrap_socket(server.connect(CALL_S), server_hostname="localhost") as newcomer:
                    assert ask(newcomer, "b") == 200
            assert ask(early, "a") == 200 and read_all(silent[0]) == b""
            assert server.http.tally.connections <= 60
        wait_until("none is left over", lambda: server.http.tally.connections <= 60)


def test_a_caller_is_not_delayed_by_strangers_who_come_and_go(few: None, keys: str) -> None:
    with serve_openai(identities=keys) as server, Beacon(threads=True) as beacon, server.connect(CALL_S) as caller:

        def strangers(over: threading.Event) -> None:
            held: list[socket.socket] = []
            while not over.is_set():
                with contextlib.suppress(OSError):
                    held.append(server.connect(CALL_S))
                if len(held) > 100:
                    held.pop(0).close()
            for each in held:
                each.close()

        assert ask(caller, "a") == 200
        with beside(strangers, 2):
            until_s = time.monotonic() + WINDOW_S
            while time.monotonic() < until_s:
                began_s = time.monotonic()
                assert ask(caller, "a") == 200
                took_s = time.monotonic() - began_s
                assert took_s - beacon.stall_s(began_s, began_s + took_s) < DELAY_S_MAX


def test_large_bodies_of_one_tenant_delay_no_other(keys: str) -> None:
    """Their delay is that of the interpreter's lock, which a beacon in this process would take for the machine's."""
    hostile = b'{"model":"words","prompt":[' + b"[1]," * (2 << 20)
    hostile = hostile[: (8 << 20) - 4] + b"1]}"
    with serve_openai(identities=keys) as server, Beacon() as beacon, server.connect(CALL_S) as caller:

        def attack(over: threading.Event) -> None:
            while not over.is_set():
                with server.connect(CALL_S) as connection, contextlib.suppress(ConnectionError):
                    connection.sendall(head_of(len(hostile), key("a"), "Connection: close") + hostile)
                    read_all(connection)

        assert ask(caller, "b") == 200
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with beside(attack, 4):
            until_s = time.monotonic() + WINDOW_S
            while time.monotonic() < until_s:
                began_s = time.monotonic()
                assert ask(caller, "b") == 200
                took_s = time.monotonic() - began_s
                assert took_s - beacon.stall_s(began_s, began_s + took_s) < DELAY_S_MAX
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
        assert grown_kib < 256 << 10, f"grew by {grown_kib >> 10} MiB"


def test_two_tenants_have_equal_parts_of_the_time_of_tokenizers(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenant a sends twice as many requests, each of which takes four times as long to tokenize."""
    spent: Counter[str] = Counter()

    def slow(seconds: float) -> Callable[..., object]:
        def work(self: object, text: str) -> object:
            name = text[0]
            time.sleep(seconds * (4 if name == "a" else 1))
            spent[name] += 4 if name == "a" else 1
            return original(self, text)

        return work

    original = PromptTokenizer.text
    monkeypatch.setattr(PromptTokenizer, "text", slow(0.02))
    with serve_openai(identities=keys) as server:

        def send(name: str) -> Callable[[threading.Event], None]:
            body = json.dumps(WORDS | {"prompt": name * (SMALL_BYTES + 100), "max_tokens": 1}).encode()

            def work(over: threading.Event) -> None:
                with server.connect(CALL_S) as connection:
                    while not over.is_set():
                        ask(connection, name, body)

            return work

        with beside(send("a"), 24), beside(send("b"), 12):
            wait_until("both are under way", lambda: min(spent["a"], spent["b"]) > 4)
            before = Counter(spent)
            wait_until("there is enough to judge by", lambda: (Counter(spent) - before).total() >= 200)
            used = Counter(spent) - before
    assert 0.4 < used["a"] / used.total() < 0.6, used
