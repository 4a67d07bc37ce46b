"""Teams: the threads of OpenMP that torch computes with.

Every thread that computes has a team of its own, for as long as it lives. While all teams together are no more threads
than there are cores, those of a team look out for the next product before they sleep; else they sleep at once, and each
of a hundred products of a step waits until they are awake: a third of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def apart(act: Callable[[], Result]) -> Result:
    """Do that in a thread whose team ends with it."""
    with ThreadPoolExecutor(1, "apart") as threads:
        return threads.submit(act).result()
