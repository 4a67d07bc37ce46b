"""The data server of a node: ``kvstore data``, a separate process next to the daemon.

The process is a client of the node's memory and NVMe files. It serves their pages even while the daemon is busy,
stopped or dead. It publishes its own entry in the catalog, and keeps the node's ``peers`` file up to date
(``cluster.peer_links``). It ends on SIGTERM, or when the node's folder is gone; a daemon that started it also ends it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kvstore import about, boundary, logs
from kvstore.client.local.node import LocalNode
from kvstore.cluster import peer_links
from kvstore.cluster.catalog import schema
from kvstore.cluster.catalog.connect import check_url
from kvstore.cluster.catalog.schema import DataEntry, NodeEntry
from kvstore.cluster.catalog.task_health import TaskHealth
from kvstore.cluster.data_connection import Admit, Caller, Handler, is_loopback
from kvstore.cluster.data_listener import Server, ServerLimits
from kvstore.cluster.membership import Membership, host
from kvstore.cluster.nixl import NixlAgent
from kvstore.cluster.page_mover import TRANSPORTS, missing_here
from kvstore.cluster.peer_links import PeersFile, PoolNode, PoolView
from kvstore.config import NodeConfig, parse_address
from kvstore.config.reading import DATA_AUTO, DATA_NONE, TRANSPORTS_AUTO, ChangedFiles, networks_of
from kvstore.errors import InvalidRequest, KVStoreError, OutOfSpace, Unauthenticated, Unavailable
from kvstore.limits import UNKNOWN_PART
from kvstore.node.cluster.copy_handler import CopyHandler
from kvstore.node.cluster.directory_shell import DirectoryShell
from kvstore.node.cluster.object_handlers import ForgetHandler, KeysHandler, ObjectsHandler
from kvstore.node.cluster.page_handlers import CheckHandler, HoldHandler, LendHandler, ReadHandler
from kvstore.server import lifecycle
from kvstore.server.certificates import ServerCertificate
from kvstore.server.identities import Identities
from kvstore.server.lifecycle import Life
from kvstore.server.listening import check_certificates, check_remote, numeric
from kvstore.shm.data_server_file import DataFile, RunningDataServer, write_errors
from kvstore.shm.folder import NodeFolder
from kvstore.shm.traffic import TrafficBucket
from kvstore.wire.data import FrameKind, Hello

HEARD_STEP_S: Final = 1.0  # the file is rewritten if the catalog's last answer is newer by at least this

cluster_log = logging.getLogger("kvstore.cluster")


def server_by_node(nodes: Iterable[NodeEntry], servers: Iterable[DataEntry]) -> dict[str, DataEntry]:
    """Return, for each node, the data server that its pages are read from.

    If a node has several, the newest counts, because an older one may have died recently. But a data server from
    another incarnation does not belong to the current node with this name: it serves an earlier node, which was cut
    off.

    Args:
        servers: the newest last.
    """
    incarnations = {node.name: node.incarnation for node in nodes}
    newest: dict[str, DataEntry] = {}
    for server in servers:
        is_current = not server.incarnation or server.incarnation == incarnations.get(server.node, server.incarnation)
        if server.node not in newest or is_current:
            newest[server.node] = server
    return newest


def offered_by(server: DataEntry) -> tuple[str, ...]:
    """Return the transports that the data server offers."""
    return tuple(name for name, why in server.transports.items() if not why)


class ViewKeeper:
    """Writer of the node's ``peers`` file. It runs in the data server, so that readers do not depend on the daemon.

    One thread calls ``refresh``."""

    def __init__(self, folder: NodeFolder, pool: str, members: Membership, private_networks: tuple[str, ...]) -> None:
        self._folder = folder
        self._members = members
        self._view = PoolView(pool, folder.name, 0.0, {}, private_networks)
        self._seen: tuple[list[NodeEntry], list[DataEntry]] | None = None  # what the file has

    def refresh(self) -> None:
        """Write the file if the members have changed. Otherwise, write only the time of the catalog's last answer, if
        that is newer."""
        nodes, servers = seen = self._members.nodes(), self._members.data_servers()
        heard_s, before, last = self._members.heard_s, self._view, self._seen
        changed = last is None or last[0] is not nodes or last[1] is not servers
        if not changed and heard_s < before.heard_s + HEARD_STEP_S:
            return
        try:
            if changed:
                peers = {name: node_of(name, each) for name, each in server_by_node(nodes, servers).items()}
                self._view = replace(before, heard_s=heard_s, peers=peers)
                peer_links.write(self._folder, self._view)
                self._seen = seen
            else:
                self._view = replace(before, heard_s=heard_s)
                peer_links.write_heard(self._folder, heard_s)
        except OSError as error:
            cluster_log.warning("%s: cannot list the members of the cluster: %s", self._folder.name, error)


def node_of(name: str, server: DataEntry) -> PoolNode:
    """Return how a reader reaches the node ``name``, whose data server this is."""
    return PoolNode(
        name,
        server.process,
        server.incarnation,
        server.addresses,
        server.tls,
        offered_by(server),
        server.tls_name,
        server.private_networks,
    )


# Shorter than the silence after which a reader considers this server dead: if the daemon or a device has not answered
# by then, the reply is a miss.
PATIENCE_S: Final = 0.3
NODE_S: Final = 60.0  # wait for a node that is being created
NODE_LOOK_S: Final = 0.05
DIRECTORY_BYTES: Final = 256 << 20  # see ``Directory``
NAME_DIGITS: Final = 12  # so that the catalog accepts it with the longest node name
STOP_S: Final = 5.0  # wait for a silent catalog; a daemon that ends this process waits longer

log = logging.getLogger("kvstore.data")


def address_of(config: NodeConfig) -> tuple[str, int]:
    """Return the numeric address and port to listen on.

    Raises:
        InvalidRequest: the address is beyond loopback, but TLS and identities (or private networks) are not configured;
            one of these settings or a certificate is invalid; the host does not exist; or the address is a wildcard, to
            which other nodes cannot connect.
    """
    named = config.data not in (DATA_AUTO, DATA_NONE)
    host_name, port = parse_address(config.data, "data") if named else ("127.0.0.1", 0)
    number = numeric(host_name, config.data, "data")[0]
    if config.catalog and ipaddress.ip_address(number).is_unspecified:
        raise InvalidRequest("data", f"must be an address that other nodes can reach (got {config.data})")
    identities = Identities(config.identities)
    if not is_loopback(number) and (config.tls_cert is not None or not config.data_private_networks):
        check_remote(config, identities, config.data, "data")
    check_certificates(config, identities)
    ServerCertificate.of(config)
    transports_of(config)
    return number, port


def host_of(config: NodeConfig) -> str:
    """Return the host name in ``--data``; "" if there is none."""
    return parse_address(config.data, "data")[0] if config.data not in (DATA_AUTO, DATA_NONE) else ""


def serve(config: NodeConfig, announce: Callable[[str], None], *, child: bool = False) -> None:
    """Serve the pages of the node ``config.name`` until SIGTERM or SIGINT, or until the node's folder is gone.

    Args:
        announce: called once, with one line of text, when the server is ready.
        child: whether a daemon started the server and will end it.

    Raises:
        NodeBusy: another process is the node's data server.
        Unavailable: no node with this name exists, and none appeared in time.
        InvalidRequest: a setting is invalid.
        VersionMismatch: the catalog is from another version.
    """
    where = address_of(config)
    if config.catalog:
        check_url(config.catalog)
    folder = NodeFolder(config.shm_dir, config.name)
    quiet = replace(config, http=None, listen=(), otlp_endpoint="")  # the daemon has its own
    with lifecycle.run(quiet, log, "the data server") as life:
        life.log_start(node=config.name)
        file = _take(folder, life)
        life.at_end(file.close)
        node = LocalNode(folder.path, timeout_s=PATIENCE_S)
        life.at_end(node.close)
        certificate = ServerCertificate.of(config)
        directory = DirectoryShell(DIRECTORY_BYTES, PeersFile(folder.path))
        process = schema.new_process()
        bucket = TrafficBucket(folder, config.background_bytes_per_s)
        life.at_end(bucket.close)
        copies = CopyHandler(node, bucket)
        life.at_end(copies.close)
        server = Server(
            config.name,
            {**handlers(node, directory, transports_of(config)), FrameKind.COPY: copies},
            caller_check(config, process),
            limits_of(config),
            tls=certificate.for_sockets() if certificate is not None else None,
            process=process,
            private_networks=networks_of(config.data_private_networks),
        )
        if config.data_private_networks:
            what = "data connections from these networks may be plain, and can then be read on the way"
            logs.event(log, logging.WARNING, what, networks=config.data_private_networks)
        address = server.start(*where)
        life.at_end(server.stop)
        file.write(RunningDataServer(os.getpid(), server.process, address, child))
        former = name_of(config.name, file.former.process) if file.former is not None else ""
        entry = _CatalogEntry(config, node, directory, server.process, address, certificate, former, life.fail)
        life.at_end(entry.stop)
        line = f"kvstore data server of node {config.name} ready: pages on {address}"
        life.report_ready(lambda: announce(line), life.took_s, address=address)
        life.wait_while(lambda: file.is_current() and entry.refresh())


def transports_of(config: NodeConfig) -> dict[str, str]:
    """Return, for each transport, why it is not offered, or "" if it is offered. Raises InvalidRequest for unknown
    names."""
    missing = missing_here()
    names = [name.strip() for name in config.data_transports.split(",")]
    if names == [TRANSPORTS_AUTO]:
        opt_in = {name for name, kind in TRANSPORTS.items() if not kind.guarded}
        return {
            name: why or ("to be named in data_transports" if name in opt_in else "") for name, why in missing.items()
        }
    unknown = [name for name in names if name not in missing]
    if unknown:
        raise InvalidRequest("data_transports", f"must be auto, or some of {', '.join(missing)} (got {unknown[0]!r})")
    return {name: why if name in names else "switched off" for name, why in missing.items()}


def limits_of(config: NodeConfig) -> ServerLimits:
    """Return the limits of this configuration's data server.

    ``Connections`` reserves 1/``UNKNOWN_PART`` of the connections for callers that are not identified."""
    known = config.data_connections
    return ServerLimits(connections_max=known + -(-known // (UNKNOWN_PART - 1)))


def handlers(node: LocalNode, directory: DirectoryShell, transports: Mapping[str, str]) -> Mapping[FrameKind, Handler]:
    """Return the handlers of a data server that offers these transports."""
    read = ReadHandler(node)
    by_kind: dict[FrameKind, Handler] = {
        FrameKind.READ: read,
        FrameKind.OBJECTS: ObjectsHandler(node, read.below),
        FrameKind.KEYS: KeysHandler(node),
        FrameKind.FORGET: ForgetHandler(node, directory.keep_tombstones, read.below),
        FrameKind.HOLD: HoldHandler(node),
        FrameKind.CHECK: CheckHandler(node),
    }
    by_kind |= directory.handlers
    if not transports["nixl"]:
        by_kind |= LendHandler(node, lambda: NixlAgent(f"{node.name}-{secrets.token_hex(8)}")).handlers
    return by_kind


def caller_check(config: NodeConfig, process: str) -> Admit:
    """Return the check for callers: the identities are those of gRPC, and the caller must belong to the same pool.

    Without identities, a caller must send the number of this process. Other users on the machine can reach loopback,
    but they can read neither the catalog nor the node's folder, which have the number."""
    identities = Identities(config.identities)

    def admit(hello: Hello, names: Sequence[str]) -> Caller:
        if hello.node not in ("", config.name):
            raise InvalidRequest("node", f"must be {config.name} (got {hello.node[:80]})")
        if hello.pool not in ("", config.pool):
            raise InvalidRequest("pool", f"must be the pool of {config.name} (got {hello.pool[:80]})")
        if not identities.required and not secrets.compare_digest(hello.process.encode(), process.encode()):
            raise Unauthenticated(f"{config.name}: read the number of this data server in the catalog, and send it")
        return identities.find(hello.token or None, names)

    return admit


