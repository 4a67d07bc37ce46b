"""Reading pages from a node over gRPC: a stream of data straight into its rows."""

from __future__ import annotations

from typing import NamedTuple

import grpc
import numpy as np

from kvstore.client.buffers import Rows
from kvstore.client.match import CHECKSUM, GENERATION
from kvstore.client.remote.node import RemoteNode, end, lost
from kvstore.errors import Unavailable
from kvstore.pb import store_pb2 as pb
from kvstore.rpc.data_messages import digest_of, fields
from kvstore.tier.host_memory import copy, empty

_MATCH, _DATA, _DIGEST = 1, 2, 3  # fields of ReadReply


class Fetched(NamedTuple):
    """What came: whole pages in ``rows``, how many of them from NVMe, and why not more."""

    pages: int
    nvme_pages: int
    reason: str
    rows: Rows


def fetch(node: RemoteNode, request: pb.ReadRequest, asked: int, page_bytes: int, rows: Rows | None) -> Fetched:
    """The leading pages of a prompt; asked for once more where the connection was lost.

    Args:
        asked: how many pages the request names.
        rows: ``[>= asked, page_bytes]``; None: made here, of the size that the node announces.

    Data is verified before it counts; rows after the last page may have been written to.

    Raises:
        NodeUnavailable, DeadlineExceeded: the node did not answer, or the stream broke or stood still.
    """
    raw, again = request.SerializeToString(), True
    while True:
        try:
            return _fetch(node, raw, asked, page_bytes, rows)
        except grpc.RpcError as error:
            if not (again and lost(error)):
                node.refuse(error)
            again = False
        except ValueError as error:  # no protobuf, or gRPC's word for a channel closed by another thread
            node.check_open()
            raise Unavailable(f"{node.endpoint.address}: sent what is no reply: {error}") from None


def _fetch(node: RemoteNode, request: bytes, asked: int, page_bytes: int, rows: Rows | None) -> Fetched:
    match, position, limit, flat = pb.LookupReply(), 0, 0, np.empty(0, np.uint8)
    stream = node.receive("Read", request, node.stream_s(asked * page_bytes))
    try:
        for message in stream:
            data, digest = None, 0
            for number, integer, view in fields(message):
                if number == _DATA:
                    data = view
                elif number == _DIGEST:
                    digest = integer
                elif number == _MATCH and view is not None:
                    match = pb.LookupReply.FromString(bytes(view))
                    if rows is None:
                        rows = empty((min(match.pages, asked), page_bytes))
                    flat, limit = rows.reshape(-1), max(limit, min(match.pages, asked) * page_bytes)
            if not data:
                continue
            stop = position + len(data)
            if stop > limit:
                raise ValueError(f"{stop} bytes where {limit} were announced")
            if digest_of(data) != digest:
                return _counted(match, position // page_bytes, CHECKSUM, rows, page_bytes)
            copy(flat[position:stop], np.frombuffer(data, np.uint8))
            position = stop
    finally:
        end(stream)
    return _counted(match, position // page_bytes, match.reason, rows, page_bytes)


def _counted(match: pb.LookupReply, pages: int, reason: str, rows: Rows | None, page_bytes: int) -> Fetched:
    if pages > match.pages:  # the last message takes back what the first one announced
        pages = match.pages
    elif pages < match.pages and not reason:
        reason = GENERATION
    found = rows if rows is not None else np.empty((0, page_bytes), np.uint8)
    return Fetched(pages, min(match.nvme_pages, pages), reason, found)
