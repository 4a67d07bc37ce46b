"""Reads settings into a frozen dataclass: from a table of a TOML file, the environment and flags.

Every program has its own table in the file (``SECTIONS``), so that one file can serve all programs. Each refuses
unknown names in its own table, and unknown tables. Only `read` opens files. The parsers turn text, or TOML values, into
sizes, addresses, paths and numbers. ``ChangedFiles`` detects changes of files that a setting names: passwords,
certificates, keys.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar
from urllib.parse import urlsplit

from kvstore.errors import InvalidRequest

KIB, MIB, GIB, TIB = (1 << shift for shift in (10, 20, 30, 40))
_BINARY_UNITS = {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB}
_UNITS = {**_BINARY_UNITS, "TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1, "": 1}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")
SOCKET_PATH_BYTES_MAX = 107  # the kernel's limit
_SIZE_BYTES_MAX = (1 << 63) - 1  # sizes and offsets are stored as signed 8-byte words

Parser = Callable[[object, str], Any]
"""Turns a raw value (text, or what TOML makes of it) into a setting's; raises `InvalidRequest` naming the field."""


def parse_size(value: object, name: str = "size", *, zero_ok: bool = False) -> int:
    """Return the number of bytes in ``"512MiB"``, ``"1.5 GB"``, ``"1048576"`` or an int.

    Units are KiB MiB GiB TiB (powers of 1024) and KB MB GB TB (powers of 1000). Raises `InvalidRequest` naming `name`
    for everything else, which includes negative sizes, parts of a byte and, unless `zero_ok`, zero.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = Fraction(value)
    elif isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is None or match[2] not in _UNITS:
            raise InvalidRequest(name, f"must be a size such as 512MiB, 4GiB or 1048576 (got {value!r})")
        size = Fraction(match[1]) * _UNITS[match[2]]
    else:
        raise InvalidRequest(name, f"must be a size, in bytes or as text such as 512MiB (got {value!r})")
    if size.denominator != 1:
        raise InvalidRequest(name, f"must be a whole number of bytes (got {value!r})")
    if size < 0 or (size == 0 and not zero_ok):
        raise InvalidRequest(name, f"must be {'zero or more' if zero_ok else 'more than zero'} bytes (got {value!r})")
    if size > _SIZE_BYTES_MAX:
        raise InvalidRequest(name, f"must be at most 8 EiB (got {value!r})")
    return int(size)


def format_size(size_bytes: int) -> str:
    """Return the shortest text that `parse_size` converts back to exactly `size_bytes`: ``512MiB``, ``4097``."""
    for unit, unit_bytes in _BINARY_UNITS.items():
        if size_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return str(size_bytes)


@dataclass(frozen=True)
class NvmeTarget:
    """A file or block device for pages, and how many of its bytes are used."""

    path: Path
    size: int

    def __str__(self) -> str:
        return f"{self.path}:{format_size(self.size)}"


def parse_nvme(value: object, name: str = "nvme") -> tuple[NvmeTarget, ...]:
    """Targets from ``"PATH:SIZE"``, from several separated by commas, or from a list of them (for paths with a comma).

    Relative paths are resolved in the working folder. Raises `InvalidRequest`.
    """
    return tuple(_target(part, name) for part in _parts(value))


def _target(value: object, name: str) -> NvmeTarget:
    if isinstance(value, NvmeTarget):
        return NvmeTarget(value.path.absolute(), value.size)
    path, colon, size = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not (path.strip() and colon) or "\0" in path:
        raise InvalidRequest(name, f"must be PATH:SIZE, such as /var/tmp/kv:4GiB (got {value!r})")
    return NvmeTarget(Path(path.strip()).absolute(), parse_size(size, name))


def parse_address(value: object, name: str = "address") -> tuple[str, int]:
    """Parse ``"HOST:PORT"`` or ``"[::1]:PORT"``. Port 0 means any free port. Raises `InvalidRequest`."""
    host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    brackets = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if brackets else host
    plain = host != "" and not any(c.isspace() or c in "[]/" for c in host) and (brackets or ":" not in host)
    if not (colon and plain and re.fullmatch("[0-9]{1,5}", port) and int(port) <= 65535):
        raise InvalidRequest(name, f"must be HOST:PORT (got {value!r})")
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
                rule = f"must be unix:/PATH of at most {SOCKET_PATH_BYTES_MAX} bytes"
                raise InvalidRequest(name, f"{rule} (got {address!r})")
        else:
            parse_address(address, name)
    return tuple(map(str, addresses))


_HOST_NAME = re.compile(r"\*|(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")


def parse_hosts(value: object, name: str = "http_hosts") -> tuple[str, ...]:
    """Host names, ``*.example`` and ``*`` too; several separated by commas, or a list. Raises `InvalidRequest`."""
    hosts = _parts(value)
    for host in hosts:
        if not isinstance(host, str) or _HOST_NAME.fullmatch(host) is None:
            raise InvalidRequest(name, f"must be a host name, *.DOMAIN or * (got {host!r})")
    return tuple(hosts)


NO_SALT = '""'


@dataclass(frozen=True)
class Quota:
    """How many bytes of pages a tenant may have in each tier; None for no limit. ``salt`` "*" means every tenant
    without a quota of its own. In text, "" in quotes means callers without a salt."""

    salt: str
    dram: int | None = None
    nvme: int | None = None

    def __str__(self) -> str:
        tiers = (("dram", self.dram), ("nvme", self.nvme))
        return " ".join(
            [self.salt or NO_SALT, *(f"{tier}={format_size(size)}" for tier, size in tiers if size is not None)]
        )


def parse_quotas(value: object, name: str = "quotas") -> tuple[Quota, ...]:
    """Quotas from ``"SALT dram=SIZE nvme=SIZE"`` (one of the two may be omitted), from several separated by commas, or
    from a list of them (for salts with a comma). Raises `InvalidRequest`."""
    return tuple(_quota(part, name) for part in _parts(value))


def _quota(value: object, name: str) -> Quota:
    if isinstance(value, Quota):
        return value
    words = value.split() if isinstance(value, str) else []
    sizes: dict[str, int] = {}
    for word in words[1:]:
        tier, equals, size = word.partition("=")
        if tier not in ("dram", "nvme") or not equals or tier in sizes:
            raise InvalidRequest(name, f"must have dram=SIZE or nvme=SIZE after SALT, each once (got {value!r})")
        sizes[tier] = parse_size(size, name)
    if not sizes:
        raise InvalidRequest(name, f"must be SALT dram=SIZE nvme=SIZE, such as tenant-a dram=1GiB (got {value!r})")
    return Quota("" if words[0] == NO_SALT else words[0], **sizes)


def _parts(value: object) -> list[Any]:
    """Return a list unchanged, or text split at its commas. None and "" give an empty list."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return list(value) if isinstance(value, list | tuple) else [value]


