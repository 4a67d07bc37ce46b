"""Registers the connector's name. vLLM calls this in each of its processes, by the entry point
``vllm.general_plugins``.

It is not in ``kvstore.adapters.vllm``, which imports torch and the client: processes without a connector do not need
these.
"""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

NAME = "KVStoreConnector"


def register() -> None:
    """Let ``kv_connector`` be this name without ``kv_connector_module_path``. Imports nothing else."""
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvstore.adapters.vllm", NAME)
