"""ServerCertificate: a server's certificate, and the authorities for its clients' certificates, for gRPC and for
sockets."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kvstore.cluster.catalog.task_health import TaskHealth
from kvstore.config.daemon import DaemonConfig
from kvstore.config.reading import ChangedFiles
from kvstore.errors import InvalidRequest

log = logging.getLogger("kvstore.tls")


@dataclass(frozen=True)
class ServerCertificate:
    """PEM files. Servers read them again when they change, without a restart or a signal.

    Attributes:
        cert: the certificate and its chain.
        key: its private key.
        client_ca: every caller has to present a certificate that one of these authorities signed. None: no certificate
            is needed.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    @classmethod
    def of(cls, config: DaemonConfig) -> ServerCertificate | None:
        """Return a daemon's checked certificate; None if its connections are plain. Raises as ``check``."""
        if config.tls_cert is None or config.tls_key is None:
            return None
        certificate = cls(config.tls_cert, config.tls_key, config.tls_client_ca)
        certificate.check()
        return certificate

    def check(self) -> None:
        """Check the files. gRPC does not: it accepts any, and then refuses every caller silently.

        Raises:
            InvalidRequest: a file is not PEM, certificate and key do not match, or other users can read the key.
        """
        for name, path in (("tls_key", self.key), ("tls_cert", self.cert), ("tls_client_ca", self.client_ca)):
            if path is not None:
                _pem(path, name)
        self._context()
        if os.stat(self.key).st_mode & 0o007:
            raise InvalidRequest("tls_key", f"{self.key} can be read by others: chmod 600 {self.key}")

    @property
    def files(self) -> ChangedFiles:
        """A watch that reports later changes of these files."""
        files = ChangedFiles(each for each in (self.cert, self.key, self.client_ca) if each is not None)
        files.changed()
        return files

    def for_grpc(self) -> grpc.ServerCredentials:
        """Return credentials for gRPC servers. After a change of the files, new connections get the new certificate.
        Raises InvalidRequest if a file cannot be read."""
        renewal = _Renewal(self)

        def fetch() -> Any:  # None if nothing has changed
            return self._configuration() if renewal.is_due() else None

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), fetch, require_client_authentication=self.client_ca is not None
        )

    def for_sockets(self) -> ssl.SSLContext:
        """Return a context for data servers and HTTP. After a change of the files, new connections get the new
        certificate. Raises InvalidRequest if the files are not valid."""
        renewal, first = _Renewal(self), self._context()
        current = first

        def begin(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            """OpenSSL calls this in each handshake, whether or not the client names a server."""
            nonlocal current
            if renewal.is_due():
                current = self._context()
            if current is not first:
                connection.context = current

        first.sni_callback = begin
        return first

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        authorities = _pem(self.client_ca, "tls_client_ca") if self.client_ca is not None else None
        pair = _pem(self.key, "tls_key"), _pem(self.cert, "tls_cert")
        return grpc.ssl_server_certificate_configuration([pair], authorities)

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert, self.key, password="")
        except (OSError, ValueError) as error:
            problem = f"{self.cert} and {self.key} are not a pair of certificate and key ({error})"
            raise InvalidRequest("tls_cert", problem) from None
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ValueError) as error:
                raise InvalidRequest("tls_client_ca", f"{self.client_ca} cannot be used ({error})") from None
            context.verify_mode = ssl.CERT_REQUIRED
            context.num_tickets = 0  # with tickets, a client could resume a session after its authority was removed
            context.options |= ssl.OP_NO_TICKET
        return context

    def name_for(self, address: str, host: str) -> str | None:
        """Return the name by which other machines should verify a server at ``address``, configured as ``host``.

        "" stands for the address itself, if the certificate has it. Otherwise the name is ``host`` if the certificate
        has it, or else the certificate's first name without a wildcard, or else ``host`` if a wildcard matches it.
        None: other machines could not verify the server.
        """
        names = self.names()
        if address in names:
            return ""
        plain = [name for name in (host, *names) if name in names and "*" not in name]
        if plain:
            return plain[0]
        return host if any(_matches(name, host) for name in names) else None

    def names(self) -> list[str]:
        """Return the alternative names in the certificate; none if it is not valid.

        Python shows them only to a client that verifies the certificate, so this makes a handshake with itself."""
        ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        ours.load_cert_chain(self.cert, self.key, password="")
        theirs.check_hostname = False
        theirs.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        theirs.load_verify_locations(self.cert)
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        server, client = ours.wrap_bio(to_server, to_client, server_side=True), theirs.wrap_bio(to_client, to_server)
        try:
            for end in (client, server, client):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        except ssl.SSLError:
            return []
        fields: Any = client.getpeercert() or {}
        return [str(value) for _, value in fields.get("subjectAltName", ())]


def ktls_missing() -> str:
    """Return why the kernel cannot encrypt TLS connections of this process (kTLS), or "" if it can. Nothing uses it
    yet: OpenSSL encrypts in this process."""
    if not hasattr(ssl, "OP_ENABLE_KTLS"):
        return "this Python has no ssl.OP_ENABLE_KTLS, which is in 3.12 and later"
    if not Path("/sys/module/tls").exists():
        return "the kernel's tls module is not loaded"
    return ""


class _Renewal:
    """Detects that a server's files changed to other valid files. While they are invalid, perhaps half written, the
    server keeps the old certificate."""

    def __init__(self, certificate: ServerCertificate) -> None:
        self._certificate = certificate
        self._files = certificate.files
        self._health = TaskHealth(f"certificate {certificate.cert}")

    def is_due(self) -> bool:
        """Return True once for each change. Any thread may call this."""
        if not self._files.changed():
            return False
        try:
            self._certificate.check()
        except InvalidRequest as error:
            self._health.note_failure(error)
            self._files.forget()
            return False
        self._health.note_success()
        log.info("certificate %s was read again", self._certificate.cert)
        return True


def _matches(name: str, host: str) -> bool:
    """Return True if ``name``, such as *.example, matches ``host``."""
    return name.startswith("*.") and host.partition(".")[2] == name[2:]


def _pem(path: Path, field_name: str) -> bytes:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(field_name, f"cannot read {path}: {error.strerror}") from None
    if b"-----BEGIN" not in text:
        raise InvalidRequest(field_name, f"{path} is not a PEM file")
    return text
