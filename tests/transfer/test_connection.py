"""The two ends of a data connection: who is let in, what is refused in words, and that nothing waits without end."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.cluster import data_connection, data_listener
from kvstore.cluster.data_connection import Caller, DataConnection, DialCredentials, Exchange, Handler
from kvstore.cluster.data_listener import LINGERING_MAX, LOOK_S, Server, ServerLimits
from kvstore.config import NodeConfig
from kvstore.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KVStoreError,
    NodeUnavailable,
    PermissionDenied,
    TooManyCalls,
    Unauthenticated,
    Unavailable,
    VersionMismatch,
)
from kvstore.node.cluster.data_server import address_of
from kvstore.server.certificates import ServerCertificate
from kvstore.wire import data as wire
from kvstore.wire.data import HEAD, MAGIC, VERSION, FrameKind, Hello
from tests.helpers.api import Certificates

SOON_S = 10.0  # far more than anything here takes
LIMITS = ServerLimits(hello_s=SOON_S, silence_s=SOON_S, idle_s=2 * SOON_S)
SHORT_S = 0.4
MANY = 512  # frames of one reply: more than sockets hold


class Anybody:
    """A caller who may do everything; a tenant where the name says so."""

    def __init__(self, name: str = "anybody") -> None:
        self.name = name
        self.operator = not name.startswith("tenant")

    def check_salt(self, salt: str) -> None:
        if salt == "theirs":
            raise PermissionDenied(f"salt {salt!r} is not yours")


def admit(hello: Hello, names: Sequence[str]) -> Caller:
    if hello.node not in ("", "n1"):
        raise InvalidRequest("node", f"this is n1, not {hello.node}")
    if hello.token not in ("", "right"):
        raise Unauthenticated("the node does not know this caller")
    return Anybody(hello.caller or "anybody")


def status(exchange: Exchange, body: memoryview) -> None:
    """Answers with many bytes, or with what was asked for."""
    asked = bytes(body).decode()
    if asked == "fail":
        raise InvalidRequest("asked", "is no good")
    if asked.startswith("salt:"):
        exchange.caller.check_salt(asked.removeprefix("salt:"))
    for _ in range(MANY if asked == "much" else 1):
        exchange.reply(FrameKind.STATE, bytes(wire.BODY_MAX[FrameKind.STATE]) if asked == "much" else body)


def shown(tls: Certificates) -> ServerCertificate:
    return ServerCertificate(*(Path(tls.path(name)) for name in ("server.pem", "server.key", "ca.pem")))


class Served:
    """A server and its address."""

    def __init__(self, limits: ServerLimits, tls: Certificates | None = None) -> None:
        handlers: Mapping[FrameKind, Handler] = {FrameKind.STATUS: status}
        context = None
        if tls is not None:
            context = shown(tls).for_sockets()
        self.server = Server("n1", handlers, admit, limits, context)
        self.address = self.server.start("127.0.0.1", 0)

    def open(self, hello: Hello | None = None, credentials: DialCredentials | None = None) -> DataConnection:
        return opened(self.address, hello, credentials)

    def raw(self, source: str = "127.0.0.1") -> socket.socket:
        """A socket of somebody who knows no rules."""
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), SOON_S, (source, 0))

    def welcomed(self) -> socket.socket:
        """The same, after HELLO."""
        sock = self.raw()
        body = wire.pack_hello(Hello())
        sock.sendall(wire.pack_head(FrameKind.HELLO, 0, len(body)) + body)
        head = wire.unpack_head(sock.recv(HEAD.size, socket.MSG_WAITALL))
        assert head.kind is FrameKind.WELCOME
        sock.recv(head.body_bytes, socket.MSG_WAITALL)
        return sock


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served(LIMITS)
    yield made
    made.server.stop()
    assert made.server.connections == 0


@pytest.fixture
def hasty() -> Iterator[Served]:
    """Waits for a short time alone where a caller stops in the middle of a request, or takes nothing of a reply."""
    made = Served(replace(LIMITS, silence_s=SHORT_S))
    yield made
    made.server.stop()
    assert made.server.connections == 0


def later() -> float:
    return time.monotonic() + SOON_S


def opened(address: str, hello: Hello | None = None, credentials: DialCredentials | None = None) -> DataConnection:
    return DataConnection.open(address, hello or Hello(), credentials, deadline_s=later(), silence_s=SOON_S)


def last_words(sock: socket.socket) -> KVStoreError:
    """What the server says before it ends the connection; it does end it."""
    data = b""
    while more := sock.recv(1 << 16):
        data += more
    sock.close()
    head = wire.unpack_head(data[: HEAD.size])
    assert head.kind is FrameKind.ERROR and len(data) == HEAD.size + head.body_bytes
    return wire.unpack_error(data[HEAD.size :])


@pytest.mark.parametrize(
    ("hello", "error"),
    [
        (Hello(node="n2"), InvalidRequest),
        (Hello(token="wrong"), Unauthenticated),
        (Hello(version_min=VERSION + 1, version_max=VERSION + 7), VersionMismatch),
        (Hello(pool="x" * 1000), Unavailable),
    ],
)
def test_a_caller_is_refused_in_words(served: Served, hello: Hello, error: type[KVStoreError]) -> None:
    with pytest.raises(error):
        served.open(hello)


def test_a_caller_who_is_known_no_longer_is_refused_with_the_next_request() -> None:
    known = {"yes"}

    def asks(hello: Hello, names: Sequence[str]) -> Caller:
        if hello.token not in known:
            raise Unauthenticated("the node does not know this caller")
        return Anybody()

    server = Server("n1", {}, asks, LIMITS)
    address = server.start("127.0.0.1", 0)
    try:
        connection = opened(address, Hello(token="yes"))
        assert connection.call(FrameKind.PING, b"x", reply=FrameKind.PONG, deadline_s=later()) == b"x"
        known.clear()
        with pytest.raises(Unauthenticated):
            connection.call(FrameKind.PING, b"x", reply=FrameKind.PONG, deadline_s=later())
        with pytest.raises(NodeUnavailable):
            connection.receive_head(1, FrameKind.PONG, deadline_s=later())
        connection.close()
    finally:
        server.stop()


def test_nothing_travels_in_clear_to_another_machine() -> None:
    with pytest.raises(InvalidRequest, match="token"):
        DataConnection.open("192.0.2.1:7000", Hello(token="t"), deadline_s=later())
    with pytest.raises(InvalidRequest, match="tls"):  # whatever the catalog says
        DataConnection.open("192.0.2.1:7000", Hello(), DialCredentials(ca="ca.pem"), tls=False, deadline_s=later())


def test_plain_connections_come_from_private_networks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a certificate, one port takes TLS from everywhere as well."""
    monkeypatch.setattr(data_listener, "is_loopback", lambda host: False)
    certificates = Certificates(tmp_path)
    theirs = DialCredentials("", *(str(certificates.path(name)) for name in ("ca.pem", "client.pem", "client.key")))
    for tls in (None, shown(certificates).for_sockets()):
        server = Server("n1", {}, admit, LIMITS, tls, private_networks=("127.0.0.2/32", "10.0.0.0/8"))
        host, _, port = server.start("127.0.0.1", 0).rpartition(":")
        body = wire.pack_hello(Hello())
        hello = wire.pack_head(FrameKind.HELLO, 0, len(body)) + body
        inside = socket.create_connection((host, int(port)), SOON_S, ("127.0.0.2", 0))
        inside.sendall(hello)
        assert wire.unpack_head(inside.recv(HEAD.size, socket.MSG_WAITALL)).kind is FrameKind.WELCOME
        inside.close()
        outside = socket.create_connection((host, int(port)), SOON_S, ("127.0.0.1", 0))
        outside.sendall(hello[: HEAD.size])
        error = last_words(outside)
        assert isinstance(error, Unauthenticated) and "127.0.0.1 is in no private network" in str(error)
        if tls is not None:
            opened(f"{host}:{port}", credentials=theirs).close()
        server.stop()
        assert not server.connections


