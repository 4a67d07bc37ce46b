"""Values of settings: text, or what TOML makes of it, into sizes, addresses, paths and numbers.

A parser takes a raw value and the setting's name, and raises `InvalidRequest` naming it. Pure, but that the relative
path of an NVMe target is completed with the working folder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvstore.errors import InvalidRequest

KIB, MIB, GIB, TIB = (1 << shift for shift in (10, 20, 30, 40))
_BINARY_UNITS = {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB}
_UNITS = {**_BINARY_UNITS, "TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1, "": 1}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")
SOCKET_PATH_BYTES_MAX = 107  # all that the kernel has room for
_SIZE_BYTES_MAX = (1 << 63) - 1  # sizes and offsets are stored as signed 8-byte words

Parser = Callable[[object, str], Any]
"""Turns a raw value (text, or what TOML makes of it) into a setting's; raises `InvalidRequest` naming the field."""


def parse_size(value: object, name: str = "size", *, zero_ok: bool = False) -> int:
    """Bytes of ``"512MiB"``, ``"1.5 GB"``, ``"1048576"`` or an int.

    Units are KiB MiB GiB TiB (powers of 1024) and KB MB GB TB (powers of 1000). Raises `InvalidRequest` naming `name`
    for anything else: zero (unless `zero_ok`), negative, a part of a byte.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = Fraction(value)
    elif isinstance(value, str):
        found = _SIZE.fullmatch(value.strip())
        if found is None or found[2] not in _UNITS:
            raise InvalidRequest(name, f"{value!r} is not a size such as 512MiB, 4GiB or 1048576")
        size = Fraction(found[1]) * _UNITS[found[2]]
    else:
        raise InvalidRequest(name, f"{value!r} is not a size: give bytes or text such as 512MiB")
    if size.denominator != 1:
        raise InvalidRequest(name, f"{value!r} is not a whole number of bytes")
    if size < 0 or (size == 0 and not zero_ok):
        raise InvalidRequest(name, f"must be {'zero or more' if zero_ok else 'more than zero'} bytes, got {value!r}")
    if size > _SIZE_BYTES_MAX:
        raise InvalidRequest(name, f"{value!r} is more than 8 EiB")
    return int(size)


def format_size(size_bytes: int) -> str:
    """The shortest text that `parse_size` turns back into exactly `size_bytes`: ``512MiB``, ``4097``."""
    for unit, unit_bytes in _BINARY_UNITS.items():
        if size_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return str(size_bytes)


@dataclass(frozen=True)
class NvmeTarget:
    """A file or block device for pages, and how many bytes of it."""

    path: Path
    size: int

    def __str__(self) -> str:
        return f"{self.path}:{format_size(self.size)}"


def parse_nvme(value: object, name: str = "nvme") -> tuple[NvmeTarget, ...]:
    """Targets of ``"PATH:SIZE"``, of several separated by commas, or of a list of them (for paths with a comma).

    Relative paths are completed with the working folder. Raises `InvalidRequest`.
    """
    return tuple(_target(part, name) for part in _parts(value))


def _target(value: object, name: str) -> NvmeTarget:
    if isinstance(value, NvmeTarget):
        return NvmeTarget(value.path.absolute(), value.size)
    path, colon, size = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not (path.strip() and colon) or "\0" in path:
        raise InvalidRequest(name, f"{value!r} is not PATH:SIZE, such as /var/tmp/kv:4GiB")
    return NvmeTarget(Path(path.strip()).absolute(), parse_size(size, name))


def parse_address(value: object, name: str = "address") -> tuple[str, int]:
    """Host and port of ``"HOST:PORT"`` or ``"[::1]:PORT"``; port 0 means any free one. Raises `InvalidRequest`."""
    host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    plain = host != "" and not any(c.isspace() or c in "[]/" for c in host) and (bracketed or ":" not in host)
    if not (colon and plain and re.fullmatch("[0-9]{1,5}", port) and int(port) <= 65535):
        raise InvalidRequest(name, f"{value!r} is not HOST:PORT")
    return host, int(port)


TRANSPORTS_AUTO = "auto"  # all that the machine has
DATA_AUTO, DATA_NONE = "auto", "none"


def parse_listen(value: object, name: str = "listen") -> tuple[str, ...]:
    """Addresses to serve at: ``"HOST:PORT"`` or ``"unix:PATH"`` (absolute), several separated by commas, or a list.

    Raises `InvalidRequest`.
    """
    addresses = _parts(value)
    for address in addresses:
        if isinstance(address, str) and address.startswith("unix:"):
            path = address.removeprefix("unix:")
            if not path.startswith("/") or "\0" in path or len(path.encode()) > SOCKET_PATH_BYTES_MAX:
                raise InvalidRequest(name, f"{address!r} is not unix:/PATH of at most {SOCKET_PATH_BYTES_MAX} bytes")
        else:
            parse_address(address, name)
    return tuple(map(str, addresses))


_HOST_NAME = re.compile(r"\*|(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")


def parse_hosts(value: object, name: str = "http_hosts") -> tuple[str, ...]:
    """Host names, ``*.example`` and ``*`` too; several separated by commas, or a list. Raises `InvalidRequest`."""
    hosts = _parts(value)
    for host in hosts:
        if not isinstance(host, str) or _HOST_NAME.fullmatch(host) is None:
            raise InvalidRequest(name, f"{host!r} is not a host name, *.DOMAIN or *")
    return tuple(hosts)


NO_SALT = '""'


@dataclass(frozen=True)
class Quota:
    """How many bytes of pages a tenant may have in each tier; None: as many as fit. ``salt`` "*": every other one; as
    text, "" in quotes: callers without a salt."""

    salt: str
    dram: int | None = None
    nvme: int | None = None

    def __str__(self) -> str:
        tiers = (("dram", self.dram), ("nvme", self.nvme))
        return " ".join(
            [self.salt or NO_SALT, *(f"{tier}={format_size(size)}" for tier, size in tiers if size is not None)]
        )


def parse_quotas(value: object, name: str = "quotas") -> tuple[Quota, ...]:
    """Quotas of ``"SALT dram=SIZE nvme=SIZE"`` (one of the two may be left out), several separated by commas, or a
    list of them (for salts with a comma). Raises `InvalidRequest`."""
    return tuple(_quota(part, name) for part in _parts(value))


def _quota(value: object, name: str) -> Quota:
    if isinstance(value, Quota):
        return value
    words = value.split() if isinstance(value, str) else []
    sizes: dict[str, int] = {}
    for word in words[1:]:
        tier, equals, size = word.partition("=")
        if tier not in ("dram", "nvme") or not equals or tier in sizes:
            raise InvalidRequest(name, f"{value!r}: {word!r} is not dram=SIZE or nvme=SIZE")
        sizes[tier] = parse_size(size, name)
    if not sizes:
        raise InvalidRequest(name, f"{value!r} is not SALT dram=SIZE nvme=SIZE, such as tenant-a dram=1GiB")
    return Quota("" if words[0] == NO_SALT else words[0], **sizes)


def _parts(value: object) -> list[Any]:
    """A list as it is; text split at its commas; nothing for None and ""."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return list(value) if isinstance(value, list | tuple) else [value]


