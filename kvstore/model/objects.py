"""Opaque objects: values under string keys, as chains of pages in frame classes of their own.

A value that fits into one page is stored as one page, the *head*. A larger value is a chain: first *pieces*, which are
full pages of data, and last the head with the rest of the data. So the head is sealed last and evicted first. The key
of the head depends only on the salt and the string. The keys of the pieces also depend on the value's nonce. The record
of every page has these fields in place of token ids::

    mark u32 | key bytes u16 | members u16 | value bytes u64 | pieces u32 | number u32 (0: the head)
    | the group, 16 bytes, if ``members`` is not 0 | the string, padded with zeros

Its extra is 4 bytes that distinguish heads from pieces, and the nonce: a stamp, which says which of two values of a key
was put later, and 4 random bytes. Worked example: 600 KiB under "weights/3" become two pieces of 256 KiB and a head
with 88 KiB, in three frames of 256 KiB. A reader of the head can compute the keys of both pieces.

Objects may belong to a *group* of a number of members. A group is *complete* once as many of its members are stored on
the node. A member is only found while its group is complete.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.replica import (
    EXTRA,
    IDENTITY_HEAD_BYTES,
    KEY_BYTES,
    LEAN_IDENTITY_BYTES,
    OBJECT_PAGE_BYTES,
    OBJECT_WIDTHS,
    ROOT,
    FrameClass,
)

KEY_BYTES_MAX = 1000
MEMBERS_MAX = 4096
HEAD_TAG, PIECE_TAG = b"kvoh", b"kvop"
OBJECTS_MODEL = "kvstore.objects"  # ``Layout.model`` of all objects
NONCE_BYTES = 12
STAMP_BYTES = 8
RANDOM_BYTES = NONCE_BYTES - STAMP_BYTES
_MARK = 0x324A424F
_ABOUT = struct.Struct("<IHHQII")
_MEMBERS = slice(IDENTITY_HEAD_BYTES + 6, IDENTITY_HEAD_BYTES + 8)  # the number of members in an identity row
assert _ABOUT.size + KEY_BYTES_MAX == 4 * OBJECT_WIDTHS[1]
assert _ABOUT.size + KEY_BYTES + KEY_BYTES_MAX <= 4 * OBJECT_WIDTHS[2]
assert IDENTITY_HEAD_BYTES + _ABOUT.size + KEY_BYTES == LEAN_IDENTITY_BYTES


def key_hash(root: bytes, name: bytes) -> bytes:
    """Return the 16-byte key of a head. Tests replace this function to show that equal keys of two strings are a
    miss."""
    return hashlib.blake2b(root + name, digest_size=KEY_BYTES, person=b"kvstore.object").digest()


@lru_cache(maxsize=1024)
def object_root(salt: str) -> bytes:
    """Return the 16-byte root of all objects of a salt."""
    return hashlib.blake2b(salt.encode(), digest_size=KEY_BYTES, person=b"kvstore.objects").digest()


def make_nonces(stamp: int, random: bytes) -> list[bytes]:
    """Return new nonces, one for every ``RANDOM_BYTES`` of ``random``.

    Args:
        stamp: the time of the put, in nanoseconds since the epoch. The value of a key with the largest stamp is the
            latest.
    """
    start = stamp.to_bytes(STAMP_BYTES, "little")
    return [start + random[at : at + RANDOM_BYTES] for at in range(0, len(random), RANDOM_BYTES)]


def stamp_of(nonce: bytes) -> int:
    """Return the stamp in a nonce."""
    return int.from_bytes(nonce[:STAMP_BYTES], "little")


class ObjectGroup(NamedTuple):
    """The group of an object: the hash of its name, and its number of members. Both are empty if it has none."""

    hash: bytes = b""
    members: int = 0


NO_GROUP = ObjectGroup()


def group_hash(root: bytes, name: bytes) -> bytes:
    """Return the 16-byte hash of a group's name. Groups of different salts have different roots."""
    return hashlib.blake2b(root + name, digest_size=KEY_BYTES, person=b"kvstore.group").digest()


def group_of(root: bytes, group: object, count: object, keys: int) -> ObjectGroup:
    """Return the group with this name and number of members, for ``keys`` objects of one call.

    If ``group`` is None, the result is ``NO_GROUP``, and ``count`` must be 0. Raises InvalidRequest.
    """
    if isinstance(count, bool) or not isinstance(count, int):
        raise InvalidRequest("count", f"must be an integer (got {type(count).__name__})")
    if group is None:
        if count:
            raise InvalidRequest("count", f"must be 0 without a group (got {count})")
        return NO_GROUP
    name = _encoded("group", group, 1)
    if not 1 <= count <= MEMBERS_MAX:
        raise InvalidRequest("count", f"must be 1 to {MEMBERS_MAX} with a group (got {count})")
    if keys > count:
        raise InvalidRequest("keys", f"must be at most {count}, the count of their group (got {keys})")
    return ObjectGroup(group_hash(root, name), count)


