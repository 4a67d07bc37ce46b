"""vLLM: a KV connector, found by ``kv_connector_module_path``::

    --kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore.adapters.vllm",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

The connector and the scheduler's side need vLLM. The modules that move bytes (``paged``, ``tensors``, ``blocks``,
``moving``) do not need it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.adapters.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> object:
    if name != "KVStoreConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm

    try:
        from kvstore.adapters.vllm.connector import KVStoreConnector
    except ImportError as error:
        raise ImportError(
            f"KVStoreConnector needs the interface of vLLM 0.32 (got {vllm.__version__}): {error}"
        ) from error
    return KVStoreConnector
