"""Membership: publishes a daemon in the catalog of its pool, and follows the other members.

``Presence`` keeps entries published while their process lives and reaches the catalog. ``elect`` elects one leader at a
time, over any catalog. ``Membership`` uses both, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

from kvstore import logs
from kvstore.boundary import task_loop
from kvstore.cluster.catalog import schema
from kvstore.cluster.catalog.base import Catalog, Entry, KeyTaken, Session, SessionLost, boot_s
from kvstore.cluster.catalog.connect import check_url, to_catalog
from kvstore.cluster.catalog.schema import ClusterEntry, DataEntry, EngineEntry, NodeEntry
from kvstore.cluster.catalog.task_health import TaskHealth
from kvstore.config.daemon import ClusterConfig
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NodeBusy, VersionMismatch
from kvstore.shm.header import boot_id

RETRY_S: Final = 0.5


class Presence:
    """Publishes entries under a session. After an outage that ended the session, it publishes them under a new one.

    An entry names one identity. If another process has published that entry, ours is not published: of two processes
    with the same name, the second one fails. ``Presence`` recognises its own entries by their bytes, so every value
    contains a random number of its process.

    Args:
        ttl_s: how long the entries stay after this process has died or was cut off.
        health: notes whether all entries are published.
        session_health: notes the session's renewals.
    """

    def __init__(
        self,
        catalog: Catalog,
        ttl_s: float,
        health: TaskHealth | None = None,
        session_health: TaskHealth | None = None,
    ) -> None:
        self._catalog = catalog
        self._ttl_s = ttl_s
        self._health = health or TaskHealth("presence")
        self._session_health = session_health or TaskHealth("session")
        self._entries: dict[str, bytes] = {}
        self._permanent: dict[str, bytes] = {}
        self._writes: dict[str, list[bytes]] = {}  # the last two values that we may have written under each key
        self._stored: dict[str, tuple[bytes, int]] = {}  # values known to be in the catalog, with their revisions
        self._session: Session | None = None
        self._keep_task: asyncio.Task[None] | None = None

    @property
    def published(self) -> bool:
        """Whether other members can see this process now, as far as it can know."""
        return self._session is not None and self._session.alive

    async def start(
        self,
        entries: dict[str, bytes],
        former: bytes = b"",
        permanent: dict[str, bytes] | None = None,
        former_key: str = "",
    ) -> None:
        """Publish for the first time.

        Args:
            permanent: entries that are published only if the key is free, and that stay after ``close``.
            former: the value that a dead process published under these keys. It is replaced at once.
            former_key: another key of a dead process; its entry is removed once ours are published.

        Raises:
            NodeBusy: another live process has one of these keys. None of our entries stays.
            Unavailable: the catalog is not responding.
        """
        self._entries, self._permanent = dict(entries), dict(permanent or {})
        self._writes = {key: [former] for key in entries if former}
        try:
            await self._publish_all()
            if former_key:
                await self._catalog.retract(former_key)
            self._health.note_success()
        except KeyTaken as error:
            await self.close()
            raise NodeBusy(f"{error.key} is taken by another process; give this one another name") from error
        except KVStoreError:
            await self.close()
            raise
        self._keep_task = asyncio.create_task(task_loop("membership/presence", self._keep), name="catalog presence")

    async def update(self, key: str, value: bytes) -> None:
        """Publish another value under a key. If the catalog is not reachable now, the value is published once it is."""
        self._entries[key] = value
        if self._session is not None and self._session.alive:
            try:
                await self._publish(key, self._session)
            except KVStoreError as error:
                self._health.note_failure(error)  # ``_keep`` tries again

    def keep(self, key: str, value: bytes) -> None:
        """From now on, publish this value as ``permanent``, because another process published it first."""
        self._permanent[key] = value

    def look(self, entries: Mapping[str, Entry], revision: int, whole: bool) -> None:
        """Compare our entries with the catalog as of ``revision``, as a watch reports it. Missing entries are published
        again."""
        for key, (value, since) in list(self._stored.items()):
            entry = entries.get(key)
            if (whole or revision >= since) and (entry is None or (entry.value != value and entry.revision > since)):
                del self._stored[key]

    async def close(self) -> None:
        """Remove all entries except the permanent ones."""
        if self._keep_task is not None:
            self._keep_task.cancel()
            await asyncio.gather(self._keep_task, return_exceptions=True)
            self._keep_task = None
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def _keep(self) -> None:
        """Take one turn of the background task: publish again if the session is lost or an entry could not be
        written."""
        try:
            if self._session is None or not await self._stays(self._session):
                await self._publish_all()
            self._health.note_success()
        except KVStoreError as error:
            pause_s = self._health.note_failure(error)
            await asyncio.sleep(max(pause_s, self._ttl_s / 2) if isinstance(error, KeyTaken) else pause_s)

    async def _stays(self, session: Session) -> bool:
        """Wait until the session ends. Returns False if it has ended, or an entry is not written."""
        if self._complete:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await session.lost.wait()
        return session.alive and self._complete

    @property
    def _complete(self) -> bool:
        """Whether all entries are stored, as far as this process knows."""
        return all(self._stored.get(key, (None, 0))[0] == value for key, value in self._entries.items())

    async def _publish_all(self) -> None:
        if self._session is None or not self._session.alive:
            if self._session is not None:
                await self._session.close()
                self._session = None
            try:
                self._session = await self._catalog.open_session(self._ttl_s, self._session_health)
            except KVStoreError as error:
                self._session_health.note_failure(error)
                raise
            self._session_health.note_success()
            self._writes = {key: values[-1:] for key, values in self._writes.items()}
            self._stored.clear()
        for key, value in self._permanent.items():
            with contextlib.suppress(KeyTaken):
                await self._catalog.publish(key, value, only_if=0)
        for key in self._entries:
            await self._publish(key, self._session)

    async def _publish(self, key: str, session: Session) -> None:
        value = self._entries[key]
        mine = self._writes.setdefault(key, [])
        self._stored.pop(key, None)
        entry = await self._catalog.get(key)
        if entry is not None and entry.value not in mine:
            raise KeyTaken(key, entry)
        if entry is not None and (entry.session, entry.value) == (session.id, value):
            self._stored[key] = value, entry.revision
            return
        mine.append(value)
        del mine[:-2]
        try:
            revision = await self._catalog.publish(key, value, session, only_if=entry.revision if entry else 0)
        except SessionLost:
            session.lost.set()
            raise
        except KeyTaken as error:
            # An earlier try may have succeeded without an answer in time; the next turn sees whether the entry is ours.
            if error.entry is None or error.entry.value != value:
                raise
        else:
            self._stored[key] = value, revision


async def elect(catalog: Catalog, key: str, value: bytes, session: Session, health: TaskHealth | None = None) -> int:
    """Wait until this process leads: until ``key`` is written under ``session``.

    The process leads while ``session.alive`` is True. Check it before each act as a leader: it becomes False before
    another process can win. Returns the revision of the election, which grows from leader to leader and can fence off
    old ones.

    Raises:
        SessionLost: the session ended before this process won.
    """
    async with aclosing(catalog.watch(key)) as updates:
        async for update in updates:
            is_taken = key not in update.removals and any(each.key == key for each in update.entries)
            if is_taken and not any(each.session == session.id for each in update.entries if each.key == key):
                continue
            if not (update.whole or key in update.removals):
                continue
            try:
                return await catalog.publish(key, value, session, only_if=0)
            except KeyTaken as error:
                if error.entry is not None and error.entry.session == session.id:
                    return error.entry.revision
    raise AssertionError("a watch has no end")


START_S: Final = 20.0
STOP_S: Final = 8.0
LEAD_LOOK_S: Final = 0.25
TASKS: Final = ("watch", "session", "presence")
ELECTION_TASKS: Final = ("election", "election_watch")

log = logging.getLogger("kvstore.cluster")


class Membership:
    """A daemon's membership, from ``start`` to ``stop``. It has a thread with an event loop; any thread may call the
    methods.

    While the catalog is not reachable, a daemon continues with the members that it knows. Once the catalog is
    reachable, the daemon publishes itself again. Each of its tasks is tried again after any error, see ``TaskHealth``:
    ``watch`` follows the members, ``session`` renews our session, ``presence`` keeps our entries published,
    ``election`` takes part in the election of a leader, and ``election_watch`` waits until the current leader is gone.

    Raises:
        InvalidRequest: the catalog's URL is not valid.
    """

    def __init__(self, config: ClusterConfig) -> None:
        check_url(config.catalog)
        self._config = config
        self._on_change: Callable[[], None] = lambda: None
        self._members: dict[str, Entry] = {}  # replaced, never changed in place, because readers take no lock
        self._revision = 0  # the catalog's revision that ``_members`` is from
        self._values: dict[type[Any], _Values] = {}
        self._secret: bytes | None = None
        self._on_final: Callable[[VersionMismatch], None] = lambda error: None
        self._ended = False
        self._health = {name: self._new_health(name) for name in TASKS}
        self._catalog: Catalog | None = None
        self._presence: Presence | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="catalog", daemon=True)
        self._watch_task: asyncio.Task[None] | None = None
        self._election: asyncio.Task[None] | None = None
        self._lead: tuple[Session, int] | None = None  # while we lead: the session, and the revision of the election

    def start(
        self,
        mine: schema.AnyEntry,
        on_change: Callable[[], None] = lambda: None,
        former: bytes = b"",
        former_name: str = "",
        on_final: Callable[[VersionMismatch], None] = lambda error: None,
    ) -> None:
        """Publish ``mine``, and wait until all other members are known.

        Args:
            on_change: called in Membership's thread whenever a node or engine joins, changes or leaves. It must not
                wait.
            former: the entry of the process before us, if that process is known to be dead. Our entry replaces it at
                once.
            former_name: the name of an entry of the same kind whose process is known to be dead. It is removed at once.
            on_final: called in Membership's thread when an error ends membership for good, such as a catalog of another
                version. It has to end the daemon.

        Raises:
            NodeBusy: another live process has that name.
            Unavailable: the catalog is not responding. The message says what to do.
            InvalidRequest: a setting of the catalog is invalid. The message names it.
        """
        config = self._config
        self._on_change, self._on_final = on_change, on_final
        self._catalog = to_catalog(config.catalog, config)
        self._thread.start()
        try:
            former_key = schema.key_of(config.pool, replace(mine, name=former_name)) if former_name else ""
            self._do(self._start(self._catalog, mine, former, former_key), START_S)
        except BaseException:
            self.stop()
            raise
        logs.event(log, logging.INFO, "joined", catalog=self._catalog.url, pool=config.pool, members=len(self._members))

    def update(self, mine: schema.AnyEntry) -> None:
        """Publish a new value of ``mine`` under the same name, as soon as the catalog is reachable. Does not wait."""
        if self._presence is not None:
            work = self._presence.update(schema.key_of(self._config.pool, mine), schema.encode(mine))
            asyncio.run_coroutine_threadsafe(work, self._loop)

    def lead(self, name: str) -> None:
        """From now on, take part in the election of the pool's leader. ``leading`` says whether this process won."""
        catalog = self._catalog
        assert catalog is not None, "it is started"
        self._health = {**self._health, **{task: self._new_health(task) for task in ELECTION_TASKS}}

        def begin() -> None:
            work = task_loop("membership/election", lambda: self._lead_once(catalog, name.encode()))
            self._election = self._loop.create_task(work, name="catalog election")

        self._loop.call_soon_threadsafe(begin)

    @property
    def leading(self) -> int | None:
        """The revision of our election while this process leads the pool; None if another process may lead.

        Revisions grow from leader to leader. So the receiver of an order can refuse it if it has seen a later leader.
        """
        lead = self._lead
        return lead[1] if lead is not None and lead[0].alive else None

    def stop(self) -> None:
        """Leave the pool. Other members notice at once."""
        if self._thread.ident is None or self._loop.is_closed():
            return
        with contextlib.suppress(DeadlineExceeded):
            self._do(self._stop(), STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)

    @property
    def published(self) -> bool:
        """Whether other members can see this process now, as far as it can know."""
        return self._presence is not None and self._presence.published

    @property
    def heard_s(self) -> float:
        """When the watch last gave a sign of life, by ``boot_s``; 0 if never. Everything that this object knows is at
        least as recent."""
        return self._health["watch"].succeeded_s

    def status(self) -> dict[str, Any]:
        """Return, for each task, how long ago it last succeeded and why it fails, and ``fault``. Empty before
        ``start``."""
        tasks = {each.name: each.status() for each in self._health.values()}
        return {**tasks, "fault": self.fault()} if self._presence is not None else {}

    def ages(self) -> list[tuple[str, float, int]]:
        """For metrics: each task, the seconds since it last succeeded, and its failures."""
        return [(each.name, boot_s() - each.succeeded_s, each.failures) for each in self._health.values()]

    def fault(self) -> str:
        """Return the tasks that have failed for longer than ``catalog_ttl_s``, and why; "" if there are none."""
        faults = (each.fault(self._config.catalog_ttl_s) for each in self._health.values())
        return "; ".join(f"membership: {each}" for each in faults if each)

    def nodes(self) -> list[NodeEntry]:
        """Return the nodes of the pool, including this one, by name."""
        return self._below(NodeEntry).by_name

    def node(self, name: str) -> NodeEntry | None:
        """Return a node of the pool, or None."""
        return self._below(NodeEntry).named.get(name)

    @property
    def secret(self) -> bytes | None:
        """The pool's secret; None if it is not known yet."""
        return self._secret

    def engines(self) -> list[EngineEntry]:
        """Return the engines of the pool, including this one, by name."""
        return self._below(EngineEntry).by_name

    def clusters(self) -> list[ClusterEntry]:
        """Conductors of other pools whose engines compute prompts for this one, by name."""
        return self._below(ClusterEntry).by_name

    def data_servers(self) -> list[DataEntry]:
        """Data servers of the pool, in the order in which they were published."""
        return self._below(DataEntry).by_revision

    def _below(self, kind: type[Any]) -> _Values:
        """Return the members of one kind. Only entries that changed since the last call are decoded, because some
        callers ask for every message."""
        members, last = self._members, self._values.get(kind)
        if last is None or last.members is not members:
            start = schema.folder(self._config.pool, kind)
            entries = [entry for key, entry in members.items() if key.startswith(start)]
            last = self._values[kind] = _Values.of(kind, members, entries, last)
        return last

    async def _start(self, catalog: Catalog, mine: schema.AnyEntry, former: bytes, former_key: str) -> None:
        await catalog.start()
        ours = self._health["presence"], self._health["session"]
        self._presence = Presence(catalog, self._config.catalog_ttl_s, *ours)
        pool = self._config.pool
        permanent = (
            {} if isinstance(mine, EngineEntry | ClusterEntry) else {schema.secret_key(pool): schema.new_secret()}
        )
        await self._presence.start({schema.key_of(pool, mine): schema.encode(mine)}, former, permanent, former_key)
        first = asyncio.Event()
        watch = task_loop("membership/watch", lambda: self._watch(catalog, first))
        self._watch_task = asyncio.create_task(watch, name="catalog watch")
        await first.wait()

    async def _lead_once(self, catalog: Catalog, value: bytes) -> None:
        """Wait until this process leads, then until it loses the session."""
        health, session = self._health["election"], None
        try:
            session = await catalog.open_session(self._config.catalog_ttl_s, health)
            key = schema.leader_key(self._config.pool)
            won = asyncio.ensure_future(elect(catalog, key, value, session, self._health["election_watch"]))
            try:
                while not won.done() and session.alive:
                    await asyncio.wait((won,), timeout=LEAD_LOOK_S)
                if won.done():
                    revision = won.result()
                    self._lead = session, revision
                    while session.alive and not self._lost_lead(key, revision):
                        await asyncio.sleep(LEAD_LOOK_S)
            finally:
                won.cancel()
        except KVStoreError as error:
            await asyncio.sleep(health.note_failure(error))
        finally:
            self._lead = None
            if session is not None:
                await session.close()

    def _lost_lead(self, key: str, revision: int) -> bool:
        """Return whether the entry that we wrote at ``revision`` was deleted while our session is alive."""
        entry = self._members.get(key)
        return self._revision > revision and (entry is None or entry.revision != revision)

    async def _stop(self) -> None:
        for task in (self._watch_task, self._election):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._presence is not None:
            await self._presence.close()
        if self._catalog is not None:
            await self._catalog.close()

    async def _watch(self, catalog: Catalog, first: asyncio.Event) -> None:
        prefix = schema.prefix(self._config.pool)
        async with aclosing(catalog.watch(prefix, self._health["watch"])) as updates:
            async for update in updates:
                members = {} if update.whole else dict(self._members)
                for key in update.removals:
                    members.pop(key, None)
                members.update({each.key: each for each in update.entries})
                self._members, self._revision = members, update.revision
                if self._presence is not None:
                    self._presence.look(members, update.revision, update.whole)
                self._learn_secret(members.get(schema.secret_key(self._config.pool)))
                first.set()
                self._on_change()

    def _learn_secret(self, entry: Entry | None) -> None:
        """Read the pool's secret from its entry. If the catalog is ever recreated without it, publish it again."""
        secret = schema.decode_secret(entry.value) if entry is not None else None
        if secret is not None and entry is not None and self._presence is not None:
            self._secret = secret
            self._presence.keep(entry.key, entry.value)

    def _new_health(self, name: str) -> TaskHealth:
        return TaskHealth(name, on_final=self._end)

    def _end(self, error: VersionMismatch) -> None:
        if not self._ended:
            self._ended = True
            log.critical("membership cannot go on: %s", error)
            self._on_final(error)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            reasons = "".join(f"; {each.name}: {each.error}" for each in self._health.values() if each.error)
            raise DeadlineExceeded(f"{self._config.catalog}: no answer in {timeout_s:g} s{reasons}") from None


