"""A client of a node that runs under any version of kvstore: ``python -P any_version.py ADDRESS SALT``.

Only what users may call is used here. A JSON line on stdin is a call, ``{"do": "put", "seed": 1, "pages": 8}``; a JSON
line on stdout its answer. What is stored follows from the seed alone: versions may differ in how they make keys.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

import kvstore

LAYOUT = kvstore.Layout(model="upgrade", layers=4, kv_heads=4, head_dim=32, dtype="uint8", page_tokens=16)
STEP = np.uint64(0x9E3779B97F4A7C15)


def tokens_of(seed: int, pages: int) -> npt.NDArray[np.uint32]:
    """So many full pages and one more token; a longer prompt of a seed begins with the shorter ones."""
    places = np.arange(pages * LAYOUT.page_tokens + 1, dtype=np.uint64) + (np.uint64(seed + 1) << np.uint64(32))
    return (places * STEP >> np.uint64(17)).astype(np.uint32)


def bytes_of(seed: int, pages: int) -> npt.NDArray[np.uint8]:
    """``[pages, page_bytes]``: every word another one."""
    words = np.arange(pages * LAYOUT.page_bytes // 8, dtype=np.uint64) + (np.uint64(seed + 1) << np.uint64(40))
    return (words * STEP).view(np.uint8).reshape(pages, LAYOUT.page_bytes)


def object_of(seed: int) -> bytes:
    """The value of object ``o<seed>``."""
    return bytes_of(seed, 3).tobytes()[: 30_000 + seed]


class Client:
    """A connection and what it holds. Every method is a call, see the top of this file."""

    def __init__(self, address: str, salt: str) -> None:
        self.store = kvstore.connect(address)
        self.salt = salt
        self.cache = self.store.cache(LAYOUT, salt=salt)
        self.leases = contextlib.ExitStack()
        self.lease: Any = None
        self.writer: Any = None

    def where(self) -> dict[str, Any]:
        """Which kvstore this is."""
        return {"file": kvstore.__file__}

    def put(self, seed: int, pages: int) -> dict[str, Any]:
        """Store a prompt."""
        return {"new": self.cache.put(tokens_of(seed, pages), bytes_of(seed, pages))}

    def get(self, seed: int, pages: int) -> dict[str, Any]:
        """What is stored of it; ``wrong``: pages whose bytes are not right."""
        out = np.zeros((pages, LAYOUT.page_bytes), np.uint8)
        match = self.cache.get(tokens_of(seed, pages), out=out)
        found = int(match.pages)
        wrong = (out[:found] != bytes_of(seed, pages)[:found]).any(axis=1).sum()
        return {"pages": found, "wrong": int(wrong), "tiers": {str(tier): n for tier, n in match.tiers.items()}}

    def lookup(self, seed: int, pages: int) -> dict[str, Any]:
        """How much is stored of it."""
        return {"pages": int(self.cache.lookup(tokens_of(seed, pages)).pages)}

    def hold(self, seed: int, pages: int) -> dict[str, Any]:
        """Take a lease."""
        self.lease = self.leases.enter_context(self.cache.lease(tokens_of(seed, pages), ttl_s=60.0))
        return self.look(seed, pages)

    def look(self, seed: int, pages: int) -> dict[str, Any]:
        """Read through the lease."""
        found = len(self.lease.pages)
        wrong = sum(bool((np.asarray(self.lease.pages[i]) != bytes_of(seed, pages)[i]).any()) for i in range(found))
        self.lease.check()
        return {"pages": found, "wrong": wrong}

    def release(self) -> dict[str, Any]:
        """End it."""
        self.leases.close()
        return {}

    def write(self, seed: int, pages: int, seal: bool = True, whole: bool = True) -> dict[str, Any]:
        """Store a prompt layer by layer; or write it, or half of it, and leave the rest to ``seal``."""
        self.writer = self.cache.writer(tokens_of(seed, pages)).__enter__()
        data = bytes_of(seed, pages)
        for layer in range(LAYOUT.layers if whole else LAYOUT.layers // 2):
            start, stop = LAYOUT.byte_range(layer)
            self.writer.write_layer(layer, np.ascontiguousarray(data[self.writer.pages_new, start:stop]))
        return self.seal() if seal else {"new": len(self.writer.pages_new)}

    def seal(self) -> dict[str, Any]:
        """End the write."""
        self.writer.__exit__(None, None, None)
        return {"sealed": self.writer.sealed}

    def store_object(self, seed: int) -> dict[str, Any]:
        """An opaque object."""
        return {"stored": bool(self.store.put(f"o{seed}", object_of(seed), salt=self.salt))}

    def read_object(self, seed: int) -> dict[str, Any]:
        """Whether it is there, and right."""
        found = self.store.get(f"o{seed}", salt=self.salt)
        return {"there": found is not None, "wrong": found is not None and bytes(found) != object_of(seed)}

    def delete_object(self, seed: int) -> dict[str, Any]:
        """And gone."""
        return {"deleted": int(self.store.delete(f"o{seed}", salt=self.salt))}

    def evict(self) -> dict[str, Any]:
        """All that may leave DRAM leaves it."""
        self.store.evict(pages=1 << 20)
        return {}

    def generate(self, address: str, tokens: list[int], **how: Any) -> dict[str, Any]:
        """Ask an engine."""
        from engine.client import EngineClient

        with EngineClient(address) as engine:
            answer = engine.generate(np.array(tokens, np.uint32), ignore_eos=True, **how)
        cached = sum(answer.usage.cached_tokens.values())
        return {"tokens": list(answer.tokens), "prefill": answer.usage.prefill_engine, "cached": cached}

    def stats(self) -> dict[str, Any]:
        """Pages of each tier."""
        return {name: tier["pages"] for name, tier in self.store.stats()["tiers"].items()}


def main() -> None:
    """Answer until stdin ends."""
    client = Client(*sys.argv[1:])
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer = getattr(client, call.pop("do"))(**call)
        except kvstore.errors.KVStoreError as error:
            answer = {"error": type(error).__name__, "reason": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
