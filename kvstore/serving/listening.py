"""Listening: at which addresses, with which credentials, and what is refused before anything is opened.

Beyond loopback every caller must be known and nothing travels in clear. Unix sockets are guarded by their permissions.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from kvstore.config import parse_address
from kvstore.config.daemon import DaemonConfig
from kvstore.errors import InvalidRequest
from kvstore.serving.identities import Identities
from kvstore.serving.reach import check_certificates, check_far, check_key, numeric
from kvstore.tier.plain_files import chmod_socket
from kvstore.transfer.tcp import is_loopback

UNIX: Final = "unix:"


@dataclass
class Plan:
    """What ``bind`` will open: numeric addresses of one port each, and paths."""

    tcp: list[tuple[str, int]]
    unix: list[Path]
    file_mode: int
    credentials: grpc.ServerCredentials | None
    bound: list[Path] = field(default_factory=list)

    def bind(self, server: grpc.aio.Server) -> list[str]:
        """Open everything; returns the addresses as clients use them. Raises InvalidRequest."""
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
                raise InvalidRequest("listen", f"cannot listen on {shown}:{port}: it is taken, or not ours")
            addresses.append(f"{shown}:{bound}")
        return addresses + [self._bind_unix(server, path) for path in self.unix]

    def _bind_unix(self, server: grpc.aio.Server, path: Path) -> str:
        _make_way(path)
        before = os.umask(0o777 & ~self.file_mode)  # nobody connects before the mode is set
        try:
            server.add_insecure_port(f"{UNIX}{path}")
            chmod_socket(path, self.file_mode)
        except (RuntimeError, OSError):
            raise InvalidRequest("listen", f"cannot listen on {UNIX}{path}: is its folder there?") from None
        finally:
            os.umask(before)
        self.bound.append(path)
        return f"{UNIX}{path}"

    def unlink(self) -> None:
        """Remove our sockets' files."""
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
                check_far(config, identities, address, "listen")
            tcp.append((number, port))
    check_certificates(config, identities)
    return Plan(tcp, unix, config.file_mode, _credentials(config))


def _credentials(config: DaemonConfig) -> grpc.ServerCredentials | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    key, chain = _pem(config.tls_key, "tls_key"), _pem(config.tls_cert, "tls_cert")
    check_key(config.tls_cert, config.tls_key)  # gRPC takes anything and then refuses every caller without a word
    authorities = _pem(config.tls_client_ca, "tls_client_ca") if config.tls_client_ca is not None else None
    return grpc.ssl_server_credentials([(key, chain)], authorities, require_client_auth=authorities is not None)


def _pem(path: Path, field_name: str) -> bytes:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(field_name, f"cannot read {path}: {error.strerror}") from None
    if b"-----BEGIN" not in text:
        raise InvalidRequest(field_name, f"{path} is no PEM file")
    return text


def _make_way(path: Path) -> None:
    """Remove the socket of a daemon that is gone. Raises InvalidRequest where it is not gone, or is something else."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise InvalidRequest("listen", f"{path} is there and is no socket: remove it or name another")
    except OSError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass
    raise InvalidRequest("listen", f"another process serves at {path}")