def _take(folder: NodeFolder, life: Life) -> DataFile:
    """Become the node's data server. Waits until the node exists."""
    deadline_s = time.monotonic() + NODE_S
    while True:
        file = DataFile(folder)
        try:
            if folder.is_trusted():
                file.take()
                return file
        except FileNotFoundError:  # purged just now
            pass
        if time.monotonic() >= deadline_s or life.wait_for_end(NODE_LOOK_S):
            raise Unavailable(f"there is no node {folder.name!r} on this machine; start it with `kvstore serve`")


def name_of(node: str, process: str) -> str:
    """Return the catalog's name for the data server with this number. It is unique, so that the server does not have to
    wait until another server's entry expires."""
    return f"{node}.{process[:NAME_DIGITS]}"


class _CatalogEntry:
    """The data server's entry in the catalog. A thread publishes it and retries; serving does not wait for it.

    Args:
        former: the name of the predecessor, which has died. Its entry is removed when the new one is published.
        on_final: ends the process.
    """

    def __init__(
        self,
        config: NodeConfig,
        node: LocalNode,
        directory: DirectoryShell,
        process: str,
        address: str,
        certificate: ServerCertificate | None,
        former: str,
        on_final: Callable[[KVStoreError], None],
    ) -> None:
        self._config = config
        self._certificate = certificate
        self._files = certificate.files if certificate is not None else ChangedFiles(())
        self._former = former
        self._on_final = on_final
        self._node = node
        self._directory = directory
        self._entry = DataEntry(
            name=name_of(config.name, process),
            process=process,
            node=config.name,
            incarnation="",
            addresses=(address,),
            tls=config.tls_cert is not None,
            tls_name=self._tls_name(address, ""),
            private_networks=networks_of(config.data_private_networks),
            transports=transports_of(config),
            host=host(),
            version=about.version(),
        )
        self._errors: dict[str, int] | None = None  # the counts in the daemon's copy
        self._membership: Membership | None = None
        self._keeper: ViewKeeper | None = None
        self._stopping = threading.Event()
        self._joining = TaskHealth("joining", on_final=on_final)
        directory.membership = self._status
        join = boundary.thread_loop("task/data catalog", self._join, self._stopping)
        self._thread = threading.Thread(target=join, name="data catalog", daemon=True)
        if config.catalog:
            self._thread.start()
        else:
            peer_links.forget(node.folder)

    def refresh(self) -> bool:
        """Update three things and return True: the entry (if the node has a new incarnation or the certificate is new),
        the ``peers`` file, and the daemon's copy of the error counts."""
        mapped = self._node.mapped()
        incarnation = f"{mapped.incarnation:016x}" if mapped is not None else self._entry.incarnation
        if self._keeper is not None:
            self._keeper.refresh()
        before, name = self._entry, self._entry.tls_name
        if self._files.changed():
            name = self._tls_name(before.addresses[0], name)
        if (incarnation, name) != (before.incarnation, before.tls_name):
            self._entry = replace(before, incarnation=incarnation, tls_name=name)
            membership = self._membership
            if membership is not None:
                membership.update(self._entry)
        errors = boundary.counts()
        if errors != self._errors:
            with contextlib.suppress(OSError, OutOfSpace):  # the next refresh tries again
                write_errors(self._node.folder, errors)
                self._errors = errors
        return True

    def _tls_name(self, address: str, before: str) -> str:
        """Return the name that peers must check, see ``ServerCertificate.name_for``. ``before`` is the previous one."""
        if self._certificate is None:
            return ""
        number = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
        try:
            name = self._certificate.name_for(number, host_of(self._config))
        except (OSError, ValueError):  # another process is writing the file; the server keeps its certificate
            self._files.forget()
            return before
        if name is None:
            logs.event(
                log, logging.WARNING, "peers will not trust its certificate", cert=self._certificate.cert, at=address
            )
        return name or ""

    def stop(self) -> None:
        """Remove the entry from the catalog."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)
        if self._membership is not None:
            self._membership.stop()

    def _status(self) -> dict[str, Any]:
        """Return the state of the membership's tasks. Until the entry is published, return the state of the
        attempts."""
        membership = self._membership
        if membership is not None:
            return membership.status()
        return {"joining": self._joining.status(), "fault": self._joining.fault(self._config.catalog_ttl_s)}

    def _join(self) -> bool:
        """Try once to publish the entry. Return True if it is published."""
        membership, entry = Membership(self._config), self._entry
        try:
            membership.start(entry, former_name=self._former, on_final=self._on_final)
        except KVStoreError as error:  # also a refused password or an unreadable file: an operator may replace these
            self._stopping.wait(self._joining.note_failure(error))
            return False
        self._joining.note_success()
        self._membership = self._directory.members = membership
        networks = networks_of(self._config.data_private_networks)
        self._keeper = ViewKeeper(self._node.folder, self._config.pool, membership, networks)
        if self._entry is not entry:
            membership.update(self._entry)
        return True
