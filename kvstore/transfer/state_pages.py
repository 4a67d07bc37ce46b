"""STATE in pages: what a data server says of its part of the directory, however many nodes it names. Pure, but for the
connection over which ``read_state`` asks.

STATUS carries the last name of the page before, "" for the first one. Every page has the same numbers, and of what is
told by node (``BY_NODE``) the next ``PAGE_NAMES`` names, in order; ``more``, whether others follow them.
"""

from __future__ import annotations

import json
import time
from typing import Any, Final

from kvstore.transfer.tcp import DataConnection
from kvstore.transfer.wire import FrameKind, WireError

PAGE_NAMES: Final = 256  # of at most 48 characters, each twice and once with a number: less than ``BODY_MAX`` of STATE
BY_NODE: Final = ("peers", "heard_ago_s")


def state_page(state: dict[str, Any], after: str) -> dict[str, Any]:
    """The page of ``state`` behind that name."""
    names = sorted({name for field in BY_NODE for name in state[field] if name > after})
    page = frozenset(names[:PAGE_NAMES])
    return {
        **state,
        "peers": [name for name in state["peers"] if name in page],
        "heard_ago_s": {name: age_s for name, age_s in state["heard_ago_s"].items() if name in page},
        "last": names[:PAGE_NAMES][-1] if names else after,
        "more": len(names) > PAGE_NAMES,
    }


def read_state(connection: DataConnection, within_s: float) -> dict[str, Any]:
    """All that a data server says of its part of the directory; the numbers are those of the last page.

    Raises:
        KVStoreError: as ``DataConnection.call``; WireError where a page makes no sense.
    """
    deadline_s = time.monotonic() + within_s
    peers: list[str] = []
    heard_ago_s: dict[str, float] = {}
    last = ""
    while True:
        body = connection.call(FrameKind.STATUS, last.encode(), reply=FrameKind.STATE, deadline_s=deadline_s)
        try:
            page = json.loads(body)
            peers += page["peers"]
            heard_ago_s |= page["heard_ago_s"]
            before, last, more = last, str(page.pop("last")), page.pop("more")
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
            raise WireError(f"state: a page makes no sense ({error!r})") from None
        if not more:
            return {**page, "peers": peers, "heard_ago_s": heard_ago_s}
        if last <= before:
            raise WireError(f"state: the page after {before!r} ends at {last!r}")
