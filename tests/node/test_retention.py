"""Hints of pages outlive what moves them: to NVMe, over kill -9 of the node, and back to DRAM."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import kvstore
from kvstore import Retention, Store
from tests.helpers.content import SMALL, contents
from tests.helpers.processes import Machine

TOKENS = np.arange(4 * SMALL.page_tokens, dtype=np.uint32)


def kept(store: Store) -> list[tuple[str, int, int | None]]:
    return sorted({(page["tier"], page["priority"], page["ttl_s"]) for page in store.pages()["pages"]})


def test_hints_go_to_nvme_and_back_over_a_kill(machine: Machine, tmp_path: Path) -> None:
    nvme = f"{tmp_path}/pages:64MiB"
    daemon = machine.serve("n", dram="16MiB", nvme=nvme)
    with kvstore.connect("n") as store:
        cache = store.cache(SMALL)
        keys = cache.keys(TOKENS)
        assert cache.put(keys, contents(keys), retention=Retention(2, 300), wait=True) == 4
        assert kept(store) == [("dram", 2, 512)]
        assert store.evict(percent=100.0)["pages"] == 4
        assert kept(store) == [("nvme", 2, 512)]
    daemon.kill()
    daemon.wait()
    machine.serve("n", dram="16MiB", nvme=nvme)
    with kvstore.connect("n") as store:
        assert kept(store) == [("nvme", 2, 512)]
        assert store.cache(SMALL).prefetch(keys).pages == 4
        assert kept(store) == [("dram", 2, 512), ("nvme", 2, 512)]
