"""MemoryWriter and MemoryReader: pages written and read layer by layer in this process's memory."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import numpy as np

from kvstore.client.buffers import Rows
from kvstore.client.memory.pool import Frame, MemoryPool, RootOwner, before, named
from kvstore.client.reader import Reader
from kvstore.client.writer import Writer
from kvstore.errors import OutOfSpace
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.shard import Shard


class MemoryWriter(Writer):
    """A writer into arrays of its own, which become the pages."""

    def __init__(
        self, pool: MemoryPool, owner: RootOwner, shard: Shard, keys: Keys, ttl_s: float, group: str | int | None
    ) -> None:
        super().__init__(shard, keys, ttl_s, group)
        self._pool = pool
        self._owner = owner
        self._frames: list[Frame] = []  # of pages_new

    def _reserve(self) -> None:
        pool, keys, shard = self._pool, self._keys, self._shard
        page_bytes, page_tokens = self._layout.page_bytes, self._layout.page_tokens
        with pool.held() as now_ns:
            pool.use(pool.prefix(keys)[0], now_ns)
            parent, until_ns = before(keys), now_ns + self._ttl_ms * 1_000_000
            position = pool.position_behind(parent)
            for i, (name, proof) in enumerate(named(keys)):
                if name not in pool.pages:
                    about = parent, proof, np.empty(page_bytes, np.uint8), page_tokens, position + i, self._owner
                    hint = keys.hints[i] if keys.hints else 0
                    frame = pool.reserve(Frame(name, *about, self._group, shard.count, until_ns, hint), shard.number)
                    if frame is None:
                        break
                    self.pages_new.append(i)
                    self._frames.append(frame)
                parent = name
            else:
                return
        if not self._frames:
            raise OutOfSpace("no frame could be reserved: the store is full, or another writer writes as this shard")

    def _storing(self) -> AbstractContextManager[None]:
        self._pool.check_open()
        return contextlib.nullcontext()

    def _store_layer(self, start: int, rows: Rows) -> None:
        stop = start + self._shard.width
        for page, frame in zip(self.pages_new, self._frames, strict=False):
            frame.data[start:stop] = rows[page]

    def _store_page(self, page: int, rows: Rows) -> None:
        for frame in self._frame(page):
            self._shard.part(frame.data[None])[0] = rows

    def _store_range(self, page: int, offset: int, row: Rows) -> None:
        for frame in self._frame(page):
            frame.data[offset : offset + len(row)] = row

    def _frame(self, page: int) -> list[Frame]:
        """The frame of one new page; none once this has been left."""
        return [frame for number, frame in zip(self.pages_new, self._frames, strict=False) if number == page]

    def _show(self, page: int | None) -> None:
        for frame, written in zip(self._frames, self._written, strict=False):
            leading = self._layout.layers if written.all() else int(written.argmin())
            frame.progress[self._shard.number] = leading

    def _seal(self) -> None:
        frames, self._frames = self._frames, []
        with self._pool.held() as now_ns:
            sealed = [self._pool.seal(frame, self._shard.number, now_ns) for frame in frames]
        self.sealed = sum(sealed)

    def _revoke(self) -> None:
        frames, self._frames = self._frames, []
        if not self._pool.closed:
            with self._pool.held():
                for frame in frames:
                    self._pool.give_up(frame)


class MemoryReader(Reader):
    """A reader of pages and of frames that are being written."""

    PAUSES_S = (1e-4, 5e-3)

    def __init__(self, pool: MemoryPool, layout: Layout, keys: Keys, timeout_s: float) -> None:
        super().__init__(layout, keys, timeout_s)
        self._pool = pool
        self._named = list(named(keys))

    def _read(self, page: int, layer: int, start: int, stop: int, target: Rows) -> int:
        got = 0
        with self._pool.held():
            for name, proof in self._named[page:]:
                found = self._pool.pages.get(name)
                data = found.data if found is not None and found.proof == proof else self._written(name, proof, layer)
                if data is None:
                    break
                target[page + got] = data[start:stop]
                got += 1
        return got

    def _written(self, name: tuple[bytes, bytes], proof: bytes, layer: int) -> Rows | None:
        frames = self._pool.frames.get(name, ())
        return next((frame.data for frame in frames if frame.proof == proof and frame.shows(layer)), None)
