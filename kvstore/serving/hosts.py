"""HostNames: by which names a daemon answers over HTTP, so that a web page cannot reach it through a browser.

A page of ``evil.example`` may point that name at 127.0.0.1 once it is loaded (DNS rebinding): the browser then sends
our answers to its scripts. Such requests name ``evil.example`` as their host. So a request has to name one of:

- an IP address, or a name without a dot: neither is a name that a stranger can point anywhere;
- ``localhost`` and what ends with ``.localhost``;
- this machine's own name, the host of ``http``, and names in the certificate that is shown;
- a name of ``http_hosts``: what a load balancer passes on, say.

What a page of another site sends names that site as its origin, and is refused too. Clients that are not browsers name
no origin.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from typing import Final
from urllib.parse import urlsplit

from kvstore.config import parse_address
from kvstore.config.daemon import DaemonConfig

ANY: Final = "*"
_HEADER: Final = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{0,5})?")
SHOWN_MAX: Final = 100  # characters of what was refused, in its error


class HostNames:
    """Decides about the Host and Origin of a request. Args: names, of which ``*.example`` stands for one more label."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {name.lower().rstrip(".") for name in names}

    @classmethod
    def of(cls, config: DaemonConfig, certified: Iterable[str] = ()) -> HostNames:
        """The host names of a daemon. ``certified``: names in the certificate that its HTTP server shows."""
        served = [parse_address(config.http, "http")[0]] if config.http is not None else []
        return cls((*served, socket.gethostname(), *certified, *config.http_hosts))

    def refusal(self, hosts: Sequence[str], origins: Sequence[str]) -> str:
        """Why a request with these headers is not answered; "" where it is."""
        if len(hosts) > 1 or len(origins) > 1:
            return "host: a request names one host and one origin"
        host = _host(hosts[0]) if hosts else ""
        if host is None or (host and not self._may_be_named(host)):
            shown = _shown(hosts[0])
            return f"host: is not a name of this server (got {shown!r}); the setting http_hosts takes more names"
        if origins and not self._may_come_from(origins[0], host):
            return f"origin: pages of other sites are not answered (got {_shown(origins[0])!r})"
        return ""

    def _may_be_named(self, host: str) -> bool:
        return ANY in self._names or _is_number(host) or "." not in host or _is_local(host) or self._is_ours(host)

    def _may_come_from(self, origin: str, host: str) -> bool:
        try:
            found = (urlsplit(origin).hostname or "").rstrip(".")
        except ValueError:
            return False
        return bool(found) and (found == host or self._is_ours(found) or (_is_local(found) and _is_local(host)))

    def _is_ours(self, host: str) -> bool:
        return host in self._names or f"*.{host.partition('.')[2]}" in self._names


def _host(header: str) -> str | None:
    """The host in a Host header, in lower case, without its port; None where there is none."""
    found = _HEADER.fullmatch(header)
    return (found[1] or found[2]).lower().rstrip(".") or None if found else None


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_local(host: str) -> bool:
    if _is_number(host):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def _shown(header: str) -> str:
    return header[:SHOWN_MAX].encode("ascii", "replace").decode()
