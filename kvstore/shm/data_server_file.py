"""The file ``data`` of a node's folder: which data server sends the node's pages. Locked while that process lives.

It is how a restarted daemon finds the data server that outlived the one before, and how a second one is refused. Its
text is JSON; a file without a lock means nothing. Next to it is the file ``data.errors``: the unexpected errors of that
process by place, for the daemon's metrics.
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
TRIES: Final = 20  # another process may be checking its lock, which takes microseconds
RETRY_S: Final = 0.01
TEXT_BYTES_MAX: Final = 4096


@dataclass(frozen=True)
class DataServerAt:
    """A data server that lives.

    Attributes:
        pid: its process.
        process: drawn when it started, 16 hex digits.
        address: HOST:PORT.
        child: whether the daemon started it, and so ends it.
    """

    pid: int
    process: str
    address: str
    child: bool


class DataFile:
    """The lock, and what is in the file. Life: made -> ``take`` -> ``tell`` -> ``close``, or the process's end.

    Attributes:
        former: the data server before us, which is dead since we hold the lock; None where there was none.
    """

    def __init__(self, folder: NodeFolder) -> None:
        self._folder = folder
        self._fd = -1
        self.former: DataServerAt | None = None

    def take(self) -> None:
        """Become the node's data server.

        Raises:
            NodeBusy: another process is.
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
            self.former = _parsed(os.pread(fd, TEXT_BYTES_MAX, 0))
        os.ftruncate(fd, 0)
        self._fd = fd

    def tell(self, server: DataServerAt) -> None:
        """Say where it is."""
        text = json.dumps(asdict(server)).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text, 0)

    def stands(self) -> bool:
        """Whether the file is still the one in the node's folder: a node that was purged has none."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._folder.data_server, follow_symlinks=False))
        except OSError:
            return False

    def close(self) -> None:
        """Give the lock back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def tell_errors(folder: NodeFolder, counts: dict[str, int]) -> None:
    """Say how many unexpected errors this data server has had, by place. Raises OSError, OutOfSpace."""
    text = json.dumps(counts).encode()
    folder.new_file(folder.path / ERRORS, len(text), text)


def find_errors(folder: Path) -> dict[str, int]:
    """What the node's data server has said last, or the one before where it has not yet. Empty: nothing."""
    try:
        return {str(place): int(count) for place, count in json.loads(read_plain(folder / ERRORS)).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def is_taken(folder: NodeFolder) -> bool:
    """Whether some process is the node's data server, or just becoming it."""
    try:
        return is_locked(folder.data_server)
    except OSError:
        return False


def find_data_server(folder: NodeFolder) -> DataServerAt | None:
    """The data server that serves this node now; None where there is none, or it has not said yet where it is."""
    try:
        if not is_taken(folder):
            return None
        return _parsed(read_plain(folder.data_server))
    except (OSError, ValueError):
        return None


def _parsed(text: bytes) -> DataServerAt:
    """Raises ValueError where it makes no sense."""
    try:
        found = json.loads(text)
        return DataServerAt(int(found["pid"]), str(found["process"]), str(found["address"]), bool(found["child"]))
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a data server's description: {error}") from error
