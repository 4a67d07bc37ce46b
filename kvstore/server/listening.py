"""Listening: the addresses of a daemon's gRPC server, and the checks before anything is opened.

Beyond loopback every caller must be known, and all traffic is encrypted. Unix sockets are guarded by their permissions.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from kvstore.cluster.data_connection import is_loopback
from kvstore.config import parse_address
from kvstore.config.daemon import DaemonConfig
from kvstore.errors import InvalidRequest
from kvstore.server.certificates import ServerCertificate
from kvstore.server.identities import Identities
from kvstore.shm.unix_sockets import socket_file


def check_remote(config: DaemonConfig, identities: Identities, address: str, setting: str) -> None:
    """Raise InvalidRequest if an address beyond loopback would be served unencrypted, or to unknown callers."""
    if config.tls_cert is None:
        raise InvalidRequest(setting, f"{address} is beyond loopback and needs TLS: give --tls-cert and --tls-key")
    if not identities.required:
        raise InvalidRequest(setting, f"{address} is beyond loopback, where anyone could call: give --identities")


def check_certificates(config: DaemonConfig, identities: Identities) -> None:
    """Raise InvalidRequest if identities name certificates, but the server does not request certificates."""
    if identities.by_certificate and config.tls_client_ca is None:
        raise InvalidRequest("identities", "name certificates, so give --tls-client-ca to request them")


def numeric(host: str, address: str, setting: str) -> list[str]:
    """Return the IP addresses of a host name, so that the server checks the addresses that it opens. Raises
    InvalidRequest if the host is unknown."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise InvalidRequest(setting, f"{address}: there is no host {host}") from None
    numbers = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    loopback = [number for number in numbers if is_loopback(number)]
    return (loopback[:1] or numbers[:1]) if host == "localhost" else numbers


UNIX: Final = "unix:"


@dataclass
class Plan:
    """The sockets that ``bind`` will open: numeric addresses with a port each, and paths."""

    tcp: list[tuple[str, int]]
    unix: list[Path]
    file_mode: int
    credentials: grpc.ServerCredentials | None
    bound: list[Path] = field(default_factory=list)

    def bind(self, server: grpc.aio.Server) -> list[str]:
        """Open everything. Returns the addresses as clients use them. Raises InvalidRequest."""
        addresses = []
        for host, port in self.tcp:
            shown = f"[{host}]" if ":" in host else host
            try:
                if self.credentials is not None:
                    bound = server.add_secure_port(f"{shown}:{port}", self.credentials)
                else:
                    bound = server.add_insecure_port(f"{shown}:{port}")
            except RuntimeError:
                bound = 0
            if not bound:
                raise InvalidRequest("listen", f"cannot listen on {shown}:{port}: it is in use or not ours")
            addresses.append(f"{shown}:{bound}")
        return addresses + [self._bind_unix(server, path) for path in self.unix]

    def _bind_unix(self, server: grpc.aio.Server, path: Path) -> str:
        with socket_file(path, self.file_mode):
            server.add_insecure_port(f"{UNIX}{path}")
        self.bound.append(path)
        return f"{UNIX}{path}"

    def unlink(self) -> None:
        """Remove the files of our unix sockets."""
        for path in self.bound:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def plan(config: DaemonConfig, identities: Identities) -> Plan:
    """Check the configuration and read the certificates.

    Raises:
        InvalidRequest: an address is beyond loopback without TLS or identities, or a certificate cannot be used;
            names the setting and the remedy.
    """
    tcp: list[tuple[str, int]] = []
    unix: list[Path] = []
    for address in config.listen:
        if address.startswith(UNIX):
            unix.append(Path(address.removeprefix(UNIX)))
            continue
        host, port = parse_address(address, "listen")
        for number in numeric(host, address, "listen"):
            if not is_loopback(number):
                check_remote(config, identities, address, "listen")
            tcp.append((number, port))
    check_certificates(config, identities)
    certificate = ServerCertificate.of(config)
    return Plan(tcp, unix, config.file_mode, certificate.for_grpc() if certificate is not None else None)
