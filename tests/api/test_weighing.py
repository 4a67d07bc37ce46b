"""What a request will take is told from its bytes, before they are values."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from google.protobuf import struct_pb2

from kvstore.errors import InvalidRequest
from kvstore.pb import engine_pb2
from kvstore.pb import store_pb2 as pb
from kvstore.server.gate import Call
from kvstore.server.request_cost import DEPTH_MAX, SLICE_VALUES, VALUES_MAX, weigh, with_buffers

MEASURE = """
import sys
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
from kvstore.pb import engine_pb2, store_pb2 as pb
kind = getattr(pb, sys.argv[1], None) or getattr(engine_pb2, sys.argv[1])
data = sys.stdin.buffer.read()
before = rss()
message = kind.FromString(data)
kept = [list(getattr(part, sys.argv[2])) for part in [message.pages if sys.argv[3] == "pages" else message]]
print(rss() - before)
"""


def weight_of(kind: Any, message: bytes) -> int:
    """All of it weighed."""
    weight = weigh(kind, message)
    assert weight is not None
    return weight


def extras(count: int, size: int) -> pb.LookupRequest:
    return pb.LookupRequest(pages=pb.Pages(extras=[bytes([i % 256]) * size for i in range(count)]))


@pytest.mark.parametrize(
    ("request_", "field", "inside"),
    [
        (extras(60_000, 0), "extras", "pages"),
        (extras(60_000, 2), "extras", "pages"),
        (extras(60_000, 16), "extras", "pages"),
        (pb.ObjectKeys(keys=["k"] * 60_000), "keys", ""),
        (engine_pb2.SubmitRequest(prefill=["a"] * 60_000), "prefill", ""),
    ],
    ids=["empty", "short", "digests", "names", "texts"],
)
def test_no_request_takes_more_than_it_weighs(request_: Any, field: str, inside: str) -> None:
    data = request_.SerializeToString()
    command = [sys.executable, "-c", MEASURE, type(request_).__name__, field, inside]
    takes = int(subprocess.run(command, input=data, capture_output=True, check=True, timeout=60).stdout)
    assert len(data) < takes < weight_of(request_.DESCRIPTOR, data)


def test_what_no_call_can_mean_is_refused_before_it_is_parsed() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    many = b"\x0a\x80\x80\x80\x01" + b"\x2a\x00" * (1 << 20)
    with pytest.raises(InvalidRequest, match=f"at most {VALUES_MAX} values"):
        weight_of(pb.LookupRequest.DESCRIPTOR, many)
    unknown = b"\xfb\x07\xfc\x07" * VALUES_MAX  # groups that nobody knows
    with pytest.raises(InvalidRequest, match="values"):
        weight_of(pb.LookupRequest.DESCRIPTOR, unknown)
    deep = struct_pb2.Value()
    for _ in range(DEPTH_MAX):
        deep = struct_pb2.Value(list_value=struct_pb2.ListValue(values=[deep]))
    with pytest.raises(InvalidRequest, match="deep"):
        weight_of(deep.DESCRIPTOR, deep.SerializeToString())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 << 10


class Watched(bytes):
    """A message that counts how often a thread reads from it."""

    reads: Counter[int]

    def __getitem__(self, place: Any) -> Any:
        self.reads[threading.get_ident()] += 1
        return super().__getitem__(place)


class Admitted:
    """A call with threads and buffers of its own."""

    async def quick(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.to_thread(work, *args)

    @contextlib.asynccontextmanager
    async def buffers(self, size: int) -> AsyncIterator[None]:
        yield


@pytest.mark.parametrize("count", [10, 60_000])
def test_the_loop_counts_few_values_of_a_message(count: int) -> None:
    message = Watched(extras(count, 0).SerializeToString())
    message.reads = Counter()

    async def work(call: Call, message: bytes) -> int:
        return len(message)

    lookup = with_buffers("kvstore.v1.Store", {"Lookup": work})["Lookup"]
    assert asyncio.run(lookup(cast(Call, Admitted()), message)) == len(message)
    in_the_loop = message.reads[threading.get_ident()]
    assert 0 < in_the_loop < 4 * SLICE_VALUES, "a message of many values kept everybody waiting"
    assert count < message.reads.total(), "all of it was weighed"
    assert (len(message.reads) == 1) == (count < SLICE_VALUES), "few values are not worth a thread"
