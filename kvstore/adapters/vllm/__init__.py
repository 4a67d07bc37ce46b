"""A KV connector for vLLM, which finds it by ``kv_connector_module_path``::

    --kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore.adapters.vllm",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

``connector`` is the class that vLLM calls. ``scheduler`` plans loads and saves in vLLM's scheduler, ``worker`` and
``blocks`` copy the pages in vLLM's workers. ``layouts`` describes vLLM's model in the store's terms, ``kv_events`` and
``stats`` report to vLLM. ``tier`` is independent of these: a tier of vLLM's own offloading. Only ``worker`` and
``blocks`` can be imported without vLLM.
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