def test_a_client_uses_a_plain_connection_if_both_ends_say_that_the_network_is_private(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    server = Server("n1", {}, admit, LIMITS, shown(certificates).for_sockets(), private_networks=("127.0.0.0/8",))
    address = server.start("127.0.0.1", 0)
    files = (str(certificates.path(name)) for name in ("ca.pem", "client.pem", "client.key"))
    ours, here, far = DialCredentials("", *files), ("127.0.0.0/8",), ("10.0.0.0/8",)
    for mine, its, is_plain in ((here, here, True), (here, far, False), ((), here, False), ((), (), False)):
        connection = DataConnection.open(
            address,
            Hello(),
            replace(ours, private_networks=mine),
            tls=True,
            plain_from=its,
            deadline_s=later(),
            silence_s=SOON_S,
        )
        assert connection.call(FrameKind.PING, b"x", reply=FrameKind.PONG, deadline_s=later()) == b"x"
        assert isinstance(connection._stream._sock, ssl.SSLSocket) is not is_plain
        connection.close()
    server.stop()


@pytest.mark.parametrize("networks", ["", "10.0.0.0/8"])
def test_a_data_server_beyond_loopback_needs_tls_or_a_private_network(networks: str) -> None:
    config = NodeConfig(name="n", data="192.0.2.1:7070", data_private_networks=networks)
    if networks:
        assert address_of(config) == ("192.0.2.1", 7070)
    else:
        with pytest.raises(InvalidRequest, match="needs TLS"):
            address_of(config)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "magic"),
        (HEAD.pack(MAGIC + (1 << 24), FrameKind.HELLO, 0, 0, 2) + b"{}", f"got {VERSION + 1}"),
        (HEAD.pack(MAGIC, 999, 0, 0, 0), "kind"),
        (HEAD.pack(MAGIC, FrameKind.HELLO, 0, 0, 1 << 31), "body"),
        (HEAD.pack(MAGIC, FrameKind.HELLO, 0, 0, 2) + b"[]", "must be a JSON object"),
        (HEAD.pack(MAGIC, FrameKind.HELLO, 0, 0, 3) + b"{{{", "valid JSON"),
        (HEAD.pack(MAGIC, FrameKind.HELLO, 0, 0, 14) + b'{"token": 123}', "token"),
        (HEAD.pack(MAGIC, FrameKind.HELLO, 0, 0, 19) + b'{"token": "\\ud800"}', "token must be ASCII"),
        (HEAD.pack(MAGIC, FrameKind.PING, 0, 0, 0), "PING"),
    ],
)
def test_who_breaks_the_rules_at_once_is_told_and_dropped(served: Served, data: bytes, says: str) -> None:
    sock = served.raw()
    sock.sendall(data)
    assert says in str(last_words(sock))
    served.open().close()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (HEAD.pack(MAGIC, FrameKind.STATUS, 0, 7, wire.BODY_MAX[FrameKind.STATUS] + 1), "at most"),
        (HEAD.pack(MAGIC, FrameKind.READ, 0, 7, (1 << 32) - 1), "at most"),
        (HEAD.pack(MAGIC, FrameKind.FIND, 0, 7, 0), "(got FIND)"),
        (HEAD.pack(MAGIC, FrameKind.RANGE, 0, 7, 1 << 31), "(got RANGE)"),
        (HEAD.pack(MAGIC, FrameKind.HELLO, 0, 7, 0), "(got HELLO)"),
    ],
)
def test_who_breaks_the_rules_later_is_told_and_dropped(served: Served, data: bytes, says: str) -> None:
    sock = served.welcomed()
    sock.sendall(data)
    assert says in str(last_words(sock))


