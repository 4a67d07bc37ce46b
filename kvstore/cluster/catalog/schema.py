"""Every key and value that kvstore stores in a catalog.

::

    /kvstore/v1/POOL/nodes/NAME       a node
    /kvstore/v1/POOL/engines/NAME     an engine
    /kvstore/v1/POOL/data/NAME        a data server: the process that sends the pages of a node
    /kvstore/v1/POOL/secret           the secret of the pool's tags and veils, see ``model.prefix``; no process owns it
    /kvstore/v1/POOL/conductors/NAME  a conductor
    /kvstore/v1/POOL/clusters/NAME    another pool whose engines compute prompts for this one
    /kvstore/v1/POOL/leader           the name of the conductor that leads

Values are JSON objects. ``v`` is the version of the format; readers skip entries of a newer version. ``process`` is a
random number of the process that wrote the entry, so that no process mistakes another process's entry for its own.
Unknown fields are ignored, and invalid entries are skipped. A process that may write to the catalog can harm the pool,
but cannot crash it.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import logging
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from kvstore.cluster.catalog.base import Entry
from kvstore.errors import InvalidRequest
from kvstore.model.prefix import SECRET_BYTES

VERSION: Final = 1
NAME: Final = re.compile(r"[a-zA-Z0-9._-]{1,64}")
TEXT_MAX: Final = 512
ITEMS_MAX: Final = 64
_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:]{2,45}\]|[a-zA-Z0-9.-]{1,253}):[0-9]{1,5}")

log = logging.getLogger("kvstore.cluster.catalog")


@dataclass(frozen=True, kw_only=True)
class NodeEntry:
    """A node.

    Attributes:
        name: the node's name, unique in the pool.
        process: number of the daemon's process, 16 hex digits.
        incarnation: incarnation of the node's DRAM segment, 16 hex digits.
        addresses: HOST:PORT of its gRPC API, best first; empty if only its own machine can reach it.
        capacity_bytes: capacity of each tier, such as ``{"dram": 2**30}``.
        host: name of the node's machine. Engines on the same host map its memory.
        machine: id of the machine's running kernel, 32 hex digits. Containers of one machine have the same id, even if
            their host names differ.
        zone: the setting ``zone``: nodes of one zone may fail together. "" if it is not known.
        draining: whether the node is about to leave, so that no page may be copied to it.
        version: version of kvstore.
    """

    name: str
    process: str
    incarnation: str
    addresses: tuple[str, ...] = ()
    capacity_bytes: dict[str, int] = field(default_factory=dict)
    host: str = ""
    machine: str = ""
    zone: str = ""
    draining: bool = False
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """An engine.

    Attributes:
        role: prefill, decode or both.
        model: name of the model.
        layout: fingerprint of its pages, 32 hex digits. Only engines with equal fingerprints can hand over to each
            other.
        addresses: HOST:PORT of its gRPC API, best first.
        node: name of the node whose pool it reads and writes; empty if there is none.
        device: name of its device, such as cpu or cuda:0.
    """

    name: str
    process: str
    role: str
    model: str
    layout: str
    addresses: tuple[str, ...] = ()
    node: str = ""
    device: str = ""
    host: str = ""
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class DataEntry:
    """A data server. It serves a node's pages even while the node's daemon is down, so it has an entry of its own.

    Attributes:
        name: the node's name, a dot, and digits of ``process``, which are unique. So the next data server of the node
            can start before this entry expires, and removes it.
        process: number of the data server's process, 16 hex digits; every client that connects receives it.
        node: the node whose pages it serves.
        incarnation: incarnation of that node's DRAM segment, 16 hex digits.
        addresses: HOST:PORT of its data connections, best first.
        tls: whether connections are encrypted.
        tls_name: the name in the server's certificate, if it differs from the address.
        private_networks: networks, in CIDR notation, from which plain connections are accepted as well.
        transports: transport -> why it is unavailable, or "" if it is available.
    """

    name: str
    process: str
    node: str
    incarnation: str
    addresses: tuple[str, ...] = ()
    tls: bool = False
    tls_name: str = ""
    private_networks: tuple[str, ...] = ()
    transports: dict[str, str] = field(default_factory=lambda: {"tcp": ""})
    host: str = ""
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class ConductorEntry:
    """A conductor.

    Attributes:
        addresses: HOST:PORT of its gRPC API, best first.
        http: HOST:PORT of its HTTP server; empty if it has none.
        policy: the policy by which it routes.
    """

    name: str
    process: str
    addresses: tuple[str, ...] = ()
    http: str = ""
    policy: str = ""
    host: str = ""
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class ClusterEntry:
    """Another pool whose engines compute prompts for this one. A conductor of that pool publishes the entry; several
    conductors may publish one pool.

    Attributes:
        offered: the other pool's name. If two pools have this name, only one is used.
        addresses: HOST:PORT of that conductor's gRPC API, best first.
        egress_bytes_per_s: how many bytes of KV per second that pool may send to this one.
    """

    name: str
    process: str
    offered: str
    addresses: tuple[str, ...] = ()
    egress_bytes_per_s: int = 0
    host: str = ""
    version: str = ""


AnyEntry = NodeEntry | EngineEntry | DataEntry | ConductorEntry | ClusterEntry
Value = TypeVar("Value", NodeEntry, EngineEntry, DataEntry, ConductorEntry, ClusterEntry)
_FOLDERS: Final = {
    NodeEntry: "nodes",
    EngineEntry: "engines",
    DataEntry: "data",
    ConductorEntry: "conductors",
    ClusterEntry: "clusters",
}


def prefix(pool: str) -> str:
    """Return the prefix of every key of a pool."""
    return f"/kvstore/v{VERSION}/{_check_name('pool', pool)}/"


def folder(pool: str, kind: type[Any]) -> str:
    """Return the prefix of every key of a pool's entries of one kind."""
    return f"{prefix(pool)}{_FOLDERS[kind]}/"


