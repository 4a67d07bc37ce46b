"""A process that closes its store, or ends, while another thread copies.

``python -m tests.helpers.workers.closing JSON``. The copy is one that takes long: it waits, on its way into its frames,
until the store was closed, and the process stopped (SIGSTOP) and resumed. Logs ``copying``, ``closed`` and ``copied``;
see ``pages`` for what a log is.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
from typing import Any

copying, resumed, copied = threading.Event(), threading.Event(), threading.Event()


def stop_here() -> None:
    """The store is closed. Stopped, the process leaves time to others; resumed, its copy goes on."""
    from tests.helpers.workers.pages import log

    log("closed")
    os.kill(os.getpid(), signal.SIGSTOP)
    resumed.set()
    copied.wait()
    log("copied")


if __name__ == "__main__" and json.loads(sys.argv[1])["end"] == "exit":
    atexit.register(stop_here)  # before the store's own: what is registered first is called last

import kvstore  # noqa: E402
from kvstore.client.local import object_batches, put, writer  # noqa: E402
from kvstore.errors import KVStoreError  # noqa: E402
from tests.helpers.content import SMALL, chain, contents  # noqa: E402
from tests.helpers.workers.pages import log, wait_for_go  # noqa: E402


def slow(owner: Any, name: str) -> None:
    """Have this step of a copy wait for ``resumed``."""
    step = getattr(owner, name)

    def wait_and_step(*args: Any, **named: Any) -> Any:
        log("copying")
        copying.set()
        resumed.wait()
        return step(*args, **named)

    setattr(owner, name, wait_and_step)


def store_pages(store: kvstore.Store, way: str) -> None:
    """Store 16 pages in that way. It fails, once the copy is done: the store is closed."""
    keys = chain(1, 16)
    data = contents(keys)
    try:
        if way == "put":
            slow(put, "fill")
            store.cache(SMALL).put(keys, data)
        elif way == "layer":
            with store.cache(SMALL).writer(keys) as pages:
                slow(writer, "copy")
                pages.write_layer(0, data[:, : SMALL.layer_bytes])
        else:
            slow(object_batches, "copy")
            store.put("k", data)
    except KVStoreError as error:
        log("refused", error=f"{type(error).__name__}: {error}")
    copied.set()


def main() -> None:
    """See the module."""
    arguments = json.loads(sys.argv[1])
    store = kvstore.connect(arguments["node"], timeout_s=10.0)
    log("started")
    threading.Thread(target=store_pages, args=(store, arguments["way"]), daemon=True).start()
    copying.wait()
    if arguments["end"] == "close":
        store.close()
        stop_here()
        wait_for_go()


if __name__ == "__main__":
    main()
