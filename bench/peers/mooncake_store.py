"""Compares our drop-in for Mooncake with Mooncake itself, through Mooncake's calls, across two processes.

    .venv/bin/python bench/peers/mooncake_store.py [--rounds N] [--json]

One process puts batches of 32 values from a registered buffer, and another process gets them into one. Mooncake runs in
two ways: with a standalone client, whose memory both processes share, and over TCP, with the memory in the process that
puts. The stores alternate and use the same buffers. README.md in this folder says how to install Mooncake.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from starting import ROOT, node

MOONCAKE = ROOT / ".hosts" / "mooncake"
SHIM = ROOT / "kvstore" / "adapters" / "mooncake" / "shim"
SIZES = {"64 KiB": 64 << 10, "256 KiB": 256 << 10, "2 MiB": 2 << 20}
BATCH = 32
POOL_BYTES = 3 << 30
WARM_BYTES = 2 << 30  # written, read and removed before the measurement
NODE = "peers"
MASTERS = {"Mooncake, shared memory": 50151, "Mooncake, TCP": 50152}  # ports; each master has its own segments
CLIENT = 50153
PEERS = ("kvstore", "Mooncake, shared memory", "Mooncake, TCP")
START_S = 60.0


# --- A process that puts or gets ------------------------------------------------------------------------------------


def worker(peer: str, role: str, size: int) -> None:
    """Move one batch for each number read from the input, and print how long that took. A negative number removes a
    batch."""
    from mooncake.store import MooncakeDistributedStore

    store, total = MooncakeDistributedStore(), BATCH * size
    if peer == "Mooncake, shared memory":
        code = store.setup_dummy(total + (64 << 20), 64 << 20, f"127.0.0.1:{CLIENT}")
        place = store.alloc_from_mem_pool(total)
    else:
        master = NODE if peer == "kvstore" else f"127.0.0.1:{MASTERS[peer]}"
        memory = POOL_BYTES if role == "put" else 64 << 20
        code = store.setup("127.0.0.1", "P2PHANDSHAKE", memory, 64 << 20, "tcp", "", master)
        raw = (ctypes.c_ubyte * (total + 4096))()
        place = (ctypes.addressof(raw) + 4095) & ~4095
    code = code or store.register_buffer(place, total)
    buffer = (ctypes.c_ubyte * total).from_address(place)
    print(json.dumps({"ready": code}), flush=True)
    places = [place + i * size for i in range(BATCH)]
    for line in sys.stdin:
        number = int(line)
        if number < 0:
            codes = [store.remove(f"{peer}-{size}-{-number}-{i}", True) for i in range(BATCH)]
            print(json.dumps({"took_s": 0.0, "succeeded": not any(codes)}), flush=True)
            continue
        keys = [f"{peer}-{size}-{number}-{i}" for i in range(BATCH)]
        ctypes.memset(place, number % 251 if role == "put" else 255, total)
        start_s = time.perf_counter()
        move = store.batch_put_from if role == "put" else store.batch_get_into
        codes = move(keys, places, [size] * BATCH)
        took_s = time.perf_counter() - start_s
        succeeded = codes == [0 if role == "put" else size] * BATCH and bytes(buffer[:: total // 64]) == bytes(
            [number % 251]
        ) * len(range(0, total, total // 64))
        print(json.dumps({"took_s": took_s, "succeeded": succeeded}), flush=True)
    store.close()


# --- The process that measures --------------------------------------------------------------------------------------


class Mover:
    """A process that puts or gets."""

    def __init__(self, peer: str, role: str, size: int) -> None:
        path = SHIM if peer == "kvstore" else MOONCAKE
        environment = os.environ | {"PYTHONPATH": f"{path}:{ROOT}", "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}
        command = [sys.executable, __file__, "--worker", peer, role, str(size)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        self.is_ready = self._answer().get("ready") == 0

    def move(self, number: int) -> float | None:
        """Return the seconds of one batch; None if it was incomplete."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"%d\n" % number)
        self.process.stdin.flush()
        answer = self._answer()
        return answer["took_s"] if answer.get("succeeded") else None

    def close(self) -> None:
        """End the process. It first removes its memory from Mooncake's pool."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # Mooncake prints other lines
            if line.startswith(b"{"):
                return dict(json.loads(line))
        return {}


def start_mooncake() -> list[subprocess.Popen[bytes]]:
    """Start Mooncake's masters and its standalone client; return no process if Mooncake is not installed."""
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if not MOONCAKE.exists():
        return []
    folder = MOONCAKE / "mooncake"
    libraries = os.environ | {"LD_LIBRARY_PATH": str(folder)}
    masters = [
        subprocess.Popen(
            [folder / "mooncake_master", f"--port={port}", f"--metrics_port={port + 100}"], env=libraries, **quiet
        )
        for port in MASTERS.values()
    ]
    time.sleep(2)
    master = MASTERS["Mooncake, shared memory"]
    words = [f"--master_server_address=127.0.0.1:{master}", "--metadata_server=P2PHANDSHAKE", "--host=127.0.0.1"]
    words += [f"--port={CLIENT}", f"--global_segment_size={POOL_BYTES >> 30} GB", "--protocol=tcp"]
    client = subprocess.Popen([folder / "mooncake_client", *words], env=libraries, **quiet)
    time.sleep(5)
    return [client, *masters]