@pytest.mark.parametrize("cut", [1, HEAD.size - 1, HEAD.size, HEAD.size + 1])
def test_a_frame_that_never_ends_costs_a_moment(cut: int) -> None:
    """Somebody who says the half of HELLO and stays, and somebody who goes."""
    made = Served(replace(LIMITS, hello_s=SHORT_S))
    body = wire.pack_hello(Hello())
    frame = wire.pack_head(FrameKind.HELLO, 0, len(body)) + body
    stays, goes = made.raw(), made.raw()
    for sock in (stays, goes):
        sock.sendall(frame[:cut])
    goes.close()
    assert isinstance(last_words(stays), DeadlineExceeded)
    assert_none_open(made)
    made.server.stop()


def test_a_body_that_never_comes_costs_a_moment(hasty: Served) -> None:
    sock = hasty.welcomed()
    sock.sendall(HEAD.pack(MAGIC, FrameKind.STATUS, 0, 1, 4000) + b"some")
    assert isinstance(last_words(sock), DeadlineExceeded)
    assert_none_open(hasty)


def test_a_reader_that_reads_nothing_is_dropped(hasty: Served) -> None:
    sock = hasty.welcomed()
    sock.sendall(wire.pack_head(FrameKind.STATUS, 1, 4) + b"much")
    assert_none_open(hasty)
    sock.close()


