"""Answers of engines without a connector, which those with one have to give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.processes import Machine
from tests.helpers.vllm_engines import engine, model, prompts


@pytest.fixture(scope="session", params=["llama", "qwen3", "hybrid"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What an engine without a connector answers."""
    folder = tmp_path_factory.mktemp("plain")
    machine = Machine(folder)
    try:
        one = engine(machine, path := model(folder, request.param))
        one.wait_for("ready")
        tokens, _ = one.answer(prompts())
        one.kill()
        yield {"model": path, "tokens": tokens}
    finally:
        machine.close()
