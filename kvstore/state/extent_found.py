"""ExtentFound: an extent's tables as a start finds them, for recovery to judge."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.model.replica import FrameClass, Tier
from kvstore.state.views import Snapshot

Words = npt.NDArray[np.uint64]


@dataclass(slots=True)
class ExtentFound:
    """One extent's tables as found on start; all arrays ``[frames]``, ``writers`` ``[frames, SHARDS_MAX]``.

    On NVMe ``groups`` and ``writers`` are empty: only the daemon writes there.
    """

    number: int
    position: int
    frame_class: FrameClass
    snapshot: Snapshot
    infos: Words
    leases: Words
    groups: Words
    writers: Words
    sound: npt.NDArray[np.bool_]  # the identity sum holds
    tier: Tier = Tier.DRAM
