"""What a data server says of its part of the directory, of a thousand nodes, as ``status`` and ``verify`` read it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.cli import cluster, verify
from kvstore.cluster import peer_links
from kvstore.cluster.catalog import schema
from kvstore.cluster.catalog.schema import DataEntry
from kvstore.cluster.data_connection import DataConnection
from kvstore.cluster.data_listener import Server
from kvstore.cluster.directory import AnnounceBatch
from kvstore.cluster.directory_messages import PAGE_NAMES, read_state, state_page
from kvstore.cluster.peer_links import PeersFile, PoolNode, PoolView
from kvstore.node.cluster.directory_shell import DirectoryShell
from kvstore.server.identities import LOCAL
from kvstore.shm.folder import NodeFolder
from kvstore.wire.data import BODY_MAX, FrameKind, Hello, WireError

NODES = 1000
NAMES = [f"a-node-with-a-name-of-26-{number:x}"[:26].ljust(26, "x") + f"{number:04}" for number in range(NODES)]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[DataEntry]:
    folder = NodeFolder(tmp_path, "n")
    folder.path.mkdir(mode=0o700)
    nodes = {
        name: PoolNode(name, schema.new_process(), schema.new_process(), (f"[fd00:77::1:{at}]:7071",), True)
        for at, name in enumerate(NAMES)
    }
    peer_links.write(folder, PoolView("default", "n", 1.0, nodes))
    shell = DirectoryShell(1 << 20, PeersFile(folder.path))
    for number, name in enumerate(NAMES):
        page, mark = np.array([number << 20], np.uint64), np.ones(1, np.uint8)
        assert shell._owner.apply(AnnounceBatch(name, number + 1, 0, page, mark, True), time.monotonic()) == 1
    server = Server("n", shell.handlers, lambda hello, names: LOCAL)
    addresses = (server.start("127.0.0.1", 0),)
    yield DataEntry(name="n.1", process=server.process, node="n", incarnation="", addresses=addresses)
    server.stop()


def test_a_thousand_nodes_are_told_in_pages(served: DataEntry) -> None:
    with_names = sorted(NAMES)
    told = cluster._directory_state(served, "default")
    assert told is not None and told["peers"] == with_names and list(told["heard_ago_s"]) == with_names
    assert told["entries"] == NODES and "more" not in told and "last" not in told
    assert f"lists {NODES} of {NODES} nodes" in cluster._directory_text(served, told)
    report = verify._verify_node(served, "default", 1.0)
    assert report["directory"]["peers"] == with_names
    findings = verify._findings({**report, "error": ""}, with_names, True)
    assert findings == []


def test_a_page_is_bounded_whatever_the_names() -> None:
    names = sorted(f"{number:048}" for number in range(5 * PAGE_NAMES + 3))
    state = {"peers": names[::2], "heard_ago_s": dict.fromkeys(names[1:], 1e9 / 3), "entries": 1 << 60}
    last, seen, pages, more = "", set[str](), 0, True
    while more:
        page = state_page(state, last)
        assert len(repr(page)) < BODY_MAX[FrameKind.STATE]
        assert page["last"] > last
        seen |= {*page["peers"], *page["heard_ago_s"]}
        last, more, pages = page["last"], page["more"], pages + 1
    assert pages == 6 and seen == set(names)


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b'{"peers": 3}', b'{"peers": [], "heard_ago_s": {}, "last": "", "more": 1}']
)
def test_a_page_that_makes_no_sense_is_refused(answer: bytes) -> None:
    handlers = {FrameKind.STATUS: lambda exchange, body: exchange.reply(FrameKind.STATE, answer)}
    server = Server("n", handlers, lambda hello, names: LOCAL)
    connection = DataConnection.open(server.start("127.0.0.1", 0), Hello(), deadline_s=time.monotonic() + 30)
    with pytest.raises(WireError, match="state: "):
        read_state(connection, 30.0)
    connection.close()
    server.stop()


def test_the_file_of_many_peers_is_read_whole(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path, "n")
    folder.path.mkdir(mode=0o700)
    many = {name: PoolNode(name, "p" * 16, "i" * 16, ("h:1",)) for name in (f"{at:048}" for at in range(6000))}
    peer_links.write(folder, PoolView("default", "n", 1.0, many))
    assert (folder.path / peer_links.NAME).stat().st_size > 1 << 20
    view = PeersFile(folder.path).look()
    assert view is not None and view.peers == many
