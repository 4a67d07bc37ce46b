"""An engine in its cluster: what it says of itself, and which engines it may ask for prefills."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.model.request import Role
from kvstore import about
from kvstore.catalog import schema
from kvstore.catalog.schema import EngineEntry
from kvstore.client.store import Store
from kvstore.errors import VersionMismatch
from kvstore.serving.membership import Membership, host, reachable

if TYPE_CHECKING:
    from engine.compute.models import Model


def entry_of(config: EngineConfig, model: Model, store: Store | None, addresses: Sequence[str]) -> EngineEntry:
    """What it publishes. Several engines may have one name in logs; here a number of its process follows it."""
    process = schema.new_process()
    return EngineEntry(
        name=f"{config.name}-{process[:8]}",
        process=process,
        role=str(config.role),
        model=model.name,
        layout=model.layout(config.page_tokens).fingerprint.hex(),
        addresses=reachable(addresses),
        node=store.name if store is not None else "",
        device=str(model.device),
        host=host(),
        version=about.version(),
    )


class ClusterPlace:
    """Ours in the cluster, from the moment it is made.

    Args:
        found: told where engines of our layout compute prompts for others, whenever that changes. Never ourselves.
        on_final: see ``Membership.start``.

    Raises:
        NodeBusy, Unavailable, InvalidRequest: see ``Membership.start``.
    """

    def __init__(
        self,
        membership: Membership,
        mine: EngineEntry,
        found: Callable[[tuple[str, ...]], None],
        on_final: Callable[[VersionMismatch], None] = lambda error: None,
    ) -> None:
        self._membership = membership
        self._mine = mine
        self._found = found
        membership.start(mine, self._changed, on_final=on_final)

    def look(self, role: Role) -> None:
        """Publish the role where it was changed."""
        if role != self._mine.role:
            self._mine = dataclasses.replace(self._mine, role=str(role))
            self._membership.update(self._mine)

    def leave(self) -> None:
        """Nobody finds us any more."""
        self._membership.stop()

    def _changed(self) -> None:
        mine = self._mine
        fit = [
            each
            for each in self._membership.engines()
            if each.layout == mine.layout and each.process != mine.process and each.role in (Role.PREFILL, Role.BOTH)
        ]
        self._found(tuple(each.addresses[0] for each in fit if each.addresses))
