"""Sends requests to several data servers at the same time: first all requests, then all answers are awaited."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.cluster.data_connection import DataConnection
from kvstore.cluster.peer_links import PeerLinks, PoolNode
from kvstore.errors import KVStoreError
from kvstore.wire.data import FrameKind, WireError


class PeerRequest(NamedTuple):
    """One request to one data server."""

    peer: PoolNode
    kind: FrameKind
    body: bytes


Answer = bytearray | KVStoreError | None
"""The body of the reply, or why there is none. None: the time was up before the request was sent."""


def ask_peers(links: PeerLinks, requests: Sequence[PeerRequest], reply: FrameKind, until_s: float) -> list[Answer]:
    """Send all requests, and return the answers in the same order, at the time ``until_s`` at the latest.

    The last quarter of the time is for answers alone, so no peer is connected to when it has no time to answer. If a
    connection was stale, its request is sent again over another connection.

    Args:
        requests: at most one for each peer; a peer may answer a request twice.
        reply: the kind of all replies.
        until_s: a time of ``time.monotonic()``.
    """
    answers: list[Answer] = [None] * len(requests)
    now_s = time.monotonic()
    send_until_s = until_s - (until_s - now_s) / 4
    places = list(range(len(requests)))
    for _ in range(2):
        if places:
            places = _ask(links, requests, places, answers, reply, send_until_s, until_s)
    return answers


def _ask(
    links: PeerLinks,
    requests: Sequence[PeerRequest],
    places: list[int],
    answers: list[Answer],
    reply: FrameKind,
    send_until_s: float,
    until_s: float,
) -> list[int]:
    """Send the requests at ``places``, and store their answers. Return the places whose connections were stale."""
    stale: list[int] = []

    def fail(place: int, connection: DataConnection, error: KVStoreError) -> None:
        answers[place] = error
        if _is_stale(links, requests[place].peer, connection, error):
            stale.append(place)

    with contextlib.ExitStack() as open_links:
        under_way = []
        for place in places:
            if time.monotonic() >= send_until_s:
                break
            request = requests[place]
            try:
                connection = open_links.enter_context(links.to(request.peer, until_s))
            except KVStoreError as error:
                answers[place] = error
                continue
            try:
                number = connection.send(request.kind, request.body, deadline_s=until_s)
                under_way.append((place, connection, number))
            except KVStoreError as error:
                fail(place, connection, error)
        for place, connection, number in under_way:
            try:
                head = connection.receive_head(number, reply, deadline_s=until_s)
                answers[place] = connection.receive(head.body_bytes, deadline_s=until_s)
            except KVStoreError as error:
                fail(place, connection, error)
    return stale


def _is_stale(links: PeerLinks, peer: PoolNode, connection: DataConnection, error: KVStoreError) -> bool:
    """Return whether the connection was stale, so that the peer may be asked again. If the connection broke for
    another reason, the peer counts as dead."""
    if links.stale(peer, connection, error):
        return True
    if connection.broken or isinstance(error, WireError):
        connection.broken = True  # after an invalid reply the stream cannot be trusted
        links.mark_dead(peer)
    return False
