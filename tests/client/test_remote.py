"""A node over gRPC when things go wrong: killed and restarted, stopped, forked, closed."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import kvstore
from kvstore import Store
from kvstore.client.remote import node
from kvstore.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KVStoreError,
    NodeUnavailable,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    VersionMismatch,
)
from kvstore.pb import store_pb2 as pb
from tests.helpers.api import Certificates, identities_file, serve_api
from tests.helpers.content import LARGE, SMALL, chain, contents, layer_of, mismatch
from tests.helpers.processes import ROOT, Machine, free_port, wait_until

PAGES = 6
SLOW_S = 1.5
LONG_S = 60.0  # nobody waits so long for a node that is not there


@pytest.fixture
def address(machine: Machine) -> str:
    machine.serve("n", dram="32MiB", listen=(where := f"127.0.0.1:{free_port()}"), http="127.0.0.1:0")
    return f"kv://{where}"


@pytest.fixture
def store(machine: Machine, address: str) -> Iterator[Store]:
    with kvstore.connect(address, timeout_s=LONG_S) as store:
        yield store


@pytest.mark.parametrize("failpoint", ["client.reading:2", "client.copied:2", "node.commit:2", "client.leased:1"])
def test_killed_in_the_middle(machine: Machine, failpoint: str) -> None:
    """Of a read, a write, a layer, a lease: an error in time, nothing wrong, and the same store goes on."""
    flags = {"dram": "64MiB", "listen": f"127.0.0.1:{free_port()}"}
    daemon = machine.spawn("n", failpoint=failpoint, **flags)
    daemon.wait_ready()
    with kvstore.connect(f"kv://{flags['listen']}", timeout_s=LONG_S) as store:
        cache, keys, more = store.cache(LARGE), chain(1, 20, LARGE), chain(2, 20, LARGE)
        data, new = contents(keys, LARGE), contents(more, LARGE)
        if failpoint in ("client.reading:2", "client.leased:1"):
            assert cache.put(keys, data) == 20

        def layers() -> None:
            with cache.writer(more) as writer:
                for layer in range(LARGE.layers):
                    writer.write_layer(layer, layer_of(new, layer, LARGE))

        verb: Any = {
            "client.reading:2": lambda: cache.get(keys),  # of the third batch
            "client.copied:2": lambda: cache.put(keys, data),
            "node.commit:2": layers,  # frames were reserved, their seal is half done
            "client.leased:1": lambda: cache.lease(keys).__enter__(),
        }[failpoint]
        began = time.monotonic()
        with pytest.raises(NodeUnavailable, match="kv://"):
            verb()
        assert time.monotonic() - began < LONG_S / 2, "it waited for the node"
        daemon.wait()
        machine.serve("n", **flags)
        store.wait_ready(LONG_S)
        match = cache.get(keys)
        assert mismatch(match, keys, LARGE) == ""
        assert cache.put(keys, data) == 20 - match.pages
        wait_until(
            "what was reserved is given back", lambda: cache.put(more, new) == 20 or cache.lookup(more).pages == 20
        )
        for stored in (keys, more):
            assert mismatch(found := cache.get(stored), stored, LARGE) == "" and found.pages == 20
        assert store.verify()["findings"] == []


def test_cancelled_futures(store: Store) -> None:
    cache, keys = store.cache(LARGE), chain(1, 20, LARGE)
    cache.put(keys, contents(keys, LARGE))
    futures = [cache.get_async(keys) for _ in range(20)]
    cancelled = [future for future in futures if future.cancel()]
    assert cancelled
    for future in futures:
        if not future.cancelled():
            assert mismatch(future.result(10), keys, LARGE) == ""


def test_prompts_in_several_requests(store: Store) -> None:
    """What does not fit one message of the node's goes in parts, or is refused before anything is sent."""
    cache, keys = store.cache(SMALL), chain(1, 10)
    data = contents(keys)
    store._node.about.message_bytes_max = node.OVERHEAD_BYTES + 3 * 4 * SMALL.page_tokens  # type: ignore[attr-defined]
    assert [len(part) for part in cache.parts(keys)] == [3, 3, 3, 1]  # type: ignore[attr-defined]
    assert (cache.put(keys[:7], data[:7]), cache.put(keys, data), cache.put(keys, data)) == (7, 3, 0)
    assert cache.lookup(keys).pages == cache.prefetch(keys).pages == 10
    out = np.zeros_like(data)
    assert cache.get(keys, out).pages == 10 and np.array_equal(out, data)
    assert store.evict(keys=keys[5:], tier="all")["pages"] == 5
    match = cache.get(keys)
    assert (match.pages, match.reason, cache.lookup(keys).reason) == (5, "absent", "absent")
    assert np.array_equal(match.data, data[:5])
    assert cache.put(keys[8:], data[8:]) == 0
    for call in (cache.lease, cache.writer, cache.reader, lambda keys: cache.put_async(keys, data)):
        with pytest.raises(InvalidRequest, match="^tokens: must be at most 3 pages in one call over gRPC .got 10."):
            call(keys)


