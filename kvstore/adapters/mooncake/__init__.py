"""Mooncake's ``mooncake.store`` on a node: the classes that vLLM and SGLang call, with their return codes.

``python -m kvstore.adapters.mooncake.install`` makes ``import mooncake.store`` find them.
"""

from kvstore.adapters.mooncake.store import MooncakeDistributedStore, ReplicateConfig

__all__ = ["MooncakeDistributedStore", "ReplicateConfig"]
