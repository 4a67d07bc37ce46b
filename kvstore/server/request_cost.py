"""Estimates the memory that a request will take once it is parsed, from its bytes.

Most requests are one long field, and take a few copies of it. But an empty value has two bytes on the wire and takes
tables of ten objects once it is parsed, and a prompt in pages of one token has a key for every four bytes. So the
values of a message are counted, including those of nested messages. Their contents are skipped, so a prompt of a
million tokens takes microseconds. A message with more values than any call needs is refused. A message with few values
is counted in the event loop. One with more is counted in a thread of its caller's share, so that no other caller waits
for it.

Worked example: a lookup of 4,096 tokens in pages of 16, with a digest per page. 16 KiB of tokens and 256 digests of 16
bytes are 20,992 bytes and some 270 values. The estimate is 4 * 20,992 + 270 * 128 + 256 * 256 = 184,064 bytes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FieldDescriptor

from kvstore.errors import InvalidRequest
from kvstore.pb import store_pb2 as pb
from kvstore.server.gate import MESSAGE_BYTES_FREE, MESSAGE_COPIES, Call

VALUE_BYTES: Final = 128  # per value: the object, and its places in the message and in a list
PACKED_COPIES: Final = 6  # further copies of packed numbers: a byte on the wire may become ten, in two arrays
PAGE_BYTES: Final = 256  # per page: its key and identity row, and their objects
PAGES_MAX: Final = 1 << 16  # of one call
VALUES_MAX: Final = PAGES_MAX + 4096  # of one request, with a digest per page
SLICE_VALUES: Final = 512  # counted in the event loop, in half a millisecond
DEPTH_MAX: Final = 32

_VARINT, _FIXED64, _BYTES, _START, _END, _FIXED32 = range(6)
_PAGES, _LAYOUT = pb.Pages.DESCRIPTOR, pb.Layout.DESCRIPTOR
_TOKENS, _PAGE_TOKENS = pb.Pages.TOKENS_FIELD_NUMBER, pb.Layout.PAGE_TOKENS_FIELD_NUMBER


Answer = TypeVar("Answer")


def with_buffers(
    service: str, calls: Mapping[str, Callable[[Call, bytes], Awaitable[Answer]]]
) -> dict[str, Callable[[Call, bytes], Awaitable[Answer]]]:
    """Wrap a service's calls, so that they take buffers for the memory of their parsed requests. ``Call.request`` has
    already taken buffers for copies of the bytes."""
    methods = descriptor_pool.Default().FindServiceByName(service).methods_by_name
    return {name: partial(_with_buffers, methods[name].input_type, work) for name, work in calls.items()}


async def _with_buffers(
    kind: Any, work: Callable[[Call, bytes], Awaitable[Answer]], call: Call, message: bytes
) -> Answer:
    more_bytes = await weight_of(call, kind, message) - MESSAGE_COPIES * len(message)
    if more_bytes <= MESSAGE_BYTES_FREE:
        return await work(call, message)
    async with call.buffers(more_bytes):
        return await work(call, message)


async def weight_of(call: Call, kind: Any, message: bytes) -> int:
    """Run ``weigh``, in a thread if there are many values."""
    weight = weigh(kind, message, SLICE_VALUES)
    if weight is None:
        weight = await call.quick(weigh, kind, message)
        assert weight is not None, "all of it was weighed"
    return weight


def weigh(kind: Any, message: bytes, slice_values: int = VALUES_MAX) -> int | None:
    """Return how many bytes of memory a request with the descriptor ``kind`` takes. If the message has another
    type, the estimate covers the part that was readable.

    Args:
        slice_values: if the message has more values than this, counting stops, and None is returned.

    Raises:
        InvalidRequest: it has more than ``VALUES_MAX`` values, or nests deeper than ``DEPTH_MAX``.
    """
    weight = _Weight(slice_values)
    try:
        weight.add(kind, message, 0, len(message), 0)
    except _ManyValues:
        if slice_values < VALUES_MAX:
            return None
        raise InvalidRequest("request", f"must have at most {VALUES_MAX} values") from None
    pages = min(weight.tokens_bytes // (4 * weight.page_tokens), PAGES_MAX)
    return MESSAGE_COPIES * len(message) + VALUE_BYTES * weight.values + weight.packed_bytes + PAGE_BYTES * pages


class _ManyValues(Exception):
    """The message has more values than may be counted at once."""


class _Weight:
    def __init__(self, values_max: int) -> None:
        self._values_max = values_max
        self.values = self.packed_bytes = self.tokens_bytes = 0
        self.page_tokens = 64  # the least of all layouts; the default if none says it

    def add(self, kind: Any, data: bytes, place: int, stop: int, depth: int) -> None:
        """Count the fields of the message in ``data[place:stop]``."""
        if depth > DEPTH_MAX:
            raise InvalidRequest("request", f"must nest at most {DEPTH_MAX} deep")
        fields = kind.fields_by_number
        while place < stop:
            tag, size = data[place], 0
            place += 1
            if tag >= 0x80:
                tag, place = _varint(data, place - 1, stop)
            number, wire = tag >> 3, tag & 7
            self.values += 1
            if self.values > self._values_max:
                raise _ManyValues
            if wire == _BYTES:
                size, place = _varint(data, place, stop)
                field, end = fields.get(number), min(place + size, stop)
                if field is not None and field.message_type is not None:
                    self.add(field.message_type, data, place, end, depth + 1)
                elif field is not None and field.type not in (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING):
                    self.packed_bytes += PACKED_COPIES * (end - place)
                elif kind is _PAGES and number == _TOKENS:
                    self.tokens_bytes = max(self.tokens_bytes, end - place)
            elif wire == _VARINT:
                value, place = _varint(data, place, stop)
                if kind is _LAYOUT and number == _PAGE_TOKENS:
                    self.page_tokens = min(self.page_tokens, (value & 0xFFFFFFFF) or self.page_tokens)
            elif wire in (_FIXED64, _FIXED32):
                size = 8 if wire == _FIXED64 else 4
            elif wire not in (_START, _END):
                return  # the parser reports what is wrong
            place += size


def _varint(data: bytes, place: int, stop: int) -> tuple[int, int]:
    """Return the number at ``place`` and the place after it. If the number is cut short, that place is the end."""
    if place < stop and data[place] < 0x80:
        return data[place], place + 1
    value = shift = 0
    for byte in data[place : min(place + 10, stop)]:
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    return value, stop
