"""What an engine keeps in its arena is found by the other processes of its machine, and read there.

``hbm`` in what an answer found are tokens of pages that some engine has: here mostly another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import kvstore
from engine.memory import mounting
from engine.shell.engine import Engine
from kvstore import Tier
from kvstore.client.device_link import DeviceLink
from kvstore.client.local import hbm
from kvstore.client.local.segment import LocalSegment
from kvstore.client.local.store import LocalStore
from kvstore.client.store import Store
from kvstore.device import cuda
from kvstore.device.host_device import HostDevice, HostMemory
from kvstore.shm import mounted
from kvstore.tier.peer_memory import DeviceFrames
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.device_buffers import InterfaceBuffer, added_device
from tests.helpers.device_frames import fill_frames
from tests.helpers.engines.device import DeviceHost
from tests.helpers.engines.processes import prompt as drawn
from tests.helpers.engines.processes import serve_engine
from tests.helpers.engines.tokens import Lab, Tokens, check_answer, prompt
from tests.helpers.inside import node_of
from tests.helpers.processes import Machine, wait_until

PAGE = 16
PAGES = 6
LONG_NS = 600 * 10**9
EVERYTHING = 1 << 20


@pytest.fixture
def lab(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(machine, monkeypatch) as here:
        yield here


def keeper(lab: Lab, frames: int = 0, preset: str = "tiny-llama", **config: Any) -> Engine:
    """An engine beside node "n" that has mounted its arena; with so many frames."""
    if frames:
        config["arena"] = frames * lab.engine(preset).layout.page_bytes
    store, home = lab.machine.connect("n"), lab.machine.connect("n")
    made = lab.engine(preset, store, home=home, keep_pages=1.0, **config)
    assert made.mounted.number is not None, made.mounted.why
    return made


def in_arena_alone(one: Engine, store: Store, tokens: Tokens, salt: str = "") -> Any:
    """The engine has answered this prompt; its keys, once only its arena has the pages."""
    cache, pages = store.cache(one.layout, salt=salt), len(tokens) // PAGE
    keys = cache.keys(tokens[: pages * PAGE])
    wait_until("all is stored", lambda: cache.lookup(keys).tiers == {Tier.DRAM: pages})
    wait_until("only its arena has it", lambda: _evicted(store, cache, keys) == {Tier.HBM: pages})
    return keys


def _evicted(store: Store, cache: kvstore.PrefixCache, tokens: Any) -> dict[Tier, int]:
    """Where these pages are found, once the pool has none in memory."""
    store.evict(pages=EVERYTHING)
    return cache.lookup(tokens).tiers


def test_another_engine_reads_what_one_keeps_until_that_is_killed(machine: Machine) -> None:
    """Two processes and their node. Of a pool that has lost all of it, nothing is computed again; tokens are equal."""
    machine.serve("n", dram="16MiB")
    owner = serve_engine(machine, node="n", keep_pages="0.9")
    reader = serve_engine(machine, node="n", keep_pages="0")
    store = machine.connect("n")
    one, other = owner.client(), reader.client()
    about = one.status()
    assert about["mounted"]["segment"] is not None and other.status()["mounted"]["why_not"] == "keep_pages is 0"
    cache = store.cache(kvstore.Layout(**about["layout"]["fields"]))
    tokens = drawn(PAGES * PAGE + 3)
    first = one.generate(tokens, max_tokens=8)
    wait_until("only the arena has it", lambda: _evicted(store, cache, tokens) == {Tier.HBM: PAGES})
    match = cache.get(tokens)
    assert match.tiers == {Tier.HBM: PAGES} and match.data is not None
    found = other.generate(tokens, max_tokens=8)
    assert found.usage.cached_tokens == {"hbm": PAGES * PAGE} and found.tokens == first.tokens
    wait_until("who read it has stored it", lambda: cache.lookup(tokens).tiers == {Tier.DRAM: PAGES})
    assert (cache.get(tokens).data == match.data).all(), "what the reader computed with is what it stored"
    told = machine.run("tiers", "--node", "n")
    assert told.returncode == 0 and "hbm" in told.stdout
    wait_until("only the arena has it", lambda: _evicted(store, cache, tokens) == {Tier.HBM: PAGES})
    asked = 0
    while asked < 12:
        if asked == 4:
            owner.kill()
        store.evict(pages=EVERYTHING)
        again = other.generate(tokens, max_tokens=8)
        assert again.tokens == first.tokens and set(again.usage.cached_tokens) <= {"hbm", "dram"}
        asked += 1
    wait_until("the node has noticed", lambda: "hbm" not in store.stats()["tiers"])
    wait_until("nothing is found", lambda: not _evicted(store, cache, tokens))
    last = other.generate(tokens, max_tokens=8)
    assert last.usage.cached_tokens == {} and last.tokens == first.tokens


def test_nobody_writes_where_somebody_reads(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt waits for its frames until the reader has ended; others decode meanwhile."""
    for module in (hbm, mounted):
        monkeypatch.setattr(module, "HOLD_NS", LONG_NS)
    lab.machine.serve("n")
    one, reader = keeper(lab, frames=24), lab.machine.connect("n")
    tokens = prompt(20, 16 * PAGE + 3)
    lab.answers(one, [tokens], 4)
    keys = in_arena_alone(one, reader, tokens)
    mapped = node_of(reader).writable()
    table = mounted.MountedTable.open(mapped.folder, one.mounted.number or 0, mapped.incarnation)
    assert table is not None
    (frame,) = np.flatnonzero([table.key(frame) == mapped.in_pool(keys).hashes[2] for frame in range(table.frames)])
    before = reader.cache(one.layout).get(keys).data
    table.held[frame] = np.uint64((1 << 63) - 1)
    beside = lab.ask(one, prompt(21, 5), 40)
    late = lab.ask(one, prompt(22, 19 * PAGE), 4)
    check_answer(beside.wait())
    assert before is not None and one.status()["requests"]["loading"] == 1
    assert (one.arena.rows(int(frame), 1)[0] == before[2]).all(), "it is as it was"
    assert reader.cache(one.layout).get(keys).pages <= 2, "and nobody begins to read it"
    table.held[frame] = np.uint64(0)
    check_answer(late.wait())


