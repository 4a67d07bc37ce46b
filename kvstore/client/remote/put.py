"""RemotePut: pages on their way to a node over gRPC."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc

from kvstore.client.buffers import Rows
from kvstore.client.pending import PendingPut
from kvstore.client.remote.node import RemoteNode
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.pb import store_pb2 as pb
from kvstore.rpc.data_messages import pack_data


class RemotePut(PendingPut):
    """A put whose pages were handed to the connection."""

    __slots__ = ("_node", "_call", "_lock", "_new", "_failure", "stored")

    def __init__(self, node: RemoteNode) -> None:
        self._node = node
        self._call: Any = None
        self._lock = threading.Lock()
        self._new = 0
        self._failure: Unavailable | None = None
        self.stored = 0  # leading pages of those sent that are there now; known after ``result``

    def start(self, begin: pb.WriteBegin, rows: Rows) -> None:
        """Send ``rows`` ``[pages, page_bytes]``. Returns when all of them were drawn, or the node wants no more.

        Raises:
            DeadlineExceeded: neither in time; the call was cancelled.
        """
        drawn = threading.Event()
        timeout_s = self._node.stream_s(rows.nbytes)
        head = pb.WriteRequest(begin=begin).SerializeToString()
        messages = _messages(head, rows, self._node.data_bytes, drawn)
        self._call = call = self._node.send("Write", messages, timeout_s)
        call.add_done_callback(lambda _: drawn.set())
        if not drawn.wait(timeout_s + 1.0):
            call.cancel()
            raise DeadlineExceeded(f"{self._node.endpoint.address}: {rows.nbytes} bytes were not taken in time")

    def result(self) -> int:
        """See ``PendingPut.result``."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            call, self._call = self._call, None
            if call is not None:
                try:
                    reply = pb.WriteReply.FromString(call.result())
                    self._new, self.stored = reply.new_pages, reply.pages
                except grpc.RpcError as error:
                    meant = self._node.meaning(error)
                    self._failure = meant if isinstance(meant, Unavailable) else None
                    raise meant from None
                except grpc.FutureCancelledError:
                    self._node.check_open()
                    raise Unavailable(f"{self._node.endpoint.address}: the put was cancelled") from None
        return self._new


def _messages(head: bytes, rows: Rows, most: int, drawn: threading.Event) -> Iterator[bytes]:
    """``head``, then all data in order: whole pages together where they are small, large ones in equal pieces."""
    yield head
    flat, step = rows.reshape(-1), piece_bytes(rows.shape[1], most)
    for start in range(0, len(flat), step):
        yield pack_data(flat[start : start + step].data)
    drawn.set()


def piece_bytes(page_bytes: int, most: int) -> int:
    """How much data to send in one message, so that messages and pages end together as often as may be."""
    if page_bytes <= most:
        return most // page_bytes * page_bytes
    return -(-page_bytes // -(-page_bytes // most))