def is_http_address(text: str) -> bool:
    """Return True if this is an http or https URL with a host."""
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        return False


def parse_size_or_zero(value: object, name: str) -> int:
    """Parse a size as `parse_size` does, but also accept 0."""
    return parse_size(value, name, zero_ok=True)


def parse_text(value: object, name: str) -> str:
    """Return the text unchanged."""
    if not isinstance(value, str):
        raise InvalidRequest(name, f"must be text (got {value!r})")
    return value


def parse_path(value: object, name: str) -> Path:
    """Return a path from a text or a path."""
    if isinstance(value, Path):
        return value
    return Path(parse_text(value, name))


def parse_path_or_none(value: object, name: str) -> Path | None:
    """Return a path, or None for "" and None."""
    return parse_path(value, name) if value not in (None, "") else None


def parse_address_or_none(value: object, name: str) -> str | None:
    """Parse ``"HOST:PORT"``. Return None for "none", "" and None."""
    if value is None or value in ("", "none"):
        return None
    parse_address(value, name)
    return parse_text(value, name)


def parse_switch(value: object, name: str) -> bool:
    """Return True for 1, true, yes and on, and False for 0, false, no and off."""
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in known:
        return known[value.lower()]
    raise InvalidRequest(name, f"must be true or false (got {value!r})")


