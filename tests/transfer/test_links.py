"""Connections to peers: who does not answer costs one wait, and is known to be dead until it answers again."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstore.cluster.data_connection import Caller, DataConnection, DialCredentials, Exchange, credentials_of
from kvstore.cluster.data_listener import Server, ServerLimits
from kvstore.cluster.peer_links import PeerLinks, PoolNode, StaleConnection
from kvstore.cluster.transport import pull
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NodeUnavailable, Unauthenticated
from kvstore.model.replica import FrameClass, Tier
from kvstore.server.certificates import ServerCertificate
from kvstore.server.identities import LOCAL
from kvstore.wire.data import FrameKind, Hello, ReadRequest, WantedChain, WireError, pack_end, pack_range
from tests.helpers.api import Certificates
from tests.helpers.content import SMALL, chain
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


def test_connections_are_used_again(links: PeerLinks) -> None:
    server = Server("n", {}, admit)
    peer = PoolNode("n", server.process, "", (server.start("127.0.0.1", 0),))
    for _ in range(5):
        ping(links, peer)
    assert server.connections == 1
    with pytest.raises(ZeroDivisionError), links.to(peer, later()) as connection:
        connection.send(FrameKind.PING, b"its answer is nobody's", deadline_s=later())
        raise ZeroDivisionError
    ping(links, peer)
    server.stop()


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


def pinged(connection: DataConnection) -> bytearray:
    return connection.call(FrameKind.PING, b"x", reply=FrameKind.PONG, deadline_s=later())


def test_a_connection_on_which_nonsense_came_is_not_used_again(links: PeerLinks) -> None:
    server = Server("n", {FrameKind.READ: range_of_another_page}, admit)
    peer = PoolNode("n", server.process, "", (server.start("127.0.0.1", 0),))
    wanted = WantedChain(SMALL.fingerprint, "", "", FrameClass(SMALL.page_bytes, SMALL.page_tokens, SMALL.layers), True)
    request, rows = ReadRequest(wanted, chain(1, 2), 0, SMALL.page_bytes), np.zeros((2, SMALL.page_bytes), np.uint8)
    with pytest.raises(WireError, match="where page 0 was due"), links.to(peer, later()) as connection:
        pull(connection, request, rows, later())
    assert connection.broken and links.dead(peer)
    server.stop()


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


def range_of_another_page(exchange: Exchange, body: memoryview) -> None:
    sums = np.zeros((1, SMALL.layers), "<u4")
    exchange.reply(FrameKind.RANGE, pack_range(1, Tier.DRAM, sums), bytes(SMALL.page_bytes))
    exchange.reply(FrameKind.END, pack_end(1, ""))


def test_a_server_that_took_the_place_of_another_is_not_taken_for_it(links: PeerLinks) -> None:
    server = Server("n", {}, admit)
    address = server.start("127.0.0.1", 0)
    with pytest.raises(KVStoreError, match="this is n"):
        ping(links, PoolNode("m", "a", "", (address,)))
    server.stop()


def test_credentials_are_those_of_the_environment(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    files = (Path(certificates.path(name)) for name in ("server.pem", "server.key", "ca.pem"))
    context = ServerCertificate(*files).for_sockets()
    server = Server("n", {}, admit, tls=context)
    address = server.start("127.0.0.1", 0)
    (tmp_path / "token").write_text("secret\n")
    env = {
        "KVSTORE_TOKEN_FILE": str(tmp_path / "token"),
        **{f"KVSTORE_TLS_{name.upper()}": certificates.path(file) for name, file in FILES.items()},
    }
    ours = credentials_of(env)
    assert ours.token == "secret" and "secret" not in repr(ours)
    links = PeerLinks("p", "test", ours)
    ping(links, PoolNode("n", server.process, "", (address,), tls=True))
    with pytest.raises(KVStoreError):  # the catalog is wrong
        ping(links, PoolNode("n", "x", "", (address,), tls=False))
    links.close()
    stranger = PeerLinks("p", "test", DialCredentials())
    with pytest.raises(KVStoreError):  # whose certificate nobody vouches for
        ping(stranger, PoolNode("n", server.process, "", (address,), tls=True))
    stranger.close()
    server.stop()
    with pytest.raises(InvalidRequest, match="KVSTORE_TOKEN_FILE"):
        credentials_of({"KVSTORE_TOKEN_FILE": str(tmp_path / "none")})


FILES = {"ca": "ca.pem", "cert": "client.pem", "key": "client.key"}
