"""Index: verbs, damage, forks, kill -9, and what several readers and writers of one process share."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import NodeBusy
from kvstore.model.replica import Address, Tier
from kvstore.shm import index, lmdb_environment
from kvstore.shm.folder import NodeFolder
from kvstore.shm.index import Index, IndexDamaged, IndexFull

MIB = 1 << 20


def key(i: int) -> bytes:
    return (i * 0x9E3779B97F4A7C15 % 2**128).to_bytes(16, "little")


def raw(i: int) -> bytes:
    return b"".join((i.to_bytes(4, "little"), (i + 1).to_bytes(4, "little"), (i + 2).to_bytes(8, "little")))


def put(writer: Index, numbers: range) -> None:
    with writer.begin() as txn:
        txn.put(Tier.DRAM, [key(i) for i in numbers], [raw(i) for i in numbers])


@pytest.fixture(params=["tmp", "shm"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NodeFolder]:
    """A node folder, on a disk and in shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if request.param == "shm" else tmp_path) as home:
        folder = NodeFolder(home, "n")
        folder.create()
        yield folder
    gc.collect()


@pytest.fixture
def writer(folder: NodeFolder) -> Iterator[Index]:
    writer = Index.open_writer(folder, 1, 16 * MIB, fresh=True)
    yield writer
    writer.close()


