"""DeviceStaging: copies KV between the frames of a device and host memory, on streams of its own.

The engine's thread submits work to the compute stream and does not wait for it. Each copy therefore waits in its own
stream for the computations that it depends on, and its result is used only after the event of the copy:

- A layer is sent after the event that ``mark_computed`` recorded for this layer. Whole pages are sent after all work
  that was submitted to the compute stream so far.
- Received data is written to frames after all work that was submitted so far, which may still read the previous
  contents. Whole pages are in the frames when ``receive`` ends. Layers may still be in flight when ``layer_target``
  ends: the compute stream waits for them (``arrival_gate``), and no thread has to. ``settle`` waits for them before the
  frames get a new owner.
- Pinned memory is returned after the event of its copy.

A device counts as lost if it does not compute a step within ``COMPUTE_S``, or does not end a copy within ``COPY_S``
after the computation before the copy. A lost device may still write anywhere.
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
LAND_S: Final = 0.01  # how often a thread that waits for pinned memory checks for copies that have ended
PART_BYTES_MAX: Final = BOUNCE_BYTES_MAX // 2  # pinned memory for whole pages at once; other copies need some, too
FLYING_MAX: Final = 8  # copies into frames that may be in flight


class DeviceStaging(Staging):
    """The staging of frames on a device. Threads may share it.

    Args:
        compute: the stream in which the engine computes.
        computing: a lock for that stream, because only one thread at a time may use it.
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
        self._flying: deque[tuple[DeviceEvent, DeviceEvent, ExitStack]] = deque()  # copy, compute before it, memory
        self._last_arrival: DeviceEvent | None = None  # the event of the last copy into frames
        self._arriving = threading.Lock()  # guards the two above, and keeps events in the order of the copies

    # --- the compute stream -------------------------------------------------------------------------------------------

    def mark_computed(self, layer: int) -> None:
        """Record an event in the compute stream, after which the layer can be sent."""
        self._computed[layer] = self._record_compute()

    def finish(self) -> None:
        """Wait until the compute stream has done all work that was submitted so far."""
        self._wait_computed(self._record_compute())

    def arrival_gate(self) -> Callable[[], None] | None:
        """Return a function that makes the compute stream wait for the last copy into frames."""
        event = self._last_arrival

        def gate() -> None:
            assert event is not None
            with self._computing:
                self._compute_stream.wait(event)

        return None if event is None else gate

    def settle(self) -> None:
        """Wait until all received data is in the frames."""
        with self._arriving:
            while self._flying:
                self._finish_oldest()

    def close(self) -> None:
        """Free the pinned memory."""
        self._bounces.close()

    def _record_compute(self) -> DeviceEvent:
        """Return the event of all work that was submitted to the compute stream so far."""
        with self._computing:
            return self._compute_stream.record()

    # --- from frames ------------------------------------------------------------------------------------------------

    def send(self, frame: int, count: int) -> Bytes:
        """Return copies of whole frames."""
        with self._copy_out(self._places(frame, count), self._record_compute()) as data:
            return data.reshape(count, -1).copy()

    def send_layer(self, frame: int, count: int, layer: int) -> Bytes:
        """Return copies of one layer of frames."""
        with self._copy_out(self._places(frame, count, layer), self._computed[layer]) as data:
            return data.reshape(count, -1).copy()

    def send_tail(self, frame: int, layer: int, tokens: int) -> Bytes:
        """Return a copy of the first tokens of one layer of a page."""
        with self._copy_out(self._tail(frame, layer, tokens), self._computed[layer]) as data:
            return data.reshape(1, -1).copy()

    def start_send_layer(self, frames: Runs, layer: int) -> Callable[[], Bytes]:
        """Start copying one layer of frames. Returns a function that waits for the copy and returns the rows."""
        parts = [self._places(frame, count, layer) for _, frame, count in frames]
        places = np.concatenate([each[0] for each in parts]), np.concatenate([each[1] for each in parts])
        count = len(places[0])
        stack = ExitStack()
        after = self._computed[layer]
        data, event = self._start_copy_out(stack, places, after)

        def rows() -> Bytes:
            with stack:
                self._wait(event, after)
                return data.reshape(count, -1).copy()

        return rows

    @contextmanager
    def _copy_out(self, places: tuple[Addresses, Addresses], after: DeviceEvent | None) -> Iterator[Bytes]:
        with ExitStack() as stack:
            data, event = self._start_copy_out(stack, places, after)
            self._wait(event, after)
            yield data

    def _start_copy_out(
        self, stack: ExitStack, places: tuple[Addresses, Addresses], after: DeviceEvent | None
    ) -> tuple[Bytes, DeviceEvent]:
        """Start copying bytes of frames to pinned memory. The memory is borrowed until ``stack`` ends."""
        sources, nbytes = places
        size = int(nbytes.sum())
        bounce = self._borrow(stack, size)
        bounce.event = event = self._out.copy(places_in(bounce.address, nbytes), sources, nbytes, after)
        return bounce.memory[:size], event

    # --- into frames ------------------------------------------------------------------------------------------------

    @contextmanager
    def receive(self, frame: int, count: int) -> Iterator[Bytes]:
        """Yield pinned memory to fill, copy it to whole frames, and wait for the copy."""
        with self._copy_in(self._places(frame, count)) as data:
            yield data.reshape(count, -1)
        self.settle()

    @contextmanager
    def page_target(self, frame: int, count: int) -> Iterator[Bytes | DeviceRows]:
        """Wait for earlier computations, which may read the frames. Then yield the frames as device memory to fill."""
        (first, *_), _ = self._places(frame, count)
        nbytes = self.arena.layout.page_bytes
        self.finish()
        try:
            yield DeviceRows(self._device, int(first), count, nbytes, nbytes, None, self.arena)
        except DeadlineExceeded as error:  # the copies may still write
            raise DeviceLost(f"{self._device.name} does not finish its copies: {error}") from error

    def receive_layer(self, frame: int, layer: int, data: Bytes) -> None:
        """Start copying one layer into frames."""
        with self._copy_in(self._places(frame, len(data), layer)) as target:
            target[:] = data.reshape(-1)

    @contextmanager
    def layer_target(self, frame: int, count: int, layer: int) -> Iterator[Bytes]:
        """Yield pinned memory to fill, and start copying it to one layer of frames."""
        with self._copy_in(self._places(frame, count, layer)) as data:
            yield data.reshape(count, -1)

    def receive_tail(self, frame: int, layer: int, tokens: int, data: Bytes) -> None:
        """Start copying the first tokens of one layer of a page into a frame."""
        places = self._tail(frame, layer, tokens)
        if data.size != (nbytes := int(places[1].sum())):
            raise InvalidRequest("data", f"{tokens} tokens of one layer have {nbytes} bytes (got {data.size})")
        with self._copy_in(places) as target:
            target[:] = data.reshape(-1)

    @contextmanager
    def _copy_in(self, places: tuple[Addresses, Addresses]) -> Iterator[Bytes]:
        """Yield pinned memory to fill. If the caller raises no error, start copying it into frames."""
        targets, nbytes = places
        size = int(nbytes.sum())
        with ExitStack() as stack:
            with self._arriving:
                while len(self._flying) >= FLYING_MAX:
                    self._finish_oldest()
            bounce = self._borrow(stack, size)
            yield bounce.memory[:size]
            with self._arriving:
                after = self._record_compute()
                bounce.event = self._in.copy(targets, places_in(bounce.address, nbytes), nbytes, after)
                self._last_arrival = bounce.event
                self._flying.append((bounce.event, after, stack.pop_all()))

    def _finish_oldest(self) -> None:
        """Wait for the oldest copy in flight, and return its pinned memory."""
        event, after, stack = self._flying.popleft()
        with stack:
            self._wait(event, after)

    # --- both directions --------------------------------------------------------------------------------------------

    def _borrow(self, stack: ExitStack, size: int) -> PinnedBounce:
        """Borrow pinned memory until ``stack`` ends.

        If none is free, wait for the copies into frames: their memory is returned only when a thread checks them.
        """
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
        """Wait for a copy that begins after the event ``after``. ``COPY_S`` counts from the later of now and ``after``.

        So a slow computation does not make the copy late.
        """
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
        """Return the addresses and the lengths of frames, or of one layer of each."""
        layout = self.arena.layout
        assert frame >= 0 and count > 0 and frame + count <= self.arena.frames_total, (frame, count)
        start, stop = layout.byte_range(layer) if layer is not None else (0, layout.page_bytes)
        first = self.arena.pages.data_ptr() + start
        places = (np.arange(frame, frame + count, dtype=np.uint64) * np.uint64(layout.page_bytes)) + np.uint64(first)
        return places, np.full(count, stop - start, np.uint64)

    def _tail(self, frame: int, layer: int, tokens: int) -> tuple[Addresses, Addresses]:
        """Return the addresses and the lengths of the first tokens of a page, one part for each head."""
        layout = self.arena.layout
        (start,), _ = self._places(frame, 1, layer)
        heads = np.arange(layout.kv_heads, dtype=np.uint64) * np.uint64(layout.page_tokens * layout.token_bytes)
        return heads + start, np.full(layout.kv_heads, tokens * layout.token_bytes, np.uint64)


def stagings_of(arenas: Arenas) -> Stagings:
    """Return stagings for the device of the arenas.

    Raises:
        InvalidRequest: the device cannot be used through its driver.
    """
    if arenas.device.type == "cpu":
        return Stagings(arenas, [HostStaging(arena) for arena in arenas.groups])
    device, computing = device_of(arenas.device), threading.Lock()
    stream = device.stream_of(torch.cuda.current_stream(arenas.device).cuda_stream)
    return Stagings(arenas, [DeviceStaging(arena, device, stream, computing) for arena in arenas.groups])


def device_of(place: torch.device) -> CudaDevice:
    """Return the driver's device for a device of PyTorch.

    Raises:
        InvalidRequest: the device cannot be used through its driver.
    """
    from kvstore.device import cuda

    available = cuda.find()
    name = f"cuda:{place.index or 0}"
    device = next((each for each in available.devices if each.name == name), None)
    if device is None:
        raise InvalidRequest("device", f"{name} cannot be used: {available.missing or 'the driver does not list it'}")
    return device
