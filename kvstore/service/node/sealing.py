"""Sealing: a client's request to seal what it wrote into granted frames, or to show what it is writing there, as the
event that the state decides about.

It comes over the control socket, or lies in the log of puts: the same bytes, looked at in the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest
from kvstore.model.replica import ADDRESS_BYTES, KEY_BYTES, Address, FrameClass, identity_bytes
from kvstore.rpc import control
from kvstore.rpc.control import Message
from kvstore.state import events as ev

ClassOf = Callable[[int], FrameClass | None]
"""The class of an extent's frames; None where there is no such extent."""


def seal_event(session: int, message: Message, class_of: ClassOf, now_ns: int) -> ev.SealGranted:
    """The event of a ``SEAL_GRANTED``; its rows are a view of the message.

    Raises:
        InvalidRequest: the request makes no sense.
    """
    frame_class = control.unpack_class(message.a)
    count, body = message.entries, message.body
    if count == 0:
        raise InvalidRequest("count", "must not be 0")
    width = identity_bytes(frame_class.page_tokens)
    parent = control.unpack_key(body, 0)
    addresses = control.unpack_addresses(body, count, KEY_BYTES)
    start = KEY_BYTES + count * ADDRESS_BYTES
    rows = control.unpack_rows(body, count, frame_class.page_tokens, start)
    sums = None
    if message.flags & control.CHECKSUMS:
        sums = _checksums(body, start + count * width, count, frame_class.layers)
    addresses = _of_class(addresses, frame_class, class_of)
    continues = bool(message.flags & control.CONTINUES)
    hints = control.unpack_hints(message)
    event = ev.SealGranted(now_ns, session, frame_class, parent, addresses, rows, sums, continues, hints=hints)
    if message.flags & control.OBJECT:
        if count != 1 or sums is not None:
            raise InvalidRequest("count", "one object at a time, without checksums")
        event.replaces = control.unpack_addresses(body, 1, start + width)[0]
    return event


def objects_event(session: int, message: Message, class_of: ClassOf, now_ns: int) -> ev.SealObjects:
    """The event of a ``SEAL_OBJECTS``; its rows are a view of the message. Raises as ``seal_event``."""
    frame_class = control.unpack_class(message.a)
    count, body = message.entries, message.body
    if count == 0:
        raise InvalidRequest("count", "must not be 0")
    addresses = control.unpack_addresses(body, count)
    rows = control.unpack_rows(body, count, frame_class.page_tokens, count * ADDRESS_BYTES)
    start = count * (ADDRESS_BYTES + identity_bytes(frame_class.page_tokens))
    replaces = control.unpack_addresses(body, count, start)
    addresses = _of_class(addresses, frame_class, class_of)
    return ev.SealObjects(now_ns, session, frame_class, addresses, rows, replaces)


def _of_class(addresses: list[Address], frame_class: FrameClass, class_of: ClassOf) -> list[Address]:
    """The addresses, void where the extent is gone. Raises InvalidRequest where an extent is of another class."""
    for number in {address.extent for address in addresses}:
        there = class_of(number)
        if there is None:  # dropped since: its addresses can be nobody's
            # Each still an address of its own: one that is named twice is another's mistake, and refused.
            addresses = [a if a.extent != number else Address(0, i, 0) for i, a in enumerate(addresses)]
        elif there != frame_class:
            raise InvalidRequest("addresses", f"extent {number} holds frames of another class")
    return addresses


def begin_event(session: int, message: Message, class_of: ClassOf, now_ns: int) -> ev.Begin:
    """The event of a ``BEGIN``. Raises as ``seal_event``."""
    said, ttl_ns = seal_event(session, message, class_of, now_ns), message.b * 1_000_000
    return ev.Begin(now_ns, session, said.frame_class, ttl_ns, said.parent, said.addresses, said.rows)


def publish_event(session: int, message: Message, now_ns: int) -> ev.Publish:
    """The event of a ``PUBLISH``. Raises InvalidRequest where it makes no sense."""
    body, count = message.body, message.entries
    addresses_at = KEY_BYTES + control.CHAINED.size
    addresses = control.unpack_addresses(body, count, addresses_at)
    keys = control.unpack_keys(body, count, addresses_at + count * ADDRESS_BYTES)
    position, before = control.CHAINED.unpack_from(body, KEY_BYTES)
    return ev.Publish(now_ns, session, message.a, control.unpack_key(body, 0), position, before, addresses, keys)


def retract_event(session: int, message: Message, now_ns: int) -> ev.Retract:
    """The event of a ``RETRACT``. Raises InvalidRequest where it makes no sense."""
    return ev.Retract(now_ns, session, message.a, control.unpack_addresses(message.body, message.entries))


def _checksums(body: memoryview, offset: int, count: int, layers: int) -> npt.NDArray[np.uint32]:
    if len(body) < offset + 4 * count * layers:
        raise InvalidRequest("checksums", f"{count} pages of {layers} layers need {4 * count * layers} bytes")
    return np.frombuffer(body, np.uint32, count * layers, offset).reshape(count, layers)
