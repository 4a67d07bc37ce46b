"""One real etcd for the tests of a worker that leave it as it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.etcd import Etcd


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    servers = Etcd(tmp_path_factory.mktemp("etcd"))
    try:
        yield servers
    finally:
        servers.close()
