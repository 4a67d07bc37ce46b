"""WatchPages: what a conductor hears of a node's pages makes the same index as the node's own."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pytest

import kvstore
from kvstore.cluster.directory import AGAIN, AnnounceBatch, Directory
from kvstore.model.prefix import fingerprints
from kvstore.node.api import pages as page_watch
from kvstore.pb import store_pb2 as pb
from tests.helpers import api
from tests.helpers.api import Client
from tests.helpers.content import SMALL
from tests.helpers.processes import Machine

TOKENS = SMALL.page_tokens
NODE = "api"


def told(batch: pb.PageBatch) -> AnnounceBatch:
    pages = np.frombuffer(batch.fingerprints, "<u8").astype(np.uint64)
    marks = np.frombuffer(batch.marks, np.uint8)
    return AnnounceBatch(NODE, batch.stream, batch.number, pages, marks, batch.whole)


def take(index: Directory, stream: Iterator[pb.PageBatch]) -> None:
    batch = told(next(stream))
    assert index.apply(batch) == batch.number + 1


def chain(first: int, pages: int) -> np.ndarray:
    return np.arange(first, first + pages * TOKENS, dtype=np.uint32)


def test_a_watch_tells_what_is_there_and_then_what_comes_and_goes(machine: Machine) -> None:
    daemon, address = api.serve_api(machine)
    store = kvstore.connect(f"kv://{address}")
    cache = store.cache(SMALL)
    data = np.ones((5, SMALL.page_bytes), np.uint8)
    before, after = chain(1, 3), chain(50_000, 5)
    cache.put(before, data[:3])
    client, index = Client(address), Directory(1 << 20)
    stream = client.stub.WatchPages(pb.Empty(), timeout=60)
    first = told(next(stream))
    assert (first.number, first.whole) == (0, True)
    assert sorted(first.fingerprints) == sorted(fingerprints(b"".join(cache.keys(before).hashes)))
    assert index.apply(first) == 1
    cache.put(after, data)
    pages = fingerprints(b"".join(cache.keys(after).hashes))
    while len(index.find(pages).pages) < len(pages):
        take(index, stream)
    store.evict(pages=8)
    while len(index):
        take(index, stream)
    stream.cancel()
    again = told(next(client.stub.WatchPages(pb.Empty(), timeout=60)))
    assert again.stream != first.stream and len(again.fingerprints) == 0 and again.whole
    assert index.apply(AnnounceBatch(NODE, again.stream, 1, again.fingerprints, again.marks)) == AGAIN
    client.close()
    store.close()
    assert daemon.terminate() == 0


def test_watchers_are_counted_and_one_of_a_full_node_is_refused(machine: Machine) -> None:
    daemon, address = api.serve_api(machine)
    client, other = Client(address), Client(address)  # a connection has so many streams and no more
    streams = [client.stub.WatchPages(pb.Empty(), timeout=60) for _ in range(page_watch.WATCHERS_MAX)]
    for stream in streams:
        next(stream)
    with pytest.raises(grpc.RpcError) as refused:
        next(other.stub.WatchPages(pb.Empty(), timeout=60))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for stream in streams:
        stream.cancel()
    client.close()
    other.close()
    assert daemon.terminate() == 0
