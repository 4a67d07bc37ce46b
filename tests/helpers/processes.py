"""Daemons and workers as real processes, and the checks that follow every murder.

Every wait has a deadline, every process is ended by its pid, and every node lives in a folder of the test's own under
/dev/shm, which goes away with the test.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import kvstore
from kvstore import Layout, Store
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import Header
from kvstore.shm.put_log import PutLog
from tests.helpers.content import SMALL, chain, contents, mismatch
from tests.helpers.nursery import ROOT, Child, Nursery, of_engines, of_nodes

START_S = 60.0  # a daemon or worker on a slow, busy machine
WAIT_S = 40.0
SETTLE_S = 20.0  # dead writers' frames come back: a tick, and a look at the session's lock; not their deadline, 30 s
POLL_S = 0.004
POLL_S_MAX = 0.03  # what takes long is looked at less often: a look at a node takes a millisecond of both cores

CLI = (sys.executable, "-c", "from kvstore.cli.main import main; main()")
WORKER = (sys.executable, "-m", "tests.helpers.workers.pages")


def wait_until(what: str, holds: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    """Poll until ``holds`` returns something true, and return it. Fails with ``what`` after the deadline."""
    deadline, pause_s = time.monotonic() + timeout_s, POLL_S
    while not (value := holds()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, POLL_S_MAX)
    return value


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP, and inside all threads of that process stand still; SIGCONT."""

    def stands_still() -> bool:
        try:
            threads = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat")]
        except OSError:  # one has ended in this moment
            return False
        return all(thread.rpartition(")")[2].split()[0] in "TZX" for thread in threads)  # or has ended

    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(f"process {pid} stops", stands_still)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# Below those that the kernel gives to whoever does not ask for one. Each test process has its own.
_ports = range(10_000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 16, 30_000, 16)
_numbers = itertools.count(os.getpid())


def free_port() -> int:
    """One of loopback that nobody has, nor gets while a daemon is started again."""
    while True:
        port = _ports[next(_numbers) % len(_ports)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Process:
    """A child process with its output in files. Ends by itself or by ``kill``; teardown kills what is left."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, nursery: Nursery | None = None
    ) -> None:
        self.log = log
        self.errors = log.with_suffix(".err")
        stdin, tells = os.pipe()
        self.stdin = open(tells, "wb")  # noqa: SIM115
        with open(stdin, "rb") as told, open(log, "wb") as out, open(self.errors, "ab") as err:
            self.popen: subprocess.Popen[bytes] | Child
            if nursery is not None:
                self.popen = nursery.spawn(command, env, told.fileno(), out.fileno(), err.fileno())
            else:
                self.popen = subprocess.Popen(command, stdin=told, stdout=out, stderr=err, env=dict(env), cwd=ROOT)

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a process that is gone is no error."""
        if self.alive:
            os.kill(self.pid, number)

    def kill(self) -> int:
        """kill -9, and wait for the end. Returns the exit code (-9 unless it was faster)."""
        self.signal(signal.SIGKILL)
        return self.wait()

    def stop(self) -> None:
        """SIGSTOP, and wait until it stands still."""
        self.signal(signal.SIGSTOP)
        wait_until(f"process {self.pid} stops", lambda: self.state() == "T")

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def terminate(self) -> int:
        """SIGTERM, and wait for the end. Returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """The exit code. Fails where the process does not end in time."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.log.name}: did not end in {timeout_s:g} s; {self.trace()}") from None
        finally:
            if self.popen.poll() is not None:
                with contextlib.suppress(BrokenPipeError):
                    self.stdin.close()

    def state(self) -> str:
        """R, S, T (stopped), Z, ... as the kernel tells; "" where it is gone."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return ""
        return text.rpartition(")")[2].split()[0]

    def memory_bytes(self, field: str = "RssAnon") -> int:
        """A size from /proc/<pid>/status."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
        raise AssertionError(f"{field} is not in /proc")

    def output(self) -> str:
        """What it printed so far."""
        return self.log.read_text(errors="replace")

    def trace(self) -> str:
        """What it said on stderr, for messages."""
        return f"stderr: {self.errors.read_text(errors='replace')[-3000:]}"


class Daemon(Process):
    """``kvstore serve``."""

    def wait_ready(self, timeout_s: float = START_S) -> str:
        """Its ready line. Fails where it ends or says nothing until the deadline."""

        def line() -> str:
            if not self.alive:
                raise AssertionError(f"the daemon ended with {self.popen.returncode}; {self.trace()}")
            return self.output()

        return str(wait_until("the daemon is ready", line, timeout_s))


