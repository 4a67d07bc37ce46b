"""Memory that is mounted as another engine lays it out: read by other processes, and never beyond its end."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

import numpy as np
import pytest
import xxhash

from kvstore import Tier
from kvstore.client.local.store import LocalStore
from kvstore.errors import InvalidRequest
from kvstore.model.shard import LAYERS_MAX, Strides
from kvstore.shm import mounted
from kvstore.shm.folder import NodeFolder
from kvstore.shm.mounted import MountedTable, data_path, mounted_path
from tests.helpers.content import SMALL, chain
from tests.helpers.inside import node_of
from tests.helpers.mounted import FRAMES, Engine
from tests.helpers.processes import Machine, check_laws, check_pages
from tests.helpers.strided import foreign_strides

HEAD = mounted._HEAD
LAYERS_AT, DIMS_AT, FRAMES_AT, PAGE_AT = 11, 12, 8, 5
STRIDES_AT = HEAD.size  # no export of shared memory
FAR = 1 << 40


def test_pages_of_a_foreign_arena_are_found_and_read(machine: Machine) -> None:
    daemon = machine.serve("n")
    store, engine = machine.connect("n"), Engine(machine, strided=True)
    engine.ask("publish", 1, 10, [3, 4, 5, 6, 12, 0, 1, 2, 9, 63])
    engine.publish(2, 5, first=20)
    match = store.cache(SMALL).get(chain(1, 10))
    assert match.tiers == {Tier.HBM: 10}
    check_pages(store, {1: 10, 2: 5})
    assert engine.ask("retire", [3, 4])["free"] == [3, 4]
    assert not store.cache(SMALL).get(chain(1, 10)).pages
    daemon.kill()
    machine.serve("n")
    check_pages(store, {2: 5})
    check_laws(store)


@pytest.mark.parametrize("seed", range(20))
def test_views_and_pieces_are_the_same_bytes(seed: int) -> None:
    """What host memory is read by, and what devices copy by."""
    chance = np.random.default_rng(seed)
    frames, piece = int(chance.integers(1, 6)), int(chance.choice([1, 8, 24]))
    dims = [(int(chance.integers(1, 5)), int(chance.integers(0, 100))) for _ in range(chance.integers(0, 4))]
    layers = chance.integers(0, 500, chance.integers(1, 4)).tolist()
    strides = Strides(layers, int(chance.integers(0, 200)), dims, piece)
    memory = chance.integers(0, 256, strides.nbytes(frames), np.uint8)
    places, sizes = strides.pieces()
    assert int(sizes.sum()) == strides.page_bytes
    for frame in range(frames):
        seen = np.concatenate([view[frame].reshape(-1) for view in strides.views(memory, frames)])
        starts = (places + np.uint64(frame * strides.block)).astype(int)
        copied = [memory[at : at + size] for at, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
        assert sum(map(len, copied)) == strides.page_bytes, "nothing is beyond the end"
        assert (seen == np.concatenate(copied)).all()


def test_what_lies_together_is_one_piece() -> None:
    places, sizes = Strides([0, 64, 200], 1000, [(2, 32), (4, 8)], 8).pieces()
    assert (places.tolist(), sizes.tolist()) == ([0, 200], [128, 64])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Strides([], 1, [], 1),
        lambda: Strides([0] * (LAYERS_MAX + 1), 1, [], 1),
        lambda: Strides([0], 1, [(1, 1)] * 5, 1),
        lambda: Strides([0], 1, [(0, 1)], 1),
        lambda: Strides([0], -1, [], 1),
        lambda: Strides([1 << 60], 1, [], 1),
        lambda: Strides([0], 1, [], 0),
    ],
)
def test_strides_that_are_none(make: Callable[[], Strides]) -> None:
    with pytest.raises(InvalidRequest, match="strides"):
        make()


def test_strides_of_another_page_are_refused(machine: Machine) -> None:
    machine.serve("n")
    store = machine.connect("n")
    assert isinstance(store, LocalStore)
    with pytest.raises(InvalidRequest, match="strides"):
        store.mount(SMALL, 4, strides=Strides.whole(SMALL.page_bytes + 1, 1 << 20))
    with pytest.raises(InvalidRequest, match="frames"):
        store.mount(SMALL, 0)
    segment = store.mount(SMALL, 4, strides=foreign_strides(SMALL, 4))
    assert segment.memory.nbytes == 4 * SMALL.page_bytes and not segment.pages.size


Tamper = Callable[[list[int]], None]
"""Words of the head, then of the strides: piece, block, layers, dimensions."""


def word(at: int, value: int) -> Tamper:
    """That word says something else."""

    def tamper(words: list[int]) -> None:
        words[at] = value

    return tamper


PIECE, BLOCK, FIRST_LAYER = 13, 14, 15
LAST_LAYER = FIRST_LAYER + SMALL.layers - 1
FIRST_COUNT, FIRST_STRIDE = LAST_LAYER + 1, LAST_LAYER + 2


def larger_pages(words: list[int]) -> None:
    """Pages of a size that nobody has memory for, all over the same few bytes."""
    for at in (FIRST_COUNT, FIRST_COUNT + 2, FIRST_COUNT + 4):
        words[at], words[at + 1] = 1 << 18, 0
    words[PAGE_AT] = words[PIECE] * SMALL.layers << 54


HOSTILE: dict[str, Tamper] = {
    "the last layer begins at the end": word(LAST_LAYER, FRAMES * SMALL.page_bytes),
    "a layer is far away": word(FIRST_LAYER, FAR),
    "blocks are far apart": word(BLOCK, FAR),
    "blocks are a byte further apart": lambda words: word(BLOCK, words[BLOCK] + 1)(words),
    "heads are far apart": word(FIRST_STRIDE, FAR),
    "a stride wraps round": word(FIRST_STRIDE, (1 << 64) - 1),
    "more heads than a page has": word(FIRST_COUNT, FAR),
    "no heads": word(FIRST_COUNT, 0),
    "a longer piece": word(PIECE, FAR),
    "a shorter piece": lambda words: word(PIECE, words[PIECE] // 2)(words),
    "more layers than a head has room for": word(LAYERS_AT, FAR),
    "more dimensions": word(DIMS_AT, FAR),
    "fewer layers": word(LAYERS_AT, 1),
    "more frames": word(FRAMES_AT, FRAMES + 1),
    "larger pages": larger_pages,
}


def test_a_hostile_head_is_a_miss(machine: Machine) -> None:
    """Whatever the head says, under a right sum: nobody reads beyond the memory, or has none left. A head that says
    nothing new is read."""
    machine.serve("n")
    store, engine = machine.connect("n"), Engine(machine, strided=True)
    engine.publish(1, 4)
    folder = NodeFolder.at(machine.folder("n"))
    path, incarnation = mounted_path(folder, engine.number), node_of(store).writable().incarnation
    whole = path.read_bytes()
    words = list(struct.unpack_from(f"<{FIRST_COUNT + 6}Q", whole))
    assert os.path.getsize(data_path(folder, engine.number)) == FRAMES * SMALL.page_bytes
    for name, tamper in {"nothing": lambda _: None, **HOSTILE}.items():
        said = list(words)
        tamper(said)
        head = b"".join(number.to_bytes(8, "little") for number in said)
        head += xxhash.xxh3_64_digest(head)
        path.write_bytes(head + whole[len(head) :])
        with machine.connect("n") as fresh:
            assert fresh.cache(SMALL).get(chain(1, 4)).pages == (4 if name == "nothing" else 0), name
        table = MountedTable.open(folder, engine.number, incarnation)
        if table is not None:
            assert table.strides.nbytes(table.frames) > FRAMES * SMALL.page_bytes or name in ("nothing", "larger pages")
