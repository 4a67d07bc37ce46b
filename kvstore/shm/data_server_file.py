"""The file ``data`` of a node's folder: it names the data server that sends the node's pages, which keeps it locked.

A restarted daemon finds a running data server by this file, and a second data server is refused. The text is JSON; a
file without a lock means nothing. The file ``data.errors`` next to it has the data server's unexpected errors by place,
for the daemon's metrics.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kvstore.errors import NodeBusy
from kvstore.safe_files import is_locked, open_plain, read_plain
from kvstore.shm.folder import NodeFolder

ERRORS: Final = "data.errors"
TRIES: Final = 20  # another process may be checking the lock, which takes microseconds
RETRY_S: Final = 0.01
TEXT_BYTES_MAX: Final = 4096


@dataclass(frozen=True)
class RunningDataServer:
    """A running data server.

    Attributes:
        pid: id of its process.
        process: 16 random hex digits, drawn when the process started.
        address: HOST:PORT.
        child: True if the daemon started it, and therefore ends it.
    """

    pid: int
    process: str
    address: str
    child: bool


class DataFile:
    """The lock and the content of the file. Life: made -> ``take`` -> ``write`` -> ``close``, or the process's end.

    Attributes:
        former: the previous data server, which has ended; None if there was none.
    """

    def __init__(self, folder: NodeFolder) -> None:
        self._folder = folder
        self._fd = -1
        self.former: RunningDataServer | None = None

    def take(self) -> None:
        """Become the node's data server.

        Raises:
            NodeBusy: another process is the data server.
            FileNotFoundError: the node has no folder.
        """
        fd = open_plain(self._folder.data_server, os.O_RDWR | os.O_CREAT, self._folder.file_mode)
        for attempt in range(TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt + 1 == TRIES:
                    os.close(fd)
                    raise NodeBusy(f"node {self._folder.name!r} has a data server already") from None
                time.sleep(RETRY_S)
        with contextlib.suppress(ValueError):
            self.former = _parse(os.pread(fd, TEXT_BYTES_MAX, 0))
        os.ftruncate(fd, 0)
        self._fd = fd

    def write(self, server: RunningDataServer) -> None:
        """Write the address of this data server."""
        text = json.dumps(asdict(server)).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text, 0)

    def is_current(self) -> bool:
        """Return True if the file is still in the node's folder. A purged node has none."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._folder.data_server, follow_symlinks=False))
        except OSError:
            return False

    def close(self) -> None:
        """Release the lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def write_errors(folder: NodeFolder, counts: dict[str, int]) -> None:
    """Write how many unexpected errors this data server has had, by place. Raises OSError, OutOfSpace."""
    text = json.dumps(counts).encode()
    folder.new_file(folder.path / ERRORS, len(text), text)


def read_errors(folder: Path) -> dict[str, int]:
    """Return the last errors written by the current data server, or else by the previous one. Empty if there are
    none."""
    try:
        return {str(place): int(count) for place, count in json.loads(read_plain(folder / ERRORS)).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def is_taken(folder: NodeFolder) -> bool:
    """Return True if a process is the node's data server, or is becoming it."""
    try:
        return is_locked(folder.data_server)
    except OSError:
        return False


def find_data_server(folder: NodeFolder) -> RunningDataServer | None:
    """Return this node's running data server; None if there is none, or if it has not written its address yet."""
    try:
        if not is_taken(folder):
            return None
        return _parse(read_plain(folder.data_server))
    except (OSError, ValueError):
        return None


def _parse(text: bytes) -> RunningDataServer:
    """Parse the file's text. Raises ValueError if it is not valid."""
    try:
        fields = json.loads(text)
        return RunningDataServer(
            int(fields["pid"]), str(fields["process"]), str(fields["address"]), bool(fields["child"])
        )
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a data server's description: {error}") from error
