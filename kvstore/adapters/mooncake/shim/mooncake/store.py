"""The module that hosts import as ``mooncake.store``."""

from kvstore.adapters.mooncake.store import MooncakeDistributedStore, ReplicateConfig

__all__ = ["MooncakeDistributedStore", "ReplicateConfig"]
