"""Patterns: strangers' regular expressions, each matched by a process of its own.

Python's re can take years over a few words, and lets nobody else run meanwhile. Nothing of a pattern is looked at here,
and no thread waits for the process: the event loop looks after it. A tenant has one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from math import ceil
from typing import Any, Final

from kvstore.errors import DeadlineExceeded, InvalidRequest
from kvstore.limits import Shares
from kvstore.serving.gate import Call

PROCESSES_MAX: Final = 4  # at once, of all callers
MATCH_S: Final = 10.0  # how long a pattern may take over all keys
CPU_S: Final = ceil(2 * MATCH_S)  # then the kernel ends it, where a daemon that was killed left it behind
LOOK_S_MIN, LOOK_S_MAX = 0.005, 0.1  # how often the loop looks whether it is done; less and less often

# It steps back behind whatever else the machine has to do. What is wrong with the pattern is an answer, too.
_MATCHER: Final = f"""
import json, os, re, resource, sys
os.nice(10)
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_S}, {CPU_S}))
asked = json.load(sys.stdin)
try:
    match = re.compile(asked["pattern"]).fullmatch
except (re.error, RecursionError, OverflowError) as error:
    json.dump(str(error), sys.stdout)
else:
    json.dump([i for i, key in enumerate(asked["keys"]) if match(key)], sys.stdout)
"""


class Patterns:
    """Matches patterns, in turns of those who call."""

    def __init__(self) -> None:
        self._turns = Shares("processes that match patterns", "patterns", PROCESSES_MAX, 1, PROCESSES_MAX)

    @contextlib.asynccontextmanager
    async def turn(self, call: Call) -> AsyncIterator[PatternTurn]:
        """To match the pattern of this call. Raises TooManyCalls where it would not be its turn in time."""
        with call.waits():
            await self._turns.take(1, call.left_s, call.caller)
        began_s = time.monotonic()
        try:
            yield PatternTurn(call)
        finally:
            self._turns.give(1, call.caller, time.monotonic() - began_s)


class PatternTurn:
    """The matching of one call: page by page, so that no more than a page of keys is in memory at once.

    Attributes:
        matched: pages were.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._left_s = MATCH_S
        self.matched = False

    async def matching(self, pattern: str, keys: list[str], deleted: int) -> list[str]:
        """The keys that match as a whole. ``deleted``: the number on earlier pages, for messages.

        Raises:
            InvalidRequest: it is not a regular expression, or one that takes longer than ``MATCH_S`` over all pages.
            DeadlineExceeded: there was no time to find out.
        """
        self.matched = True
        process, answers = await self._call.quick(_start, pattern, keys, undo=_end_started)
        began_s = time.monotonic()
        try:
            timeout_s, pause_s = min(self._left_s, self._call.left_s), LOOK_S_MIN
            with self._call.waits():
                while process.poll() is None:
                    if time.monotonic() - began_s >= timeout_s:
                        raise _too_slow(timeout_s >= self._left_s, deleted)
                    await asyncio.sleep(pause_s)
                    pause_s = min(LOOK_S_MAX, 1.5 * pause_s)
            return [keys[i] for i in await self._call.quick(_read, process.returncode, answers)]
        finally:
            self._left_s -= time.monotonic() - began_s
            os.close(answers)
            _end(process)


def _start(pattern: str, keys: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """The process, and where it writes; both files have no name and go with the last who has them open."""
    answers = os.memfd_create("kvstore-answers")
    try:
        with os.fdopen(os.memfd_create("kvstore-asked"), "wb+") as asked:
            asked.write(json.dumps({"pattern": pattern, "keys": keys}).encode())
            asked.seek(0)
            command = [sys.executable, "-I", "-S", "-c", _MATCHER]
            return subprocess.Popen(command, stdin=asked, stdout=answers, stderr=subprocess.DEVNULL), answers
    except BaseException:
        os.close(answers)
        raise


def _read(returncode: int, answers: int) -> list[int]:
    os.lseek(answers, 0, os.SEEK_SET)
    with os.fdopen(os.dup(answers), "rb") as file:
        text = file.read()
    if returncode:
        raise InvalidRequest("pattern", f"cannot be matched: its process ended with {returncode}")
    found: Any = json.loads(text)
    if isinstance(found, str):
        raise InvalidRequest("pattern", f"not a valid regular expression ({found})")
    return list(found)


def _too_slow(by_itself: bool, deleted: int) -> InvalidRequest | DeadlineExceeded:
    so_far = f"{deleted} objects were deleted" if deleted else "nothing was deleted"
    if by_itself:
        return InvalidRequest("pattern", f"takes longer than {MATCH_S:g} s; {so_far}")
    return DeadlineExceeded(f"the pattern takes longer than the call may; {so_far}")


def _end_started(started: tuple[subprocess.Popen[bytes], int]) -> None:
    process, answers = started
    os.close(answers)
    process.kill()
    process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it where it still runs. The kernel may take its time over it, which the loop does not wait for."""
    if process.poll() is None:
        process.kill()
        asyncio.get_running_loop().call_later(LOOK_S_MAX, _end, process)
