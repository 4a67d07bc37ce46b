"""Strangers: a process that keeps many connections open, and opens another one for each that is closed.

``python -m tests.helpers.workers.strangers HOST:PORT COUNT HEX`` sends these bytes over each. It prints a line when as
many were opened, and ends with its stdin.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time

from kvstore.limits import raise_descriptors

PAUSE_S = 0.002  # after each ten that are opened again: a flood, but one that leaves processors to those it is aimed at


def main(address: str, count: int, said: bytes) -> None:
    """Until stdin ends."""
    assert raise_descriptors() > count + 50, "this machine lets a process open too few descriptors for this test"
    host, _, port = address.rpartition(":")
    poll, opened, total = select.epoll(), dict[int, socket.socket](), 0
    poll.register(0, select.EPOLLIN)
    while True:
        while len(opened) < count:
            sock = socket.socket()
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.connect((host, int(port)))
            opened[sock.fileno()] = sock
            poll.register(sock.fileno(), select.EPOLLOUT | select.EPOLLRDHUP)
            total += 1
            if total == count:
                print("full", flush=True)
            if total % 10 == 0:
                time.sleep(PAUSE_S)
                break
        for fd, event in poll.poll(0.0 if len(opened) < count else 1.0):
            if fd == 0:
                return
            if event & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
                poll.unregister(fd)
                opened.pop(fd).close()
            else:
                with contextlib.suppress(OSError):
                    opened[fd].send(said)
                poll.modify(fd, select.EPOLLRDHUP)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3]))
