"""What a start finds of memory that engines have mounted: those that live go on, the others have ended."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator

from kvstore.model.replica import Address
from kvstore.serving import logs
from kvstore.state import events as ev
from kvstore.state.mounts import MOUNTED_FRAMES_MAX, MOUNTS_MAX
from kvstore.tier.folder import NodeFolder
from kvstore.tier.header import Header
from kvstore.tier.mounted import MountedTable, mounted_numbers, remove_mounted

log = logging.getLogger("kvstore.node")


def found_mounts(folder: NodeFolder, header: Header, living: Collection[int], now_ns: int) -> Iterator[ev.FoundMount]:
    """One event per segment whose engine lives. What cannot be believed, and what dead engines left, is removed.

    Engines go on writing meanwhile. What they publish lies in the log behind, and counts when it is taken in: a frame
    that has another page by then has it under a newer generation.
    """
    frames = mounts = 0
    extents = set(folder.extents())
    for number in mounted_numbers(folder):
        table = MountedTable.open(folder, number, header.incarnation)
        sound = table is not None and number not in extents and number < header.next_extent
        if table is None or not sound or table.session not in living:
            remove_mounted(folder, number)
            continue
        frames, mounts = frames + table.frames, mounts + 1
        if frames > MOUNTED_FRAMES_MAX or mounts > MOUNTS_MAX:
            logs.event(log, logging.ERROR, "more memory is mounted than a node may know", segment=number)
            remove_mounted(folder, number)
            return
        yield _found(table, now_ns)


def _found(table: MountedTable, now_ns: int) -> ev.FoundMount:
    event = ev.FoundMount(
        *(now_ns, table.session, table.number, table.frame_class, table.frames),
        *([], [], [], []),
    )
    for frame in table.sealed().tolist():
        generation, key, root, span = table.generation(frame), table.key(frame), table.root(frame), table.span(frame)
        if generation == table.generation(frame) and table.is_sealed(frame):  # it did not change meanwhile
            event.addresses.append(Address(table.number, frame, generation))
            event.keys.append(key)
            event.roots.append(root)
            event.spans.append(span)
    return event
