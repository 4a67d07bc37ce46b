"""``kvstore top``, ``kvstore events`` and completion, as their users run them: real daemons, terminals and shells."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from kvstore import Store
from tests.helpers.content import SMALL, chain
from tests.helpers.processes import CLI, ROOT, WAIT_S, Machine, Process, put, wait_until

PAGES = 8


def node(machine: Machine, listen: bool = False) -> tuple[Store, str]:
    """A full node, and its address over gRPC."""
    address = f"unix:{machine.shm_dir}/grpc.sock"
    machine.serve("n", dram="2MiB", **({"listen": address} if listen else {}))
    return machine.connect("n"), f"kv+unix://{machine.shm_dir}/grpc.sock"


def started(machine: Machine, *command: str) -> Process:
    return machine.start(Process, command[0], [*CLI, *command], PYTHONUNBUFFERED="1")


def documents(process: Process) -> list[dict[str, Any]]:
    return [json.loads(line) for line in process.output().split("\n")[:-1]]


# --- top ------------------------------------------------------------------------------------------------------------


class Terminal:
    """A command with a terminal of its own."""

    def __init__(self, machine: Machine, *command: str) -> None:
        self.screen = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.execve(CLI[0], [*CLI, *command], machine.env(TERM="xterm", COLUMNS="120", LINES="40"))

    def read_until(self, holds: Callable[[bytes], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds(self.screen):
            assert time.monotonic() < deadline, self.screen[-2000:]
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.screen += os.read(self.fd, 65536)
                except OSError:  # it has ended
                    assert holds(self.screen), self.screen[-2000:]

    def ended(self) -> int:
        """The exit code, and all that it wrote before."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    self.screen += os.read(self.fd, 65536)
                    continue
                except OSError:
                    pass
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError(f"it did not end: {self.screen[-2000:]!r}")


def test_top_draws_in_place_and_ends_with_q_and_with_ctrl_c(machine: Machine) -> None:
    store, _ = node(machine)
    for ends, code in ((b"q", 0), (b"\x03", 130)):
        terminal = Terminal(machine, "top", "--interval", "0.2")
        terminal.read_until(lambda screen: screen.count(b"\x1b[H") >= 3)
        put(store, ends[0], PAGES)
        terminal.read_until(lambda screen: b"rates of the last" in screen and b"hit tokens/s" in screen)
        os.write(terminal.fd, ends)
        assert terminal.ended() == code
        for on, off in ((b"\x1b[?1049h", b"\x1b[?1049l"), (b"\x1b[?25l", b"\x1b[?25h")):  # the screen, the cursor
            assert terminal.screen.index(on) < terminal.screen.rindex(b"hit tokens/s") < terminal.screen.rindex(off)
        assert b"Traceback" not in terminal.screen


def test_top_in_a_pipe_prints_frames_and_outlives_the_daemon(machine: Machine) -> None:
    store, address = node(machine, listen=True)
    daemon = machine.processes[0]
    tops = [started(machine, "top", "--json", "--interval", "0.2", "--node", where) for where in ("n", address)]
    text = started(machine, "top", "--interval", "0.2")
    for top in tops:
        wait_until("frames come", lambda top=top: len(documents(top)) >= 2)
    cache, keys = store.cache(SMALL), chain(1, PAGES)
    put(store, 1, PAGES)

    def seen(top: Process) -> bool:
        cache.get(keys)
        return any((frame.get("operations") or {}).get("get", {}).get("per_s") for frame in documents(top))

    for top in tops:
        wait_until("the gets are seen", lambda top=top: seen(top))
        busy = [frame for frame in documents(top) if frame["operations"]["get"]["per_s"]][-1]
        assert busy["tiers"]["dram"]["hit_tokens_per_s"] > 0 and busy["tiers"]["dram"]["hit_ratio"] == 1.0
        assert 0 < busy["operations"]["get"]["p99_s"] < WAIT_S
        assert busy["clients"]["sessions_connected"] >= 1 and busy["tenants"][0]["bytes"] == PAGES * SMALL.page_bytes
    wait_until("text comes too", lambda: text.output().count("operation  per s") >= 2)
    assert "\x1b" not in text.output()
    daemon.kill()
    wait_until("that it is down is told", lambda: documents(tops[0])[-1]["state"] == "down")
    wait_until("and over gRPC too", lambda: documents(tops[1])[-1]["state"] == "no answer")
    machine.serve("n")
    for top in tops:
        wait_until("it is back", lambda top=top: documents(top)[-1]["state"] == "ready")
    done = machine.run("top", "--once", "--interval", "0.1")
    assert done.returncode == 0 and "kvstore top  n  ready" in done.stdout
    assert [top.terminate() for top in (*tops, text)] == [-signal.SIGTERM] * 3


