"""The daemon of an engine: an engine with its gRPC and HTTP servers, and its membership in a pool, until SIGTERM."""

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
    """Return the engine's entry in the catalog.

    Several engines may have the same name in logs, so the name in the entry ends with a part of the process id.
    """
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


class ClusterMember:
    """An engine's membership in a pool, from the moment this is made until ``leave``.

    Args:
        on_prefill_engines: called with the addresses of all other engines that have our layout and compute prompts for
            other engines, whenever they change.
        on_final: passed to ``Membership.start``.

    Raises:
        NodeBusy, Unavailable, InvalidRequest: ``Membership.start`` failed.
    """

    def __init__(
        self,
        membership: Membership,
        entry: EngineEntry,
        on_prefill_engines: Callable[[tuple[str, ...]], None],
        on_final: Callable[[VersionMismatch], None] = lambda error: None,
    ) -> None:
        self._membership = membership
        self._entry = entry
        self._on_prefill_engines = on_prefill_engines
        membership.start(entry, self._changed, on_final=on_final)

    def publish_role(self, role: Role) -> None:
        """Publish the role if it has changed."""
        if role != self._entry.role:
            self._entry = dataclasses.replace(self._entry, role=str(role))
            self._membership.update(self._entry)

    def leave(self) -> None:
        """Leave the catalog, so that clients no longer find this engine."""
        self._membership.stop()

    def _changed(self) -> None:
        own = self._entry
        prefill_engines = [
            entry
            for entry in self._membership.engines()
            if entry.layout == own.layout and entry.process != own.process and entry.role in (Role.PREFILL, Role.BOTH)
        ]
        self._on_prefill_engines(tuple(entry.addresses[0] for entry in prefill_engines if entry.addresses))


log = logging.getLogger("kvstore.engine")

CONNECT_S: Final = 10.0
POOL_S: Final = 1.0  # for a call to the node, because the engine's thread waits for it


@dataclass(frozen=True)
class Ready:
    """The report of an engine that has begun to serve."""

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
        """The report as one line of text. It begins with ``kvstore engine ready``."""
        pool = f"pool {self.node}" if self.node is not None else "no pool"
        servers = f"grpc on {' '.join(self.grpc)}" + (f", http on {self.http}" if self.http else "")
        engine = f"role {self.role}, {self.model} on {self.device}, {self.frames} frames of {self.page_tokens} tokens"
        return f"kvstore engine ready: {engine}, {pool}, {self.took_s:.2f} s, {servers}"


def serve(config: EngineConfig, announce: Callable[[Ready], None]) -> None:
    """Run an engine until SIGTERM or SIGINT. Calls ``announce`` once, when the engine serves.

    Raises:
        InvalidRequest: there is no such model or device, the arena is too small, or an address cannot be used. Names
            the setting.
        NodeUnavailable: the node is unreachable.
    """
    membership = Membership(config) if config.catalog else None
    with lifecycle.run(config, log, "the engine") as life:
        listening.plan(config, Identities(config.identities))  # finds mistakes before minutes are spent on a model
        store = _connect(config)
        if store is not None:
            life.at_end(store.close)
        home = _home(config, store)
        if home is not None:
            life.at_end(home.close)
        import torch  # imported here because torch and transformers take seconds

        from engine.compute.models import load_model
        from engine.compute.omp_threads import run_in_own_thread

        life.log_start(model=config.model)
        if config.threads:
            torch.set_num_threads(config.threads)  # before loading, which runs the model once
        load = partial(load_model, config.model, device=config.device, dtype=config.dtype, seed=config.seed)
        model = run_in_own_thread(load)
        gc.freeze()  # objects of torch and transformers stay until the end, so collections can skip them
        _run(config, model, store, home, membership, life, announce)


def _connect(config: EngineConfig) -> Store | None:
    if config.node == WITHOUT_NODE:
        return None
    kvstore.connect(config.node or None, CONNECT_S).close()  # waits for a node that is starting
    return kvstore.connect(config.node or None, POOL_S)


def _home(config: EngineConfig, store: Store | None) -> Store | None:
    """Open a second session for the arena, if the arena can be mounted at a node of this machine; else None."""
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
    clients = contextlib.ExitStack()  # of other engines; closed before gRPC ends, so that their threads end
    engine = Engine(config, model, store, lambda address: clients.enter_context(EngineClient(address)), tally, home)
    server = EngineServer(config, engine, model, tally)
    member: ClusterMember | None = None
    engine.start()
    try:
        server.start()
        life.on_hangup(server.reload)
        if membership is not None:
            entry = entry_of(config, model, store, server.addresses)
            member = ClusterMember(membership, entry, engine.set_prefill_engines, life.fail)
            engine.membership = membership.status
        if life.http is not None:
            metrics = EngineMetrics(config.name, tally, engine.status, server.calls)
            if membership is not None:
                metrics.membership = membership.ages
                life.http.routes["/readyz"] = readyz(life.ready, membership.fault)
            life.http.routes["/metrics"] = metrics.route
        ready = Ready(
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
        life.report_ready(lambda: announce(ready), ready.took_s, arena=format_size(config.arena), frames=ready.frames)
        life.wait(lambda: None if member is None else member.publish_role(engine.admission.role))
        life.retire()
        if member is not None:
            member.leave()  # before the drain, so that no new requests arrive
        server.retire()
        running = engine.drain(None, config.drain_s)
        if running:
            logs.event(log, logging.WARNING, "requests did not end in time", requests=running)
    finally:
        if member is not None:
            member.leave()
        engine.stop()
        server.stop()
        clients.close()


def ready_document(ready: Ready) -> dict[str, Any]:
    """Return the document that ``--json`` prints."""
    return {"ready": True, **vars(ready), "line": ready.line}
