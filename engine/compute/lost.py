"""What torch raises where a device is lost, in the words of the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from kvstore.tier.device import DeviceLost


@contextmanager
def translated(device: torch.device) -> Iterator[None]:
    """Compute on ``device`` (kernels and graphs go to the thread's own device). Errors of the accelerator become
    DeviceLost: after one, nothing on it can be trusted, or works at all."""
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
    except torch.AcceleratorError as error:
        raise DeviceLost(f"{device}: {' '.join(str(error).split())[:300]}") from error
