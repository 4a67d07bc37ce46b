"""Translates torch's errors for a lost device, or one without memory, to errors of the store."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType

import torch

from kvstore.device.base import DeviceLost
from kvstore.errors import KVStoreError, OutOfSpace, Unavailable

log = logging.getLogger("kvstore.engine")


@contextmanager
def translated(device: torch.device) -> Iterator[None]:
    """Compute on ``device`` (kernels and graphs go to the thread's own device). Errors of the accelerator become
    DeviceLost: after one, nothing on it can be trusted, or works at all."""
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
    except torch.AcceleratorError as error:
        raise DeviceLost(f"{device}: {' '.join(str(error).split())[:300]}") from error


class StepFault:
    """Catches errors of one step (lack of memory, an error of a library), which end only the requests of that step.
    Errors of the whole engine (a lost device, an internal error) are raised as usual.

    Attributes:
        error: the error for those requests; None if nothing was raised. It holds no reference to computed data, since
            clients keep it and the memory is needed.
    """

    def __init__(self) -> None:
        self.error: KVStoreError | None = None

    def __enter__(self) -> StepFault:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        match error:
            case DeviceLost() | torch.AcceleratorError():
                return False
            case KVStoreError():  # from the driver, for our own copies and events
                self.error = error.with_traceback(None)
                self.error.__cause__ = self.error.__context__ = None
            case MemoryError() | RuntimeError():
                says = " ".join(str(error).split())[:300] or "out of memory"
                short = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in says
                self.error = (OutOfSpace if short else Unavailable)(f"this step could not be computed: {says}")
            case _:
                return False
        # As text: a stored record would keep the frames of the forward pass alive, through its traceback.
        log.error("a step failed, and its requests with it:\n%s", "".join(traceback.format_exception(error)).rstrip())
        return True
