"""Where the programs are that the store is a part of: `make hosts` installs them, each in an environment of its own."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
VLLM = _ROOT / ".hosts" / "vllm" / "bin" / "python"
# It runs the code of this tree, asks nobody outside, and is content with one core and a gigabyte.
VLLM_ENV = {
    "PYTHONPATH": str(_ROOT),
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

LMCACHE = _ROOT / ".hosts" / "lmcache" / "bin" / "python"
LMCACHE_LIB = LMCACHE.parents[1] / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
LMCACHE_ENV = {"PYTHONPATH": str(_ROOT), "LMCACHE_DISABLE_BANNER": "1", "PYTHONHASHSEED": "0"}

SGLANG = _ROOT / ".hosts" / "sglang" / "bin" / "python"
SGLANG_ENV = {"PYTHONPATH": str(_ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

# Beside this environment and not in it: where transformers finds accelerate it loads models by it.
PEFT = _ROOT / ".hosts" / "peft" / "peft"
PEFT_ENV = {"PYTHONPATH": f"{_ROOT}:{PEFT.parent}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
