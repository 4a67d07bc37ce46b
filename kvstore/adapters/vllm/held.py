"""Room: whether one more request may take blocks before it runs.

A request whose pages are loaded holds blocks, and gives them back to nobody until it has run. vLLM admits one where
those before it still find what they need. Of windows it counts blocks that were left behind as if they were held, so it
admits too many: two may hold what each of them needs, and neither ever runs. So with windows the count is taken here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class HeldBlocks:
    """Requests that hold blocks and do not run yet. Of the scheduler's thread alone."""

    def __init__(self) -> None:
        self._manager: KVCacheManager | None = None
        self._held: dict[str, Request] = {}

    def bind(self, manager: KVCacheManager) -> None:
        """Who has the blocks."""
        self._manager = manager

    def add(self, request: Request) -> None:
        """It has been given blocks to load into."""
        self._held[request.request_id] = request

    def remove(self, name: str) -> None:
        """It runs, or is over."""
        self._held.pop(name, None)

    def any(self) -> bool:
        """Whether there are such requests."""
        return bool(self._held)

    def has_room(self, request: Request) -> bool:
        """Whether this one may hold blocks as well: there are free ones for all that it and the others will need. The
        only one always may, since vLLM's cache has room for any single request."""
        others = {name: other for name, other in self._held.items() if name != request.request_id}
        if not others or self._manager is None:
            return True
        missing = self._needed(request)
        for name, other in others.items():
            tables = self._manager.get_block_ids(name)
            missing += self._needed(other) - sum(len(table) - table.count(0) for table in tables)
        return missing <= self._manager.block_pool.get_num_free_blocks()

    def _needed(self, request: Request) -> int:
        """Blocks at most, until its first answer."""
        assert self._manager is not None
        total = 0
        for table in self._manager.coordinator.single_type_managers:
            blocks = request.num_tokens // table.block_size + 1
            most = table.max_admission_blocks_per_request
            total += blocks if most is None else min(blocks, most)
        return total
