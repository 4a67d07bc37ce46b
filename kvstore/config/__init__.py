"""The configuration of a node. Daemons and the command line read it once, when they start.

A value comes from one of four places. The first that has it counts: a flag, the environment (``KVSTORE_DRAM``), a TOML
file (``dram = "4GiB"`` under ``[node]``), the default. `Config.sources` has the place of each value. Unknown names are
refused, so that a spelling mistake does not silently select the default. Only `load` reads files and the environment.
`kvstore.config.reading` turns text into values.

To add a setting, add a field with `setting(default, parser, help)`. That makes the flag, the environment variable and
the name in the file. Put its bounds, and its relations to other settings, into `__post_init__`. Settings that every
daemon has are in `kvstore.config.daemon`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from kvstore.config.daemon import NAME, DaemonConfig, require
from kvstore.config.reading import (
    GIB,
    KIB,
    MIB,
    TIB,
    NvmeTarget,
    Quota,
    format_size,
    is_http_address,
    parse_address,
    parse_count,
    parse_data,
    parse_networks,
    parse_number,
    parse_nvme,
    parse_path,
    parse_quotas,
    parse_size,
    parse_size_or_zero,
    parse_switch,
    parse_text,
    parse_values,
    read,
    setting,
)

__all__ = [
    "ADMISSIONS",
    "FRAME_ALIGN_BYTES",
    "GIB",
    "KIB",
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
"""Frames are multiples of this: O_DIRECT needs it, and it makes frames page-aligned."""

NVME_BYTES_MIN = MIB
"""A smaller size probably lacks a unit. Superblocks and tables alone take about 20 KiB."""

_SHM_DIR = Path("/dev/shm")
ADMISSIONS = ("all", "reused")
ON_STOP = ("auto", "keep", "save")
_POLICY = re.compile(r"[a-z0-9_-]+")

_ENV_PREFIX = "KVSTORE_"
_ENV_NOT_CONFIG = (
    # the node that clients connect to, and their credentials
    *("KVSTORE_NODE", "KVSTORE_TOKEN", "KVSTORE_TOKEN_FILE", "KVSTORE_TLS_CA"),
    "KVSTORE_FAILPOINT",  # a fault that a test injects
)
_ENV_NOT_CONFIG_PREFIXES = ("KVSTORE_TEST_", "KVSTORE_ENGINE_", "KVSTORE_CONDUCTOR_")  # settings of other programs


# --- The settings ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NodeConfig(DaemonConfig):
    """One node. Sizes are bytes. The constructor raises `InvalidRequest` if a value is invalid, and names the field."""

    name: str = setting(
        "default", parse_text, "The name that clients on this machine connect to, and that of the node's folder."
    )
    dram: int = setting(
        512 * MIB,
        parse_size,
        "Capacity of the DRAM segment in bytes of frames; records, uses and index take some more memory.",
        metavar="SIZE",
    )
    shm_dir: Path = setting(
        _SHM_DIR,
        parse_path,
        "Absolute path of the tmpfs for the node's folder. Clients need it in KVSTORE_SHM_DIR.",
    )
    group: bool = setting(
        False,
        parse_switch,
        "Whether the daemon's unix group may map the pool too. Its members then belong to the trust domain.",
    )
    extent: int = setting(
        0, parse_size_or_zero, "Bytes of one extent; the largest page must fit. 0: a sixteenth of `dram`."
    )
    scrub_bytes_per_s: int = setting(
        64 * MIB,
        parse_size_or_zero,
        "Bytes of stored pages that are verified per second in the background; 0 turns the scrubber off.",
    )
    reserve_ttl_s: float = setting(
        30.0, parse_number, "How long a writer may hold reserved frames without a sign of progress."
    )
    lease_ttl_s_max: float = setting(
        3600.0,
        parse_number,
        "The longest lease. It bounds how long a client can keep frames from being evicted.",
    )
    sessions_max: int = setting(256, parse_count, "How many clients may be connected at the same time.")
    verify_reads: bool = setting(
        False,
        parse_switch,
        "Whether reads from DRAM verify checksums too, as reads from other tiers and machines always do.",
    )
    eviction: str = setting(
        "gittins", parse_text, "The policy that chooses which pages are evicted from DRAM and NVMe: gittins or lru."
    )
    nvme: tuple[NvmeTarget, ...] = setting(
        (),
        parse_nvme,
        "Files or block devices below DRAM, with their sizes. Pages in them survive a restart of the machine.",
        metavar="PATH:SIZE",
        repeats=True,
    )
    nvme_format: bool = setting(
        False,
        parse_switch,
        "Whether the start may format a target that it cannot use as it is. Everything stored there is lost.",
        short="--format",
    )
    nvme_extent: int = setting(
        0, parse_size_or_zero, "Bytes of one extent on NVMe, or 0 to derive it from the sizes of the targets."
    )
    nvme_admission: str = setting(
        "all",
        parse_text,
        "Which chains are saved to NVMe: all, or reused, which are those that were used after they were stored.",
    )
    nvme_write_bytes_per_day: int = setting(
        0, parse_size_or_zero, "Bytes that may be written to all targets together in one day (UTC); 0: no limit."
    )
    demote_at: float = setting(
        0.5,
        parse_number,
        "Pages are saved to NVMe while more than this share of DRAM is in use. 0: always; 1: when DRAM is full.",
    )
    promote_after: int = setting(2, parse_count, "After how many reads from NVMe a page is copied back to DRAM.")
    checkpoint_s: float = setting(
        30.0,
        parse_number,
        "Seconds between checkpoints on NVMe. A start after a reboot scans only what was written since the last one.",
    )
    on_stop: str = setting(
        "auto",
        parse_text,
        (
            "What SIGTERM does with pages that are only in DRAM: keep, save (to NVMe), or auto (save if "
            "DRAM will be lost)."
        ),
    )
    stop_save_s: float = setting(
        20.0,
        parse_number,
        "Seconds that saving at SIGTERM may take, hottest pages first. The process manager must wait longer.",
    )
    nvme_answer_s: float = setting(
        10.0,
        parse_number,
        "Seconds after which a silent NVMe device gets no more writes. It is read again once it answers.",
    )
    rpcs_max: int = setting(
        256,
        parse_count,
        "How many gRPC calls may run at the same time. More are refused, with a hint about when to retry.",
    )
    rpc_timeout_s_max: float = setting(
        60.0, parse_number, "How long a gRPC call may take, even if its client sets no deadline."
    )
    rpc_buffers: int = setting(
        256 << 20,
        parse_size,
        "Memory for the data of all gRPC calls together. An opaque object that is sent or read over gRPC must fit.",
    )
    quotas: tuple[Quota, ...] = setting(
        (),
        parse_quotas,
        (
            'Each is "SALT dram=SIZE nvme=SIZE": the bytes that a tenant may have in each tier. * stands '
            'for all other salts, "" for callers without a salt.'
        ),
        metavar="'SALT dram=SIZE nvme=SIZE'",
        repeats=True,
        short="--quota",
    )
    pins_share_max: float = setting(0.5, parse_number, "The share of a tier that pins may keep from being evicted.")
    kv_events: str = setting(
        "",
        parse_text,
        (
            "ZMQ address at which KV events are published, such as tcp://127.0.0.1:5557; empty: none. "
            "Subscribers learn the token ids of all tenants."
        ),
    )
    kv_events_replay: str = setting(
        "", parse_text, "ZMQ address where subscribers request events that they missed; empty: none."
    )
    data: str = setting(
        "auto",
        parse_data,
        (
            "HOST:PORT of the data server, from which other nodes read this node's pages; none: no data "
            "server; auto: a free port of loopback if there is a catalog. Beyond loopback it needs TLS "
            "and identities, or data_private_networks."
        ),
        metavar="HOST:PORT|auto|none",
    )
    data_connections: int = setting(
        256,
        parse_count,
        "How many connections of identified callers the data server accepts. Callers that want many get equal parts.",
    )
    data_private_networks: str = setting(
        "",
        parse_networks,
        (
            "Networks in which data connections may be plain TCP because they are private, such as 10.0.0.0/8, "
            "separated by commas. Machines in them need no certificate, and everything is sent unencrypted. From other "
            "networks only TLS is accepted."
        ),
        metavar="CIDR",
    )
    data_transports: str = setting(
        "auto",
        parse_text,
        (
            "Transports over which other nodes may read this node's pages, separated by commas; auto: all"
            " that the machine has, except nixl, which must be named. tcp remains as the last resort."
        ),
        metavar="NAMES",
    )
    replicas: int = setting(
        1,
        parse_count,
        "On how many nodes of the pool a page is stored, 1 or 2, unless the caller of a put says otherwise.",
    )
    replicas_same_machine: bool = setting(
        False,
        parse_switch,
        (
            "Whether a second copy may be stored by another node of the same machine if the pool has no other machine. "
            "Such a copy does not survive the loss of the machine."
        ),
    )
    background_bytes_per_s: int = setting(
        GIB,
        parse_size_or_zero,
        (
            "Bytes per second that this node sends and receives in the background, in total: second copies, pages that "
            "a conductor orders, and a drain; 0: no limit."
        ),
    )
    zone: str = setting(
        "",
        parse_text,
        "The zone of this node's machine, such as a rack. Second copies go to another zone if the pool has one.",
        metavar="NAME",
    )
    otlp_endpoint: str = setting(
        "",
        parse_text,
        "Where OpenTelemetry spans are sent, such as http://127.0.0.1:4318. If it is not set, none are made.",
    )

    def __post_init__(self) -> None:
        self.check_daemon()
        require("name", self.name.strip(".") != "", "must not be dots only, because it names a folder", self.name)
        require("shm_dir", self.shm_dir.is_absolute(), "must be an absolute path", str(self.shm_dir))
        require("sessions_max", 1 <= self.sessions_max <= 65535, "must be from 1 to 65535", self.sessions_max)
        require("scrub_bytes_per_s", self.scrub_bytes_per_s >= 0, "must be zero or more", self.scrub_bytes_per_s)
        require("reserve_ttl_s", self.reserve_ttl_s > 0, "must be more than zero", self.reserve_ttl_s)
        # A pool smaller than one frame could accept nothing.
        require("dram", self.dram >= FRAME_ALIGN_BYTES, "must be at least 4KiB", self.dram)
        # An extent is carved out of the segment and into aligned frames.
        require("extent", self.extent % FRAME_ALIGN_BYTES == 0, "must be a multiple of 4KiB", self.extent)
        require("extent", 0 <= self.extent <= self.dram, f"must fit in dram ({format_size(self.dram)})", self.extent)
        require("eviction", _POLICY.fullmatch(self.eviction) is not None, "must match [a-z0-9_-]+", self.eviction)
        self._check_nvme()
        self._check_interfaces()
        # A reservation keeps frames as a lease does, so it must not last longer than a lease may.
        require(
            "lease_ttl_s_max",
            self.lease_ttl_s_max >= self.reserve_ttl_s,
            f"must be at least reserve_ttl_s ({self.reserve_ttl_s:g})",
            self.lease_ttl_s_max,
        )

    def _check_nvme(self) -> None:
        paths = [target.path for target in self.nvme]
        require("nvme", len({*paths}) == len(paths), "must not name a path twice", ",".join(map(str, self.nvme)))
        extent = self.nvme_extent
        for target in self.nvme:
            require("nvme", target.path.is_absolute(), "must be an absolute path", str(target.path))
            require("nvme", target.size >= NVME_BYTES_MIN, "must have targets of at least 1MiB", str(target))
            # An extent is carved out of one target and into aligned frames.
            require("nvme_extent", extent <= target.size, f"must fit in {target}", extent)
        require("nvme_extent", extent >= 0 and extent % FRAME_ALIGN_BYTES == 0, "must be a multiple of 4KiB", extent)
        require("nvme_format", bool(self.nvme) or not self.nvme_format, "needs nvme", self.nvme_format)
        require("nvme_admission", self.nvme_admission in ADMISSIONS, "must be all or reused", self.nvme_admission)
        require(
            "nvme_write_bytes_per_day",
            self.nvme_write_bytes_per_day >= 0,
            "must be zero or more",
            self.nvme_write_bytes_per_day,
        )
        require("demote_at", 0 <= self.demote_at <= 1, "must be from 0 to 1", self.demote_at)
        require("promote_after", 1 <= self.promote_after <= 255, "must be from 1 to 255", self.promote_after)
        require("checkpoint_s", self.checkpoint_s > 0, "must be more than zero", self.checkpoint_s)
        require("on_stop", self.on_stop in ON_STOP, f"must be one of {', '.join(ON_STOP)}", self.on_stop)
        require("stop_save_s", self.stop_save_s > 0, "must be more than zero", self.stop_save_s)
        require("nvme_answer_s", self.nvme_answer_s > 0, "must be more than zero", self.nvme_answer_s)

    def _check_interfaces(self) -> None:
        is_valid = not self.otlp_endpoint or is_http_address(self.otlp_endpoint)
        require("otlp_endpoint", is_valid, "must be like http://HOST:PORT", self.otlp_endpoint)
        require("rpcs_max", 1 <= self.rpcs_max <= 65535, "must be from 1 to 65535", self.rpcs_max)
        require("replicas", self.replicas in (1, 2), "must be 1 or 2", self.replicas)
        require(
            "background_bytes_per_s",
            self.background_bytes_per_s >= 0,
            "must be zero or more",
            self.background_bytes_per_s,
        )
        is_zone = not self.zone or NAME.fullmatch(self.zone) is not None
        require("zone", is_zone, "must match [a-zA-Z0-9._-]{1,48}", self.zone)
        require(
            "data_connections", 2 <= self.data_connections <= 65535, "must be from 2 to 65535", self.data_connections
        )
        require("rpc_timeout_s_max", self.rpc_timeout_s_max > 0, "must be more than zero", self.rpc_timeout_s_max)
        require("pins_share_max", 0 <= self.pins_share_max <= 1, "must be from 0 to 1", self.pins_share_max)
        both = bool(self.kv_events) or not self.kv_events_replay
        require("kv_events_replay", both, "needs kv_events", self.kv_events_replay)
        salts = [quota.salt for quota in self.quotas]
        require("quotas", len({*salts}) == len(salts), "must not name a salt twice", ", ".join(map(str, self.quotas)))

    @property
    def file_mode(self) -> int:
        """Permission bits of the segment, tables, index and socket."""
        return 0o660 if self.group else 0o600


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration. `sources` says for each setting, such as ``"node.dram"``, where its value comes from."""

    node: NodeConfig = field(default_factory=NodeConfig)
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)


# --- Reading ----------------------------------------------------------------------------------------------------


def node_config(**raw: object) -> NodeConfig:
    """Make a `NodeConfig` from keyword arguments as users write them (``dram="512MiB"``), for an embedded node.

    Reads neither files nor the environment. Raises `InvalidRequest` for unknown names and invalid values.
    """
    return parse_values(NodeConfig, raw)


def load(
    path: str | Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Config:
    """Read the configuration. Flags have precedence over the environment, then come the file and the defaults.

    Args:
        path: of a TOML file, or None.
        env: the environment; None means `os.environ`.
        flags: raw values by the names of their settings. None as a value means that the flag was not given.

    Raises:
        InvalidRequest: a setting is unknown or invalid. The message names it and the place where it was read.
    """
    node, sources = read(
        NodeConfig,
        "node",
        path,
        os.environ if env is None else env,
        {} if flags is None else flags,
        _ENV_PREFIX,
        (_ENV_NOT_CONFIG, _ENV_NOT_CONFIG_PREFIXES),
    )
    return Config(node=node, sources=MappingProxyType({f"node.{name}": place for name, place in sources.items()}))
