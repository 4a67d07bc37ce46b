"""What worker processes do: ``python -m tests.helpers.workers.pages VERB JSON``.

A worker logs a JSON line for everything that was acknowledged to it, at once and unbuffered, so that what a killed
process had been promised is known. Wrong bytes are logged as ``wrong`` and end it with exit code 3, whatever else
happens. SIGTERM lets it finish what it is at; a line on stdin lets it go on where it waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

import kvstore
from kvstore import Keys, PrefixCache, Store, Tier
from kvstore.client.local import cache as whole_pages
from kvstore.client.local import copying
from kvstore.errors import DeadlineExceeded, InvalidRequest, LeaseBroken, OutOfSpace, Unavailable
from kvstore.model.shard import Shard
from tests.helpers.content import LAYOUTS, Pages, chain, contents, first_wrong, layer_of
from tests.helpers.inside import node_of

Arguments = dict[str, Any]
T = TypeVar("T")

WRONG_BYTES = 3
RETRY_S = 60.0  # how long a worker puts up with a node that is down: several starts in a row

_ended = False


def log(event: str, **fields: Any) -> None:
    """One line, whole or not at all as far as a reader of the log is concerned."""
    os.write(1, (json.dumps({"event": event, **fields}) + "\n").encode())


def wait_for_go() -> str:
    """A line from stdin; the end of stdin is the end of the worker."""
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    return line.strip()


def compare(found: Pages, expected: Pages, what: str) -> None:
    """Wrong bytes are the end."""
    wrong = first_wrong(found, expected)
    if wrong:
        log("wrong", what=what, where=wrong)
        sys.exit(WRONG_BYTES)


def again(call: Callable[[], T]) -> T:
    """The value of ``call``, tried again while the node is away."""
    deadline = time.monotonic() + RETRY_S
    while True:
        try:
            return call()
        except Unavailable as error:
            log("unavailable", error=f"{type(error).__name__}: {error}")
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


@contextlib.contextmanager
def opened(a: Arguments) -> Iterator[tuple[Store, PrefixCache]]:
    """The store and cache that the arguments name."""
    with again(lambda: kvstore.connect(a["node"])) as store:
        yield store, store.cache(LAYOUTS[a.get("layout", "small")], salt=a.get("salt", ""))


def keys_of(a: Arguments, seed: int, pages: int) -> Keys:
    return chain(seed, pages, LAYOUTS[a.get("layout", "small")], a.get("salt", ""))


def bytes_of(a: Arguments, keys: Keys) -> Pages:
    return contents(keys, LAYOUTS[a.get("layout", "small")])


# --- writers --------------------------------------------------------------------------------------------------------


def put(a: Arguments) -> None:
    """Put prompts ``first .. first + count`` of ``pages`` pages, each in ``parts`` turns, as a conversation grows."""
    with opened(a) as (_, cache):
        for seed in range(a["first"], a["first"] + a["count"]):
            put_prompt(a, cache, seed, a["pages"], a.get("parts", 1))
            time.sleep(a.get("pause_s", 0.0))
            if _ended:
                return


def put_prompt(a: Arguments, cache: PrefixCache, seed: int, pages: int, parts: int) -> None:
    """One prompt in ``parts`` turns. Nobody else writes it, so what was new adds up to what is stored."""
    new = 0
    for part in range(1, parts + 1):
        keys = keys_of(a, seed, max(1, pages * part // parts))
        data = bytes_of(a, keys)
        how = {"checksum": a.get("checksum", False), "wait": a.get("wait", False)}
        new += again(lambda keys=keys, data=data, how=how: cache.put(keys, data, **how))
        log("put", seed=seed, pages=max(new, cache.lookup(keys).pages), new=new)


def layers(a: Arguments) -> None:
    """Write prompt ``seed`` layer by layer, as one shard; ``step``: a line on stdin before each step; ``wait``: one
    before anything is reserved, once ``ready`` is logged."""
    with opened(a) as (_, cache):
        if a.get("wait"):
            log("ready")
            wait_for_go()
        write_shard(a, cache)
        step(a)


def write_shard(a: Arguments, cache: PrefixCache) -> None:
    """The layers of one shard, out of the pages themselves; what is another shard's to write is garbage here."""
    shard = shard_of(a)
    keys = keys_of(a, a["seed"], a["pages"])
    replica = any(shard.layout.held_heads(rank, shard.ranks) == shard.heads for rank in range(shard.rank))
    data = bytes_of(a, keys) if not replica else ~bytes_of(a, keys)
    writer = cache.writer(keys, ttl_s=a.get("ttl_s", 30.0), group=a.get("group"), **shard.cut)
    try:
        with writer:
            log("reserved", pages=len(writer.pages_new))
            for i, layer in enumerate(range(*shard.layers)):
                step(a)
                writer.write_layer(layer, shard.part(data)[:, i])
                log("layer", layer=layer)
            step(a)
    except (Unavailable, InvalidRequest) as error:
        log("refused", error=f"{type(error).__name__}: {error}")
    log("sealed", pages=writer.sealed, seen=cache.lookup(keys).pages)


