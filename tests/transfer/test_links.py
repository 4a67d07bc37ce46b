"""Connections to peers: who does not answer costs one wait, and is known to be dead until it answers again."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.cluster import peer_links
from kvstore.cluster.ask_peers import PeerRequest, ask_peers
from kvstore.cluster.data_connection import SILENCE_S, Caller, DataConnection, DialCredentials, credentials_of
from kvstore.cluster.data_listener import Server, ServerLimits
from kvstore.cluster.peer_links import PeerLinks, PoolNode, StaleConnection
from kvstore.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KVStoreError,
    NodeUnavailable,
    TooManyCalls,
    Unauthenticated,
)
from kvstore.server.certificates import ServerCertificate
from kvstore.server.identities import LOCAL
from kvstore.wire.data import FrameKind, Hello
from tests.helpers.api import Certificates
from tests.helpers.processes import wait_until

LATE_S = 30.0


def admit(hello: Hello, names: Sequence[str]) -> Caller:
    if hello.node != "n":
        raise InvalidRequest("node", "this is n")
    return LOCAL


def ping(links: PeerLinks, peer: PoolNode) -> None:
    with links.to(peer, later()) as connection:
        assert connection.call(FrameKind.PING, b"x", reply=FrameKind.PONG, deadline_s=later()) == b"x"


def later() -> float:
    return time.monotonic() + LATE_S


@pytest.fixture
def links() -> Iterator[PeerLinks]:
    made = PeerLinks("p", "test")
    yield made
    made.close()


def test_peers_that_hang_do_not_take_the_time_of_the_others(links: PeerLinks) -> None:
    """Four peers with open connections hang, for longer together than the time; the last one still gets its answer."""
    with contextlib.ExitStack() as opened:
        server = Server("n", {}, admit)
        opened.callback(server.stop)
        alive = PoolNode("n", server.process, "", (server.start("127.0.0.1", 0),))
        hung: list[PoolNode] = []
        for number in range(4):
            hanging = Server("n", {FrameKind.STATUS: lambda exchange, body: time.sleep(3.0)}, admit)
            opened.callback(hanging.stop)
            hung.append(PoolNode("n", hanging.process, "", (hanging.start("127.0.0.1", 0),)))
            ping(links, hung[number])  # so a connection is open
        requests = [PeerRequest(peer, FrameKind.STATUS, b"") for peer in hung]
        requests.append(PeerRequest(alive, FrameKind.PING, b"x"))
        *errors, answer = ask_peers(links, requests, FrameKind.PONG, time.monotonic() + 2 * SILENCE_S)
        assert answer == b"x" and not links.dead(alive)
        assert all(isinstance(error, KVStoreError) for error in errors)


def test_a_dead_peer_costs_one_wait_until_it_answers(links: PeerLinks) -> None:
    with socket.socket() as silent:  # as a stopped process: the kernel takes connections for it
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        peer = PoolNode("n", "a", "", (address,))
        with pytest.raises(DeadlineExceeded):
            ping(links, peer)
        assert links.dead(peer)
        for _ in range(1000):  # each of these would wait for half a second
            began_s = time.monotonic()
            with pytest.raises(NodeUnavailable):
                ping(links, peer)
            assert time.monotonic() - began_s < LATE_S
        assert not links.dead(PoolNode("n", "b", "", (address,))), "another process, of which nothing is known"
    server = Server("n", {}, admit)
    server.start("127.0.0.1", int(address.rpartition(":")[2]))
    wait_until("it is known to answer again", lambda: not links.dead(peer), LATE_S)
    ping(links, peer)
    server.stop()


def test_a_connection_that_was_kept_open_and_ended_is_replaced(links: PeerLinks) -> None:
    """The server closes it while it is idle, as one does that makes room, or a firewall in between. The server is not
    taken for dead."""
    server = Server("n", {}, admit, ServerLimits(idle_s=0.2))
    peer = PoolNode("n", server.process, "", (server.start("127.0.0.1", 0),))
    for _ in range(3):
        with links.to(peer, later()) as one, links.to(peer, later()) as other:
            assert all(
                each.call(FrameKind.PING, b"x", reply=FrameKind.PONG, deadline_s=later()) for each in (one, other)
            )
        wait_until("they are closed", lambda: server.connections == 0, LATE_S)
        assert links.call(peer, later(), pinged) == b"x" and not links.dead(peer)
        wait_until("it is closed", lambda: server.connections == 0, LATE_S)
        links.call(peer, later(), pinged)
    wait_until("it is closed", lambda: server.connections == 0, LATE_S)
    with pytest.raises(StaleConnection), links.to(peer, later()) as connection:
        pinged(connection)
    ping(links, peer)
    server.stop()
    with pytest.raises(NodeUnavailable):
        links.call(peer, later(), pinged)
    assert links.dead(peer), "a new connection failed as well"


def test_connections_that_are_not_used_are_closed(links: PeerLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process at rest has none, and no thread."""
    monkeypatch.setattr(peer_links, "IDLE_S", 0.3)
    server = Server("n", {}, admit)
    peer = PoolNode("n", server.process, "", (server.start("127.0.0.1", 0),))
    for _ in range(2):
        with links.to(peer, later()), links.to(peer, later()):
            ping(links, peer)
        assert server.connections == 3
        wait_until("they are closed", lambda: server.connections == 0, LATE_S)
        wait_until("nothing is kept", lambda: not links._has_keeper, LATE_S)
    ping(links, peer)
    server.stop()


