"""What vLLM calls in each of its processes, by the entry point ``vllm.general_plugins``: our connector has a name.

Not in ``kvstore.adapters.vllm``, which imports torch and the client: processes that use no connector do without.
"""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

NAME = "KVStoreConnector"


def register() -> None:
    """``kv_connector`` may be this name, without ``kv_connector_module_path``. Nothing more is imported."""
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvstore.adapters.vllm", NAME)
