"""KVStoreConnector: the class that vLLM calls. Its scheduler side plans (``planning``), its worker side moves pages
(``moving``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

import kvstore
from kvstore.adapters.vllm.kv_events import StoredBlocks
from kvstore.adapters.vllm.layouts import served
from kvstore.adapters.vllm.scheduler import Planner, StepMoves
from kvstore.adapters.vllm.stats import MoveStats, PromMoveStats
from kvstore.adapters.vllm.worker import BlockMover
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

SETTINGS = ("node", "salt", "page_blocks", "boundary_tokens")
ANSWER_S = 1.0  # the longest that a step waits for a node; beyond that the pages are computed
BOUNDARY_TOKENS = 1024


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Pages of prompts and answers, shared by all engines of a node and its pool.

    ``kv_connector_extra_config`` may name the ``node`` (as ``kvstore.connect`` takes it; default: the only one on this
    machine), the tenant's ``salt``, ``page_blocks``, the blocks of a page, and ``boundary_tokens``: if layers have
    sliding windows, a prompt can be resumed at every multiple of this, and at its end.

    Raises:
        ValueError: a setting is unknown, there is no such node, or the model's cache cannot be stored.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra: dict[str, Any] = dict(self._kv_transfer_config.kv_connector_extra_config)
        unknown = sorted(set(extra) - set(SETTINGS))
        if unknown:
            raise ValueError(f"KVStoreConnector: unknown setting {unknown[0]!r}; known are {', '.join(SETTINGS)}")
        transfer = self._kv_transfer_config
        if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
            raise ValueError('KVStoreConnector: kv_load_failure_policy: must be "recompute": pages may be evicted')
        self._served = served(vllm_config, kv_cache_config, int(extra.get("page_blocks", 0)))
        self._salt = str(extra.get("salt", ""))
        try:
            self._store = kvstore.connect(extra.get("node"), ANSWER_S)
            self._store.cache(self._served.layouts, self._salt)
        except KVStoreError as error:
            raise ValueError(f"KVStoreConnector: {error}") from error
        self._planner: Planner | None = None
        self._mover: BlockMover | None = None
        if role == KVConnectorRole.SCHEDULER:
            can = {"loads": transfer.is_kv_consumer, "saves": transfer.is_kv_producer}
            every = int(extra.get("boundary_tokens", BOUNDARY_TOKENS))
            events = vllm_config.kv_events_config
            stored = StoredBlocks.for_model(self._served) if events and events.enable_kv_cache_events else None
            self._planner = Planner(self._store, self._served, self._salt, **can, boundary_tokens=every, stored=stored)

    @property
    def requires_kv_delivery(self) -> bool:
        """See the base class. Pages that were not saved are recomputed."""
        return False

    # --- the scheduler's side ---------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """See the base class."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._planner is not None:
            self._planner.held.bind(kv_cache_manager)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See the base class."""
        assert self._planner is not None
        found = self._planner.found(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See the base class."""
        assert self._planner is not None
        self._planner.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMoves:
        """See the base class."""
        assert self._planner is not None
        return self._planner.step(scheduler_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See the base class. The pages were saved step by step, so the blocks may be freed."""
        assert self._planner is not None
        self._planner.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See ``SupportsHMA``. As ``request_finished``."""
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> bool:
        """See the base class. Pages stay in the pool for other engines, but this engine does not find them any more."""
        return self._planner is None or self._planner.reset()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """See the base class. Returns events of stored and removed blocks."""
        return self._planner.take_events() if self._planner is not None else ()

    # --- what both tell ---------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> MoveStats | None:
        """See the base class."""
        if self._planner is not None:
            return self._planner.take_stats()
        counts = self._mover.take_counts() if self._mover is not None else {}
        return MoveStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MoveStats:
        """See the base class."""
        return MoveStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMoveStats:
        """See the base class."""
        return PromMoveStats(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- a worker's side --------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See the base class. Raises ValueError."""
        self._mover = BlockMover(self._store, self._served, self._salt, kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """See the base class."""
        assert self._mover is not None
        for move in self._moves().loads:
            self._mover.load(move)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See the base class. Nothing is loaded for the running step."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """See the base class. All layers are saved after the last one."""

    def wait_for_save(self) -> None:
        """See the base class. The step's pages are copied out of their blocks before the computing stream does anything
        else. On a GPU they are stored later."""
        assert self._mover is not None
        self._mover.save(self._moves().saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See the base class."""
        return None, self._mover.loaded(self._moves().idle) if self._mover is not None else None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See the base class."""
        results = super().get_transfer_results(finished_req_ids)
        if self._mover is not None:
            results.failed_recving = self._mover.failed_of(results.finished_recving)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See the base class."""
        return self._mover.failed() if self._mover is not None else set()

    def shutdown(self) -> None:
        """See the base class."""
        if self._mover is not None:
            self._mover.close()
        self._store.close()

    def _moves(self) -> StepMoves:
        moves = self._get_connector_metadata()
        assert isinstance(moves, StepMoves)
        return moves
