"""vLLM: a KV connector, found by ``kv_connector_module_path``::

--kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore.adapters.vllm",
                       "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'
"""

import vllm

try:
    from kvstore.adapters.vllm.connector import KVStoreConnector
except ImportError as error:
    raise ImportError(
        f"KVStoreConnector needs the interface of vLLM 0.32, this is {vllm.__version__}: {error}"
    ) from error

__all__ = ["KVStoreConnector"]
