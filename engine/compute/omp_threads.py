"""Control over the OpenMP threads with which torch computes on a CPU.

OpenMP gives each thread that computes a team of helper threads. The team exists until that thread ends. As long as all
teams together have at most as many threads as the machine has cores, idle helpers spin for a while before they sleep.
If there are more, idle helpers sleep at once, and each product of a step must wake them. A step has about a hundred
products, and the waking costs a third of its time. So threads that compute rarely should have no team, or should end.
``GOMP_SPINCOUNT`` sets how long helpers spin; OpenMP reads it when it is loaded.
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


def run_in_own_thread(function: Callable[[], Result]) -> Result:
    """Run ``function`` in a new thread and return its result. The thread's team ends with the thread."""
    with ThreadPoolExecutor(1, "own-team") as threads:
        return threads.submit(function).result()


def compute_without_team() -> None:
    """Make the calling thread compute without a team from now on."""
    torch.get_num_threads()  # torch's first call sets the default number of threads, so it must come first
    for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"):
        if (set_threads := getattr(torch_library(), name, None)) is not None:
            set_threads(1)


@cache
def torch_library() -> ctypes.CDLL | None:
    """Return the library with which torch computes on a CPU; OpenMP's functions can be found in it.

    None if the file is not in the place where torch has it on Linux.
    """
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None