def test_a_reader_that_reads_slowly_gets_everything(served: Served) -> None:
    """With pauses shorter than what the server bears."""
    sock = served.welcomed()
    sock.sendall(wire.pack_head(FrameKind.STATUS, 1, 4) + b"much")
    wanted = MANY * (HEAD.size + wire.BODY_MAX[FrameKind.STATE])
    have, buffer = 0, bytearray(4 << 20)
    while have < wanted:
        have += sock.recv_into(buffer)
        if have % 7 == 0:
            time.sleep(0.01)
    assert have == wanted
    sock.close()


def test_connections_are_bounded() -> None:
    """Twelve, of which eight are for callers that have said who they are; a tenant has half of them."""
    made = Served(replace(LIMITS, connections_max=12))
    try:
        mine = [made.open(Hello(caller="tenant a")) for _ in range(4)]
        with pytest.raises(TooManyCalls, match="tenant a has 4"):
            made.open(Hello(caller="tenant a"))
        mine += [made.open(Hello(caller="tenant b")) for _ in range(3)]
        with pytest.raises(TooManyCalls, match="tenant b has 3"):
            made.open(Hello(caller="tenant b"))
        mine.append(made.open(Hello(caller="tenant c")))
        with pytest.raises(TooManyCalls, match="anybody has 0"):
            made.open()
        for each in mine:
            each.close()
        assert_none_open(made)
        made.open().close()
    finally:
        made.server.stop()


@pytest.mark.parametrize("tls", [False, True])
def test_strangers_who_say_nothing_shut_out_nobody(tmp_path: Path, tls: bool) -> None:
    """They connect from one address, or from several: whoever comes takes the place of the one that waits longest."""
    certificates = Certificates(tmp_path) if tls else None
    limits = replace(LIMITS, hello_s=SOON_S * 10, connections_max=6)
    made, ours = Served(limits, certificates), DialCredentials()
    if certificates is not None:
        ours = DialCredentials(
            *("", *(str(certificates.path(name)) for name in ("ca.pem", "client.pem", "client.key")))
        )
    try:
        silent = [made.raw(f"127.0.0.{1 + i % 3}") for i in range(20)]
        made.open(credentials=ours).close()
        silent += [made.raw() for _ in range(20)]
        made.open(credentials=ours).close()
        wait_until(lambda: made.server.connections <= limits.connections_max)
        made.open(credentials=ours).close()
        for each in silent:
            each.close()
        assert_none_open(made)
    finally:
        made.server.stop()


def test_a_server_that_says_nothing_costs_the_silence_alone() -> None:
    """A stopped process: the kernel still takes connections and bytes for it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        began_s = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            DataConnection.open(address, Hello(), deadline_s=later(), silence_s=0.3)
        assert time.monotonic() - began_s < SOON_S / 2


def test_tls(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    made = Served(LIMITS, certificates)
    try:
        ours = DialCredentials(
            ca=str(certificates.path("ca.pem")),
            cert=str(certificates.path("client.pem")),
            key=str(certificates.path("client.key")),
        )
        connection = made.open(Hello(token="right"), ours)
        size = wire.BODY_MAX[FrameKind.STATE]
        number = connection.send(FrameKind.STATUS, b"much", deadline_s=later())
        for _ in range(64):
            head = connection.receive_head(number, FrameKind.STATE, deadline_s=later())
            assert connection.receive(head.body_bytes, deadline_s=later()) == bytes(size)
        connection.close()
        with pytest.raises(Unavailable):  # not known to the server
            made.open(credentials=replace(ours, cert="", key="")).call(
                FrameKind.PING, reply=FrameKind.PONG, deadline_s=later()
            )
        with pytest.raises(Unavailable):
            made.open()
        made.open(credentials=ours).close()
    finally:
        made.server.stop()


def wait_until(holds: object) -> None:
    deadline_s = later()
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def assert_none_open(served: Served) -> None:
    wait_until(lambda: not served.server.connections)


def test_a_server_for_which_no_thread_can_be_started_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a limit on processes: callers are identified all the same, and share the thread that there is."""
    busy, go_on = threading.Event(), threading.Event()

    def wait(exchange: Exchange, body: memoryview) -> None:
        busy.set()
        assert go_on.wait(SOON_S)
        exchange.reply(FrameKind.STATE, body)

    server = Server("n1", {FrameKind.STATUS: wait}, admit, LIMITS)
    address = server.start("127.0.0.1", 0)
    start, refused = threading.Thread.start, list[str]()

    def none_left(thread: threading.Thread) -> None:
        if thread.name == "data":
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        one, other = opened(address), opened(address)
        first = one.send(FrameKind.STATUS, b"1", deadline_s=later())
        assert busy.wait(SOON_S)
        second = other.send(FrameKind.PING, b"2", deadline_s=later())
        wait_until(lambda: refused)
        go_on.set()
        one.receive(one.receive_head(first, FrameKind.STATE, deadline_s=later()).body_bytes, deadline_s=later())
        assert other.receive_head(second, FrameKind.PONG, deadline_s=later()).body_bytes == 1
    one.close()
    other.close()
    server.stop()
    assert not server.connections


