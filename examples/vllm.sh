#!/usr/bin/env bash
# vLLM over a node, in two commands. vLLM's environment needs this package: `pip install .` from a checkout.
#
#     examples/vllm.sh MODEL
#
# Every vLLM on this machine with the same model, and every one in the pool, finds what another has computed.
# docs/adapters.md describes all settings.
set -euo pipefail
model=${1:?"usage: examples/vllm.sh MODEL"}

# 1. The node: DRAM for hot pages, NVMe for the rest. It outlives every vLLM.
kvstore serve --name pool --dram 64GiB --nvme /var/tmp/kv:256GiB &

# 2. vLLM. `recompute`: a page that is evicted while it is loaded is computed again, so no request fails for it.
vllm serve "$model" --kv-transfer-config '{
  "kv_connector": "KVStoreConnector",
  "kv_connector_module_path": "kvstore.adapters.vllm",
  "kv_role": "kv_both",
  "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {"node": "pool", "salt": "tenant-a"}
}'
