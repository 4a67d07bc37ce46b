"""ServerCertificate: what a server shows, and whose certificates it asks for, in gRPC's form and in that of sockets."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvstore.config.daemon import DaemonConfig
from kvstore.errors import InvalidRequest


@dataclass(frozen=True)
class ServerCertificate:
    """Files in PEM.

    Attributes:
        cert: the certificate and its chain.
        key: its private key.
        client_ca: every caller has to show a certificate that one of these signed; None: nobody is asked.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    @classmethod
    def of(cls, config: DaemonConfig) -> ServerCertificate | None:
        """What a daemon is configured to show, checked; None: its connections are plain. Raises as ``check``."""
        if config.tls_cert is None or config.tls_key is None:
            return None
        found = cls(config.tls_cert, config.tls_key, config.tls_client_ca)
        found.check()
        return found

    def check(self) -> None:
        """What gRPC does not: it takes anything, and then refuses every caller without a word.

        Raises:
            InvalidRequest: a file is no PEM, certificate and key are no pair, or others can read the key.
        """
        for name, path in (("tls_key", self.key), ("tls_cert", self.cert), ("tls_client_ca", self.client_ca)):
            if path is not None:
                _pem(path, name)
        self.for_sockets()
        if os.stat(self.key).st_mode & 0o007:
            raise InvalidRequest("tls_key", f"{self.key} can be read by others: chmod 600 {self.key}")

    def for_grpc(self) -> grpc.ServerCredentials:
        """For servers of gRPC. Raises InvalidRequest where a file cannot be read."""
        authorities = _pem(self.client_ca, "tls_client_ca") if self.client_ca is not None else None
        pair = _pem(self.key, "tls_key"), _pem(self.cert, "tls_cert")
        return grpc.ssl_server_credentials([pair], authorities, require_client_auth=authorities is not None)

    def for_sockets(self) -> ssl.SSLContext:
        """For data servers. Raises InvalidRequest where the files make no sense."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert, self.key, password="")
        except (OSError, ValueError) as error:
            wrong = f"{self.cert} and {self.key} make no pair of certificate and key ({error})"
            raise InvalidRequest("tls_cert", wrong) from None
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ValueError) as error:
                raise InvalidRequest("tls_client_ca", f"{self.client_ca} cannot be used ({error})") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _pem(path: Path, field_name: str) -> bytes:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(field_name, f"cannot read {path}: {error.strerror}") from None
    if b"-----BEGIN" not in text:
        raise InvalidRequest(field_name, f"{path} is no PEM file")
    return text
