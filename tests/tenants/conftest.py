"""What a test has made of a node in memory ends with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.worlds.real_node import close_all


@pytest.fixture(autouse=True)
def nodes_end() -> Iterator[None]:
    yield
    close_all()
