"""Memory of a device that is mounted: read through pinned memory behind an event, and lost with its device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import kvstore
from kvstore import Tier
from kvstore.client.local.store import LocalStore
from kvstore.client.match import IO
from kvstore.device.host_device import HostDevice
from kvstore.errors import InvalidRequest
from kvstore.model.replica import FrameClass
from kvstore.model.shard import Strides
from kvstore.shm.folder import NodeFolder
from kvstore.shm.mounted import EXPORT_BYTES_MAX, MountedTable
from kvstore.tier import hbm
from kvstore.tier.peer_memory import DEVICE, OPENERS
from tests.helpers.content import SMALL, chain, contents, layer_of
from tests.helpers.device_frames import STRIDE, shown
from tests.helpers.inside import node_of

FRAMES = 16


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStore]:
    monkeypatch.setattr(hbm, "BOUNCE_BYTES", 3 * SMALL.page_bytes)  # some steps
    with kvstore.open(dram="4MiB") as store:
        assert isinstance(store, LocalStore)
        yield store


def test_pages_of_a_device_are_read_behind_their_event(store: LocalStore) -> None:
    device = HostDevice()
    memory = device.allocate(FRAMES * STRIDE, shared=True)
    segment = store.mount(SMALL, FRAMES, shown(device, memory))
    assert segment.pages.size == 0
    keys, data = chain(1, 10), contents(chain(1, 10))
    frames = [3, 4, 5, 6, 12, 0, 1, 2, 9, 8]
    for page, frame in zip(data, frames, strict=True):
        memory.view()[frame * STRIDE : frame * STRIDE + SMALL.page_bytes] = page
    segment.publish(keys, frames)
    match = store.cache(SMALL).get(keys)
    assert match.tiers == {Tier.HBM: 10} and (match.data == data).all()
    device.lose()
    match = store.cache(SMALL).get(keys)
    assert (match.pages, match.reason) == (0, IO), "a lost device is a miss"
    assert segment.retire(frames) == frames


@pytest.mark.parametrize("first", ["segment", "store"])
def test_nothing_stays_pinned_when_it_is_closed(first: str) -> None:
    """Twice in one process, and whoever still holds what is closed keeps nothing."""
    device, keys = HostDevice(), chain(1, 10)
    memory, kept = device.allocate(FRAMES * STRIDE, shared=True), list[object]()
    for _ in range(2):
        store = kvstore.open(dram="4MiB")
        assert isinstance(store, LocalStore)
        segment, cache = store.mount(SMALL, FRAMES, shown(device, memory)), store.cache(SMALL)
        memory.view().reshape(FRAMES, STRIDE)[:10, : SMALL.page_bytes] = contents(keys)
        segment.publish(keys, range(10))
        assert cache.get(keys).tiers == {Tier.HBM: 10}
        found, reader = np.empty((10, SMALL.layer_bytes), np.uint8), cache.reader(keys)
        reader.read_layer(1, found)
        assert (found == layer_of(contents(keys), 1)).all() and device.pinned_bytes
        kept += [store, segment]
        for each in (segment, store) if first == "segment" else (store, segment):
            each.close()
            assert not device.pinned_bytes


def test_memory_that_is_too_small_is_refused(store: LocalStore) -> None:
    device = HostDevice()
    memory = device.allocate((FRAMES - 1) * STRIDE, shared=True)
    with pytest.raises(InvalidRequest, match="memory"):
        store.mount(SMALL, FRAMES, shown(device, memory))
    assert "hbm" not in store.stats()["tiers"]


def test_what_has_no_handle_here_is_a_miss(store: LocalStore) -> None:
    """Without a driver, and for handles that are none."""
    mapped = node_of(store).writable()
    frame_class = FrameClass(SMALL.page_bytes, SMALL.page_tokens, SMALL.layers)
    folder = NodeFolder.at(mapped.folder.path)
    strides = Strides.whole(SMALL.page_bytes, STRIDE)
    for number, export in enumerate((b"", bytes(88), bytes(EXPORT_BYTES_MAX)), 1000):
        parts = mapped.incarnation, number, mapped.channel.session, frame_class, FRAMES, strides, DEVICE, export
        table = MountedTable.create(folder, *parts)
        assert OPENERS[DEVICE](folder, table) is None
        found = MountedTable.open(folder, number, mapped.incarnation)
        assert found is not None and found.export == export and OPENERS[DEVICE](folder, found) is None
        assert np.count_nonzero(found.words) == 0
