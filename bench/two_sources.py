"""``python -m bench.two_sources``: a get of pages that two nodes have / the same get of pages that one node has.

Three nodes in network namespaces, which need root. The links of the two sources are limited by tbf, so the links and
not the processors decide. Prints the bytes per second of both gets and their ratio, as JSON. Every byte is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvstore.client.local.cache import LocalCache
from tests.helpers.content import LARGE, chain, contents, prompt
from tests.helpers.network import FarMachine, Network, why_not
from tests.helpers.processes import put

PAGES = 128  # of 512 KiB
BAR = 1.7


def measure(folder: Path, network: Network, mbit: int, rounds: int) -> dict[str, object]:
    """Return the medians of ``rounds`` gets from two nodes, and of as many from one node."""
    for source in "ab":
        command = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb"]
        subprocess.run([*network.enter(source), *command, "latency", "50ms"], check=True)
    machine = FarMachine(folder, network, "c", {}, data_private_networks="10.77.0.0/16")
    os.environ["KVSTORE_SHM_DIR"] = str(machine.shm_dir)
    dram = f"{128 + 2 * (rounds + 2) * PAGES * LARGE.page_bytes >> 20}MiB"
    try:
        for name in "abc":
            machine.serve(name, dram=dram, catalog=f"file:{folder / 'catalog'}")
        stores = {name: machine.connect(name) for name in "abc"}
        both, one = range(1, rounds + 2), range(1001, rounds + 1002)
        for seed in (*both, *one):
            put(stores["a"], seed, PAGES, LARGE)
        for seed in both:
            put(stores["b"], seed, PAGES, LARGE)
        cache, out = stores["c"].cache(LARGE), np.zeros((PAGES, LARGE.page_bytes), np.uint8)

        def get(seed: int) -> float:
            out[:] = 0
            began_s = time.perf_counter()
            pages = cache.get(prompt(seed, PAGES, LARGE), out).pages
            seconds = time.perf_counter() - began_s
            assert pages == PAGES, f"{pages} pages of chain {seed} arrived"
            assert np.array_equal(out, contents(chain(seed, PAGES, LARGE), LARGE)), f"chain {seed} has wrong bytes"
            return out.nbytes / seconds

        def sources(seed: int) -> int:
            assert isinstance(cache, LocalCache) and cache.node.peer_reader is not None
            stretches = cache.node.peer_reader.find(cache._chain, chain(seed, PAGES, LARGE), 0, {""})
            return 1 + len(stretches[0].others) if stretches and stretches[0].stop == PAGES else 0

        expected = {**dict.fromkeys(both, 2), **dict.fromkeys(one, 1)}
        deadline_s = time.monotonic() + 60
        while not all(network.inside("c").submit(sources, seed).result(60) == n for seed, n in expected.items()):
            assert time.monotonic() < deadline_s, "the pages are not announced"
            time.sleep(0.2)
        speeds: dict[str, list[float]] = {"two": [], "one": []}
        for number in range(rounds + 1):  # the first gets measure the links
            for way, seeds in (("one", one), ("two", both)):
                speed = network.inside("c").submit(get, seeds[number]).result(120)
                speeds[way] += [speed] if number else []
    finally:
        machine.close()
    two, single = statistics.median(speeds["two"]), statistics.median(speeds["one"])
    values = {way: [round(each / 1e6, 1) for each in values] for way, values in speeds.items()}
    return {
        "link_mbit": mbit,
        "mb_per_s": values,
        "ratio": round(two / single, 3),
        "bar": BAR,
        "ok": two >= BAR * single,
    }


def main() -> None:
    """Measure, and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=int, default=600, help="the limit of each source's link")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder:
        network = Network(("a", "b", "c"))
        try:
            print(json.dumps(measure(Path(folder), network, arguments.mbit, arguments.rounds)))
        finally:
            network.close()


if __name__ == "__main__":
    main()
