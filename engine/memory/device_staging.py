"""DeviceStaging: copies bytes of a device's frames to and from the host, on streams of its own.

The computing thread gives its work to one stream and runs ahead of it. So a copy begins after the work of that stream
that it needs, and its result is not used before its event:

- A layer is sent after the event of that layer's compute (``computed``); whole pages after everything that was given to
  the stream so far.
- Received data enters frames after everything that was given to the stream so far: the previous owner may still be
  read there. Whole pages are there when ``receive`` ends. Layers are on their way when ``layer_target`` ends: the
  computing stream waits for them (``landing``), no thread does; and ``settle`` waits before frames change hands.
- Pinned memory is returned once the event of its copy is over.

A device that does not compute a step within ``COMPUTE_S``, or does not end a copy within ``COPY_S`` after the
computation before it, counts as lost: it may still write anywhere.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

from engine.memory.arena import Arena, Arenas
from engine.memory.staging import HostStaging, Staging, Stagings
from kvstore.client.buffers import DeviceRows
from kvstore.device.base import Addresses, Device, DeviceEvent, DeviceLost, DeviceStream
from kvstore.device.copies import BOUNCE_BYTES_MAX, CopyStream, PinnedBounce, PinnedBounces, places_in
from kvstore.errors import DeadlineExceeded, InvalidRequest

if TYPE_CHECKING:
    from kvstore.device.cuda import CudaDevice

Bytes = npt.NDArray[np.uint8]
Runs = Sequence[tuple[int, int, int]]

COPY_S: Final = 10.0
COMPUTE_S: Final = 60.0
LAND_S: Final = 0.01  # between two looks whether such copies are over
PART_BYTES_MAX: Final = BOUNCE_BYTES_MAX // 2  # for whole pages at once: other copies need pinned memory, too
FLYING_MAX: Final = 8  # copies into frames whose pinned memory is not back yet


class DeviceStaging(Staging):
    """Staging for a device, see ``Staging`` and the module. Threads may share it.

    Args:
        compute: the stream in which the engine computes.
        computing: a lock on that stream, if several threads use it: only one at a time may.
    """

    def __init__(
        self, arena: Arena, device: Device, compute: DeviceStream, computing: threading.Lock | None = None
    ) -> None:
        super().__init__(arena)
        self.frames_max = max(1, PART_BYTES_MAX // arena.layout.page_bytes)
        self._device = device
        self._compute_stream = compute
        self._computing = computing or threading.Lock()
        self._out, self._in = CopyStream(device), CopyStream(device)
        self._bounces = PinnedBounces(device)
        self._computed: list[DeviceEvent | None] = [None] * arena.layout.layers
        self._flying: deque[tuple[DeviceEvent, DeviceEvent, ExitStack]] = deque()
        self._landing: DeviceEvent | None = None
        self._entering = threading.Lock()  # guards both: events are in the order of the copies

    # --- between the stream that computes and ours --------------------------------------------------------------------

    def computed(self, layer: int) -> None:
        """See ``Staging``."""
        self._computed[layer] = self._now()

    def finish(self) -> None:
        """See ``Staging``."""
        self._wait_computed(self._now())

    def landing(self) -> Callable[[], None] | None:
        """See ``Staging``."""
        event = self._landing

        def behind() -> None:
            assert event is not None
            with self._computing:
                self._compute_stream.wait(event)

        return None if event is None else behind

    def settle(self) -> None:
        """See ``Staging``."""
        with self._entering:
            while self._flying:
                self._land()

    def close(self) -> None:
        """See ``Staging``."""
        self._bounces.close()

    def _now(self) -> DeviceEvent:
        """After everything that was given to the computing stream."""
        with self._computing:
            return self._compute_stream.record()

    # --- out --------------------------------------------------------------------------------------------------------

    def send(self, frame: int, count: int) -> Bytes:
        """See ``Staging``."""
        with self._leaving(self._places(frame, count), self._now()) as data:
            return data.reshape(count, -1).copy()

    def send_layer(self, frame: int, count: int, layer: int) -> Bytes:
        """See ``Staging``."""
        with self._leaving(self._places(frame, count, layer), self._computed[layer]) as data:
            return data.reshape(count, -1).copy()

    def send_tail(self, frame: int, layer: int, tokens: int) -> Bytes:
        """See ``Staging``."""
        with self._leaving(self._tail(frame, layer, tokens), self._computed[layer]) as data:
            return data.reshape(1, -1).copy()

    def sending(self, frames: Runs, layer: int) -> Callable[[], Bytes]:
        """Start the copy; the returned call waits for it. See ``Staging``."""
        parts = [self._places(frame, count, layer) for _, frame, count in frames]
        places = np.concatenate([each[0] for each in parts]), np.concatenate([each[1] for each in parts])
        count = len(places[0])
        stack = ExitStack()
        after = self._computed[layer]
        data, event = self._begin(stack, places, after)

        def rows() -> Bytes:
            with stack:
                self._wait(event, after)
                return data.reshape(count, -1).copy()

        return rows

    @contextmanager
    def _leaving(self, places: tuple[Addresses, Addresses], after: DeviceEvent | None) -> Iterator[Bytes]:
        with ExitStack() as stack:
            data, event = self._begin(stack, places, after)
            self._wait(event, after)
            yield data

    def _begin(
        self, stack: ExitStack, places: tuple[Addresses, Addresses], after: DeviceEvent | None
    ) -> tuple[Bytes, DeviceEvent]:
        """Copy bytes of frames to pinned memory, which is ours until ``stack`` ends."""
        sources, nbytes = places
        size = int(nbytes.sum())
        bounce = self._borrowed(stack, size)
        bounce.event = event = self._out.copy(places_in(bounce.address, nbytes), sources, nbytes, after)
        return bounce.memory[:size], event

    # --- in ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def receive(self, frame: int, count: int) -> Iterator[Bytes]:
        """See ``Staging``."""
        with self._entered(self._places(frame, count)) as data:
            yield data.reshape(count, -1)
        self.settle()

    @contextmanager
    def filling(self, frame: int, count: int) -> Iterator[Bytes | DeviceRows]:
        """Fill frames in place, see ``Staging``. Earlier reads of the frames are waited for first."""
        (first, *_), _ = self._places(frame, count)
        nbytes = self.arena.layout.page_bytes
        self.finish()
        try:
            yield DeviceRows(self._device, int(first), count, nbytes, nbytes, None, self.arena)
        except DeadlineExceeded as error:  # it is unknown what it still writes
            raise DeviceLost(f"{self._device.name} does not finish its copies: {error}") from error

    def receive_layer(self, frame: int, layer: int, data: Bytes) -> None:
        """See ``Staging``."""
        with self._entered(self._places(frame, len(data), layer)) as target:
            target[:] = data.reshape(-1)

    @contextmanager
    def layer_target(self, frame: int, count: int, layer: int) -> Iterator[Bytes]:
        """See ``Staging``."""
        with self._entered(self._places(frame, count, layer)) as data:
            yield data.reshape(count, -1)

    def receive_tail(self, frame: int, layer: int, tokens: int, data: Bytes) -> None:
        """See ``Staging``."""
        places = self._tail(frame, layer, tokens)
        if data.size != int(places[1].sum()):
            raise InvalidRequest("data", f"{data.size} bytes are not {tokens} tokens of one layer")
        with self._entered(places) as target:
            target[:] = data.reshape(-1)

    @contextmanager
    def _entered(self, places: tuple[Addresses, Addresses]) -> Iterator[Bytes]:
        """Pinned memory whose contents are on their way into frames when this ends without an error."""
        targets, nbytes = places
        size = int(nbytes.sum())
        with ExitStack() as stack:
            with self._entering:
                while len(self._flying) >= FLYING_MAX:
                    self._land()
            bounce = self._borrowed(stack, size)
            yield bounce.memory[:size]
            with self._entering:
                after = self._now()
                bounce.event = self._in.copy(targets, places_in(bounce.address, nbytes), nbytes, after)
                self._landing = bounce.event
                self._flying.append((bounce.event, after, stack.pop_all()))

    def _land(self) -> None:
        """Wait for the oldest copy under way, and return its memory."""
        event, after, stack = self._flying.popleft()
        with stack:
            self._wait(event, after)

    # --- both -------------------------------------------------------------------------------------------------------

    def _borrowed(self, stack: ExitStack, size: int) -> PinnedBounce:
        """Pinned memory; if there is none left, that of finished copies into frames, which is only returned when
        checked."""
        deadline_s = time.monotonic() + COMPUTE_S + COPY_S
        while True:
            try:
                return stack.enter_context(self._bounces.borrow(size, time.monotonic() + LAND_S))
            except DeadlineExceeded as error:
                if time.monotonic() > deadline_s:
                    raise DeviceLost(f"{self._device.name} does not finish its copies: {error}") from error
            self.settle()

    def _wait_computed(self, event: DeviceEvent) -> None:
        try:
            event.wait(time.monotonic() + COMPUTE_S)
        except DeadlineExceeded as error:
            raise DeviceLost(f"{self._device.name} did not compute a step within {COMPUTE_S:g} s") from error

    def _wait(self, event: DeviceEvent, after: DeviceEvent | None) -> None:
        """Wait for a copy. If it is late, the computation before it may be the reason: its time begins after that."""
        try:
            try:
                event.wait(time.monotonic() + COPY_S)
            except DeadlineExceeded:
                if after is None:
                    raise
                self._wait_computed(after)
                event.wait(time.monotonic() + COPY_S)
        except DeadlineExceeded as error:
            raise DeviceLost(f"{self._device.name} did not finish a copy within {COPY_S:g} s") from error

    def _places(self, frame: int, count: int, layer: int | None = None) -> tuple[Addresses, Addresses]:
        """Addresses of frames, or of one layer of them, and the length of each piece."""
        layout = self.arena.layout
        assert frame >= 0 and count > 0 and frame + count <= self.arena.frames_total, (frame, count)
        start, stop = layout.byte_range(layer) if layer is not None else (0, layout.page_bytes)
        first = self.arena.pages.data_ptr() + start
        places = (np.arange(frame, frame + count, dtype=np.uint64) * np.uint64(layout.page_bytes)) + np.uint64(first)
        return places, np.full(count, stop - start, np.uint64)

    def _tail(self, frame: int, layer: int, tokens: int) -> tuple[Addresses, Addresses]:
        """Addresses of the first tokens of a page: a piece of each head."""
        layout = self.arena.layout
        (start,), _ = self._places(frame, 1, layer)
        heads = np.arange(layout.kv_heads, dtype=np.uint64) * np.uint64(layout.page_tokens * layout.token_bytes)
        return heads + start, np.full(layout.kv_heads, tokens * layout.token_bytes, np.uint64)


def stagings_of(arenas: Arenas) -> Stagings:
    """The staging that suits the device of the arenas.

    Raises:
        InvalidRequest: the driver of their device cannot be used.
    """
    if arenas.device.type == "cpu":
        return Stagings(arenas, [HostStaging(arena) for arena in arenas.groups])
    device, computing = device_of(arenas.device), threading.Lock()
    stream = device.stream_of(torch.cuda.current_stream(arenas.device).cuda_stream)
    return Stagings(arenas, [DeviceStaging(arena, device, stream, computing) for arena in arenas.groups])


def device_of(place: torch.device) -> CudaDevice:
    """PyTorch's device, as its driver knows it.

    Raises:
        InvalidRequest: it cannot be used.
    """
    from kvstore.device import cuda

    found = cuda.find()
    name = f"cuda:{place.index or 0}"
    device = next((each for each in found.devices if each.name == name), None)
    if device is None:
        raise InvalidRequest("device", f"{name} cannot be used: {found.missing or 'the driver does not know it'}")
    return device
