"""Plain sender: the best plain socket program that is to be had in this language: the limit of reading over TCP.

``python -m kvstore.bench.plain_sender WALK_BYTES CHAIN_BYTES`` prints its port, and then sends, for every 8 bytes that
it receives (a chain's number), that chain out of warm memory of its own: no keys, no checks, no frames.
"""

from __future__ import annotations

import socket
import sys

from kvstore.tier.host_memory import empty

REQUEST_BYTES = 8


def main() -> None:
    """Serve one connection, and end with it."""
    walk_bytes, chain_bytes = int(sys.argv[1]), int(sys.argv[2])
    memory = empty(walk_bytes)
    memory[:] = 1
    view = memory.data.cast("B")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        listener.settimeout(60.0)
        connection, _ = listener.accept()
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while asked := connection.recv(REQUEST_BYTES, socket.MSG_WAITALL):
        start = int.from_bytes(asked, "little") * chain_bytes
        connection.sendall(view[start : start + chain_bytes])


if __name__ == "__main__":
    main()
