"""The data server process of a daemon: the daemon starts it, finds it again after its own restart, and ends it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Final

from kvstore import logs
from kvstore.config import NodeConfig
from kvstore.config.daemon import ClusterConfig
from kvstore.config.reading import DATA_AUTO, DATA_NONE
from kvstore.errors import InvalidRequest
from kvstore.node.cluster.data_server import address_of
from kvstore.shm.data_server_file import find_data_server, is_taken
from kvstore.shm.folder import NodeFolder

START_S: Final = 20.0
STOP_S: Final = 8.0
LOOK_S: Final = 0.02
CHECK_S: Final = 1.0  # interval of checks that the process runs
RESTART_MAX_S: Final = 30.0

SETTINGS: Final = (
    *(each.name for each in fields(ClusterConfig)),
    *(
        "shm_dir",
        "data_connections",
        "data_private_networks",
        "data_transports",
        "background_bytes_per_s",
        "tls_cert",
        "tls_key",
        "tls_client_ca",
        "identities",
        "log_level",
        "log_format",
    ),
)
"""Settings of a data server in addition to the node's name and its address."""

log = logging.getLogger("kvstore.daemon")


def has_data_server(config: NodeConfig) -> bool:
    """Return whether a daemon of this configuration has a data server."""
    shared = bool(config.catalog) and config.catalog != "memory"
    return shared if config.data == DATA_AUTO else config.data != DATA_NONE


class DataChild:
    """The data server of a daemon, from ``start`` to ``stop``. The daemon calls ``look`` in each tick.

    ``start`` finds a running process or starts one; ``look`` restarts it after growing pauses if it has died. The
    process outlives a daemon that is killed, and the next daemon finds it by its file.
    """

    def __init__(self, config: NodeConfig, folder: NodeFolder) -> None:
        address_of(config)  # raises InvalidRequest for a bad address before anything is started
        self._config = config
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._check_s = 0.0
        self._pause_s = CHECK_S
        self._ended = False

    def start(self) -> str:
        """Find or start a data server; return its address.

        Raises:
            InvalidRequest: the process ended at once, for example because its address is in use. Its log line says why.
        """
        server = find_data_server(self._folder)
        if server is not None:
            logs.event(log, logging.INFO, "data server found", address=server.address, pid=server.pid)
            return server.address
        self._spawn()
        deadline_s = time.monotonic() + START_S
        while (server := find_data_server(self._folder)) is None:
            assert self._process is not None
            # If another process has taken the file, that one started first, and will be found.
            ended = self._process.poll() is not None and not is_taken(self._folder)
            if ended or time.monotonic() >= deadline_s:
                self.stop()
                raise InvalidRequest("data", "the data server did not start; the previous log line says why")
            time.sleep(LOOK_S)
        self._check_s = time.monotonic() + CHECK_S
        return server.address

    def look(self) -> None:
        """Restart the process if it has died, unless ``stop`` was called. Returns at once."""
        now_s = time.monotonic()
        if now_s < self._check_s or self._ended:
            return
        self._check_s = now_s + CHECK_S
        ended = self._process is not None and self._process.poll() is not None
        if find_data_server(self._folder) is not None:
            self._pause_s = CHECK_S
        elif ended or self._process is None:
            self._check_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, RESTART_MAX_S)
            logs.event(log, logging.WARNING, "data server started again")
            self._spawn()

    def stop(self) -> None:
        """End the process if a daemon started it."""
        self._ended = True
        server = find_data_server(self._folder)
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in the kernel, on a device
                    process.wait(STOP_S)
        elif server is not None and server.child:
            os.kill(server.pid, signal.SIGTERM)  # it holds the lock, so it is alive and the pid is its own

    def _spawn(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", *arguments(self._config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # so that a signal to the daemon's group does not end it
        )


def arguments(config: NodeConfig) -> Sequence[str]:
    """Return the command line of this configuration's data server."""
    options = ["data", "--node", config.name, "--listen", config.data, "--child"]
    for name in SETTINGS:
        value = getattr(config, name)
        if value not in (None, ""):
            options += [f"--{name.replace('_', '-')}", str(value)]
    return options
