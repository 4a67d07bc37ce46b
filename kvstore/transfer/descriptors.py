"""Descriptors: how a process passes an open file to others of its machine, by a unix socket in their node's folder.

A process that may connect gets the descriptor: the socket has the mode of the folder's other files.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import Final

from kvstore.errors import Unavailable
from kvstore.tier.plain_files import chmod_socket, remove
from kvstore.transfer.unix import short

PASS_S: Final = 0.5  # for one caller, at either end
PAUSE_S: Final = 0.01
LOOK_S: Final = 0.5  # between two looks whether the end has come

_WORD: Final = b"\1"  # a descriptor does not travel alone


class DescriptorServer:
    """Passes one descriptor, which is its own from now on, to everybody who connects. Life: made -> ``close``.

    Raises:
        Unavailable: no socket can be made there.
    """

    def __init__(self, path: Path, mode: int, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            os.close(descriptor)
            raise Unavailable(f"cannot pass descriptors at {path}: {error.strerror}") from None
        try:
            remove(path)
            with short(path) as name:
                self._listener.bind(name)
            chmod_socket(path, mode)
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            os.close(descriptor)
            raise Unavailable(f"cannot pass descriptors at {path}: {error.strerror}") from None
        self._listener.settimeout(LOOK_S)
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="kvstore-descriptors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Pass the descriptor to no more processes. Those that have it keep it. May be called twice."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            remove(self._path)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(2 * PASS_S + LOOK_S)

    def _serve(self) -> None:
        with contextlib.closing(self._listener):
            while not self._closed:
                try:
                    caller, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError:  # it was shut down, or there are too many open files
                    time.sleep(PAUSE_S)
                    continue
                with caller, contextlib.suppress(OSError):  # it has gone, or takes nothing
                    caller.settimeout(PASS_S)
                    socket.send_fds(caller, [_WORD], [self._descriptor])
        os.close(self._descriptor)


def received(path: Path) -> int:
    """The descriptor that is passed there; the caller's to close.

    Raises:
        Unavailable: nobody passes one, or not in time.
    """
    deadline_s = time.monotonic() + PASS_S
    try:
        with short(path) as name, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.settimeout(PASS_S)
            server.connect(name)
            server.settimeout(max(deadline_s - time.monotonic(), 0.01))
            _, found, _, _ = socket.recv_fds(server, len(_WORD), 1)
    except OSError as error:
        raise Unavailable(f"no descriptor is passed at {path}: {error.strerror or error}") from None
    if not found:
        raise Unavailable(f"no descriptor is passed at {path}")
    os.set_inheritable(found[0], False)
    return int(found[0])
