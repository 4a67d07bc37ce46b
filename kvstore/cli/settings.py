"""Flags of a node's settings, one for each: ``serve`` and ``config`` have the same, in the order of ``NodeConfig``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import click

from kvstore.config import NodeConfig, format_size
from kvstore.config.values import parse_size, parse_size_or_zero

HELP: Final[Mapping[str, str]] = {
    "name": "What clients on this machine connect to.",
    "dram": "Capacity of the DRAM segment, such as 8GiB.",
    "http": "Where /healthz, /readyz and /metrics are.",
    "shm_dir": "The tmpfs that holds the node's folder; clients need it in KVSTORE_SHM_DIR.",
    "group": "Let the daemon's unix group map the pool.",
    "extent": "Bytes of one extent; the largest page must fit.  0: a sixteenth of --dram.",
    "scrub_bytes_per_s": "How fast resting pages are verified; 0: not at all.",
    "reserve_ttl_s": "Seconds a writer may hold frames without progress.",
    "lease_ttl_s_max": "The longest lease.",
    "sessions_max": "How many clients may be connected at once.",
    "verify_reads": "Verify checksums on reads from DRAM too.",
    "eviction": "Policy by which pages leave: gittins, lru, slru, s3fifo or arc.",
    "nvme": "A file or block device below DRAM; may repeat.",
    "nvme_format": "Leave to make anew an NVMe target that holds something else.",
    "nvme_extent": "Bytes of one extent on NVMe.  0: by the size of the targets.",
    "nvme_admission": "What is saved before it leaves DRAM: all, or reused.",
    "nvme_write_bytes_per_day": "A cap on what is written to NVMe; 0: none.",
    "demote_at": "The share of DRAM in use from which on pages are saved.",
    "promote_after": "How many reads from NVMe bring a page to DRAM.",
    "checkpoint_s": "Seconds between checkpoints on NVMe.",
    "on_stop": "What an end does with what only DRAM holds: keep, save, or auto: save where DRAM goes.",
    "stop_save_s": "Seconds that an end may take to save it.",
    "nvme_answer_s": "Seconds after which an NVMe device that does not answer counts as failed.",
    "listen": "Where the gRPC API listens; may repeat. Beyond loopback it asks for TLS and identities.",
    "tls_cert": "Certificate (and chain) that the gRPC API shows, PEM.",
    "tls_key": "Its private key, PEM.",
    "tls_client_ca": "Authorities whose client certificates are asked for, PEM.",
    "identities": "TOML file of who may call the gRPC API, and for which salts.",
    "rpcs_max": "How many gRPC calls may be under way at once.",
    "rpc_timeout_s_max": "The longest a gRPC call may take.",
    "rpc_buffers": "Memory for what gRPC calls are moving.",
    "quotas": "Bytes a tenant may have in each tier; may repeat. The salt * is every other tenant.",
    "pins_share_max": "The share of a tier that pins may keep.",
    "kv_events": "ZMQ address to publish KV events at, such as tcp://127.0.0.1:5557.",
    "kv_events_replay": "ZMQ address to replay missed KV events at.",
    "log_level": "debug, info, warning or error.",
    "log_format": "text, or json: one object per line.",
    "otlp_endpoint": "Where OpenTelemetry spans are sent, such as http://127.0.0.1:4318.",
}
METAVARS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("tls_cert", "tls_key", "tls_client_ca", "identities"), "FILE"),
    "dram": "SIZE",
    "http": "HOST:PORT",
    "nvme": "PATH:SIZE",
    "listen": "HOST:PORT|unix:PATH",
    "quotas": "'SALT dram=SIZE nvme=SIZE'",
}
REPEATED: Final = ("nvme", "listen", "quotas")
SHORT: Final[Mapping[str, str]] = {"nvme_format": "--format", "quotas": "--quota"}

_SIZES = (parse_size, parse_size_or_zero)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """One option per setting. They hand over what ``load`` reads: text, of switches True, of those that may repeat a
    tuple; None where not given."""
    default = NodeConfig()
    for setting in reversed(fields(NodeConfig)):
        name = setting.name
        flag = f"--{name.replace('_', '-')}"
        names = [SHORT[name], flag] if name in SHORT else [flag]
        value = getattr(default, name)
        shown = value_text(name, value).strip('"') if value else "off" if value is False else value_text(name, value)
        about = f"{HELP[name]}  [default: {'none' if shown in ('[]', chr(34) * 2) else shown}]"
        if isinstance(value, bool):
            command = click.option(*names, name, is_flag=True, default=None, help=about)(command)
        elif name in REPEATED:
            option = click.option(
                *names, name, multiple=True, metavar=METAVARS[name], help=about, callback=lambda *a: a[2] or None
            )
            command = option(command)
        else:
            command = click.option(*names, name, metavar=METAVARS.get(name, "VALUE"), help=about)(command)
    return command


def value_text(name: str, value: Any) -> str:
    """A setting's value as the file has it: ``"512MiB"``, ``0.5``, ``["a", "b"]``; ``none`` where it is not set."""
    parser = next(setting.metadata["parser"] for setting in fields(NodeConfig) if setting.name == name)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(_quoted(str(part)) for part in value)}]"
    if parser in _SIZES:
        return _quoted(format_size(value)) if value else "0"
    return _quoted(str(value)) if isinstance(value, str | Path) else str(value)


def _quoted(text: str) -> str:
    """A TOML string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
