"""An embedded node and a daemon: the same calls under a seed, good and bad ones, give the same answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Layout, Store
from kvstore.errors import KVStoreError
from tests.helpers.content import FEW, MLA, SMALL, contents
from tests.helpers.processes import Machine

WINDOW = replace(SMALL, model="twin-window", attention="window", window=64)
LAYOUTS = (SMALL, MLA, FEW, WINDOW)
SALTS = ("", "a", "b", "ü", 7, "\ud800")
ADAPTERS = ("", "", "lora")
NAMES = ("o1", "o2", "o/3", "", "ü" * 3, "x" * 1001, 7, "\ud800")
TOKENS: tuple[Any, ...] = ([], [-1], [1.5], "text", None, [2**32], [[1, 2]])
STEPS = 400

Call = Callable[[Store], Any]


def plain(value: Any) -> Any:
    """An answer as something that compares."""
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    if isinstance(value, kvstore.Match):
        return value.pages, value.tokens, value.reason, value.tiers, plain(value.data)
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def outcome(call: Call, store: Store) -> Any:
    """What a call answers, or how it refuses: the kind of error and the field that it names."""
    try:
        return plain(call(store))
    except KVStoreError as error:
        return type(error).__name__, getattr(error, "field", "")


@pytest.fixture
def embedded() -> Iterator[Store]:
    with kvstore.open(dram="96MiB") as store:
        yield store


class Calls:
    """Random calls that mean the same to any store."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def next(self) -> tuple[str, Call]:
        """Its name, and the call."""
        pages = (*[self.put] * 3, *[self.get] * 2, self.shard, self.look, self.lease, self.write, self.read)
        others = (*[self.store_object] * 2, self.ask_object, self.lose_object, self.operate)
        verb = self.random.choice((*pages, *others))
        return verb.__name__, verb()

    def rare(self, good: Any, *bad: Any) -> Any:
        return self.random.choice(bad) if self.random.random() < 0.06 else good

    def cache(self) -> Callable[[Store], kvstore.PrefixCache]:
        layout: Any = self.rare(self.random.choice(LAYOUTS), None, Layout(model="large", layers=99, head_dim=4096))
        salt: Any = self.random.choice(SALTS if self.random.random() < 0.1 else SALTS[:4])
        adapter: Any = self.rare(self.random.choice(ADAPTERS), 5)
        return lambda store: store.cache(layout, salt, adapter)

    def prompt(self) -> tuple[Any, list[bytes] | None, slice]:
        """Tokens of one of few chains, digests, and which pages of theirs."""
        chain, length = self.random.randrange(3), self.random.randrange(1, 130)
        tokens = np.arange(chain, chain + length, dtype=np.uint32)
        tokens[64:] += self.random.randrange(2)  # chains that part
        extras = [b"image"] * (length // 16) if self.random.random() < 0.15 else None
        start = self.rare(0, 1, 3)
        return self.rare(tokens, *TOKENS), self.rare(extras, [b"x"], 7), slice(start, self.random.randrange(1, 9))

    def put(self) -> Call:
        cache, (tokens, extras, part) = self.cache(), self.prompt()
        named, short = self.random.random() < 0.5, self.rare(0, 1)

        def call(store: Store) -> Any:
            at = cache(store)
            keys = at.keys(tokens, extras)
            if named:
                keys = keys[part]
                return at.put(keys, contents(keys, at.layout)[: len(keys) - short] if len(keys) else b"")
            return at.put(tokens, contents(keys, at.layout) if len(keys) else b"", extras)

        return call

    def get(self) -> Call:
        cache, (tokens, extras, part) = self.cache(), self.prompt()
        named, out = self.random.random() < 0.5, self.rare(True, False, b"read-only", np.zeros((3, 10))[:, ::2])

        def call(store: Store) -> Any:
            at = cache(store)
            asked = at.keys(tokens, extras)[part] if named else tokens
            target = np.full((9, at.page_bytes), 7, np.uint8) if out is True else None if out is False else out
            match = at.get(asked, target, extras=None if named else extras)
            return match, target[: match.pages] if out is True else None

        return call

    def shard(self) -> Call:
        cache, (tokens, extras, part) = self.cache(), self.prompt()
        cut = {"rank": self.rare(0, 1, -1, 9), "ranks": self.rare(2, 4, 0), "stage": 0, "stages": self.rare(1, 2, 99)}
        return lambda store: cache(store).get_shard(cache(store).keys(tokens, extras)[part], **cut)

    def look(self) -> Call:
        cache, (tokens, extras, part) = self.cache(), self.prompt()
        named, within = self.random.random() < 0.5, self.rare(5.0, 0, -1, "x")

        def call(store: Store) -> Any:
            at = cache(store)
            if named:
                return at.lookup(at.keys(tokens, extras)[part])
            return at.lookup(tokens, extras), at.prefetch(tokens, within, extras)

        return call

    def lease(self) -> Call:
        cache, (tokens, extras, _) = self.cache(), self.prompt()
        ttl_s, again = self.rare(30.0, 0, -1, 1e9, "x"), self.rare(10.0, 0, None)

        def call(store: Store) -> Any:
            with cache(store).lease(tokens, ttl_s, extras) as lease:
                lease.renew(again)
                pages = [np.array(page) for page in lease.pages]
                return lease.match, pages, [page.flags.writeable for page in lease.pages]

        return call

    def write(self) -> Call:
        cache, (tokens, extras, part) = self.cache(), self.prompt()
        cut = {"rank": self.rare(0, 1, 9), "ranks": self.rare(1, 2, 0), "stages": self.rare(1, 99), "group": "g"}
        cut["ttl_s"] = self.rare(30.0, 0, "x")
        layer_or, skip = self.rare(None, 77, -1, "x"), self.rare(None, 0)

        def call(store: Store) -> Any:
            at = cache(store)
            keys = at.keys(tokens, extras)[part]
            with at.writer(keys, **cut) as writer:
                for layer in range(at.layout.layers):
                    if layer != skip:
                        width = at.layout.layer_bytes // cut["ranks"]
                        rows = contents(keys, at.layout)[:, layer * width : (layer + 1) * width]
                        writer.write_layer(layer if layer_or is None else layer_or, np.ascontiguousarray(rows))
                new = list(writer.pages_new)
            return new, writer.sealed

        return call

    def read(self) -> Call:
        cache, (tokens, extras, part) = self.cache(), self.prompt()
        layer, heads = self.rare(0, 99, -1, "x"), self.rare(None, (0, 1), (1, 0), 5)

        def call(store: Store) -> Any:
            at = cache(store)
            keys = at.keys(tokens, extras)[part]
            keys = keys[: max(1, at.lookup(keys).pages)]
            out = np.zeros((len(keys), at.layout.layer_bytes), np.uint8)
            at.reader(keys, timeout_s=0.01).read_layer(layer, out, heads)
            return out

        return call

    def store_object(self) -> Call:
        names, salt = (
            [self.random.choice(NAMES[: self.rare(4, 8)]) for _ in range(self.random.randrange(1, 3))],
            self.salt(),
        )
        data = [bytes([len(names)]) * self.random.randrange(30_000) for _ in names]
        values: Any = self.rare(data, data[:-1], [None] * len(data), [[data[0], b"more"]] * len(data))
        again = self.random.random() < 0.3
        return lambda store: store.put_many(names, values, salt, replace=again)

    def ask_object(self) -> Call:
        name, salt = self.random.choice(NAMES), self.salt()
        out = self.rare(None, bytearray(3), b"read-only")
        which = self.random.randrange(5)

        def call(store: Store) -> Any:
            if which == 0:
                return store.contains([name, "o1"], salt)
            if which == 1:
                return store.object_keys(salt)
            if which == 2:
                return store.size(name, salt)
            if which == 3:
                buffers = [bytearray(40_000), bytearray(40_000)]
                return store.get_many([name, "o2"], buffers, salt), [bytes(buffer) for buffer in buffers]
            return store.get(name, out, salt)

        return call

    def lose_object(self) -> Call:
        name, salt = self.random.choice(NAMES), self.salt()
        prefix: Any = self.rare("o", "", 7, None)
        names: Any = self.rare([name, "o1"], 7, name)
        if self.random.random() < 0.5:
            return lambda store: store.clear(prefix, salt)
        return lambda store: store.delete(names, salt)

    def salt(self) -> Any:
        return self.rare(self.random.choice(SALTS[:4]), *SALTS[4:])

    def operate(self) -> Call:
        cache, (tokens, extras, part) = self.cache(), self.prompt()
        ttl_s, which = self.rare(60.0, 0, -1, 1e12, "x"), self.random.randrange(8)
        limit, pin_number = self.rare(5, 0, -1), self.rare(5, "x")
        wish: dict[str, Any] = self.random.choice(
            [{}, {"pages": 1, "bytes": 1}, {"percent": 101}, {"pages": 0}, {"tier": "tape", "pages": 1}, {"age_s": -1}]
        )

        def call(store: Store) -> Any:
            if which == 0:
                return store.evict(**wish)
            if which == 1:
                return store.pages(limit=limit, order="none", tier="dram")
            if which == 2:
                return store.unpin(pin_number)
            if which == 3:
                held = [entry for entry in store.layouts() if entry["pages"]]
                return sorted((entry["layout"]["model"], entry["pages"]) for entry in held)
            if which == 4:
                stats = store.stats()
                return stats["state"], stats["leases"], stats["reservations"]
            at = cache(store)
            keys = at.keys(tokens, extras)[part]
            if which == 5:
                gone = store.evict(keys=keys, dry_run=True)
                return {name: gone[name] for name in ("pages", "bytes", "by_tier", "by_tenant", "by_model", "stayed")}
            if which == 6:
                found = [page["tiers"] for page in store.explain(keys)["pages"]]
                listed = store.pages(keys=keys, order="place")
                about = (
                    "position",
                    "priority",
                    "ttl_s",
                    "root",
                    "tier",
                    "bytes",
                    "tokens",
                    "tenant",
                    "model",
                    "holds",
                    "leased",
                    "pinned",
                )
                rows = [[page["key"][:16], *(page[name] for name in about)] for page in listed["pages"]]
                return found, listed["total"], listed["bytes"], sorted(rows)  # the rest of a key is the pool's tag
            pin = store.pin(keys, ttl_s)
            told = [(p["salt"], p["pages"], p["bytes"], p["tiers"]) for p in store.pins()["pins"]]
            return pin["pages"], pin["bytes"], told, store.unpin(pin["pin"])

        return call


def compare(seed: int, embedded: Store, daemon: Store, *refused: str) -> None:
    """Make the calls in both. ``refused``: the fields that the way to ``daemon`` refuses and the other one takes."""
    calls = Calls(seed)
    for step in range(STEPS):
        name, call = calls.next()
        ours, theirs = outcome(call, embedded), outcome(call, daemon)
        assert ours == theirs or theirs in [("InvalidRequest", field) for field in refused], f"step {step}, {name}"
    assert embedded.verify()["findings"] == daemon.verify()["findings"] == []


@pytest.mark.parametrize("seed", range(4))
def test_a_daemon_answers_as_an_embedded_node_does(machine: Machine, embedded: Store, seed: int) -> None:
    machine.serve("n", dram="96MiB", scrub_bytes_per_s=0)
    with machine.connect("n") as daemon:
        compare(seed, embedded, daemon)


def test_a_daemon_over_grpc_answers_as_an_embedded_node_does(machine: Machine, embedded: Store) -> None:
    """All but a list of all objects' keys, and a writer whose first parent is absent: over gRPC both are refused."""
    machine.serve("n", dram="96MiB", listen=f"unix:{machine.shm_dir}/n.sock")
    with kvstore.connect(f"kv+unix://{machine.shm_dir}/n.sock") as daemon:
        compare(9, embedded, daemon, "object_keys", "parent")
