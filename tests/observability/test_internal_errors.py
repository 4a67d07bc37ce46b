"""Unexpected errors end a request, a connection or a turn of a task. In decided state they end a daemon."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import boundary, failpoint
from kvstore.errors import InternalError, InvalidRequest


def counted(place: str) -> int:
    return boundary.counts().get(place, 0)


def test_an_unexpected_error_in_a_request_is_answered_without_its_words() -> None:
    before = counted("test/request")
    with pytest.raises(InternalError) as told, boundary.RequestGuard("test/request"):
        raise KeyError("a secret")
    assert "secret" not in str(told.value) and "test/request" in str(told.value)
    assert counted("test/request") == before + 1


def test_expected_errors_pass_a_boundary_uncounted() -> None:
    before = counted("test/expected")
    with pytest.raises(InvalidRequest), boundary.RequestGuard("test/expected"):
        raise InvalidRequest("tokens", "must not be empty")
    with pytest.raises(BrokenPipeError), boundary.RequestGuard("test/expected", OSError):
        raise BrokenPipeError
    assert counted("test/expected") == before


def test_a_periodic_task_goes_on_after_a_pause() -> None:
    stopped, turns, before = threading.Event(), list[int](), counted("test/task")

    def step() -> None:
        turns.append(len(turns))
        if len(turns) < 3:
            raise OSError(24, "too many open files")
        stopped.set()

    boundary.thread_loop("test/task", step, stopped)()
    assert turns == [0, 1, 2] and counted("test/task") == before + 2


def test_a_periodic_task_ends_with_its_last_turn() -> None:
    boundary.thread_loop("test/task", lambda: True, threading.Event())()
    asyncio.run(boundary.task_loop("test/task", lambda: asyncio.sleep(0, True)))


def test_a_periodic_coroutine_goes_on_after_a_pause() -> None:
    before = counted("test/coroutine")

    async def step() -> bool:
        if counted("test/coroutine") < before + 2:
            raise ValueError("a bug")
        return True

    asyncio.run(boundary.task_loop("test/coroutine", step))
    assert counted("test/coroutine") == before + 2


DAEMON = """
import threading
from kvstore import boundary
from kvstore.errors import OutOfSpace
boundary.become_daemon("the daemon")
dead = threading.Thread(target=lambda: 1 / 0, name="one")
dead.start()
dead.join()
assert boundary.counts() == {"thread/one": 1}
decided = boundary.StateGuard("state/test")
try:
    with decided:
        raise OutOfSpace("no frame")  # a refusal
except OutOfSpace:
    print("lives", flush=True)
with decided:
    raise KeyError("half decided")
"""


def test_decided_state_alone_ends_a_daemon() -> None:
    ended = subprocess.run([sys.executable, "-c", DAEMON], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "lives\n" and ended.returncode == 1
    assert "half decided" in ended.stderr and "the daemon ends" in ended.stderr


@pytest.fixture
def faults(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "faults"
    failpoint.arm(f"fault:{file}")
    yield file
    failpoint.arm("")


def test_faults_happen_at_the_places_that_a_file_names(faults: Path) -> None:
    with boundary.RequestGuard("test/here"):
        pass  # there is no file
    faults.write_text("test/there\n")
    with boundary.RequestGuard("test/here"):
        pass
    with pytest.raises(InternalError), boundary.RequestGuard("test/there"):
        pass
    with pytest.raises(failpoint.Fault), boundary.StateGuard("test/there"):
        pass  # no daemon: it is raised
