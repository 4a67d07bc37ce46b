"""Stores of every kind, for modules that run each test over all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kvstore
from kvstore import Store
from tests.helpers.processes import Machine, free_port


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Store]]:
    """An embedded store, a daemon through shared memory, and that daemon over gRPC."""
    machine, port = Machine(tmp_path_factory.mktemp("logs")), free_port()
    patch = pytest.MonkeyPatch()
    patch.setenv("KVSTORE_SHM_DIR", str(machine.shm_dir))
    try:
        machine.serve("n", dram="64MiB", listen=f"127.0.0.1:{port}")
        with (
            kvstore.open(dram="64MiB", shm_dir=machine.shm_dir) as embedded,
            machine.connect("n") as daemon,
            kvstore.connect(f"kv://127.0.0.1:{port}") as tcp,
        ):
            yield {"embedded": embedded, "daemon": daemon, "kv": tcp}
    finally:
        machine.close()
        patch.undo()
