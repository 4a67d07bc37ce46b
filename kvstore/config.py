"""The configuration: one frozen tree, read once at the edge by daemons and the command line.

A value comes from, strongest first: a flag, the environment (``KVSTORE_DRAM``), a TOML file (``dram = "4GiB"`` under
``[node]``), the default. `Config.sources` remembers which. Names nobody knows are refused, so that a typing error is
never a silent default. Only `load` touches files and the environment; everything else here is pure.

To add a setting: one field with `_setting(default, parser)`, its bounds or relations in `__post_init__`.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvstore.errors import InvalidRequest

KIB, MIB, GIB, TIB = (1 << shift for shift in (10, 20, 30, 40))
FRAME_ALIGN_BYTES = 4 * KIB
"""Frames are multiples of this, for O_DIRECT and for whole memory pages."""

_SHM_DIR = Path("/dev/shm")
LOG_LEVELS = ("debug", "info", "warning", "error")

_BINARY_UNITS = {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB}
_UNITS = {**_BINARY_UNITS, "TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1, "": 1}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")
_SIZE_BYTES_MAX = (1 << 63) - 1  # sizes and offsets are stored as signed 8-byte words
_NAME = re.compile(r"[a-zA-Z0-9._-]{1,48}")  # becomes a folder's and a socket's name: 108 bytes is all a socket has

_ENV_PREFIX = "KVSTORE_"
_ENV_NOT_CONFIG = ("KVSTORE_NODE", "KVSTORE_FAILPOINT")  # where clients find a node; a test's fault to inject
_ENV_NOT_CONFIG_PREFIX = "KVSTORE_TEST_"

Parser = Callable[[object, str], Any]
"""Turns a raw value (text, or what TOML makes of it) into a setting's; raises `InvalidRequest` naming the field."""


# --- Values --------------------------------------------------------------------------------------------------------


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


def parse_address(value: object, name: str = "address") -> tuple[str, int]:
    """Host and port of ``"HOST:PORT"`` or ``"[::1]:PORT"``; port 0 means any free one. Raises `InvalidRequest`."""
    host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    plain = host != "" and not any(c.isspace() or c in "[]/" for c in host) and (bracketed or ":" not in host)
    if not (colon and plain and re.fullmatch("[0-9]{1,5}", port) and int(port) <= 65535):
        raise InvalidRequest(name, f"{value!r} is not HOST:PORT")
    return host, int(port)


def _size(value: object, name: str) -> int:
    return parse_size(value, name)


def _size_or_zero(value: object, name: str) -> int:
    return parse_size(value, name, zero_ok=True)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(name, f"{value!r} is not text")
    return value


def _path(value: object, name: str) -> Path:
    if isinstance(value, Path):
        return value
    return Path(_text(value, name))


def _address_or_none(value: object, name: str) -> str | None:
    if value is None or value in ("", "none"):
        return None
    parse_address(value, name)
    return _text(value, name)


