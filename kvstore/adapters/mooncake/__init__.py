"""A replacement for Mooncake's ``mooncake.store``: the classes that vLLM and SGLang call, backed by a node.

``python -m kvstore.adapters.mooncake.install`` makes ``import mooncake.store`` find these classes.
"""

from kvstore.adapters.mooncake.store import MooncakeDistributedStore, ReplicateConfig

__all__ = ["MooncakeDistributedStore", "ReplicateConfig"]
