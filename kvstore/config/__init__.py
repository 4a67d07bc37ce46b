"""The configuration: one frozen tree, read once at the edge by daemons and the command line.

A value comes from, strongest first: a flag, the environment (``KVSTORE_DRAM``), a TOML file (``dram = "4GiB"`` under
``[node]``), the default. `Config.sources` remembers which. Names nobody knows are refused, so that a typing error is
never a silent default. Only `load` touches files and the environment; everything else here is pure. How text becomes a
value stands in `kvstore.config.values`.

To add a setting: one field with `_setting(default, parser)`, its bounds or relations in `__post_init__`.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvstore.config.values import (
    GIB,
    KIB,
    MIB,
    TIB,
    NvmeTarget,
    Parser,
    Quota,
    format_size,
    is_http_address,
    parse_address,
    parse_address_or_none,
    parse_count,
    parse_listen,
    parse_number,
    parse_nvme,
    parse_path,
    parse_path_or_none,
    parse_quotas,
    parse_size,
    parse_size_or_zero,
    parse_switch,
    parse_text,
)
from kvstore.errors import InvalidRequest

__all__ = [
    "ADMISSIONS",
    "FRAME_ALIGN_BYTES",
    "GIB",
    "KIB",
    "LOG_LEVELS",
    "MIB",
    "NVME_BYTES_MIN",
    "TIB",
    "Config",
    "NodeConfig",
    "NvmeTarget",
    "Quota",
    "format_size",
    "load",
    "node_config",
    "parse_address",
    "parse_nvme",
    "parse_size",
]

FRAME_ALIGN_BYTES = 4 * KIB
"""Frames are multiples of this, for O_DIRECT and for whole memory pages."""

NVME_BYTES_MIN = MIB
"""Superblocks and tables take some 20 KiB; of less they would be much, and a forgotten unit is more likely meant."""

_SHM_DIR = Path("/dev/shm")
ADMISSIONS = ("all", "reused")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
_POLICY = re.compile(r"[a-z0-9_-]+")
_NAME = re.compile(r"[a-zA-Z0-9._-]{1,48}")  # becomes a folder's and a socket's name: 108 bytes is all a socket has

_ENV_PREFIX = "KVSTORE_"
_ENV_NOT_CONFIG = (
    # where clients find a node, and how they show who they are
    *("KVSTORE_NODE", "KVSTORE_TOKEN", "KVSTORE_TOKEN_FILE", "KVSTORE_TLS_CA"),
    "KVSTORE_FAILPOINT",  # a test's fault to inject
)
_ENV_NOT_CONFIG_PREFIX = "KVSTORE_TEST_"


def _setting(default: Any, parser: Parser) -> Any:
    """A field of a config dataclass that `load` can fill from text."""
    return field(default=default, metadata={"parser": parser})


# --- The tree ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """One node. Checked however it is made: raises `InvalidRequest` naming the field. Sizes are bytes."""

    name: str = _setting("default", parse_text)
    """What clients on this machine connect to; also names the node's folder."""
    dram: int = _setting(512 * MIB, parse_size)
    """Capacity of the DRAM segment: bytes of frames; records, marks and index come on top."""
    http: str | None = _setting(None, parse_address_or_none)
    """HOST:PORT of /healthz, /readyz and /metrics, or None for no HTTP at all."""
    shm_dir: Path = _setting(_SHM_DIR, parse_path)
    """The tmpfs that holds the node's folder; absolute, because daemon and clients have different working folders."""
    group: bool = _setting(False, parse_switch)
    """Whether the daemon's unix group may map the pool as well (it then belongs to the trust domain)."""
    extent: int = _setting(0, parse_size_or_zero)
    """Bytes of one extent, or 0 to derive it from `dram`."""
    scrub_bytes_per_s: int = _setting(64 * MIB, parse_size_or_zero)
    """How fast checksums of resting pages are verified in the background; 0 turns the scrubber off."""
    reserve_ttl_s: float = _setting(30.0, parse_number)
    """How long a writer may hold reserved frames without a sign of progress."""
    lease_ttl_s_max: float = _setting(3600.0, parse_number)
    """The longest lease granted: the bound on how long one client can keep frames from being evicted."""
    sessions_max: int = _setting(256, parse_count)
    """How many clients may be connected at once."""
    verify_reads: bool = _setting(False, parse_switch)
    """Whether every DRAM read verifies checksums, and not only those from other tiers and machines."""
    eviction: str = _setting("gittins", parse_text)
    """Name of the policy by which pages leave DRAM and NVMe when frames are needed."""
    nvme: tuple[NvmeTarget, ...] = _setting((), parse_nvme)
    """Files or block devices below DRAM, with their sizes; they keep their pages when the machine restarts."""
    nvme_format: bool = _setting(False, parse_switch)
    """Whether a target that cannot be used as it is may be made anew; what it holds is dropped."""
    nvme_extent: int = _setting(0, parse_size_or_zero)
    """Bytes of one extent on NVMe, or 0 to derive it from the sizes of the targets."""
    nvme_admission: str = _setting("all", parse_text)
    """Which chains are saved to NVMe: all, or those reused since they were stored."""
    nvme_write_bytes_per_day: int = _setting(0, parse_size_or_zero)
    """How much may be written to all targets together in one day (UTC); 0 is no cap."""
    demote_at: float = _setting(0.5, parse_number)
    """The share of DRAM in use from which on pages are saved to NVMe: 0 at once, 1 when it is full."""
    promote_after: int = _setting(2, parse_count)
    """How many reads from NVMe bring a page back to DRAM."""
    checkpoint_s: float = _setting(30.0, parse_number)
    """How often the index of what NVMe holds is saved there, so that a start need not scan what rested since."""
    listen: tuple[str, ...] = _setting((), parse_listen)
    """HOST:PORT or unix:PATH of the gRPC API; several may be given. Beyond loopback it asks for TLS and identities."""
    tls_cert: Path | None = _setting(None, parse_path_or_none)
    """PEM file with the certificate (and chain) that the gRPC API shows."""
    tls_key: Path | None = _setting(None, parse_path_or_none)
    """PEM file with its private key."""
    tls_client_ca: Path | None = _setting(None, parse_path_or_none)
    """PEM file with the authorities whose client certificates are asked for."""
    identities: Path | None = _setting(None, parse_path_or_none)
    """TOML file of who may call, by token or certificate, and for which salts; must be readable by its owner only."""
    rpcs_max: int = _setting(256, parse_count)
    """How many gRPC calls may be under way at once; more are refused with a hint to retry."""
    rpc_timeout_s_max: float = _setting(60.0, parse_number)
    """The longest a gRPC call may take, also where its client names no deadline."""
    rpc_buffers: int = _setting(256 << 20, parse_size)
    """Memory for what gRPC calls are moving, all together; no opaque object sent or read over gRPC is larger."""
    quotas: tuple[Quota, ...] = _setting((), parse_quotas)
    """"SALT dram=SIZE nvme=SIZE" each: bytes a tenant may have per tier; * is all others, "" whoever names no salt."""
    pins_share_max: float = _setting(0.5, parse_number)
    """The share of a tier that pins may keep from being evicted."""
    kv_events: str = _setting("", parse_text)
    """ZMQ address that KV events are published at, such as tcp://127.0.0.1:5557; empty: nowhere."""
    kv_events_replay: str = _setting("", parse_text)
    """ZMQ address where subscribers ask for events they missed; empty: nowhere."""
    log_level: str = _setting("info", parse_text)
    """debug, info, warning or error."""
    log_format: str = _setting("text", parse_text)
    """text, or json: one object per line."""
    otlp_endpoint: str = _setting("", parse_text)
    """Where OpenTelemetry spans are sent, such as http://127.0.0.1:4318; empty: none are made."""

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
        _require("eviction", _POLICY.fullmatch(self.eviction) is not None, "must match [a-z0-9_-]+", self.eviction)
        self._check_nvme()
        self._check_faces()
        # A reservation keeps frames as a lease does, so the bound on leases is a bound on it too.
        _require(
            "lease_ttl_s_max",
            self.lease_ttl_s_max >= self.reserve_ttl_s,
            f"must be at least reserve_ttl_s ({self.reserve_ttl_s:g})",
            self.lease_ttl_s_max,
        )

    def _check_nvme(self) -> None:
        paths = [target.path for target in self.nvme]
        _require("nvme", len({*paths}) == len(paths), "must not name a path twice", ",".join(map(str, self.nvme)))
        extent = self.nvme_extent
        for target in self.nvme:
            _require("nvme", target.path.is_absolute(), "must be an absolute path", str(target.path))
            _require("nvme", target.size >= NVME_BYTES_MIN, "a target has at least 1MiB", str(target))
            # An extent is carved out of one target and into aligned frames.
            _require("nvme_extent", extent <= target.size, f"must fit in {target}", extent)
        _require("nvme_extent", extent >= 0 and extent % FRAME_ALIGN_BYTES == 0, "must be a multiple of 4KiB", extent)
        _require("nvme_format", bool(self.nvme) or not self.nvme_format, "needs targets: give nvme", self.nvme_format)
        _require("nvme_admission", self.nvme_admission in ADMISSIONS, "must be all or reused", self.nvme_admission)
        _require(
            "nvme_write_bytes_per_day",
            self.nvme_write_bytes_per_day >= 0,
            "must be zero or more",
            self.nvme_write_bytes_per_day,
        )
        _require("demote_at", 0 <= self.demote_at <= 1, "must be from 0 to 1", self.demote_at)
        _require("promote_after", 1 <= self.promote_after <= 255, "must be from 1 to 255", self.promote_after)
        _require("checkpoint_s", self.checkpoint_s > 0, "must be more than zero", self.checkpoint_s)

    def _check_faces(self) -> None:
        _require("log_format", self.log_format in LOG_FORMATS, "must be text or json", self.log_format)
        traced = not self.otlp_endpoint or is_http_address(self.otlp_endpoint)
        _require("otlp_endpoint", traced, "must be like http://HOST:PORT", self.otlp_endpoint)
        _require("rpcs_max", 1 <= self.rpcs_max <= 65535, "must be from 1 to 65535", self.rpcs_max)
        _require("rpc_timeout_s_max", self.rpc_timeout_s_max > 0, "must be more than zero", self.rpc_timeout_s_max)
        _require("pins_share_max", 0 <= self.pins_share_max <= 1, "must be from 0 to 1", self.pins_share_max)
        both = bool(self.kv_events) or not self.kv_events_replay
        _require("kv_events_replay", both, "needs kv_events", self.kv_events_replay)
        salts = [quota.salt for quota in self.quotas]
        _require("quotas", len({*salts}) == len(salts), "must not name a salt twice", ", ".join(map(str, self.quotas)))
        both = (self.tls_cert is None) == (self.tls_key is None)
        _require("tls_key", both, "goes with tls_cert", str(self.tls_key))
        ca = self.tls_client_ca is None or self.tls_cert is not None
        _require("tls_client_ca", ca, "needs tls_cert and tls_key", str(self.tls_client_ca))

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
