"""A machine that loses power, is killed, or is rebooted, under one seed: a real node over disks that forget.

Nothing runs in the background here: the mover steps when the test, or a client that waits for frames, says so. What a
step of a disk interrupts (``FaultyDisk.cut_at``) stays undone. What the test knows is ``World``'s to judge:

``stored``   every page that was ever put, by key, with its only right bytes
``durable``  keys that NVMe's index held when the last step ended that was not cut short: their save was reported

After a power loss every page of ``durable`` has to be there whose record still said SEALED when the power went.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import Layout
from kvstore.client.local.node import LocalNode
from kvstore.client.local.store import LocalStore
from kvstore.config import node_config
from kvstore.errors import Unavailable
from kvstore.model.replica import Address, FrameState, Tier
from kvstore.node.dispatch import InProcessChannel
from kvstore.node.embedded import EmbeddedNode
from kvstore.node.node import Node
from kvstore.tier.nvme import frame_header, geometry
from kvstore.tier.nvme.disk import aligned_buffer
from kvstore.tier.nvme.frame_header import FrameHeader
from kvstore.wire.control import Message
from tests.helpers.content import chain, contents, first_wrong, mismatch
from tests.helpers.nvme.faulty_disk import FaultyDisk, PowerCut
from tests.helpers.nvme.memory_disk import MemoryDisk

# Two classes of frames, so that extents are taken from one for the other, and pages in them moved.
NARROW = Layout(model="power", layers=4, kv_heads=1, head_dim=32, dtype="uint8", page_tokens=16)
WIDE = Layout(model="power-wide", layers=3, kv_heads=2, head_dim=32, dtype="uint8", page_tokens=32)
assert (NARROW.page_bytes, WIDE.page_bytes) == (4 << 10, 12 << 10)
LAYOUTS = (NARROW, WIDE)

DRAM_BYTES, DRAM_EXTENT_BYTES, NVME_EXTENT_BYTES = 256 << 10, 32 << 10, 128 << 10
PROMPTS, PAGES_MAX = 12, 14  # of each layout
ROOMY_BYTES, TIGHT_BYTES = 8 << 20, 1 << 20  # of NVMe: more than all of them together, and less than either layout's


class Clock:
    """``time.monotonic_ns`` in a world where time passes faster: ages decide what is evicted, and which class gives."""

    def __init__(self) -> None:
        self.passed_ns = 0
        self._real = time.monotonic_ns

    def __call__(self) -> int:
        """Now."""
        return self._real() + self.passed_ns


class Disks:
    """Stands in for ``FileDisk`` in the modules that open targets: disks in memory, by path."""

    def __init__(self) -> None:
        self.by_path: dict[str, FaultyDisk] = {}

    def open(self, path: Any, size_bytes: int, *, writable: bool = True, **_: Any) -> MemoryDisk:
        """The disk of that path; for who only reads, a view of it that never fails."""
        disk = self.by_path[str(path)]
        assert disk.size_bytes == size_bytes
        if writable:
            return disk
        view = MemoryDisk(4096, str(path))
        view.size_bytes, view.data = size_bytes, disk.data
        return view


class _Client:
    """The node as its client has it (``client.local.node.Embedded``); it does not end the node."""

    def __init__(self, node: EmbeddedNode) -> None:
        self._node = node
        self.sessions: list[InProcessChannel] = []

    def channel(self) -> InProcessChannel:
        """See ``Embedded``."""
        self.sessions.append(self._node.channel())
        return self.sessions[-1]

    def close(self) -> None:
        """See ``Embedded``."""


class _StopAfter(threading.Event):
    """Set after it was asked ``count`` times."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def is_set(self) -> bool:
        """See ``Event``."""
        self._count -= 1
        return self._count < 0


