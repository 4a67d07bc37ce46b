"""Orders to copy pages as bytes, the token bucket of background traffic, and pages as runs."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import InvalidRequest
from kvstore.model.prefix import Keys
from kvstore.model.replica import FrameClass
from kvstore.node.cluster.survey import Pages, runs_of
from kvstore.shm.folder import NodeFolder
from kvstore.shm.traffic import BURST_S, TrafficBucket
from kvstore.wire.copy_order import CopyOrder, unpack_copy
from kvstore.wire.data import ChainQuery
from tests.helpers.content import SMALL, chain

S_NS = 1_000_000_000


def order(pages: int = 5, extras: bool = False) -> CopyOrder:
    shape = FrameClass(SMALL.page_bytes, SMALL.page_tokens, SMALL.layers)
    query, keys = ChainQuery(SMALL.fingerprint, "tenant", "lora", shape, True), chain(1, pages + 3)[3:]
    media = [bytes([i]) * 16 for i in range(pages)] if extras else None
    parts = SMALL.page_tokens, query.root, keys.before, keys.links, keys.tokens, media
    return CopyOrder("n1", {"salt": "tenant"}, query, Keys(*parts, hints=bytes(range(128, 128 + pages))))


@pytest.mark.parametrize("extras", [False, True])
def test_an_order_is_read_as_it_was_written(extras: bool) -> None:
    written = order(extras=extras)
    read = unpack_copy(memoryview(b"".join(written.pack())))
    assert (read.source, read.about, read.chain) == (written.source, written.about, written.chain)
    assert (read.keys.links, read.keys.before, read.keys.hints) == (
        written.keys.links,
        written.keys.before,
        written.keys.hints,
    )
    assert read.keys.extras == written.keys.extras and (read.keys.tokens == written.keys.tokens).all()


def test_damaged_orders_are_refused_with_a_field() -> None:
    body, draw = b"".join(order().pack()), random.Random(3)
    for _ in range(300):
        cut = bytearray(body[: draw.randrange(len(body))] if draw.random() < 0.5 else body)
        for _ in range(draw.randrange(1, 4)):
            if cut:
                cut[draw.randrange(min(len(cut), 120))] ^= 1 << draw.randrange(8)
        try:
            unpack_copy(memoryview(bytes(cut)))
        except InvalidRequest as refused:
            assert refused.field and refused.reason


def test_background_traffic_holds_its_rate_over_all_processes_of_a_node(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path, "n")
    folder.create()
    rate = 1000
    first, second = TrafficBucket(folder, rate), TrafficBucket(folder, rate)
    assert first.charge(1000, now_ns=100 * S_NS) == 0.0
    assert second.charge(500, now_ns=100 * S_NS) == pytest.approx(1 - BURST_S)
    assert first.charge(1, 0.5, now_ns=100 * S_NS) is None, "it would wait for too long, and is not charged"
    assert second.charge(100, now_ns=101 * S_NS) == pytest.approx(0.5 - BURST_S)
    assert second.charge(100, now_ns=200 * S_NS) == 0.0
    assert first.charged_bytes == second.charged_bytes == 1700
    unlimited = TrafficBucket(folder, 0)
    assert unlimited.charge(1 << 40, now_ns=200 * S_NS) == 0.0
    threads = [threading.Thread(target=lambda: [first.charge(1) for _ in range(200)]) for _ in range(4)]
    before = first.charged_bytes
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert first.charged_bytes == before + 800
    for bucket in (first, second, unlimited):
        bucket.close()
    lost = NodeFolder(tmp_path, "gone")
    assert TrafficBucket(lost, rate).charge(5) == 0.0, "without memory, the process has a bucket of its own"


def test_pages_become_runs_along_their_chains() -> None:
    names = {letter: bytes([ord(letter)]) * 16 for letter in "rabcdexy"}
    tree = [("a", "r"), ("b", "a"), ("c", "b"), ("x", "b"), ("y", "x"), ("e", "d")]  # of d only the child is left

    def column(letters: list[str]) -> np.ndarray:
        return np.array([list(names[letter]) for letter in letters], np.uint8)

    keys, parents = [key for key, _ in tree], [parent for _, parent in tree]
    numbers = np.arange(len(tree))
    pages = Pages(
        column(keys),
        column(parents),
        *(numbers.astype(np.uint64),) * 2,
        numbers.astype(np.uint64) * 0,
        numbers * 0 + 7,
        numbers,
    )
    runs = runs_of(pages)
    found = {"".join(chr(key[0]) for key in run.keys) for run in runs}
    assert found == {"abc", "xy", "e"}
    assert {run.used_ns for run in runs} == {2, 4, 5} and {run.page_bytes for run in runs} == {7}
    assert {chr(run.parent[0]) for run in runs} == set("rbd")
