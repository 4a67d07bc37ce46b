"""``kvstore top`` and ``kvstore events``: what is made of a node's answers; and what a shell completes."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Group

import kvstore
from kvstore.cli import events as cli_events
from kvstore.cli.main import cli, run
from kvstore.cli.output import name_text
from kvstore.cli.top import TENANTS_SHOWN, new_console, node_frame, node_view
from kvstore.errors import NodeUnavailable
from kvstore.shm.counters import LATENCY_BOUNDS_S


@pytest.fixture(scope="module")
def stats() -> dict[str, Any]:
    """Of a real node."""
    with kvstore.open(dram="16MiB") as store:
        return store.stats()


def later(stats: dict[str, Any], **grown: int) -> dict[str, Any]:
    """Two seconds later, these counters of its clients having grown."""
    now = copy.deepcopy(stats)
    for name, by in grown.items():
        now["clients"][name] += by
    return now


def printed(view: Group) -> str:
    """The view as text in a pipe."""
    console = new_console()
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def test_rates_are_what_grew_between_two_answers(stats: dict[str, Any]) -> None:
    now = later(stats, gets=20, pages_asked=100, hit_dram=60, hit_dram_tokens=960, missed_absent=40)
    now["tiers"]["dram"]["evicted"] = {"space": 30}
    now["tiers"]["dram"]["bytes_in"] += 4096
    now["latency"]["get"]["buckets"] = [[LATENCY_BOUNDS_S[3], 10], [LATENCY_BOUNDS_S[20], 10]]
    frame = node_frame(now, stats, 2.0)
    dram, get = frame["tiers"]["dram"], frame["operations"]["get"]
    assert (frame["interval_s"], frame["pages_asked_per_s"], frame["missed_per_s"]["absent"]) == (2.0, 50.0, 20.0)
    assert (dram["hit_tokens_per_s"], dram["hit_ratio"], dram["in_bytes_per_s"]) == (480.0, 0.6, 2048.0)
    assert dram["evicted_per_s"] == {"space": 15.0}
    assert get["per_s"] == 10.0
    assert LATENCY_BOUNDS_S[2] < get["p50_s"] <= LATENCY_BOUNDS_S[3] < LATENCY_BOUNDS_S[19] < get["p99_s"]
    text = printed(node_view(frame))
    assert "480" in text and "15.0 space" in text and "20.0 absent" in text and "rates of the last 2 s" in text
    json.dumps(frame, allow_nan=False)


def test_without_an_earlier_answer_no_rate_is_claimed(stats: dict[str, Any]) -> None:
    for before in (None, {**stats, "pid": stats["pid"] + 1}):
        frame = node_frame(later(stats, gets=20), before, 2.0)
        assert frame["interval_s"] is None and frame["operations"]["get"]["per_s"] is None
        assert frame["tiers"]["dram"]["hit_tokens_per_s"] is None and frame["pages_asked_per_s"] is None
        assert "rates from the next frame on" in printed(node_view(frame))


def test_a_node_that_is_down_is_said_to_be(stats: dict[str, Any]) -> None:
    frame = node_frame({"name": "n", "state": "down"}, stats, 2.0)
    assert frame == {"name": "n", "state": "down"}
    lines = printed(node_view(frame)).splitlines()
    assert "down" in lines[0] and len(lines) == 2


def test_tenants_are_the_largest_ones_and_cannot_steer_a_terminal(stats: dict[str, Any]) -> None:
    entry = {"pages": 1, "quota_bytes": None}
    salts = {f"tenant-{n:02d}": {"dram": {**entry, "bytes": n * 100}, "pins": 0} for n in range(20)}
    now = {**stats, "tenants": {**salts, "\x1b[2J": {"dram": {**entry, "bytes": 10**6}, "pins": 1}}}
    frame = node_frame(now, stats, 1.0)
    assert len(frame["tenants"]) == TENANTS_SHOWN and frame["tenants_left_off"] == 21 - TENANTS_SHOWN
    assert [tenant["bytes"] for tenant in frame["tenants"]][:2] == [10**6, 1900]
    text = printed(node_view(frame))
    assert "\x1b" not in text and "?[2J" in text and f"and {21 - TENANTS_SHOWN} more" in text
    assert (name_text(""), name_text("a\nb"), len(name_text("x" * 99))) == ("(none)", "a?b", 40)


# --- events ---------------------------------------------------------------------------------------------------------


class Log:
    """A store whose events have been overwritten: only the last ``kept`` of ``count`` are there."""

    def __init__(self, count: int, kept: int) -> None:
        self.first, self.last, self.calls = count - kept + 1, count, 0

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def events(self, after: int | None = None, limit: int = 1000, wait_s: float = 0.0) -> dict[str, Any]:
        self.calls += 1
        if self.calls > 20:
            raise NodeUnavailable("nobody ended it")
        if after is None:
            return {"events": [], "next": self.last, "lost": 0}
        first = max(after + 1, self.first)
        seqs = range(first, min(first + 3, self.last + 1))
        told = [event(seq) for seq in seqs]
        return {"events": told, "next": seqs[-1] if seqs else after, "lost": first - after - 1}


def event(seq: int) -> dict[str, Any]:
    kind = "evicted" if seq % 2 else "sealed"
    about = {"seq": seq, "time_ns": 1_700_000_000_123_000_000, "kind": kind, "tier": "dram", "reason": "space"}
    return {**about, "keys": ["aa" * 16, "bb" * 16, "cc" * 16], "tenants": ["x", "\x07y"], "whose": [0, 1, 0]}


def test_events_that_are_overwritten_are_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_events.kvstore, "connect", lambda node: Log(10, 6))
    assert run(cli, ["events", "--after", "2", "--no-follow"]) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[0] == "2 events were overwritten before they could be read"
    assert len(text) == 1 + 2 * 6  # a line for each tenant
    assert ".123  5  evicted   dram  space     x  2 pages  " + "aa" * 16 + " " + "cc" * 16 in text[1]
    assert "  ?y  1 page  " + "bb" * 16 in text[2]
    assert run(cli, ["events", "--no-follow", "--json", "--kind", "sealed"]) == 0
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert documents[0] == {"lost": 4} and [d["seq"] for d in documents[1:]] == [6, 8, 10]


# --- completion -----------------------------------------------------------------------------------------------------


def test_names_are_completed_without_importing_their_modules() -> None:
    code = (
        "import sys; from click.shell_completion import BashComplete; from kvstore.cli.main import cli;"
        "found = [item.value for item in BashComplete(cli, {}, 'kvstore', 'X').get_completions([], 've')];"
        "loaded = [m for m in sys.modules if m.startswith('kvstore.cli.') and m != 'kvstore.cli.main'];"
        "print(found, loaded, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['verify'] [] False\n"