def groups_for(root: bytes, group: object, count: object, keys: int) -> list[ObjectGroup]:
    """Return the group of each of ``keys`` objects of one call. ``group`` is for all of them, or has an entry per key.

    Raises InvalidRequest, as ``group_of``.
    """
    if group is None or isinstance(group, str) or not isinstance(group, Sequence):
        return [group_of(root, group, count, keys)] * keys
    if len(group) != keys:
        raise InvalidRequest("group", f"must have one entry per key (got {len(group)} for {keys} keys)")
    sizes = Counter(name for name in group if name is not None)
    groups = {name: group_of(root, name, count, size) for name, size in sizes.items()}
    return [groups[name] if name is not None else NO_GROUP for name in group]


def encode_name(key: object) -> bytes:
    """Return a caller's key as bytes. Raises InvalidRequest if it is not text, is empty or too long, or is not
    UTF-8."""
    return _encoded("key", key, 1)


def encode_prefix(prefix: object) -> bytes:
    """Return a prefix of keys as bytes; "" is a prefix of all keys. Raises as ``encode_name``."""
    return _encoded("prefix", prefix, 0)


def _encoded(field: str, text: object, bytes_min: int) -> bytes:
    if not isinstance(text, str):
        raise InvalidRequest(field, f"must be text (got {type(text).__name__})")
    try:
        name = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not valid text ({error.reason})") from None
    if not bytes_min <= len(name) <= KEY_BYTES_MAX:
        raise InvalidRequest(field, f"must have {bytes_min} to {KEY_BYTES_MAX} bytes as UTF-8 (got {len(name)})")
    return name


def _sized(name: bytes) -> bool:
    return 0 < len(name) <= KEY_BYTES_MAX


def encode_names(keys: Sequence[object]) -> list[bytes]:
    """Return every key as bytes. Raises as ``encode_name``."""
    try:
        names = [key.encode() for key in keys if type(key) is str]
    except UnicodeEncodeError:
        names = []
    if len(names) == len(keys) and all(map(_sized, names)):
        return names
    return [encode_name(key) for key in keys]  # raises for the first invalid key


def is_object_class(frame_class: FrameClass) -> bool:
    """Return True if frames of this class are for objects, or for pages of a layout with the same geometry."""
    return frame_class.holds_objects


@lru_cache(maxsize=64)
def object_layout(page_bytes: int, width: int) -> Layout:
    """Return the layout of the pages of one class of objects."""
    head_dim = page_bytes // (2 * width)
    return Layout(model=OBJECTS_MODEL, layers=1, head_dim=head_dim, dtype="uint8", page_tokens=width)


def class_for(name: bytes, value_bytes: int, page_bytes_max: int, group: ObjectGroup = NO_GROUP) -> FrameClass:
    """Return the frame class of an object's pages. It takes the least memory; among equal classes, it has the largest
    pages."""
    about_bytes = _ABOUT.size + len(group.hash) + len(name)
    width = next(width for width in OBJECT_WIDTHS if about_bytes <= 4 * width)
    return _class_of(width, value_bytes, page_bytes_max)


@lru_cache(maxsize=256)
def _class_of(width: int, value_bytes: int, page_bytes_max: int) -> FrameClass:
    sizes = [size for size in OBJECT_PAGE_BYTES if size <= page_bytes_max] or [OBJECT_PAGE_BYTES[0]]
    # Requests, record and header of a page cost about as much as 4 KiB of data.
    best = min(reversed(sizes), key=lambda size: (pieces_of(value_bytes, size) + 1) * (size + 4096))
    return FrameClass(best, width, 1)


def pieces_of(value_bytes: int, page_bytes: int) -> int:
    """Return the number of pieces before the head. The head has at least one byte, unless the value is empty."""
    return max(0, value_bytes - 1) // page_bytes


class About(NamedTuple):
    """The facts about an object in the record of its head."""

    name: bytes
    value_bytes: int
    pieces: int
    nonce: bytes
    group: ObjectGroup = NO_GROUP

    def is_whole(self, page_bytes: int) -> bool:
        """Return True if ``pieces`` fits ``value_bytes``, as in every undamaged record."""
        return self.pieces == pieces_of(self.value_bytes, page_bytes)

    def words(self, number: int, width: int) -> bytes:
        """Return the bytes that are stored in place of token ids. Pieces are numbered from 1; the head has number 0."""
        group, members = self.group
        about = _ABOUT.pack(_MARK, len(self.name), members, self.value_bytes, self.pieces, number)
        return (about + group + self.name).ljust(4 * width, b"\0")

    def row(self, root: bytes, width: int, key: bytes) -> bytes:
        """Return the head's identity row; ``key`` is its page key, ``key_hash(root, name)``."""
        return key + root + HEAD_TAG + self.nonce + self.words(0, width)

    def piece_keys(self, root: bytes, width: int) -> Keys:
        """Return the keys of the pieces, in order."""
        words = [self.words(number, width) for number in range(1, self.pieces + 1)]
        hashes = [
            hashlib.blake2b(root + self.nonce + part, digest_size=KEY_BYTES, person=b"kvstore.piece").digest()
            for part in words
        ]
        tokens = np.frombuffer(b"".join(words), np.uint32)
        return Keys(width, root, root, hashes, tokens, [PIECE_TAG + self.nonce] * self.pieces, tag=None)

    def page_keys(self, root: bytes, width: int) -> Keys:
        """Return the keys of all pages as one chain: the pieces, and then the head."""
        pieces, head = self.piece_keys(root, width), self.head_keys(root, width)
        tokens = np.concatenate([pieces.tokens, head.tokens])
        extras = [*(pieces.extras or ()), *(head.extras or ())]
        return Keys(width, root, root, pieces.hashes + head.hashes, tokens, extras, tag=None)

    def head_keys(self, root: bytes, width: int) -> Keys:
        """Return the head's key as a chain of its own, so that the head can be read like any page."""
        tokens = np.frombuffer(self.words(0, width), np.uint32)
        return Keys(width, root, root, [key_hash(root, self.name)], tokens, [HEAD_TAG + self.nonce], tag=None)