def measure(label: str, size: int, rounds: int) -> list[dict[str, Any]]:
    """Return the rows of all peers for one size. The peers alternate."""
    movers: dict[str, tuple[Mover, Mover]] = {}
    for peer in PEERS if MOONCAKE.exists() else PEERS[:1]:
        movers[peer] = Mover(peer, "put", size), Mover(peer, "get", size)
    seconds: dict[str, tuple[list[float], list[float]]] = {peer: ([], []) for peer in movers}
    failed = dict.fromkeys(movers, 0)
    for peer, (putter, getter) in movers.items():  # let every process touch all memory that it will use
        numbers = range(1, WARM_BYTES // (BATCH * size) + 1) if putter.is_ready and getter.is_ready else range(0)
        # Put all batches before any is removed. Otherwise the next batch reuses the same memory, and the rest stays
        # untouched.
        moved = [(putter.move(number), getter.move(number)) for number in numbers]
        removed = [putter.move(-number) for number in numbers]
        failed[peer] += sum(None in (*both, gone) for both, gone in zip(moved, removed, strict=True))
    for number in range(WARM_BYTES, WARM_BYTES + rounds):
        for peer, pair in movers.items():
            times = [mover.move(number) if mover.is_ready else None for mover in pair]
            failed[peer] += None in times
            for series, value in zip(seconds[peer], times, strict=True):
                series += [value] if value is not None else []
    for pair in movers.values():
        for mover in pair:
            mover.close()
    rows = []
    for peer, (puts, gets) in seconds.items():
        speeds = [BATCH * size / statistics.median(each) / 1e9 if each else None for each in (puts, gets)]
        rows.append({"size": label, "peer": peer, "put": speeds[0], "get": speeds[1], "batches_failed": failed[peer]})
    return rows


def main() -> None:
    """Measure all sizes, and print a table or JSON."""
    parser = argparse.ArgumentParser(description="Compares our drop-in with Mooncake, across two processes.")
    parser.add_argument("--rounds", type=int, default=15, help="batches per store and size (default 15)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], options.worker[1], int(options.worker[2]))
        return
    processes = start_mooncake()
    try:
        with node(NODE, str(POOL_BYTES)):
            rows = [row for label, size in SIZES.items() for row in measure(label, size, options.rounds)]
    finally:
        for process in processes:
            process.terminate()
            process.wait(30)
    if options.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    sys.stdout.write(f"{'values':8} {'peer':26} {'put GB/s':>9} {'get GB/s':>9} {'failed':>7}\n")
    for row in rows:
        speeds = ["-" if row[verb] is None else f"{row[verb]:.2f}" for verb in ("put", "get")]
        sys.stdout.write(f"{row['size']:8} {row['peer']:26} {speeds[0]:>9} {speeds[1]:>9} {row['batches_failed']:>7}\n")


if __name__ == "__main__":
    main()
