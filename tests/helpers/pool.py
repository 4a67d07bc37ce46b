"""Three nodes as one pool, with a file as their catalog: for tests that read from one node what another one has."""

from __future__ import annotations

import numpy as np

from kvstore import Match, Store
from kvstore.tier.data_file import find_data_server
from kvstore.tier.folder import NodeFolder
from tests.helpers.content import SMALL, chain, contents, first_wrong, prompt
from tests.helpers.processes import Daemon, Machine, wait_until

PAGES = 60


class Pool:
    """Nodes a, b and c; a is where pages are, c where they are wanted."""

    def __init__(self, machine: Machine, catalog: str) -> None:
        self.machine = machine
        self.daemons: dict[str, Daemon] = {name: machine.serve(name, dram="32MiB", catalog=catalog) for name in "abc"}
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
        wait_until(f"{name} finds all pages", lambda: self.lookup(name, seed, pages).pages == pages, 60)

    def data_server(self, name: str) -> int:
        found = find_data_server(NodeFolder.at(self.machine.folder(name)))
        assert found is not None
        return found.pid

    def has_data_server(self, name: str) -> bool:
        """Whether one has said where it is."""
        return find_data_server(NodeFolder.at(self.machine.folder(name))) is not None
