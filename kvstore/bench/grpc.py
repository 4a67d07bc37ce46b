"""Rows over gRPC: a node's API against plain gRPC calls that carry as many bytes.

The limit is a server without a store in another process, ``python -m kvstore.bench.grpc``: it echoes, sends one buffer
over and over, or throws away what comes, all as bytes that nobody serializes, over a channel with the same options.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import numpy as np

from kvstore.bench.content import BenchWork, Content
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, alternate, medians, result, speeds
from kvstore.bench.processes import PeerProcess
from kvstore.bench.stage import MIB, Stage
from kvstore.client.connect import connect
from kvstore.client.remote.node import OPTIONS
from kvstore.client.store import Store
from kvstore.errors import Unavailable
from kvstore.model.prefix import Keys
from kvstore.pb import store_pb2 as pb

LOOKUP_PAGES = 32
MESSAGE_BYTES = MIB  # of the limit; from 256 KiB to 2 MiB it is about as fast
STEPS_UNARY, STEPS_STREAM = 1000, 32
CALL_S = 60.0
READY_S = 20.0
_SERVICE = "raw"


class Raw:
    """The server without a store, and a channel to it. Life: made (started, connected) -> ``close``."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvstore.bench.grpc"], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        if not port:
            raise BenchFailed("the server without a store did not start")
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=list(OPTIONS))
        self._echo: Any = self._channel.unary_unary(f"/{_SERVICE}/echo")
        self._read: Any = self._channel.unary_stream(f"/{_SERVICE}/read")
        self._write: Any = self._channel.stream_unary(f"/{_SERVICE}/write")

    def echo(self, message: bytes, reply_bytes: int) -> int:
        """One request; a reply of so many bytes."""
        return len(self._echo(reply_bytes.to_bytes(8, "little") + message, timeout=CALL_S))

    def read(self, size: int, chunk: int) -> int:
        """Receive ``size`` bytes in messages of ``chunk``."""
        return sum(len(message) for message in self._read(b"%d %d" % (size, chunk), timeout=CALL_S))

    def write(self, data: bytes, count: int) -> int:
        """Send ``data`` so many times."""
        return int(self._write((data for _ in range(count)), timeout=CALL_S))

    def __enter__(self) -> Raw:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Scene:
    """A daemon that listens, a store over gRPC, and the server to compare with."""

    def __init__(self, stage: Stage, scene: ExitStack, dram_bytes: int) -> None:
        port = free_port()
        settings = {"listen": f"127.0.0.1:{port}"}
        self.daemon = stage.daemon(scene, dram_bytes + stage.settings.extent_bytes, settings=settings)
        self.store: Store = scene.enter_context(connected(f"kv://127.0.0.1:{port}"))
        self.raw = scene.enter_context(Raw())
        self._shm_dir = stage.settings.shm_dir

    def fill(self, work: BenchWork) -> None:
        """Have another process put these chains."""
        with PeerProcess(self.daemon.name, self._shm_dir) as writer:
            pages = writer.ask("write", work=work.to_json())["pages"]
        if pages != work.chains * work.pages:
            raise BenchFailed(f"the writer stored {pages} of {work.chains * work.pages} pages")


