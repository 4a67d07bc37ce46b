"""ExtentTable: tables of both tiers, what is believed and what is not."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import xxhash

from kvstore.errors import VersionMismatch
from kvstore.model.replica import SHARDS_MAX, FrameClass, FrameState, Tier, word_of
from kvstore.shm import records as tables
from kvstore.shm.folder import NodeFolder
from kvstore.shm.records import RECORDS_HEAD_BYTES, ExtentTable, claimed_positions

CLASS = FrameClass(page_bytes=10_000, page_tokens=15, layers=3)
INCARNATION = 0x1234_5678_9ABC
FRAMES = 7


@pytest.fixture
def folder(tmp_path: Path) -> NodeFolder:
    folder = NodeFolder(tmp_path, "n")
    folder.create()
    return folder


def create(folder: NodeFolder, extent: int = 5, tier: Tier = Tier.DRAM) -> ExtentTable:
    return ExtentTable.create(folder, extent, 2, CLASS, INCARNATION, FRAMES, tier)


@pytest.mark.parametrize(
    ("tier", "row_bytes", "uses_bytes"), [(Tier.DRAM, CLASS.record.row_bytes, 16 + SHARDS_MAX), (Tier.NVME, 96, 8)]
)
def test_tables_of_both_tiers(folder: NodeFolder, tier: Tier, row_bytes: int, uses_bytes: int) -> None:
    table = create(folder, tier=tier)
    reader = ExtentTable.open(folder, 5, INCARNATION)
    assert reader is not None
    for mapped in (table, reader):
        assert (mapped.extent, mapped.position, mapped.frames, mapped.tier) == (5, 2, FRAMES, tier)
        assert mapped.frame_class == CLASS
        assert mapped.rows.shape == (FRAMES, row_bytes) == (FRAMES, mapped.fmt.row_bytes)
        assert mapped.last_use.shape == (FRAMES,)
        assert not mapped.rows.any() and not mapped.last_use.any()
    assert folder.records(5).stat().st_size == RECORDS_HEAD_BYTES + FRAMES * row_bytes
    assert folder.uses(5).stat().st_size == 64 + FRAMES * uses_bytes

    table.words[3] = word_of(9, FrameState.SEALED)
    table.column(table.fmt.info)[3] = 77
    table.rows[3, table.fmt.parent] = 5
    assert int(reader.words[3]) == 9 << 8 | 2
    assert int(reader.column(reader.fmt.info)[3]) == 77
    assert (reader.rows[3, reader.fmt.parent] == 5).all()
    reader.last_use[4] = 123  # that is the clients'
    assert table.last_use.tolist() == [0, 0, 0, 0, 123, 0, 0]
    with pytest.raises(ValueError, match="read-only"):
        reader.words[0] = 1


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.NVME])
def test_identity_sums_follow_identity_and_parent(folder: NodeFolder, tier: Tier) -> None:
    table = create(folder, tier=tier)
    before = table.identity_sums(slice(0, FRAMES))
    table.rows[2, table.fmt.parent.stop - 1] = 1
    table.rows[4, 8] = 1
    after = table.identity_sums(slice(0, FRAMES))
    assert [i for i in range(FRAMES) if before[i] != after[i]] == [2, 4]


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.NVME])
def test_a_doubt_is_a_miss(folder: NodeFolder, tier: Tier) -> None:
    assert ExtentTable.open(folder, 5, INCARNATION) is None
    create(folder, tier=tier)
    assert ExtentTable.open(folder, 5, INCARNATION + 1) is None, "of another segment, or other devices"
    assert ExtentTable.open(folder, 6, INCARNATION) is None
    records, uses = folder.records(5), folder.uses(5)
    sound, sound_uses = records.read_bytes(), uses.read_bytes()
    damages = {
        "cut": sound[:-1],
        "longer": sound + b"\0",
        "empty": b"",
        "another tier": changed(sound, 9, 0),
        "no tier": changed(sound, 9, 3),
        "another position": changed(sound, 4, 1),
    }
    for name, data in damages.items():
        records.write_bytes(data)
        assert ExtentTable.open(folder, 5, INCARNATION) is None, name
    records.write_bytes(summed(changed(sound, 1, 1)))
    with pytest.raises(VersionMismatch, match=f"records-5 format 1, this program knows {tables._VERSION}"):
        ExtentTable.open(folder, 5, INCARNATION)
    records.write_bytes(sound)
    uses.write_bytes(sound_uses[:-8])
    assert ExtentTable.open(folder, 5, INCARNATION) is None
    uses.write_bytes(sound_uses)
    assert ExtentTable.open(folder, 5, INCARNATION) is not None


def changed(data: bytes, word: int, value: int) -> bytes:
    """In both copies of the head."""
    for at in (8 * word, 2048 + 8 * word):
        data = data[:at] + struct.pack("<Q", value) + data[at + 8 :]
    return data


def summed(data: bytes) -> bytes:
    """With sums that hold, as a program of another version writes them."""
    for at in (0, 2048):
        total = xxhash.xxh3_64_intdigest(data[at : at + 80]).to_bytes(8, "little")
        data = data[: at + 80] + total + data[at + 88 :]
    return data


def test_a_table_has_its_head_twice(folder: NodeFolder) -> None:
    create(folder).close()
    records = folder.records(5)
    sound = records.read_bytes()
    for at in range(0, 88, 5):
        for copy in (0, 2048):
            data = bytearray(sound)
            data[copy + at] ^= 0x11
            records.write_bytes(data)
            reader = ExtentTable.open(folder, 5, INCARNATION)
            assert reader is not None and reader.frames == FRAMES
            assert records.read_bytes() == data, "readers change nothing"
            owner = ExtentTable.open(folder, 5, INCARNATION, writable=True)
            assert owner is not None
            owner.close()
            reader.close()
            assert records.read_bytes() == sound


@pytest.mark.parametrize("damaged", [0, 2048])
def test_a_damaged_copy_of_the_head_is_repaired_by_the_daemon(damaged: int, folder: NodeFolder) -> None:
    create(folder).close()
    sound = folder.records(5).read_bytes()
    data = bytearray(sound)
    data[damaged : damaged + 2048] = bytes(2048)
    folder.records(5).write_bytes(data)
    assert ExtentTable.open(folder, 5, INCARNATION) is not None and folder.records(5).read_bytes() == data
    assert ExtentTable.open(folder, 5, INCARNATION, writable=True) is not None
    assert folder.records(5).read_bytes() == sound


def test_what_a_lost_table_says_of_its_place(folder: NodeFolder) -> None:
    create(folder).close()
    sound = folder.records(5).read_bytes()
    position = int.from_bytes(sound[32:40], "little")
    for damage, expected in {
        "none": {position},
        "one head": {position},
        "both": {position},
        "both, one place": None,
        "cut": {position},
        "zeros": None,
        "absent": None,
    }.items():
        data = bytearray(sound)
        if damage in ("one head", "both"):
            data[40] ^= 1
        if damage == "both, one place":
            data[33] ^= 1
        if damage.startswith("both"):
            data[2048 + 56] ^= 1
        folder.records(5).write_bytes({"cut": data[:3000], "zeros": bytes(len(data))}.get(damage, data))
        if damage == "absent":
            folder.records(5).unlink()
        assert claimed_positions(folder, 5, INCARNATION) == expected, damage
    create(folder).close()
    assert claimed_positions(folder, 5, INCARNATION + 1) == set(), "another segment's"
    create(folder, tier=Tier.NVME).close()
    assert claimed_positions(folder, 5, INCARNATION) == set(), "another tier's"


@pytest.mark.parametrize("tier", [Tier.DRAM, Tier.NVME])
def test_what_was_unlinked_matches_nothing(folder: NodeFolder, tier: Tier) -> None:
    table = create(folder, tier=tier)
    table.words[:] = word_of(3, FrameState.SEALED)
    reader = ExtentTable.open(folder, 5, INCARNATION)
    assert reader is not None
    table.unlink()
    table.close()
    assert not reader.words.any()
    assert ExtentTable.open(folder, 5, INCARNATION) is None
    assert not folder.records(5).exists() and not folder.uses(5).exists()