def shard_of(a: Arguments) -> Shard:
    """The shard that the arguments name; without any, all of a page."""
    cut = {"rank": 0, "ranks": 1, "stage": 0, "stages": 1}
    return Shard(LAYOUTS[a.get("layout", "small")], **{name: a.get(name, all_) for name, all_ in cut.items()})


def shards(a: Arguments) -> None:
    """One device: every line on stdin is a shard to write or to read, ``{"do": "write", "seed": 1, "rank": ...}``."""
    with opened(a) as (store, _):
        while True:
            job = json.loads(wait_for_go())
            cache = store.cache(LAYOUTS[job["layout"]])
            if job["do"] == "write":
                write_shard(job, cache)
            else:
                log("got", pages=read_shard(job, cache))


def read_shard(a: Arguments, cache: PrefixCache) -> int:
    """A shard's part of a prompt, in every way there is, all into a page-major arena; returns the pages found."""
    shard = shard_of(a)
    keys = keys_of(a, a["seed"], a["pages"])
    expected = shard.part(bytes_of(a, keys)).reshape(len(keys), -1)
    arena = np.zeros((len(keys), 3, shard.nbytes), np.uint8)
    pages = 0
    for verify in (False, True):
        match = cache.get_shard(keys, arena[:, int(verify)], **shard.cut, verify=verify)
        compare(arena[: match.pages, int(verify)], expected[: match.pages], f"{shard.cut} verify={verify}")
        assert not pages or match.pages == pages, (match, pages)
        pages = match.pages
    reader = cache.reader(keys[:pages], timeout_s=5.0)
    layers = shard.unpacked(arena[:, 2])[:pages]
    for i, layer in enumerate(range(*shard.layers)):
        reader.read_layer(layer, layers[:, i], heads=shard.heads)
    compare(arena[:pages, 2], expected[:pages], f"{shard.cut} layer by layer")
    return pages


def step(a: Arguments) -> None:
    if a.get("step"):
        wait_for_go()


def mixed(a: Arguments) -> None:
    """Everything a writer can do, on prompts of its own from ``first`` on, until SIGTERM or ``count`` prompts."""
    rng = random.Random(a["first"])
    with opened(a) as (_, cache):
        known: list[tuple[int, int]] = []
        for seed in range(a["first"], a["first"] + a.get("count", 1 << 30)):
            pages = rng.randint(1, a.get("pages", 8))
            if seed % 3 == 0:
                put_layers(a, cache, seed, pages)
            else:
                a["checksum"] = seed % 2 == 0
                put_prompt(a, cache, seed, pages, 1 + seed % 2)
            if seed % 5 == 0:
                give_up(a, cache, seed + (1 << 28), pages)
            known.append((seed, pages))
            read_once(a, cache, rng, *rng.choice(known))
            time.sleep(a.get("pause_s", 0.0))
            if _ended:
                return


def put_layers(a: Arguments, cache: PrefixCache, seed: int, pages: int) -> None:
    layout, keys = cache.layout, keys_of(a, seed, pages)
    data = bytes_of(a, keys)

    def write() -> int:
        with cache.writer(keys, ttl_s=2.0) as writer:
            for layer in range(layout.layers):
                writer.write_layer(layer, layer_of(data, layer, layout))
        return writer.sealed

    sealed = again(write)
    # Another try may have been needed: then the pages of an earlier one may be the sealed ones.
    log("put", seed=seed, pages=max(sealed, cache.lookup(keys).pages))


