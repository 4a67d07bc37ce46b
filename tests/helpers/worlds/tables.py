"""Records and marks of one extent without files, as columns of numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from kvstore.model.replica import IDENTITY_HEAD_BYTES, SHARDS_MAX, FrameClass, FrameState, Tier
from kvstore.state.interfaces import Snapshot
from kvstore.state.recovery import ExtentFound


class Table:
    """Records and marks of one extent, as columns ``[frames]``."""

    def __init__(
        self, number: int, position: int, frame_class: FrameClass, frames: int, tier: Tier = Tier.DRAM
    ) -> None:
        self.number = number
        self.position = position
        self.tier = tier
        self.frame_class = frame_class
        self.frames = frames
        self.words = np.zeros(frames, np.uint64)
        tokens_bytes = 4 * frame_class.page_tokens if tier == Tier.DRAM else 0
        self.rows = np.zeros((frames, IDENTITY_HEAD_BYTES + tokens_bytes), np.uint8)
        self.parents = np.zeros((frames, 16), np.uint8)
        self.infos = np.zeros(frames, np.uint64)
        self.sums = np.zeros(frames, np.uint64)
        self.leases = np.zeros(frames, np.uint64)
        # [write group, session of each shard]; the checksums of a sealed page lie over them. Not on NVMe
        self.tails = np.zeros((frames, max(1 + SHARDS_MAX, frame_class.layers // 2 + 1)), np.uint64)
        self.last_use = np.zeros(frames, np.uint64)

    def state(self, frame: int) -> FrameState:
        """What the record's word says."""
        return FrameState(int(self.words[frame]) & 0xFF)

    def generation(self, frame: int) -> int:
        """What the record's word says."""
        return int(self.words[frame]) >> 8

    def sum_of(self, frame: int) -> int:
        """The identity sum the record should have."""
        return xxhash.xxh3_64_intdigest(self.rows[frame].tobytes() + self.parents[frame].tobytes())

    def snapshot(self) -> Snapshot:
        """As the state reads it."""

        def column(values: Any) -> Any:
            return np.ascontiguousarray(values).view("S16").reshape(-1)

        keys, roots = column(self.rows[:, :16]), column(self.rows[:, 16:32])
        return Snapshot(self.number, self.words.copy(), keys, column(self.parents.copy()), roots)

    def found(self) -> ExtentFound:
        """As a daemon that starts finds it."""
        in_dram = self.tier == Tier.DRAM
        return ExtentFound(
            self.number,
            self.position,
            self.frame_class,
            self.snapshot(),
            self.infos.copy(),
            self.leases.copy(),
            self.tails[:, 0].copy() if in_dram else np.zeros(0, np.uint64),
            self.tails[:, 1 : 1 + SHARDS_MAX].copy() if in_dram else np.zeros((0, SHARDS_MAX), np.uint64),
            np.array([self.sum_of(frame) == int(self.sums[frame]) for frame in range(self.frames)]),
            self.tier,
        )
