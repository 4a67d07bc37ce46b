"""By which host names, and for whose pages, HTTP is answered: no name that a stranger's page gives us."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from kvstore.config.daemon import DaemonConfig
from kvstore.config.reading import parse_hosts
from kvstore.errors import InvalidRequest
from kvstore.server.certificates import ServerCertificate
from kvstore.server.http import HostNames
from tests.helpers.api import Certificates, identities_file
from tests.helpers.http_server import CALL_S, WORDS, RunningServer, head_of, read_all, replies_in, serve_openai
from tests.helpers.processes import Machine
from tests.helpers.scraping import serve_http

BODY = json.dumps(WORDS).encode()
EVIL = "evil.example"
ALWAYS = (
    "127.0.0.1",
    "127.0.0.1:8090",
    "[::1]:8090",
    "10.1.2.3",
    "localhost",
    "LocalHost:1",
    "a.localhost",
    "node7",
    "x:1",
)
STRANGE = (
    EVIL,
    f"{EVIL}:8090",
    f"{EVIL}.",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "a b",
    "x@127.0.0.1",
    "[::1",
    "",
)
ROUTES = {"/healthz": lambda: (200, "text/plain", "ok\n")}


@pytest.mark.parametrize("host", ALWAYS)
def test_addresses_and_names_that_no_stranger_can_have_are_taken(host: str) -> None:
    assert HostNames([]).refusal([host], []) == ""


@pytest.mark.parametrize("host", STRANGE)
def test_other_names_are_refused(host: str) -> None:
    assert HostNames(["api.example", "*.pool.example"]).refusal([host], []).startswith("host: ")


def test_names_of_the_setting_the_address_and_the_certificate_are_taken() -> None:
    config = DaemonConfig(http="front.example:80", http_hosts=("api.example", "*.pool.example"))
    names = HostNames.of(config, ["*.certified.example"])
    for host in ("front.example", "API.example:443", "a.pool.example", "b.certified.example", socket.gethostname()):
        assert names.refusal([host], []) == "", host
    for host in ("pool.example", "a.b.pool.example", EVIL):
        assert names.refusal([host], [])
    assert HostNames(["*"]).refusal([EVIL], []) == ""
    with pytest.raises(InvalidRequest, match="http_hosts"):
        parse_hosts("api.example,a b")


@pytest.mark.parametrize(
    ("host", "origin", "is_taken"),
    [
        ("localhost:8090", "http://localhost:8090", True),
        ("127.0.0.1:8090", "http://localhost:3000", True),
        ("api.example", "https://api.example", True),
        ("10.0.0.1", "https://api.example", True),
        ("localhost", f"http://{EVIL}", False),
        ("localhost", "http://10.6.6.6", False),
        ("localhost", "http://evil", False),
        ("localhost", "null", False),
        ("localhost", "http://[", False),
        ("localhost", "", False),
    ],
)
def test_pages_of_other_sites_are_refused(host: str, origin: str, is_taken: bool) -> None:
    assert (HostNames(["api.example"]).refusal([host], [origin]) == "") is is_taken


def test_a_request_names_one_host_and_one_origin() -> None:
    names = HostNames([])
    assert names.refusal(["localhost", "localhost"], []) and names.refusal(["x"], ["http://x", "http://x"])
    assert names.refusal([], []) == "", "HTTP/1.0 has none, and no browser speaks it"


def asked(server: RunningServer, *more: str, path: str = "/v1/completions") -> tuple[int, bytes]:
    """Status and body of a reply."""
    with server.connect(CALL_S) as connection:
        head = head_of(len(BODY), "Connection: close", path=path).replace(b"Host: x\r\n", b"")
        connection.sendall(head[:-2] + "".join(f"{line}\r\n" for line in more).encode() + b"\r\n" + BODY)
        ((status, body),) = replies_in(read_all(connection))
        return status, body


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/healthz", "/nowhere"])
def test_the_conductor_refuses_other_names_and_sites_everywhere(path: str) -> None:
    with serve_openai(ROUTES) as server:
        for lines in ([f"Host: {EVIL}"], ["Host: localhost", f"Origin: http://{EVIL}"]):
            status, body = asked(server, *lines, path=path)
            assert status == 403 and json.loads(body)["error"]["code"] == "host_not_allowed"
        assert asked(server, f"Host: {server.url.partition('//')[2]}", path=path)[0] != 403
        assert not server.answers.requests or path == "/v1/completions"


def test_over_tls_the_names_of_the_certificate_are_taken(tmp_path: Path) -> None:
    made = Certificates(tmp_path)
    tls = {"tls_cert": Path(made.path("server.pem")), "tls_key": Path(made.path("server.key"))}
    config = DaemonConfig(http="127.0.0.1:0", identities=Path(identities_file(tmp_path)), **tls)
    certificate = ServerCertificate.of(config)
    assert certificate is not None and certificate.names()
    names = HostNames.of(config, certificate.names())
    assert all(names.refusal([name], []) == "" for name in certificate.names()) and names.refusal([EVIL], [])


def test_a_node_refuses_other_names_and_sites(machine: Machine) -> None:
    _, address = serve_http(machine, dram="4MiB", http_hosts="metrics.example")
    host, _, port = address.rpartition(":")

    def ask(path: str, *lines: str) -> bytes:
        with socket.create_connection((host, int(port)), CALL_S) as connection:
            connection.sendall("\r\n".join((f"GET {path} HTTP/1.1", *lines, "", "")).encode())
            return read_all(connection)

    for path in ("/healthz", "/readyz", "/metrics"):
        for lines in ([f"Host: {EVIL}"], ["Host: localhost", f"Origin: http://{EVIL}"]):
            assert ask(path, *lines).startswith(b"HTTP/1.0 403 ")
        for name in ("metrics.example:1", address, "node7"):
            found = ask(path, f"Host: {name}")
            assert found.startswith(b"HTTP/1.0 200 ") and b"Server: kvstore\r\n" in found
