"""LocalObjects: opaque objects on a node of this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvstore.client.buffers import Scattered
from kvstore.client.local.cache import ORDERED, LocalCache
from kvstore.client.local.grants import OVER_QUOTA
from kvstore.client.local.hints import name_objects
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.local.object_batches import (
    Found,
    HeadPut,
    ObjectsPut,
    PiecesPut,
    find_head,
    find_heads,
    planned,
    read_objects,
)
from kvstore.client.objects import ObjectVerbs, listed, names_of, root_of_salt, sources_of, target_of
from kvstore.device.host_memory import empty
from kvstore.errors import DeadlineExceeded, InvalidRequest, OutOfSpace, QuotaExceeded, Unavailable
from kvstore.model.objects import (
    class_for,
    encode_name,
    encode_names,
    encode_prefix,
    object_layout,
    object_root,
    pieces_of,
    read_row,
)
from kvstore.model.replica import ADDRESS_BYTES, FrameClass, Status
from kvstore.wire.control import BATCH_MAX, Op, statuses_bytes

BUSY_PAUSE_S = 0.005
LOOK_PAGES = 8192  # pages of the node examined in one step of a call about all objects
LOOKS_MAX = 4  # passes over all objects in one ``clear``
CACHES_MAX = 256  # caches kept, one per salt and class


class _ObjectCache(LocalCache):
    """Pages of one class and salt that hold objects."""

    def __init__(self, node: LocalNode, page_bytes: int, width: int, salt: str, verify: bool) -> None:
        super().__init__(node, object_layout(page_bytes, width), salt, "", verify)
        self.root = object_root(salt)

    def _name(self, mapped: Mapped, quietly: bool = False, timeout_s: float | None = None) -> None:
        name_objects(mapped, self.root, self.salt, quietly, timeout_s)


class LocalObjects(ObjectVerbs):
    """Finds and reads objects through shared memory; only puts and deletes need the daemon."""

    _node: LocalNode

    def __init__(self) -> None:
        super().__init__()
        self._object_caches: dict[tuple[str, FrameClass, bool], LocalCache] = {}

    def put_many(
        self, keys: Sequence[str], values: Sequence[Any], salt: str = "", replace: bool = False, *, wait: bool = True
    ) -> list[bool]:
        """See ``ObjectVerbs.put_many``."""
        names, sources = sources_of(keys, values)
        root = root_of_salt(salt)
        mapped = self._node.writable()
        if max([source.nbytes for source in sources], default=0) > mapped.header.extent_bytes // 2:
            for name, source in zip(names, sources, strict=True):
                _check_size(mapped, name, source.nbytes)
        name_objects(mapped, root, salt)
        stored = ObjectsPut(mapped, root, names, sources, replace, wait).stored()
        failure: Unavailable | None = None
        for place in [place for place, done in enumerate(stored) if done is None]:
            try:
                stored[place] = _Putting(self, mapped, root, names[place], sources[place], replace).result()
            except Unavailable as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return [bool(done) for done in stored]

    def get(self, key: str, out: Any = None, salt: str = "") -> Any:
        """See ``ObjectVerbs.get``."""
        name, root = encode_name(key), root_of_salt(salt)
        target = Scattered.of(out, "out", writable=True) if out is not None else None
        for _ in (0, 1):  # again if it was replaced or moved
            mapped = self._node.mapped()
            found = find_head(mapped, root, name) if mapped is not None else None
            if mapped is None or found is None:
                continue
            size = found.about.value_bytes
            if not found.about.is_whole(found.frame_class.page_bytes):
                return None  # its record is damaged: no value has that length
            if target is not None and target.nbytes < size:
                raise InvalidRequest("out", f"must have at least {size} bytes for the value (got {target.nbytes})")
            into = target if target is not None else Scattered([empty(size)])
            if self._read(mapped, salt, found, into):
                return size if target is not None else into.parts[0]
        return None

    def get_many(self, keys: Sequence[str], outs: Sequence[Any], salt: str = "") -> list[int]:
        """See ``ObjectVerbs.get_many``."""
        names, root = names_of(keys, outs, "outs"), root_of_salt(salt)
        targets = [target_of(out) for out in outs]
        mapped = self._node.mapped()
        lengths: list[int | None] = [None] * len(names)
        if mapped is not None and ORDERED and not mapped.header.verify_reads:
            lengths = read_objects(mapped, root, names, targets)
        for place, length in enumerate(lengths):
            if length is None:
                lengths[place] = self.get(keys[place], outs[place], salt)
        return [-1 if length is None else length for length in lengths]

    def size(self, key: str, salt: str = "") -> int | None:
        """See ``ObjectVerbs.size``."""
        found = self._found(encode_name(key), root_of_salt(salt))
        return found.about.value_bytes if found is not None else None

    def contains(self, keys: str | Sequence[str], salt: str = "") -> Any:
        """See ``ObjectVerbs.contains``."""
        if isinstance(keys, str):
            return self._found(encode_name(keys), root_of_salt(salt)) is not None
        names, root, mapped = encode_names(listed(keys)), root_of_salt(salt), self._node.mapped()
        found = find_heads(mapped, root, names) if mapped is not None else [None] * len(names)
        return [raw is not None for raw in found]

    def delete(self, keys: str | Sequence[str], salt: str = "") -> int:
        """See ``ObjectVerbs.delete``."""
        return self._delete(list(dict.fromkeys(encode_names(listed(keys)))), root_of_salt(salt))

    def _delete(self, names: list[bytes], root: bytes) -> int:
        deadline, gone = time.monotonic() + self._node.timeout_s, 0
        while names:
            mapped = self._node.mapped()
            heads = find_heads(mapped, root, names) if mapped is not None else [None] * len(names)
            found = [(name, raw) for name, raw in zip(names, heads, strict=True) if raw is not None]
            again: list[bytes] = []
            for start in range(0, len(found), BATCH_MAX):
                part = found[start : start + BATCH_MAX]
                statuses = self._drop([address for _, address in part])
                gone += statuses.count(int(Status.OK))
                again += [name for (name, _), status in zip(part, statuses, strict=True) if status != Status.OK]
            names = again
            if names and time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{len(names)} objects are being moved between tiers")
            time.sleep(BUSY_PAUSE_S if names else 0)
        return gone

    def clear(self, prefix: str, salt: str = "") -> int:
        """See ``ObjectVerbs.clear``."""
        return sum(self.clearing(prefix, salt))

    def clearing(self, prefix: str, salt: str = "") -> Iterator[int]:
        """Clear in steps of bounded work, and yield how many objects each step deleted.

        An object that moves between frames during a pass may be missed. So passes are repeated until no object is left,
        at most ``LOOKS_MAX`` times, since others may put new objects all the time.
        """
        start, root = encode_prefix(prefix), root_of_salt(salt)
        self._node.writable()
        for _ in range(LOOKS_MAX):
            gone = 0
            for names in self._names(root, start):
                deleted = self._delete(names, root)
                gone += deleted
                yield deleted
            if not gone:
                return

    def object_keys(self, salt: str = "") -> list[str]:
        """See ``ObjectVerbs.object_keys``."""
        names = {name for some in self._names(root_of_salt(salt), b"") for name in some}
        return [name.decode(errors="replace") for name in sorted(names)]

    def _check_open(self) -> None:
        self._node.check_open()

    # --- parts ------------------------------------------------------------------------------------------------------

    def _names(self, root: bytes, start: bytes) -> Iterator[list[bytes]]:
        """Yield names of a root's objects that begin with ``start``, one list per ``LOOK_PAGES`` pages of the node. An
        object that is in two tiers, or that moves in the meantime, may be listed twice."""
        mapped = self._node.mapped()
        if mapped is not None:
            mapped.published.take_in(mapped.channel)
        names = dict[bytes, None]()
        for looked, row in enumerate(mapped.object_rows() if mapped is not None else (), 1):
            found = read_row(row) if row is not None else None
            if found is not None and found[0] == root and found[1].name.startswith(start):
                names[found[1].name] = None
            if looked % LOOK_PAGES == 0:
                yield list(names)
                names.clear()
        yield list(names)

    def _found(self, name: bytes, root: bytes) -> Found | None:
        mapped = self._node.mapped()
        return find_head(mapped, root, name) if mapped is not None else None

    def _object_cache(self, salt: str, frame_class: FrameClass, verify: bool) -> LocalCache:
        about = salt, frame_class, verify
        cache = self._object_caches.get(about)
        if cache is None:
            if len(self._object_caches) >= CACHES_MAX:
                self._object_caches.clear()
            cache = _ObjectCache(self._node, frame_class.page_bytes, frame_class.page_tokens, salt, verify)
            self._object_caches[about] = cache
        return cache

    def _read(self, mapped: Mapped, salt: str, found: Found, into: Scattered) -> bool:
        """Copy a value whose head was found; return False if a page of it is missing or not proven."""
        about, frame_class = found.about, found.frame_class
        page_bytes, width = frame_class.page_bytes, frame_class.page_tokens
        start, verify = about.pieces * page_bytes, bool(mapped.header.verify_reads)
        in_place = found.extent is not None and not verify
        if in_place and not found.copy_to(into, start):
            return False
        if in_place and not about.pieces:
            return True
        cache = self._object_cache(salt, frame_class, verify)
        root = cache.root
        if not in_place:
            page = empty((1, page_bytes))
            if not cache.get(about.head_keys(root, width), out=page).pages:
                return False
            into.write(start, page[0, : about.value_bytes - start])
        if not about.pieces:
            return True
        keys, piece = about.piece_keys(root, width), 0
        while piece < about.pieces:
            rows = into.rows(piece * page_bytes, about.pieces - piece, page_bytes)
            straddles = rows is None
            if rows is None:
                rows = empty((1, page_bytes))
            if cache.get(keys[piece : piece + len(rows)], out=rows).pages != len(rows):
                return False
            if straddles:
                into.write(piece * page_bytes, rows[0])
            piece += len(rows)
        return True

    def _drop(self, addresses: list[bytes]) -> bytes:
        mapped = self._node.writable()
        reply = mapped.exchange(Op.DELETE, count=len(addresses), body=(b"".join(addresses),))
        assert len(reply.body) >= statuses_bytes(len(addresses))
        return bytes(reply.body[: len(addresses)])


class _Putting:
    """A put of one object: copied when this is made, sealed when ``result`` returns True."""

    def __init__(
        self, store: LocalObjects, mapped: Mapped, root: bytes, name: bytes, source: Scattered, replace: bool
    ) -> None:
        self._store, self._mapped, self._root, self._name = store, mapped, root, name
        self._source, self._replace = source, replace
        self._deadline = time.monotonic() + mapped.timeout_s
        self._pieces: PiecesPut | None = None
        self._head: HeadPut | None = None
        self._replaced = b""
        self._start()

    def _start(self) -> None:
        found = find_head(self._mapped, self._root, self._name)
        if found is not None and not self._replace:
            self._head = None
            return
        self._replaced = found.address if found is not None else bytes(ADDRESS_BYTES)
        frame_class, about = planned(self._mapped, self._name, self._source.nbytes)
        keys = about.piece_keys(self._root, frame_class.page_tokens) if about.pieces else None
        if keys is not None:
            self._pieces = PiecesPut(self._mapped, keys, frame_class)
            self._pieces.send_from(self._source, about.pieces)
        head = about.head_keys(self._root, frame_class.page_tokens)
        head.parent = keys.hashes[-1] if keys is not None else self._root
        self._head = HeadPut(self._mapped, head, frame_class, self._replaced)
        self._head.send_from(self._source, about.pieces * frame_class.page_bytes)

    def result(self) -> bool:
        """Return whether this put stored the object. Raises QuotaExceeded or OutOfSpace if there is no space."""
        while self._head is not None:
            pieces, head = self._pieces, self._head
            whole = pieces is None or pieces.settled() == pieces.pieces
            if head.settled() and whole:
                return True
            self._drop_pieces()
            if not (head.busy or (self._replace and head.present)):
                if head.present:
                    return False
                if head.refused or (pieces is not None and pieces.refused):
                    raise QuotaExceeded(OVER_QUOTA)
                raise OutOfSpace("the object does not fit now: the store is full of pages that cannot be evicted")
            if time.monotonic() >= self._deadline:
                raise DeadlineExceeded("the stored object is being moved between tiers, or NVMe is being scanned")
            time.sleep(BUSY_PAUSE_S)
            self._pieces = None
            self._start()
        return False

    def _drop_pieces(self) -> None:
        last = self._pieces.last_address() if self._pieces is not None else None
        if last is not None:
            self._store._drop([last])


def _check_size(mapped: Mapped, name: bytes, size: int) -> None:
    """Raise InvalidRequest if a value would not fit even in empty DRAM."""
    extent_bytes, positions = int(mapped.header.extent_bytes), int(mapped.header.positions)
    frame_class = class_for(name, size, extent_bytes)
    frames = positions * (extent_bytes // frame_class.frame_bytes)
    if pieces_of(size, frame_class.page_bytes) >= frames:
        raise InvalidRequest("data", f"must fit the node's DRAM while it is put (got {size} bytes)")
