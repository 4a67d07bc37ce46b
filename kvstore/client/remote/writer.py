"""Writers of pages to a node over gRPC: layer by layer into reserved frames, and puts of whole pages."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import grpc

from kvstore.client.buffers import Rows
from kvstore.client.prefix_cache import PendingPut
from kvstore.client.remote.node import RemoteNode
from kvstore.client.writer import Writer
from kvstore.errors import DeadlineExceeded, LeaseBroken, Unavailable
from kvstore.model.prefix import Keys
from kvstore.model.shard import Shard
from kvstore.pb import store_pb2 as pb
from kvstore.wire.grpc import DATA_FIELD, pack_data, pack_integer

_PAGE_FIELD, _OFFSET_FIELD = 4, 5  # fields of WriteRequest

Piece = tuple[int, int, Rows]  # page, offset in the page, bytes


class RemoteWriter(Writer):
    """A writer with a reservation in the node. Each call is one stream, and returns when the node has received it.

    If the node restarts before the writer is left, the reservation ends: calls raise ``LeaseBroken``, and all pages are
    revoked.
    """

    def __init__(
        self,
        node: RemoteNode,
        shard: Shard,
        keys: Keys,
        ttl_s: float,
        group: str | int | None,
        page_message: Callable[[Keys], pb.Pages],
    ) -> None:
        super().__init__(shard, keys, ttl_s, group)
        self._node = node
        self._page_message = page_message
        self._group_name = "" if group is None else str(group)
        self._reservation = b""

    def _reserve(self) -> None:
        self._node.check_open()
        if not len(self._keys):
            return
        shard = self._shard.cut
        pages = self._page_message(self._keys)
        request = pb.ReserveRequest(pages=pages, write_group=self._group_name, ttl_ms=self._ttl_ms, **shard)
        # A lost request can be repeated in a group, and costs no frames: a group has one reservation per shard.
        reply = self._node.call("Reserve", request, pb.ReserveReply, again=bool(self._group_name))
        self._reservation = reply.reservation
        self.pages_new = list(reply.wanted)

    def _storing(self) -> AbstractContextManager[None]:
        self._node.check_open()
        return contextlib.nullcontext()

    def _store_layer(self, start: int, rows: Rows) -> None:
        pieces = ((page, start, rows[page]) for page in self.pages_new)
        self._send(pieces, len(self.pages_new) * self._shard.width)

    def _store_page(self, page: int, rows: Rows) -> None:
        shard, (first, last), layer_bytes = self._shard, self._shard.layers, self._layout.layer_bytes
        if shard.width == layer_bytes:
            pieces: list[Piece] = [(page, first * layer_bytes, rows.reshape(-1))]
        else:
            offsets = range(first * layer_bytes + shard.offset, last * layer_bytes, layer_bytes)
            pieces = [(page, offset, row) for offset, row in zip(offsets, rows, strict=True)]
        self._send(pieces, rows.nbytes)

    def _store_range(self, page: int, offset: int, row: Rows) -> None:
        self._send([(page, offset, row)], row.nbytes)

    def _show(self, page: int | None) -> None:
        """Do nothing: the node makes layers readable when it has received them."""

    def _seal(self) -> None:
        reservation, self._reservation = self._reservation, b""
        if reservation:
            request = pb.ReservationRequest(reservation=reservation)
            self.sealed = self._node.call("Seal", request, pb.WriteReply, again=False).new_pages

    def _revoke(self) -> None:
        reservation, self._reservation = self._reservation, b""
        if reservation:
            request = pb.ReservationRequest(reservation=reservation)
            with contextlib.suppress(Unavailable, LeaseBroken):
                self._node.call("Revoke", request, pb.Empty, again=False)

    def _send(self, pieces: Iterable[Piece], size_bytes: int) -> None:
        """Send pieces and wait until the node has received them, so that readers find them."""
        timeout_s = self._node.stream_s(size_bytes)
        messages = _messages(self._reservation, pieces, self._node.data_bytes)
        call = self._node.send("Write", messages, timeout_s)
        try:
            call.result()
        except grpc.RpcError as error:
            self._node.refuse(error)
        except grpc.FutureCancelledError:
            self._node.check_open()
            raise Unavailable(f"{self._node.endpoint.address}: the write was cancelled") from None


def _messages(reservation: bytes, pieces: Iterable[Piece], data_bytes: int) -> Iterator[bytes]:
    yield pb.WriteRequest(begin=pb.WriteBegin(reservation=reservation)).SerializeToString()
    for page, offset, data in pieces:
        for start in range(0, len(data), data_bytes):
            place = pack_integer(_PAGE_FIELD, page) + pack_integer(_OFFSET_FIELD, offset + start)
            yield pack_data(data[start : start + data_bytes].data, DATA_FIELD, place)


class RemotePut(PendingPut):
    """A put whose pages the connection has taken."""

    __slots__ = ("_node", "_call", "_lock", "_new", "_failure", "stored")

    def __init__(self, node: RemoteNode) -> None:
        self._node = node
        self._call: Any = None
        self._lock = threading.Lock()
        self._new = 0
        self._failure: Unavailable | None = None
        self.stored = 0  # leading pages that are stored, known after ``result``

    def start(self, begin: pb.WriteBegin, rows: Rows) -> None:
        """Send ``rows`` ``[pages, page_bytes]``. Returns when gRPC has taken all of them, or the node needs no more.

        Raises:
            DeadlineExceeded: neither happened in time; the call was cancelled.
        """
        drawn = threading.Event()
        timeout_s = self._node.stream_s(rows.nbytes)
        head = pb.WriteRequest(begin=begin).SerializeToString()
        messages = _put_messages(head, rows, self._node.data_bytes, drawn)
        self._call = call = self._node.send("Write", messages, timeout_s)
        call.add_done_callback(lambda _: drawn.set())
        if not drawn.wait(timeout_s + 1.0):
            call.cancel()
            raise DeadlineExceeded(f"{self._node.endpoint.address}: {rows.nbytes} bytes were not taken in time")

    def result(self) -> int:
        """Wait for the node's reply, and return the number of new pages."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            call, self._call = self._call, None
            if call is not None:
                try:
                    reply = pb.WriteReply.FromString(call.result())
                    self._new, self.stored = reply.new_pages, reply.pages
                except grpc.RpcError as error:
                    failure = self._node.exception_of(error)
                    self._failure = failure if isinstance(failure, Unavailable) else None
                    raise failure from None
                except grpc.FutureCancelledError:
                    self._node.check_open()
                    raise Unavailable(f"{self._node.endpoint.address}: the put was cancelled") from None
        return self._new


def _put_messages(head: bytes, rows: Rows, data_bytes: int, drawn: threading.Event) -> Iterator[bytes]:
    """Yield ``head``, then all data in order: several small pages per message, or equal pieces of a large one."""
    yield head
    flat, step = rows.reshape(-1), piece_bytes(rows.shape[1], data_bytes)
    for start in range(0, len(flat), step):
        yield pack_data(flat[start : start + step].data)
    drawn.set()


def piece_bytes(page_bytes: int, data_bytes: int) -> int:
    """Return how much data a message takes, so that messages and pages end together as often as possible."""
    if page_bytes <= data_bytes:
        return data_bytes // page_bytes * page_bytes
    return -(-page_bytes // -(-page_bytes // data_bytes))
