"""A node and engines that are killed, stopped and started again while they work, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvstore
from engine.client import EngineClient
from engine.model.request import Finished, Token, Usage
from kvstore.errors import KVStoreError, Unavailable
from tests.helpers.engines.processes import START_S, EngineProcess, spawn_engine
from tests.helpers.processes import Daemon, Machine, check_laws, wait_settled, wait_until

END_S = 60.0  # for an answer, on a slow, busy machine
IDLE_S = 60.0  # for frames to return
RESERVED_S = 60.0  # for frames of a dead engine that reached its node over gRPC: until their deadline
NODE = "faults"

Tokens = npt.NDArray[np.uint32]


class Running:
    """An answer on its way, read by a thread of its own; ``tokens`` and ``times_s`` grow meanwhile."""

    def __init__(self, client: EngineClient, tokens: Tokens, **how: Any) -> None:
        self.prompt = tokens
        self.tokens: list[int] = []
        self.times_s: list[float] = []
        self.usage: Usage | None = None
        self.reason = ""
        self.error: KVStoreError | None = None
        self.begun_s = time.monotonic()
        self.took_s = 0.0
        self._stream = client.stream(tokens, **{"ignore_eos": True, "deadline_s": END_S, **how})
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for event in self._stream:
                match event:
                    case Token():
                        assert event.index == len(self.tokens), "a token is missing, or came twice"
                        self.tokens.append(event.id)
                        self.times_s.append(time.monotonic())
                    case Finished():
                        self.usage, self.reason = event.usage, event.reason
        except KVStoreError as error:
            self.error = error
        finally:
            self.took_s = time.monotonic() - self.begun_s

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def drawn(self, count: int, timeout_s: float = END_S) -> Running:
        """Wait for so many tokens."""
        wait_until(f"{count} tokens", lambda: len(self.tokens) >= count or self.done, timeout_s)
        assert len(self.tokens) >= count, self.error
        return self

    def ended(self, timeout_s: float = END_S) -> Running:
        """Wait for the end."""
        self._thread.join(timeout_s)
        assert self.done, f"no end within {timeout_s:g} s, after {len(self.tokens)} tokens"
        return self

    def gap_s(self, heart: Heart) -> float:
        """The longest time between two tokens, less what the machine stood still of it."""
        return max(after - before - heart.missed_s(before, after) for before, after in pairwise(self.times_s))


class Heart:
    """Beats all the time, where the machine lets it: what stands still while it beats stands still for a reason."""

    EVERY_S = 0.02

    def __init__(self) -> None:
        self._beats = [time.monotonic()]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._ended.wait(self.EVERY_S):
            self._beats.append(time.monotonic())

    def missed_s(self, since_s: float, until_s: float) -> float:
        """How long it did not beat in that time."""
        beats = [since_s, *(beat for beat in self._beats if since_s < beat < until_s), until_s]
        return sum(after - before for before, after in pairwise(beats) if after - before > 5 * self.EVERY_S)

    def end(self) -> None:
        """No more."""
        self._ended.set()
        self._thread.join()


class Cluster:
    """A node and engines of tiny-llama at addresses that outlast them. ``engines``: their flags, by name."""

    def __init__(self, logs: Path, engines: dict[str, dict[str, str]], **node: str) -> None:
        self.machine = Machine(logs)
        self.flags = engines
        self._node_flags = {"dram": "64MiB", "listen": f"unix:{self.machine.shm_dir}/node.sock", **node}
        self._engines: dict[str, EngineProcess] = {}
        self._clients: dict[str, EngineClient] = {}
        self._references: dict[tuple[bytes, str], list[int]] = {}
        self.heart = Heart()
        with contextlib.ExitStack() as undo:
            undo.callback(self.heart.end)
            undo.callback(self.machine.close)  # nobody else would, where one of them cannot be started
            self.node = self.machine.spawn(NODE, **self._node_flags)
            self.node.wait_ready()
            for name in engines:
                self.spawn(name)
            undo.pop_all()

    def address(self, *names: str) -> str:
        """Where they listen, alive or not."""
        return ",".join(f"unix:{self.machine.shm_dir}/{name}.sock" for name in names)

    @property
    def remote_node(self) -> str:
        """The node's address for those that reach it over gRPC."""
        return f"kv+unix://{self.machine.shm_dir}/node.sock"

    def spawn(self, name: str) -> EngineProcess:
        """Start an engine (again) without waiting for it."""
        flags = {"node": NODE, "listen": self.address(name), **self.flags[name]}
        flags = {flag: value.format(cluster=self) for flag, value in flags.items()}
        if "prefill" in flags:
            flags["prefill"] = self.address(*flags["prefill"].split(","))
        self._engines[name] = process = spawn_engine(self.machine, **flags)
        return process

    def __getitem__(self, name: str) -> EngineProcess:
        """An engine that is ready; started again where it was killed."""
        process = self._engines[name]
        if not process.alive:
            process = self.spawn(name)
        return process.wait_ready(START_S)

    def client(self, name: str) -> EngineClient:
        """A client of it, ready or not."""
        if name not in self._clients:
            self._clients[name] = EngineClient(self.address(name))
        return self._clients[name]

    def ready(self, *names: str) -> list[EngineClient]:
        """Clients of engines that answer."""
        for name in names:
            client, _ = self.client(name), self[name]
            wait_until(f"{name} answers", lambda client=client: answers(client))  # type: ignore[misc]
        return [self.client(name) for name in names]

    def kill(self, name: str) -> None:
        """kill -9, and start it anew without waiting."""
        assert self._engines[name].kill() == -9
        self.spawn(name)

    def restart_node(self) -> Daemon:
        """Start the node again, after it has ended."""
        self.node = self.machine.serve(NODE)
        return self.node

    def reference(self, name: str, tokens: Tokens, max_tokens: int, **how: Any) -> list[int]:
        """What an engine answers alone, with nothing of the pool and of other engines."""
        key = tokens.tobytes(), f"{max_tokens} {sorted(how.items())}"
        if key not in self._references:
            alone = {"ignore_eos": True, "use_pool": False, "prefill": [], "deadline_s": END_S}
            answer = self.client(name).generate(tokens, max_tokens=max_tokens, **alone, **how)
            self._references[key] = list(answer.tokens)
        return self._references[key]

    def store(self) -> kvstore.Store:
        """A connection to the node; the caller closes it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KVSTORE_SHM_DIR", str(self.machine.shm_dir))
            return kvstore.connect(NODE, 10.0)

    def idle_all(self) -> None:
        """Every engine has all its frames back, and the laws of the node hold."""
        for name in self.flags:
            self.idle(name)
        with self.store() as store:
            check_laws(store)

    def settled(self) -> None:
        """The node has back what dead engines had reserved; of one that reached it over gRPC, when that has expired."""
        with self.store() as store:
            wait_settled(store, RESERVED_S)
            check_laws(store)
        mine = {"{cluster.remote_node}", "none"}
        local = sum(flags.get("node") not in mine for flags in self.flags.values())
        folder = self.machine.folder(NODE) / "sessions"
        # A living one has two: its pool's, and its arena's.
        wait_until("sessions of the dead are gone", lambda: len(list(folder.iterdir())) <= 2 * local, IDLE_S)

    def idle(self, name: str, timeout_s: float = IDLE_S) -> None:
        """Nothing is under way there, and every frame is back."""
        client, seen = self.client(name), {}

        def idle() -> bool:
            status = client.status()
            frames = status["frames"]
            seen.update(requests=status["requests"], held=status["prefills_held"], frames=frames)
            busy = any(status["requests"].values()) or status["prefills_held"]
            return not busy and frames["free"] == frames["total"]

        try:
            wait_until(f"{name} is idle", idle, timeout_s)
        except AssertionError as late:
            raise AssertionError(f"{late}: {seen}") from None

    def computed(self, name: str, run: Running) -> None:
        """It holds the prompt of ``run`` computed, and does nothing else; or that was fetched between two looks."""

        def holds(status: dict[str, Any]) -> bool:
            busy = sum(count for state, count in status["requests"].items() if state != "held")
            return (bool(status["prefills_held"]) and not busy) or bool(run.tokens)

        self.state(name, holds)

    def is_ready(self, name: str) -> bool:
        """Whether it has said that it serves, and lives."""
        process = self._engines[name]
        return process.alive and "\n" in process.output()

    def state(self, name: str, holds: Callable[[dict[str, Any]], Any], timeout_s: float = END_S) -> None:
        """Wait until its status is so."""
        client = self.client(name)
        wait_until(f"{name} is as expected", lambda: holds(client.status()), timeout_s)

    def close(self) -> None:
        """End everything."""
        for client in self._clients.values():
            client.close()
        self.heart.end()
        self.machine.close()


def answers(client: EngineClient) -> bool:
    """Whether it is there."""
    try:
        client.status(1.0)
    except Unavailable:
        return False
    return True


def holds_of(process: EngineProcess) -> dict[str, int]:
    """Threads and connections of a process; its other files are the node's, of which there may be more and more."""
    proc = Path(f"/proc/{process.pid}")
    sockets = [file for file in (proc / "fd").iterdir() if "socket:" in _target(file)]
    return {"threads": len(list((proc / "task").iterdir())), "sockets": len(sockets)}


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # just closed
        return ""


def wait_no_more(process: EngineProcess, before: dict[str, int], slack: int = 4) -> None:
    """They are as many again; gRPC's own come and go."""
    now: dict[str, int] = {}

    def fewer() -> bool:
        now.update(holds_of(process))
        return all(now[what] <= before[what] + slack for what in before)

    try:
        wait_until("threads and connections are gone", fewer, IDLE_S)
    except AssertionError as late:
        raise AssertionError(f"{late}: {before} before, {now} now") from None


def right(cluster: Cluster, by: str, *runs: Running) -> None:
    """Each was answered, and with the tokens that an engine gives alone."""
    for run in runs:
        run.ended()
        assert run.error is None, run.error
    for run in runs:
        assert run.tokens == cluster.reference(by, run.prompt, len(run.tokens)), run.usage


def made(engines: dict[str, dict[str, str]], logs: Path, **node: str) -> Iterator[Cluster]:
    """One for a fixture, with its engines ready."""
    cluster = Cluster(logs, engines, **node)
    try:
        cluster.ready(*engines)
        yield cluster
        cluster.settled()
    finally:
        cluster.close()