class _GivenUp(RuntimeError):
    """A writer that changes its mind."""


def give_up(a: Arguments, cache: PrefixCache, seed: int, pages: int) -> None:
    """Reserve and begin to write, then revoke."""
    keys = keys_of(a, seed, pages)
    data = bytes_of(a, keys)
    with contextlib.suppress(_GivenUp, Unavailable), cache.writer(keys, ttl_s=2.0) as writer:
        writer.write_layer(0, layer_of(data, 0, cache.layout))
        raise _GivenUp


def race(a: Arguments) -> None:
    """Put prompts ``first .. first + count`` starting each at the very time when others do the same."""
    with opened(a) as (_, cache):
        log("ready")
        start = float(wait_for_go())
        for i in range(a["count"]):
            keys = keys_of(a, a["first"] + i, a["pages"])
            data = bytes_of(a, keys)
            while time.monotonic() < start + i * a["every_s"]:
                pass
            if a.get("layer_wise") and i % 2:
                with cache.writer(keys) as writer:
                    for layer in range(cache.layout.layers):
                        writer.write_layer(layer, layer_of(data, layer, cache.layout))
                log("raced", seed=a["first"] + i, seen=cache.lookup(keys).pages)
            else:
                log(
                    "raced",
                    seed=a["first"] + i,
                    new=cache.put(keys, data, wait=a["wait"]),
                    seen=cache.lookup(keys).pages,
                )


def stopped_put(a: Arguments) -> None:
    """A put that stops itself (SIGSTOP) when its frames are granted and mapped, nothing is copied; then it goes on."""
    from kvstore.client.local.put import LocalPut

    copy = LocalPut._copy

    def stop_and_copy(self: LocalPut, rows: Any, page: int, addresses: Any) -> None:
        log("granted", frames=[tuple(address) for address in addresses])
        for extent, _, _ in addresses:  # mapped, as in the middle of a copy
            self.mapped.dram.extent(extent)
        os.kill(os.getpid(), signal.SIGSTOP)
        copy(self, rows, page, addresses)
        log("copied")

    with opened(a) as (_, cache):
        keys = keys_of(a, a["seed"], a["pages"])
        LocalPut._copy = stop_and_copy  # type: ignore[method-assign]
        try:
            log("sealed", pages=cache.put(keys, bytes_of(a, keys)))
        except Unavailable as error:
            log("refused", error=f"{type(error).__name__}: {error}")
        LocalPut._copy = copy  # type: ignore[method-assign]
        wait_for_go()


# --- readers --------------------------------------------------------------------------------------------------------


def read(a: Arguments) -> None:
    """Read prompts ``first .. first + count`` in every way until SIGTERM; whatever is found must be right."""
    rng = random.Random(a.get("random", 1))
    with opened(a) as (store, cache):
        reads = pages = 0
        logged = 0.0
        while not _ended:
            seed = rng.randrange(a["first"], a["first"] + a["count"])
            pages += read_once(a, cache, rng, seed, a["pages"])
            reads += 1
            if time.monotonic() > logged + 0.02:
                logged = time.monotonic()
                mapped = node_of(store).mapped()
                segment = id(mapped.dram.segment) if mapped is not None else 0
                log("read", reads=reads, pages=pages, segment=segment, misses=node_of(store).misses)
            time.sleep(a.get("pause_s", 0.0))


