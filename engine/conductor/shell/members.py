"""FleetMembers: the engines and nodes that a conductor knows. It finds them, asks engines how busy they are, and hears
what pages nodes have.

An engine has one question at a time under way, and an answer that is late is an old report, no silence: silent is one
that cannot be reached. gRPC finds out by itself where a process or its machine stands still.
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

from engine.conductor.foreign.settings import BackendSettings
from engine.conductor.shell.clusters import RemoteCluster
from engine.conductor.shell.links import EngineLink, KnownEngine, NodeLink
from engine.conductor.state import events as ev
from engine.conductor.state.fleet import EngineAbout, LoadReport
from engine.model.request import NO_ORDER, REVISION_MAX, Request, Role, RoleOrder
from kvstore.catalog.schema import ClusterEntry, EngineEntry, NodeEntry
from kvstore.errors import InvalidRequest, KVStoreError, NodeUnavailable, VersionMismatch
from kvstore.pb import store_pb2

if TYPE_CHECKING:
    from engine.conductor.foreign.follower import BackendFollower

POLL_S: Final = 0.25  # between two questions to an engine
STATUS_S: Final = 15.0  # for an answer; a lost connection is noticed sooner
RETRY_S: Final = 0.5
WATCH_S: Final = 3600.0  # of one stream of a node's pages

log = logging.getLogger("kvstore.conductor")

Handle = Callable[[ev.ConductorEvent], None]


class FleetMembers:
    """Follows engines and nodes from ``changed`` on, until ``close``. On one event loop.

    Args:
        engines: addresses of some that no catalog lists; ``backends``: engines that are not ours.
        counts: of their KV events, see ``KvBlocks``.

    Attributes:
        engines: that have said what they are, by name.
        nodes: that are there and have a gRPC API, by name.
        clusters: other pools that compute prompts for this one, by name.
        failed: has an exception where one of ours failed, which is a bug.
    """

    def __init__(
        self, engines: tuple[str, ...], backends: tuple[BackendSettings, ...], counts: Counter[str], handle: Handle
    ) -> None:
        self.engines: dict[str, KnownEngine] = {}
        self.nodes: dict[str, NodeLink] = {}
        self.clusters: dict[str, RemoteCluster] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._given = engines
        self._handle = handle
        self._tasks: dict[tuple[str, str, str], asyncio.Task[None]] = {}  # by kind, name and address
        self._anew: set[str] = set()
        self._looks: dict[str, asyncio.Event] = {}  # set: that engine is asked at once
        self._heard: set[tuple[str, str, str]] = set()  # of those tasks, which have answered once
        self._backends = self._foreign(backends, counts)

    def _foreign(self, backends: tuple[BackendSettings, ...], counts: Counter[str]) -> dict[str, BackendFollower]:
        if not backends:
            return {}
        try:
            from engine.conductor.foreign.follower import BackendFollower  # only here: it loads the web framework
        except ModuleNotFoundError as error:
            raise InvalidRequest("backend", f"needs {error.name}: pip install 'kvstore[http,events]'") from None
        return {each.name: BackendFollower(each, self.engines, counts, self._handle) for each in backends}

    @property
    def settled(self) -> bool:
        """Whether every engine and node that is known has answered."""
        return self._heard >= self._tasks.keys()

    def changed(self, engines: list[EngineEntry], nodes: list[NodeEntry], clusters: list[ClusterEntry]) -> None:
        """Those are in the catalog now."""
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
            wanted["backend", name, name] = partial(backend.follow, partial(self._heard.add, ("backend", name, name)))
        for pool, entry in {each.offered: each for each in reversed(clusters) if each.addresses}.items():
            wanted["cluster", pool, entry.process] = partial(self._ask_cluster, entry)
        for key in self._tasks.keys() - wanted.keys():
            self._tasks.pop(key).cancel()
            self._heard.discard(key)
        for key in wanted.keys() - self._tasks.keys():
            self._tasks[key] = asyncio.create_task(wanted[key](), name=" ".join(key))
            self._tasks[key].add_done_callback(self._ended)

    async def close(self) -> None:
        """Forget everybody."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None and not self.failed.done():
            self.failed.set_exception(task.exception())  # type: ignore[arg-type]

    def follow_anew(self, node: str) -> None:
        """End this node's stream of pages, and begin another."""
        if node in self._backends:
            self._backends[node].tell_anew()
        else:
            self._anew.add(node)

    # --- engines ----------------------------------------------------------------------------------------------------

    def look(self, name: str) -> None:
        """Ask this engine for its report now, or as soon as it has answered what it was asked before."""
        if name in self._looks:
            self._looks[name].set()

    async def _poll(self, name: str, address: str, node: str, host: str) -> None:
        link = EngineLink(address)
        look = self._looks[name] = asyncio.Event()
        try:
            while True:
                known = name in self.engines
                if known:
                    self._handle(ev.ReportAsked(time.monotonic(), name))
                try:
                    self._reported(name, link, await link.status(STATUS_S), node, host)
                except KVStoreError as error:
                    self._silent(name, error)
                self._heard.add(("engine", name, address))
                if known or name not in self.engines:  # what it says first is not asked for, and counts as no report
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(POLL_S):
                            await look.wait()
                    look.clear()
        finally:
            if self._looks.get(name) is look:
                del self._looks[name]
            if self.engines.pop(name, None) is not None:
                self._handle(ev.EngineLost(time.monotonic(), name))
            await link.retire()

    def _reported(self, name: str, link: EngineLink, status: dict[str, Any], node: str, host: str) -> None:
        now_s = time.monotonic()
        try:
            about = engine_about(name, link.address, status, node, host)
            report = _report(status)
            layout = store_pb2.Layout(**status["layout"]["fields"])
            path = status["model_path"]
        except (KeyError, TypeError, ValueError) as error:
            raise VersionMismatch(f"{link.address} does not say what a conductor has to know: {error!r}") from None
        known = self.engines.get(name)
        if known is None or known.about != about:
            self.engines[name] = KnownEngine(about, link, layout, path)
            self._handle(ev.EngineFound(now_s, about, report.role))
        self._handle(ev.Reported(now_s, name, report))

    def _silent(self, name: str, error: KVStoreError) -> None:
        log.debug("%s: %s", name, error)
        if name in self.engines:
            self._handle(ev.Silent(time.monotonic(), name))

    async def remote(self, name: str, request: Request) -> str:
        """The address of the engine of a remote cluster that is to compute this.

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
                    await cluster.ask()
                except KVStoreError as error:
                    log.debug("%s: %s", entry.offered, error)
                    cluster.silent()
                self._heard.add(("cluster", entry.offered, entry.process))
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
            if link is None:  # nobody can tell what it has
                self._heard.add(key)
                await asyncio.Event().wait()
                return
            self.nodes[node.name] = link
            while True:
                try:
                    await self._hear(link, key)
                except KVStoreError as error:
                    log.debug("%s: %s", node.name, error)
                    self._heard.add(key)
                await asyncio.sleep(RETRY_S)
        finally:
            self._handle(ev.NodeLost(time.monotonic(), node.name))
            if link is not None:
                self.nodes.pop(node.name, None)
                await link.retire()

    async def _hear(self, link: NodeLink, key: tuple[str, str, str]) -> None:
        """One stream of a node's pages, to its end."""
        self._anew.discard(link.name)
        async with contextlib.aclosing(link.pages(WATCH_S)) as batches:
            async for batch in batches:
                self._handle(ev.PagesTold(time.monotonic(), batch))
                if batch.whole:
                    self._heard.add(key)
                if link.name in self._anew:
                    return


