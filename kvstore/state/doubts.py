"""Doubts: frames that a record gives away at a start, though a session that lives may still write there.

No sum covers a record's word, nor the sessions named behind it. While a daemon runs it knows better than they; one that
starts has nothing else. So a frame that looks free, or sealed with a body that does not hold, and still names a session
that lives, is held for that session: frames that became free name no session (``ExtentTable.forget_writers``).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from kvstore.model.replica import Address, FrameState
from kvstore.state import events as ev
from kvstore.state.extent_found import ExtentFound

_STATE = np.uint64(0xFF)


def hold_back(found: list[ExtentFound], living: Collection[int], out: list[ev.Instruction]) -> None:
    """Such frames are QUARANTINED from here on, in ``found`` and by what is written."""
    if not living:
        return
    known = np.array(sorted(living), np.uint64)
    for table in found:
        if not len(table.writers):  # only the node writes there
            continue
        words = table.snapshot.words
        states = words & _STATE
        broken = ~table.sound & ((states == FrameState.SEALED) | (states == FrameState.RETIRING))
        named = np.isin(table.writers, known).any(axis=1)
        frames = np.flatnonzero(((states == FrameState.FREE) | broken) & named)
        if len(frames):
            words[frames] = words[frames] & ~_STATE | np.uint64(FrameState.QUARANTINED)
            addresses = [Address(table.number, frame, int(words[frame]) >> 8) for frame in frames.tolist()]
            out.append(ev.WriteState(addresses, FrameState.QUARANTINED))


def writer_of(named: int, living: Collection[int]) -> int:
    """The session that a record means: the one it names, or the living one that differs from it in one byte."""
    if not named or named in living:
        return named
    return next((session for session in living if _in_one_byte(session ^ named)), named)


def _in_one_byte(difference: int) -> bool:
    lowest = (difference & -difference).bit_length() - 1
    return difference >> lowest // 8 * 8 <= 0xFF
