"""Runs LMCache's own benchmark of its second level over our plugin and over LMCache's other adapters.

    .venv/bin/python bench/peers/lmcache_l2.py [--rounds N] [--json]

``make hosts`` installs LMCache. Its Mooncake adapter also needs Mooncake and a master; see README.md here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from starting import ROOT, node

LMCACHE = ROOT / ".hosts" / "lmcache" / "bin" / "python"
SIZES_KIB = (64, 256, 2048)
KEYS = 32
NODE = "peers"


def adapters(folder: Path, size_kib: int) -> dict[str, dict[str, Any]]:
    """Return the adapters to compare. The benchmark uses the same keys for all sizes, so each size has its own
    place."""
    return {
        "kvstore": {
            "type": "plugin",
            "module_path": "kvstore.adapters.lmcache",
            "class_name": "KVStoreL2Adapter",
            "adapter_params": {"node": NODE, "salt": f"{size_kib}KiB"},
        },
        "fs (tmpfs)": {"type": "fs", "base_path": str(folder / f"fs-{size_kib}")},
        "fs_native (tmpfs)": {"type": "fs_native", "base_path": str(folder / f"native-{size_kib}")},
        "mooncake": {
            "type": "mooncake_store",
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_addr": "127.0.0.1:50051",
            "protocol": "tcp",
            "global_segment_size": 1 << 30,
            "local_buffer_size": 256 << 20,
        },
    }


def measure(spec: dict[str, Any], size_kib: int, rounds: int) -> dict[str, float] | str:
    """Return GB/s of store and load, and microseconds of a lookup, or the reason why there are no numbers."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        words = ["--num-keys", str(KEYS), "--data-size-kb", str(size_kib), "--rounds", str(rounds), "--no-skip-verify"]
        words += ["--l2-adapter", json.dumps(spec), "--format", "json", "--output", file.name]
        command = [str(LMCACHE), "-m", "lmcache.cli.main", "bench", "l2", *words]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "LMCACHE_DISABLE_BANNER": "1"}
        run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
        if "data verified OK" not in run.stdout:
            lines = [line for line in run.stderr.splitlines() if line.strip()]
            return lines[-1][:120] if lines else "the benchmark did not verify its data"
        metrics = json.loads(Path(file.name).read_text())["metrics"].values()
    took_ms = {each["operation"]: each["duration_p50_ms"] for each in metrics if "operation" in each}
    bytes_moved = KEYS * size_kib << 10
    return {
        "store_gb_per_s": bytes_moved / took_ms["Store"] / 1e6,
        "load_gb_per_s": bytes_moved / took_ms["Load"] / 1e6,
        "lookup_us": took_ms["Lookup"] * 1e3,
    }


def main() -> None:
    """Measure all adapters and sizes, and print a table or JSON."""
    parser = argparse.ArgumentParser(description="Runs LMCache's benchmark of its second level over several adapters.")
    parser.add_argument("--rounds", type=int, default=15, help="rounds per operation (default 15)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if not LMCACHE.exists():
        sys.exit("LMCache is not installed; run `make hosts`")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="peers-"))
    rows: list[dict[str, Any]] = []
    try:
        with node(NODE, "4GiB"):
            for size_kib in SIZES_KIB:
                for name, spec in adapters(folder, size_kib).items():
                    rows.append({"adapter": name, "kib": size_kib, "outcome": measure(spec, size_kib, options.rounds)})
    finally:
        shutil.rmtree(folder)
    if options.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    sys.stdout.write(f"{'adapter':20} {'KiB':>6} {'store GB/s':>11} {'load GB/s':>10} {'32 looked up us':>16}\n")
    for row in rows:
        outcome = row["outcome"]
        numbers = (
            outcome
            if isinstance(outcome, str)
            else f"{outcome['store_gb_per_s']:11.2f} {outcome['load_gb_per_s']:10.2f} {outcome['lookup_us']:16.0f}"
        )
        sys.stdout.write(f"{row['adapter']:20} {row['kib']:6} {numbers}\n")


if __name__ == "__main__":
    main()