class World:
    """One machine with one node, through all its lives. See the module."""

    def __init__(self, seed: int, shm_dir: Path, disks: Disks, clock: Clock) -> None:
        self.random = random.Random(seed)
        self.clock = clock
        self.disks = disks
        self.shm_dir = shm_dir
        self.roomy = seed % 2 == 0
        self.kind = 0  # of layout that is put for a while
        self.stored: dict[bytes, Any] = {}
        self.named: dict[tuple[str, Address], bytes] = {}
        self.prompts: dict[tuple[int, int], int] = {}  # (layout, prompt) -> pages ever put
        self.acknowledged: dict[tuple[int, int], int] = {}  # those that nothing but a power loss may take
        self.parents: dict[bytes, bytes] = {}
        self.durable: set[bytes] = set()
        self.claimed: set[bytes] = set()  # by NVMe's index, after the last step
        self.evicted: set[bytes] = set()  # from NVMe, in this life
        self.happened: Counter[str] = Counter()
        count = self.random.choice((1, 2)) if self.roomy else 1
        size = (ROOMY_BYTES if self.roomy else TIGHT_BYTES) // count
        disks.by_path = {f"/disk{i}": FaultyDisk(size, seed * 10 + i, f"/disk{i}") for i in range(count)}
        self.settings: dict[str, Any] = {
            "name": "n",
            "dram": DRAM_BYTES,
            "extent": DRAM_EXTENT_BYTES,
            "nvme": [f"{path}:{size}" for path in disks.by_path],
            "nvme_extent": NVME_EXTENT_BYTES,
            "shm_dir": str(shm_dir),
            "checkpoint_s": 1e6,  # only when we say so
            "demote_at": self.random.choice((0, 0.5, 1)),
            "promote_after": self.random.choice((1, 2)),
        }

    # --- lives ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The node is started; the scan has not begun.

        Raises:
            PowerCut: in the middle of that.
        """
        self.embedded = EmbeddedNode(Node.start(node_config(**self.settings)))
        self.node: Node = self.embedded.node
        self.mover = self.embedded._background.mover
        self.scanner = self.embedded._background.scanner
        self.embedded._dispatcher.wake = self._wake
        exchange = self.embedded._dispatcher.exchange

        def exchange_or_die(session: int, message: Message) -> bytes | None:
            try:
                return exchange(session, message)
            except PowerCut:
                self._cut()
                raise

        self.embedded._dispatcher.exchange = exchange_or_die  # type: ignore[method-assign]
        self.client = _Client(self.embedded)
        while self.node.populate_next():
            pass
        self.store = LocalStore(LocalNode(self.node.folder, embedded=self.client, timeout_s=5.0))
        self.caches = [self.store.cache(layout) for layout in LAYOUTS]
        self.claimed, self.evicted = set(), set()
        self.note_durable()

    def _cut(self) -> None:
        for session in self.client.sessions:
            session._closed = True  # whoever cleans up behind a PowerCut reaches nobody

    def _wake(self) -> None:
        if self.random.random() < 0.8:
            self.mover.step()
            self.note_durable()

    def end(self, how: str) -> None:
        """``kill`` (the files stay as they are) or ``power`` (unsynced writes and DRAM are gone).

        After a ``kill`` everything acknowledged is expected again, after ``power`` what was durable.
        """
        self.happened[f"end {how}"] += 1
        self._count()
        self.durable &= self.sealed_on_nvme()
        self._cut()
        for session in self.client.sessions:
            self.node.sessions.leave(session.session)
        self.store.close()
        del self.node.performer.stores[Tier.NVME]  # a dead process closes no device
        self.node.stop()
        if how == "power":
            self._reboot()

    def stop(self) -> None:
        """End in peace; often the machine is rebooted then.

        Raises:
            PowerCut: in the middle of the checkpoint; the node still has to ``end``.
        """
        self.store.close()
        self.mover.checkpoint()
        self.mover.run_lanes()
        self.note_durable()
        self.happened["end stop"] += 1
        self._count()
        nvme = self.node.performer.stores.pop(Tier.NVME)
        self.node.stop()
        assert nvme is not None
        reboot = self.random.random() < 0.7
        try:
            nvme.close()
        except PowerCut:
            self.happened["cut in close"] += 1
        if reboot:
            self._reboot()

    def end_of_start(self, how: str) -> None:
        """As ``end`` where the start itself was cut short: no node is there to be stopped."""
        self.happened[f"cut in start, {how}"] += 1
        if how == "power":
            self._reboot()

    def _count(self) -> None:
        state = self.node.state
        for name in ("pages_saved", "pages_promoted", "pages_adopted", "pages_not_adopted", "pages_dropped_at_start"):
            self.happened[name] += state.counters[name]
        for name in ("extents_reclaimed", "pages_moved", "evicted_space"):
            self.happened[f"nvme {name}"] += state.spaces[Tier.NVME].pages.counters[name]
        self.happened["demoted"] += state.counters["demoted"]

    def _reboot(self) -> None:
        self.disks.by_path = {path: disk.power_loss() for path, disk in self.disks.by_path.items()}
        shutil.rmtree(self.shm_dir / "kvstore-n", ignore_errors=True)
        self.acknowledged.clear()

    def cut_soon(self) -> None:
        """Some step of a disk from here on will be the last one."""
        disk = self.random.choice(list(self.disks.by_path.values()))
        disk.cut_at = disk.steps + self.random.choice((1, 2, 3, 4, 5, 8, 13, 21, 34, 55, 89))

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Something happens.

        Raises:
            PowerCut: in the middle of it.
        """
        steps: tuple[tuple[Callable[[], None], int], ...] = (
            (self.put, 12),
            (self.get, 4),
            (self.move, 5),
            (self.checkpoint, 2),
            (self.prefetch, 2),
            (self.evict, 1),
        )
        step = self.random.choices([step for step, _ in steps], [weight for _, weight in steps])[0]
        step()
        self.note_durable()
        self.clock.passed_ns += self.random.choice((0, 0, 10**8, 10**9, 10**11))

    def note_durable(self) -> None:
        """Between two steps: what is in NVMe's index had its save reported, what is there no more was evicted."""
        entries = dict(self.node.performer.index.addresses(Tier.NVME))
        for key, address in entries.items():
            known = self.named.setdefault((self._device_of(address), address), key)
            assert known == key, f"{address} has been another page's"
        claimed = set(entries)
        gone = self.claimed - claimed
        self.evicted |= gone
        self.durable = (self.durable | claimed) - gone
        self.claimed = claimed

    def _device_of(self, address: Address) -> str:
        assert self.node.nvme is not None
        return self.node.nvme.path(self.node.contents.extents[address.extent].position)

    def put(self) -> None:
        """A prompt, or more of one."""
        if self.random.random() < 0.15:
            self.kind = 1 - self.kind
        kind, prompt = self.kind, self.random.randrange(PROMPTS)
        pages = self.random.randint(1, PAGES_MAX if kind == 0 else PAGES_MAX // 2)
        keys = self.store.in_pool(chain(prompt, pages, LAYOUTS[kind]))
        data = contents(keys, LAYOUTS[kind])
        self.stored |= zip(keys.hashes, data, strict=True)
        self.parents |= zip(keys.hashes[1:], keys.hashes, strict=False)
        self.prompts[kind, prompt] = max(pages, self.prompts.get((kind, prompt), 0))
        self.caches[kind].put(keys, data)
        there = self.caches[kind].lookup(keys).pages
        self.happened["pages put"] += there
        self.acknowledged[kind, prompt] = max(there, self.acknowledged.get((kind, prompt), 0))

    def get(self) -> None:
        """A prompt; what is found of it is right."""
        if self.prompts:
            kind, prompt = self.random.choice(sorted(self.prompts))
            self.read(kind, prompt)

    def read(self, kind: int, prompt: int) -> int:
        """Read all that is stored of a prompt; returns how many pages that are."""
        keys = chain(prompt, self.prompts[kind, prompt], LAYOUTS[kind])
        there = self.caches[kind].lookup(keys).pages
        match = self.caches[kind].get(keys)
        wrong = mismatch(match, keys, LAYOUTS[kind])
        assert not wrong, f"prompt {prompt} of layout {kind}: {wrong}"
        if match.pages != there:  # a read lets the mover move: others are saved, and this one is evicted
            after, counters = self.caches[kind].lookup(keys).pages, dict(self.node.state.counters)
            what = f"prompt {prompt} of layout {kind}: {there} pages, then {match}, then {after}"
            assert match.pages == after and not self.roomy, f"{what}: {counters}"
        self.happened["pages read"] += match.pages
        self.happened["pages read from NVMe"] += match.tiers.get(Tier.NVME, 0)
        return there

    def move(self) -> None:
        """The mover does something."""
        self.mover.step()

    def checkpoint(self) -> None:
        """The mover writes directories."""
        self.mover.checkpoint()
        self.mover.run_lanes()

    def prefetch(self) -> None:
        """Somebody wants a prompt in DRAM."""
        if self.prompts:
            kind, prompt = self.random.choice(sorted(self.prompts))
            keys = chain(prompt, self.prompts[kind, prompt], LAYOUTS[kind])
            try:
                self.caches[kind].prefetch(keys, timeout_s=0.05)
            except Unavailable:
                self.happened["prefetch refused"] += 1

    def evict(self) -> None:
        """An operator wants space in DRAM."""
        self.store.evict(pages=self.random.randint(1, 30))

    def scan(self, whole: bool = True) -> None:
        """The scan, or a part of it."""
        self.scanner.run(threading.Event() if whole else _StopAfter(self.random.randint(0, 40)))

    # --- what has to hold -------------------------------------------------------------------------------------------

    def sealed_on_nvme(self) -> set[bytes]:
        """Keys whose records say so, whatever the index says."""
        sealed: set[bytes] = set()
        for table in self.node.contents.tables():
            if table.tier == Tier.NVME:
                frames = np.flatnonzero((table.words & np.uint64(0xFF)) == FrameState.SEALED)
                sealed |= {table.rows[frame, 8:24].tobytes() for frame in frames.tolist()}
        return sealed

    def check(self, scanned: bool) -> None:
        """All laws; every page that NVMe claims is there; and of what was durable nothing is missing."""
        findings = self.node.verify()
        assert not findings, "\n".join(findings[:10])
        counters = self.node.state.counters
        damage = {
            name: n for name, n in counters.items() if name.startswith(("damaged_", "load_failed_", "save_failed_"))
        }
        assert not damage, f"nothing was damaged here: {damage}"
        claimed = dict(self.node.performer.index.addresses(Tier.NVME))
        for key, address in claimed.items():
            self.check_page(key, address)
        self.happened["pages proven on NVMe"] += len(claimed)
        if scanned:
            missing = {key for key in self.durable - claimed.keys() if not self._lost_its_parent(key)}
            assert not missing, f"{len(missing)} of {len(self.durable)} pages that were durable are gone"
            self.durable &= claimed.keys()
            self.note_durable()  # what the scan found may be evicted while it is read below
            waiting = sum(
                extent.count(state)
                for space in self.node.state.spaces.values()
                for extent in space.segment.extents.values()
                for state in (FrameState.RESERVED, FrameState.QUARANTINED, FrameState.RETIRING)
            )
            granted = sum(len(session.granted) for session in self.node.state.sessions.values())
            flying = self.node.state.tiering.copies.target_frames()
            assert waiting == granted + len(flying), "frames hold nothing, and are not free"
        for kind, prompt in sorted(self.prompts):
            there = self.read(kind, prompt)
            if self.roomy:
                acknowledged = self.acknowledged.get((kind, prompt), 0)
                assert there >= acknowledged, f"prompt {prompt} of layout {kind}: {there} pages of {acknowledged}"

    def _lost_its_parent(self, key: bytes) -> bool:
        """What it hangs on was evicted before the scan found it."""
        while key in self.parents and key not in self.evicted:
            key = self.parents[key]
        return key in self.evicted

    def check_page(self, key: bytes, address: Address) -> None:
        """Header and payload on the disk are those of this page."""
        nvme = self.node.nvme
        assert nvme is not None
        table = self.node.contents.extents[address.extent]
        frame_class = table.frame_class
        header, page = aligned_buffer(geometry.header_bytes(frame_class)), aligned_buffer(frame_class.frame_bytes)
        nvme.devices.read_page(table.position, address.frame, frame_class, header, page)
        incarnation = nvme.devices.header_incarnation(table.position)
        found = frame_header.unpack(header, frame_class, incarnation, address.extent, address.frame, address.generation)
        assert isinstance(found, FrameHeader), f"{address}: {found}"
        assert found.key == key, f"{address}: the header is of another page"
        expected = self.stored[key].reshape(1, -1)
        wrong = first_wrong(page[: frame_class.page_bytes].reshape(1, -1), expected)
        assert not wrong, f"{address}: {wrong}"
