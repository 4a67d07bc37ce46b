"""The node's book: names of roots, and pins. JSON in the node's folder, replaced as a whole; gone with a reboot.

It outlives kill -9: it is written before whoever asked for the change hears of it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

from kvstore.state import events as ev
from kvstore.state.node_state import NodeState
from kvstore.tier.folder import NodeFolder

log = logging.getLogger("kvstore.node")

NAME = "tenants.json"


def write(folder: NodeFolder, incarnation: int, document: dict[str, Any]) -> None:
    """Replace the book."""
    path, fresh = folder.path / NAME, folder.path / f"{NAME}.new"
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump({"incarnation": f"{incarnation:016x}", **document}, file)
    os.replace(fresh, path)


def read(folder: NodeFolder, incarnation: int) -> dict[str, Any]:
    """The book of this incarnation; an empty one where there is none that can be read."""
    empty: dict[str, Any] = {"roots": {}, "pins": []}
    try:
        document = json.loads((folder.path / NAME).read_text(encoding="utf-8"))
        if document["incarnation"] != f"{incarnation:016x}":
            return empty
        return {
            "roots": {
                bytes.fromhex(root): {**about, "salt": str(about["salt"])} for root, about in document["roots"].items()
            },
            "pins": [
                (int(pin["pin"]), [bytes.fromhex(k) for k in pin["keys"]], bytes.fromhex(pin["root"]), pin["until"])
                for pin in document["pins"]
            ],
        }
    except FileNotFoundError:
        return empty
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.error("%s cannot be read, names of tenants and pins are lost: %s", NAME, error)
        return empty


def restore_pins(state: NodeState, document: dict[str, Any]) -> None:
    """Pins of the daemon before, those that have not run out. Before anything may leave."""
    now_ns, now_s = time.monotonic_ns(), time.time()
    for number, keys, root, until_s in document["pins"]:
        if until_s > now_s:
            until_ns = now_ns + int((until_s - now_s) * 1e9)
            state.handle(ev.Pin(now_ns, number, keys, root, until_ns, until_s, restore=True))