def test_a_peer_without_a_free_connection_is_tried_after_growing_pauses(links: PeerLinks) -> None:
    """It counts as full and not as dead. Callers in between are refused without a message to it."""
    tries, refuse = list[float](), [True]

    def full(hello: Hello, names: Sequence[str]) -> Caller:
        tries.append(time.monotonic())
        if refuse:
            raise TooManyCalls("128 connections are open")
        return LOCAL

    server = Server("n", {}, full)
    peer = PoolNode("n", server.process, "", (server.start("127.0.0.1", 0),))
    began_s, calls = time.monotonic(), 0
    while time.monotonic() < began_s + 2.0:
        with pytest.raises(TooManyCalls):
            ping(links, peer)
        calls += 1
        time.sleep(0.001)
    assert not links.dead(peer)
    assert 1 <= len(tries) <= 5 and calls > 10 * len(tries), "after 0, 0.25, 0.75 and 1.75 s"
    refuse.clear()
    wait_until("it is tried again", lambda: reached(links, peer), LATE_S)
    ping(links, peer)
    server.stop()


def reached(links: PeerLinks, peer: PoolNode) -> bool:
    try:
        ping(links, peer)
    except TooManyCalls:
        return False
    return True


def pinged(connection: DataConnection) -> bytearray:
    return connection.call(FrameKind.PING, b"x", reply=FrameKind.PONG, deadline_s=later())


def test_a_token_that_was_replaced_is_taken_up(tmp_path: Path) -> None:
    """The file is read for every connection; the one that showed the old token costs one call, and nobody is dead."""
    valid = ["first"]

    def known(hello: Hello, names: Sequence[str]) -> Caller:
        if hello.token not in valid:
            raise Unauthenticated("who is that?")
        return LOCAL

    file = tmp_path / "token"
    file.write_text("first\n")
    links = PeerLinks("p", "test", credentials_of({"KVSTORE_TOKEN_FILE": str(file)}))
    server = Server("n", {}, known)
    peer = PoolNode("n", server.process, "", (server.start("127.0.0.1", 0),))
    ping(links, peer)
    file.write_text("second\n")
    valid[:] = ["second"]
    with pytest.raises(Unauthenticated):
        ping(links, peer)
    ping(links, peer)
    file.unlink()
    ping(links, peer)  # on the connection that is open
    links.close()
    server.stop()


def test_a_certificate_is_known_by_the_name_that_the_catalog_says(tmp_path: Path) -> None:
    """Peers dial an address; the certificate may name a host instead."""
    certificates = Certificates(tmp_path, names=("node",))
    files = [Path(certificates.path(name)) for name in ("node.pem", "node.key", "ca.pem")]
    certificate = ServerCertificate(files[0], files[1])
    assert certificate.name_for("127.0.0.1", "") == certificate.name_for("127.0.0.1", "other") == "node.example"
    assert (
        ServerCertificate(*(Path(certificates.path(f"server.{end}")) for end in ("pem", "key"))).name_for(
            "127.0.0.1", "localhost"
        )
        == ""
    )
    server = Server("n", {}, admit, tls=certificate.for_sockets())
    address = server.start("127.0.0.1", 0)
    links = PeerLinks("p", "test", DialCredentials(ca=str(files[2])))
    ping(links, PoolNode("n", "p", "", (address,), tls=True, tls_name="node.example"))
    for wrong in ("", "other.example"):
        with pytest.raises(NodeUnavailable, match="certificate"):
            ping(links, PoolNode("n", f"q{wrong}", "", (address,), tls=True, tls_name=wrong))
    links.close()
    server.stop()
