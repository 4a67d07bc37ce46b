"""Addresses: which node an address means, and how it is reached."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kvstore.client.buffers import check_seconds
from kvstore.client.local.node import LocalNode
from kvstore.client.local.peer_reads import Elsewhere
from kvstore.client.local.store import LocalStore
from kvstore.client.remote.endpoint import GivenCredentials, endpoint, is_remote
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
    """The store of a node: of this machine through shared memory, or of any machine over gRPC.

    Through shared memory reads work while the node's daemon is down. Over gRPC every verb needs the node.

    Args:
        address: a name: that node of this machine. ``kv://HOST:PORT`` or ``kv+unix:///PATH``: where a node's gRPC API
            listens. None: ``$KVSTORE_NODE``, which may be either, else the only live node of this machine.
        timeout_s: deadline of a request, and of the node's first start where it is just starting. Streams of data over
            gRPC get a second more for every 32 MiB.
        token: shows the node who we are; None: ``$KVSTORE_TOKEN``, else what ``$KVSTORE_TOKEN_FILE`` holds.
        tls_ca: PEM file of the authorities that the node's certificate is checked against; None: ``$KVSTORE_TLS_CA``.
            Where it is given, or a name or certificate, the connection is encrypted.
        tls_cert, tls_key: PEM files of our own certificate and key; None: ``$KVSTORE_TLS_CERT``, ``$KVSTORE_TLS_KEY``.
        tls_server_name: what the node's certificate names, where that is not the address's host.

    Raises:
        NodeUnavailable: there is no such node, or its files are not there (yet); nothing answers at that address.
        InvalidRequest: several nodes live here and none was named; the address is malformed or of another scheme; a
            token would travel in clear to another machine.
        Unauthenticated: the node does not know us.
        VersionMismatch: the node, or its files, are of another version.
    """
    check_seconds(timeout_s, "timeout_s")
    given = GivenCredentials(
        token=token, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_server_name=tls_server_name
    )
    name = address if address is not None else os.environ.get("KVSTORE_NODE") or None
    if is_remote(name):
        from kvstore.client.remote.store import connect_remote  # only here: it loads gRPC

        return connect_remote(endpoint(str(name), given, os.environ), timeout_s)
    if given.given():
        raise InvalidRequest(given.given(), "goes with kv:// addresses; a node of this machine asks for none")
    return _connect_local(name, timeout_s)


def _connect_local(name: str | None, timeout_s: float) -> Store:
    shm_dir = Path(os.environ.get("KVSTORE_SHM_DIR") or SHM_DIR)
    name = name if name is not None else _only_node(shm_dir)
    if not isinstance(name, str) or not name:
        raise InvalidRequest("address", f"must be a node's name or kv://HOST:PORT, not {name!r}")
    try:
        folder = NodeFolder(shm_dir, name)
    except InvalidRequest as error:
        raise InvalidRequest("address", error.reason) from None
    if not folder.path.is_dir():
        raise NodeUnavailable(f"no node named {name!r} on this machine; start one with `kvstore serve --name {name}`")
    if not folder.trusted():
        raise InvalidRequest("address", f"{folder.path} belongs to another user")
    node = LocalNode(folder.path, timeout_s=timeout_s)
    node.elsewhere = Elsewhere(folder.path)
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
        raise InvalidRequest("address", f"several nodes live here, name one: {', '.join(live)}")
    return live[0]
