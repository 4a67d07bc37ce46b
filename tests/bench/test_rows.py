"""The benchmark's arithmetic, that it notices wrong bytes, and a few rows from end to end."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import kvstore
from kvstore.bench.content import LAYOUTS, BenchWork, Content
from kvstore.bench.get import Reading
from kvstore.bench.harness import Bar, BenchFailed, Kind, alternate, medians, quickest, result, speeds
from kvstore.bench.nvme import LIMITS, PageFinder, RawFile, Scratch, file_system, plan, target_bytes
from kvstore.bench.rows import ROWS, SIZES, select_rows
from kvstore.bench.stage import RunSettings, wait_for
from kvstore.cli.bench import bench
from kvstore.errors import InvalidRequest
from kvstore.tier.nvme import geometry as nvme_geometry
from tests.helpers.benchmarks import QUICK_S, run_quick

# --- Arithmetic ----------------------------------------------------------------------------------------------------


def test_ratio_is_taken_inside_each_round() -> None:
    line = result("x", Kind.TIME, ours=[12, 12, 33], limit=[10, 11, 30], bar=Bar(1.15, at_least=False))
    assert line.ratio == pytest.approx(1.1)
    assert (line.ratio_min, line.ratio_max) == (pytest.approx(12 / 11), pytest.approx(1.2))
    assert (line.limit, line.ours, line.met) == (11, 12, True)
    assert line.rounds["ratio"] == pytest.approx([1.2, 12 / 11, 1.1])


@pytest.mark.parametrize(
    ("kind", "ours", "limit", "ratio"),
    [
        (Kind.SPEED, 18e9, 20e9, 0.9),  # bytes/s: a share of the limit
        (Kind.TIME, 30e-6, 15e-6, 2.0),  # s: a multiple of the limit
        (Kind.GAIN, 1e-4, 3e-3, 30.0),  # s: how many times faster
    ],
)
def test_ratio_of_each_kind(kind: Kind, ours: float, limit: float, ratio: float) -> None:
    assert result("x", kind, [ours], [limit]).ratio == pytest.approx(ratio)


def test_bars() -> None:
    assert Bar(0.94).met(0.94) and not Bar(0.94).met(0.93)
    assert Bar(2, at_least=False).met(2) and not Bar(2, at_least=False).met(2.1)
    assert (Bar(0.94).text, Bar(2, at_least=False, unit="s").text) == (">= 0.94", "<= 2 s")
    assert result("x", Kind.SPEED, [1], [1]).met is None
    assert result("x", Kind.SPEED, [1], [1], bar=Bar(0.5), sound=False).met is False
    alone = Bar(400, at_least=False, of_ratio=False, unit="B")
    assert result("x", Kind.COUNT, [399], bar=alone).met is True
    with pytest.raises(BenchFailed, match="no limit"):
        result("x", Kind.COUNT, [399], bar=Bar(400))


@pytest.mark.parametrize(("ours", "limit"), [([], []), ([1.0], [1.0, 2.0])])
def test_rounds_have_to_fit(ours: list[float], limit: list[float]) -> None:
    with pytest.raises(BenchFailed, match="rounds"):
        result("x", Kind.TIME, ours, limit)


def test_every_variant_takes_its_turn_on_every_step() -> None:
    calls: list[tuple[str, int]] = []
    variants = {name: lambda step, name=name: calls.append((name, step)) for name in "abc"}
    seconds = alternate(variants, range(6), 3, lambda step: step, lambda name, value: None)
    assert calls[:6] == [("a", 0), ("b", 1), ("c", 2), ("a", 3), ("b", 4), ("c", 5)]
    assert sorted(calls) == [(name, step) for name in "abc" for step in range(6)]
    assert {name: [len(steps) for steps in rounds] for name, rounds in seconds.items()} == dict.fromkeys("abc", [2] * 3)


def test_what_is_prepared_and_checked_is_not_timed() -> None:
    def slow(_: object) -> int:
        wait_for(lambda: False, "never", 0.05) if _ is None else None
        return 1

    def wait(*_: object) -> int:
        with pytest.raises(BenchFailed):
            wait_for(lambda: False, "never", 0.05)
        return 1

    seconds = alternate({"a": slow}, [1], 1, wait, wait, wait)
    assert seconds["a"][0][0] < 0.04


def test_a_wrong_value_ends_the_row() -> None:
    def check(name: str, value: object) -> None:
        if value != 1:
            raise BenchFailed(f"{name}: {value}")

    with pytest.raises(BenchFailed, match="a: 2"):
        alternate({"a": lambda step: step}, [1, 2], 1, lambda step: step, check)


def test_too_few_steps_for_the_variants() -> None:
    with pytest.raises(BenchFailed, match="2 variants need at least as many steps"):
        alternate({"a": len, "b": len}, [1], 1, lambda step: "", lambda name, value: None)


def test_medians_and_speeds() -> None:
    seconds = {"slow": [[3.0, 1.0, 2.0], [5.0]], "quick": [[1.0], [1.0]]}
    assert medians(seconds["slow"]) == [2.0, 5.0]
    assert speeds(seconds["slow"], 10) == [5.0, 2.0]
    assert quickest(seconds, ("slow", "quick")) == "quick"


# --- Bytes ---------------------------------------------------------------------------------------------------------


def test_content_follows_from_key_and_offset() -> None:
    content, rows = Content(4096), np.zeros((3, 4096), np.uint8)
    hashes = [bytes([i]) * 16 for i in range(3)]
    content.fill(rows, hashes)
    content.check(rows, hashes, "x")
    assert len({row.tobytes() for row in rows}) == 3
    with pytest.raises(BenchFailed, match="page 0"):
        content.check(rows, hashes[::-1], "x")
    rows[2, 4095] ^= 1
    with pytest.raises(BenchFailed, match="page 2"):
        content.check(rows, hashes, "x")


def test_work_is_the_same_in_every_process() -> None:
    work = BenchWork("4k", seed=1, chains=2, pages=3)
    again = BenchWork(**json.loads(json.dumps(work.to_json())))
    assert again == work and np.array_equal(again.tokens(1), work.tokens(1))
    assert not np.array_equal(work.tokens(0), work.tokens(1))
    assert work.total_bytes == 2 * 3 * 4096


@pytest.mark.parametrize("damage", ["none", "byte", "absent"])
def test_a_row_that_reads_wrong_bytes_fails(tmp_path: Path, damage: str) -> None:
    work = BenchWork("4k", seed=1, chains=2, pages=8)
    content, rows = Content(4096), np.zeros((8, 4096), np.uint8)
    with kvstore.open(dram="4MiB", shm_dir=tmp_path) as store:
        cache = store.cache(work.layout)
        for chain in range(2 if damage != "absent" else 1):
            keys = work.keys(cache, chain)
            content.fill(rows, keys.hashes)
            rows[7, 5] ^= damage == "byte" and chain == 1
            cache.put(keys, rows)
        if damage == "none":
            Reading(store, work).verify()
        else:
            with pytest.raises(BenchFailed, match="wrong bytes in page 7" if damage == "byte" else "0 of 8 pages"):
                Reading(store, work).verify()


# --- The disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk_dir(tmp_path: Path) -> Path:
    """A folder on a file system with O_DIRECT."""
    probe = tmp_path / "probe"
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"no O_DIRECT there: {error}")
    probe.unlink()
    return tmp_path


RANGES = [(8192, 3 << 20), (5 << 20, 4096), (6 << 20, 1_130_496)]


@pytest.mark.parametrize("how", LIMITS)
def test_every_way_reads_the_same_bytes(disk_dir: Path, how: str) -> None:
    data = np.random.default_rng(1).integers(0, 256, 8 << 20, dtype=np.uint8)
    (disk_dir / "file").write_bytes(data.tobytes())
    wanted = np.concatenate([data[at : at + nbytes] for at, nbytes in RANGES])
    with RawFile(disk_dir / "file", len(wanted)) as raw:
        assert raw.run(raw.reads(RANGES, how)) == len(wanted)
        assert np.array_equal(raw.buffer, wanted)


@pytest.mark.parametrize("how", LIMITS)
def test_limit_writes_its_ranges(disk_dir: Path, how: str) -> None:
    with RawFile(disk_dir / "new", 4 << 20, create_bytes=8 << 20) as raw:
        assert not (disk_dir / "new").exists(), "it goes with the process"
        raw.buffer[:] = 7
        assert raw.run(raw.writes([(1 << 20, 4 << 20)], how)) == 4 << 20
        raw.sync()
        raw.run(raw.reads([((1 << 20) - 4096, 8192), (5 << 20, 4096)], how))
        assert raw.buffer[:12288:4096].tolist() == [0, 7, 0]


def test_short_file_fails_the_row(disk_dir: Path) -> None:
    (disk_dir / "file").write_bytes(bytes(4096))
    with RawFile(disk_dir / "file", 8192) as raw, pytest.raises(BenchFailed, match="moved 4096 of 8192"):
        raw.run(raw.reads([(0, 8192)], "pieces_1m"))


def test_scratch_folder_says_what_it_needs_and_goes(tmp_path: Path) -> None:
    with Scratch(tmp_path, 4096, quick=True) as scratch:
        (scratch.path / "pages").write_bytes(b"x")
    assert not list(tmp_path.iterdir())
    with pytest.raises(BenchFailed, match=r"MiB free, and this row needs 10737\d+ MiB; --dir"):
        Scratch(tmp_path, 1 << 50, quick=True)
    with pytest.raises(BenchFailed, match="No such file.*--dir"):
        Scratch(tmp_path / "absent", 4096, quick=True)
    if file_system(Path("/dev/shm")) == "tmpfs":
        with pytest.raises(BenchFailed, match="is in memory"):
            Scratch(Path("/dev/shm"), 4096)


def test_pages_are_where_the_limit_reads_them(disk_dir: Path) -> None:
    work = BenchWork("4k", seed=1, chains=24, pages=8)
    content, rows = Content(4096), np.zeros((8, 4096), np.uint8)
    nvme = f"{disk_dir / 'pages'}:{target_bytes(24 * 8, work.layout, 1 << 20)}"
    settings: dict[str, Any] = {"nvme_extent": "1MiB", "shm_dir": disk_dir}
    with kvstore.open(name="bench-where", dram="256KiB", nvme=nvme, **settings) as store:  # eight chains of 24
        cache = store.cache(work.layout)
        for each in (work.keys(cache, chain) for chain in range(24)):
            content.fill(rows, each.hashes)
            cache.put(each, rows)
        keys = [work.keys(cache, chain) for chain in range(3)]
        with contextlib.closing(PageFinder.of(disk_dir, "bench-where", work.layout)) as where:
            wait_for(lambda: where.are_durable([each.hashes[-1] for each in keys]), "not saved", 10)
            stride = nvme_geometry.stride_bytes(where.frame_class)
            with RawFile(disk_dir / "pages", 8 * stride) as raw:
                for each, ranges in zip(keys, where.ranges([each.hashes for each in keys]), strict=True):
                    assert raw.run(raw.reads(ranges, "pieces_1m")) == 8 * stride
                    content.check(raw.buffer.reshape(8, stride)[:, -4096:], each.hashes, "the disk")
            with pytest.raises(BenchFailed, match="not on NVMe"):
                where.ranges([[bytes(16)]])


@pytest.mark.parametrize("geometry", ["2m", "256k", "64k"])
def test_plans_are_larger_than_dram(geometry: str) -> None:
    assert plan(geometry, False, 1).total_bytes >= 512 << 20
    assert plan(geometry, True, 1).total_bytes == 96 << 20


# --- The command ---------------------------------------------------------------------------------------------------


def test_rows_are_chosen_by_name() -> None:
    assert [row.name for row in select_rows(["put_2m", "keys_128k"])] == ["keys_128k", "put_2m"]
    assert select_rows([])[: len(ROWS)] == list(ROWS.values())  # then those of other packages
    with pytest.raises(InvalidRequest, match="'get_3m'"):
        select_rows(["get_3m"])


def test_geometries_and_settings() -> None:
    assert {name: layout.page_bytes for name, layout in LAYOUTS.items()} == {
        "2m": 2 << 20,
        "256k": 256 << 10,
        "64k": 64 << 10,
        "4k": 4 << 10,
    }
    assert RunSettings(quick=True).walk_bytes <= 128 << 20


def test_list() -> None:
    listed = json.loads(CliRunner().invoke(bench, ["--list", "--json"]).output)["rows"]
    bars = {row["name"]: row["bar"] for row in listed}
    assert (bars["restart_8g"], bars["get_nvme_2m"], bars["put_calls"]) == ("<= 2 s", ">= 0.85", "")
    assert CliRunner().invoke(bench, ["--list"]).exit_code == 0


def test_every_number_of_the_design_has_a_row_and_its_bar() -> None:
    assert {name: row.bar_text for name, row in ROWS.items() if not name.startswith("hbm_")} == {
        "keys_128k": "<= 3",
        "lookup_512": "<= 0.25",
        "lease_2m": ">= 20",
        "two_readers": ">= 0.85",
        "get_2m": ">= 0.94",
        "get_256k": ">= 0.9",
        "get_64k": ">= 0.75",
        "get_one_256k": "<= 2",
        "put_2m": ">= 0.9",
        "put_256k": ">= 0.8",
        "put_64k": ">= 0.65",
        "put_one_256k": "<= 4",
        "put_twice_2m": "",
        "put_calls": "",
        "objects_put_2m": ">= 0.9",
        "objects_put_256k": ">= 0.7",
        "objects_put_64k": ">= 0.5",
        "objects_put_wait_2m": ">= 0.8",
        "objects_put_wait_256k": ">= 0.5",
        "objects_put_wait_64k": ">= 0.3",
        "objects_get_2m": ">= 0.9",
        "objects_get_256k": ">= 0.85",
        "objects_get_64k": ">= 0.6",
        "evict_1m": "<= 1.5",
        "memory_1m": "<= 400 B",
        "restart_8g": "<= 2 s",
        **{f"get_nvme_{size}": ">= 0.85" for size in SIZES},
        **{f"demotion_{size}": ">= 0.8" for size in SIZES},
        "get_while_demoting_2m": ">= 0.7",
        "remote_get_2m": ">= 0.8",
        "remote_get_256k": ">= 0.8",
        "remote_get_64k": ">= 0.6",
        "remote_objects_256k": "",
        "find_512": "<= 2.5",
    }


@pytest.mark.slow
@pytest.mark.timeout(2 * QUICK_S)
@pytest.mark.parametrize(
    "rows",
    [
        ("keys_128k", "lookup_512", "lease_2m", "two_readers", "get_2m", "get_one_256k"),
        ("put_256k", "put_one_256k", "put_calls", "objects_put_64k", "objects_get_2m"),
        ("evict_1m", "memory_1m", "restart_8g", "remote_get_256k", "remote_objects_256k", "find_512", "put_twice_2m"),
        ("get_nvme_64k", "demotion_256k", "get_while_demoting_2m"),
    ],
    ids=lambda rows: rows[0],
)
def test_quick_rows_from_end_to_end(disk_dir: Path, rows: tuple[str, ...]) -> None:
    """Each measure function once; sizes are arguments."""
    lines = run_quick(disk_dir, *rows)
    assert {name.partition(".")[0] for name in lines} == set(rows)
    assert all(len(line["rounds"]["ours"]) == 1 and line["ours"] > 0 for line in lines.values())
    assert all(0 < line["ratio"] < 1e5 for line in lines.values() if line["limit"] is not None)
    more = {"get_2m.recycled", "put_256k.full", "put_256k.back_to_back", "put_calls.files"}
    assert {name for name in more if name.partition(".")[0] in rows} <= set(lines)