class Worker(Process):
    """A function of ``workers.pages`` in a process; its log is JSON lines of what was acknowledged to it."""

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """Whole lines logged so far, those called ``name`` where one is given."""
        lines = self.output().split("\n")[:-1]  # a killed process may leave half a line
        events = [json.loads(line) for line in lines]
        return [event for event in events if not name or event["event"] == name]

    def wait_for(self, name: str, count: int = 1, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """The ``count``-th event of that name. Fails at the deadline, or where the worker ends without it."""

        def found() -> list[dict[str, Any]] | None:
            ended = not self.alive
            events = self.events(name)
            if len(events) >= count:
                return events
            if ended:
                raise AssertionError(
                    f"{self.log.name} ended with {self.popen.returncode} before {name!r} x {count}; {self.trace()}"
                )
            return None

        return dict(wait_until(f"{self.log.name} logs {name!r} x {count}", found, timeout_s)[count - 1])

    def tell(self, line: str = "go") -> None:
        """A line on its stdin: it goes on."""
        self.stdin.write(f"{line}\n".encode())
        self.stdin.flush()

    def finish(self) -> None:
        """SIGTERM: it finishes what it is at. Fails where it does not end well."""
        self.wait_for("started")  # before, SIGTERM is the end
        code = self.terminate()
        assert code == 0, f"{self.log.name} ended with {code}: {self.events('wrong')}; {self.trace()}"

    def wait_well(self, timeout_s: float = WAIT_S) -> None:
        """Wait for its own end. Fails where that is not a good one."""
        code = self.wait(timeout_s)
        assert code == 0, f"{self.log.name} ended with {code}: {self.events('wrong')}; {self.trace()}"

    def acknowledged(self) -> dict[int, int]:
        """seed -> pages that were acknowledged as sealed."""
        acked: dict[int, int] = {}
        for event in self.events("put"):
            if event["pages"]:
                acked[event["seed"]] = max(event["pages"], acked.get(event["seed"], 0))
        return acked


P = TypeVar("P", bound=Process)


def armed(failpoint: str) -> dict[str, str]:
    """The environment of a process that dies there; "" is nowhere."""
    return {"KVSTORE_FAILPOINT": failpoint} if failpoint else {}


class Machine:
    """A corner of this machine for one test: a folder for nodes, log files, and every process started in it."""

    def __init__(self, logs: Path) -> None:
        self.shm_dir = Path(tempfile.mkdtemp(prefix="kvtest-", dir="/dev/shm"))
        self.logs = logs
        self.processes: list[Process] = []
        self.stores: list[Store] = []
        self._names: Counter[str] = Counter()
        self._flags: dict[str, dict[str, str]] = {}

    def env(self, **extra: str) -> dict[str, str]:
        """Environment of a child: nothing of ours but where the nodes are."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        return env | {"KVSTORE_SHM_DIR": str(self.shm_dir), "PYTHONFAULTHANDLER": "1"} | extra

    def folder(self, name: str) -> Path:
        """A node's folder."""
        return self.shm_dir / f"kvstore-{name}"

    def start(self, kind: type[P], what: str, command: Sequence[str], nursery: Nursery | None = None, **env: str) -> P:
        """Start a process; its files are called after ``what``."""
        process = kind(command, self.env(**env), self._log(what), nursery)
        self.processes.append(process)
        return process

    def spawn(self, name: str, *, failpoint: str = "", cli: Sequence[str] = CLI, **flags: str) -> Daemon:
        """Start a daemon without waiting for it, with the flags of the last one of that name where none are given.
        ``cli``: what runs the command line."""
        self._flags[name] = flags = flags or self._flags.get(name, {"dram": "64MiB"})
        command = [*cli, "serve", "--name", name]
        for flag, value in flags.items():
            command += [f"--{flag.replace('_', '-')}", value]
        return self.start(Daemon, "serve", command, of_nodes(), **armed(failpoint))

    def serve(self, name: str, **options: Any) -> Daemon:
        """Start a daemon and wait until it is ready."""
        daemon = self.spawn(name, **options)
        daemon.wait_ready()
        return daemon

    def worker(self, verb: str, node: str, *, failpoint: str = "", **arguments: Any) -> Worker:
        """Start a worker (see ``workers.pages``) without waiting for it."""
        command = [*WORKER, verb, json.dumps({"node": node, **arguments})]
        return self.start(Worker, verb, command, of_nodes(), **armed(failpoint))

    def run(self, *command: str, timeout_s: float = WAIT_S, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command of ``kvstore`` to its end."""
        nursery = of_engines() if command[0] in ("demo", "engine") else of_nodes()
        process = self.start(Process, command[0], [*CLI, *command], nursery, **env)
        process.stdin.close()
        code = process.wait(timeout_s)
        return subprocess.CompletedProcess(command, code, process.output(), process.errors.read_text(errors="replace"))

    def connect(self, name: str, timeout_s: float = 30.0) -> Store:
        """A store in this process; closed at the end of the test at the latest."""
        store = kvstore.connect(name, timeout_s)
        self.stores.append(store)
        return store

    def close(self) -> None:
        """End everything that was started here."""
        for store in self.stores:
            store.close()
        for process in self.processes:
            process.kill()

        # A data server that its daemon has just started again may make its file meanwhile; it ends when that is gone.
        # The folder itself stays where something is mounted on it.
        def gone() -> bool:
            shutil.rmtree(self.shm_dir, ignore_errors=True)
            return not self.shm_dir.exists() or not any(self.shm_dir.iterdir())

        wait_until("the memory of its nodes is gone", gone)

    def _log(self, kind: str) -> Path:
        self._names[kind] += 1
        return self.logs / f"{kind}-{self._names[kind]}.log"


# --- checks ---------------------------------------------------------------------------------------------------------


def log_of(machine: Machine) -> PutLog:
    """The log of puts of node ``n``."""
    folder = NodeFolder.at(machine.folder("n"))
    header = Header.open(folder)
    assert header is not None
    log = PutLog.open(folder, header.puts_id)
    assert log is not None
    return log


def frames(store: Store) -> dict[str, int]:
    """Frames by state; those of no extent yet are not counted."""
    return dict(store.stats()["tiers"]["dram"]["frames"])


def allocated_bytes(folder: Path) -> int:
    """Memory that the files of a node really take."""
    found = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a session has just ended
            found += path.stat().st_blocks * 512 if path.is_file() else 0
    return found


def check_pages(store: Store, acked: Mapping[int, int], layout: Layout = SMALL, salt: str = "") -> int:
    """Every acknowledged page is there and every byte of it is right. Returns how many pages that are."""
    cache = store.cache(layout, salt=salt)
    for seed, pages in acked.items():
        keys = chain(seed, pages, layout, salt)
        match = cache.get(keys)
        wrong = mismatch(match, keys, layout)
        assert not wrong, f"prompt {seed}: {wrong}"
        assert match.pages == pages, f"prompt {seed}: {pages} pages were acknowledged, {match}"
    return sum(acked.values())


def check_right(store: Store, pages: Mapping[int, int], layout: Layout = SMALL, salt: str = "") -> int:
    """What is there of these prompts is right. Returns how many pages are there."""
    cache = store.cache(layout, salt=salt)
    there = 0
    for seed, count in pages.items():
        keys = chain(seed, count, layout, salt)
        match = cache.get(keys)
        wrong = mismatch(match, keys, layout)
        assert not wrong, f"prompt {seed}: {wrong}"
        there += match.pages
    return there


def check_laws(store: Store) -> None:
    """The conservation laws hold over state, records and index."""
    findings = store.verify()["findings"]
    assert findings == [], f"{len(findings)} findings: " + "\n".join(findings[:20])


def kill(machine: Machine, killed: str, worker: Worker, daemon: Daemon, **flags: str) -> None:
    """Kill the "daemon" of node ``n``, which is stopped, the "writer", or "both". Node ``n`` serves afterwards, and the
    writer, which goes on if only the daemon is killed, ends."""
    if killed != "daemon":
        worker.stop()
        worker.resume()
        worker.kill()
    if killed == "writer":
        daemon.resume()
    else:
        daemon.kill()
        machine.serve("n", **flags)
    if killed == "daemon":
        worker.wait_for("put", len(worker.events("put")) + 3)
        worker.kill()


def wait_settled(store: Store, timeout_s: float = SETTLE_S) -> None:
    """Frames of dead writers have come back, leases and reservations of the dead have ended."""

    def settled() -> bool:
        stats = store.stats()
        states = stats["tiers"]["dram"]["frames"]
        held = sum(states.get(state, 0) for state in ("reserved", "quarantined", "retiring"))
        return held + stats["leases"] + stats["reservations"] == 0

    try:
        wait_until("frames of dead writers come back", settled, timeout_s)
    except AssertionError as late:
        stats = store.stats()
        raise AssertionError(f"{late}: {stats['tiers']['dram']['frames']}, {stats['leases']} leases") from None


def put(store: Store, seed: int, pages: int, layout: Layout = SMALL, salt: str = "") -> int:
    """Put a prompt from this process; returns how many pages are new."""
    keys = chain(seed, pages, layout, salt)
    return store.cache(layout, salt=salt).put(keys, contents(keys, layout))


def evict_all(store: Store) -> None:
    """Make every page leave; nothing may hold any."""
    store.evict(pages=1 << 20)
    states = frames(store)
    assert all(states.get(state, 0) == 0 for state in ("sealed", "retiring")), states
