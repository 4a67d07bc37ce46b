"""TaskHealth: when a task that runs forever last succeeded, why it fails, and when it is tried again."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any, Final

from kvstore.errors import VersionMismatch

PAUSE_MIN_S: Final = 0.2  # after the first failure; each further failure doubles the pause ...
PAUSE_MAX_S: Final = 3.0  # ... up to this, so that all members are back soon after an outage
JITTER: Final = 0.25  # spreads the tries of members that failed at the same time
ERROR_CHARS_MAX: Final = 300

log = logging.getLogger("kvstore.cluster")


class TaskHealth:
    """The state of one task: fails -> waits as long as ``note_failure`` says -> tries again -> ``note_success``.

    A task is tried again after every error, even a refused password or an unreadable file, because each try reads
    passwords and files again. Only ``VersionMismatch`` is final: no later try can succeed, so ``on_final`` is called
    and ends the daemon. ``kvstore.boundary`` handles unexpected errors. One thread writes; any thread may read. The
    first failure and the recovery are logged, the tries between them are not.

    Attributes:
        name: name of the task, for logs, status and metrics.
        succeeded_s: when the task last succeeded, by ``boot_s``; 0 if it never did.
        failing_since_s: time of the first failure since the last success; None if the last try succeeded.
        error: why the last try failed; "" after a success.
        failures: the number of all failures.
    """

    def __init__(
        self,
        name: str,
        pause_s_max: float = PAUSE_MAX_S,
        on_final: Callable[[VersionMismatch], None] = lambda error: None,
    ) -> None:
        self._on_final = on_final
        self.name = name
        self.succeeded_s = 0.0
        self.failing_since_s: float | None = None
        self.error = ""
        self.failures = 0
        self._tries = 0
        self._pause_s_max = pause_s_max

    def note_success(self) -> None:
        """Note that the task has just succeeded."""
        now_s = boot_s()
        since_s, tries = self.failing_since_s, self._tries
        self.succeeded_s, self.failing_since_s, self.error, self._tries = now_s, None, "", 0
        if since_s is not None:
            log.info("%s: works again after %.1f s and %d tries", self.name, now_s - since_s, tries)

    def note_failure(self, error: BaseException, pause_s_min: float = PAUSE_MIN_S) -> float:
        """Note that a try failed. Returns how many seconds to wait before the next one.

        Args:
            pause_s_min: the shortest pause that the other end allows.
        """
        if isinstance(error, VersionMismatch):
            self._on_final(error)
        self.failures += 1
        self._tries += 1
        self.error = (str(error) or type(error).__name__)[:ERROR_CHARS_MAX]
        if self.failing_since_s is None:
            self.failing_since_s = boot_s()
            log.warning("%s: fails, and is tried again: %s", self.name, self.error)
        pause_s = min(self._pause_s_max, max(pause_s_min, PAUSE_MIN_S) * 2.0 ** min(self._tries - 1, 16))
        return pause_s * random.uniform(1 - JITTER, 1 + JITTER)

    def status(self) -> dict[str, Any]:
        """Return ages in seconds, for ``status``. An age is None if the task never succeeded, or is not failing."""
        now_s, since_s = boot_s(), self.failing_since_s
        return {
            "succeeded_ago_s": round(now_s - self.succeeded_s, 3) if self.succeeded_s else None,
            "failing_s": round(now_s - since_s, 3) if since_s is not None else None,
            "failures": self.failures,
            "error": self.error,
        }

    def fault(self, after_s: float) -> str:
        """Return a message if the task has been failing for longer than ``after_s``, else ""."""
        since_s = self.failing_since_s
        failing_s = boot_s() - since_s if since_s is not None else 0.0
        return f"{self.name} has failed for {failing_s:.0f} s: {self.error}" if failing_s > after_s else ""


def boot_s() -> float:
    """Return the seconds since this machine booted, including sleep. Changes of the wall clock do not affect them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
