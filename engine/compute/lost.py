"""What torch raises where a device is lost, in the words of the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvstore.tier.device import DeviceLost


@contextmanager
def translated(device: torch.device) -> Iterator[None]:
    """Errors of the accelerator become DeviceLost: after one, nothing on it can be trusted, or works at all."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceLost(f"{device}: {' '.join(str(error).split())[:300]}") from error