def parse_count(value: object, name: str) -> int:
    """Parse a whole number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch("-?[0-9]{1,18}", value):
        return int(value)
    raise InvalidRequest(name, f"must be a whole number (got {value!r})")


def parse_number(value: object, name: str) -> float:
    """Parse a finite number."""
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(name, f"must be a number (got {value!r})")
    return number


def parse_data(value: object, name: str = "data") -> str:
    """Parse ``HOST:PORT``, ``auto`` or ``none``. Raises `InvalidRequest`."""
    text = parse_text(value, name)
    if text not in (DATA_AUTO, DATA_NONE):
        parse_address(text, name)
    return text


def parse_networks(value: object, name: str) -> str:
    """Parse networks in CIDR notation, separated by commas."""
    text = parse_text(value, name)
    for each in networks_of(text):
        try:
            ipaddress.ip_network(each)
        except ValueError as error:
            raise InvalidRequest(name, f"must be networks such as 10.0.0.0/8 ({error})") from None
    return text


def networks_of(text: str) -> tuple[str, ...]:
    """Return the networks in a list that is separated by commas."""
    return tuple(each.strip() for each in text.split(",") if each.strip())


SECTIONS = ("node", "engine", "conductor")
"""Tables that a file may have, each read by its own program."""


class Settings(Protocol):
    """A dataclass whose fields are made by ``setting``."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


SettingsType = TypeVar("SettingsType", bound=Settings)


@dataclass(frozen=True)
class Declaration:
    """The properties of a setting in addition to its name, type and default.

    Attributes:
        help: its meaning, in one or two sentences. The flag, the docs and the example show it.
        metavar: the form of a value.
        repeats: its flag may be given several times.
        short: another flag with the same meaning.
        default_shown: the default in the help text; None means the default itself.
    """

    parser: Parser
    help: str
    metavar: str = "VALUE"
    repeats: bool = False
    short: str = ""
    default_shown: str | None = None


def setting(default: Any, parser: Parser, help: str, **more: Any) -> Any:
    """Make a field of a config dataclass that `read` can fill from text. ``more`` are fields of `Declaration`."""
    return field(default=default, metadata={"declaration": Declaration(parser, help, **more)})


def declarations(kind: type[Settings]) -> dict[str, Declaration]:
    """Return every setting: first the settings that the class itself declares, then the inherited ones."""
    own_first = sorted(fields(kind), key=lambda each: each.name not in kind.__annotations__)
    return {each.name: each.metadata["declaration"] for each in own_first}


def parsers_of(kind: type[Settings]) -> dict[str, Parser]:
    """Return the parser of every setting."""
    return {name: each.parser for name, each in declarations(kind).items()}


def parse_values(kind: type[SettingsType], raw: Mapping[str, object]) -> SettingsType:
    """Make the dataclass from values as users write them. Raises `InvalidRequest` for unknown names and invalid
    values."""
    parsers = parsers_of(kind)
    for name in raw:
        if name not in parsers:
            raise InvalidRequest(name, unknown(name, parsers))
    return kind(**{name: parsers[name](value, name) for name, value in raw.items()})


