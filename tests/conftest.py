"""One `machine` per test: nodes and processes of its own, all gone afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.processes import Machine

# How fast an example is says nothing about it; and the same examples each time.
settings.register_profile("facts", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("facts")


def pytest_collection_finish() -> None:
    """What was imported (torch, for one) stays: no collection in a test looks at half a million objects of it."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that take long begin first: at the end, workers share what is left in small pieces."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def machine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    here = Machine(tmp_path_factory.mktemp("machine"))
    monkeypatch.setenv("KVSTORE_SHM_DIR", str(here.shm_dir))  # for kvstore.connect in this process
    monkeypatch.delenv("KVSTORE_NODE", raising=False)
    try:
        yield here
    finally:
        here.close()
