"""An engine that mounts memory, and does what it is told: ``python -m tests.helpers.workers.mounting JSON``.

Its argument is a JSON object: ``node``, ``frames``, ``strided`` (laid out as another engine's), ``device`` (whose
memory it is; "": the host's). Each line on stdin is a JSON list, a verb and its arguments; each is answered by a line
``done``. The end of stdin is its end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import kvstore
from kvstore.client.local.segment import LocalSegment
from kvstore.client.local.store import LocalStore
from kvstore.device.base import Device, DeviceMemory
from kvstore.tier.peer_memory import DeviceFrames
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.device_frames import STRIDE, device_named, fill_frames, shown
from tests.helpers.strided import foreign_strides, write_foreign

TURN_S = 0.01  # for which a prompt stays
DEVICE: list[tuple[Device, DeviceMemory]] = []  # whose memory is mounted


def log(event: str, **fields: Any) -> None:
    """One line."""
    os.write(1, (json.dumps({"event": event, **fields}) + "\n").encode())


def publish(segment: LocalSegment, seed: int, pages: int, frames: list[int], salt: str = "", first: int = 0) -> None:
    """The last of these pages of a prompt, into these frames."""
    keys = chain(seed, pages, salt=salt)[first:]
    if segment.pages.size:
        segment.pages[frames] = contents(keys)
    elif DEVICE:
        fill_frames(*DEVICE[0], frames, contents(keys))
    else:
        write_foreign(segment.memory, SMALL, frames, contents(keys))
    segment.publish(keys, frames)


def turn_over(segment: LocalSegment, seeds: int, pages: int) -> int:
    """One prompt after the other in the same frames, until stdin has a line. How often."""
    turns, frames = 0, list(range(pages))
    os.set_blocking(0, False)
    while not sys.stdin.readline():
        free = frames
        while free:
            done = segment.retire(free)
            free = [frame for frame in free if frame not in done]
        publish(segment, turns % seeds, pages, frames)
        turns += 1
        time.sleep(TURN_S)
    os.set_blocking(0, True)
    return turns


def main(told: dict[str, Any]) -> None:
    """See the module."""
    with kvstore.connect(told["node"]) as store:
        assert isinstance(store, LocalStore)
        strides = foreign_strides(SMALL, told["frames"]) if told["strided"] else None
        shows: DeviceFrames | None = None
        if told["device"]:
            device = device_named(told["device"])
            DEVICE.append((device, device.allocate(told["frames"] * STRIDE, shared=True)))
            shows = shown(*DEVICE[0])
        segment = store.mount(SMALL, told["frames"], shows, strides)
        log("mounted", number=segment.number)
        while line := sys.stdin.readline():
            verb, *given = json.loads(line)
            if verb == "publish":
                publish(segment, *given)
                log("done")
            elif verb == "retire":
                log("done", free=segment.retire(given[0]))
            elif verb == "turn_over":
                log("turning")
                log("done", turns=turn_over(segment, *given))
            else:
                segment.close()
                log("done")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
