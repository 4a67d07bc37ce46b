"""Rows that read over TCP from a node that shares no memory with the reader, against the best plain socket program.

The node's data server is a process of its own; so is the plain sender. Both send the same number of bytes over loopback
into the same warm buffer. What is ours proves every page by its token ids, and verifies every checksum.
"""

from __future__ import annotations

import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from kvstore.bench import nvme
from kvstore.bench.content import BenchWork, Content, Rows
from kvstore.bench.get import PHASE_S, both, speed_of, walk
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, alternate, medians, quickest, result, speeds
from kvstore.bench.plain_sender import REQUEST_BYTES
from kvstore.bench.processes import PeerProcess, cpu_s, environment
from kvstore.bench.stage import Stage
from kvstore.client.prefix_cache import PrefixCache
from kvstore.client.store import Store
from kvstore.model.prefix import Keys
from kvstore.serving.child import Child
from kvstore.tier.data_file import DataServerAt, find_data_server
from kvstore.tier.folder import NodeFolder
from kvstore.tier.host_memory import empty
from kvstore.transfer.base import DialCredentials
from kvstore.transfer.pulling import pull
from kvstore.transfer.reading import ReadRequest, WantedChain
from kvstore.transfer.tcp import DataConnection
from kvstore.transfer.wire import Hello

READY_S = 30.0
BATCH_S = 30.0
PLAIN_BYTES_MAX = 256 << 20  # of the plain sender's memory: beyond every cache
PLAINS = ("plain", "plain_waitall")


class RemoteReading:
    """Chains of another node, read by ``ours`` or by one of ``PLAINS`` into one warm buffer."""

    def __init__(
        self,
        cache: PrefixCache,
        work: BenchWork,
        server: DataServerAt,
        port: int,
        credentials: DialCredentials | None = None,
    ) -> None:
        self.work = work
        self.out: Rows = empty((work.pages, work.layout.page_bytes))
        self.out[:] = 0
        self._view = self.out.data.cast("B")
        self._cache = cache
        layout = work.layout
        self._wanted = WantedChain(layout.fingerprint, "", "", cache.frame_class, layout.attention == "full")
        deadline_s = time.monotonic() + READY_S
        hello = Hello(process=server.process)
        self.connection = DataConnection.open(
            server.address, hello, credentials, deadline_s=deadline_s, silence_s=BATCH_S
        )
        self._plain = socket.create_connection(("127.0.0.1", port), READY_S)
        self._plain.settimeout(None)
        self._plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._plain_chains = plain_bytes(work) // work.chain_bytes

    def variants(self) -> dict[str, Callable[[tuple[int, Keys]], object]]:
        """What is timed; each is given a chain's number and its keys."""

        def ours(given: tuple[int, Keys]) -> int:
            return pull(self.connection, self.request(given[1]), self.out, time.monotonic() + BATCH_S).pages

        return {"ours": ours, "plain": self._receive(0), "plain_waitall": self._receive(socket.MSG_WAITALL)}

    def request(self, keys: Keys) -> ReadRequest:
        """For the pages of one chain."""
        return ReadRequest(self._wanted, keys, 0, self.work.layout.page_bytes)

    def _receive(self, flags: int) -> Callable[[tuple[int, Keys]], None]:
        view, plain, chain_bytes = self._view, self._plain, self.work.chain_bytes

        def receive(given: tuple[int, Keys]) -> None:
            plain.sendall((given[0] % self._plain_chains).to_bytes(REQUEST_BYTES, "little"))
            have = 0
            while have < chain_bytes:
                more = plain.recv_into(view[have:], chain_bytes - have, flags)
                if not more:
                    raise BenchFailed("the plain sender is gone")
                have += more

        return receive

    def prepare(self, chain: int) -> tuple[int, Keys]:
        """What the variants are given."""
        return chain, self.work.keys(self._cache, chain)

    def check(self, variant: str, value: object) -> None:
        """Raises BenchFailed where ours read less than the whole chain."""
        if variant == "ours" and value != self.work.pages:
            raise BenchFailed(f"{value} of {self.work.pages} pages came")

    def verify(self) -> None:
        """Every chain, byte for byte. Raises BenchFailed."""
        content = Content(self.work.layout.page_bytes)
        for chain in range(self.work.chains):
            self.out[:] = 0
            given = self.prepare(chain)
            self.check("ours", self.variants()["ours"](given))
            content.check(self.out, given[1].hashes, f"chain {chain} over TCP")

    def close(self) -> None:
        """End both connections."""
        self.connection.close()
        self._plain.close()


