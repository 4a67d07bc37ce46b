"""Opaque objects over power losses, kills and reboots at any step of the disks: no old or deleted value comes back.

The machine is that of ``test_power_loss``. A model keeps, per key, which values a get may bring: the last one that was
acknowledged, and of puts, replacements and deletions that were cut short both what was before and what was meant. Of
groups, a get finds all members or none, each with the value that was put.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.client.local import objects
from kvstore.errors import OutOfSpace, Unavailable
from tests.helpers.nvme.faulty_disk import EIO, PowerCut
from tests.helpers.worlds.power_world import Clock, Disks, World

SEEDS, LIVES, STEPS = 24, 5, 30
KEYS = [f"key {i}" for i in range(10)]
SIZES = (0, 1, 3000, 4096, 9000, 20_000, 60_000)  # up to 16 KiB in pages of 4 KiB; DRAM has 64 of them
GROUPS, MEMBERS = 4, 3


class ObjectWorld(World):
    """``World`` with objects. ``kept``: keys whose value nothing but a power loss may take."""

    def __init__(self, seed: int, shm_dir: Path, disks: Disks, clock: Clock) -> None:
        super().__init__(seed, shm_dir, disks, clock)
        self.may: dict[str, set[bytes | None]] = {key: {None} for key in KEYS}
        self.kept: set[str] = set()
        self.puts = 0

    def live(self) -> None:
        """One life, however it ends."""
        if self.random.random() < 0.7:
            self.cut_soon()
        how = self.random.choice(("power", "power", "kill", "stop"))
        try:
            self.start()
        except PowerCut:
            self.end_of_start("power")
            self.kept.clear()
            return
        try:
            self.look()
            self.scan()
            self.look()
            for _ in range(self.random.randrange(STEPS)):
                self.something()
            if how == "stop":
                self.stop()
                self.kept.clear()
                return
        except PowerCut:
            self.happened["cut short"] += 1
        self.end("kill" if how == "kill" else "power")
        if how != "kill":
            self.kept.clear()

    def something(self) -> None:
        """A client or the mover does something. Raises PowerCut in the middle of it."""
        key = self.random.choice(KEYS)
        steps = (
            (lambda: self.put_one(key), 8),
            (lambda: self.delete_one(key), 3),
            (self.put_group, 4),
            (self.delete_group, 1),
            (self.look_at_groups, 2),
            (lambda: self.look_at(key), 4),
            (self.move, 6),
            (self.checkpoint, 3),
            (self.evict, 2),
        )
        self.random.choices([step for step, _ in steps], [weight for _, weight in steps])[0]()

    def put_one(self, key: str) -> None:
        """Put, or replace."""
        self.puts += 1
        size = self.random.choice(SIZES)
        value = (b"%d " % self.puts * (size // 2 + 1))[:size]
        replace = self.random.random() < 0.7
        before = self.may[key]
        self.may[key] = before | {value, None}
        self.kept.discard(key)
        try:
            stored = self.store.put(key, value, replace=replace)
        except OutOfSpace:
            self.happened["no room"] += 1
            return
        self.happened["stored"] += stored
        self.may[key] = {value} if stored else before | {None}
        if stored:
            self.kept.add(key)

    def delete_one(self, key: str) -> None:
        """Delete; from its answer on the key has no value."""
        self.kept.discard(key)
        self.may[key] = self.may[key] | {None}
        self.happened["deleted"] += self.store.delete(key)
        self.may[key] = {None}

    def look_at(self, key: str) -> None:
        """What is found is one of the values that may be."""
        found = self.store.get(key)
        value = found.tobytes() if found is not None else None
        assert value is None or value in self.may[key], f"{key}: {value[:20]!r} came back"
        assert value is not None or not (self.roomy and key in self.kept), f"{key} is gone"
        self.happened["found"] += value is not None
        if self.store.contains(key) is False:
            assert value is None or self.store.get(key) is None

    def put_group(self) -> None:
        """Some members of a group, or all of them."""
        group = self.random.randrange(GROUPS)
        chosen = self.random.sample(range(MEMBERS), self.random.randint(1, MEMBERS))
        keys = [f"group {group}/{member}" for member in chosen]
        with contextlib.suppress(OutOfSpace):
            self.store.put_many(keys, [value_of_member(key) for key in keys], group=f"group {group}", count=MEMBERS)

    def delete_group(self) -> None:
        """By one of its members."""
        group = self.random.randrange(GROUPS)
        if self.store.delete(f"group {group}/{self.random.randrange(MEMBERS)}"):
            assert not any(self.store.contains([f"group {group}/{member}" for member in range(MEMBERS)]))
            self.happened["groups deleted"] += 1

    def look_at_groups(self) -> None:
        """What is found of a group is all of it."""
        for group in range(GROUPS):
            keys = [f"group {group}/{member}" for member in range(MEMBERS)]
            outs = [bytearray(len(value_of_member(key))) for key in keys]
            sizes = self.store.get_many(keys, outs)
            assert sizes in ([-1] * MEMBERS, list(map(len, outs))), f"a group is found in part: {sizes}"
            if sizes[0] >= 0:
                assert [bytes(out) for out in outs] == list(map(value_of_member, keys))
                self.happened["groups found"] += 1

    def look(self) -> None:
        """At all keys."""
        for key in KEYS:
            self.look_at(key)
        self.look_at_groups()


def value_of_member(key: str) -> bytes:
    """Values of one page and of several."""
    return key.encode() * (1000 if key.endswith("2") else 30)


@pytest.fixture
def machine(disks: Disks, clock: Clock, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], ObjectWorld]:
    """Makes the machine of a seed."""
    monkeypatch.setattr(objects, "BUSY_PAUSE_S", 0.0)  # what it waits for comes when it asks

    def make(seed: int) -> ObjectWorld:
        shutil.rmtree(shm_dir / "kvstore-n", ignore_errors=True)
        return ObjectWorld(seed, shm_dir, disks, clock)

    return make


def test_a_deletion_that_may_not_last_is_an_error(machine: Callable[[int], ObjectWorld]) -> None:
    """The device takes no more writes: the object is gone for now, and who deleted it hears that it may come back."""
    world = machine(0)
    world.start()
    assert world.store.put("k", bytes(5000)) and world.store.put("other", b"1")
    while world.node.state.counters["pages_saved"] < 3:
        world.evict()
        world.mover.step()
    for disk in world.disks.by_path.values():
        disk.fail_writes = EIO
    with pytest.raises(Unavailable, match="a reboot may bring it back"):
        world.store.delete("k")
    assert world.store.get("k") is None and world.store.get("other").tobytes() == b"1"
    assert world.node.verify() == [] and world.node.nvme_failures
    world.end("power")


def test_nothing_old_or_deleted_comes_back(machine: Callable[[int], ObjectWorld]) -> None:
    happened: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = machine(seed)
        try:
            for _ in range(LIVES):
                world.live()
        except BaseException as error:
            error.add_note(f"seed {seed}: {dict(world.happened)}")
            raise
        happened += world.happened
    for what in (
        "cut short",
        "end power",
        "end kill",
        "stored",
        "deleted",
        "found",
        "groups found",
        "groups deleted",
        "pages_saved",
        "pages_adopted",
    ):
        assert happened[what] > 5, f"{what} happened {happened[what]} times: {happened}"
