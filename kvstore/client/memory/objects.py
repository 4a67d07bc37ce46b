"""MemoryObjects: opaque objects in this process's memory. A value is one page of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.client.memory.pool import MemoryPage, MemoryPool, Name, RootOwner, room_of
from kvstore.client.objects import ObjectVerbs, compiled, listed, root_of_salt, sources_of
from kvstore.client.scattered import Scattered
from kvstore.errors import InvalidRequest, OutOfSpace
from kvstore.model.objects import OBJECTS_MODEL, encode_name, key_hash


class MemoryObjects(ObjectVerbs):
    """Objects share room with pages, and leave like them."""

    _pool: MemoryPool

    def put_many(self, keys: Sequence[str], values: Sequence[Any], salt: str = "", replace: bool = False) -> list[bool]:
        """See ``ObjectVerbs.put_many``."""
        names, sources = sources_of(keys, values)
        root = root_of_salt(salt)
        for source in sources:
            if source.nbytes > self._pool.capacity_bytes:
                raise InvalidRequest("data", f"has {source.nbytes} bytes: an object has to fit the store's memory")
        stored = [self._put(root, name, source, salt, replace) for name, source in zip(names, sources, strict=True)]
        if None in stored:
            raise OutOfSpace("the store is full of what may not leave: the object does not fit now")
        return [bool(done) for done in stored]

    def _put(self, root: bytes, proof: bytes, source: Scattered, salt: str, replace: bool) -> bool | None:
        """Whether it was stored; None: there is no room."""
        pool, name = self._pool, (root, key_hash(root, proof))
        with pool.held() as now_ns:
            old = pool.pages.get(name)
            if old is not None and not replace:
                return False
            data = np.empty(source.nbytes, np.uint8)
            source.read(0, data)
            data.flags.writeable = False
            if not pool.make_room(room_of(data), name):
                return None
            if old is not None:
                pool.drop(old, "dropped", "deleted")
            pool.add(MemoryPage(name, None, proof, data, 0, 0, now_ns), RootOwner(salt, "", OBJECTS_MODEL, None))
            return True

    def get(self, key: str, out: Any = None, salt: str = "") -> Any:
        """See ``ObjectVerbs.get``."""
        name, root = encode_name(key), root_of_salt(salt)
        target = Scattered.of(out, "out", writable=True) if out is not None else None
        with self._pool.held() as now_ns:
            page = self._found(root, name)
            if page is None:
                return None
            if target is not None and target.nbytes < page.data.nbytes:
                raise InvalidRequest("out", f"has {target.nbytes} bytes, the value has {page.data.nbytes}")
            self._pool.use([page], now_ns)
        if target is None:
            return np.array(page.data)
        target.write(0, page.data)
        return page.data.nbytes

    def size(self, key: str, salt: str = "") -> int | None:
        """See ``ObjectVerbs.size``."""
        name, root = encode_name(key), root_of_salt(salt)
        with self._pool.held():
            page = self._found(root, name)
        return page.data.nbytes if page is not None else None

    def contains(self, keys: str | Sequence[str], salt: str = "") -> Any:
        """See ``ObjectVerbs.contains``."""
        names, root = [encode_name(key) for key in listed(keys)], root_of_salt(salt)
        with self._pool.held():
            found = [self._found(root, name) is not None for name in names]
        return found[0] if isinstance(keys, str) else found

    def delete(self, keys: str | Sequence[str], salt: str = "") -> int:
        """See ``ObjectVerbs.delete``."""
        names, root = dict.fromkeys(encode_name(key) for key in listed(keys)), root_of_salt(salt)
        with self._pool.held():
            pages = [page for name in names if (page := self._found(root, name)) is not None]
            for page in pages:
                self._pool.drop(page, "dropped", "deleted")
        return len(pages)

    def remove(self, pattern: str, salt: str = "") -> int:
        """See ``ObjectVerbs.remove``."""
        expression = compiled(pattern)
        return self.delete([key for key in self.object_keys(salt) if expression.fullmatch(key)], salt)

    def object_keys(self, salt: str = "") -> list[str]:
        """See ``ObjectVerbs.object_keys``."""
        root = root_of_salt(salt)
        with self._pool.held():
            names = [page.proof for page in self._pool.pages.values() if page.name[0] == root]
        return sorted(name.decode(errors="replace") for name in names)

    def _found(self, root: bytes, proof: bytes) -> MemoryPage | None:
        name: Name = root, key_hash(root, proof)
        page = self._pool.pages.get(name)
        return page if page is not None and page.proof == proof else None

    def _check_open(self) -> None:
        self._pool.check_open()
