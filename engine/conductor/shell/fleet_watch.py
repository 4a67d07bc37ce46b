"""FleetWatch: follows the engines and nodes of a conductor.

One task for each member of the catalog runs while the member is listed. It polls an engine for its load, follows the
pages that a node reports, or polls a remote cluster. Members and their reports become events.

An engine gets one question at a time. A late answer is an old report and does not make the engine silent. An engine is
silent if it cannot be reached; gRPC also detects that a process or its machine is suspended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from engine.conductor.backends.settings import BackendSettings
from engine.conductor.links import EngineLink, KnownEngine, NodeLink
from engine.conductor.shell.clusters import RemoteCluster
from engine.conductor.shell.reports import engine_about, layout_of, load_report, model_path
from engine.conductor.state import events as ev
from engine.model.request import Request
from kvstore import boundary
from kvstore.cluster.catalog.schema import ClusterEntry, EngineEntry, NodeEntry
from kvstore.errors import InvalidRequest, KVStoreError, NodeUnavailable, VersionMismatch

if TYPE_CHECKING:
    from engine.conductor.backends.follower import BackendFollower

POLL_S: Final = 0.25  # between an engine's report and the next question
STATUS_S: Final = 15.0  # the longest wait for a report; a lost connection is noticed sooner
RETRY_S: Final = 0.5  # between two streams of a node, and between two polls of a cluster
WATCH_S: Final = 3600.0  # a stream of a node's pages ends after this time

log = logging.getLogger("kvstore.conductor")

_POLL = boundary.RequestGuard("task/ask")
_BATCH = boundary.RequestGuard("task/hear")

Handle = Callable[[ev.ConductorEvent], None]
Member = tuple[str, str, str]
"""The kind, name and address of what a task follows."""


class FleetWatch:
    """Follows members from the first ``update`` until ``close``. Belongs to one event loop.

    Args:
        engines: addresses of engines that need not be in the catalog.
        backends: engines of other systems.
        counts: counts the KV events of ``backends``, see ``KvBlocks``.
        handle: is called with each event that follows.

    Attributes:
        engines: the engines that have sent a description of themselves, by name.
        nodes: the listed nodes that have a gRPC API, by name.
        clusters: remote pools that compute prompts for this one, by name.
        refused: engine -> reason, for engines whose reports are not valid.
    """

    def __init__(
        self, engines: tuple[str, ...], backends: tuple[BackendSettings, ...], counts: Counter[str], handle: Handle
    ) -> None:
        self.engines: dict[str, KnownEngine] = {}
        self.nodes: dict[str, NodeLink] = {}
        self.clusters: dict[str, RemoteCluster] = {}
        self.refused: dict[str, str] = {}
        self._addresses = engines
        self._handle = handle
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        self._restarts: set[str] = set()  # nodes whose stream must start again
        self._wakes: dict[str, asyncio.Event] = {}  # by engine: set it to poll the engine at once
        self._ready: set[Member] = set()  # members that have answered or failed at least once
        self._backends = self._followers(backends, counts)

    def _followers(self, backends: tuple[BackendSettings, ...], counts: Counter[str]) -> dict[str, BackendFollower]:
        if not backends:
            return {}
        try:
            from engine.conductor.backends.follower import BackendFollower  # only here: it loads the web framework
        except ModuleNotFoundError as error:
            raise InvalidRequest("backend", f"needs {error.name}: pip install 'kvstore[http,events]'") from None
        return {each.name: BackendFollower(each, self.engines, counts, self._handle) for each in backends}

    @property
    def is_settled(self) -> bool:
        """True if every listed member has answered or failed at least once."""
        return self._ready >= self._tasks.keys()

    def update(self, engines: list[EngineEntry], nodes: list[NodeEntry], clusters: list[ClusterEntry]) -> None:
        """Follow the members that the catalog lists now, and the engines and back ends of the configuration."""
        steps: dict[Member, Callable[[], Coroutine[Any, Any, None]]] = {}
        for node in nodes:
            address = node.addresses[0] if node.addresses else ""
            steps["node", node.name, address] = partial(self._watch_node, node, address)
        listed = [each for each in engines if each.addresses]
        for each in listed:
            address = each.addresses[0]
            steps["engine", each.name, address] = partial(self._poll_engine, each.name, address, each.node, each.host)
        for address in {*self._addresses} - {address for each in listed for address in each.addresses}:
            steps["engine", address, address] = partial(self._poll_engine, address, address, "", "")
        for name, backend in self._backends.items():
            steps["backend", name, name] = partial(backend.follow, partial(self._ready.add, ("backend", name, name)))
        for pool, entry in {each.offered: each for each in reversed(clusters) if each.addresses}.items():
            steps["cluster", pool, entry.process] = partial(self._poll_cluster, entry)
        for key in self._tasks.keys() - steps.keys():
            self._tasks.pop(key).cancel()
            self._ready.discard(key)
        for key in steps.keys() - self._tasks.keys():
            loop = boundary.task_loop(f"task/{key[0]}", steps[key])
            self._tasks[key] = asyncio.create_task(loop, name=" ".join(key))

    async def close(self) -> None:
        """Stop following all members."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def restart_stream(self, node: str) -> None:
        """Start a new stream of this node's pages. It begins with all pages."""
        if node in self._backends:
            self._backends[node].restart_stream()
        else:
            self._restarts.add(node)

    # --- engines ----------------------------------------------------------------------------------------------------

    def poll_now(self, name: str) -> None:
        """Ask this engine for a report now, or when it has answered the previous question."""
        if name in self._wakes:
            self._wakes[name].set()

    async def _poll_engine(self, name: str, address: str, node: str, host: str) -> None:
        link = EngineLink(address)
        wake = self._wakes[name] = asyncio.Event()
        try:
            while True:
                is_known = name in self.engines
                if is_known:
                    self._handle(ev.ReportRequested(time.monotonic(), name))
                try:
                    with _POLL:
                        self._take_report(name, link, await link.status(STATUS_S), node, host)
                except VersionMismatch as error:
                    self._refuse(name, error)
                except KVStoreError as error:
                    self._mark_silent(name, error)
                self._ready.add(("engine", name, address))
                # The first answer only describes the engine, because its load was not asked for. So ask again at once.
                if is_known or name not in self.engines:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(POLL_S):
                            await wake.wait()
                    wake.clear()
        finally:
            if self._wakes.get(name) is wake:
                del self._wakes[name]
            self.refused.pop(name, None)
            self._remove(name)
            await link.retire()

    def _remove(self, name: str) -> None:
        if self.engines.pop(name, None) is not None:
            self._handle(ev.EngineLost(time.monotonic(), name))

    def _take_report(self, name: str, link: EngineLink, status: dict[str, Any], node: str, host: str) -> None:
        """Handle an engine's report. Raises VersionMismatch, and changes nothing, if the report is not valid."""
        now_s = time.monotonic()
        about = engine_about(name, link.address, status, node, host)
        report, layout = load_report(link.address, status), layout_of(link.address, status)
        path = model_path(link.address, status)
        self.refused.pop(name, None)
        known = self.engines.get(name)
        if known is None or known.about != about:
            self.engines[name] = KnownEngine(about, link, layout, path)
            self._handle(ev.EngineFound(now_s, about, report.role))
        self._handle(ev.LoadReported(now_s, name, report))

    def _refuse(self, name: str, error: VersionMismatch) -> None:
        """Remove an engine whose report is not valid, until it sends a valid one."""
        if self.refused.get(name) != str(error):
            log.warning("%s is refused: %s", name, error)
            self.refused[name] = str(error)
        self._remove(name)

    def _mark_silent(self, name: str, error: KVStoreError) -> None:
        log.debug("%s: %s", name, error)
        if name in self.engines:
            self._handle(ev.EngineSilent(time.monotonic(), name))

    async def choose_remote_engine(self, name: str, request: Request) -> str:
        """Return the address of an engine of a remote cluster that will compute this prompt.

        Args:
            name: the engine that represents the cluster here.

        Raises:
            KVStoreError: the cluster is no longer in the catalog, is not responding, or has no such engine.
        """
        for cluster in self.clusters.values():
            if name in cluster:
                return await cluster.choose_engine(name, request)
        raise NodeUnavailable(f"{name} has just left")

    # --- other pools ------------------------------------------------------------------------------------------------

    async def _poll_cluster(self, entry: ClusterEntry) -> None:
        cluster = self.clusters[entry.offered] = RemoteCluster(entry, self._handle)
        try:
            while True:
                try:
                    with _POLL:
                        await cluster.poll()
                except KVStoreError as error:
                    log.debug("%s: %s", entry.offered, error)
                    cluster.mark_silent()
                self._ready.add(("cluster", entry.offered, entry.process))
                await asyncio.sleep(RETRY_S)
        finally:
            if self.clusters.get(entry.offered) is cluster:
                del self.clusters[entry.offered]
            cluster.remove()
            await cluster.link.retire()

    # --- nodes ------------------------------------------------------------------------------------------------------

    async def _watch_node(self, node: NodeEntry, address: str) -> None:
        key = "node", node.name, address
        self._handle(ev.NodeFound(time.monotonic(), node.name, node.host))
        link = NodeLink(node.name, address) if address else None
        try:
            if link is None:  # without a gRPC API, its pages cannot be followed
                self._ready.add(key)
                await asyncio.Event().wait()
                return
            self.nodes[node.name] = link
            while True:
                try:
                    await self._watch_stream(link, key)
                except KVStoreError as error:
                    log.debug("%s: %s", node.name, error)
                    self._ready.add(key)
                await asyncio.sleep(RETRY_S)
        finally:
            self._handle(ev.NodeLost(time.monotonic(), node.name))
            if link is not None:
                self.nodes.pop(node.name, None)
                await link.retire()

    async def _watch_stream(self, link: NodeLink, key: Member) -> None:
        """Follow one stream of a node's pages until it ends, or until it must start again."""
        self._restarts.discard(link.name)
        async with contextlib.aclosing(link.pages(WATCH_S)) as batches:
            async for batch in batches:
                with _BATCH:
                    self._handle(ev.PagesReported(time.monotonic(), batch))
                if batch.whole:
                    self._ready.add(key)
                if link.name in self._restarts:
                    return
