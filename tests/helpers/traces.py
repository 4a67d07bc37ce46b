"""Traces of requests: the same everywhere, and well-formed."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from itertools import pairwise

from engine.simulator.trace import TraceRequest, write_trace


def digest(requests: Iterable[TraceRequest]) -> str:
    stream = io.StringIO()
    write_trace(stream, requests)
    return hashlib.sha256(stream.getvalue().encode()).hexdigest()[:16]


def assert_well_formed(requests: list[TraceRequest]) -> None:
    assert all(before.timestamp_ms <= after.timestamp_ms for before, after in pairwise(requests))
    parent_of: dict[int, int | None] = {}
    for request in requests:
        assert request.input_tokens >= 1 and request.output_tokens >= 1
        assert len(request.block_ids) == -(-request.input_tokens // 512)
        for parent, block in pairwise((None, *request.block_ids)):
            assert parent_of.setdefault(block, parent) == parent  # type: ignore[arg-type]  # chained