def test_what_only_an_arena_has_is_not_taken_for_stored(lab: Lab) -> None:
    """It is given to the pool before its frames are reused, and so is what another engine computed after it."""
    lab.machine.serve("n")
    one, reader = keeper(lab, frames=24), lab.machine.connect("n")
    cache = reader.cache(one.layout)
    tokens = prompt(40, PAGES * PAGE + 3)
    lab.answers(one, [tokens], 4)
    keys = in_arena_alone(one, reader, tokens)
    other = lab.engine("tiny-llama", lab.machine.connect("n"))
    longer = np.concatenate([tokens, prompt(41, 4 * PAGE)])
    answer = lab.answers(other, [longer], 4)[0]
    assert answer.cached == {"hbm": PAGES * PAGE}
    wait_until("all of it is stored", lambda: cache.lookup(longer).tiers == {Tier.DRAM: PAGES + 4})
    in_arena_alone(one, reader, tokens)
    lab.answers(one, [prompt(42, 15 * PAGE + 3)], 4)
    wait_until("it was demoted", lambda: cache.lookup(keys).tiers == {Tier.DRAM: PAGES})
    assert one.status()["kept_pages"]["demoted"] == PAGES


def test_lossy_pools_and_exact_arenas(lab: Lab) -> None:
    """An engine that stores int8 replicas keeps exact pages, and shows those."""
    lab.machine.serve("n")
    one, reader = keeper(lab, compress="int8"), lab.machine.connect("n")
    tokens = prompt(50, PAGES * PAGE + 3)
    lab.answers(one, [tokens], 4)
    cache = reader.cache(one.layout)
    wait_until("they are known", lambda: cache.lookup(tokens).tiers == {Tier.HBM: PAGES})
    other = lab.engine("tiny-llama", lab.machine.connect("n"))
    assert lab.answers(other, [tokens], 4)[0].cached == {"hbm": PAGES * PAGE}


