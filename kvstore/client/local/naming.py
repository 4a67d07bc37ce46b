"""Naming: a client tells its node whose the pages of a root are, so that it can count them per tenant."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Any

from kvstore.client.local.node import Mapped
from kvstore.client.local.prefetch import heard_from
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.model.layout import Layout
from kvstore.rpc.control import NO_REPLY, Op, pack_json, unpack_json

LAYOUT_BYTES_MAX = 4096  # of a layout as JSON: its texts may be of any length, what the node remembers may not
NAMED_MAX = 1 << 14  # roots that a client remembers to have named; the node accepts a name that it knows already
_QUIETLY = b"?"


def name_root(
    mapped: Mapped,
    root: bytes,
    layout: Layout,
    salt: str,
    adapter: str,
    quietly: bool = False,
    timeout_s: float | None = None,
) -> None:
    """Say it once per node, and again when the node has forgotten names since (``Header.names_forgotten``); with the
    layout, so that an operator can name prompts without knowing it.

    ``quietly``: if it can be said at once, without waiting for the node; whoever writes says it again.
    """
    if _is_news(mapped, root, quietly):
        about = {"fingerprint": layout.fingerprint.hex(), "model": layout.model, "salt": salt, "adapter": adapter}
        whole = asdict(layout)
        more = {"layout": whole} if len(pack_json(whole)) <= LAYOUT_BYTES_MAX else {}
        _say(mapped, root, {**about, **more}, quietly, timeout_s)


def name_objects(mapped: Mapped, root: bytes, salt: str, quietly: bool = False, timeout_s: float | None = None) -> None:
    """The same of the root of a tenant's objects."""
    if _is_news(mapped, root, quietly):
        _say(mapped, root, {"salt": salt, "objects": True}, quietly, timeout_s)


def _is_news(mapped: Mapped, root: bytes, quietly: bool) -> bool:
    named, forgotten = mapped.named, mapped.header.names_forgotten
    if named.get(root) == forgotten or (quietly and named.get(root + _QUIETLY) == forgotten):
        return False
    return not quietly or heard_from(mapped)


def _say(mapped: Mapped, root: bytes, about: dict[str, Any], quietly: bool, timeout_s: float | None = None) -> None:
    body = (pack_json({"call": "root", "root": root.hex(), **about}),)
    forgotten = mapped.header.names_forgotten  # before it is said: what is forgotten after that is said again
    if len(mapped.named) >= NAMED_MAX:
        mapped.named.clear()
        mapped.limited.clear()  # each is added with a name, and writers say a name that was cleared again
    if quietly:
        with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed meanwhile
            mapped.channel.request(Op.ADMIN, flags=NO_REPLY, body=body, timeout_s=0.0)
            mapped.named[root + _QUIETLY] = forgotten  # it may not have been heard
    else:
        said = unpack_json(mapped.exchange(Op.ADMIN, body=body, timeout_s=timeout_s).body)
        (mapped.limited.add if said.get("limited") else mapped.limited.discard)(root)
        mapped.named[root] = forgotten
