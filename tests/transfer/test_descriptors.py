"""Descriptors passed between processes of a machine: to whom, until when, and what becomes of them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvstore.errors import Unavailable
from kvstore.tier import peer_memory
from kvstore.tier.peer_memory import DescriptorServer, receive_descriptor


def test_a_descriptor_is_passed_to_all_who_ask_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / ("folder" * 20)
    path.mkdir()
    path /= "passing"
    file = os.memfd_create("passed")
    os.write(file, b"these bytes")
    server = DescriptorServer(path, 0o600, file)
    try:
        assert path.stat().st_mode & 0o777 == 0o600
        for _ in range(3):
            found = receive_descriptor(path)
            assert os.pread(found, 100, 0) == b"these bytes" and not os.get_inheritable(found)
            os.close(found)
    finally:
        server.close()
    assert not path.exists()
    with pytest.raises(Unavailable):
        receive_descriptor(path)
    with pytest.raises(OSError):
        os.fstat(file)
    server.close()


def test_a_descriptor_that_cannot_be_passed_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(24, "Too many open files")

    file = os.memfd_create("passed")
    monkeypatch.setattr(peer_memory.socket, "socket", refused)
    with pytest.raises(Unavailable, match="Too many open files"):
        DescriptorServer(tmp_path / "passing", 0o600, file)
    with pytest.raises(OSError):
        os.fstat(file)


def test_whoever_passes_nothing_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(tmp_path / "silent"))
        with pytest.raises(Unavailable):
            receive_descriptor(tmp_path / "silent")  # nobody listens
        silent.listen()
        with pytest.raises(Unavailable):
            receive_descriptor(tmp_path / "silent")
