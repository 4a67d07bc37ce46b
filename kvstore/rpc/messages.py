"""Messages that several services have: layouts, hints, and JSON documents."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from functools import lru_cache
from typing import Any, Final

from google.protobuf import struct_pb2

from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout
from kvstore.model.retention import Retention
from kvstore.pb import store_pb2 as pb

MESSAGE_BYTES_MAX: Final = 4 << 20  # of a request, and of a reply
LAYOUT_BYTES_KEPT: Final = 8 << 10  # of a message; a larger one has unknown fields
LAYOUTS_KEPT: Final = 256  # made once: to check one and to hash it costs as much as a short lookup
TEXT_BYTES_MAX: Final = 1024  # of a salt, an adapter, a model's name

_TEXTS: Final = ("model", "dtype", "revision", "weights_digest", "attention", "rope", "group")


def layout_message(layout: Layout) -> pb.Layout:
    """A layout as a message."""
    return pb.Layout(**asdict(layout))


def layout_of(message: pb.Layout) -> Layout:
    """The layout of a message. Raises InvalidRequest naming the field."""
    packed = message.SerializeToString()
    return _layout_of(packed) if len(packed) <= LAYOUT_BYTES_KEPT else _layout_of.__wrapped__(packed)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _layout_of(packed: bytes) -> Layout:
    message = pb.Layout.FromString(packed)
    for name in _TEXTS:
        check_text(f"layout.{name}", getattr(message, name))
    return Layout(
        model=message.model,
        layers=message.layers,
        kv_heads=message.kv_heads or 1,
        head_dim=message.head_dim,
        dtype=message.dtype or "bfloat16",
        page_tokens=message.page_tokens or 64,
        revision=message.revision,
        weights_digest=message.weights_digest,
        mla_latent=message.mla_latent,
        mla_rope=message.mla_rope,
        attention=message.attention or "full",
        window=message.window,
        rope=message.rope,
        group=message.group,
    )


def retention_messages(ranges: Iterable[Retention]) -> list[pb.Retention]:
    """Hints as messages."""
    return [
        pb.Retention(priority=part.priority, ttl_s=part.ttl_s or 0, start=part.start, stop=part.stop or 0)
        for part in ranges
    ]


def retention_of(messages: Iterable[pb.Retention]) -> list[Retention]:
    """The hints of messages. Raises InvalidRequest naming the field."""
    return [Retention(part.priority, part.ttl_s or None, part.start, part.stop or None) for part in messages]


def document(value: dict[str, Any]) -> bytes:
    """A JSON document as a packed Struct. Numbers that are names in it become text, as JSON has them.

    A document that is larger than a message may be is replaced by a note of that, as over this machine's socket.
    """
    packed = struct_pb2.Struct()
    packed.update(json.loads(json.dumps(value)))  # several times faster than json_format
    data = packed.SerializeToString()
    if len(data) <= MESSAGE_BYTES_MAX:
        return data
    return document({"findings": ["too many to list"], "truncated": True})


def check_text(field: str, text: str) -> None:
    """Raises InvalidRequest where it is longer than a salt, an adapter or a name may be: some are remembered."""
    if len(text.encode()) > TEXT_BYTES_MAX:
        raise InvalidRequest(field, f"has more than {TEXT_BYTES_MAX} bytes")