def unary(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Lookup of a chain of 32 pages, p50, against an echo whose request and reply have the same sizes."""
    stage.clear()
    settings = stage.settings
    work = BenchWork("4k", seed=9, chains=8, pages=LOOKUP_PAGES)
    with ExitStack() as exits:
        scene = Scene(stage, exits, work.total_bytes)
        scene.fill(work)
        cache = scene.store.cache(work.layout)
        tokens = work.layout.page_tokens * LOOKUP_PAGES * 4
        request = bytes(len(pb.LookupRequest(pages=pb.Pages(tokens=bytes(tokens))).SerializeToString()) + 64)
        reply_bytes = len(pb.LookupReply(keys=[bytes(16)] * LOOKUP_PAGES).SerializeToString()) + 8
        expected = {"lookup": LOOKUP_PAGES, "echo": reply_bytes}
        variants: dict[str, Callable[[Keys], int]] = {
            "lookup": lambda keys: cache.lookup(keys).pages,
            "echo": lambda _: scene.raw.echo(request, reply_bytes),
        }
        steps = [step % work.chains for step in range(100 if settings.quick else STEPS_UNARY)]
        check = _checker(expected)
        seconds = alternate(variants, steps, settings.rounds, lambda chain: work.keys(cache, chain), check)
    details = {"request_bytes": len(request), "reply_bytes": reply_bytes}
    limit_is = "a unary echo of as many bytes"
    ours, limit = medians(seconds["lookup"]), medians(seconds["echo"])
    return [result(name, Kind.TIME, ours, limit, bar=bar, limit_is=limit_is, details=details)]


def read(stage: Stage, name: str, bar: Bar | None, geometry: str) -> list[Result]:
    """Get of 32 pages into a warm buffer, all checks on, against as many bytes."""
    stage.clear()
    settings = stage.settings
    total = settings.bounded((128 if settings.quick else 512) * MIB)
    work = BenchWork(geometry, seed=10, chains=max(2, total // BenchWork(geometry, 0, 1).chain_bytes))
    with ExitStack() as exits:
        scene = Scene(stage, exits, work.total_bytes)
        scene.fill(work)
        cache, content = scene.store.cache(work.layout), Content(work.layout.page_bytes)
        out = np.zeros((work.pages, work.layout.page_bytes), np.uint8)
        chunk = min(MESSAGE_BYTES, work.chain_bytes)
        for chain in range(min(work.chains, 8)):
            keys = work.keys(cache, chain)
            if cache.get(keys, out).pages != work.pages:
                raise BenchFailed(f"chain {chain} is not whole")
            content.check(out, keys.hashes, name)
        variants: dict[str, Callable[[Keys], int]] = {
            "get": lambda keys: cache.get(keys, out).pages,
            "stream": lambda _: scene.raw.read(work.chain_bytes, chunk),
        }
        steps = [step % work.chains for step in range(6 if settings.quick else STEPS_STREAM)]
        check = _checker({"get": work.pages, "stream": work.chain_bytes})
        seconds = alternate(variants, steps, settings.rounds, lambda chain: work.keys(cache, chain), check)
    return [_stream_line(name, bar, seconds, "get", work, chunk)]


def write(stage: Stage, name: str, bar: Bar | None, geometry: str) -> list[Result]:
    """Put of 32 new pages, acknowledged, against as many bytes."""
    stage.clear()
    settings = stage.settings
    chain_bytes = BenchWork(geometry, 0, 1).chain_bytes
    count = (6 if settings.quick else STEPS_STREAM) * settings.rounds
    work = BenchWork(geometry, seed=11, chains=count)
    with ExitStack() as exits:
        scene = Scene(stage, exits, settings.bounded((256 if settings.quick else 1024) * MIB))
        cache, content = scene.store.cache(work.layout), Content(work.layout.page_bytes)
        rows = np.zeros((work.pages, work.layout.page_bytes), np.uint8)
        chunk = min(MESSAGE_BYTES, chain_bytes)
        data, chains = bytes(chunk), iter(range(count))

        def prepare(_: int) -> Keys:
            keys = work.keys(cache, next(chains))
            content.fill(rows, keys.hashes)
            return keys

        variants: dict[str, Callable[[Keys], int]] = {
            "put": lambda keys: cache.put(keys, rows),
            "stream": lambda _: scene.raw.write(data, chain_bytes // chunk),
        }
        check = _checker({"put": work.pages, "stream": chain_bytes})
        steps = list(range(count // settings.rounds))
        seconds = alternate(variants, steps, settings.rounds, prepare, check)
    return [_stream_line(name, bar, seconds, "put", work, chunk)]


def _stream_line(name: str, bar: Bar | None, seconds: Any, verb: str, work: BenchWork, chunk: int) -> Result:
    ours, limit = speeds(seconds[verb], work.chain_bytes), speeds(seconds["stream"], work.chain_bytes)
    details = {"page_bytes": work.layout.page_bytes, "batch_pages": work.pages, "message_bytes": chunk}
    return result(name, Kind.SPEED, ours, limit, bar=bar, limit_is="a gRPC stream of as many bytes", details=details)


def _checker(expected: dict[str, int]) -> Callable[[str, object], None]:
    def check(variant: str, value: object) -> None:
        if value != expected[variant]:
            raise BenchFailed(f"{variant}: {value} instead of {expected[variant]}")

    return check


def free_port() -> int:
    """One of loopback that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def connected(address: str, token: str | None = None) -> Store:
    """A store over gRPC, as soon as the node serves. Raises BenchFailed."""
    deadline = time.monotonic() + READY_S
    while True:
        try:
            return connect(address, token=token)
        except Unavailable as error:
            if time.monotonic() > deadline:
                raise BenchFailed(f"{address}: {error}") from None
            time.sleep(0.05)


def identities_file(path: Path, tenants: Sequence[str]) -> str:
    """Write the identities of these tenants: each has a salt and a token of its own."""
    tables = (
        f'[[identity]]\nname = "{name}"\ntoken_sha256 = "{hashlib.sha256(token_of(name).encode()).hexdigest()}"\n'
        f'salts = ["{name}"]\n'
        for name in tenants
    )
    path.touch(mode=0o600)
    path.write_text("\n".join(tables))
    return str(path)


def token_of(tenant: str) -> str:
    """What a tenant shows."""
    return f"{tenant}-of-the-benchmark"


# --- the server without a store -------------------------------------------------------------------------------------


def _served(request: bytes, context: Any) -> Iterator[bytes]:
    size, chunk = (int(part) for part in request.split())
    data = bytes(chunk)
    for _ in range(size // chunk):
        yield data


def main() -> None:
    """Serve on a free port until killed; its number is the first line of output."""
    handlers: dict[str, Any] = {
        "echo": grpc.unary_unary_rpc_method_handler(lambda request, _: bytes(int.from_bytes(request[:8], "little"))),
        "read": grpc.unary_stream_rpc_method_handler(_served),
        "write": grpc.stream_unary_rpc_method_handler(lambda sent, _: b"%d" % sum(len(message) for message in sent)),
    }
    server = grpc.server(ThreadPoolExecutor(4), options=list(OPTIONS))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    parent = os.getppid()
    while os.getppid() == parent:  # goes when whoever started it does
        time.sleep(0.5)


if __name__ == "__main__":
    main()
