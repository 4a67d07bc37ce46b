"""RemoteWriter: pages written layer by layer into frames of a node reached over gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from kvstore.client.buffers import rows_to_read
from kvstore.client.remote.node import RemoteNode
from kvstore.client.writer import Writer
from kvstore.errors import InvalidRequest, LeaseBroken, Unavailable
from kvstore.model.prefix import Keys
from kvstore.model.shard import Shard
from kvstore.pb import store_pb2 as pb
from kvstore.rpc.data_messages import DATA_FIELD, pack_data, pack_integer

_PAGE_FIELD, _OFFSET_FIELD = 4, 5  # of WriteRequest

Piece = tuple[int, int, npt.NDArray[np.uint8]]  # page, where in it, bytes


class RemoteWriter(Writer):
    """A layer-wise put: ``with cache.writer(tokens) as w: w.write_layer(layer, data)`` for every layer, in any order.

    Life and attributes as of ``Writer``; the node holds the reservation. A restart of the node between entering and
    leaving ends it: ``LeaseBroken``, and everything is revoked.
    """

    def __init__(
        self,
        node: RemoteNode,
        shard: Shard,
        keys: Keys,
        ttl_s: float,
        group: str | int | None,
        named: Callable[[Keys], pb.Pages],
    ) -> None:
        super().__init__(None, shard, keys, ttl_s, group)  # type: ignore[arg-type]
        self._remote = node
        self._named = named
        self._group_name = "" if group is None else str(group)
        self._reservation = b""

    def __enter__(self) -> RemoteWriter:
        """Reserve frames for the pages that are not stored.

        Raises:
            OutOfSpace: there is no room for even one page.
            NodeUnavailable, DeadlineExceeded: the node did not answer in time.
        """
        if self._entered:
            raise InvalidRequest("writer", "was entered already: make another")
        self._entered = True
        self._remote.check_open()
        if len(self._keys):
            request = pb.ReserveRequest(
                pages=self._named(self._keys),
                write_group=self._group_name,
                rank=self._shard.rank,
                ranks=self._shard.ranks,
                stage=self._shard.stage,
                stages=self._shard.stages,
                ttl_ms=self._ttl_ms,
            )
            # Asked again where a lost request costs no frames: a node has one reservation of a group and shard.
            reply = self._remote.call("Reserve", request, pb.ReserveReply, again=bool(self._group_name))
            self._reservation = reply.reservation
            self.pages_new = list(reply.wanted)
        self._begin()
        return self

    def write_layer(self, layer: int, data: Any) -> None:
        """See ``Writer.write_layer``.

        Raises:
            LeaseBroken: the reservation is over.
            NodeUnavailable, DeadlineExceeded: the node did not take it in time.
        """
        self._open()
        start, width = self._start(layer), self._shard.width
        rows = rows_to_read(data, width, len(self._keys), "data", apart=True)
        if not self._shard.writes or not self.pages_new:
            return
        self._send(((page, start, rows[page]) for page in self.pages_new), len(self.pages_new) * width)
        self._written[:, layer] = True

    def write_page(self, page: int, data: Any) -> None:
        """See ``Writer.write_page``. Raises as ``write_layer``."""
        self._open()
        self._check_page(page)
        shard, (first, last), layer_bytes = self._shard, self._shard.layers, self._layout.layer_bytes
        rows = rows_to_read(data, shard.width, last - first, "data", apart=True)
        if not shard.writes or page not in self.pages_new:
            return
        if shard.width == layer_bytes:
            pieces: list[Piece] = [(page, first * layer_bytes, rows.reshape(-1))]
        else:
            offsets = range(first * layer_bytes + shard.offset, last * layer_bytes, layer_bytes)
            pieces = [(page, offset, row) for offset, row in zip(offsets, rows, strict=True)]
        self._send(pieces, rows.nbytes)
        self._written[self.pages_new.index(page)] = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Seal, or revoke where an exception is on its way.

        Raises:
            InvalidRequest: a layer was not written; everything was revoked.
            LeaseBroken: the reservation was over; nothing is stored.
            NodeUnavailable, DeadlineExceeded: no acknowledgement; what was not sealed is revoked by its deadline.
        """
        complete = bool(self._written.all())
        reservation, self._reservation = self._reservation, b""
        if not reservation:
            return
        request = pb.ReservationRequest(reservation=reservation)
        if kind is None and complete:
            self.sealed = self._remote.call("Seal", request, pb.WriteReply, again=False).new_pages
            return
        with contextlib.suppress(Unavailable, LeaseBroken):
            self._remote.call("Revoke", request, pb.Empty, again=False)
        if kind is None:
            page, layer = (int(i) for i in np.argwhere(~self._written)[0])
            raise InvalidRequest("layer", f"layer {layer} of page {self.pages_new[page]} was not written")

    def _open(self) -> AbstractContextManager[None]:
        if not self._entered:
            raise InvalidRequest("writer", "is not entered: use it in a with statement")
        self._remote.check_open()
        return contextlib.nullcontext()

    def _send(self, pieces: Iterable[Piece], size_bytes: int) -> None:
        """Send pieces and wait until they are where readers find them."""
        timeout_s = self._remote.stream_s(size_bytes)
        messages = _messages(self._reservation, pieces, self._remote.data_bytes)
        call = self._remote.send("Write", messages, timeout_s)
        try:
            call.result()
        except grpc.RpcError as error:
            self._remote.refuse(error)
        except grpc.FutureCancelledError:
            self._remote.check_open()
            raise Unavailable(f"{self._remote.endpoint.address}: the write was cancelled") from None


def _messages(reservation: bytes, pieces: Iterable[Piece], most: int) -> Iterator[bytes]:
    yield pb.WriteRequest(begin=pb.WriteBegin(reservation=reservation)).SerializeToString()
    for page, offset, data in pieces:
        for start in range(0, len(data), most):
            place = pack_integer(_PAGE_FIELD, page) + pack_integer(_OFFSET_FIELD, offset + start)
            yield pack_data(data[start : start + most].data, DATA_FIELD, place)
