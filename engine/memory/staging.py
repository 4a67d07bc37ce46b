"""Staging: bytes of an arena's frames as the host sees them: in place on a CPU, through a buffer on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import numpy.typing as npt
import torch

import kvstore
from engine.memory.arena import Arena
from kvstore.errors import InvalidRequest
from kvstore.tier.host_memory import copy

Bytes = npt.NDArray[np.uint8]


def on_host(arena: Arena) -> bool:
    """Whether frames are host memory."""
    return arena.device.type == "cpu"


@contextmanager
def receive(arena: Arena, frame: int, count: int) -> Iterator[Bytes]:
    """Rows ``[count, page_bytes]`` to be filled; they are in the frames when the ``with`` ends."""
    if on_host(arena):
        yield arena.rows(frame, count)
        return
    pages = arena.pages[frame : frame + count].view(count, -1).view(torch.uint8)
    rows = pages.cpu()
    yield rows.numpy()
    pages.copy_(rows)


def send(arena: Arena, frame: int, count: int) -> Bytes:
    """Rows ``[count, page_bytes]`` to be read, until the frames change."""
    if on_host(arena):
        return arena.rows(frame, count)
    rows: Bytes = arena.pages[frame : frame + count].view(count, -1).view(torch.uint8).cpu().numpy()
    return rows


def send_layer(arena: Arena, frame: int, count: int, layer: int) -> Bytes:
    """One layer of them, ``[count, layer_bytes]``; strided where it is in place."""
    if on_host(arena):
        return arena.layer_rows(frame, count, layer)
    rows: Bytes = arena.pages[frame : frame + count, layer].reshape(count, -1).view(torch.uint8).cpu().numpy()
    return rows


def layers_in_place(arena: Arena, frame: int, count: int) -> Bytes | None:
    """All layers of them, ``[layers, count, layer_bytes]``, strided; None where the host cannot see them in place."""
    if not on_host(arena):
        return None
    layout = arena.layout
    return arena.rows(frame, count).reshape(count, layout.layers, layout.layer_bytes).swapaxes(0, 1)


def send_tail(arena: Arena, frame: int, layer: int, tokens: int) -> Bytes:
    """The first ``tokens`` tokens of one layer of a page, ``[1, kv_heads * tokens * token_bytes]``. Only those: what is
    behind them in the frame may be another tenant's.
    """
    part = arena.pages[frame, layer, :, :tokens].contiguous()
    rows: Bytes = part.reshape(1, -1).view(torch.uint8).cpu().numpy()
    return rows


def receive_layer(arena: Arena, frame: int, layer: int, data: Bytes) -> None:
    """Put one layer of consecutive pages, ``[count, layer_bytes]``, into frames."""
    count = len(data)
    if on_host(arena):
        copy(arena.layer_rows(frame, count, layer), data)
        return
    target = arena.pages[frame : frame + count, layer]
    target.copy_(torch.from_numpy(data).view(target.dtype).view(target.shape))


def receive_tail(arena: Arena, frame: int, layer: int, tokens: int, data: Bytes) -> None:
    """Put what ``send_tail`` gave."""
    target = arena.pages[frame, layer, :, :tokens]
    if data.size != target.numel() * target.element_size():
        raise InvalidRequest("data", f"{data.size} bytes are not {tokens} tokens of one layer")
    target.copy_(torch.from_numpy(data.reshape(-1)).view(target.dtype).view(target.shape))


def layer_target(arena: Arena, frame: int, count: int, layer: int) -> Callable[[], AbstractContextManager[Bytes]]:
    """For one layer that is read straight into frames: rows ``[count, layer_bytes]``, there when the ``with`` ends."""

    @contextmanager
    def rows() -> Iterator[Bytes]:
        if on_host(arena):
            yield arena.layer_rows(frame, count, layer)
            return
        buffer = kvstore.empty((count, arena.layout.layer_bytes))
        yield buffer
        receive_layer(arena, frame, layer, buffer)

    return rows