@dataclass(frozen=True)
class _Values:
    """The valid entries of one kind, decoded.

    Attributes:
        members: the entries of all kinds that these were taken from.
        decoded: key -> entry and its value; None if the entry is invalid.
        by_name, by_revision: the values in these orders. A list stays the same object until one of its values changes.
        named: name -> value.
    """

    members: dict[str, Entry]
    decoded: dict[str, tuple[Entry, Any]]
    by_name: list[Any]
    by_revision: list[Any]
    named: dict[str, Any]

    @classmethod
    def of(cls, kind: type[Any], members: dict[str, Entry], entries: list[Entry], last: _Values | None) -> _Values:
        """Return the values of ``entries``. Those that ``last`` has are not decoded again."""
        before = last.decoded if last is not None else {}
        if last is not None and len(before) == len(entries) and all(before.get(e.key, _NEVER)[0] is e for e in entries):
            return replace(last, members=members)
        decoded: dict[str, tuple[Entry, Any]] = {}
        for entry in sorted(entries, key=lambda each: each.key):
            last_entry, value = before.get(entry.key, _NEVER)
            decoded[entry.key] = entry, value if last_entry is entry else schema.decode(kind, entry)
        valid = [(entry, value) for entry, value in decoded.values() if value is not None]
        by_revision = [value for _, value in sorted(valid, key=lambda each: each[0].revision)]
        values = [value for _, value in valid]
        return cls(members, decoded, values, by_revision, {value.name: value for value in values})


_NEVER: Final[tuple[Entry | None, Any]] = None, None


def host() -> str:
    """This machine's name in its entries."""
    return socket.gethostname()[:255]


def machine() -> str:
    """Return the id of this machine's running kernel, for ``NodeEntry.machine``."""
    return boot_id().hex()


def reachable(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of a server, without those that only this machine can use.

    Raises:
        InvalidRequest: an address is a wildcard. A peer on another machine would connect to itself.
    """
    remote = tuple(each for each in addresses if not each.startswith("unix:"))
    for each in remote:
        if each.rpartition(":")[0] in ("0.0.0.0", "[::]"):
            raise InvalidRequest("listen", f"must be an address that other members of the pool can reach (got {each})")
    return remote