# --- events ---------------------------------------------------------------------------------------------------------


def test_events_are_the_same_here_and_over_grpc(machine: Machine) -> None:
    store, address = node(machine, listen=True)
    followers = [started(machine, "events", "--json", "--node", where) for where in ("n", address)]
    text = started(machine, "events", "--kind", "evicted")

    def heard(one: Process) -> bool:
        put(store, int(time.monotonic() * 1000) % 10**6, PAGES)
        return bool(one.output())

    for one in (*followers, text):
        wait_until("it follows", lambda one=one: heard(one))
    last = store.events()["next"]
    keys = chain(10**7, PAGES, salt="tenant")
    assert put(store, 10**7, PAGES, salt="tenant") == PAGES
    store.evict(keys=keys, tier="dram")
    told = []
    for one in followers:

        def mine(one: Process = one) -> list[dict[str, Any]]:
            return [event for event in documents(one) if event["seq"] > last and event["tenants"] == ["tenant"]]

        wait_until("all of it is told", lambda mine=mine: {"sealed", "evicted"} <= {event["kind"] for event in mine()})
        told.append([event for event in mine() if event["reason"] in ("", "request")])
    # Numbers of gRPC's documents are doubles: its nanoseconds are right to a microsecond.
    times = [[event.pop("time_ns") for event in events] for events in told]
    assert told[0] == told[1]
    assert all(abs(here - there) < 1000 for here, there in zip(*times, strict=True))
    assert {key for event in told[0] if event["kind"] == "sealed" for key in event["keys"]} == {
        key.hex() for key in store.in_pool(keys).hashes
    }
    wait_until("the reason is told", lambda: " request " in text.output())
    assert "sealed" not in text.output() and "  tenant  " in text.output()
    assert [one.terminate() for one in (*followers, text)] == [-signal.SIGTERM] * 3
    kept = machine.run("events", "--no-follow", "--json")
    first, *_ = [json.loads(line) for line in kept.stdout.splitlines()]
    assert (kept.returncode, first["kind"], first["reason"]) == (0, "cleared", "start")
    since = machine.run("events", "--after", str(last), "--no-follow", "--kind", "sealed", "--node", address)
    assert f"{PAGES} pages" in since.stdout and "evicted" not in since.stdout


# --- completion -----------------------------------------------------------------------------------------------------


def test_bash_completes_commands_flags_choices_and_nodes(machine: Machine) -> None:
    machine.serve("first")
    machine.serve("second").terminate()
    (machine.logs / "kvstore").write_text(f"#!/bin/sh\nexec {CLI[0]} -c '{CLI[2]}' \"$@\"\n")
    (machine.logs / "kvstore").chmod(0o755)
    asked = {
        "kvstore ver": "verify",
        "kvstore events --no-f": "--no-follow",
        "kvstore events --kind dem": "demoted",
        "kvstore status --node fi": "first",
        "kvstore verify --node se": "second",
    }
    script = 'source <(kvstore completion bash)\ncomplete -p kvstore >/dev/null || exit 1\nfor line in "$@"; do\n'
    script += "COMP_WORDS=($line); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()\n"
    script += '_kvstore_completion kvstore; echo "${COMPREPLY[*]}"\ndone\n'
    env = machine.env(PATH=f"{machine.logs}:{os.environ['PATH']}", PYTHONPATH=str(ROOT))
    done = subprocess.run(
        ["bash", "-c", script, "bash", *asked], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == list(asked.values()), done.stderr