def plain_bytes(work: BenchWork) -> int:
    """Memory of the plain sender: whole chains."""
    return min(work.chains, max(1, PLAIN_BYTES_MAX // work.chain_bytes)) * work.chain_bytes


@contextmanager
def data_server(stage: Stage, node: str, *flags: str) -> Iterator[tuple[Child, DataServerAt]]:
    """A data server of that node, and where it is."""
    arguments = ["data", "--node", node, "--listen", "127.0.0.1:0", "--shm-dir", str(stage.settings.shm_dir), *flags]
    child = Child("the data server", arguments, environment(stage.settings.shm_dir))
    try:
        child.line(READY_S)
        found = find_data_server(NodeFolder(stage.settings.shm_dir, node))
        if found is None:
            raise BenchFailed(f"the data server of {node} does not say where it is")
        yield child, found
    finally:
        child.ask_to_end()
        child.wait()


@contextmanager
def plain_sender(work: BenchWork) -> Iterator[int]:
    """The plain program, and its port."""
    command = [sys.executable, "-m", "kvstore.bench.plain_sender", str(plain_bytes(work)), str(work.chain_bytes)]
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
    """Batches of 32 pages out of another node's memory, one stream. A second line: the same over TLS."""
    stored = stage.stored(geometry)
    lines = [_get(stage, stored.store, stored.daemon.name, stored.work, name, bar)]
    with ExitStack() as scene:
        if shutil.which("openssl"):
            folder = Path(scene.enter_context(tempfile.TemporaryDirectory()))
            flags, credentials = certificate(folder)
            found = stored.store, stored.daemon.name, stored.work
            lines.append(_get(stage, *found, f"{name}.tls", None, flags, credentials))
    return lines


def get_nvme(stage: Stage, name: str, bar: Bar | None, geometry: str) -> list[Result]:
    """The same of pages that only the other node's NVMe has."""
    with ExitStack() as scene:
        cold = nvme.saved(stage, scene, geometry, 31, {"promote_after": nvme.NEVER})
        nvme.vacate(cold.store)
        lines = [_get(stage, cold.store, cold.daemon.name, cold.work, name, bar)]
        tiers = cold.store.stats()["tiers"]
        if tiers["dram"]["pages"] or tiers["nvme"]["promoted_pages"]:
            raise BenchFailed("pages came back to DRAM: not every read was cold")
    return lines


def certificate(folder: Path) -> tuple[list[str], DialCredentials]:
    """Flags of a data server with a certificate that is made now, and what trusts it."""
    cert, key = str(folder / "node.crt"), str(folder / "node.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=bench"]
    made = subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], capture_output=True, check=False)
    if made.returncode:
        raise BenchFailed(f"openssl makes no certificate: {made.stderr.decode(errors='replace')[-200:]}")
    return ["--tls-cert", cert, "--tls-key", key], DialCredentials(ca=cert)


def _get(
    stage: Stage,
    store: Store,
    node: str,
    work: BenchWork,
    name: str,
    bar: Bar | None,
    flags: Sequence[str] = (),
    credentials: DialCredentials | None = None,
) -> Result:
    with ExitStack() as scene:
        child, server = scene.enter_context(data_server(stage, node, *flags))
        port = scene.enter_context(plain_sender(work))
        reading = RemoteReading(store.cache(work.layout), work, server, port, credentials)
        scene.enter_context(closing(reading))
        reading.verify()
        return measured(stage, reading, child, name, bar)


def measured(stage: Stage, reading: RemoteReading, child: Child, name: str, bar: Bar | None) -> Result:
    """The line of what ``reading`` calls ours, beside the faster plain program."""
    work = reading.work
    steps = walk(work.chains, stage.settings.quick)
    seconds = alternate(reading.variants(), steps, stage.settings.rounds, reading.prepare, reading.check)
    best, chain_bytes = quickest(seconds, PLAINS), work.chain_bytes
    return result(
        name,
        Kind.SPEED,
        speeds(seconds["ours"], chain_bytes),
        speeds(seconds[best], chain_bytes),
        bar=bar,
        limit_is=f"plain sockets, {best}",
        details={
            "batch_pages": work.pages,
            "page_bytes": work.layout.page_bytes,
            "cpu_s_per_gb": cpu_per_gb(reading, child, steps),
            "batch_seconds": {variant: medians(times) for variant, times in seconds.items()},
        },
    )


def two_readers(stage: Stage, name: str, bar: Bar | None, geometry: str) -> list[Result]:
    """Two processes that read over TCP from one data server at the same time, and two that receive from a plain sender
    each; the sums of their speeds, and what processor time a reader and the data server take."""
    stored, settings = stage.stored(geometry), stage.settings
    rounds: dict[str, list[float]] = {variant: [] for variant in ("ours", *PLAINS)}
    readers_s = server_s = volume = 0.0
    with ExitStack() as scene:
        child, server = scene.enter_context(data_server(stage, stored.daemon.name))
        peers = [scene.enter_context(PeerProcess(stored.daemon.name, settings.shm_dir)) for _ in range(2)]
        for peer in peers:
            port = scene.enter_context(plain_sender(stored.work))
            peer.ask("reach", work=stored.work.to_json(), server=asdict(server), port=port)
        read = partial(both, peers, stored.work.chains, 0.05 if settings.quick else PHASE_S)
        for turn in range(settings.rounds):
            for variant in list(rounds)[turn % 3 :] + list(rounds)[: turn % 3]:
                before_s = cpu_s(child.pid)
                answers = read(variant)
                rounds[variant].append(speed_of(answers))
                if variant == "ours":
                    readers_s += sum(answer["cpu_s"] for answer in answers)
                    server_s += cpu_s(child.pid) - before_s
                    volume += sum(answer["bytes"] for answer in answers) / 1e9
    best = max(PLAINS, key=lambda variant: statistics.median(rounds[variant]))
    what = f"plain sockets in two processes, {best}"
    spent = {"reader": readers_s / volume, "data_server": server_s / volume}
    details = {"batch_pages": stored.work.pages, "page_bytes": stored.work.layout.page_bytes, "cpu_s_per_gb": spent}
    return [result(name, Kind.SPEED, rounds["ours"], rounds[best], bar=bar, limit_is=what, details=details)]


def cpu_per_gb(reading: RemoteReading, child: Child, steps: list[int]) -> dict[str, float]:
    """Processor seconds that both ends of ours take for 10^9 bytes."""
    ours, given = reading.variants()["ours"], [reading.prepare(step) for step in steps[:64]]
    before_us, before_them = time.process_time(), cpu_s(child.pid)
    for one in given:
        ours(one)
    volume = len(given) * reading.work.chain_bytes / 1e9
    return {
        "reader": (time.process_time() - before_us) / volume,
        "data_server": (cpu_s(child.pid) - before_them) / volume,
    }