def read_row(row: bytes) -> tuple[bytes, About] | None:
    """Return (root, about) if the identity row is that of an object's head, else None."""
    start = IDENTITY_HEAD_BYTES
    if len(row) < start + _ABOUT.size or not row[EXTRA].startswith(HEAD_TAG):
        return None
    mark, name_bytes, members, value_bytes, pieces, number = _ABOUT.unpack_from(row, start)
    start += _ABOUT.size
    name_start = start + KEY_BYTES if members else start
    if mark != _MARK or number or name_start + name_bytes > len(row):
        return None
    name, group = row[name_start : name_start + name_bytes], ObjectGroup(row[start:name_start], members)
    return row[ROOT], About(name, value_bytes, pieces, row[EXTRA].removeprefix(HEAD_TAG), group)


def groups_in(rows: npt.NDArray[np.uint8]) -> dict[int, ObjectGroup]:
    """Return the groups of the heads among these identity rows, by row. The rows may have only ``LEAN_IDENTITY_BYTES``.

    Rows that are not heads, and heads without a group, are left out.
    """
    if rows.shape[1] < LEAN_IDENTITY_BYTES:
        return {}
    found: dict[int, ObjectGroup] = {}
    for row in np.flatnonzero(rows[:, _MEMBERS].any(axis=1)).tolist():
        data = rows[row, :LEAN_IDENTITY_BYTES].tobytes()
        mark, _, members, _, _, number = _ABOUT.unpack_from(data, IDENTITY_HEAD_BYTES)
        if data[EXTRA].startswith(HEAD_TAG) and mark == _MARK and not number:
            found[row] = ObjectGroup(data[IDENTITY_HEAD_BYTES + _ABOUT.size :], members)
    return found


class HeadRows:
    """Reads identity rows ``[n, width]`` that may be heads of objects of one root.

    Attributes:
        value_bytes, pieces, members: the size and number of pieces of each row's object, and the number of members of
            its group (0: none). Valid only where ``name`` is not empty.
    """

    __slots__ = ("value_bytes", "pieces", "members", "_rows", "_width", "_names", "_prefix")

    def __init__(self, rows: npt.NDArray[np.uint8], root: bytes) -> None:
        self._rows, self._width = rows.tobytes(), rows.shape[1]
        self._prefix = root + HEAD_TAG
        start, size = IDENTITY_HEAD_BYTES, _ABOUT.size
        self.value_bytes: list[int] = []
        self.pieces: list[int] = []
        self.members: list[int] = []
        self._names: list[int] = []  # the length of each row's name
        if self._width < start + size:
            rows = np.zeros((len(rows), start + size), np.uint8)
        for mark, name, members, value, pieces, number in _ABOUT.iter_unpack(rows[:, start : start + size].tobytes()):
            self._names.append(name if mark == _MARK and not number else 0)
            self.value_bytes.append(value)
            self.pieces.append(pieces)
            self.members.append(members)

    def key(self, row: int) -> bytes:
        """Return the page key in this row."""
        at = row * self._width
        return self._rows[at : at + KEY_BYTES]

    def name(self, row: int) -> bytes:
        """Return the caller's key; empty if the row is not a head of the root."""
        at, size = row * self._width, self._names[row]
        if self._rows[at + KEY_BYTES : at + KEY_BYTES + len(self._prefix)] != self._prefix:
            return b""
        start = IDENTITY_HEAD_BYTES + _ABOUT.size + (KEY_BYTES if self.members[row] else 0)
        return self._rows[at + start : at + start + size] if start + size <= self._width else b""

    def group(self, row: int) -> ObjectGroup:
        """Return the group of the row's object."""
        start = row * self._width + IDENTITY_HEAD_BYTES + _ABOUT.size
        members = self.members[row]
        return ObjectGroup(self._rows[start : start + KEY_BYTES], members) if members else NO_GROUP

    def nonce(self, row: int) -> bytes:
        """Return the nonce, from which the keys of the pieces are computed."""
        at = row * self._width + EXTRA.start + len(HEAD_TAG)
        return self._rows[at : at + NONCE_BYTES]
