"""Daemon: an engine with its gRPC API and HTTP, from start to SIGTERM.

An engine in its cluster: its description of itself, and the engines it may ask for prefills.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import kvstore
from engine.api.metrics import EngineMetrics, EngineTally
from engine.config import WITHOUT_NODE, EngineConfig
from engine.model.request import Role
from kvstore import about, logs
from kvstore.client.store import Store
from kvstore.cluster.catalog import schema
from kvstore.cluster.catalog.schema import EngineEntry
from kvstore.cluster.membership import Membership, host, reachable
from kvstore.config import format_size
from kvstore.errors import VersionMismatch
from kvstore.server import lifecycle, listening
from kvstore.server.http import readyz
from kvstore.server.identities import Identities
from kvstore.server.lifecycle import Life

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
        """Leave the catalog, so that no client finds this engine any more."""
        self._membership.stop()

    def _changed(self) -> None:
        mine = self._mine
        fit = [
            each
            for each in self._membership.engines()
            if each.layout == mine.layout and each.process != mine.process and each.role in (Role.PREFILL, Role.BOTH)
        ]
        self._found(tuple(each.addresses[0] for each in fit if each.addresses))


log = logging.getLogger("kvstore.engine")

CONNECT_S: Final = 10.0
POOL_S: Final = 1.0  # of a request to the node: the thread that computes waits no longer for it


@dataclass(frozen=True)
class Ready:
    """An engine's description of itself when it serves."""

    role: str
    model: str
    device: str
    frames: int
    page_tokens: int
    node: str | None
    grpc: tuple[str, ...]
    http: str | None
    took_s: float
    pid: int

    @property
    def line(self) -> str:
        """The report as one line for people; begins with ``kvstore engine ready``."""
        pool = f"pool {self.node}" if self.node is not None else "no pool"
        where = f"grpc on {' '.join(self.grpc)}" + (f", http on {self.http}" if self.http else "")
        what = f"role {self.role}, {self.model} on {self.device}, {self.frames} frames of {self.page_tokens} tokens"
        return f"kvstore engine ready: {what}, {pool}, {self.took_s:.2f} s, {where}"


def serve(config: EngineConfig, announce: Callable[[Ready], None]) -> None:
    """Run an engine until SIGTERM or SIGINT. ``announce`` is called once, when it serves.

    Raises:
        InvalidRequest: no such model or device, too small an arena, an address that cannot be had; names the setting.
        NodeUnavailable: there is no node to connect to.
    """
    membership = Membership(config) if config.catalog else None
    with lifecycle.run(config, log, "the engine") as life:
        listening.plan(config, Identities(config.identities))  # all of this before minutes are spent on a model
        store = _connect(config)
        if store is not None:
            life.at_end(store.close)
        home = _home(config, store)
        if home is not None:
            life.at_end(home.close)
        import torch  # only here: torch and transformers take seconds

        from engine.compute.models import load_model
        from engine.compute.omp_threads import apart

        life.log_start(model=config.model)
        if config.threads:
            torch.set_num_threads(config.threads)  # a model is run once to be loaded
        load = partial(load_model, config.model, device=config.device, dtype=config.dtype, seed=config.seed)
        model = apart(load)
        gc.freeze()  # what torch and transformers made lives as long as we do: no collection need look at it
        _run(config, model, store, home, membership, life, announce)


def _connect(config: EngineConfig) -> Store | None:
    if config.node == WITHOUT_NODE:
        return None
    kvstore.connect(config.node or None, CONNECT_S).close()  # it may just be starting
    return kvstore.connect(config.node or None, POOL_S)


def _home(config: EngineConfig, store: Store | None) -> Store | None:
    """A second session at the node for the arena, if the node is one of this machine that may know the arena."""
    if store is None or not store.reads_without_node or config.unmounted:
        return None
    return kvstore.connect(store.name, POOL_S)


def _run(
    config: EngineConfig,
    model: Model,
    store: Store | None,
    home: Store | None,
    membership: Membership | None,
    life: Life,
    announce: Callable[[Ready], None],
) -> None:
    from engine.api.service import EngineServer
    from engine.client import EngineClient
    from engine.shell.engine import Engine

    tally = EngineTally()
    others = contextlib.ExitStack()  # clients of other engines, closed before gRPC ends: their threads must hear of it
    engine = Engine(config, model, store, lambda address: others.enter_context(EngineClient(address)), tally, home)
    server = EngineServer(config, engine, model, tally)
    place: ClusterPlace | None = None
    engine.start()
    try:
        server.start()
        life.on_hangup(server.reload)
        if membership is not None:
            place = ClusterPlace(membership, entry_of(config, model, store, server.addresses), engine.found, life.fail)
            engine.membership = membership.status
        if life.http is not None:
            metrics = EngineMetrics(config.name, tally, engine.status, server.calls)
            if membership is not None:
                metrics.membership = membership.ages
                life.http.routes["/readyz"] = readyz(life.ready, membership.fault)
            life.http.routes["/metrics"] = metrics.route
        said = Ready(
            role=str(config.role),
            model=model.name,
            device=str(model.device),
            frames=engine.arena.frames_total,
            page_tokens=config.page_tokens,
            node=store.name if store is not None else None,
            grpc=tuple(server.addresses),
            http=life.http.address if life.http is not None else None,
            took_s=round(life.took_s, 3),
            pid=os.getpid(),
        )
        life.report_ready(lambda: announce(said), said.took_s, arena=format_size(config.arena), frames=said.frames)
        life.wait(lambda: None if place is None else place.look(engine.admission.role))
        life.retire()
        if place is not None:
            place.leave()  # before it drains: no new requests should come
        server.retire()
        left = engine.drain(None, config.drain_s)
        if left:
            logs.event(log, logging.WARNING, "requests did not end in time", requests=left)
    finally:
        if place is not None:
            place.leave()
        engine.stop()
        server.stop()
        others.close()


def described(said: Ready) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {"ready": True, **vars(said), "line": said.line}