def test_servers_of_another_kind(machine: Machine) -> None:
    """Another service, a node that lacks a call, and what speaks no gRPC at all."""
    about = grpc.unary_unary_rpc_method_handler(lambda _, __: pb.AboutReply(name="x").SerializeToString())
    for methods in ({}, {"About": about}):
        server = grpc.server(ThreadPoolExecutor(1))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvstore.v1.Store", methods),))
        address = f"kv://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            with pytest.raises(VersionMismatch, match="kv://.* another version"), kvstore.connect(address) as store:
                store.cache(SMALL).get(chain(1, 2))
        finally:
            server.stop(0)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        with pytest.raises((NodeUnavailable, DeadlineExceeded), match="kv://"):
            kvstore.connect(f"kv://127.0.0.1:{listening.getsockname()[1]}", timeout_s=0.5)


def test_credentials(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By arguments and by the environment, of a program and of the command line; each right one beside a wrong one."""
    certs = Certificates(tmp_path)
    files = {
        "tls_cert": certs.path("server.pem"),
        "tls_key": certs.path("server.key"),
        "tls_client_ca": certs.path("ca.pem"),
    }
    _, where = serve_api(machine, "n", identities=identities_file(tmp_path), **files)
    address, keys = f"kv://{where}", chain(1, 3, salt="a")
    ours = {"tls_ca": certs.path("ca.pem"), "tls_cert": certs.path("client.pem"), "tls_key": certs.path("client.key")}
    with kvstore.connect(address, token="a-token", **ours) as store:
        cache = store.cache(SMALL, "a")
        assert cache.put(keys, contents(keys)) == 3 and mismatch(cache.get(keys), keys) == ""
        for refused in (
            lambda: store.cache(SMALL, "b").lookup(chain(1, 3, salt="b")),
            lambda: store.cache(SMALL, "b").put(chain(1, 3, salt="b"), contents(keys)),
            lambda: store.get("x", salt="b"),
            lambda: store.evict(pages=1),
            store.stats,
        ):
            with pytest.raises(PermissionDenied):
                refused()
    for given in ({**ours, "token": "c-token"}, ours):
        with pytest.raises(Unauthenticated):
            kvstore.connect(address, **given)
    for given in (
        {"token": "a-token", "tls_ca": ours["tls_ca"]},  # no certificate of our own
        {**ours, "token": "a-token", "tls_ca": certs.path("other.pem")},
        {**ours, "token": "a-token", "tls_server_name": "else.example"},
    ):
        with pytest.raises(NodeUnavailable, match="kv://"):
            kvstore.connect(address, timeout_s=2.0, **given)
    (tmp_path / "token").write_text("op-token\n")
    env = {f"KVSTORE_{name.upper()}": path for name, path in ours.items()} | {"KVSTORE_NODE": address}
    env["KVSTORE_TOKEN_FILE"] = str(tmp_path / "token")
    done = machine.run("pages", "--json", **env)
    assert done.returncode == 0 and json.loads(done.stdout)["total"] == 3, done.stderr
    done = machine.run("pages", "--json", **env, KVSTORE_TOKEN="a-token")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "kvstore: a is not an operator\n")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with kvstore.connect() as store:
        assert store.evict(salt="a", tier="all")["pages"] == 3


def test_a_stopped_node_costs_a_deadline(machine: Machine, address: str) -> None:
    with kvstore.connect(address) as store:
        cache, keys = store.cache(SMALL), chain(1, PAGES)
        cache.put(keys, contents(keys))
        store._node.timeout_s = 0.5
        daemon = machine.processes[0]
        daemon.stop()
        try:
            for call in (lambda: cache.lookup(keys), lambda: cache.get(keys), lambda: cache.lease(keys).__enter__()):
                began = time.monotonic()
                with pytest.raises(DeadlineExceeded):
                    call()
                assert 0.3 < time.monotonic() - began < LONG_S / 2
        finally:
            daemon.resume()
        wait_until("it answers again", lambda: _pages(cache.lookup, keys) == PAGES)


def _pages(call: Any, keys: Any) -> int:
    try:
        return int(call(keys).pages)
    except Unavailable:
        return -1


def test_nothing_there(machine: Machine) -> None:
    for address in (f"kv://127.0.0.1:{free_port()}", f"kv+unix://{machine.shm_dir}/none"):
        with pytest.raises(NodeUnavailable, match="kv"):
            kvstore.connect(address, timeout_s=2.0)


def test_a_node_that_is_slow_to_take_a_connection(machine: Machine, address: str) -> None:
    """As one on a busy machine, or a far one: a connection is waited for as long as the call allows."""
    host, _, port = address.removeprefix("kv://").rpartition(":")

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def take(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                theirs, _ = listening.accept()
                time.sleep(SLOW_S)
                ours = socket.create_connection((host, int(port)))
                for pair in ((theirs, ours), (ours, theirs)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        taking = threading.Thread(target=take, args=(listening,), daemon=True)
        taking.start()
        with kvstore.connect(f"kv://127.0.0.1:{listening.getsockname()[1]}", timeout_s=LONG_S) as store:
            keys = chain(1, PAGES)
            assert store.cache(SMALL).put(keys, contents(keys)) == PAGES
        listening.shutdown(socket.SHUT_RDWR)
        taking.join(60)


def test_a_forked_child_is_refused_and_ends_nothing(store: Store) -> None:
    cache, keys = store.cache(SMALL), chain(1, 2)
    cache.put(keys, contents(keys))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for call in (lambda: cache.get(keys), lambda: cache.put(keys, contents(keys)), store.stats):
            try:
                call()
                said.append("not refused")
            except KVStoreError as error:
                said.append(str(error))
        store.close()
        store._node._finalizer()  # type: ignore[attr-defined]
        os.write(write, "\n".join(said).encode())
        os._exit(0)
    wait_until("the child ends", lambda: os.waitpid(child, os.WNOHANG)[0] == child)
    said = os.read(read, 2000).decode().split("\n")
    os.close(read), os.close(write)
    assert len(said) == 3 and all("fork" in line for line in said), said
    assert cache.get(keys).pages == 2


def test_a_dropped_store_ends_its_threads(machine: Machine, address: str) -> None:
    """A process that never closes anything exits by itself."""
    code = f"""
import kvstore
from tests.helpers.content import SMALL, chain, contents
cache = kvstore.connect({address!r}).cache(SMALL)
keys = chain(1, 3)
cache.put(keys, contents(keys))
cache.put_async(chain(2, 3), contents(chain(2, 3)))
lease = cache.lease(keys).__enter__()
print(cache.get_async(keys).result(60).pages)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=machine.env(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")