def stopped_get(a: Arguments) -> None:
    """A get that stops itself (SIGSTOP) when its pages are proven and nothing is copied; then it goes on."""
    shard = shard_of(a)
    copy = copying.copy_runs

    def stop_and_copy(*args: Any) -> Any:
        whole_pages.copy_runs = copying.copy_runs = copy
        log("proven")
        os.kill(os.getpid(), signal.SIGSTOP)
        return copy(*args)

    with opened(a) as (_, cache):
        keys = keys_of(a, a["seed"], a["pages"])
        out = np.zeros((a["pages"], shard.nbytes), np.uint8)
        whole_pages.copy_runs = copying.copy_runs = stop_and_copy
        buffer = out if a["given"] else None
        match = cache.get(keys, buffer) if shard.count == 1 else cache.get_shard(keys, buffer, **shard.cut)
        found = out[: match.pages] if a["given"] else match.data
        assert found is not None
        expected = shard.part(bytes_of(a, keys)).reshape(a["pages"], -1)
        compare(found, expected[: match.pages], "a get that was stopped")
        log("got", pages=match.pages, reason=match.reason)


def read_once(a: Arguments, cache: PrefixCache, rng: random.Random, seed: int, pages: int) -> int:
    """One read of a prompt, in one of the ways there are; returns the pages found."""
    keys = keys_of(a, seed, pages)
    expected = bytes_of(a, keys)
    ways = a.get("ways", ("get", "get", "out", "verify", "lease", "layers"))
    way = rng.choice(ways)
    if way == "lease":
        return read_leased(cache, keys, expected, seed, a.get("ttl_s", 2.0))
    if way == "layers":
        return read_layers(cache, keys, expected, seed)
    out = np.empty((pages, cache.page_bytes), np.uint8) if way == "out" else None
    match = cache.get(keys, out, verify=way == "verify" or None)
    found = out[: match.pages] if out is not None else match.data
    if match.pages:
        assert found is not None
        compare(found, expected[: match.pages], f"{way} of prompt {seed}")
    return match.pages


def read_leased(cache: PrefixCache, keys: Keys, expected: Pages, seed: int, ttl_s: float) -> int:
    try:
        with cache.lease(keys, ttl_s=ttl_s) as lease:
            for page, view in enumerate(lease.pages):
                compare(view, expected[page], f"lease of prompt {seed}, page {page}")
            return len(lease.pages)
    except Unavailable:
        return 0


def read_layers(cache: PrefixCache, keys: Keys, expected: Pages, seed: int) -> int:
    layout = cache.layout
    pages = cache.lookup(keys).pages
    if not pages:
        return 0
    reader = cache.reader(keys[:pages], timeout_s=0.05)
    out = np.empty((pages, layout.layer_bytes), np.uint8)
    for layer in range(layout.layers):
        try:
            reader.read_layer(layer, out)
        except DeadlineExceeded:  # evicted since the lookup
            return 0
        compare(out, layer_of(expected[:pages], layer, layout), f"layer {layer} of prompt {seed}")
    return pages


def follow(a: Arguments) -> None:
    """Read prompt ``seed`` layer by layer while it is being written; a line on stdin before each layer."""
    with opened(a) as (_, cache):
        keys = keys_of(a, a["seed"], a["pages"])
        expected = bytes_of(a, keys)
        reader = cache.reader(keys, timeout_s=a.get("timeout_s", 10.0))
        out = np.empty((a["pages"], cache.layout.layer_bytes), np.uint8)
        log("ready")
        for layer in range(cache.layout.layers):
            step(a)
            reader.read_layer(layer, out)
            compare(out, layer_of(expected, layer, cache.layout), f"layer {layer}")
            log("layer", layer=layer)


def lease(a: Arguments) -> None:
    """Hold a lease on prompt ``seed``. stdin: ``check`` the views, ``renew``, ``release``."""
    with opened(a) as (_, cache):
        keys = keys_of(a, a["seed"], a["pages"])
        expected = bytes_of(a, keys)
        try:
            with cache.lease(keys, ttl_s=a["ttl_s"]) as held:
                log("leased", pages=len(held.pages))
                while (command := wait_for_go()) != "release":
                    if command == "renew":
                        held.renew(a["ttl_s"])
                    for page, view in enumerate(held.pages):
                        compare(view, expected[page], f"leased page {page}")
                    log("checked", pages=len(held.pages), command=command)
            log("released")
        except LeaseBroken as error:
            log("broken", error=str(error))
        wait_for_go()