def test_a_lost_device_takes_its_pages_with_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames on a device that copies late: what others read was there. When it is lost nobody finds them any more."""
    host = DeviceHost(monkeypatch)
    lab.machine.serve("n")
    one, reader = keeper(lab), lab.machine.connect("n")
    tokens = prompt(80, PAGES * PAGE + 3)
    lab.answers(one, [tokens], 4)
    stored = reader.cache(one.layout).get(tokens).data
    keys = in_arena_alone(one, reader, tokens)
    match = reader.cache(one.layout).get(keys)
    assert match.tiers == {Tier.HBM: PAGES} and stored is not None and match.data is not None
    assert (match.data == stored).all()
    host.devices[-1].lose()
    answer = lab.ask(one, prompt(81, 3 * PAGE), 4).wait()
    assert answer.error is not None
    wait_until("it says so", lambda: "lost" in one.status()["mounted"]["why_not"])
    assert not reader.cache(one.layout).get(keys).pages
    wait_until("the node knows", lambda: "hbm" not in reader.stats()["tiers"])


def test_an_engine_loads_from_device_to_device(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that another engine's device has, into frames of an engine whose device reaches that."""
    direct, copy = list[int](), DeviceLink.copy_pieces

    def copied(self: DeviceLink, pieces: Any, after: Any) -> Any:
        direct.append(len(pieces))
        return copy(self, pieces, after)

    monkeypatch.setattr(DeviceLink, "copy_pieces", copied)
    lab.machine.serve("n")
    one, reader, owner = keeper(lab), lab.machine.connect("n"), lab.machine.connect("n")
    assert isinstance(owner, LocalStore)
    tokens = prompt(90, PAGES * PAGE + 3)
    expected = lab.answers(one, [tokens], 4)
    cache = reader.cache(one.layout)
    keys = in_arena_alone(one, reader, tokens)
    data = cache.get(keys).data
    assert data is not None
    one.mounted.end("another one has them")
    source, nbytes = HostDevice("host:9"), one.layout.page_bytes
    memory = source.allocate(PAGES * nbytes, shared=True)
    segment = owner.mount(one.layout, PAGES, DeviceFrames(source, memory.address, nbytes, PAGES * nbytes))
    fill_frames(source, memory, range(PAGES), data, nbytes)
    segment.publish(keys, range(PAGES))
    monkeypatch.setattr(HostDevice, "reach", lambda self, uuid: "")
    host = DeviceHost(monkeypatch)
    two = lab.engine("tiny-llama", lab.machine.connect("n"))
    for each in host.devices:
        cuda.add(each)
    try:
        found = lab.answers(two, [tokens], 4)
    finally:
        for each in host.devices:
            cuda.remove(each)
    assert found[0].cached == {"hbm": PAGES * PAGE} and found[0].tokens == expected[0].tokens
    assert direct, "no byte went through the host"


def test_an_arena_of_a_device_is_memory_of_that_device(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not PyTorch's: so that others open it, and their devices copy from it. It is given back with the engine."""
    source, memories = HostDevice("host:0"), list[HostMemory]()

    def seen_by_torch(memory: HostMemory, nbytes: int, device: str) -> torch.Tensor:
        memories.append(memory)
        return torch.from_numpy(memory.view()[:nbytes])

    monkeypatch.setattr(mounting, "device_of", lambda place: source)
    monkeypatch.setattr(mounting, "tensor_of", seen_by_torch)
    lab.machine.serve("n")
    one, reader = lab.engine("tiny-llama"), lab.machine.connect("n")
    layout, k_dim = one.layout, one.model.geometry.k_dim
    arenas, shown = mounting.arenas_of([layout], [], [4], k_dim, "meta", lab.machine.connect("n"))
    (arena,) = arenas.groups
    assert shown.number is not None and not memories[0].view().any() and arena.pages.device.type == "cpu"
    cache = reader.cache(layout)
    keys = cache.keys(np.arange(2 * PAGE))
    arena.pages[1:3] = 1
    assert shown.show(keys, [1, 2])
    with added_device("host:1", reaches=["host:0"]) as device:
        out = InterfaceBuffer(device, (2, layout.page_bytes))
        assert cache.get(keys, out).tiers == {Tier.HBM: 2}
        assert (out.seen.view(np.float32) == 1).all()
    shown.end("it ends")


def test_what_the_node_was_not_told_of_is_not_shown(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither now nor to the next daemon: the engine does not count those frames among what others read."""
    daemon = machine.serve("n")
    home, reader = machine.connect("n"), machine.connect("n")
    assert isinstance(home, LocalStore)
    segment = home.mount(SMALL, 4)
    segment.pages[:2] = contents(chain(1, 2))
    shown = mounting.MountedArena(segment)
    with monkeypatch.context() as patch:
        patch.setattr(LocalSegment, "_notify", lambda *_: False)
        assert not shown.show(chain(1, 2), [0, 1])
    daemon.kill()
    machine.serve("n")
    assert reader.cache(SMALL).get(chain(1, 2)).pages == 0
    assert shown.show(chain(1, 2), [0, 1])
    assert reader.cache(SMALL).get(chain(1, 2)).tiers == {Tier.HBM: 2}
