"""Servers that are shown new certificates while they run: gRPC, and sockets as of data servers and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from kvstore.server.certificates import ServerCertificate
from tests.helpers.api import Certificates

WAIT_S = 30.0


class Files:
    """Two authorities, and the files of a server that has a certificate of one of them."""

    def __init__(self, folder: Path) -> None:
        self.sets = {}
        for name in ("old", "new"):
            (folder / name).mkdir()
            self.sets[name] = Certificates(folder / name)
        self.served = folder / "served"
        self.served.mkdir()
        self.put("old")
        self.certificate = ServerCertificate(*(self.served / name for name in ("server.pem", "server.key", "ca.pem")))

    def put(self, which: str, *names: str) -> None:
        for name in names or ("server.pem", "server.key", "ca.pem"):
            draft = self.served / "draft"
            shutil.copy(self.sets[which].path(name), draft)
            draft.chmod(0o600)
            draft.rename(self.served / name)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("certificates"))


Knock = Callable[[Certificates], bool]
"""Whether a server lets in a client that has, and trusts, only what this authority signed."""


@contextlib.contextmanager
def grpc_server(certificate: ServerCertificate) -> Iterator[Knock]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def do(work: object) -> object:
        return asyncio.run_coroutine_threadsafe(work, loop).result(WAIT_S)  # type: ignore[arg-type]

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        port = server.add_secure_port("127.0.0.1:0", certificate.for_grpc())
        await server.start()
        return server, port

    server, port = do(start())  # type: ignore[misc]

    def knock(of: Certificates) -> bool:
        with grpc.secure_channel(f"127.0.0.1:{port}", of.credentials("client")) as channel:
            with pytest.raises(grpc.RpcError) as told:
                channel.unary_unary("/none/None", lambda _: b"", lambda _: b"")(None, timeout=WAIT_S)
            assert isinstance(told.value, grpc.Call)
            return told.value.code() is grpc.StatusCode.UNIMPLEMENTED  # not UNAVAILABLE

    try:
        yield knock
    finally:
        do(server.stop(0))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
        loop.close()


@contextlib.contextmanager
def socket_server(certificate: ServerCertificate) -> Iterator[Knock]:
    context, ended = certificate.for_sockets(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)

        def serve() -> None:
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    sock, _ = listener.accept()
                    answer(sock)

        def answer(sock: socket.socket) -> None:
            sock.settimeout(WAIT_S)
            with contextlib.suppress(OSError), context.wrap_socket(sock, server_side=True) as secured:
                secured.sendall(secured.recv(1))

        thread = threading.Thread(target=serve)
        thread.start()

        def knock(of: Certificates) -> bool:
            ours = ssl.create_default_context(cafile=of.path("ca.pem"))
            ours.load_cert_chain(of.path("client.pem"), of.path("client.key"))
            sock = socket.create_connection(listener.getsockname(), WAIT_S)
            try:
                with ours.wrap_socket(sock, server_hostname="127.0.0.1") as secured:
                    secured.sendall(b".")
                    return secured.recv(1) == b"."
            except OSError:
                return False

        try:
            yield knock
        finally:
            ended.set()
            thread.join(WAIT_S)


@pytest.mark.parametrize("server", [grpc_server, socket_server])
def test_a_server_shows_and_asks_for_the_certificates_that_its_files_have_now(
    server: Callable[[ServerCertificate], contextlib.AbstractContextManager[Knock]], files: Files
) -> None:
    """Its own certificate, and the authority of its clients. While the files do not fit it goes on with the former."""
    old, new = files.sets["old"], files.sets["new"]
    files.put("old")
    with server(files.certificate) as lets_in:
        assert lets_in(old) and not lets_in(new)
        files.put("new", "server.pem")  # its key is still the other one
        assert lets_in(old) and not lets_in(new)
        files.put("new")
        assert lets_in(new) and not lets_in(old)
        (files.served / "ca.pem").unlink()
        assert lets_in(new)
        files.put("old")
        assert lets_in(old) and not lets_in(new)
