"""The log of puts: what is published comes out whole, once, in order; what cannot be is noticed."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

import pytest

from kvstore.shm import put_log
from kvstore.shm.folder import NodeFolder
from kvstore.shm.put_log import REQUEST_BYTES_MAX, RING_BYTES, SLOTS, LogDamaged, PutLog

SESSION = 77


@pytest.fixture
def folder(tmp_path: Path) -> NodeFolder:
    made = NodeFolder(tmp_path, "n")
    made.create()
    return made


@pytest.fixture
def log(folder: NodeFolder) -> PutLog:
    return PutLog.create(folder)


def slot_of(log: PutLog) -> int:
    slot = log.assign(SESSION)
    assert slot is not None
    return slot


def taken(log: PutLog, slot: int) -> list[bytes]:
    """Everything there is, taken in."""
    found = []
    for position, request in log.records(slot):
        found.append(request)
        log.mark(slot, position)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_requests_come_out_whole_and_in_order(seed: int, log: PutLog) -> None:
    """Against a plain queue, over many turns of the ring, by a writer that is sometimes faster than the reader."""
    chance, slot, waiting = random.Random(seed), slot_of(log), deque[bytes]()
    sizes = [(40, 3000), (1000, 60_000), (90_000, REQUEST_BYTES_MAX)][seed % 3]
    published = refused = 0
    while published < 40 * RING_BYTES:
        request = chance.randbytes(chance.randint(*sizes))
        position = log.append(slot, SESSION, request)
        if position:
            waiting.append(request)
            published += len(request)
            assert log.drained_position(slot) < position
        else:
            refused += 1
            assert waiting, "there is room for one in an empty ring"
        if not position or chance.random() < 0.15:
            for done, found in log.records(slot):
                assert found == waiting.popleft()
                log.mark(slot, done)
                if chance.random() < 0.3:
                    break
        assert log.is_drained == (not waiting)
        assert log.waiting() == ([slot] if waiting else [])
    assert refused


def test_what_is_published_and_not_taken_in_is_held(log: PutLog) -> None:
    chance, slot = random.Random(1), slot_of(log)
    keys, gone = deque[bytes](), deque[bytes](maxlen=50)
    for _ in range(4000):
        key = chance.randbytes(16)
        if log.append(slot, SESSION, chance.randbytes(500) + key + chance.randbytes(100)):
            keys.append(key)
        if len(keys) > chance.randint(1, 300):
            for position, request in log.records(slot):
                assert request[500:516] == keys[0]
                gone.append(keys.popleft())
                log.mark(slot, position)
                break
        if keys:
            assert log.holder(chance.choice(keys)) == slot
            assert log.holds(keys[0], slot)
            assert not log.holds(keys[-1], (slot + 1) % SLOTS)
        assert all(log.holder(key) < 0 for key in list(gone)[-3:])


def test_a_closed_slot_is_given_to_nobody_until_its_session_has_ended(log: PutLog) -> None:
    slot = slot_of(log)
    log.append(slot, SESSION, b"lost")
    log.close(slot)
    assert log.is_drained
    assert not log.append(slot, SESSION, b"more")
    assert log.assign(SESSION) is None
    assert slot not in {log.assign(session) for session in range(1, SLOTS)}
    assert log.sessions()[SESSION] == slot
    log.free(slot)
    assert log.assign(1000) == slot


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_writer_killed_before_it_publishes_has_published_nothing(cut: int, log: PutLog) -> None:
    """Whatever part of a record it had written."""
    slot = slot_of(log)
    assert log.append(slot, SESSION, b"first" * 10)
    end = log._words[put_log._PUBLISHED + slot]
    at = put_log._RINGS_AT + slot * RING_BYTES + end
    log._map[at : at + 8 * cut] = random.Random(cut).randbytes(8 * cut)
    assert taken(log, slot) == [b"first" * 10]
    assert log.append(slot, SESSION, b"of the next one") and taken(log, slot) == [b"of the next one"]


def test_damage_is_noticed(log: PutLog) -> None:
    """Any byte of a record, and any position that cannot be."""
    slot, chance = slot_of(log), random.Random(3)
    ring = put_log._RINGS_AT + slot * RING_BYTES
    words, published = log._words, put_log._PUBLISHED + slot
    log.append(slot, SESSION, chance.randbytes(200))
    stop = words[published]
    for at in range(216):
        log._map[ring + at] ^= 1 << chance.randrange(8)
        with pytest.raises(LogDamaged):
            taken(log, slot)
        assert log.drained_position(slot) == 0
        log.skip(slot)
        words[published] = 0
        log.mark(slot, 0)
        log.append(slot, SESSION, chance.randbytes(200))
    for wrong in (stop - 8, stop + 8, stop + 3, RING_BYTES + 8, 1 << 40, (1 << 64) - 8):
        words[published] = wrong
        with pytest.raises(LogDamaged):
            taken(log, slot)
        log.mark(slot, 0)
        assert not log.append(slot, SESSION, b"more") or wrong < RING_BYTES
        words[published] = stop
        log.holder(b"sixteen bytes!!!")  # looks only where a ring is


def test_only_the_file_that_was_asked_for_is_opened(folder: NodeFolder, log: PutLog) -> None:
    again = PutLog.open(folder, log.id)
    assert again is not None and again.id == log.id
    assert PutLog.open(folder, 0) is None
    assert PutLog.open(folder, log.id + 2) is None
    whole = folder.puts.read_bytes()[:4096]
    for changed in (b"KVSPUTS2" + whole[8:], whole[:8] + b"\4" + whole[9:]):
        with open(folder.puts, "r+b") as file:
            file.write(changed)
        assert PutLog.open(folder, log.id) is None
    with open(folder.puts, "r+b") as file:
        file.write(whole)
        file.truncate(1 << 20)
    assert PutLog.open(folder, log.id) is None
    folder.puts.unlink()
    assert PutLog.open(folder, log.id) is None
