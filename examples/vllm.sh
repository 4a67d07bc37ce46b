#!/usr/bin/env bash
# Start a node, and a vLLM that uses it. vLLM's environment needs this package: `pip install .` from a checkout.
#
#     examples/vllm.sh MODEL
#
# Every vLLM with the same model, on this machine or in the pool, finds the pages that another one has computed.
# docs/adapters.md describes all settings.
set -euo pipefail
model=${1:?"usage: examples/vllm.sh MODEL"}

# 1. The node keeps hot pages in DRAM and the rest on NVMe. It outlives every vLLM.
kvstore serve --name pool --dram 64GiB --nvme /var/tmp/kv:256GiB &

# 2. vLLM. With `recompute`, a page that is evicted during its load is computed again, so the request does not fail.
vllm serve "$model" --kv-transfer-config '{
  "kv_connector": "KVStoreConnector",
  "kv_connector_module_path": "kvstore.adapters.vllm",
  "kv_role": "kv_both",
  "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {"node": "pool", "salt": "tenant-a"}
}'
