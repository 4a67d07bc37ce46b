"""What nodes own in a placement, as tests compare it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.cluster.directory import Placement


def owned(placement: Placement, spans: npt.NDArray[np.uint64]) -> dict[str, npt.NDArray[np.bool_]]:
    """Return, for each node, which of these spans it owns."""
    owners = placement.owners(spans)
    return {name: (owners == place).any(axis=1) for place, name in enumerate(placement.nodes)}
