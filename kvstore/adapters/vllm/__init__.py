"""vLLM: a KV connector, found by ``kv_connector_module_path``::

--kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore.adapters.vllm",
                       "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'
"""

from kvstore.adapters.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]
