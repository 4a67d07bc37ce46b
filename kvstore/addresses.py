"""Addresses: find the node that an address names, and open a store on it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kvstore.client.buffers import check_seconds
from kvstore.client.local.node import LocalNode
from kvstore.client.local.peer_reads import PeerReader
from kvstore.client.local.pool_objects import PoolObjects
from kvstore.client.local.store import LocalStore
from kvstore.client.remote.endpoint import CallerCredentials, endpoint, is_remote
from kvstore.client.store import Store
from kvstore.errors import InvalidRequest, NodeUnavailable
from kvstore.shm.folder import EMBEDDED_PREFIX, NodeFolder, list_nodes

SHM_DIR = "/dev/shm"


def connect(
    address: str | None = None,
    timeout_s: float = 5.0,
    *,
    token: str | None = None,
    tls_ca: str | Path | None = None,
    tls_cert: str | Path | None = None,
    tls_key: str | Path | None = None,
    tls_server_name: str | None = None,
) -> Store:
    """Return the store of a node: through shared memory on this machine, or over gRPC on any machine.

    Through shared memory, reads work even while the node's daemon is down. Over gRPC every call needs the daemon.

    Args:
        address: the name of a node on this machine, or ``kv://HOST:PORT`` or ``kv+unix:///PATH``, where a node's gRPC
            API listens. None: ``$KVSTORE_NODE``, which has the same forms, or else the only live node of this machine.
        timeout_s: how long a request may take, and how long to wait for a node that is starting for the first time.
            Streams of data over gRPC get one more second for every 32 MiB.
        token: identifies the caller to the node. None: ``$KVSTORE_TOKEN``, or else the contents of
            ``$KVSTORE_TOKEN_FILE``.
        tls_ca: PEM file of the authorities that may have signed the node's certificate; None: ``$KVSTORE_TLS_CA``.
            The connection is encrypted if this, a server name or a certificate is given.
        tls_cert, tls_key: PEM files of the client's own certificate and key; None: ``$KVSTORE_TLS_CERT``,
            ``$KVSTORE_TLS_KEY``.
        tls_server_name: the name in the node's certificate, if it differs from the address's host.

    Raises:
        NodeUnavailable: there is no such node, its files do not exist (yet), or nothing answers at that address.
        InvalidRequest: this machine has several nodes and none was named; the address is malformed or has another
            scheme; or a token would be sent unencrypted to another machine.
        Unauthenticated: the node does not accept the credentials.
        VersionMismatch: the node or its files are of another version.
    """
    check_seconds(timeout_s, "timeout_s")
    credentials = CallerCredentials(
        token=token, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_server_name=tls_server_name
    )
    name = address if address is not None else os.environ.get("KVSTORE_NODE") or None
    if is_remote(name):
        from kvstore.client.remote.store import connect_remote  # only here: it loads gRPC

        return connect_remote(endpoint(str(name), credentials, os.environ), timeout_s)
    if field := credentials.first_set():
        raise InvalidRequest(field, "applies to kv:// addresses only; a node of this machine needs none")
    return _connect_local(name, timeout_s)


def _connect_local(name: str | None, timeout_s: float) -> Store:
    shm_dir = Path(os.environ.get("KVSTORE_SHM_DIR") or SHM_DIR)
    name = name if name is not None else _only_node(shm_dir)
    if not isinstance(name, str) or not name:
        raise InvalidRequest("address", f"must be a node's name or kv://HOST:PORT (got {name!r})")
    try:
        folder = NodeFolder(shm_dir, name)
    except InvalidRequest as error:
        raise InvalidRequest("address", error.reason) from None
    if not folder.path.is_dir():
        raise NodeUnavailable(f"no node named {name!r} on this machine; start one with `kvstore serve --name {name}`")
    if not folder.is_trusted():
        raise InvalidRequest("address", f"{folder.path} belongs to another user")
    node = LocalNode(folder.path, timeout_s=timeout_s)
    node.peer_reader = PeerReader(folder.path)
    node.pool_objects = PoolObjects(node.peer_reader)
    deadline = time.monotonic() + timeout_s
    while node.mapped() is None:
        if time.monotonic() >= deadline or not folder.path.is_dir():
            node.close()
            raise NodeUnavailable(f"node {name!r} has no pool to read from: its daemon is not running or not ready")
        time.sleep(0.005)
    return LocalStore(node)


def _only_node(shm_dir: Path) -> str:
    live = [name for name, alive in list_nodes(shm_dir) if alive and not name.startswith(EMBEDDED_PREFIX)]
    if not live:
        raise NodeUnavailable("no node on this machine; start one with `kvstore serve`")
    if len(live) > 1:
        raise InvalidRequest("address", f"must name one of the nodes on this machine: {', '.join(live)}")
    return live[0]
