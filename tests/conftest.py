"""One `machine` per test: nodes and processes of its own, all gone afterwards."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.process
import os
import subprocess
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.processes import Machine

# How fast an example is says nothing about it; and the same examples each time.
settings.register_profile("facts", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("facts")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported (torch, for one) stays: no collection in a test looks at half a million objects of it.

    With ``--fast`` a test that starts a process is skipped at that moment, so there is no list of such tests to keep.
    """
    gc.freeze()
    if session.config.getoption("--fast"):

        def starts(*_: Any, **__: Any) -> NoReturn:
            pytest.skip("starts a process")

        subprocess.Popen.__init__ = starts  # type: ignore[method-assign, assignment]
        multiprocessing.process.BaseProcess.start = starts  # type: ignore[method-assign]
        os.fork = starts


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="no test that starts a process, one case of those that take long"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those that take long begin first: at the end, workers share what is left in small pieces."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if config.getoption("--fast"):
        left_out = [item for item in items if "machine" in getattr(item, "fixturenames", ())]  # processes of its own
        first: set[str] = set()
        for item in items:
            if item.get_closest_marker("slow") or "/worlds/" in item.nodeid or "simulation" in item.nodeid:
                function = item.nodeid.partition("[")[0]
                if function in first:
                    left_out.append(item)
                first.add(function)
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


@pytest.fixture
def machine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    here = Machine(tmp_path_factory.mktemp("machine"))
    monkeypatch.setenv("KVSTORE_SHM_DIR", str(here.shm_dir))  # for kvstore.connect in this process
    monkeypatch.delenv("KVSTORE_NODE", raising=False)
    try:
        yield here
    finally:
        here.close()
