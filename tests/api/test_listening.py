"""Where the API listens, what it asks of callers there, what it refuses to start with, and how it ends."""

from __future__ import annotations

import signal
import stat
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.config import NodeConfig
from kvstore.errors import InvalidRequest
from kvstore.pb import store_pb2 as pb
from kvstore.server import listening
from kvstore.server.identities import Identities
from tests.helpers import api
from tests.helpers.api import Certificates, Client, pages_message
from tests.helpers.content import chain, contents
from tests.helpers.processes import Machine, wait_until

Code = grpc.StatusCode

BY_CERTIFICATE = '[[identity]]\nname = "c"\ncertificate = "client.example"\nsalts = ["c"]\n'
BY_OTHER_NAME = '[[identity]]\nname = "d"\ncertificate = "alias.example"\nsalts = ["d"]\n'


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def test_tls_with_tokens_beyond_loopback(machine: Machine, tmp_path: Path, certificates: Certificates) -> None:
    flags = {"tls_cert": certificates.path("server.pem"), "tls_key": certificates.path("server.key")}
    identities = api.identities_file(tmp_path)
    daemon, address = api.serve_api(machine, listen="0.0.0.0:0", identities=identities, **flags)
    address = address.replace("0.0.0.0", "127.0.0.1")
    for token, expected in (("a-token", Code.OK), ("late-token", Code.UNAUTHENTICATED), (None, Code.UNAUTHENTICATED)):
        client = Client(address, token, certificates.credentials())
        assert client.code("About", pb.AboutRequest()) is expected
        client.close()
    clear = Client(address, "a-token")
    assert clear.code("About", pb.AboutRequest(), 3) is Code.UNAVAILABLE
    stranger = Client(address, "a-token", grpc.ssl_channel_credentials())  # does not trust our authority
    assert stranger.code("About", pb.AboutRequest(), 3) is Code.UNAVAILABLE
    assert daemon.terminate() == 0


def test_mtls(machine: Machine, tmp_path: Path, certificates: Certificates) -> None:
    identities = api.identities_file(tmp_path, BY_CERTIFICATE + BY_OTHER_NAME + api.TENANTS)
    names = {"tls_cert": "server.pem", "tls_key": "server.key", "tls_client_ca": "ca.pem"}
    flags = {flag: certificates.path(name) for flag, name in names.items()}
    _, address = api.serve_api(machine, listen="0.0.0.0:0", identities=identities, **flags)
    address = address.replace("0.0.0.0", "127.0.0.1")
    for certificate, token, expected in (
        ("client", None, "c"),
        ("client", "a-token", "a"),  # a token says more than the certificate of a machine
        ("client", "wrong", Code.UNAUTHENTICATED),
        ("other", None, Code.UNAUTHENTICATED),  # of our authority, but nobody we know
        ("", "a-token", Code.UNAVAILABLE),  # without a certificate there is no connection
    ):
        client = Client(address, token, certificates.credentials(certificate))
        if isinstance(expected, str):
            assert client.call("About", pb.AboutRequest()).identity == expected
        else:
            assert client.code("About", pb.AboutRequest(), 3) is expected, (certificate, token)
        client.close()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    forged = Certificates(foreign)  # the same names, another authority
    pair = forged.read("client.key"), forged.read("client.pem")
    client = Client(address, None, grpc.ssl_channel_credentials(certificates.read("ca.pem"), *pair))
    assert client.code("About", pb.AboutRequest(), 3) is Code.UNAVAILABLE
    client.close()


