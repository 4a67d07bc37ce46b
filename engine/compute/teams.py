"""Teams: the threads of OpenMP that torch computes with.

Every thread that computes has a team of its own, for as long as it lives. While all teams together are no more threads
than there are cores, those of a team look out for the next product before they sleep; else they sleep at once, and each
of a hundred products of a step waits until they are awake: a third of the step. OpenMP reads ``GOMP_SPINCOUNT``, how
long they look out, when it is loaded.
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
    """Do that in a thread whose team ends with it."""
    with ThreadPoolExecutor(1, "apart") as threads:
        return threads.submit(act).result()


def alone() -> None:
    """The thread that calls this computes without a team from now on."""
    torch.get_num_threads()  # whoever asks torch for the first time is given the usual number: not after this
    for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"):
        if (act := getattr(torch_library(), name, None)) is not None:
            act(1)


@cache
def torch_library() -> ctypes.CDLL | None:
    """What torch computes with on a CPU, with the OpenMP that it uses; None: it is not where torch has it on Linux."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None
