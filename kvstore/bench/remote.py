"""Rows that read pages and objects over TCP from a node that shares no memory with the reader, compared with a plain
socket program.

The node's data server and the plain sender are separate processes. Both send the same number of bytes over loopback
into the same warm buffer. The store also proves every page by its token ids, and verifies every checksum. The plain
program is measured in two ways, and the faster one counts.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from kvstore.addresses import connect
from kvstore.bench.content import BenchWork, Content, Rows
from kvstore.bench.get import walk
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, alternate, medians, quickest, result, speeds
from kvstore.bench.processes import Child, cpu_s, environment
from kvstore.bench.stage import Stage
from kvstore.client.local.peer_reads import TimeBudget
from kvstore.client.local.pool_objects import ObjectTargets, receive_objects
from kvstore.client.prefix_cache import PrefixCache
from kvstore.client.store import Store
from kvstore.client.value_buffers import Scattered
from kvstore.cluster.data_connection import DataConnection
from kvstore.cluster.transport import pull
from kvstore.device.host_memory import empty
from kvstore.model.objects import key_hash, object_root
from kvstore.model.prefix import Keys
from kvstore.shm.data_server_file import RunningDataServer, find_data_server
from kvstore.shm.folder import NodeFolder
from kvstore.wire.data import ChainQuery, Hello, ReadRequest
from kvstore.wire.object_messages import ObjectsRequest

READY_S = 30.0
BATCH_S = 30.0
PLAIN_BYTES_MAX = 256 << 20  # memory of the plain sender: larger than every cache
PLAINS = ("plain", "plain_waitall")
REQUEST_BYTES = 8


class RemoteReading:
    """Chains of another node, read by ``ours`` or by one of ``PLAINS`` into one warm buffer."""

    def __init__(self, cache: PrefixCache, work: BenchWork, server: RunningDataServer, port: int) -> None:
        self.work = work
        self.out: Rows = empty((work.pages, work.layout.page_bytes))
        self.out[:] = 0
        self._view = self.out.data.cast("B")
        self._cache = cache
        layout = work.layout
        self._query = ChainQuery(layout.fingerprint, "", "", cache.frame_class, layout.attention == "full")
        deadline_s = time.monotonic() + READY_S
        hello = Hello(process=server.process)
        self.connection = DataConnection.open(server.address, hello, deadline_s=deadline_s, silence_s=BATCH_S)
        self._plain = socket.create_connection(("127.0.0.1", port), READY_S)
        self._plain.settimeout(None)
        self._plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._plain_chains = plain_bytes(work) // work.chain_bytes

    def variants(self) -> dict[str, Callable[[tuple[int, Any]], object]]:
        """Return the variants by name. Each one takes a chain's number and its keys."""

        def ours(arguments: tuple[int, Keys]) -> int:
            return pull(self.connection, self.request(arguments[1]), self.out, time.monotonic() + BATCH_S).pages

        return {"ours": ours, "plain": self._receive(0), "plain_waitall": self._receive(socket.MSG_WAITALL)}

    def request(self, keys: Keys) -> ReadRequest:
        """Make a request for the pages of one chain."""
        return ReadRequest(self._query, keys, 0, self.work.layout.page_bytes)

    def _receive(self, flags: int) -> Callable[[tuple[int, Any]], None]:
        view, plain, chain_bytes = self._view, self._plain, self.work.chain_bytes

        def receive(arguments: tuple[int, Any]) -> None:
            plain.sendall((arguments[0] % self._plain_chains).to_bytes(REQUEST_BYTES, "little"))
            received = 0
            while received < chain_bytes:
                count = plain.recv_into(view[received:], chain_bytes - received, flags)
                if not count:
                    raise BenchFailed("the plain sender closed the connection")
                received += count

        return receive

    def prepare(self, chain: int) -> tuple[int, Any]:
        """Return the arguments of the variants."""
        return chain, self.work.keys(self._cache, chain)

    def check(self, variant: str, value: object) -> None:
        """Raise BenchFailed if ours read less than the whole chain."""
        if variant == "ours" and value != self.work.pages:
            raise BenchFailed(f"{value} of {self.work.pages} pages arrived")

    def verify(self) -> None:
        """Check every byte of every chain. Raises BenchFailed."""
        content = Content(self.work.layout.page_bytes)
        for chain in range(self.work.chains):
            self.out[:] = 0
            arguments = self.prepare(chain)
            self.check("ours", self.variants()["ours"](arguments))
            content.check(self.out, arguments[1].hashes, f"chain {chain} over TCP")

    def close(self) -> None:
        """End both connections."""
        self.connection.close()
        self._plain.close()


class ObjectReading(RemoteReading):
    """Objects of another node: each chain is a batch of objects, and each page is a value."""

    def __init__(self, store: Store, work: BenchWork, server: RunningDataServer, port: int) -> None:
        super().__init__(store.cache(work.layout), work, server, port)
        self._content = Content(work.layout.page_bytes)
        for chain in range(work.chains):
            self._content.fill(self.out, self._hashes(chain))
            if store.put_many([name.decode() for name in self._names(chain)], list(self.out)) != [True] * work.pages:
                raise BenchFailed("an object was not stored")

    def variants(self) -> dict[str, Callable[[tuple[int, Any]], object]]:
        """Return the variants by name. Each one takes a batch's number and its names."""

        def ours(arguments: tuple[int, list[bytes]]) -> int:
            names = arguments[1]
            request = ObjectsRequest("", names, [self.work.layout.page_bytes] * len(names))
            targets = ObjectTargets(range(len(names)), lambda position, facts: Scattered([self.out[position]]))
            found = receive_objects(self.connection, request, targets, TimeBudget(BATCH_S))
            return len(found) - found.count(None)

        return {**super().variants(), "ours": ours}

    def prepare(self, chain: int) -> tuple[int, Any]:
        """Return the arguments of the variants."""
        return chain, self._names(chain)

    def verify(self) -> None:
        """Check every byte of every value. Raises BenchFailed."""
        for chain in range(self.work.chains):
            self.out[:] = 0
            self.check("ours", self.variants()["ours"](self.prepare(chain)))
            self._content.check(self.out, self._hashes(chain), f"batch {chain} over TCP")

    def _names(self, chain: int) -> list[bytes]:
        return [b"batch/%d/%d" % (chain, number) for number in range(self.work.pages)]

    def _hashes(self, chain: int) -> list[bytes]:
        return [key_hash(object_root(""), name) for name in self._names(chain)]


