"""Three nodes as one pool: for tests that read from one node what another one has."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import numpy as np
import pytest

from kvstore import Match, Store
from kvstore.client.local import peer_reads
from kvstore.client.local.cache import LocalCache
from kvstore.cluster import find_pages
from kvstore.shm.data_server_file import find_data_server
from kvstore.shm.folder import NodeFolder
from tests.helpers.content import SMALL, chain, contents, first_wrong, prompt
from tests.helpers.processes import Daemon, Machine, wait_until

PAGES = 60


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence means death later: for tests of what is brought, on machines where half a second is nothing."""
    monkeypatch.setattr(peer_reads, "SILENCE_S", 3.0)
    monkeypatch.setattr(peer_reads, "LOSS_S", 10.0)
    monkeypatch.setattr(find_pages, "OWNER_S", 3.0)


def kill_node(machine: Machine, name: str, daemon: Daemon) -> None:
    """The end of a machine: neither its daemon nor its data server is there any more."""
    server = find_data_server(NodeFolder.at(machine.folder(name)))
    assert server is not None
    daemon.kill()
    os.kill(server.pid, signal.SIGKILL)


class Pool:
    """Nodes a, b and c; a is where pages are, c where they are wanted."""

    def __init__(self, machine: Machine, catalog: str, **flags: str) -> None:
        self.machine = machine
        self.catalog = catalog
        self.daemons: dict[str, Daemon] = {
            name: machine.serve(name, dram="32MiB", catalog=catalog, **flags) for name in "abc"
        }
        self.stores: dict[str, Store] = {name: machine.connect(name) for name in "abc"}

    def lookup(self, name: str, seed: int, pages: int = PAGES) -> Match:
        return self.stores[name].cache(SMALL).lookup(prompt(seed, pages))

    def get(self, name: str, seed: int, pages: int = PAGES) -> Match:
        """What comes is right."""
        out = np.zeros((pages, SMALL.page_bytes), np.uint8)
        match = self.stores[name].cache(SMALL).get(prompt(seed, pages), out)
        assert first_wrong(out[: match.pages], contents(chain(seed, pages))[: match.pages]) == ""
        return match

    def known(self, name: str, seed: int, pages: int = PAGES) -> None:
        """Wait until it finds all pages, from wherever it begins: which owner is asked, and of which spans, depends on
        that, and owners hear of pages one after the other."""
        cache = self.stores[name].cache(SMALL)
        assert isinstance(cache, LocalCache) and cache.node.peer_reader is not None
        keys, seek = chain(seed, pages), cache.node.peer_reader.find

        def found() -> bool:
            match = self.lookup(name, seed, pages)
            local = match.pages - sum(match.nodes.values())
            ends = (
                [first + each.stop for each in seek(cache._chain, keys, first, {""})]
                for first in range(local, pages, 8)
            )
            return match.pages == pages and all(pages in each for each in ends)

        wait_until(f"{name} finds all pages", found, 60)

    def data_server(self, name: str) -> int:
        found = find_data_server(NodeFolder.at(self.machine.folder(name)))
        assert found is not None
        return found.pid

    def verified(self) -> dict[str, Any]:
        """What ``kvstore verify --cluster`` says; its exit code says whether that is clean."""
        told = self.machine.run("verify", "--cluster", "--catalog", self.catalog, "--json")
        assert told.stdout, told.stderr
        document: dict[str, Any] = json.loads(told.stdout)
        assert told.returncode == (0 if document["clean"] else 1)
        return document

    def well(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """The same, once it is clean."""
        seen: list[str] = []

        def clean() -> dict[str, Any] | None:
            document = self.verified()
            seen[:] = document["findings"]
            return document if document["clean"] else None

        try:
            return dict(wait_until("the pool is well", clean, timeout_s))
        except AssertionError as late:
            raise AssertionError(f"{late}: {seen}") from None

    def has_data_server(self, name: str) -> bool:
        """Whether one has said where it is."""
        return find_data_server(NodeFolder.at(self.machine.folder(name))) is not None
