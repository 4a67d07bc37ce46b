"""``KVStoreConnector``, the class that vLLM calls: in the scheduler it plans, in the workers it copies pages."""

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
from kvstore.adapters.vllm.layouts import paged_model
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
ANSWER_S = 1.0  # longest wait of a step for the node; after that vLLM computes the pages
BOUNDARY_TOKENS = 1024


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's connector to a store. All engines of a node and its pool share the pages of prompts and answers.

    Settings in ``kv_connector_extra_config``:
        node: as in ``kvstore.connect``; default: the only node on this machine.
        salt: the tenant.
        page_blocks: number of vLLM's blocks in a page; default: as many as make 64 tokens.
        boundary_tokens: for models with sliding windows. A prompt can be resumed at every multiple of this number, and
            at its end.

    Raises:
        ValueError: a setting is unknown, the node does not exist, or the model's cache cannot be stored.
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
        self._model = paged_model(vllm_config, kv_cache_config, int(extra.get("page_blocks", 0)))
        self._salt = str(extra.get("salt", ""))
        try:
            self._store = kvstore.connect(extra.get("node"), ANSWER_S)
            self._store.cache(self._model.layouts, self._salt)
        except KVStoreError as error:
            raise ValueError(f"KVStoreConnector: {error}") from error
        self._planner: Planner | None = None
        self._mover: BlockMover | None = None
        if role == KVConnectorRole.SCHEDULER:
            boundary_tokens = int(extra.get("boundary_tokens", BOUNDARY_TOKENS))
            events = vllm_config.kv_events_config
            stored_blocks = StoredBlocks.for_model(self._model) if events and events.enable_kv_cache_events else None
            self._planner = Planner(
                self._store,
                self._model,
                self._salt,
                can_load=transfer.is_kv_consumer,
                can_save=transfer.is_kv_producer,
                boundary_tokens=boundary_tokens,
                stored_blocks=stored_blocks,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """False, since vLLM recomputes pages that were not saved."""
        return False

    # --- the scheduler's side ---------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Set the manager whose free blocks limit the loads of models with windows."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._planner is not None:
            self._planner.loading.bind(kv_cache_manager)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens after the computed ones can be loaded, and whether they are loaded in parallel with
        steps. The number is None if vLLM should ask again later."""
        assert self._planner is not None
        tokens = self._planner.match(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plan a request's load into the blocks that vLLM has allocated."""
        assert self._planner is not None
        self._planner.plan_load(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMoves:
        """Return the loads and saves that the workers start in this step."""
        assert self._planner is not None
        return self._planner.step(scheduler_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request that has ended, and let vLLM free its blocks at once: the steps have saved its pages."""
        assert self._planner is not None
        self._planner.forget(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do the same as ``request_finished``, for a model with several groups of blocks."""
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> bool:
        """No longer find any page stored so far; other engines still find them. Return False if a load is in
        progress."""
        return self._planner is None or self._planner.reset()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the events of stored and removed blocks since the last call."""
        return self._planner.take_events() if self._planner is not None else ()

    # --- statistics of both sides -----------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> MoveStats | None:
        """Return the counts of this process since the last call; None if there are none."""
        if self._planner is not None:
            return self._planner.take_stats()
        counts = self._mover.take_counts() if self._mover is not None else {}
        return MoveStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MoveStats:
        """Return the statistics that contain these counts."""
        return MoveStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMoveStats:
        """Return the Prometheus counters of this server's engines."""
        return PromMoveStats(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- a worker's side --------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the cache of each layer.

        Raises:
            ValueError: a cache does not fit its layout, or the store cannot access its memory.
        """
        self._mover = BlockMover(self._store, self._model, self._salt, kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start the loads of this step. They run in parallel with this step and later ones."""
        assert self._mover is not None
        for move in self._moves().loads:
            self._mover.load(move)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, because a request joins a step only after its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Do nothing, because ``wait_for_save`` saves all layers together."""

    def wait_for_save(self) -> None:
        """Copy the step's pages out of their blocks before the computing stream continues, and store them. On a GPU a
        thread stores them later."""
        assert self._mover is not None
        self._mover.save(self._moves().saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return (None, requests whose loads have ended). No request waits for its save, so saves are not reported."""
        return None, self._mover.take_loaded(self._moves().is_idle) if self._mover is not None else None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose loads have ended, and the requests whose loads have failed entirely."""
        results = super().get_transfer_results(finished_req_ids)
        if self._mover is not None:
            results.failed_recving = self._mover.take_failed_requests(results.finished_recving)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks whose loads have failed since the last call."""
        return self._mover.take_failed_blocks() if self._mover is not None else set()

    def shutdown(self) -> None:
        """End loads, finish saves, and close the connection. Stored pages stay in the node."""
        if self._mover is not None:
            self._mover.close()
        self._store.close()

    def _moves(self) -> StepMoves:
        moves = self._get_connector_metadata()
        assert isinstance(moves, StepMoves)
        return moves