def read(
    kind: type[SettingsType],
    section: str,
    path: str | Path | None,
    env: Mapping[str, str],
    flags: Mapping[str, object],
    prefix: str,
    not_ours: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
) -> tuple[SettingsType, dict[str, str]]:
    """Return the dataclass, and the source of each setting. Flags override the environment, which overrides the file,
    which overrides the defaults.

    Args:
        prefix: of this program's environment variables.
        not_ours: variables with that prefix that other programs use, and prefixes of more such variables.

    Raises:
        InvalidRequest: names the setting, and where it was read.
    """
    parsers = parsers_of(kind)
    raw_values: dict[str, tuple[object, str]] = {}  # name -> raw value, source; the last one written wins
    if path is not None:
        raw_values.update(_from_file(section, parsers, Path(path)))
    raw_values.update(_from_env(parsers, env, prefix, *not_ours))
    raw_values.update(_from_flags(parsers, flags))
    values = {}
    for name, (raw, source) in raw_values.items():
        try:
            values[name] = parsers[name](raw, name)
        except InvalidRequest as bad:
            raise InvalidRequest(name, f"{bad.reason} (from {source})") from None
    return kind(**values), {name: raw_values[name][1] if name in raw_values else "default" for name in parsers}


def _from_file(section: str, parsers: Mapping[str, Parser], path: Path) -> dict[str, tuple[object, str]]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as failed:
        raise InvalidRequest("config", f"{path}: {failed.strerror}") from failed
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failed:
        raise InvalidRequest("config", f"{path} is not TOML: {failed}") from failed
    raw_values: dict[str, tuple[object, str]] = {}
    for key, table in document.items():
        if key not in SECTIONS:
            raise InvalidRequest(key, f"{unknown(key, SECTIONS)} (from file {path})")
        if not isinstance(table, dict):
            raise InvalidRequest(key, f"must be a table, [{key}] (from file {path})")
        for name, raw in table.items() if key == section else ():
            if name not in parsers:
                raise InvalidRequest(f"{section}.{name}", f"{unknown(name, parsers)} (from file {path})")
            raw_values[name] = (raw, f"file {path}")
    return raw_values


def _from_env(
    parsers: Mapping[str, Parser],
    env: Mapping[str, str],
    prefix: str,
    names_of_others: tuple[str, ...],
    prefixes_of_others: tuple[str, ...],
) -> dict[str, tuple[object, str]]:
    names = {prefix + name.upper(): name for name in parsers}
    raw_values: dict[str, tuple[object, str]] = {}
    for variable, raw in sorted(env.items()):
        if variable in names:
            raw_values[names[variable]] = (raw, f"env {variable}")
        elif variable.startswith(prefix) and not (
            variable in names_of_others or variable.startswith(prefixes_of_others)
        ):
            raise InvalidRequest(variable, unknown(variable, (*names, *names_of_others[:1])))
    return raw_values


def _from_flags(parsers: Mapping[str, Parser], flags: Mapping[str, object]) -> dict[str, tuple[object, str]]:
    raw_values: dict[str, tuple[object, str]] = {}
    for name, raw in flags.items():
        if name not in parsers:
            raise InvalidRequest(name, unknown(name, parsers))
        if raw is not None:
            raw_values[name] = (raw, f"flag --{name.replace('_', '-')}")
    return raw_values


def unknown(name: str, known: Iterable[str]) -> str:
    """Return a text that says why a name is refused and which known name is closest to it."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"is not a known setting{f'; did you mean {close[0]}?' if close else ''}"


_Stamp = tuple[int, int, int, int] | None


class ChangedFiles:
    """Detects changes of files. A file counts as changed if it was written to or replaced, even behind a link."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._stamps: tuple[_Stamp, ...] | None = None

    def changed(self) -> bool:
        """Return True at the first call, and if a file has changed since the last call.

        Call this before reading the files: the next call then reports later changes."""
        before, self._stamps = self._stamps, tuple(_stamp(each) for each in self._paths)
        return self._stamps != before

    def forget(self) -> None:
        """Let the next call return True, because the files just read were invalid."""
        self._stamps = None


def _stamp(path: Path) -> _Stamp:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
