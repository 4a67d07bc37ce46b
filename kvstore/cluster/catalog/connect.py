"""Makes a catalog from the URL after ``--catalog``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from kvstore.cluster.catalog.base import Catalog
from kvstore.cluster.catalog.memory import MemoryCatalog
from kvstore.config.daemon import ClusterConfig
from kvstore.errors import InvalidRequest

ETCD_PORT: Final = 2379
_ENDPOINT: Final = re.compile(r"(\[[0-9a-fA-F:]+\]|[a-zA-Z0-9.-]+)(:[0-9]{1,5})?")
_FORMS: Final = "must be memory, file:PATH or etcd://HOST:PORT[,HOST:PORT...]"


def check_url(url: str) -> str:
    """Return ``url`` if it is valid, else raise InvalidRequest for ``catalog``."""
    scheme, _, rest = url.partition(":")
    right = url == "memory" or (scheme == "file" and Path(rest).is_absolute() and rest != "/")
    right = right or (scheme == "etcd" and rest.startswith("//") and all(map(_ENDPOINT.fullmatch, _split(rest))))
    if not right:
        raise InvalidRequest("catalog", f"{_FORMS} with an absolute PATH (got {url[:200]!r})")
    return url


def to_catalog(url: str, access: ClusterConfig) -> Catalog:
    """Make a catalog; the caller starts it.

    Raises:
        InvalidRequest: the URL is not valid, or the password's file cannot be read, or other users can read it.
    """
    scheme, _, rest = check_url(url).partition(":")
    if scheme == "file":
        from kvstore.cluster.catalog.file import FileCatalog

        return FileCatalog(Path(rest))
    if scheme == "etcd":
        from kvstore.cluster.catalog.etcd import EtcdCatalog  # only here: it loads gRPC
        from kvstore.cluster.catalog.etcd_channel import Credentials

        endpoints = [each if re.search(r":[0-9]+$", each) else f"{each}:{ETCD_PORT}" for each in _split(rest)]
        pem = access.catalog_ca, access.catalog_cert, access.catalog_key
        credentials = Credentials(*pem, access.catalog_user, access.catalog_password_file)
        credentials.password()  # fails now if the file cannot be read; later reads are tried again
        return EtcdCatalog(endpoints, credentials)
    return MemoryCatalog()


def _split(rest: str) -> list[str]:
    return rest.removeprefix("//").rstrip("/").split(",")