def _switch(value: object, name: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in known:
        return known[value.lower()]
    raise InvalidRequest(name, f"{value!r} is not true or false")


def _count(value: object, name: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch("-?[0-9]{1,18}", value):
        return int(value)
    raise InvalidRequest(name, f"{value!r} is not a whole number")


def _seconds(value: object, name: str) -> float:
    try:
        seconds = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise InvalidRequest(name, f"{value!r} is not a number of seconds")
    return seconds


def _setting(default: Any, parser: Parser) -> Any:
    """A field of a config dataclass that `load` can fill from text."""
    return field(default=default, metadata={"parser": parser})


# --- The tree ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """One node. Checked however it is made: raises `InvalidRequest` naming the field. Sizes are bytes."""

    name: str = _setting("default", _text)
    """What clients on this machine connect to; also names the node's folder."""
    dram: int = _setting(512 * MIB, _size)
    """Capacity of the DRAM segment: bytes of frames; records, marks and index come on top."""
    http: str | None = _setting(None, _address_or_none)
    """HOST:PORT of /healthz and /readyz, or None for no HTTP at all."""
    shm_dir: Path = _setting(_SHM_DIR, _path)
    """The tmpfs that holds the node's folder; absolute, because daemon and clients have different working folders."""
    group: bool = _setting(False, _switch)
    """Whether the daemon's unix group may map the pool as well (it then belongs to the trust domain)."""
    extent: int = _setting(0, _size_or_zero)
    """Bytes of one extent, or 0 to derive it from `dram`."""
    scrub_bytes_per_s: int = _setting(64 * MIB, _size_or_zero)
    """How fast checksums of resting pages are verified in the background; 0 turns the scrubber off."""
    reserve_ttl_s: float = _setting(30.0, _seconds)
    """How long a writer may hold reserved frames without a sign of progress."""
    lease_ttl_s_max: float = _setting(3600.0, _seconds)
    """The longest lease granted: the bound on how long one client can keep frames from being evicted."""
    sessions_max: int = _setting(256, _count)
    """How many clients may be connected at once."""
    verify_reads: bool = _setting(False, _switch)
    """Whether every DRAM read verifies checksums, and not only those from other tiers and machines."""
    log_level: str = _setting("info", _text)
    """debug, info, warning or error."""

    def __post_init__(self) -> None:
        _require("name", _NAME.fullmatch(self.name) is not None, "must match [a-zA-Z0-9._-]{1,48}", self.name)
        _require("name", self.name.strip(".") != "", "cannot be dots alone: it names a folder", self.name)
        _require("shm_dir", self.shm_dir.is_absolute(), "must be an absolute path", str(self.shm_dir))
        _require("sessions_max", 1 <= self.sessions_max <= 65535, "must be from 1 to 65535", self.sessions_max)
        _require("log_level", self.log_level in LOG_LEVELS, f"must be one of {', '.join(LOG_LEVELS)}", self.log_level)
        _require("scrub_bytes_per_s", self.scrub_bytes_per_s >= 0, "must be zero or more", self.scrub_bytes_per_s)
        _require("reserve_ttl_s", self.reserve_ttl_s > 0, "must be more than zero", self.reserve_ttl_s)
        # A pool without room for one frame could accept nothing.
        _require("dram", self.dram >= FRAME_ALIGN_BYTES, "must be at least 4KiB", self.dram)
        # An extent is carved out of the segment and into aligned frames.
        _require("extent", self.extent % FRAME_ALIGN_BYTES == 0, "must be a multiple of 4KiB", self.extent)
        _require("extent", 0 <= self.extent <= self.dram, f"must fit in dram ({format_size(self.dram)})", self.extent)
        # A reservation keeps frames as a lease does, so the bound on leases is a bound on it too.
        _require(
            "lease_ttl_s_max",
            self.lease_ttl_s_max >= self.reserve_ttl_s,
            f"must be at least reserve_ttl_s ({self.reserve_ttl_s:g})",
            self.lease_ttl_s_max,
        )

    @property
    def file_mode(self) -> int:
        """Permission bits of the segment, tables, index and socket."""
        return 0o660 if self.group else 0o600


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole tree. `sources` tells for each setting (``"node.dram"``) where its value came from."""

    node: NodeConfig = field(default_factory=NodeConfig)
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)


_SECTIONS: Mapping[str, type[NodeConfig]] = MappingProxyType({"node": NodeConfig})


def _require(name: str, holds: bool, rule: str, got: object) -> None:
    if not holds:
        raise InvalidRequest(name, f"{rule}, got {got!r}")


# --- Reading it ----------------------------------------------------------------------------------------------------


def node_config(**raw: object) -> NodeConfig:
    """A `NodeConfig` from keyword arguments as users write them (``dram="512MiB"``), for a node embedded in a process.

    Neither files nor the environment are read. Raises `InvalidRequest` for unknown names and bad values.
    """
    parsers = _parsers(NodeConfig)
    for name in raw:
        if name not in parsers:
            raise InvalidRequest(name, _unknown(name, parsers))
    return NodeConfig(**{name: parsers[name](value, name) for name, value in raw.items()})


def load(
    path: str | Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Config:
    """Read the configuration: flags over environment over file over defaults.

    `path` names a TOML file or is None; `env` is `os.environ` when None; `flags` maps a setting's bare name to its raw
    value, where None means "not given". Raises `InvalidRequest` naming the setting and saying where it was read.
    """
    given: dict[str, tuple[object, str]] = {}  # "node.dram" -> raw value, source; the last one written wins
    if path is not None:
        given.update(_from_file(Path(path)))
    given.update(_from_env(os.environ if env is None else env))
    given.update(_from_flags({} if flags is None else flags))

    values: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    parsers = _all_parsers()
    for key, (raw, source) in given.items():
        section, _, name = key.partition(".")
        try:
            values[section][name] = parsers[key](raw, name)
        except InvalidRequest as bad:
            raise InvalidRequest(name, f"{bad.reason} (from {source})") from None
    sources = {key: given[key][1] if key in given else "default" for key in parsers}
    return Config(node=NodeConfig(**values["node"]), sources=MappingProxyType(sources))


def _from_file(path: Path) -> dict[str, tuple[object, str]]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as failed:
        raise InvalidRequest("config", f"{path}: {failed.strerror}") from failed
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failed:
        raise InvalidRequest("config", f"{path} is not TOML: {failed}") from failed
    given: dict[str, tuple[object, str]] = {}
    for section, table in document.items():
        if section not in _SECTIONS:
            raise InvalidRequest(section, f"{_unknown(section, _SECTIONS)} (from file {path})")
        if not isinstance(table, dict):
            raise InvalidRequest(section, f"is a table: write [{section}] (from file {path})")
        parsers = _parsers(_SECTIONS[section])
        for name, raw in table.items():
            if name not in parsers:
                raise InvalidRequest(f"{section}.{name}", f"{_unknown(name, parsers)} (from file {path})")
            given[f"{section}.{name}"] = (raw, f"file {path}")
    return given


def _from_env(env: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    keys = {_ENV_PREFIX + key.partition(".")[2].upper(): key for key in _all_parsers()}
    given: dict[str, tuple[object, str]] = {}
    for variable, raw in sorted(env.items()):
        if variable in keys:
            given[keys[variable]] = (raw, f"env {variable}")
        elif variable.startswith(_ENV_PREFIX) and not (
            variable in _ENV_NOT_CONFIG or variable.startswith(_ENV_NOT_CONFIG_PREFIX)
        ):
            raise InvalidRequest(variable, _unknown(variable, (*keys, *_ENV_NOT_CONFIG[:1])))
    return given


def _from_flags(flags: Mapping[str, object]) -> dict[str, tuple[object, str]]:
    keys = {key.partition(".")[2]: key for key in _all_parsers()}
    given: dict[str, tuple[object, str]] = {}
    for name, raw in flags.items():
        if name not in keys:
            raise InvalidRequest(name, _unknown(name, keys))
        if raw is not None:
            given[keys[name]] = (raw, f"flag --{name.replace('_', '-')}")
    return given


def _parsers(section: type[NodeConfig]) -> dict[str, Parser]:
    return {setting.name: setting.metadata["parser"] for setting in fields(section)}


def _all_parsers() -> dict[str, Parser]:
    return {
        f"{section}.{name}": parser for section, kind in _SECTIONS.items() for name, parser in _parsers(kind).items()
    }


def _unknown(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"is not a known setting{f'; did you mean {close[0]}?' if close else ''}"
