"""Prefix: how token ids become page keys, and how the pages of a chain are divided into spans.

**Links.** ``link[i] = xxh3_128(link[i-1] + tokens of page i as uint32 little-endian + extra[i])``. ``link[-1]`` is the
root, a hash of layout fingerprint, tenant salt and adapter. A link therefore names a whole prefix, and equal prompts
under two layouts, salts or adapters have no link in common.

**Keys.** xxh3 is fast, but an attacker can find tokens for a given hash. So only the first half of a page's key comes
from its link. The other half is the *tag* of its root: 8 bytes of BLAKE2b, keyed with a secret of the pool. The tag
does not depend on tokens, and a client without the secret cannot find two roots with equal tags. So a client cannot
choose tokens of one root that collide with keys of another root::

    link    9f8e7d6c5b4a3928 1706f5e4d3c2b1a0      any client that knows salt, layout and tokens can compute it
    tag                      5d0c77e1a9b3f264      hash of (secret, root)
    key     9f8e7d6c5b4a3928 5d0c77e1a9b3f264      stored in the index, in records and in NVMe headers

A client can still choose two prompts of the same root that share a key. So every hit is proven: its root, token ids and
media digests are compared with the stored ones (``Keys.identity_bytes``). Roots and media digests are BLAKE2b hashes
and cannot be forged.

**Spans.** A span is a run of consecutive pages of one chain, the unit in which the directory of a cluster is divided.
Spans start at pages 0, 1, 2, 4, 8, 16, 32, and then every 32. The first spans are short, because many prompts share
their first pages, and one long span would assign all of these to a single owner. The name of a span is the fingerprint
of its first page. Each page of an opaque object is a span of its own, because a reader of the object has only the key
of the head.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, repeat
from operator import itemgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout
from kvstore.model.replica import KEY_BYTES, POSITION_MAX

SECRET_BYTES: Final = 16
TAG_BYTES: Final = 8
ARRAY_PAGES: Final = 128  # for this number of pages or more, an array is faster


@lru_cache(maxsize=4096)
def tag_of(secret: bytes, root: bytes) -> bytes:
    """Return the last 8 bytes of the keys of all pages of ``root``."""
    return hashlib.blake2b(root, key=secret, digest_size=TAG_BYTES, person=b"kvstore.tag").digest()


@lru_cache(maxsize=4096)
def veil_of(secret: bytes, root: bytes) -> int:
    """Return the number that the directory of a pool mixes (xor) into the fingerprints of a root's pages.

    Owners of the directory use the veil of the root that a caller names and may read. Only nodes have ``secret``, and
    the veils of two roots differ. So a caller cannot find pages of one root with a request for another root.
    """
    digest = hashlib.blake2b(root, key=secret, digest_size=8, person=b"kvstore.veil").digest()
    return int.from_bytes(digest, "little")


def apply_tag(links: list[bytes], tag: bytes) -> list[bytes]:
    """Return the keys of pages with these links under ``tag``. Keys that already have the tag do not change."""
    if len(links) < ARRAY_PAGES:
        return [link[:-TAG_BYTES] + tag for link in links]
    keys = np.frombuffer(bytearray().join(links), np.uint64).reshape(-1, 2)
    keys[:, 1] = np.frombuffer(tag, np.uint64)
    return list(struct.unpack("16s" * len(links), keys.data))  # three times as fast as a loop


TOKEN_ID_MAX = 2**32 - 1
NO_EXTRA = b"\0" * 16

# Tests replace this with a colliding function to show that a forged collision is a miss.
page_hash = xxhash.xxh3_128_digest

Tokens = npt.NDArray[np.uint32]


def as_tokens(tokens: Any) -> Tokens:
    """Return ``tokens`` (ndarray, list, tuple, range, torch tensor on any device) as a contiguous uint32 array ``[n]``.

    An integer ndarray is cheapest: uint32 is used in place, other widths are converted at memory speed.

    Raises:
        InvalidRequest: empty, not one-dimensional, not integers, negative, or above 2**32 - 1.
    """
    if hasattr(tokens, "detach") and hasattr(tokens, "numpy"):  # a torch tensor, without importing torch
        tokens = tokens.detach().cpu().numpy()
    if not isinstance(tokens, np.ndarray):
        tokens = _from_sequence(tokens)
    if tokens.ndim != 1:
        raise InvalidRequest("tokens", f"must be one-dimensional (got shape {tuple(tokens.shape)})")
    if tokens.size == 0:
        raise InvalidRequest("tokens", "must not be empty")
    if tokens.dtype.kind not in "iu":
        raise InvalidRequest("tokens", f"must be integers (got {tokens.dtype})")
    if tokens.dtype != np.uint32:
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high > TOKEN_ID_MAX:
            bad = low if low < 0 else high
            raise InvalidRequest("tokens", f"must be ids in 0..{TOKEN_ID_MAX} (got {bad})")
    return np.ascontiguousarray(tokens, dtype="<u4")


def _from_sequence(tokens: Any) -> npt.NDArray[Any]:
    if isinstance(tokens, str | bytes) or not hasattr(tokens, "__len__"):
        raise InvalidRequest("tokens", f"must be a sequence of token ids (got {type(tokens).__name__})")
    if len(tokens) == 0:
        raise InvalidRequest("tokens", "must not be empty")
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError, TypeError) as error:
        raise InvalidRequest("tokens", f"must be a flat sequence of integers ({error})") from None
    if array.dtype == object:
        raise InvalidRequest("tokens", f"must be integers in 0..{TOKEN_ID_MAX}")
    return array


def root_key(layout: Layout, salt: str = "", adapter: str = "") -> bytes:
    """Return the 16-byte root of all chains of this layout, tenant salt and adapter."""
    return root_of(layout.fingerprint, salt, adapter)


def root_of(fingerprint: bytes, salt: str, adapter: str) -> bytes:
    """Return the root as ``root_key`` does, from the fingerprint of a layout."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"kvstore.root")
    for part in (fingerprint, salt.encode(), adapter.encode()):
        digest.update(len(part).to_bytes(4, "little"))  # the length makes ("a", "bc") and ("ab", "c") differ
        digest.update(part)
    return digest.digest()