def is_http_address(text: str) -> bool:
    """Whether this is an http or https URL with a host."""
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        return False


def parse_size_or_zero(value: object, name: str) -> int:
    """Bytes as `parse_size` reads them, 0 among them."""
    return parse_size(value, name, zero_ok=True)


def parse_text(value: object, name: str) -> str:
    """Text as it is."""
    if not isinstance(value, str):
        raise InvalidRequest(name, f"{value!r} is not text")
    return value


def parse_path(value: object, name: str) -> Path:
    """A path, as text or as it is."""
    if isinstance(value, Path):
        return value
    return Path(parse_text(value, name))


def parse_path_or_none(value: object, name: str) -> Path | None:
    """A path, or None for "" and None."""
    return parse_path(value, name) if value not in (None, "") else None


def parse_address_or_none(value: object, name: str) -> str | None:
    """``"HOST:PORT"``, or None for "none", "" and None."""
    if value is None or value in ("", "none"):
        return None
    parse_address(value, name)
    return parse_text(value, name)


def parse_switch(value: object, name: str) -> bool:
    """True for 1, true, yes and on; False for 0, false, no and off."""
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in known:
        return known[value.lower()]
    raise InvalidRequest(name, f"{value!r} is not true or false")


def parse_count(value: object, name: str) -> int:
    """A whole number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch("-?[0-9]{1,18}", value):
        return int(value)
    raise InvalidRequest(name, f"{value!r} is not a whole number")


def parse_number(value: object, name: str) -> float:
    """A finite number."""
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(name, f"{value!r} is not a number")
    return number


def parse_data(value: object, name: str = "data") -> str:
    """``HOST:PORT``, ``auto``, or ``none``. Raises `InvalidRequest`."""
    text = parse_text(value, name)
    if text not in (DATA_AUTO, DATA_NONE):
        parse_address(text, name)
    return text
