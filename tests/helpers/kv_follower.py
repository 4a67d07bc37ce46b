"""A subscriber to KV events as an engine's router is one: SUB for what happens, DEALER for what it missed."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgpack
import zmq

from tests.helpers.inside import admin

END = (-1).to_bytes(8, "big", signed=True)


class Follower:
    """What it was told is stored: ``held[medium][hash]`` is (parent, token ids). Ends with ``close``."""

    def __init__(self, address: str, replay_address: str) -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"kv-events")
        self._sub.connect(address)
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.connect(replay_address)
        self.held: dict[str, dict[bytes, tuple[bytes | None, tuple[int, ...]]]] = {}
        self.last = -1
        self.jumps: list[tuple[int, int]] = []  # numbers that nobody has any more
        self.kinds: list[str] = []
        self.cleared = 0

    def close(self) -> None:
        self._context.destroy(linger=0)

    def ask(self, start: int, *, delimiter: bool = True) -> list[tuple[int, bytes]]:
        """The replay from that number on; fails where it does not end within ten seconds."""
        self._dealer.send_multipart([b"", start.to_bytes(8, "big")] if delimiter else [start.to_bytes(8, "big")])
        found: list[tuple[int, bytes]] = []
        while True:
            assert self._dealer.poll(10_000), "no answer to a replay"
            frames = self._dealer.recv_multipart()
            if delimiter:
                assert frames.pop(0) == b""
            number, payload = frames
            if number == END:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))

    def catch_up(self) -> None:
        """Ask for everything after what it has seen."""
        for number, payload in self.ask(self.last + 1):
            if number > self.last:
                self.take(number, payload)

    def follow_until(self, holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Take what comes until ``holds``; gaps are asked for."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"told of { ({m: len(p) for m, p in self.held.items()}) }"
            if not self._sub.poll(200):
                self.catch_up()  # what nothing came after leaves no gap
                continue
            topic, number, payload = self._sub.recv_multipart()
            assert topic == b"kv-events"
            seq = int.from_bytes(number, "big")
            if seq <= self.last:
                continue  # a replay brought it
            if seq > self.last + 1:
                self.catch_up()
            if seq > self.last:
                self.take(seq, payload)

    def take(self, number: int, payload: bytes) -> None:
        seconds, events, rank = msgpack.unpackb(payload)
        assert abs(seconds - time.time()) < 3600 and rank == 0
        if number != self.last + 1:
            self.jumps.append((self.last, number))
        self.last = number
        self.apply(events)

    def apply(self, events: Iterable[dict[str, Any]]) -> None:
        """As a consumer does: hold what is stored, with its parent and token ids, and forget what is removed."""
        for event in events:
            self.kinds.append(event["type"])
            if event["type"] == "AllBlocksCleared":
                assert event == {"type": "AllBlocksCleared"}
                self.held.clear()
                self.cleared += 1
            elif event["type"] == "BlockRemoved":
                for one in event["block_hashes"]:
                    self.held.get(event["medium"], {}).pop(one, None)
            else:
                assert (event["type"], event["lora_id"], event["lora_name"]) == ("BlockStored", None, None)
                hashes, parent, medium = event["block_hashes"], event["parent_block_hash"], event["medium"]
                tokens, size = event["token_ids"], event["block_size"]
                assert len(tokens) == size * len(hashes)
                held = self.held.setdefault(medium, {})
                assert parent is None or parent in held, "a parent is told of before its children"
                for i, one in enumerate(hashes):
                    held[one] = parent, tuple(tokens[i * size : (i + 1) * size])
                    parent = one

    @classmethod
    def of_dump(cls, stream: bytes) -> Follower:
        """What a dump tells."""
        self = cls.__new__(cls)
        self.held, self.kinds, self.cleared = {}, [], 0
        unpacker = msgpack.Unpacker()
        unpacker.feed(stream)
        for _, events, _ in unpacker:
            self.apply(events)
        return self


def dump(store: Any) -> tuple[bytes, dict[str, Any]]:
    """All parts of ``kv_dump``, and what it said beside."""
    reply = admin(store, "kv_dump")
    data = base64.b64decode(reply["data"])
    while reply["dump"]:
        reply = admin(store, "kv_dump", dump=reply["dump"])
        data += base64.b64decode(reply["data"])
    return data, reply
