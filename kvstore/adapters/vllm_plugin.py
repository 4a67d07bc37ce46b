"""The plugin that registers the connector's name. vLLM finds it by the entry point ``vllm.general_plugins`` and calls
it in each of its processes.

The plugin is a module of its own because ``kvstore.adapters.vllm`` needs torch and the client, and most of vLLM's
processes have no connector.
"""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

NAME = "KVStoreConnector"


def register() -> None:
    """Register the connector, so that ``kv_connector`` can name it without ``kv_connector_module_path``. The connector
    itself is imported when it is first used."""
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvstore.adapters.vllm", NAME)