def stopped_in_index(a: Arguments) -> None:
    """Stop (SIGSTOP) inside a read transaction of the index; afterwards read in all ways."""
    with opened(a) as (store, cache):
        keys = keys_of(a, a["seed"], a["pages"])
        assert cache.get(keys).pages == a["pages"]
        mapped = node_of(store).mapped()
        assert mapped is not None
        before = list(mapped.index.scan(Tier.DRAM))
        held = mapped.index.snapshot()
        log("inside", epoch=mapped.epoch)
        os.kill(os.getpid(), signal.SIGSTOP)
        after = list(held.pop(Tier.DRAM))
        log("resumed", same=len(before) >= a["pages"] and after == before)
        held.clear()
        rng = random.Random(1)
        found = [read_once(a, cache, rng, seed, a["pages"]) for seed in range(a["first"], a["first"] + a["count"])]
        mapped = node_of(store).mapped()
        log("read", pages=sum(found), epoch=mapped.epoch if mapped is not None else 0)


# --- fork -----------------------------------------------------------------------------------------------------------


def fork(a: Arguments) -> None:
    """Fork with an open store (``embedded``: a node of our own). The child tries everything, then waits for stdin."""
    embedded = a.get("embedded")
    shm_dir = os.environ["KVSTORE_SHM_DIR"]
    store = kvstore.open(embedded, dram="16MiB", shm_dir=shm_dir) if embedded else kvstore.connect(a["node"])
    cache = store.cache(LAYOUTS["small"])
    keys = keys_of(a, a["seed"], a["pages"])
    data = bytes_of(a, keys)
    cache.put(keys, data)
    held = cache.lease(keys, ttl_s=a.get("ttl_s", 60.0))
    held.__enter__()
    writer = cache.writer(keys_of(a, a["seed"] + 1, a["pages"]), ttl_s=60.0)
    writer.__enter__()
    log("opened", pid=os.getpid())
    child = os.fork()
    if child == 0:
        in_child(store, cache, keys, data)
        if a.get("child_exits"):
            sys.exit(0)  # as any program ends: with its finalizers
        while True:
            time.sleep(1)
    log("forked", child=child)
    if a.get("child_exits"):
        _, status = os.waitpid(child, 0)
        log("child ended", status=status)
    while wait_for_go() == "check":
        match = cache.get(keys)
        assert match.data is not None
        compare(match.data, data[: match.pages], "after fork")
        more = keys_of(a, a["seed"] + 2, 2)
        log("checked", pages=match.pages, new=cache.put(more, bytes_of(a, more)))


def in_child(store: Store, cache: PrefixCache, keys: Keys, data: Pages) -> None:
    """A forked child is refused in words, whatever it tries."""
    attempts: dict[str, Callable[[], Any]] = {
        "get": lambda: cache.get(keys),
        "lookup": lambda: cache.lookup(keys),
        "put": lambda: cache.put(keys, data),
        "lease": lambda: cache.lease(keys).__enter__(),
        "writer": lambda: cache.writer(keys).__enter__(),
        "reader": lambda: cache.reader(keys, timeout_s=0.5).read_layer(0, bytearray(cache.page_bytes * len(keys))),
        "cache": lambda: store.cache(LAYOUTS["small"]),
        "stats": lambda: store.stats(),
        "evict": lambda: store.evict(pages=1),
        "verify": lambda: store.verify(),
        "pickle": lambda: pickle.dumps(store),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
            log("child", attempt=name, refusal="")
        except InvalidRequest as error:
            log("child", attempt=name, refusal=str(error))
    log("child done", pid=os.getpid())


_WRITERS = (put, layers, shards, mixed, race, stopped_put)
_READERS = (stopped_get, read, follow, lease, stopped_in_index, fork)
VERBS: dict[str, Callable[[Arguments], None]] = {verb.__name__: verb for verb in (*_WRITERS, *_READERS)}


def main() -> None:
    """Run the verb of the command line."""

    def end(*_: object) -> None:
        global _ended
        _ended = True

    signal.signal(signal.SIGTERM, end)
    log("started")
    try:
        VERBS[sys.argv[1]](json.loads(sys.argv[2]))
    except OutOfSpace as error:
        log("full", error=str(error))
        sys.exit(4)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # an interpreter that ends would put back what kills


if __name__ == "__main__":
    main()
