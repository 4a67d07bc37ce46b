"""What the settings of every daemon have in common: those of its process and of its gRPC API, and how they are checked.

A config dataclass takes each as a field of its own (``http: str | None = daemon.http()``), where it stands in the order
of its flags.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

from kvstore.config.reading import setting
from kvstore.config.values import parse_address_or_none, parse_listen, parse_number, parse_path_or_none, parse_text
from kvstore.errors import InvalidRequest

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
NAME = re.compile(r"[a-zA-Z0-9._-]{1,48}")  # may become a folder's and a socket's: 108 bytes is all a socket has


def http() -> Any:
    """HOST:PORT of /healthz, /readyz and /metrics, or None for no HTTP at all."""
    return setting(None, parse_address_or_none, "Where /healthz, /readyz and /metrics are.", metavar="HOST:PORT")


def listen(*default: str) -> Any:
    """Addresses of the gRPC API."""
    about = "Where the gRPC API listens; may repeat. Beyond loopback it needs TLS and identities."
    return setting(default, parse_listen, about, metavar="HOST:PORT|unix:PATH", repeats=True)


def tls_cert() -> Any:
    """A certificate."""
    return setting(None, parse_path_or_none, "Certificate (and chain) that the gRPC API shows, PEM.", metavar="FILE")


def tls_key() -> Any:
    """Its key."""
    return setting(None, parse_path_or_none, "Its private key, PEM.", metavar="FILE")


def tls_client_ca() -> Any:
    """Whose client certificates count."""
    about = "Authorities, PEM: every client has to show a certificate of one of them."
    return setting(None, parse_path_or_none, about, metavar="FILE")


def identities() -> Any:
    """Who may call."""
    about = "TOML file of who may call the gRPC API, and for which salts."
    return setting(None, parse_path_or_none, about, metavar="FILE")


def log_level() -> Any:
    """One of ``LOG_LEVELS``."""
    return setting("info", parse_text, "debug, info, warning or error.")


def log_format() -> Any:
    """One of ``LOG_FORMATS``."""
    return setting("text", parse_text, "text, or json: one object per line.")


def catalog() -> Any:
    """Where a cluster keeps who is there."""
    about = "Where a cluster keeps who is there: memory, file:PATH, etcd://HOST:PORT[,HOST:PORT...]."
    return setting("", parse_text, about, metavar="URL")


def catalog_ca() -> Any:
    """Whose servers count."""
    return setting(None, parse_path_or_none, "Authorities of etcd's certificates, PEM; makes it TLS.", metavar="FILE")


def catalog_cert() -> Any:
    """Our certificate."""
    return setting(None, parse_path_or_none, "Certificate that we show to etcd, PEM.", metavar="FILE")


def catalog_key() -> Any:
    """Its key."""
    return setting(None, parse_path_or_none, "Its private key, PEM.", metavar="FILE")


def catalog_user() -> Any:
    """Of etcd's own authentication."""
    return setting("", parse_text, "User name at etcd.")


def catalog_password_file() -> Any:
    """Its password."""
    return setting(None, parse_path_or_none, "File with the password; only its owner may read it.", metavar="FILE")


def catalog_ttl_s() -> Any:
    """Liveness."""
    return setting(10.0, parse_number, "Seconds after which others take a daemon that is not heard of for gone.")


def pool() -> Any:
    """Which nodes and engines belong together."""
    return setting(
        "default", parse_text, "Name of the pool in the catalog: nodes and engines of one name find each other."
    )


class DaemonConfig(Protocol):
    """A configuration with these settings."""

    @property
    def name(self) -> str:
        """Of the daemon."""

    @property
    def http(self) -> str | None:
        """See ``http``."""

    @property
    def listen(self) -> tuple[str, ...]:
        """See ``listen``."""

    @property
    def identities(self) -> Path | None:
        """See ``identities``."""

    @property
    def file_mode(self) -> int:
        """Permission bits of unix sockets."""

    @property
    def tls_cert(self) -> Path | None:
        """See ``tls_cert``."""

    @property
    def tls_key(self) -> Path | None:
        """See ``tls_key``."""

    @property
    def tls_client_ca(self) -> Path | None:
        """See ``tls_client_ca``."""

    @property
    def log_level(self) -> str:
        """See ``log_level``."""

    @property
    def log_format(self) -> str:
        """See ``log_format``."""


def check(config: DaemonConfig) -> None:
    """Raises InvalidRequest where one of these settings, or two together, make no sense."""
    require("name", NAME.fullmatch(config.name) is not None, "must match [a-zA-Z0-9._-]{1,48}", config.name)
    require("log_level", config.log_level in LOG_LEVELS, f"must be one of {', '.join(LOG_LEVELS)}", config.log_level)
    require("log_format", config.log_format in LOG_FORMATS, "must be text or json", config.log_format)
    both = (config.tls_cert is None) == (config.tls_key is None)
    require("tls_key", both, "goes with tls_cert", str(config.tls_key))
    ca = config.tls_client_ca is None or config.tls_cert is not None
    require("tls_client_ca", ca, "needs tls_cert and tls_key", str(config.tls_client_ca))


def check_catalog(pool: str, ttl_s: float, cert: Path | None, key: Path | None) -> None:
    """Raises InvalidRequest where one of these settings makes no sense. The catalog's URL is read when it is used."""
    require("pool", NAME.fullmatch(pool) is not None, "must match [a-zA-Z0-9._-]{1,48}", pool)
    require("catalog_ttl_s", 1 <= ttl_s <= 3600, "must be from 1 to 3600", ttl_s)
    require("catalog_key", (cert is None) == (key is None), "goes with catalog_cert", str(key))


def require(name: str, holds: bool, rule: str, got: object) -> None:
    """Raises InvalidRequest where ``rule`` does not hold for the setting of that name."""
    if not holds:
        raise InvalidRequest(name, f"{rule}, got {got!r}")