def plain_bytes(work: BenchWork) -> int:
    """Return the size of the plain sender's memory, a whole number of chains."""
    return min(work.chains, max(1, PLAIN_BYTES_MAX // work.chain_bytes)) * work.chain_bytes


@contextmanager
def data_server(stage: Stage, node: str) -> Iterator[tuple[Child, RunningDataServer]]:
    """Run a data server of a node inside the context. Yield its process and its address."""
    arguments = ["data", "--node", node, "--listen", "127.0.0.1:0", "--shm-dir", str(stage.settings.shm_dir)]
    child = Child("the data server", arguments, environment(stage.settings.shm_dir))
    try:
        child.line(READY_S)
        server = find_data_server(NodeFolder(stage.settings.shm_dir, node))
        if server is None:
            raise BenchFailed(f"the data server of {node} does not report its address")
        yield child, server
    finally:
        child.ask_to_end()
        child.wait()


@contextmanager
def plain_sender(work: BenchWork) -> Iterator[int]:
    """Run the plain sender inside the context. Yield its port."""
    command = [sys.executable, "-m", "kvstore.bench.remote", str(plain_bytes(work)), str(work.chain_bytes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def get(stage: Stage, name: str, bar: Bar, geometry: str) -> list[Result]:
    """Measure reads of 32 pages from another node's memory over one stream."""
    source = stage.stored_chains(geometry)
    work = source.work
    with ExitStack() as scene:
        child, server = scene.enter_context(data_server(stage, source.daemon.name))
        port = scene.enter_context(plain_sender(work))
        reading = RemoteReading(source.store.cache(work.layout), work, server, port)
        scene.enter_context(closing(reading))
        return [_measure(stage, name, bar, reading, child)]


def get_objects(stage: Stage, name: str, bar: Bar | None, geometry: str) -> list[Result]:
    """Measure reads of 32 objects from another node's memory over one stream."""
    stage.clear()
    settings = stage.settings
    work = BenchWork(geometry, 0, settings.walk_bytes // BenchWork(geometry, 0, 1).chain_bytes)
    with ExitStack() as scene:
        daemon = stage.daemon(scene, settings.walk_bytes + settings.extent_bytes)
        child, server = scene.enter_context(data_server(stage, daemon.name))
        port = scene.enter_context(plain_sender(work))
        store = scene.enter_context(connect(daemon.name))
        reading = ObjectReading(store, work, server, port)
        scene.enter_context(closing(reading))
        return [_measure(stage, name, bar, reading, child)]


def _measure(stage: Stage, name: str, bar: Bar | None, reading: RemoteReading, child: Child) -> Result:
    reading.verify()
    work = reading.work
    steps = walk(work.chains, stage.settings.quick)
    seconds = alternate(reading.variants(), steps, stage.settings.rounds, reading.prepare, reading.check)
    cpu_s_per_gb = cpu_per_gb(reading, child, steps)
    best, chain_bytes = quickest(seconds, PLAINS), work.chain_bytes
    details = {
        "batch_pages": work.pages,
        "page_bytes": work.layout.page_bytes,
        "cpu_s_per_gb": cpu_s_per_gb,
        "batch_seconds": {variant: medians(times) for variant, times in seconds.items()},
    }
    ours, limit = speeds(seconds["ours"], chain_bytes), speeds(seconds[best], chain_bytes)
    return result(name, Kind.SPEED, ours, limit, bar=bar, limit_is=f"plain sockets, {best}", details=details)


def cpu_per_gb(reading: RemoteReading, child: Child, steps: list[int]) -> dict[str, float]:
    """Return the CPU seconds per 10^9 bytes of the reader and of the data server."""
    ours, batches = reading.variants()["ours"], [reading.prepare(step) for step in steps[:64]]
    reader_s, server_s = time.process_time(), cpu_s(child.pid)
    for batch in batches:
        ours(batch)
    volume = len(batches) * reading.work.chain_bytes / 1e9
    return {
        "reader": (time.process_time() - reader_s) / volume,
        "data_server": (cpu_s(child.pid) - server_s) / volume,
    }


def send() -> None:
    """Serve one connection: for every 8 bytes received (the number of a chain), send that chain from warm memory,
    without keys, checks or frames."""
    walk_bytes, chain_bytes = int(sys.argv[1]), int(sys.argv[2])
    memory = empty(walk_bytes)
    memory[:] = 1
    view = memory.data.cast("B")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        listener.settimeout(READY_S)
        connection, _ = listener.accept()
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while request := connection.recv(REQUEST_BYTES, socket.MSG_WAITALL):
        start = int.from_bytes(request, "little") * chain_bytes
        connection.sendall(view[start : start + chain_bytes])


if __name__ == "__main__":
    send()
