"""SocketChannel against a little server in a thread: order, loss, reconnecting, refusals, forks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.client.local.channel import OUTSTANDING_MAX, SocketChannel
from kvstore.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable, Unavailable, VersionMismatch
from kvstore.model.replica import Status
from kvstore.wire import control
from kvstore.wire.control import MESSAGE_BYTES_MAX, NO_REPLY, Message, Op

Answer = Callable[[Message], bytes | None]


def echo(message: Message) -> bytes | None:
    """The request's ``a`` and body come back."""
    if message.flags & NO_REPLY:
        return None
    return control.encode(Status.OK, message.request_id, a=message.a, body=(bytes(message.body),))


class Server:
    """A node's control socket: HELLO, then ``answer`` for each request. Stopped and started like a daemon."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answer: Answer = echo
        self.incarnation = "00000000000000aa"
        self.hello: Callable[[Message], bytes] = self._hello
        self.sessions: list[int] = []
        self.seen: list[Message] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None

    def _hello(self, message: Message) -> bytes:
        return control.encode(
            Status.OK, message.request_id, body=(control.pack_json({"incarnation": self.incarnation}),)
        )

    def start(self) -> None:
        (self.folder / "sessions").mkdir(parents=True, exist_ok=True)
        self._stop.clear()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here = os.open(self.folder, os.O_PATH)  # test folders have names longer than a socket's path may be
        self._listener.bind(f"/proc/self/fd/{here}/control")
        os.close(here)
        self._listener.listen(8)
        self._listener.settimeout(0.01)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(60)
        assert self._listener is not None
        self._listener.close()
        (self.folder / "control").unlink()

    def _run(self) -> None:
        assert self._listener is not None
        connections: list[tuple[socket.socket, bool]] = []
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                sock, _ = self._listener.accept()
                sock.settimeout(0.005)
                connections.append((sock, False))
            for i, (sock, greeted) in enumerate(connections):
                with contextlib.suppress(OSError):
                    while data := sock.recv(MESSAGE_BYTES_MAX):
                        message = control.decode(memoryview(data))
                        if not greeted:
                            self.sessions.append(message.a)
                            connections[i] = (sock, True)
                            greeted = True
                            sock.send(self.hello(message))
                            continue
                        self.seen.append(message)
                        reply = self.answer(message)
                        if reply is not None:
                            sock.send(reply)
        for sock, _ in connections:
            sock.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "kvstore-test")
    server.start()
    yield server
    if not server._stop.is_set():
        server.stop()


@pytest.fixture
def channel(server: Server) -> Iterator[SocketChannel]:
    channel = SocketChannel(server.folder, timeout_s=30.0)
    yield channel
    channel.close()


def test_replies_come_in_order_and_are_owned(channel: SocketChannel) -> None:
    replies = [channel.request(Op.ADMIN, a=i, body=(b"x" * i,)) for i in range(40)]
    for i in reversed(range(40)):
        message = replies[i].result()
        assert (message.a, bytes(message.body)) == (i, b"x" * i)
    assert replies[3].result() is replies[3].result()


def test_outstanding_requests_are_bounded(server: Server, channel: SocketChannel) -> None:
    replies = []
    for i in range(3 * OUTSTANDING_MAX):
        replies.append(channel.request(Op.ADMIN, a=i))
        assert len(channel._waiting) <= OUTSTANDING_MAX
    assert [reply.result().a for reply in replies] == list(range(3 * OUTSTANDING_MAX))


def test_session_file_is_locked_until_close(server: Server, channel: SocketChannel) -> None:
    channel.request(Op.ADMIN).result()
    path = server.folder / "sessions" / f"{channel.session:016x}"
    fd = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        channel.close()
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)
    with pytest.raises(InvalidRequest, match="store: is closed"):
        channel.request(Op.ADMIN)


def test_daemon_down_is_said_at_the_deadline(server: Server, channel: SocketChannel) -> None:
    server.stop()
    start = time.monotonic()
    with pytest.raises(NodeUnavailable, match="does not answer"):
        channel.request(Op.ADMIN, timeout_s=0.2)
    assert time.monotonic() - start > 0.1


def test_restart_goes_unnoticed_between_requests(server: Server, channel: SocketChannel) -> None:
    assert channel.request(Op.ADMIN, a=1).result().a == 1
    server.stop()
    starter = threading.Timer(0.1, server.start)
    starter.start()
    assert channel.request(Op.ADMIN, a=2).result().a == 2
    starter.join()
    assert server.sessions == [channel.session] * 2


def test_requests_in_flight_fail_when_the_daemon_dies(server: Server, channel: SocketChannel) -> None:
    server.answer = lambda message: None
    replies = [channel.request(Op.ADMIN) for _ in range(3)]
    killer = threading.Timer(0.1, server.stop)
    killer.start()
    for reply in replies:
        with pytest.raises(NodeUnavailable, match="ended before it answered"):
            reply.result()
    killer.join()
    server.answer = echo
    server.start()
    assert channel.request(Op.ADMIN, a=7).result().a == 7


def test_what_needs_no_reply_and_cannot_be_sent_at_once_loses_nothing(server: Server, channel: SocketChannel) -> None:
    go_on = threading.Event()

    def behind(message: Message) -> bytes | None:
        assert go_on.wait(60)
        return echo(message) if not message.flags & NO_REPLY else None

    server.answer = behind
    pending = channel.request(Op.ADMIN, a=5)
    with pytest.raises(NodeUnavailable, match="took no request in time"):
        for _ in range(1000):
            channel.request(Op.PREFETCH, flags=NO_REPLY, body=(bytes(8192),), timeout_s=0.0)
    go_on.set()
    assert pending.result().a == 5
    assert channel.request(Op.ADMIN, a=6).result().a == 6
    assert len(server.sessions) == 1, "the same connection"


def test_deadline_of_a_reply_and_the_late_reply_is_dropped(server: Server, channel: SocketChannel) -> None:
    given_up = threading.Event()

    def slow(message: Message) -> bytes | None:
        if message.a == 1:
            assert given_up.wait(60)
        return echo(message)

    server.answer = slow
    with pytest.raises(DeadlineExceeded):
        channel.request(Op.ADMIN, a=1, timeout_s=0.05).result()
    given_up.set()
    assert channel.request(Op.ADMIN, a=2).result().a == 2


@pytest.mark.parametrize(
    ("status", "body", "error", "text"),
    [
        (Status.INVALID, b"pages\0are odd", InvalidRequest, "^pages: are odd$"),
        (Status.INVALID, b"protocol\0is 2 here", VersionMismatch, "is 2 here"),
        (Status.FAILED, b"disk on fire", Unavailable, "disk on fire"),
    ],
)
def test_refusals(
    server: Server, channel: SocketChannel, status: Status, body: bytes, error: type[Exception], text: str
) -> None:
    server.answer = lambda message: control.encode(status, message.request_id, body=(body,))
    with pytest.raises(error, match=text):
        channel.request(Op.ADMIN).result()
    server.answer = echo
    assert channel.request(Op.ADMIN, a=3).result().a == 3


def test_version_mismatch_at_hello(server: Server, channel: SocketChannel) -> None:
    server.hello = lambda message: control.encode(Status.INVALID, message.request_id, body=(b"protocol\0is 9",))
    with pytest.raises(VersionMismatch):
        channel.request(Op.ADMIN)


def test_another_incarnation_ends_the_channel(server: Server, channel: SocketChannel) -> None:
    channel.request(Op.ADMIN).result()
    server.stop()
    server.incarnation = "00000000000000bb"
    server.start()
    for _ in range(2):
        with pytest.raises(NodeUnavailable, match="recreated"):
            channel.request(Op.ADMIN)
    assert channel.ended


def test_garbage_from_the_daemon_is_a_lost_connection(server: Server, channel: SocketChannel) -> None:
    server.answer = lambda message: b"?"
    with pytest.raises(NodeUnavailable):
        channel.request(Op.ADMIN).result()
    server.answer = lambda message: control.encode(Status.OK, message.request_id + 5)
    with pytest.raises(NodeUnavailable):
        channel.request(Op.ADMIN).result()
    server.answer = echo
    assert channel.request(Op.ADMIN, a=4).result().a == 4
