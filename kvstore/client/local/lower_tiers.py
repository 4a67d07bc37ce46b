"""Which tiers this machine's clients read below memory, and how."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.client.local.nvme import NvmeReader
from kvstore.client.local.read_threads import ReadThreads
from kvstore.client.local.tier_reader import LowerReader
from kvstore.model.replica import Tier
from kvstore.tier.folder import NodeFolder

LOWER_READERS: dict[Tier, Callable[[NodeFolder, ReadThreads], LowerReader]] = {Tier.NVME: NvmeReader}
"""The tiers below memory, the fastest first. Another one is a class (``LowerReader``) and a row here."""


def lower_readers(folder: NodeFolder, threads: ReadThreads) -> dict[Tier, LowerReader]:
    """A reader for each, of one node; nothing is opened yet."""
    return {tier: reader(folder, threads) for tier, reader in LOWER_READERS.items()}
