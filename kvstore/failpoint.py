"""Failpoints: named steps at which a test can kill this process, with ``KVSTORE_FAILPOINT=name`` or ``name:3``.

A failpoint that is not armed costs one test of a module global. ``NAMES`` lists all of them for the tests.
``disk.stall`` does not kill the process: calls to a disk wait while there is a file with the disk's name and
``STALLED``.
``fault:PATH`` raises an error at the boundaries (see ``kvstore.boundary``) whose places are lines of the file PATH.
"""

from __future__ import annotations

import os
import signal
import time

NAMES = (
    "node.event",  # an event was decided, nothing performed yet
    "node.instruction",  # between two instructions
    "node.word",  # a record's body is written, its word is not
    "node.commit",  # records are written, the index is not committed
    "node.drained",  # a published put is performed, its log does not say so
    "node.reply",  # everything is performed, the reply is not sent
    "node.recover",  # recovery was decided, nothing written yet
    "node.rebuild",  # a new index is built, not yet named
    "node.resize",  # some files of a node that grows have their new incarnation, others do not
    "mover.copy",  # a copy between tiers was decided, nothing read or written yet
    "mover.saved",  # pages are durable on NVMe, no record says so
    "mover.loaded",  # pages were read from NVMe into their frames, no record says so
    "mover.reported",  # a copy was reported and performed
    "mover.checkpoint",  # an extent's records were taken for its checkpoint, nothing written
    "scanner.run",  # some frames of an extent were scanned after a reboot
    "scanner.offered",  # some of what was found was adopted
    "nvme.format",  # between two writes that reformat a device
    "nvme.table",  # an extent table is written, not synced
    "nvme.loaded",  # tables were rebuilt from a device's directories
    "client.granted",  # frames were granted, nothing copied
    "client.copied",  # pages are copied, the seal is not sent
    "client.recorded",  # a record is written into the log of puts, and not published
    "client.published",  # the record is published, the put has not returned
    "client.sealing",  # the seal is sent, its reply not read
    "client.begun",  # a writer has frames, and has published their pages
    "client.layer",  # a layer is copied, its progress mark not raised
    "client.reading",  # pages are found and proven, not copied
    "client.leased",  # a lease was granted
)

STALL, STALLED, STALL_LOOK_S = "disk.stall", ".stalled", 0.01
FAULT = "fault"
ACTIVE = False
_name, _count, _places = "", 0, ""


class Fault(Exception):
    """An unexpected error that a test injects."""


def arm(step: str) -> None:
    """Arm the failpoint ``step``, as ``KVSTORE_FAILPOINT`` does when a process starts; "" for none."""
    global ACTIVE, _name, _count, _places
    name, _, argument = step.partition(":")
    if name not in ("", *NAMES, STALL, FAULT):
        raise ValueError(f"KVSTORE_FAILPOINT: must be one of {', '.join(NAMES)} (got {name!r})")
    if name == FAULT:
        _places, argument = argument, ""
    ACTIVE, _name, _count = bool(name), name, int(argument or 1)


def hit(name: str) -> None:
    """Kill this process (SIGKILL) if the failpoint is armed and its count is used up. Call under ``if ACTIVE``."""
    global _count
    if name == _name:
        _count -= 1
        if _count <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def stall(path: str) -> None:
    """Wait like a device that does not answer, for as long as the test says. Call under ``if ACTIVE``."""
    while _name == STALL and os.path.exists(path + STALLED):
        time.sleep(STALL_LOOK_S)


def fault(place: str) -> None:
    """Raise ``Fault`` if the test's file names this place. Call under ``if ACTIVE``."""
    if _name != FAULT:
        return
    try:
        with open(_places, encoding="utf-8") as file:
            is_named = place in file.read().splitlines()
    except FileNotFoundError:
        return
    if is_named:
        raise Fault(place)


arm(os.environ.get("KVSTORE_FAILPOINT", ""))
