"""FleetWatch: the engines and nodes that a conductor knows. It finds them, asks engines how busy they are, and
follows the pages that nodes report.

An engine is asked one question at a time, and a late answer is an old report, not silence: an engine is silent if it
cannot be reached. gRPC detects on its own that a process or its machine is suspended.
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

POLL_S: Final = 0.25  # between two questions to an engine
STATUS_S: Final = 15.0  # for an answer; a lost connection is noticed sooner
RETRY_S: Final = 0.5
WATCH_S: Final = 3600.0  # the longest stream of a node's pages

log = logging.getLogger("kvstore.conductor")

_ASKING = boundary.RequestGuard("task/ask")
_HEARING = boundary.RequestGuard("task/hear")

Handle = Callable[[ev.ConductorEvent], None]


class FleetWatch:
    """Follows engines and nodes from ``changed`` on, until ``close``. On one event loop.

    Args:
        engines: addresses of engines that no catalog lists; ``backends``: engines that are not ours.
        counts: outcomes of their KV events, see ``KvBlocks``.

    Attributes:
        engines: that have described themselves, by name.
        nodes: that are there and have a gRPC API, by name.
        clusters: other pools that compute prompts for this one, by name.
        refused: engines whose reports are not accepted, and why, by name.
    """

    def __init__(
        self, engines: tuple[str, ...], backends: tuple[BackendSettings, ...], counts: Counter[str], handle: Handle
    ) -> None:
        self.engines: dict[str, KnownEngine] = {}
        self.nodes: dict[str, NodeLink] = {}
        self.clusters: dict[str, RemoteCluster] = {}
        self.refused: dict[str, str] = {}
        self._given = engines
        self._handle = handle
        self._tasks: dict[tuple[str, str, str], asyncio.Task[None]] = {}  # by kind, name and address
        self._anew: set[str] = set()
        self._looks: dict[str, asyncio.Event] = {}  # set: ask that engine at once
        self._ready: set[tuple[str, str, str]] = set()  # tasks that have answered at least once
        self._backends = self._foreign(backends, counts)

    def _foreign(self, backends: tuple[BackendSettings, ...], counts: Counter[str]) -> dict[str, BackendFollower]:
        if not backends:
            return {}
        try:
            from engine.conductor.backends.follower import BackendFollower  # only here: it loads the web framework
        except ModuleNotFoundError as error:
            raise InvalidRequest("backend", f"needs {error.name}: pip install 'kvstore[http,events]'") from None
        return {each.name: BackendFollower(each, self.engines, counts, self._handle) for each in backends}

    @property
    def settled(self) -> bool:
        """True once all known engines and nodes have answered."""
        return self._ready >= self._tasks.keys()

    def changed(self, engines: list[EngineEntry], nodes: list[NodeEntry], clusters: list[ClusterEntry]) -> None:
        """Take the members that are in the catalog now."""
        wanted: dict[tuple[str, str, str], Callable[[], Coroutine[Any, Any, None]]] = {}
        for node in nodes:
            address = node.addresses[0] if node.addresses else ""
            wanted["node", node.name, address] = partial(self._follow, node, address)
        listed = [each for each in engines if each.addresses]
        for each in listed:
            address = each.addresses[0]
            wanted["engine", each.name, address] = partial(self._poll, each.name, address, each.node, each.host)
        for address in {*self._given} - {address for each in listed for address in each.addresses}:
            wanted["engine", address, address] = partial(self._poll, address, address, "", "")
        for name, backend in self._backends.items():
            wanted["backend", name, name] = partial(backend.follow, partial(self._ready.add, ("backend", name, name)))
        for pool, entry in {each.offered: each for each in reversed(clusters) if each.addresses}.items():
            wanted["cluster", pool, entry.process] = partial(self._ask_cluster, entry)
        for key in self._tasks.keys() - wanted.keys():
            self._tasks.pop(key).cancel()
            self._ready.discard(key)
        for key in wanted.keys() - self._tasks.keys():
            follow = boundary.task_loop(f"task/{key[0]}", wanted[key])
            self._tasks[key] = asyncio.create_task(follow, name=" ".join(key))

    async def close(self) -> None:
        """Forget all members."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def restart_stream(self, node: str) -> None:
        """End this node's stream of pages, and begin another."""
        if node in self._backends:
            self._backends[node].tell_anew()
        else:
            self._anew.add(node)

    # --- engines ----------------------------------------------------------------------------------------------------

    def look(self, name: str) -> None:
        """Ask this engine for its report now, or once it has answered the previous question."""
        if name in self._looks:
            self._looks[name].set()

    async def _poll(self, name: str, address: str, node: str, host: str) -> None:
        link = EngineLink(address)
        look = self._looks[name] = asyncio.Event()
        try:
            while True:
                known = name in self.engines
                if known:
                    self._handle(ev.ReportRequested(time.monotonic(), name))
                try:
                    with _ASKING:
                        self._reported(name, link, await link.status(STATUS_S), node, host)
                except VersionMismatch as error:
                    self._refuse(name, error)
                except KVStoreError as error:
                    self._silent(name, error)
                self._ready.add(("engine", name, address))
                if (
                    known or name not in self.engines
                ):  # its first description was not asked for, and does not count as a report
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(POLL_S):
                            await look.wait()
                    look.clear()
        finally:
            if self._looks.get(name) is look:
                del self._looks[name]
            self.refused.pop(name, None)
            self._lose(name)
            await link.retire()

    def _lose(self, name: str) -> None:
        if self.engines.pop(name, None) is not None:
            self._handle(ev.EngineLost(time.monotonic(), name))

    def _reported(self, name: str, link: EngineLink, status: dict[str, Any], node: str, host: str) -> None:
        """Take an engine's report. Raises VersionMismatch if it is not valid; then nothing has changed."""
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
        """Ignore an engine whose report is not valid, until it sends a valid one."""
        if self.refused.get(name) != str(error):
            log.warning("%s is refused: %s", name, error)
            self.refused[name] = str(error)
        self._lose(name)

    def _silent(self, name: str, error: KVStoreError) -> None:
        log.debug("%s: %s", name, error)
        if name in self.engines:
            self._handle(ev.EngineSilent(time.monotonic(), name))

    async def remote(self, name: str, request: Request) -> str:
        """The address of the engine of a remote cluster that is to compute this prompt.

        Raises:
            KVStoreError: there is none.
        """
        for cluster in self.clusters.values():
            if name in cluster:
                return await cluster.computes(name, request)
        raise NodeUnavailable(f"{name} has just left")

    # --- other pools ------------------------------------------------------------------------------------------------

    async def _ask_cluster(self, entry: ClusterEntry) -> None:
        cluster = self.clusters[entry.offered] = RemoteCluster(entry, self._handle)
        try:
            while True:
                try:
                    with _ASKING:
                        await cluster.ask()
                except KVStoreError as error:
                    log.debug("%s: %s", entry.offered, error)
                    cluster.silent()
                self._ready.add(("cluster", entry.offered, entry.process))
                await asyncio.sleep(RETRY_S)
        finally:
            if self.clusters.get(entry.offered) is cluster:
                del self.clusters[entry.offered]
            cluster.lost()
            await cluster.link.retire()

    # --- nodes ------------------------------------------------------------------------------------------------------

    async def _follow(self, node: NodeEntry, address: str) -> None:
        key = "node", node.name, address
        self._handle(ev.NodeFound(time.monotonic(), node.name, node.host))
        link = NodeLink(node.name, address) if address else None
        try:
            if link is None:  # its pages cannot be followed
                self._ready.add(key)
                await asyncio.Event().wait()
                return
            self.nodes[node.name] = link
            while True:
                try:
                    await self._hear(link, key)
                except KVStoreError as error:
                    log.debug("%s: %s", node.name, error)
                    self._ready.add(key)
                await asyncio.sleep(RETRY_S)
        finally:
            self._handle(ev.NodeLost(time.monotonic(), node.name))
            if link is not None:
                self.nodes.pop(node.name, None)
                await link.retire()

    async def _hear(self, link: NodeLink, key: tuple[str, str, str]) -> None:
        """Follow one stream of a node's pages to its end."""
        self._anew.discard(link.name)
        async with contextlib.aclosing(link.pages(WATCH_S)) as batches:
            async for batch in batches:
                with _HEARING:
                    self._handle(ev.PagesReported(time.monotonic(), batch))
                if batch.whole:
                    self._ready.add(key)
                if link.name in self._anew:
                    return
