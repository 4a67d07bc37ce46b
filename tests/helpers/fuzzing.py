"""What the fuzz test sends: for any method of any service, from its descriptor, bytes of every kind of wrongness."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from google.protobuf import struct_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from tests.helpers.api import layout_message
from tests.helpers.content import LARGE, SMALL

NUMBERS = (0, 1, 2, 3, 15, 16, 64, 255, 1000, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
SIGNED_NUMBERS = (*NUMBERS[:-2], -1, -3, -4, -(1 << 31))
LONG_NUMBERS = (*NUMBERS, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
FLOATS = (0.0, 1.0, -1.0, 0.3, 100.0, 1e9, 1e308, -1e308, 1e-300, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "a",
    "b",
    "*",
    "dram",
    "nvme",
    "all",
    "full",
    "coldest",
    "uint8",
    "0",
    "1",
    "no\0thing",
    "\u2603",
    "x" * 1100,
)
PATTERNS = (".*", "(", "[z-a]", "(a+)+b", "k", "\\", "(?P<x>", "a{99999999999}")
LENGTHS = (0, 1, 3, 4, 15, 16, 17, 64, 68, 128, 256, 1000)
CALLS = (
    "stats",
    "pages",
    "evict",
    "pin",
    "unpin",
    "pins",
    "root",
    "tenants",
    "events",
    "verify",
    "scrub",
    "kv_dump",
    "x",
)
ARGUMENTS = (
    *("keys", "root", "ttl_s", "pin", "salt", "adapter", "model", "fingerprint", "tier", "pages", "bytes", "percent"),
    *("age_s", "dry_run", "limit", "order", "after", "wait_s", "dump", "tokens", "layout", "none"),
)

Good = Callable[[], list[Any]]


class Inputs:
    """Draws requests from ``rng``. ``pool`` are bytes that the node gave away: keys, numbers of leases, ..."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pool: list[bytes] = [bytes(16)]

    def learn(self, value: bytes) -> None:
        """Remember something real, so that it turns up where it does not belong."""
        self.pool = [*self.pool[-50:], value]

    def requests(self, method: MethodDescriptor, good: Good | None) -> list[bytes]:
        """The messages of one call: one, or for a stream as many as come."""
        kind = self.rng.choice(("bytes", "valid", "valid", "mutated", "mutated", "order"))
        if method.client_streaming:
            return self._stream(kind, method, good)
        if good is not None and kind in ("mutated", "order"):
            return [self.mutated(good()[0].SerializeToString())]
        return [self.noise() if kind == "bytes" else self.valid(method.input_type)]

    def _stream(self, kind: str, method: MethodDescriptor, good: Good | None) -> list[bytes]:
        if good is None or kind in ("bytes", "valid"):
            made = [self.noise() if kind == "bytes" else self.valid(method.input_type)]
            return made * self.rng.randint(0, 3)
        messages = [message.SerializeToString() for message in good()]
        if kind == "mutated":
            place = self.rng.randrange(len(messages))
            messages[place] = self.mutated(messages[place])
            return messages
        return self._disordered(messages)

    def _disordered(self, messages: list[bytes]) -> list[bytes]:
        rng, first, rest = self.rng, messages[:1], messages[1:]
        return rng.choice(
            (
                lambda: rest,  # no begin
                list,
                lambda: first + messages,  # begun twice
                lambda: first + rest + first,
                lambda: first + rest + rest,  # too much
                lambda: first,  # too little
                lambda: first + rest[:-1],
                lambda: first + rest[1:],
                lambda: first + rng.sample(rest, len(rest)),
                lambda: first + [b""] * 50 + rest,
                lambda: [*first, self.noise(), *rest],
            )
        )()

    def noise(self) -> bytes:
        """Random bytes."""
        return self.rng.randbytes(self.rng.choice(LENGTHS))

    def mutated(self, message: bytes) -> bytes:
        """A few bytes changed, cut out, put in or doubled."""
        rng, changed = self.rng, bytearray(message)
        for _ in range(rng.randint(1, 4)):
            start = rng.randrange(len(changed) + 1)
            stop = min(len(changed), start + rng.choice((1, 1, 2, 8, 100)))
            how = rng.randrange(5)
            if how == 0:
                changed[start:stop] = rng.randbytes(stop - start)
            elif how == 1:
                del changed[start:stop]
            elif how == 2:
                changed[start:start] = self.noise()
            elif how == 3:
                changed[start:start] = changed[start:stop]
            elif start < len(changed):
                changed[start] ^= 1 << rng.randrange(8)
        return bytes(changed)

    def valid(self, kind: Descriptor) -> bytes:
        """A message of that kind with fields filled at random."""
        return bytes(self._message(kind, 3).SerializeToString())

    def _message(self, kind: Descriptor, depth: int) -> Any:
        rng = self.rng
        if kind.full_name == "google.protobuf.Struct":
            return self._struct()
        if kind.name == "Layout" and rng.random() < 0.7:
            return layout_message(rng.choice((SMALL, LARGE)))
        message = GetMessageClass(kind)()
        for field in kind.fields:
            if rng.random() < 0.25 or (field.message_type is not None and depth == 0):
                continue
            values = [self._value(field, depth) for _ in range(rng.randint(0, 4) if field.is_repeated else 1)]
            if field.is_repeated:
                getattr(message, field.name).extend(values)
            elif field.message_type is not None:
                getattr(message, field.name).CopyFrom(values[0])
            else:
                setattr(message, field.name, values[0])
        return message

    def _value(self, field: FieldDescriptor, depth: int) -> Any:
        rng = self.rng
        if field.message_type is not None:
            return self._message(field.message_type, depth - 1)
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            if field.type == FieldDescriptor.TYPE_BYTES:
                return rng.choice((*self.pool, self.noise(), rng.randbytes(64 * rng.randint(0, 6))))
            return rng.choice((*PATTERNS, *TEXTS)) if field.name == "pattern" else rng.choice(TEXTS)
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return rng.choice(FLOATS)
        if field.cpp_type == FieldDescriptor.CPPTYPE_INT32:
            return rng.choice(SIGNED_NUMBERS)
        return rng.choice(LONG_NUMBERS if field.cpp_type == FieldDescriptor.CPPTYPE_UINT64 else NUMBERS)

    def _struct(self) -> Any:
        made = struct_pb2.Struct()
        made.update({"call": self.rng.choice(CALLS), **self.arguments()})
        return made

    def arguments(self) -> dict[str, Any]:
        """Arguments of an admin call that make little sense."""
        return {self.rng.choice(ARGUMENTS): self.json(2) for _ in range(self.rng.randint(0, 4))}

    def json(self, depth: int) -> Any:
        """Any JSON value."""
        rng = self.rng
        how = rng.randrange(8 if depth else 6)
        if how < 2:
            return rng.choice(TEXTS)
        if how == 2:
            return rng.choice((*self.pool, rng.randbytes(16))).hex()
        if how < 5:
            return rng.choice((*NUMBERS[:10], *FLOATS[:8], -5))
        if how == 5:
            return rng.choice((None, True, False))
        values = [self.json(depth - 1) for _ in range(rng.randint(0, 3))]
        return values if how == 6 else {rng.choice(TEXTS): value for value in values}