def engine_about(name: str, address: str, status: dict[str, Any], node: str, host: str) -> EngineAbout:
    """What an engine says of itself in its status. One of the version before does not say how long prompts may be."""
    layout, frames = status["layout"], status["frames"]
    page_tokens = int(layout["page_tokens"])
    return EngineAbout(
        name=name,
        address=address,
        model=str(status["model"]),
        layout=str(layout["fingerprint"]),
        page_tokens=page_tokens,
        kv_bytes=int(layout["page_bytes"]) // page_tokens,
        node=node or status["pool"]["node"] or "",
        host=host,
        batch_max=int(status["batch_max"]),
        tokens_max=int(frames.get("tokens_max", frames["total"] * page_tokens)),
        context_max=int(status["context_tokens_max"]),
    )


def _order(status: dict[str, Any]) -> RoleOrder:
    """The last order that an engine has carried out. One of the version before tells of none, and refuses none."""
    said = status.get("role_order")
    if said is None:
        return NO_ORDER
    order = RoleOrder(said["revision"], said["number"])
    if not all(type(each) is int and 0 <= each <= REVISION_MAX for each in order):
        raise ValueError(f"role_order: out of range (got {order})")
    return order


def _report(status: dict[str, Any]) -> LoadReport:
    requests, speeds = status["requests"], status["speeds"]
    return LoadReport(
        role=Role(status["role"]),
        order=_order(status),
        draining=bool(status["draining"]),
        waiting=int(requests["waiting"] + requests["loading"] + requests["computing"]),
        running=int(requests["decoding"]),
        prefill_tokens_per_s=float(speeds["prefill_tokens_per_s"]),
        step_s=float(speeds["step_ms"]) / 1e3,
    )
