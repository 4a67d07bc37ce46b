"""``kvstore tiers``: what is printed of a node's tiers, as text and as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

import kvstore
from kvstore.cli.main import cli, run
from kvstore.config import GIB, MIB

FRAMES = {"free": 10, "reserved": 2, "sealed": 900, "retiring": 0, "quarantined": 0}


def dram(**changed: Any) -> dict[str, Any]:
    return {
        "capacity_bytes": 64 * MIB,
        "used_bytes": 60 * MIB,
        "populated_bytes": 64 * MIB,
        "failed_bytes": 0,
        "pages": 900,
        "frames": FRAMES,
        "eviction": "lru",
        "evicted": {"space": 12, "request": 3},
        "age_at_eviction_s": {"p50": 0.75, "p90": 200.0},
        "demoted": 7,
        "bytes_in": 80 * MIB,
        "bytes_out": 3 * GIB,
        "hit_ratio": 0.75,
        **changed,
    }


def nvme(**changed: Any) -> dict[str, Any]:
    return {
        **dram(capacity_bytes=4 * GIB, used_bytes=GIB, pages=16384, hit_ratio=None, evicted={"damage": 1}),
        "age_at_eviction_s": {"p50": None, "p90": None},
        "state": "scanning 40 %",
        "demoted_pages": 17000,
        "demoted_bytes": 2 * GIB,
        "promoted_pages": 12,
        "promoted_bytes": 12 * MIB,
        "write_bytes_per_day": 0,
        "written_today_bytes": 2 * GIB,
        "devices": [
            {"path": "/var/tmp/kv", "capacity_bytes": 3 * GIB, "used_bytes": GIB, "pages": 16384, "state": "ready"},
            {"path": "/dev/sdb", "capacity_bytes": GIB, "used_bytes": 0, "pages": 0, "state": "failed: Input/output"},
        ],
        **changed,
    }


class FakeStore:
    """Only ``stats``."""

    def __init__(self, stats: dict[str, Any]) -> None:
        self._stats = stats

    def stats(self) -> dict[str, Any]:
        return self._stats

    def __enter__(self) -> FakeStore:
        return self

    def __exit__(self, *error: object) -> None: ...


def tiers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: dict[str, Any], *args: str
) -> str:
    clients = {"pages_asked": 1000, "missed_absent": 150, "missed_io": 0, "pages_put": 40, "put_bytes": MIB}
    stats = {"name": "n", "state": "ready", "tiers": found, "clients": clients, "counters": {}, "pid": 1}
    monkeypatch.setattr(kvstore, "connect", lambda node: FakeStore(stats))
    assert run(cli, ["tiers", *args]) == 0
    return capsys.readouterr().out


def lines(text: str) -> list[str]:
    """The lines, with one space between words."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_nvme_and_its_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = tiers(monkeypatch, capsys, {"dram": dram(), "nvme": nvme()})
    found = lines(text)
    assert found[3] == "nvme 4 GiB 1 GiB 16384 10 2 900 0 0 scanning 40 %"
    assert found[4] == "/var/tmp/kv 3 GiB 1 GiB 16384 - - - - - ready"
    assert found[5] == "/dev/sdb 1 GiB 0 B 0 - - - - - failed: Input/output"
    header = next(line for line in text.splitlines() if "hit ratio" in line)
    assert "evicted: damage  evicted: request  evicted: space" in header
    assert "nvme - 80 MiB 3 GiB lru 1 0 0 - -" in found
    assert "demoted 17000 pages (2 GiB) saved to NVMe, 7 of them left DRAM" in found
    assert "promoted 12 pages (12 MiB)" in found
    assert "written today 2 GiB, no limit" in found
    capped = tiers(monkeypatch, capsys, {"dram": dram(), "nvme": nvme(write_bytes_per_day=GIB << 10)})
    assert "written today 2 GiB, of 1 TiB allowed" in lines(capped)


@pytest.mark.parametrize("args", [(), ("--json",)])
def test_daemon_down(
    args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"capacity_bytes": 64 * MIB, "populated_bytes": 32 * MIB}
    stats = {"name": "n", "state": "down", "pages": 7, "nvme_pages": 5, "tiers": {"dram": about}, "client": {}}
    monkeypatch.setattr(kvstore, "connect", lambda node: FakeStore(stats))
    assert run(cli, ["tiers", *args]) == 0
    text = capsys.readouterr().out
    if args:
        assert json.loads(text) == {"name": "n", "state": "down", "tiers": {"dram": about}}
    else:
        assert lines(text) == ["node n (down)", "dram 64 MiB, 32 MiB populated", "pages 7 in DRAM, 5 on NVMe"]