def test_what_would_let_strangers_in_is_refused(tmp_path: Path, certificates: Certificates) -> None:
    """The same check without a daemon around it: nothing is opened before it."""
    tls = {"tls_cert": Path(certificates.path("server.pem")), "tls_key": Path(certificates.path("server.key"))}
    known = {"identities": Path(api.identities_file(tmp_path))}
    other_key, here, far = {"tls_key": Path(certificates.path("other.key"))}, ("127.0.0.1:0",), ("0.0.0.0:0",)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("--tls-cert", {"listen": far}),
        ("--tls-cert", {"listen": far, **known}),
        ("--identities", {"listen": far, **tls}),
        ("--identities", {"listen": ("[::]:0",), **tls}),
        ("--identities", {"listen": (*here, *far), **tls}),
        ("not a pair", {"listen": here, **tls, **other_key}),
        ("tls_key", {"listen": here, "tls_cert": tls["tls_cert"]}),
        ("No such file", {"listen": here, "identities": tmp_path / "none"}),
        ("no host", {"listen": ("no-such-host.invalid:0",)}),
    ]
    for reason, settings in wrong:
        with pytest.raises(InvalidRequest, match=reason):
            planned(settings)
    for settings in ({"listen": here}, {"listen": ("[::1]:0", "localhost:0")}, {"listen": far, **tls, **known}):
        planned(settings)
    known["identities"].chmod(0o644)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        planned({"listen": here, **known})
    api.identities_file(tmp_path, BY_CERTIFICATE)
    with pytest.raises(InvalidRequest, match="--tls-client-ca"):
        planned({"listen": here, **tls, **known})
    tls["tls_key"].chmod(0o604)
    with pytest.raises(InvalidRequest, match="can be read by others"):
        planned({"listen": here, **tls})


def planned(settings: dict[str, Any]) -> None:
    """What a daemon of these settings would open."""
    config = NodeConfig(**settings)
    listening.plan(config, Identities(config.identities))


def test_a_unix_socket_is_guarded_by_its_mode(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "sock"
    identities = api.identities_file(tmp_path)
    daemon, address = api.serve_api(machine, listen=f"unix:{path}", identities=identities)
    assert address == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    local, a, wrong = Client(address), Client(address, "a-token"), Client(address, "wrong")
    assert local.call("About", pb.AboutRequest()).operator
    assert a.call("About", pb.AboutRequest()).identity == "a"
    assert wrong.code("About", pb.AboutRequest()) is Code.UNAUTHENTICATED
    other = machine.run("serve", "--name", "second", "--dram", "32MiB", "--listen", f"unix:{path}")
    assert other.returncode == 2 and "another process" in other.stderr
    assert local.code("About", pb.AboutRequest()) is Code.OK
    daemon.kill()
    again, _ = api.serve_api(machine, listen=f"unix:{path}", identities=identities)  # the dead one's is replaced
    wait_until("the new one answers", lambda: local.code("About", pb.AboutRequest(), 1) is Code.OK)
    for client in (local, a, wrong):
        client.close()
    assert again.terminate() == 0
    assert not path.exists()


def test_several_addresses_and_hangup(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "sock"
    config = tmp_path / "node.toml"
    config.write_text(f'[node]\nlisten = ["127.0.0.1:0", "unix:{path}"]\n')
    identities = api.identities_file(tmp_path)
    daemon = machine.spawn("api", dram="32MiB", config=str(config), identities=identities)
    addresses = daemon.wait_ready().split("grpc on ")[1].split()[:2]
    a = Client(addresses[0], "a-token")
    assert a.code("About", pb.AboutRequest()) is Code.OK
    api.identities_file(tmp_path, api.identity("new"))
    daemon.signal(signal.SIGHUP)
    new = Client(addresses[0], "new-token")
    wait_until("the new identity is known", lambda: new.code("About", pb.AboutRequest()) is Code.OK, 5)
    assert a.code("About", pb.AboutRequest()) is Code.UNAUTHENTICATED
    assert Client(addresses[1]).code("About", pb.AboutRequest()) is Code.OK


def test_sigterm_ends_calls_within_seconds(machine: Machine) -> None:
    daemon, address = api.serve_api(machine)
    client = Client(address)
    keys = chain(1, 8)
    client.call("Write", api.write_messages(pages_message(keys), contents(keys)))
    ended: list[Code] = []
    begun = threading.Semaphore(0)

    def hold(call: Any) -> None:
        try:
            for _ in call:  # the first document says from where on it watches
                begun.release()
        except grpc.RpcError as error:
            ended.append(error.code())

    calls = [client.stub.Watch(pb.WatchRequest(), timeout=600), client.stub.Watch(pb.WatchRequest(), timeout=600)]
    threads = [threading.Thread(target=hold, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    assert begun.acquire(timeout=60) and begun.acquire(timeout=60)
    assert daemon.terminate() == 0
    for thread in threads:
        thread.join(60)
    assert len(ended) == 2 and set(ended) <= {Code.UNAVAILABLE, Code.CANCELLED}
    api.serve_api(machine)
    store = machine.connect("api")
    assert store.cache(api.SMALL).lookup(keys).pages == 8
    client.close()
