"""Frames and their bodies: what was packed comes out, and what was not packed by us is refused by name."""

from __future__ import annotations

import os
import random
import time

import pytest

from kvstore.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KVStoreError,
    NodeUnavailable,
    PermissionDenied,
    TooManyCalls,
    Unauthenticated,
    Unavailable,
    VersionMismatch,
)
from kvstore.wire import data
from kvstore.wire.data import BODY_MAX, HEAD, FrameKind, Hello, Welcome, WireError

FUZZ_S = float(os.environ.get("KVSTORE_TEST_FUZZ_S", "4")) / 4
SEED = int(os.environ.get("KVSTORE_TEST_SEED", "1"))


def test_hello_and_welcome_come_out_as_they_went_in() -> None:
    hello = Hello(pool="p", node="n", caller="c", token="t" * 4096)
    assert data.unpack_hello(data.pack_hello(hello)) == hello
    assert "t" * 10 not in repr(hello)
    welcome = Welcome(node="n", process="0" * 16)
    assert data.unpack_welcome(data.pack_hello(welcome)) == welcome


def test_fields_that_a_reader_does_not_know_are_ignored() -> None:
    assert data.unpack_hello(b'{"node": "n", "colour": [1, 2]}') == Hello(node="n")


@pytest.mark.parametrize(
    "error",
    [
        WireError("x"),
        InvalidRequest("field", "reason\0with a zero"),
        Unauthenticated("x"),
        PermissionDenied("x"),
        VersionMismatch("x"),
        TooManyCalls("x"),
        DeadlineExceeded("x"),
        NodeUnavailable("x"),
        Unavailable("x"),
    ],
)
def test_an_error_arrives_as_what_it_was(error: KVStoreError) -> None:
    found = data.unpack_error(data.pack_error(error))
    assert type(found) is type(error) and str(found) == str(error)


def test_random_bytes_are_refused_and_never_more() -> None:
    """Seeded; good frames with some bytes changed among them."""
    chance, until_s = random.Random(SEED), time.monotonic() + FUZZ_S
    good = [data.pack_head(kind, 7, 16) for kind in FrameKind]
    bodies = [data.pack_hello(Hello(pool="p", node="n")), data.pack_hello(Welcome()), data.pack_error(WireError("x"))]
    refused = 0
    while time.monotonic() < until_s:
        raw, body = bytearray(chance.choice(good)), bytearray(chance.choice(bodies))
        for _ in range(chance.randrange(4)):
            raw[chance.randrange(HEAD.size)] = chance.randrange(256)
            body[chance.randrange(len(body))] = chance.randrange(256)
        del body[chance.randrange(len(body) + 1) :]
        for unpack in (data.unpack_hello, data.unpack_welcome, data.unpack_error):
            try:
                unpack(body)
            except (WireError, VersionMismatch):
                refused += 1
        try:
            head = data.unpack_head(raw)
        except (WireError, VersionMismatch):
            refused += 1
        else:
            assert head.body_bytes <= BODY_MAX[head.kind]
    assert refused > 100, f"KVSTORE_TEST_SEED={SEED}"
