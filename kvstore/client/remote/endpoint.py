"""The address of a node's gRPC API, and the caller's credentials. Pure, except that it reads the files named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from kvstore.cluster.data_connection import is_loopback
from kvstore.errors import InvalidRequest

SCHEMES = ("kv://", "kv+unix://")
_TLS_FIELDS = ("tls_ca", "tls_cert", "tls_key", "tls_server_name")
TOKEN_CHARS_MAX = 4096  # HTTP/2 limits metadata; tokens are far shorter


@dataclass(frozen=True)
class Endpoint:
    """One address with its credentials.

    Attributes:
        address: the user's text, for messages.
        target: the address in gRPC's form.
        token: sent to the node with every call; "" for none. It is never part of a message or a repr.
        tls: whether the connection is encrypted, and the node's certificate is verified.
        ca, cert, key: PEM texts. If ``ca`` is None, the system's authorities are used.
        server_name: the name that the node's certificate must have; "" for the host of the address.
    """

    address: str
    target: str
    token: str = field(default="", repr=False)
    tls: bool = False
    ca: bytes | None = field(default=None, repr=False)
    cert: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    server_name: str = ""


@dataclass(frozen=True, kw_only=True)
class CallerCredentials:
    """The credentials among the arguments of ``connect``. For those that are None, the environment is used."""

    token: str | None = None
    tls_ca: str | Path | None = None
    tls_cert: str | Path | None = None
    tls_key: str | Path | None = None
    tls_server_name: str | None = None

    def first_set(self) -> str:
        """Return the name of an argument that is not None; "" if there is none."""
        return next((name for name, value in vars(self).items() if value is not None), "")


def is_remote(address: object) -> bool:
    """Return whether an address is a URL rather than a node's name."""
    return isinstance(address, str) and address.startswith(SCHEMES)


def endpoint(address: str, credentials: CallerCredentials, env: Mapping[str, str]) -> Endpoint:
    """Return where and how to connect, according to the user's arguments and to ``KVSTORE_TOKEN``,
    ``KVSTORE_TOKEN_FILE``, ``KVSTORE_TLS_CA``, ``KVSTORE_TLS_CERT`` and ``KVSTORE_TLS_KEY``.

    Raises:
        InvalidRequest: the address is malformed, a file cannot be read, a key has no certificate, or a token would be
            sent unencrypted to another machine. The message names the field and the remedy.
    """
    target, host = _target(address)
    token = _token(credentials.token, env)
    name = credentials.tls_server_name or ""
    if not host:  # the socket's permissions decide who may connect
        tls_field = next((field for field in _TLS_FIELDS if getattr(credentials, field) is not None), "")
        if tls_field:
            raise InvalidRequest(tls_field, "must be absent: a unix socket has no TLS")
        return Endpoint(address, target, token)
    ca = _pem(credentials.tls_ca, env, "tls_ca")
    tls = ca is not None or credentials.tls_cert is not None or credentials.tls_key is not None or bool(name)
    # A certificate only in the environment does not mean TLS: a node's own settings have the same names.
    cert = _pem(credentials.tls_cert, env, "tls_cert") if tls else None
    key = _pem(credentials.tls_key, env, "tls_key") if tls else None
    if (cert is None) != (key is None):
        raise InvalidRequest("tls_key" if key is None else "tls_cert", "needs both tls_cert and tls_key")
    if token and not tls and not is_loopback(host):
        raise InvalidRequest("token", f"would be sent unencrypted to {host}: pass tls_ca (or set KVSTORE_TLS_CA)")
    return Endpoint(address, target, token, tls, ca, cert, key, name)


def _target(address: str) -> tuple[str, str]:
    """Return gRPC's target, and the host or "" for a unix socket."""
    if address.startswith("kv+unix://"):
        path = address.removeprefix("kv+unix://")
        if not path.startswith("/") or "\0" in path or len(path) > 107:
            raise InvalidRequest("address", f"must be kv+unix:///PATH of at most 107 bytes (got {address!r})")
        return f"unix:{path}", ""
    parts, port = _split(address)
    host = parts.hostname or ""
    extra = parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc
    if not host or port is None or extra or any(char.isspace() for char in address):
        raise InvalidRequest("address", f"must be kv://HOST:PORT (got {address!r})")
    return (f"ipv6:[{host}]:{port}" if ":" in host else f"dns:///{host}:{port}"), host


def _split(address: str) -> tuple[SplitResult, int | None]:
    try:
        parts = urlsplit(address)
        return parts, parts.port
    except ValueError as error:
        raise InvalidRequest("address", f"must be kv://HOST:PORT (got {address!r}: {error})") from None


def _token(value: str | None, env: Mapping[str, str]) -> str:
    source = "token"
    token = value if value is not None else env.get("KVSTORE_TOKEN", "")
    if value is None and not token and env.get("KVSTORE_TOKEN_FILE"):
        source = "KVSTORE_TOKEN_FILE"
        token = _read(env["KVSTORE_TOKEN_FILE"], source).decode("latin-1").strip()
        if not token:
            raise InvalidRequest(source, f"must name a file that is not empty (got {env[source]})")
    if not isinstance(token, str) or (value is not None and not value):
        raise InvalidRequest(source, "must be non-empty text")
    if len(token) > TOKEN_CHARS_MAX or not all("!" <= char <= "~" for char in token):
        raise InvalidRequest(source, f"must be at most {TOKEN_CHARS_MAX} printable ASCII characters without blanks")
    return token


def _pem(path: str | Path | None, env: Mapping[str, str], field: str) -> bytes | None:
    variable = f"KVSTORE_{field.upper()}"
    if path is not None:
        if not isinstance(path, str | Path) or not str(path):
            raise InvalidRequest(field, f"must be the path of a PEM file (got {path!r})")
        return _read(path, field)
    return _read(env[variable], variable) if env.get(variable) else None


def _read(path: str | Path, field: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise InvalidRequest(field, f"{path}: {getattr(error, 'strerror', None) or error}") from None