def extra_digest(extra: bytes) -> bytes:
    """Return the 16 bytes that are stored with a page: a digest of the media inside it, zeros if it has none."""
    return hashlib.blake2b(extra, digest_size=16, person=b"kvstore.extra").digest() if extra else NO_EXTRA


def check_extras(extras: Sequence[bytes], pages: int) -> None:
    """Raise InvalidRequest unless ``extras`` has one bytes value for each of ``pages`` pages."""
    sized = hasattr(extras, "__len__") and len(extras) == pages
    if not sized or not all(isinstance(extra, bytes) for extra in extras):
        raise InvalidRequest("extras", f"must be {pages} bytes values, one per full page")


class Keys:
    """Keys of consecutive full pages of one chain, with the token ids that prove a hit. Immutable.

    ``len(keys)`` is the number of pages, ``keys[2:5]`` are pages 2 to 4, and ``list(keys)`` has the 16-byte keys.
    Slices share the caller's token array, which must not change afterwards.

    Attributes:
        hashes: the key of each page, with ``tag``.
        links: the link of each page, without a tag. Links are equal in all pools, and are sent over gRPC.
        parent: the key of the page before the first one; the root if the first one is page 0.
        before: the link of the page before the first one; the root if the first one is page 0.
        tag: the tag of the root in the keys' pool; empty for no pool. A cache replaces the tag with its own. If
            it is None, the keys are not hashes of tokens and cannot have a tag.
        extras: a media digest per page, or None.
        media: the bytes that ``extras`` are digests of, as the caller passed them.
        hints: for a put, the retention hint of each page, one byte per page (``retention``); or empty.
        chain: all links of the chain, and the position of this object's first page; None if they are unknown.
    """

    __slots__ = (
        *("__dict__", "before", "chain", "extras", "hashes", "hints", "links", "media"),
        *("page_tokens", "parent", "root", "tag", "tokens"),
    )

    def __init__(
        self,
        page_tokens: int,
        root: bytes,
        before: bytes,
        links: list[bytes],
        tokens: Tokens,
        extras: list[bytes] | None,
        media: Sequence[bytes] | None = None,
        tag: bytes | None = b"",
        hints: bytes = b"",
        chain: tuple[list[bytes], int] | None = None,
    ) -> None:
        self.chain = chain or ((links, 0) if before == root else None)
        self.page_tokens = page_tokens
        self.root = root
        self.before = before
        self.links = links
        self.tag = tag
        self.parent = before[:-TAG_BYTES] + tag if tag and before != root else before
        self.hashes = apply_tag(links, tag) if tag else links
        self.tokens = tokens
        self.extras = extras
        self.hints = hints
        self.media = media

    @classmethod
    def of(
        cls, tokens: Tokens, page_tokens: int, root: bytes, extras: Sequence[bytes] | None = None, tag: bytes = b""
    ) -> Keys:
        """Return the keys of the full pages of ``tokens`` ``[n]`` uint32. ``extras`` is None, or has a bytes value per
        page.

        Raises:
            InvalidRequest: ``extras`` does not have one bytes value per page.
        """
        pages = len(tokens) // page_tokens
        page_ids = tokens[: pages * page_tokens]
        if extras is not None:
            check_extras(extras, pages)
        data = page_ids.tobytes()
        step = page_tokens * 4
        hashes: list[bytes] = []
        append, digest, key = hashes.append, page_hash, root
        if extras is None:
            for start in range(0, len(data), step):
                key = digest(key + data[start : start + step])
                append(key)
        else:
            for page, extra in enumerate(extras):
                key = digest(key + data[page * step : (page + 1) * step] + extra)
                append(key)
        digests = [extra_digest(extra) for extra in extras] if extras is not None else None
        return cls(page_tokens, root, root, hashes, page_ids, digests, extras, tag)

    def with_tag(self, tag: bytes) -> Keys:
        """Return the keys of the same pages in a pool where their root has this tag."""
        if tag == self.tag or self.tag is None:
            return self
        return self._as(tag, self.hints)

    def hinted(self, hints: bytes) -> Keys:
        """Return these keys with ``hints``; unchanged if ``hints`` is empty."""
        return self._as(self.tag, hints) if hints else self

    def _as(self, tag: bytes | None, hints: bytes) -> Keys:
        parts = self.page_tokens, self.root, self.before, self.links, self.tokens, self.extras, self.media
        return Keys(*parts, tag, hints, self.chain)

    def __len__(self) -> int:
        return len(self.hashes)

    def __iter__(self) -> Any:
        return iter(self.hashes)

    def __getitem__(self, pages: slice) -> Keys:
        if not isinstance(pages, slice):
            raise TypeError("keys: must be sliced; keys.hashes[i] is a single key")
        start, stop, step = pages.indices(len(self.hashes))
        if step != 1:
            raise InvalidRequest("keys", f"must be sliced with step 1 (got {step})")
        stop = max(start, stop)
        before = self.links[start - 1] if start else self.before
        tokens = self.tokens[start * self.page_tokens : stop * self.page_tokens]
        extras = self.extras[start:stop] if self.extras is not None else None
        media = self.media[start:stop] if self.media is not None else None
        chain = (self.chain[0], self.chain[1] + start) if self.chain else None
        parts = self.page_tokens, self.root, before, self.links[start:stop], tokens, extras, media
        return Keys(*parts, self.tag, self.hints[start:stop], chain)

    @property
    def above(self) -> list[bytes] | None:
        """The keys of the pages before the first page, starting with page 0; None if they are unknown."""
        if self.chain is None:
            return None
        links = self.chain[0][: self.chain[1]]
        return apply_tag(links, self.tag) if self.tag else links

    def roots_and_extras(self, start: int, stop: int) -> bytes:
        """Return root and extra of pages ``start`` to ``stop``, 32 bytes each: the part of an identity row between key
        and tokens."""
        if self.extras is None:
            return (self.root + NO_EXTRA) * (stop - start)
        return b"".join([self.root + extra for extra in self.extras[start:stop]])

    @cached_property
    def identity_bytes(self) -> bytes:
        """The identity row of each page, end to end: key, root, extra and tokens, as its record stores them."""
        data, step = self.tokens.tobytes(), 4 * self.page_tokens
        extras = repeat(NO_EXTRA) if self.extras is None else self.extras
        tokens = [data[start : start + step] for start in range(0, len(data), step)]
        return b"".join(chain.from_iterable(zip(self.hashes, repeat(self.root), extras, tokens, strict=False)))

    def columns(self, start: int, stop: int) -> tuple[bytes, bytes, bytes, bytes]:
        """Return the columns of the identity rows of pages ``start`` to ``stop``: keys, the root, extras and tokens."""
        width = self.page_tokens
        extras = NO_EXTRA * (stop - start) if self.extras is None else b"".join(self.extras[start:stop])
        keys, tokens = b"".join(self.hashes[start:stop]), self.tokens[start * width : stop * width].tobytes()
        return keys, self.root, extras, tokens


