"""Processes that put objects: ``python -m tests.helpers.workers.objects VERB JSON``; see ``pages``."""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Any

import kvstore
from tests.helpers.workers.pages import log

_ended = False


def value_of(number: int, size: int) -> bytes:
    """A value that tells its number wherever one looks: eight bytes, again and again."""
    return (number.to_bytes(8, "little") * (size // 8 + 1))[:size]


def put(store: kvstore.Store, a: dict[str, Any]) -> None:
    """One object; killed on the way by a failpoint."""
    log("put", stored=store.put(a["key"], value_of(a["number"], a["size"]), replace=a.get("replace", False)))


def put_many(store: kvstore.Store, a: dict[str, Any]) -> None:
    """Several objects in one call, of the sizes given; killed on the way by a failpoint."""
    keys = [f"{a['key']}{i}" for i in range(len(a["sizes"]))]
    values = [value_of(a["number"] + i, size) for i, size in enumerate(a["sizes"])]
    log("put", stored=store.put_many(keys, values, replace=a.get("replace", False)))


def race(store: kvstore.Store, a: dict[str, Any]) -> None:
    """Batches of the same keys, one after another as another process does, each value telling who put it."""
    for turn in range(a["turns"]):
        keys = [f"{turn}/{i}" for i in range(a["batch"])]
        values = [value_of(a["number"] + i, a["size"]) for i in range(a["batch"])]
        log("put", turn=turn, stored=store.put_many(keys, values, wait=a.get("wait", True)))


def publish(store: kvstore.Store, a: dict[str, Any]) -> None:
    """Batches of new keys, published, until SIGTERM; each value tells its turn and place."""
    turn = 0
    while not _ended:
        turn += 1
        keys, values = zip(
            *((f"{turn}/{i}", value_of(turn + i, size)) for i, size in enumerate(a["sizes"])), strict=True
        )
        log("put", turn=turn, stored=store.put_many(keys, values, wait=False))
        time.sleep(0.02)


def replace(store: kvstore.Store, a: dict[str, Any]) -> None:
    """The same key again and again, with values of many sizes, until SIGTERM."""
    number = int(a["number"])
    while not _ended:
        number += 1
        stored = store.put("k", value_of(number, number * 77_777 % 2_500_000 + 8), replace=True)
        log("put", number=number, stored=stored)


def main() -> None:
    """Run the verb of the command line."""

    def end(*_: object) -> None:
        global _ended
        _ended = True

    signal.signal(signal.SIGTERM, end)
    arguments = json.loads(sys.argv[2])
    with kvstore.connect(arguments["node"], timeout_s=10.0) as store:
        log("started")
        {"put": put, "put_many": put_many, "race": race, "publish": publish, "replace": replace}[sys.argv[1]](
            store, arguments
        )
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # an interpreter that ends would put back what kills


if __name__ == "__main__":
    main()
