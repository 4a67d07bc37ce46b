"""Opaque objects: values under string keys, as chains of pages in frame classes of their own.

A value that fits one page is that page, the *head*. A larger one is *pieces*, whole pages of data chained one behind
the other, and the head as the last link, with what is left of the data. So the head is sealed last, and evicted first.
The head's key depends on salt and string alone, those of the pieces on a random nonce too. Every page's record holds,
where a prompt's page has its token ids, what proves it::

    mark u32 | key bytes u32 | value bytes u64 | pieces u32 | number u32 (0: the head) | the string, padded with zeros

and, as its extra, 8 bytes that tell heads from pieces and the nonce. Worked example: 600 KiB under "weights/3" become
two pieces of 256 KiB and a head with 88 KiB: three frames of 256 KiB. A reader that has the head knows all three keys.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.replica import EXTRA, IDENTITY_HEAD_BYTES, KEY_BYTES, ROOT, FrameClass

KEY_BYTES_MAX = 1000
PAGE_SIZES = (4096, 16384, 65536, 262144, 1048576)
WIDTHS = (32, 256)  # words of a record for what proves an object: short keys, and those of up to KEY_BYTES_MAX
HEAD_TAG, PIECE_TAG = b"kvobject", b"kvpieces"
OBJECTS_MODEL = "kvstore.objects"  # where a layout has its model
NONCE_BYTES = 8
_MARK = 0x314A424F
_ABOUT = struct.Struct("<IIQII")
assert _ABOUT.size + KEY_BYTES_MAX == 4 * WIDTHS[1]


def key_hash(root: bytes, name: bytes) -> bytes:
    """16 bytes of a head's key. Tests replace it to show that equal keys of two strings are a miss."""
    return hashlib.blake2b(root + name, digest_size=KEY_BYTES, person=b"kvstore.object").digest()


@lru_cache(maxsize=1024)
def object_root(salt: str) -> bytes:
    """16 bytes that start the chains of all objects of a salt."""
    return hashlib.blake2b(salt.encode(), digest_size=KEY_BYTES, person=b"kvstore.objects").digest()


def encode_name(key: object) -> bytes:
    """A caller's key as bytes. Raises InvalidRequest where it is not text, empty, too long or not UTF-8."""
    return _encoded("key", key, 1)


def encode_prefix(prefix: object) -> bytes:
    """What keys begin with, as bytes; "": all of them do. Raises InvalidRequest as ``encode_name``."""
    return _encoded("prefix", prefix, 0)


def _encoded(field: str, text: object, bytes_min: int) -> bytes:
    if not isinstance(text, str):
        raise InvalidRequest(field, f"must be text (got {type(text).__name__})")
    try:
        name = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not valid text ({error.reason})") from None
    if not bytes_min <= len(name) <= KEY_BYTES_MAX:
        raise InvalidRequest(field, f"has {len(name)} bytes as UTF-8, not {bytes_min}..{KEY_BYTES_MAX}")
    return name


def _sized(name: bytes) -> bool:
    return 0 < len(name) <= KEY_BYTES_MAX


def encode_names(keys: Sequence[object]) -> list[bytes]:
    """``encode_name`` of each."""
    try:
        names = [key.encode() for key in keys if type(key) is str]
    except UnicodeEncodeError:
        names = []
    if len(names) == len(keys) and all(map(_sized, names)):
        return names
    return [encode_name(key) for key in keys]  # says which


def is_object_class(frame_class: FrameClass) -> bool:
    """Frames of this class hold objects (or pages of a layout that happens to look the same)."""
    return frame_class.layers == 1 and frame_class.page_tokens in WIDTHS and frame_class.page_bytes in PAGE_SIZES


@lru_cache(maxsize=64)
def object_layout(page_bytes: int, width: int) -> Layout:
    """The layout of the pages of one class of objects."""
    head_dim = page_bytes // (2 * width)
    return Layout(model=OBJECTS_MODEL, layers=1, head_dim=head_dim, dtype="uint8", page_tokens=width)


def class_for(name: bytes, value_bytes: int, page_bytes_max: int) -> FrameClass:
    """The class of an object's pages: the one that takes the least memory, of those equal the largest pages."""
    width = WIDTHS[0] if _ABOUT.size + len(name) <= 4 * WIDTHS[0] else WIDTHS[1]
    return _class_of(width, value_bytes, page_bytes_max)


@lru_cache(maxsize=256)
def _class_of(width: int, value_bytes: int, page_bytes_max: int) -> FrameClass:
    sizes = [size for size in PAGE_SIZES if size <= page_bytes_max] or [PAGE_SIZES[0]]
    # A page costs about 4 KiB in addition to its bytes: its share of requests, record and header.
    best = min(reversed(sizes), key=lambda size: (pieces_of(value_bytes, size) + 1) * (size + 4096))
    return FrameClass(best, width, 1)