def threads_of(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_idle_connections_have_no_threads_and_do_not_wake_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Served(replace(LIMITS, connections_max=600))
    turns = list[float]()
    turn = made.server._sweep

    def counted(now_s: float) -> None:
        turns.append(now_s)
        turn(now_s)

    before = threads_of("data")
    idle = [made.open() for _ in range(100)]
    assert threads_of("data") == before, "a caller is identified without a thread"
    for each in idle:
        assert each.call(FrameKind.PING, b"x", reply=FrameKind.PONG, deadline_s=later()) == b"x"
    assert threads_of("data") - before <= LINGERING_MAX + 8, "requests that follow each other share threads"
    wait_until(lambda: all(each.parked for each in made.server._open.values()))
    time.sleep(0.2)
    monkeypatch.setattr(made.server, "_sweep", counted)
    began_s = time.monotonic()
    time.sleep(2.5)
    assert len(turns) <= (time.monotonic() - began_s) / LOOK_S + 2
    for each in idle:
        each.close()
    assert_none_open(made)
    made.server.stop()


def test_a_slow_reader_does_not_delay_another_request(served: Served) -> None:
    slow = [served.welcomed() for _ in range(40)]
    for sock in slow:
        sock.sendall(wire.pack_head(FrameKind.STATUS, 1, 4) + b"much")
    other = served.open()
    for _ in range(20):
        assert other.call(FrameKind.PING, b"x", reply=FrameKind.PONG, deadline_s=later()) == b"x"
    for sock in slow:
        sock.close()
    other.close()
    assert_none_open(served)


@pytest.mark.parametrize("tls", [False, True])
def test_requests_that_are_sent_at_once_are_answered_in_order(tmp_path: Path, tls: bool) -> None:
    """The second one may arrive in the same TLS record as the first one, so the socket does not announce it."""
    certificates = Certificates(tmp_path) if tls else None
    made, ours = Served(LIMITS, certificates), DialCredentials()
    if certificates is not None:
        paths = (str(certificates.path(name)) for name in ("ca.pem", "client.pem", "client.key"))
        ours = DialCredentials("", *paths)
    connection = made.open(credentials=ours)
    frames = [(wire.pack_head(FrameKind.PING, number, 4) + b"%4d" % number) for number in range(1, 50)]
    connection._stream.send([b"".join(frames)], later())
    for number in range(1, 50):
        head = connection.receive_head(number, FrameKind.PONG, deadline_s=later())
        assert connection.receive(head.body_bytes, deadline_s=later()) == b"%4d" % number
    time.sleep(2 * data_connection.LOOK_S)
    assert connection.call(FrameKind.PING, b"x", reply=FrameKind.PONG, deadline_s=later()) == b"x"
    connection.close()
    made.server.stop()


def test_a_caller_with_all_its_connections_gets_a_new_one_for_an_idle_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its oldest, as if it had been idle for long; callers that are busy keep theirs."""
    made = Served(replace(LIMITS, connections_max=12))
    mine = [made.open(Hello(caller="tenant a")) for _ in range(4)]
    other = made.open(Hello(caller="tenant b"))
    with pytest.raises(TooManyCalls, match="tenant a has 4"):
        made.open(Hello(caller="tenant a"))
    monkeypatch.setattr(data_listener, "RECYCLE_S", 0.0)
    assert mine[0].call(FrameKind.PING, b"x", reply=FrameKind.PONG, deadline_s=later()) == b"x"
    wait_until(lambda: all(each.parked for each in made.server._open.values()))
    mine.append(made.open(Hello(caller="tenant a")))
    with pytest.raises(NodeUnavailable):
        mine[1].call(FrameKind.PING, b"x", reply=FrameKind.PONG, deadline_s=later())
    for each in (mine[0], *mine[2:], other):
        assert each.call(FrameKind.PING, b"x", reply=FrameKind.PONG, deadline_s=later()) == b"x"
        each.close()
    made.server.stop()
