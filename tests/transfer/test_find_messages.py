"""Messages of the directory: what is packed is unpacked, and nothing else is taken in."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest

from kvstore.cluster.directory import (
    GONE,
    PER_PAGE_MAX,
    STREAMS_MAX,
    AnnounceBatch,
    Directory,
    Doubt,
    Locations,
    page_entries,
)
from kvstore.cluster.directory_messages import (
    FIND_PAGES_MAX,
    NAME_BYTES_MAX,
    pack_announce,
    pack_announced,
    pack_find,
    pack_found,
    pack_hold,
    pack_list,
    pack_listed,
    unpack_announce,
    unpack_announced,
    unpack_find,
    unpack_found,
    unpack_hold,
    unpack_list,
    unpack_listed,
)
from kvstore.wire.data import BODY_MAX, FrameKind, Namespace, WireError, pack_head

WHOSE = Namespace(bytes(range(16)), "tenant", "ädapter")


def some(draw: random.Random) -> tuple[np.ndarray, Locations, AnnounceBatch]:
    pages = np.array([draw.randrange(1 << 64) for _ in range(draw.randrange(20))], np.uint64)
    names = [f"node-{draw.randrange(99)}" if draw.random() < 0.8 else "" for _ in range(1 + draw.randrange(5))]
    rows = draw.randrange(9) if len(pages) else 0
    found = Locations(
        np.array([draw.randrange(len(pages)) for _ in range(rows)], np.int64),
        np.array([draw.randrange(len(names)) for _ in range(rows)], np.int64),
        np.array([draw.randrange(3) for _ in range(rows)], np.uint8),
        names,
        tuple(Doubt(f"n{draw.randrange(9)}"[: draw.randrange(3)], draw.randrange(1 << 64)) for _ in range(rows)),
    )
    marks = np.array([draw.randrange(3) | draw.choice((0, GONE)) for _ in pages], np.uint8)
    return (
        pages,
        found,
        AnnounceBatch(
            "node", draw.randrange(1 << 63), draw.randrange(1 << 40), pages, marks, draw.random() < 0.5, rows << 60
        ),
    )


@pytest.mark.parametrize("seed", range(20))
def test_messages_arrive_as_they_were(seed: int) -> None:
    pages, found, told = some(random.Random(seed))
    assert unpack_find(pack_find(WHOSE, pages, told.stream))[1].tolist() == pages.tolist()
    assert unpack_find(memoryview(pack_find(WHOSE, pages, told.stream)))[::2] == (WHOSE, told.stream)
    keys = [page.tobytes() * 2 for page in pages]
    assert unpack_hold(memoryview(pack_hold(WHOSE, keys, told.whole))) == (WHOSE, keys, told.whole)
    again = unpack_found(pack_found(found), len(pages))
    assert again.doubts == found.doubts
    for name in ("pages", "tiers"):
        assert getattr(again, name).tolist() == getattr(found, name).tolist()
    assert [again.names[node] for node in again.nodes] == [found.names[node] for node in found.nodes]
    assert len(again.names) == len(set(found.nodes.tolist())), "nobody is named who is in no row"
    batch, daemon = unpack_announce(memoryview(pack_announce(told, told.stream)))
    assert daemon == told.stream
    assert (batch.node, batch.stream, batch.number, batch.whole) == ("node", told.stream, told.number, told.whole)
    assert batch.placement == told.placement
    assert batch.fingerprints.tolist() == pages.tolist() and batch.marks.tolist() == told.marks.tolist()
    assert [unpack_announced(pack_announced(wanted, 7)) for wanted in (-1, 0, 1 << 40)] == [
        (-1, 7),
        (0, 7),
        (1 << 40, 7),
    ]
    entries = page_entries(batch.fingerprints, batch.marks)
    assert unpack_listed(pack_listed(entries)).tolist() == entries.tolist()
    assert unpack_list(memoryview(pack_list("node", told.stream))) == ("node", told.stream)


def test_bytes_that_make_no_sense_are_refused_in_words() -> None:
    """Cut, longer, changed: what is taken in names nothing that there is not, and no owner falls over it."""
    draw, directory = random.Random(1), Directory(1 << 16)
    refused = 0
    for _ in range(4000):
        pages, found, told = some(draw)
        for unpack, body in (
            (unpack_announce, pack_announce(told, 1)),
            (unpack_find, pack_find(WHOSE, pages, 7)),
            (unpack_hold, pack_hold(WHOSE, [page.tobytes() * 2 for page in pages], True)),
            (partial(unpack_found, count=len(pages)), pack_found(found)),
            (unpack_list, pack_list(told.node, told.stream)),
            (unpack_listed, pack_listed(page_entries(told.fingerprints, told.marks))),
        ):
            raw = bytearray(body)
            for _ in range(draw.randrange(3)):
                if raw:
                    raw[draw.randrange(len(raw))] = draw.randrange(256)
            raw = (
                raw[: draw.randrange(len(raw) + 1)]
                if draw.random() < 0.3
                else raw + draw.randbytes(draw.choice((0, 0, 7)))
            )
            try:
                got = unpack(raw)
            except WireError:
                refused += 1
                continue
            if isinstance(got, Locations):
                assert all(got.names[node] is not None for node in got.nodes.tolist())
            elif unpack is unpack_announce:
                directory.apply(got[0])
            elif unpack is unpack_list:
                assert len(directory.entries_of(*got, 10)) <= 10
            elif unpack is unpack_find:
                directory.find(got[1])
    assert 1000 < refused < 18_000
    for kind, unpack in ((FrameKind.FIND, unpack_find), (FrameKind.HOLD, unpack_hold)):
        with pytest.raises(WireError, match="at most"):
            unpack(bytes(BODY_MAX[kind] - 1 - 4 * (kind is FrameKind.HOLD)))  # no salt, no adapter, and too many pages


def test_the_longest_answer_of_a_directory_fits_its_frame() -> None:
    """Every page has as many entries as an answer may hold, and every stream there may be has a long name."""
    pages = np.repeat(np.arange(FIND_PAGES_MAX), PER_PAGE_MAX)
    nodes = np.arange(len(pages)) % STREAMS_MAX
    names = [f"{place:0{NAME_BYTES_MAX}}" for place in range(STREAMS_MAX)]
    body = pack_found(Locations(pages, nodes, np.ones(len(pages), np.uint8), names))
    pack_head(FrameKind.FOUND, 1, len(body))
    assert len(unpack_found(body, FIND_PAGES_MAX).pages) == len(pages)