def pieces_of(value_bytes: int, page_bytes: int) -> int:
    """Pages before the head: the head holds the rest, which is nothing only where the value is empty."""
    return max(0, value_bytes - 1) // page_bytes


class About(NamedTuple):
    """What an object's head says of it."""

    name: bytes
    value_bytes: int
    pieces: int
    nonce: bytes

    def is_whole(self, page_bytes: int) -> bool:
        """Whether it has as many pieces as its value needs. A damaged record says anything."""
        return self.pieces == pieces_of(self.value_bytes, page_bytes)

    def words(self, number: int, width: int) -> bytes:
        """What stands in place of token ids; ``number`` counts the pieces from 1, the head is 0."""
        about = _ABOUT.pack(_MARK, len(self.name), self.value_bytes, self.pieces, number)
        return (about + self.name).ljust(4 * width, b"\0")

    def row(self, root: bytes, width: int) -> bytes:
        """The head's identity row."""
        return key_hash(root, self.name) + root + HEAD_TAG + self.nonce + self.words(0, width)

    def piece_keys(self, root: bytes, width: int) -> Keys:
        """Keys of the pieces, in order."""
        words = [self.words(number, width) for number in range(1, self.pieces + 1)]
        hashes = [
            hashlib.blake2b(root + self.nonce + part, digest_size=KEY_BYTES, person=b"kvstore.piece").digest()
            for part in words
        ]
        tokens = np.frombuffer(b"".join(words), np.uint32)
        return Keys(width, root, root, hashes, tokens, [PIECE_TAG + self.nonce] * self.pieces, tag=None)

    def head_keys(self, root: bytes, width: int) -> Keys:
        """The head as a chain of its own: to read it like any page."""
        tokens = np.frombuffer(self.words(0, width), np.uint32)
        return Keys(width, root, root, [key_hash(root, self.name)], tokens, [HEAD_TAG + self.nonce], tag=None)


def read_row(row: bytes) -> tuple[bytes, About] | None:
    """(root, about) where an identity row is that of an object's head."""
    start = IDENTITY_HEAD_BYTES
    if len(row) < start + _ABOUT.size or not row[EXTRA].startswith(HEAD_TAG):
        return None
    mark, name_bytes, value_bytes, pieces, number = _ABOUT.unpack_from(row, start)
    if mark != _MARK or number or start + _ABOUT.size + name_bytes > len(row):
        return None
    name = row[start + _ABOUT.size : start + _ABOUT.size + name_bytes]
    return row[ROOT], About(name, value_bytes, pieces, row[EXTRA].removeprefix(HEAD_TAG))


class HeadRows:
    """Identity rows ``[n, width]`` that may be heads of objects of one root: what each says of its object.

    Attributes:
        value_bytes, pieces: of each row's object; they mean something where ``name`` says so.
    """

    __slots__ = ("value_bytes", "pieces", "_rows", "_width", "_names", "_prefix")

    def __init__(self, rows: npt.NDArray[np.uint8], root: bytes) -> None:
        self._rows, self._width = rows.tobytes(), rows.shape[1]
        self._prefix = root + HEAD_TAG
        start, size = IDENTITY_HEAD_BYTES, _ABOUT.size
        self.value_bytes: list[int] = []
        self.pieces: list[int] = []
        self._names: list[int] = []  # their lengths
        if self._width < start + size:
            rows = np.zeros((len(rows), start + size), np.uint8)
        for mark, name, value, pieces, number in _ABOUT.iter_unpack(rows[:, start : start + size].tobytes()):
            self._names.append(name if mark == _MARK and not number else 0)
            self.value_bytes.append(value)
            self.pieces.append(pieces)

    def key(self, row: int) -> bytes:
        """The key it is stored under."""
        at = row * self._width
        return self._rows[at : at + KEY_BYTES]

    def name(self, row: int) -> bytes:
        """The caller's key; empty where the row is not a head of that root."""
        at, size = row * self._width, self._names[row]
        if self._rows[at + KEY_BYTES : at + KEY_BYTES + len(self._prefix)] != self._prefix:
            return b""
        at += IDENTITY_HEAD_BYTES + _ABOUT.size
        return self._rows[at : at + size] if size <= self._width - IDENTITY_HEAD_BYTES - _ABOUT.size else b""

    def nonce(self, row: int) -> bytes:
        """What the keys of its pieces hang on."""
        at = row * self._width + EXTRA.start + len(HEAD_TAG)
        return self._rows[at : at + NONCE_BYTES]
