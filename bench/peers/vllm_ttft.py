"""Compares vLLM's time to first token for a known prompt, with each place where its KV cache may be stored.

A known prompt is one that vLLM answered before. vLLM computes it again, or finds it in its own cache, in our store or
in a peer::

    .venv/bin/python bench/peers/vllm_ttft.py [--peers NAME,..] [--lengths 512,1024,2048] [--rounds N] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starting import ROOT, VLLM, VLLM_ENVIRONMENT, node

HOSTS = ROOT / ".hosts"
MOONCAKE = HOSTS / "mooncake"  # a folder of packages
LMCACHE = HOSTS / "lmcache" / "bin" / "python"
LMCACHE_LIB = LMCACHE.parents[1] / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
NODE = "peers-ttft"
POOL_GIB = 2
RUN_S = 900.0
# 62 million parameters, 16 KiB of KV per token in float32.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Peer:
    """One way to answer a known prompt. ``connector`` is vLLM's ``kv_transfer_config`` without the role."""

    connector: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    packages: tuple[Path, ...] = ()  # folders with packages for vLLM's environment, searched after its own
    hidden: str = ""  # a package that vLLM must not search for kernels
    reset: bool = True  # empty vLLM's own prefix cache before a prompt is repeated


def peers(folder: Path, port: int, lmcache_port: int) -> dict[str, Peer]:
    """Return all peers by name. Their files are written to ``folder``. Mooncake's master listens at ``port``, and
    LMCache's server at ``lmcache_port``."""
    ours, theirs = folder / "ours.json", folder / "theirs.json"
    ours.write_text(json.dumps({"metadata_server": "P2PHANDSHAKE", "master_server_address": NODE, "protocol": "tcp"}))
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{port}",
        "protocol": "tcp",
        "global_segment_size": f"{POOL_GIB}GB",
        "local_buffer_size": "512MB",
        "local_hostname": "127.0.0.1",
    }
    theirs.write_text(json.dumps(settings))
    store = {"kv_connector": "MooncakeStoreConnector"}
    shim = ROOT / "kvstore" / "adapters" / "mooncake" / "shim"
    lmcache = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": lmcache_port},
    }
    return {
        "recompute": Peer(),
        "vllm-own": Peer(reset=False),
        "kvstore": Peer(
            {
                "kv_connector": "KVStoreConnector",
                "kv_connector_module_path": "kvstore.adapters.vllm",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"node": NODE},
            }
        ),
        "kvstore-dropin": Peer(store, {"PYTHONPATH": f"{ROOT}:{shim}", "MOONCAKE_CONFIG_PATH": str(ours)}),
        "mooncake": Peer(store, {"MOONCAKE_CONFIG_PATH": str(theirs)}, (MOONCAKE,)),
        "vllm-offload": Peer(
            {
                "kv_connector": "OffloadingConnector",
                "kv_connector_extra_config": {"cpu_bytes_to_use": POOL_GIB << 30},
            }
        ),
        "lmcache": Peer(lmcache, {"LMCACHE_TRACK_USAGE": "false"}, (LMCACHE_LIB,), "llvmlite"),
    }


def lmcache_server(port: int) -> list[str]:
    """Return the command of LMCache's server, with as much memory as the other peers, and chunks of one page."""
    flags = {"host": "127.0.0.1", "port": port, "http-host": "127.0.0.1", "http-port": free_port(), "chunk-size": 64}
    flags |= {"l1-size-gb": POOL_GIB, "l1-init-size-gb": POOL_GIB, "eviction-policy": "LRU"}
    flags |= {"supported-transfer-mode": "engine_driven"}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [str(LMCACHE), "-m", "lmcache.cli.main", "server", *words]


