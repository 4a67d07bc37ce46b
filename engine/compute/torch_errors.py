"""Translation of torch's errors into the store's: a lost device, a lack of memory, a failed operation."""

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
def computing_on(device: torch.device) -> Iterator[None]:
    """Make ``device`` the thread's current device, to which kernels and graphs are sent.

    An error of the accelerator is raised as DeviceLost: after such an error the device's data cannot be trusted, and
    usually no operation works.
    """
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
    except torch.AcceleratorError as error:
        raise DeviceLost(f"{device}: {' '.join(str(error).split())[:300]}") from error


class StepFault:
    """A context that catches the errors of one step: a lack of memory, or an error of a library.

    Such an error ends only the requests of that step. Errors that end the whole engine (a lost device, an internal
    error) are raised as usual.

    Attributes:
        error: the error for the requests of the step; None if the step succeeded. It has no reference to tensors,
            because clients may keep it while the memory is needed.
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
                text = " ".join(str(error).split())[:300] or "out of memory"
                out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in text
                self.error = (OutOfSpace if out_of_memory else Unavailable)(f"this step could not be computed: {text}")
            case _:
                return False
        # Format the traceback here, because a log record with the traceback would keep the step's tensors in memory.
        log.error("a step failed; its requests fail with it:\n%s", "".join(traceback.format_exception(error)).rstrip())
        return True