def leader_key(pool: str) -> str:
    """Return the key under which the leading conductor writes its name."""
    return f"{prefix(pool)}leader"


def key_of(pool: str, value: AnyEntry) -> str:
    """Return the key under which ``value`` is published."""
    return folder(pool, type(value)) + _check_name("name", value.name)


def encode(value: AnyEntry) -> bytes:
    """Return the bytes of an entry's value."""
    return json.dumps({"v": VERSION, **dataclasses.asdict(value)}, separators=(",", ":"), sort_keys=True).encode()


def decode(kind: type[Value], entry: Entry) -> Value | None:
    """Return the value of an entry. None if it is invalid or has a newer version."""
    try:
        values = json.loads(entry.value)
        if not isinstance(values, dict) or values.get("v") != VERSION:
            raise ValueError(f"v: must be {VERSION} (got {str(values)[:80]})")
        value = kind(
            **{each.name: _check_value(each, values) for each in dataclasses.fields(kind) if each.name in values}
        )
        if entry.key.rpartition("/")[2] != value.name:
            raise ValueError(f"name: must be that of the key (got {value.name!r})")
    except (ValueError, TypeError, RecursionError) as error:
        log.warning("%s is skipped: %s", entry.key[:200], str(error)[:200])
        return None
    return value


def secret_key(pool: str) -> str:
    """Return the key of the pool's secret."""
    return f"{prefix(pool)}secret"


def new_secret() -> bytes:
    """Return a random secret, as an entry's value."""
    return json.dumps({"v": VERSION, "secret": secrets.token_hex(SECRET_BYTES)}, separators=(",", ":")).encode()


def decode_secret(value: bytes) -> bytes | None:
    """Return the secret in an entry's value. None if it is invalid."""
    try:
        values = json.loads(value)
        secret = bytes.fromhex(values["secret"])
        return secret if values["v"] == VERSION and len(secret) == SECRET_BYTES else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def decode_all(kind: type[Value], entries: Iterable[Entry]) -> list[Value]:
    """Return the values of the entries that are valid."""
    return [value for value in (decode(kind, each) for each in entries) if value is not None]


def new_process() -> str:
    """Return a random number for a process that publishes entries."""
    return secrets.token_hex(8)


def _check_name(setting: str, name: str) -> str:
    if not NAME.fullmatch(name):
        raise InvalidRequest(setting, f"must match {NAME.pattern} (got {name[:80]!r})")
    return name


def _check_value(item: dataclasses.Field[Any], values: dict[str, Any]) -> Any:
    """Return the value of a field. Raises ValueError if it is invalid."""
    name, value = item.name, values[item.name]
    problem = ""
    if name == "addresses":
        if not isinstance(value, list) or len(value) > ITEMS_MAX or not all(map(_is_address, value)):
            problem = f"must be a list of at most {ITEMS_MAX} HOST:PORT"
        else:
            value = tuple(value)
    elif name == "private_networks":
        if not isinstance(value, list) or len(value) > ITEMS_MAX or not all(map(_is_network, value)):
            problem = f"must be a list of at most {ITEMS_MAX} networks in CIDR notation"
        else:
            value = tuple(value)
    elif name == "capacity_bytes":
        if not _is_object(value) or not all(type(size) is int and 0 <= size < 1 << 63 for size in value.values()):
            problem = f"must be an object of at most {ITEMS_MAX} sizes"
    elif name == "transports":
        if not _is_object(value) or not all(
            NAME.fullmatch(each) and isinstance(why, str) and len(why) <= TEXT_MAX for each, why in value.items()
        ):
            problem = f"must be an object of at most {ITEMS_MAX} names with short reasons"
    elif name == "egress_bytes_per_s":
        if type(value) is not int or not 0 < value < 1 << 63:
            problem = "must be an integer above 0"
    elif name in ("tls", "draining"):
        if type(value) is not bool:
            problem = "must be true or false"
    elif not isinstance(value, str) or len(value) > TEXT_MAX:
        problem = f"must be a string of at most {TEXT_MAX} characters"
    if problem:
        raise ValueError(f"{name}: {problem} (got {str(value)[:80]!r})")
    return value


def _is_object(value: object) -> bool:
    return isinstance(value, dict) and len(value) <= ITEMS_MAX


def _is_network(item: object) -> bool:
    try:
        return isinstance(item, str) and bool(ipaddress.ip_network(item))
    except ValueError:
        return False


def _is_address(item: object) -> bool:
    return isinstance(item, str) and _ADDRESS.fullmatch(item) is not None