def start(source: str, *args: object) -> subprocess.Popen[str]:
    """A second process that has printed one line."""
    command = [sys.executable, "-c", textwrap.dedent(source), *map(str, args)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    assert process.stdout.readline() != ""
    return process


# --- verbs ----------------------------------------------------------------------------------------------------------


def test_put_find_delete(writer: Index) -> None:
    put(writer, range(100))
    assert writer.find(Tier.DRAM, key(7)) == Address(7, 8, 9)
    assert writer.find(Tier.DRAM, key(100)) is None
    assert writer.find_many(Tier.DRAM, [key(1), key(500), key(2)]) == [raw(1), None, raw(2)]
    assert writer.find_many(Tier.DRAM, []) == []
    assert writer.count(Tier.DRAM) == 100
    with writer.begin() as txn:
        txn.put(Tier.DRAM, [key(7)], [raw(70)])
        assert txn.find(Tier.DRAM, key(7)) == Address(70, 71, 72)
        assert writer.find(Tier.DRAM, key(7)) == Address(7, 8, 9), "readers see it after the commit"
        assert txn.delete(Tier.DRAM, [key(8), key(8), key(555)]) == 1
        assert txn.find(Tier.DRAM, key(8)) is None
    assert writer.find(Tier.DRAM, key(7)) == Address(70, 71, 72)
    assert writer.find(Tier.DRAM, key(8)) is None
    assert writer.count(Tier.DRAM) == 99


def test_pending_is_a_table_of_its_own(writer: Index) -> None:
    with writer.begin() as txn:
        txn.put_pending([key(2), key(1)], [raw(2), raw(1)])
        assert txn.find_pending(key(1)) == Address(1, 2, 3)
        assert txn.find(Tier.DRAM, key(1)) is None
    assert writer.find_pending(key(1)) == Address(1, 2, 3)
    assert writer.find(Tier.DRAM, key(1)) is None
    assert (writer.count(Tier.DRAM), writer.count_pending()) == (0, 2)
    assert list(writer.scan_pending()) == sorted((key(i), raw(i)) for i in (1, 2))
    with writer.begin() as txn:
        assert txn.delete_pending([key(1), key(9)]) == 1
    assert writer.find_pending(key(1)) is None


def test_nvme_is_a_table_of_its_own(writer: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "SCAN_BATCH", 3)
    put(writer, range(2))
    with writer.begin() as txn:
        txn.put(Tier.NVME, [key(i) for i in range(9)], [raw(10 * i) for i in range(9)])
        assert txn.find(Tier.NVME, key(1)) == Address(10, 11, 12)
        assert txn.find(Tier.DRAM, key(1)) == Address(1, 2, 3)
        assert txn.find(Tier.DRAM, key(5)) is None
    assert (writer.count(Tier.DRAM), writer.count_pending(), writer.count(Tier.NVME)) == (2, 0, 9)
    assert (writer.find(Tier.NVME, key(8)), writer.find(Tier.NVME, key(9))) == (Address(80, 81, 82), None)
    assert writer.find_many(Tier.NVME, [key(3), key(20)]) == [raw(30), None]
    assert writer.find_many(Tier.DRAM, [key(3), key(1)]) == [None, raw(1)]
    assert list(writer.scan(Tier.NVME)) == sorted((key(i), raw(10 * i)) for i in range(9))
    assert len(list(writer.scan(Tier.DRAM))) == 2
    with writer.begin() as txn:
        txn.put(Tier.NVME, [key(1)], [raw(7)])
        assert txn.delete(Tier.NVME, [key(7), key(8), key(8), key(77)]) == 2
    assert (writer.count(Tier.DRAM), writer.count(Tier.NVME)) == (2, 7)
    assert (writer.find(Tier.NVME, key(1)), writer.find(Tier.DRAM, key(1))) == (Address(7, 8, 9), Address(1, 2, 3))


def test_longest_starts_anywhere_in_a_chain(writer: Index) -> None:
    for stored, asked, skipped in itertools.product((0, 1, 2, 5, 33), (0, 1, 2, 33, 40), (0, 1, 20)):
        with writer.begin() as txn:
            txn.put(Tier.NVME, [key(i) for i in range(stored)], [raw(i) for i in range(stored)])
        length = max(0, min(stored - skipped, asked))
        found = (length, raw(skipped + length - 1) if length else None)
        keys = [key(i) for i in range(skipped, skipped + asked)]
        assert writer.longest(Tier.NVME, keys) == found, (stored, asked, skipped)
        assert writer.longest(Tier.DRAM, keys) == (0, None)


def test_an_exception_drops_the_whole_transaction(writer: Index) -> None:
    put(writer, range(3))
    with pytest.raises(ZeroDivisionError), writer.begin() as txn:
        txn.put(Tier.DRAM, [key(9)], [raw(9)])
        txn.delete(Tier.DRAM, [key(0)])
        raise ZeroDivisionError
    assert writer.find(Tier.DRAM, key(9)) is None
    assert writer.count(Tier.DRAM) == 3
    with pytest.raises(ValueError), writer.begin() as txn:
        txn.put(Tier.DRAM, [key(9), key(10)], [raw(9)])
    assert writer.count(Tier.DRAM) == 3


def test_longest(writer: Index) -> None:
    for stored, asked in itertools.product((0, 1, 2, 3, 31, 32, 33, 511, 512), (0, 1, 2, 33, 512)):
        put(writer, range(stored))
        length = min(stored, asked)
        found = (length, raw(length - 1) if length else None)
        assert writer.longest(Tier.DRAM, [key(i) for i in range(asked)]) == found, (stored, asked)


def test_scan_goes_on_from_batch_to_batch(writer: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "SCAN_BATCH", 7)
    for count in (0, 6, 7, 8, 49):
        put(writer, range(count))
        assert list(writer.scan(Tier.DRAM)) == sorted((key(i), raw(i)) for i in range(count))
    entries = writer.scan(Tier.DRAM)
    next(entries)
    with writer.begin() as txn:  # a scan holds nothing that a writer would wait for
        txn.delete(Tier.DRAM, [key(i) for i in range(49)])
    assert len(list(entries)) == 6


# --- opening --------------------------------------------------------------------------------------------------------


def test_what_is_absent_or_damaged(folder: NodeFolder) -> None:
    assert Index.open_reader(folder, 1) is None
    with pytest.raises(IndexDamaged, match="absent"):
        Index.open_writer(folder, 1, MIB, fresh=False)
    Index.open_writer(folder, 1, MIB, fresh=True).close()
    path = folder.index(1) / "data.mdb"
    sound = path.read_bytes()
    damages = {"empty": b"", "cut": sound[:-1], "half": sound[: len(sound) // 2], "noise": os.urandom(len(sound))}
    damages["zeros"] = bytes(len(sound))
    for name, data in damages.items():
        path.write_bytes(data)
        assert Index.open_reader(folder, 1) is None, name
        with pytest.raises(IndexDamaged):
            Index.open_writer(folder, 1, MIB, fresh=False)
    path.write_bytes(sound)
    reader = Index.open_reader(folder, 1)
    assert reader is not None
    reader.close()


def test_zeroed_pages_are_damage_not_a_crash(folder: NodeFolder) -> None:
    writer = Index.open_writer(folder, 1, MIB, fresh=True)
    put(writer, range(2000))
    writer.close()
    with open(folder.index(1) / "data.mdb", "r+b") as file:
        file.seek(2 * 4096)
        file.write(bytes(writer_pages(folder) * 4096))
    try:
        writer = Index.open_writer(folder, 1, MIB, fresh=False)
    except IndexDamaged:
        assert Index.open_reader(folder, 1) is None
        return
    with pytest.raises(IndexDamaged):
        writer.find(Tier.DRAM, key(1))
    with pytest.raises(IndexDamaged):
        writer.longest(Tier.DRAM, [key(1)])
    with pytest.raises(IndexDamaged):
        put(writer, range(3))


def writer_pages(folder: NodeFolder) -> int:
    return (folder.index(1) / "data.mdb").stat().st_size // 4096 - 2


def test_an_index_is_found_again_and_keeps_its_size(folder: NodeFolder) -> None:
    writer = Index.open_writer(folder, 1, 4 * MIB, fresh=True)
    put(writer, range(10))
    assert writer.map_bytes == 4 * MIB
    assert 0 < writer.used_bytes() < MIB
    writer.close()
    writer = Index.open_writer(folder, 1, 64 * MIB, fresh=False)
    assert (writer.count(Tier.DRAM), writer.map_bytes, writer.epoch) == (10, 4 * MIB, 1)
    put(writer, range(10, 20))
    writer.close()
    writer = Index.open_writer(folder, 1, MIB, fresh=True)
    assert (writer.count(Tier.DRAM), writer.map_bytes) == (0, MIB)
    writer.close()


def test_modes(folder: NodeFolder) -> None:
    before = os.umask(0)
    try:
        Index.open_writer(folder, 1, MIB, fresh=True).close()
    finally:
        os.umask(before)
    assert folder.index(1).stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.index(1).iterdir()}
    assert modes == {"data.mdb": 0o600, "lock.mdb": 0o600}


# --- one process ----------------------------------------------------------------------------------------------------


def test_closed_is_closed(folder: NodeFolder, writer: Index) -> None:
    reader = Index.open_reader(folder, 1)
    assert reader is not None
    reader.close()
    reader.close()
    for verb in (
        lambda: reader.find(Tier.DRAM, key(1)),
        lambda: reader.find_many(Tier.DRAM, [key(1)]),
        lambda: reader.longest(Tier.DRAM, [key(1)]),
        lambda: reader.count(Tier.DRAM),
        lambda: list(reader.scan(Tier.DRAM)),
        lambda: reader.begin().__enter__(),
    ):
        with pytest.raises(IndexDamaged):
            verb()
    assert writer.find(Tier.DRAM, key(1)) is None, "the others of this process go on"


def test_a_new_index_of_the_same_epoch_is_not_mixed_up_with_the_old(folder: NodeFolder, writer: Index) -> None:
    put(writer, range(5))
    fresh = Index.open_writer(folder, 1, MIB, fresh=True)
    assert (writer.count(Tier.DRAM), fresh.count(Tier.DRAM)) == (5, 0)
    put(fresh, range(2))
    assert (writer.count(Tier.DRAM), fresh.count(Tier.DRAM)) == (5, 2)
    fresh.close()


def test_a_process_that_only_reads_cannot_become_the_writer(folder: NodeFolder) -> None:
    Index.open_writer(folder, 1, MIB, fresh=True).close()
    reader = Index.open_reader(folder, 1)
    assert reader is not None
    with pytest.raises(NodeBusy, match="open for reading"):
        Index.open_writer(folder, 1, MIB, fresh=False)
    reader.close()
    Index.open_writer(folder, 1, MIB, fresh=False).close()


def test_threads_read_while_one_writes_and_another_closes(folder: NodeFolder, writer: Index) -> None:
    put(writer, range(64))
    keys = [key(i) for i in range(64)]
    failures: list[object] = []
    done = threading.Event()

    def read(reader: Index) -> None:
        try:
            while not done.is_set():
                length, last = reader.longest(Tier.DRAM, keys)
                if (length, last) != (64, raw(63)):
                    failures.append(length)
        except IndexDamaged:
            pass  # closed under us

    readers = [Index.open_reader(folder, 1) for _ in range(4)]
    threads = [threading.Thread(target=read, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    for i in range(200):
        put(writer, range(1000 + i, 1032 + i))
        if i % 50 == 49:
            reader = readers[i // 50]
            assert reader is not None
            reader.close()
    done.set()
    for thread in threads:
        thread.join(60)
    assert not failures


# --- several processes ----------------------------------------------------------------------------------------------

WRITER = """
    import sys
    from kvstore.model.replica import Tier
    from kvstore.shm.folder import NodeFolder
    from kvstore.shm.index import Index
    writer = Index.open_writer(NodeFolder.at(sys.argv[1]), 1, 1 << 24, fresh=False)
    print("open", flush=True)
    i = int(sys.argv[2])
    while True:
        keys = [(n * 0x9E3779B97F4A7C15 % 2**128).to_bytes(16, "little") for n in range(i, i + 8)]
        with writer.begin() as txn:
            txn.put(Tier.DRAM, keys, [k[::-1] for k in keys])
        i += 8
"""


def test_a_killed_writer_leaves_whole_transactions(folder: NodeFolder, writer: Index) -> None:
    writer.close()
    count = 0
    for _ in range(5):
        process = start(WRITER, folder.path, count)
        reader = Index.open_reader(folder, 1)
        assert reader is not None
        while reader.count(Tier.DRAM) < count + 400:
            pass
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        count = reader.count(Tier.DRAM)
        assert count % 8 == 0
        entries = dict(reader.scan(Tier.DRAM))
        assert entries == {key(i): key(i)[::-1] for i in range(count)}
        reader.close()
    again = Index.open_writer(folder, 1, MIB, fresh=False)
    put(again, range(count, count + 1))
    assert again.count(Tier.DRAM) == count + 1
    again.close()


HOLDER = """
    import sys, time
    from kvstore.model.replica import Tier
    from kvstore.shm.folder import NodeFolder
    from kvstore.shm.index import Index
    reader = Index.open_reader(NodeFolder.at(sys.argv[1]), 1)
    transaction = reader._begin(reader._tables.tiers[Tier.DRAM])
    transaction.get(b"k" * 16)
    print("inside", flush=True)
    time.sleep(60)
"""


def test_dead_readers_are_cleared(folder: NodeFolder, writer: Index) -> None:
    process = start(HOLDER, folder.path)
    assert writer.clear_dead_readers() == 0
    process.kill()
    process.communicate()
    assert writer.clear_dead_readers() == 1
    assert writer.clear_dead_readers() == 0


def test_a_stopped_reader_makes_the_index_full_at_worst(folder: NodeFolder) -> None:
    """Its snapshot keeps old pages from reuse; the bound is the map, and the remedy a rebuild."""
    writer = Index.open_writer(folder, 1, MIB, fresh=True)
    put(writer, range(32))
    process = start(HOLDER, folder.path)
    try:
        with pytest.raises(IndexFull):
            for _ in range(2000):
                put(writer, range(32))
        assert writer.find(Tier.DRAM, key(3)) == Address(3, 4, 5)
        Index.rebuild(folder, 1, 2, {Tier.DRAM: writer.scan(Tier.DRAM)}, MIB)
        rebuilt = Index.open_writer(folder, 2, MIB, fresh=False)
        for _ in range(100):
            put(rebuilt, range(32))
        rebuilt.close()
    finally:
        process.kill()
        process.communicate()
        writer.close()


# --- rebuilding -----------------------------------------------------------------------------------------------------


def test_rebuild_makes_a_whole_new_epoch(folder: NodeFolder, writer: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_environment, "FILL_BATCH", 100)
    items = sorted((key(i), raw(i)) for i in range(2500))
    pending = [(key(9), raw(9)), (key(3), raw(3)), (key(9), raw(10))]
    nvme = sorted((key(i), raw(i + 5)) for i in range(1000, 3000))
    reader = Index.open_reader(folder, 1)
    assert reader is not None
    Index.rebuild(folder, 1, 2, {Tier.DRAM: iter(items), Tier.NVME: iter(nvme)}, MIB, pending)
    assert folder.epochs() == [1, 2]
    rebuilt = Index.open_writer(folder, 2, MIB, fresh=False)
    assert list(rebuilt.scan(Tier.DRAM)) == items
    assert list(rebuilt.scan_pending()) == sorted({key(9): raw(9), key(3): raw(3)}.items())
    assert list(rebuilt.scan(Tier.NVME)) == nvme
    put(rebuilt, range(2500, 2600))
    Index.remove(folder, 1)
    Index.remove(folder, 1)
    assert reader.count(Tier.DRAM) == 0, "who has the old one open goes on"
    assert folder.epochs() == [2]
    rebuilt.close()
    reader.close()


def test_a_rebuild_that_fails_changes_nothing(folder: NodeFolder, writer: Index) -> None:
    items = sorted((key(i), raw(i)) for i in range(20000))
    with pytest.raises(IndexFull):
        Index.rebuild(folder, 1, 2, {Tier.DRAM: items}, 64 * 4096)

    def broken() -> Iterator[tuple[bytes, bytes]]:
        yield items[0]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Index.rebuild(folder, 1, 2, {Tier.DRAM: broken()}, MIB)
    assert sorted(os.listdir(folder.path)) == ["index-1", "sessions"]


# --- room -----------------------------------------------------------------------------------------------------------


def test_a_full_map_drops_the_transaction_only(folder: NodeFolder) -> None:
    writer = Index.open_writer(folder, 1, 64 * 4096, fresh=True)
    stored = 0
    with pytest.raises(IndexFull):
        for stored in range(0, 100_000, 32):
            put(writer, range(stored, stored + 32))
    assert 1000 < writer.count(Tier.DRAM) == stored
    assert writer.find(Tier.DRAM, key(stored - 1)) == Address(*(stored - 1 + n for n in range(3)))
    writer.close()


def test_memory_is_there_before_it_is_written(folder: NodeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store to a page that a full tmpfs cannot give would kill the daemon; so it is asked for before."""
    writer = Index.open_writer(folder, 1, 64 * MIB, fresh=True)
    path = folder.index(1) / "data.mdb"
    for i in range(0, 20000, 500):
        put(writer, range(i, i + 500))
        assert path.stat().st_blocks * 512 >= writer.used_bytes()
    assert path.stat().st_blocks * 512 < 24 * MIB

    def full(fd: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    count = writer.count(Tier.DRAM)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(IndexFull, match="remount"):
        put(writer, range(20000, 30000))
    assert writer.count(Tier.DRAM) == count
    monkeypatch.undo()
    put(writer, range(20000, 30000))
    writer.close()


def test_without_memory_small_transactions_follow(folder: NodeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was reserved for the entries suffices to change each of them, when not a byte more is to be had."""
    writer = Index.open_writer(folder, 1, 64 << 20, fresh=True)
    writer.reserve(20_000, 16)

    def none(path: Path, size_bytes: int) -> None:
        raise IndexFull("no memory")

    monkeypatch.setattr(index, "allocate_map", none)
    keys = [key(number) for number in range(20_000)]
    with pytest.raises(IndexFull), writer.begin() as txn:
        txn.put(Tier.DRAM, keys, [raw(number) for number in range(len(keys))])
    assert writer.count(Tier.DRAM) == 0
    for shift in (1, 2):
        for at in range(0, len(keys), 16):
            with writer.begin() as txn:
                some = keys[at : at + 16]
                txn.put(Tier.DRAM, some, [raw(shift + at + i) for i in range(len(some))])
    assert writer.count(Tier.DRAM) == len(keys)
    assert list(writer.find_many(Tier.DRAM, keys[:1])) == [raw(2)]
    for at in range(0, len(keys), 16):
        with writer.begin() as txn:
            txn.delete(Tier.DRAM, keys[at : at + 16])
    assert writer.count(Tier.DRAM) == 0
    with pytest.raises(IndexFull):
        writer.reserve(200_000, 16)
    writer.close()


OPEN_WHILE_WRITING = """
    import threading
    import numpy as np
    import kvstore

    store = kvstore.open(dram="8MiB")
    layout = kvstore.Layout(model="m", layers=1, kv_heads=1, head_dim=16, page_tokens=16)
    cache, ended = store.cache(layout), threading.Event()

    def write():
        number = 0
        while not ended.is_set():
            number += 1
            cache.put(np.arange(160) + 1000 * number, np.zeros((10, layout.page_bytes), np.uint8), wait=True)

    thread = threading.Thread(target=write)
    thread.start()
    print("started", flush=True)
    for _ in range(300):
        with kvstore.connect(store.name) as other:
            other.cache(layout).get(np.arange(161))
    ended.set()
    thread.join()
    store.close()
    print("ended")
"""


def test_an_index_is_opened_while_another_thread_of_the_process_writes_it() -> None:
    """Opening waited for the writer and kept the interpreter locked, which the writer needed to end: both hung."""
    child = start(OPEN_WHILE_WRITING)
    try:
        said, _ = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == 0, said
