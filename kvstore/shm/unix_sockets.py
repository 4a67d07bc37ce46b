"""Unix sockets: their files, and paths of any length although the kernel limits them to 107 bytes."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvstore.errors import InvalidRequest
from kvstore.safe_files import chmod_socket

LIVING_S: Final = 1.0  # time for the server at a path to accept a connection


@contextmanager
def short(path: Path) -> Iterator[str]:
    """Provide a short name for the file. It uses a descriptor of the file's folder that stays open inside the context.

    Raises:
        OSError: the folder cannot be opened.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


@contextmanager
def socket_file(path: Path, mode: int) -> Iterator[None]:
    """Make sure that the file of a socket that is bound to ``path`` inside the context has this mode.

    No client can connect before the file has the mode. The file of a process that has ended is removed.

    Raises:
        InvalidRequest: another server uses the path, it is not a socket, or no socket can be made.
    """
    before = os.umask(0o777 & ~mode)
    try:
        _remove_dead_socket(path)
        yield
        chmod_socket(path, mode)
    except (RuntimeError, OSError) as error:  # RuntimeError is what gRPC raises
        raise InvalidRequest("listen", f"cannot listen on {path}: is its folder there? ({error})") from None
    finally:
        os.umask(before)


def _remove_dead_socket(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise InvalidRequest("listen", f"{path} exists and is not a socket: remove it or name another")
    except FileNotFoundError:
        return
    with short(path) as name, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(LIVING_S)
        try:
            probe.connect(name)
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except TimeoutError:
            pass
    raise InvalidRequest("listen", f"another process serves at {path}")
