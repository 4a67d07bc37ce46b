"""Admin calls that take long, while other clients go on: real daemon, real sockets, 10,000 pages."""

from __future__ import annotations

import secrets
import select
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Layout, Store
from kvstore.model.replica import Status
from kvstore.node.socket_server import SLOW_THREADS
from kvstore.wire import control
from kvstore.wire.control import Op
from tests.helpers.processes import Daemon, Machine, check_laws, wait_until

TINY = Layout(model="tiny", layers=1, kv_heads=1, head_dim=64, dtype="bfloat16", page_tokens=16)
assert TINY.page_bytes == 4096
CHAIN = 512
PAGES = 20 * CHAIN
PUT_PAGES = 4
ANSWER_S = 30.0
PUT_SHARE = 0.25  # of the long call: what a put beside it takes at most; a thread shared with it would make it all


class Caller:
    """A client's connection and nothing else: what it sends and when it reads is the test's."""

    def __init__(self, folder: Path) -> None:
        self.session = secrets.randbits(62) | 1
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect(str(folder / "control"))
        self.send(Op.HELLO, 1, {"protocol": control.PROTOCOL}, a=self.session)
        assert self.receive()[:2] == (Status.OK, 1)

    def send(self, op: Op, number: int, document: dict[str, Any] | None = None, a: int = 0) -> None:
        body = [control.pack_json(document)] if document is not None else []
        self.sock.send(control.encode(op, number, a=a, body=body))

    def ask(self, call: str, number: int = 2, **arguments: Any) -> None:
        self.send(Op.ADMIN, number, {"call": call, **arguments})

    def receive(self) -> tuple[int, int, dict[str, Any]]:
        """(status, request, document)."""
        reply = control.decode(memoryview(self.sock.recv(control.MESSAGE_BYTES_MAX)))
        return reply.op, reply.request_id, control.unpack_json(reply.body) if reply.op == Status.OK else {}

    @property
    def answered(self) -> bool:
        return bool(select.select([self.sock], [], [], 0)[0])

    def close(self) -> None:
        self.sock.close()


def full_node(machine: Machine) -> tuple[Daemon, Store]:
    """A node that holds ``PAGES`` and has some room beside them."""
    daemon = machine.serve("n", dram="256MiB")
    store = machine.connect("n")
    cache, pages = store.cache(TINY), np.zeros((CHAIN, TINY.page_bytes), np.uint8)
    for seed in range(PAGES // CHAIN):
        assert cache.put(tokens(seed, CHAIN), pages) == CHAIN
    return daemon, store


def tokens(seed: int, pages: int) -> Any:
    return np.arange(pages * TINY.page_tokens, dtype=np.uint32) + np.uint32(seed << 16)


def put_until(store: Store, caller: Caller) -> list[float]:
    """Seconds of each put made until the caller has its answer."""
    cache, pages, took = store.cache(TINY, salt="other"), np.ones((PUT_PAGES, TINY.page_bytes), np.uint8), []
    while not caller.answered:
        start = time.perf_counter()
        cache.put(tokens(1000 + len(took), PUT_PAGES), pages)
        took.append(time.perf_counter() - start)
        time.sleep(0.002)  # beside the call, not instead of it
    return took


@pytest.mark.parametrize("call", ["evict", "verify"])
def test_others_go_on_during_a_long_call(machine: Machine, call: str) -> None:
    _, store = full_node(machine)
    caller = Caller(machine.folder("n"))
    began = time.perf_counter()
    caller.ask(call, **({"percent": 90} if call == "evict" else {}))
    took = put_until(store, caller)
    call_s = time.perf_counter() - began
    status, _, answer = caller.receive()
    assert status == Status.OK, answer
    if call == "evict":
        assert answer["pages"] >= 0.85 * PAGES
    else:
        assert answer["findings"] == []
    p90 = float(np.quantile(took, 0.9))
    print(f"{call}: {call_s:.2f} s, {len(took)} puts beside it, p90 {1e3 * p90:.2f} ms, max {1e3 * max(took):.1f} ms")
    assert len(took) >= 20
    assert p90 < PUT_SHARE * call_s
    caller.close()
    check_laws(store)


def test_a_daemon_ends_in_time_during_long_calls(machine: Machine) -> None:
    daemon, store = full_node(machine)
    before = len(threads(daemon))
    callers = [Caller(machine.folder("n")) for _ in range(6)]
    for caller, call in zip(callers, ("evict", "verify", "pages", "kv_dump", "events", "verify"), strict=True):
        caller.ask(call, **({"percent": 100} if call == "evict" else {"wait_s": 1} if call == "events" else {}))
    wait_until("as many are under way as may be", lambda: len(threads(daemon)) >= before + SLOW_THREADS)
    began = time.monotonic()
    assert daemon.terminate() == 0, daemon.trace()
    assert time.monotonic() - began < 30
    assert "Traceback" not in daemon.trace()
    machine.serve("n")
    check_laws(store)


def threads(daemon: Daemon) -> list[Path]:
    return list(Path(f"/proc/{daemon.pid}/task").iterdir())
