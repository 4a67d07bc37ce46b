"""One tenant against another: whatever one of them has under way, the other one's calls go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import grpc
import pytest

from kvstore.pb import store_pb2 as pb
from kvstore.service.api.patterns import MATCH_S
from tests.helpers import api
from tests.helpers.api import Client, pages_message
from tests.helpers.content import chain, contents
from tests.helpers.processes import Daemon, Machine, wait_until
from tests.helpers.scraping import calls_under_way

Code = grpc.StatusCode

ENDLESS = pb.RemoveObjectsRequest(pattern="(a+)+b", salt="a")  # years, over the key below
PATTERNS, CONNECTIONS = 24, 3  # fewer on each than one connection may have under way
PATTERN_S = 8.0
PUT_S = 4.0  # a put in quiet takes milliseconds; with the others' patterns before it, their 8 s
PUTS = 5


def children(daemon: Daemon) -> list[int]:
    """Processes that the node has started."""
    path = Path(f"/proc/{daemon.pid}/task")
    return [int(pid) for task in path.iterdir() for pid in (task / "children").read_text().split()]


@pytest.fixture
def node(machine: Machine, tmp_path: Path) -> tuple[Daemon, str]:
    return api.serve_api(machine, identities=api.identities_file(tmp_path), http="127.0.0.1:0")


def test_slow_patterns_of_one_tenant_are_nothing_to_another(node: tuple[Daemon, str]) -> None:
    daemon, address = node
    connections = [Client(address, "a-token") for _ in range(CONNECTIONS)]
    a, b = connections[0], Client(address, "b-token")
    assert a.call("PutObject", api.put_messages("a" * 40, b"value", "a")).stored
    b.call("PutObject", api.put_messages("b", b"value", "b"))
    ended: list[Code] = []
    threads = [
        threading.Thread(target=lambda by=by: ended.append(by.code("RemoveObjects", ENDLESS, PATTERN_S)))
        for by in connections
        for _ in range(PATTERNS // CONNECTIONS)
    ]
    for thread in threads:
        thread.start()
    wait_until("a pattern is matched", lambda: children(daemon))
    wait_until("all are there", lambda: calls_under_way(daemon) + len(ended) >= PATTERNS)
    for number in range(PUTS):
        keys = chain(30 + number, 4, salt="b")
        began = time.monotonic()
        reply = b.call("Write", api.write_messages(pages_message(keys, salt="b"), contents(keys)), PUT_S)
        assert reply.new_pages == 4
        assert b.call("PutObject", api.put_messages(f"k{number}", b"value", "b"), PUT_S).stored
        print(f"put after {time.monotonic() - began:.3f} s")
        assert len(children(daemon)) <= 1, "a tenant matches one pattern at a time"
    assert b.call("RemoveObjects", pb.RemoveObjectsRequest(pattern="k.*", salt="b"), PUT_S).removed == PUTS
    for connection in connections:
        connection.close()
    for thread in threads:
        thread.join(60)
    assert len(ended) == PATTERNS and Code.OK not in ended
    wait_until("nothing matches any more", lambda: not children(daemon), 0.8 * MATCH_S)
    b.close()
    assert daemon.terminate() == 0
    assert "Traceback" not in daemon.trace(), daemon.trace()


def test_patterns_say_what_is_wrong_with_them(node: tuple[Daemon, str]) -> None:
    daemon, address = node
    a = Client(address, "a-token")
    a.call("PutObject", api.put_messages("a" * 40, b"value", "a"))
    with pytest.raises(grpc.RpcError) as wrong:
        a.call("RemoveObjects", pb.RemoveObjectsRequest(pattern="(", salt="a"))
    assert wrong.value.code() is Code.INVALID_ARGUMENT and "not a valid regular expression" in wrong.value.details()
    assert a.code("RemoveObjects", ENDLESS, 0.5) is Code.DEADLINE_EXCEEDED
    wait_until("nothing matches any more", lambda: not children(daemon), 0.8 * MATCH_S)
    assert a.call("RemoveObjects", pb.RemoveObjectsRequest(pattern="a+", salt="a")).removed == 1
    a.close()
    assert daemon.terminate() == 0


def test_a_pattern_does_not_outlive_a_killed_daemon_for_long(node: tuple[Daemon, str]) -> None:
    daemon, address = node
    a = Client(address, "a-token")
    a.call("PutObject", api.put_messages("a" * 40, b"value", "a"))
    asked = threading.Thread(target=lambda: a.code("RemoveObjects", ENDLESS, PATTERN_S))
    asked.start()
    wait_until("a pattern is matched", lambda: [pid for pid in children(daemon) if cpu_limit(pid) != "unlimited"])
    (left,) = children(daemon)
    daemon.kill()
    asked.join(60)
    assert 0 < int(cpu_limit(left)) <= 2 * MATCH_S, "the kernel ends it"
    os.kill(left, signal.SIGKILL)
    a.close()


def cpu_limit(pid: int) -> str:
    """How many seconds of a processor a process may take."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return next(line.split()[3] for line in lines if line.startswith("Max cpu time"))
