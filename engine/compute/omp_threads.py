"""Teams: the threads of OpenMP that torch computes with.

Every thread that computes has a team of its own, for as long as it lives. While all teams together have no more threads
than there are cores, a team's threads spin for a while before they sleep; else they sleep at once, and each of a
hundred products of a step waits until they are awake: a third of the step. OpenMP reads ``GOMP_SPINCOUNT``, how long
they spin, when it is loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

Result = TypeVar("Result")


def apart(act: Callable[[], Result]) -> Result:
    """Run a function in a thread whose team ends with it."""
    with ThreadPoolExecutor(1, "apart") as threads:
        return threads.submit(act).result()


def alone() -> None:
    """Make the calling thread compute without a team from now on."""
    torch.get_num_threads()  # torch's first call sets the usual number of threads: it must come before ours
    for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"):
        if (act := getattr(torch_library(), name, None)) is not None:
            act(1)


@cache
def torch_library() -> ctypes.CDLL | None:
    """The library with which torch computes on a CPU, with its OpenMP; None: it is not where torch has it on Linux."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None