def measure(peer: Peer, model: Path, lengths: list[int], rounds: int) -> list[dict[str, Any]] | str:
    """Return one row per length, or the reason why there are none."""
    for folder in peer.packages:
        if not folder.is_dir():
            return f"{folder.relative_to(ROOT)} is not installed; see README.md"
    settings = {"kv_transfer_config": {**peer.connector, "kv_role": "kv_both"}} if peer.connector else {}
    arguments = {
        "model": str(model),
        "settings": settings,
        "lengths": lengths,
        "rounds": rounds,
        "reset": peer.reset,
        "packages": [str(folder) for folder in peer.packages],
        "hidden": peer.hidden,
    }
    environment = os.environ | VLLM_ENVIRONMENT | {"PYTHONHASHSEED": "0", **peer.environment}
    command = [str(VLLM), str(Path(__file__).with_name("vllm_engine.py")), json.dumps(arguments)]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=RUN_S, check=False, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        return f"not finished after {RUN_S:.0f} s"
    for line in run.stdout.splitlines():
        if line.startswith('{"rows"'):
            rows: list[dict[str, Any]] = json.loads(line)["rows"]
            return rows
    errors = [line.strip() for line in run.stderr.splitlines() if "Error" in line or "Exception" in line]
    return errors[-1][:160] if errors else f"vLLM ended with exit code {run.returncode}"


@contextlib.contextmanager
def process(command: list[str], port: int) -> Iterator[None]:
    """Run a peer's daemon inside the context. The daemon is ready when it listens at ``port``."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                break
            time.sleep(0.1)
        yield
    finally:
        child.terminate()
        child.wait(30)


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    head = ("peer", "tokens", "new ms", "known ms", "found", "answer", "recompute/known")
    computed = {row["length"]: row["new_ms"] for row in rows if row["peer"] == "recompute" and "reason" not in row}
    sys.stdout.write("{:15}{:>8}{:>10}{:>10}{:>7}{:>8}{:>17}\n".format(*head))
    for row in rows:
        if "reason" in row:
            sys.stdout.write(f"{row['peer']:15} {row['reason']}\n")
            continue
        gain = f"{computed[row['length']] / row['known_ms']:.2f}" if row["length"] in computed else ""
        same = "equal" if row["equal"] else "OTHER"
        sys.stdout.write(
            f"{row['peer']:15}{row['length']:8}{row['new_ms']:10.1f}{row['known_ms']:10.1f}{row['found']:7}"
            f"{same:>8}{gain:>17}\n"
        )


def main() -> None:
    """Measure all peers, and print a table or JSON."""
    parser = argparse.ArgumentParser(
        description="Compares vLLM's time to first token for a known prompt, by the place of its KV cache."
    )
    parser.add_argument("--peers", default="", help="names, with commas (default: all)")
    parser.add_argument("--lengths", default="512,1024,2048", help="tokens per prompt")
    parser.add_argument("--rounds", type=int, default=7, help="prompts per length (default 7)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if not VLLM.exists():
        sys.exit("vLLM is not installed; run `make hosts`")
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    port, lmcache_port = free_port(), free_port()
    all_peers = peers(folder, port, lmcache_port)
    names = options.peers.split(",") if options.peers else list(all_peers)
    for name in names:
        if name not in all_peers:
            sys.exit(f"--peers: must be among {', '.join(all_peers)} (got {name!r})")
    lengths = [int(length) for length in options.lengths.split(",")]
    rows: list[dict[str, Any]] = []
    master = MOONCAKE / "mooncake" / "mooncake_master"
    try:
        with contextlib.ExitStack() as daemons:
            if any(name.startswith("kvstore") for name in names):
                daemons.enter_context(node(NODE, f"{POOL_GIB}GiB"))
            if "mooncake" in names and master.exists():
                daemons.enter_context(process([str(master), f"--rpc_port={port}"], port))
            if "lmcache" in names and LMCACHE.exists():
                daemons.enter_context(process(lmcache_server(lmcache_port), lmcache_port))
            for name in names:
                outcome = measure(all_peers[name], model, lengths, options.rounds)
                if isinstance(outcome, str):
                    rows.append({"peer": name, "reason": outcome})
                    continue
                for each in outcome:
                    new_ms, known_ms = (1e3 * statistics.median(each[what]) for what in ("new_s", "known_s"))
                    about = {"length": each["length"], "new_ms": new_ms, "known_ms": known_ms}
                    rows.append({"peer": name, **about, "found": min(each["found"]), "equal": each["equal"]})
    finally:
        shutil.rmtree(folder)
    if options.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        show(rows)


if __name__ == "__main__":
    main()
