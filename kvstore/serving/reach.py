"""Reach: which addresses a name to listen at means, and what is asked for before anything is listened at."""

from __future__ import annotations

import socket

from kvstore.config.daemon import DaemonConfig
from kvstore.errors import InvalidRequest
from kvstore.serving.identities import Identities
from kvstore.transfer.tcp import is_loopback


def check_far(config: DaemonConfig, identities: Identities, address: str, setting: str) -> None:
    """Raises InvalidRequest where an address beyond loopback would be served in clear, or to anyone."""
    if config.tls_cert is None:
        raise InvalidRequest(setting, f"{address} is beyond loopback and needs TLS: give --tls-cert and --tls-key")
    if not identities.asked_for:
        raise InvalidRequest(setting, f"{address} is beyond loopback and anyone could call: give --identities")


def check_certificates(config: DaemonConfig, identities: Identities) -> None:
    """Raises InvalidRequest where some callers are known by certificates that no server asks for."""
    if identities.by_certificate and config.tls_client_ca is None:
        raise InvalidRequest("identities", "name certificates: give --tls-client-ca, whose certificates are asked for")


def numeric(host: str, address: str, setting: str) -> list[str]:
    """The host's IP addresses: what is checked is what is opened. Raises InvalidRequest where there are none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise InvalidRequest(setting, f"{address}: there is no host {host}") from None
    numbers = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    loopback = [number for number in numbers if is_loopback(number)]
    return (loopback[:1] or numbers[:1]) if host == "localhost" else numbers