SPAN_PAGES: Final = 32
FINGERPRINT_BYTES: Final = 8
_NO_END: Final = 1 << 62  # of the last span

Fingerprints = npt.NDArray[np.uint64]


def span_stop(start: int) -> int:
    """Return the page after the last one of the span that starts at page ``start``."""
    stop = max(1, 2 * start) if start < SPAN_PAGES else start + SPAN_PAGES
    return stop if stop < POSITION_MAX else _NO_END


def starts_span(position: int) -> bool:
    """Return True if a page at this position of its chain begins a span. The last span, before ``POSITION_MAX``, has no
    end."""
    return position < POSITION_MAX and (position % SPAN_PAGES == 0 or position & (position - 1) == 0)


def span_start(position: int) -> int:
    """Return the first page of the span that contains this page of a chain."""
    if position < SPAN_PAGES:
        return 0 if position == 0 else 1 << (position.bit_length() - 1)
    position = min(position, POSITION_MAX)
    return position - position % SPAN_PAGES


def fingerprint(key: bytes) -> int:
    """Return the first 8 bytes of a key, the only part that the directory stores."""
    return int.from_bytes(key[:FINGERPRINT_BYTES], "little")


def fingerprints(keys: bytes) -> Fingerprints:
    """Return the fingerprints of many keys. ``keys`` is their concatenation."""
    return np.frombuffer(keys, "<u8").reshape(-1, KEY_BYTES // FINGERPRINT_BYTES)[:, 0].astype(np.uint64)


def spans_of(keys: list[bytes], position: int, before: int) -> list[int]:
    """Return the name of each page's span. The pages must be consecutive in a chain.

    Args:
        position: the first page's position in its chain.
        before: the name of the span that has the preceding page. Ignored if ``position`` is 0.
    """
    spans: list[int] = []
    at, stop, start = position, position + len(keys), span_start(position)
    while at < stop:
        before = fingerprint(keys[at - position]) if at == start else before
        start = span_stop(start)
        spans += [before] * (min(start, stop) - at)
        at = start
    return spans


@dataclass(frozen=True)
class SpanRange:
    """The spans that a range of pages of a chain touches, in order.

    Attributes:
        starts: the first page of each span, which gives its name. The first span may begin before the range.
        firsts, lasts: the first and the last page of the range in each span.
    """

    starts: tuple[int, ...]
    firsts: tuple[int, ...]
    lasts: tuple[int, ...]

    @cached_property
    def _getter(self) -> itemgetter[Any]:
        return itemgetter(*self.starts, *self.lasts)

    def __len__(self) -> int:
        return len(self.starts)

    def names_and_lasts(self, keys: list[bytes]) -> tuple[Fingerprints, Fingerprints]:
        """Return the names of the spans, and the fingerprints of ``lasts``. ``keys`` has the whole chain."""
        both = fingerprints(b"".join(self._getter(keys)))
        return both[: len(self)], both[len(self) :]


@lru_cache(maxsize=256)
def spans_between(first: int, stop: int) -> SpanRange:
    """Return the spans of pages ``first`` to ``stop`` (exclusive) of a chain. The range must not be empty."""
    starts = [span_start(first)]
    while True:
        after = span_stop(starts[-1])
        if after >= stop:
            break
        starts.append(after)
    return SpanRange(tuple(starts), (first, *starts[1:]), (*(start - 1 for start in starts[1:]), stop - 1))


@lru_cache(maxsize=64)
def separate_spans(count: int) -> SpanRange:
    """Return the spans of ``count`` opaque objects: each one is a span of its own."""
    each = tuple(range(count))
    return SpanRange(each, each, each)
