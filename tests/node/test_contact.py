"""A node that was away from its pool for longer than tombstones are kept drops the objects that it cannot know of."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore import Store
from kvstore.client.local.object_batches import ObjectsPut
from kvstore.client.local.stamps import new_nonces
from kvstore.client.value_buffers import Scattered
from kvstore.model.objects import NO_GROUP, object_root
from kvstore.model.tombstones import TOMBSTONE_S
from kvstore.node.cluster.contact import Contact
from kvstore.node.node import Node
from tests.helpers.content import SMALL
from tests.helpers.inside import node_of
from tests.helpers.processes import check_laws, put, wait_until


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with kvstore.open(dram="16MiB", nvme=f"{tmp_path}/n:64MiB") as store:
        yield store


def inside(store: Store) -> Node:
    embedded = node_of(store)._resources.embedded
    assert embedded is not None
    node = embedded.node  # type: ignore[attr-defined]
    assert isinstance(node, Node)
    return node


def put_at(store: Store, keys: list[str], age_s: float) -> None:
    """Objects that were put this long ago."""
    stamp = time.time_ns() - int(age_s * 1e9)
    sources = [Scattered([np.full(300_000, 7, np.uint8)]) for _ in keys]
    names = [key.encode() for key in keys]
    nonces = new_nonces(stamp, len(keys))
    assert all(
        ObjectsPut(
            node_of(store).writable(), object_root(""), names, sources, False, True, [NO_GROUP] * len(names), nonces
        ).result()
    )


def test_old_objects_of_every_tier_are_dropped_and_nothing_else(store: Store) -> None:
    contact = Contact(inside(store))
    put_at(store, ["saved old"], 2 * TOMBSTONE_S)
    put_at(store, ["saved new"], TOMBSTONE_S / 2)
    store.evict(pages=1000)
    wait_until("all is saved", lambda: store.stats()["tiers"]["nvme"]["pages"] == 10, 60)
    put_at(store, ["old"], 2 * TOMBSTONE_S)
    put_at(store, ["new"], TOMBSTONE_S / 2)
    put(store, 1, 5)
    wait_until("nothing is being moved", contact.drop_old_objects, 60)
    assert store.contains(["saved old", "saved new", "old", "new"]) == [False, True, False, True]
    assert store.cache(SMALL).lookup(np.arange(1)).pages == 0
    check_laws(store)


def test_the_last_contact_is_known_from_the_header_and_from_nvme(store: Store) -> None:
    node = inside(store)
    contact, header = Contact(node), node.performer.header
    assert contact.is_away, "it never had any"
    put_at(store, ["saved"], 0)
    store.evict(pages=1000)
    wait_until("it is saved", lambda: node.nvme is not None and node.nvme.devices.contact == 0, 60)
    contact.note()
    assert not contact.is_away and node.nvme is not None
    on_nvme = node.nvme.devices.contact
    assert on_nvme == header.contact > 0
    header.contact -= TOMBSTONE_S // 60 + 1
    assert contact.is_away
    contact.note()
    assert not contact.is_away
    (device,) = node.nvme.devices.devices
    device._store(replace(device._table, contact=on_nvme - TOMBSTONE_S // 60 - 1))
    assert contact.is_away, "a device that was elsewhere"
    contact.note()
    assert not contact.is_away and node.nvme.devices.contact >= on_nvme
