"""A conductor of 512 descriptors, and strangers without a token who keep more connections than that to its HTTP port.

The conductor lives, a caller that is connected is served at once, and new callers get in, in clear and over TLS.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import api
from tests.helpers.api import Certificates
from tests.helpers.backend import BackendProcess, spawn_backend
from tests.helpers.beacon import Beacon
from tests.helpers.conductors import ConductorProcess
from tests.helpers.http_server import ONE_WORD, ask, head_of, read_all, replies_in
from tests.helpers.processes import CLI, Machine, Process, wait_until

DESCRIPTORS, STRANGERS = 512, 600
CALLS = 8
CALL_S = 60.0
DELAY_S = 1.0  # of a call on average, less what the machine stalled
TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nA: "
WHOLE = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"  # over TLS: not a handshake


class Served:
    """A conductor in front of a back end, and how callers reach it."""

    def __init__(self, machine: Machine, backend: BackendProcess, folder: Path, tls: bool) -> None:
        folder.mkdir()
        self.half = TLS_HELLO if tls else HALF
        settings: dict[str, Any] = {"backend": [backend.words()], "http": "127.0.0.1:0"}
        settings["identities"] = str(api.identities_file(folder))
        self._trust: ssl.SSLContext | None = None
        if tls:
            made = Certificates(folder)
            settings |= {"tls_cert": made.path("server.pem"), "tls_key": made.path("server.key")}
            self._trust = ssl.create_default_context(cafile=made.path("ca.pem"))
            self._trust.check_hostname = False
        config = folder / "conductor.toml"
        config.write_text("[conductor]\n" + "".join(f"{key} = {json.dumps(text)}\n" for key, text in settings.items()))
        limited = ["prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}", *CLI, "conductor", "--config", str(config)]
        self.process = machine.start(ConductorProcess, "conductor", limited)
        self.process.wait_ready()
        self.address = self.process.http
        wait_until("the back end is known", lambda: self.gets_in(), CALL_S)

    def connect(self) -> socket.socket:
        host, _, port = self.address.rpartition(":")
        plain = socket.create_connection((host, int(port)), CALL_S)
        return plain if self._trust is None else self._trust.wrap_socket(plain, server_hostname="localhost")

    def gets_in(self) -> bool:
        """Whether a new caller is answered, at the first attempt."""
        try:
            with self.connect() as connection:
                return ask(connection, "a") == 200
        except OSError:
            return False


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(tmp_path_factory.mktemp("few"))
    yield made
    made.close()


@pytest.fixture(scope="module", params=["plain", "tls"])
def served(machine: Machine, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Served:
    backend = spawn_backend(machine).wait_ready()
    return Served(machine, backend, tmp_path_factory.mktemp("conductor") / "a", request.param == "tls")


@pytest.mark.parametrize("says", ["nothing", "half", "whole"])
def test_strangers_neither_end_nor_starve_a_conductor(served: Served, machine: Machine, says: str) -> None:
    """They send nothing, the half of what a connection begins with, or a request without a token."""
    sent = {"nothing": b"", "half": served.half, "whole": WHOLE}[says]
    command = [sys.executable, "-m", "tests.helpers.workers.strangers", served.address, str(STRANGERS), sent.hex()]
    with Beacon(threads=True) as beacon, served.connect() as early:
        assert ask(early, "a") == 200
        strangers = machine.start(Process, "strangers", command)
        wait_until("strangers are there", lambda: "full" in strangers.output())
        began_s = time.monotonic()
        for _ in range(CALLS):
            assert ask(early, "a") == 200
        took_s = time.monotonic() - began_s
        assert took_s - beacon.stall_s(began_s, began_s + took_s) < CALLS * DELAY_S
        for _ in range(3):
            wait_until("a new caller gets in", served.gets_in, CALL_S)
        assert strangers.alive, strangers.trace()
        strangers.kill()
    assert served.process.alive, served.process.trace()
    assert "Traceback" not in served.process.trace(), served.process.trace()
    with served.connect() as other:
        other.sendall(head_of(len(ONE_WORD), "Connection: close") + ONE_WORD)
        ((status, _),) = replies_in(read_all(other))
        assert status == 401
