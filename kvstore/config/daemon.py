"""Settings that every daemon has, and their checks: its process, its gRPC API and its cluster.

A daemon's config is a subclass. It declares a setting again if its default or meaning differs there. Its own flags come
first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.config.reading import (
    parse_address_or_none,
    parse_hosts,
    parse_listen,
    parse_number,
    parse_path_or_none,
    parse_text,
    setting,
)
from kvstore.errors import InvalidRequest

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
NAME = re.compile(
    r"[a-zA-Z0-9._-]{1,48}"
)  # part of the paths of folders and sockets; a socket's path has at most 108 bytes


def require(name: str, holds: bool, rule: str, value: object) -> None:
    """Raise InvalidRequest for the setting ``name`` unless ``holds``. ``rule`` says what it must be."""
    if not holds:
        raise InvalidRequest(name, f"{rule} (got {value!r})")


def _file(about: str) -> Any:
    return setting(None, parse_path_or_none, about, metavar="FILE")


def listen(*default: str) -> Any:
    """Return the setting for the addresses of the gRPC API, with this default."""
    about = (
        "HOST:PORT or unix:PATH of the gRPC API. Beyond loopback it needs TLS and identities. Without identities, "
        "callers that reach it may do anything."
    )
    return setting(default, parse_listen, about, metavar="HOST:PORT|unix:PATH", repeats=True)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Where a daemon finds its cluster, and how it identifies itself to etcd."""

    catalog: str = setting(
        "",
        parse_text,
        (
            "The catalog of the cluster's members: memory, file:PATH or etcd://HOST:PORT,... If it is not set, the "
            "daemon is not in a cluster."
        ),
        metavar="URL",
    )
    pool: str = setting(
        "default", parse_text, "Name of the pool in the catalog. Nodes and engines of the same pool find each other."
    )
    catalog_ttl_s: float = setting(
        10.0, parse_number, "Seconds after which a daemon that does not renew its session counts as gone."
    )
    catalog_ca: Path | None = _file(
        "PEM file of the authorities that sign etcd's certificates. With it the connection uses TLS."
    )
    catalog_cert: Path | None = _file("PEM file with the certificate that is presented to etcd.")
    catalog_key: Path | None = _file("PEM file with the private key of `catalog_cert`.")
    catalog_user: str = setting("", parse_text, "User name at etcd. If it is not set, no name is sent.")
    catalog_password_file: Path | None = _file("File with that user's password; only its owner may read it.")

    def check_cluster(self) -> None:
        """Raise InvalidRequest if one of these settings is invalid. The catalog's URL is checked when it is used."""
        require("pool", NAME.fullmatch(self.pool) is not None, "must match [a-zA-Z0-9._-]{1,48}", self.pool)
        require("catalog_ttl_s", 1 <= self.catalog_ttl_s <= 3600, "must be from 1 to 3600", self.catalog_ttl_s)
        both = (self.catalog_cert is None) == (self.catalog_key is None)
        require("catalog_key", both, "must be given together with catalog_cert", str(self.catalog_key))


@dataclass(frozen=True, kw_only=True)
class DaemonConfig(ClusterConfig):
    """Settings of every daemon: its name, its gRPC API and HTTP, its logs, its cluster."""

    name: str = setting("default", parse_text, "Name in logs and metrics.")
    http: str | None = setting(
        None,
        parse_address_or_none,
        "HOST:PORT of /healthz, /readyz and /metrics; none: no HTTP.",
        metavar="HOST:PORT",
    )
    http_hosts: tuple[str, ...] = setting(
        (),
        parse_hosts,
        (
            "Host names that HTTP accepts in addition to addresses, names without a dot and the machine's own name; "
            "*: any name."
        ),
        metavar="NAME",
        repeats=True,
    )
    listen: tuple[str, ...] = listen()
    tls_cert: Path | None = _file("PEM file with the certificate (and chain) that the gRPC API presents.")
    tls_key: Path | None = _file("PEM file with the private key of `tls_cert`.")
    tls_client_ca: Path | None = _file(
        "PEM file of authorities. Every client must present a certificate that one of them signed."
    )
    identities: Path | None = _file(
        "TOML file of callers, each with its token or certificate, and its salts. Only its owner may read the file."
    )
    log_level: str = setting("info", parse_text, "debug, info, warning or error.")
    log_format: str = setting("text", parse_text, "text, or json with one object per line.")

    @property
    def file_mode(self) -> int:
        """The permission bits of unix sockets."""
        return 0o600

    def check_daemon(self) -> None:
        """Raise InvalidRequest if a setting is invalid or conflicts with another one."""
        self.check_cluster()
        require("name", NAME.fullmatch(self.name) is not None, "must match [a-zA-Z0-9._-]{1,48}", self.name)
        require("log_level", self.log_level in LOG_LEVELS, f"must be one of {', '.join(LOG_LEVELS)}", self.log_level)
        require("log_format", self.log_format in LOG_FORMATS, "must be text or json", self.log_format)
        both = (self.tls_cert is None) == (self.tls_key is None)
        require("tls_key", both, "must be given together with tls_cert", str(self.tls_key))
        ca = self.tls_client_ca is None or self.tls_cert is not None
        require("tls_client_ca", ca, "needs tls_cert and tls_key", str(self.tls_client_ca))
