"""What every catalog does, whatever keeps it: in memory, in a file, in a real etcd."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import TypeAlias

import pytest

from kvstore.cluster.catalog.base import KEY_BYTES_MAX, VALUE_BYTES_MAX, Catalog, Entry, KeyTaken, SessionLost, Update
from kvstore.cluster.catalog.etcd import EtcdCatalog
from kvstore.cluster.catalog.file import FileCatalog
from kvstore.cluster.catalog.memory import Hub, MemoryCatalog
from kvstore.cluster.catalog.task_health import TaskHealth
from kvstore.cluster.membership import Presence, elect
from kvstore.errors import InvalidRequest, NodeBusy
from tests.helpers.etcd import WAIT_S, told
from tests.helpers.loops import run

Open: TypeAlias = Callable[[], Catalog]
_roots = itertools.count()


@pytest.fixture(params=["memory", "file", "etcd"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Makes catalogs of one cluster."""
    if request.param == "memory":
        hubs: list[Hub] = []

        def memory() -> Catalog:
            if not hubs:
                hubs.append(Hub())
            return MemoryCatalog(hubs[0])

        return memory
    if request.param == "file":
        return lambda: FileCatalog(tmp_path / "catalog")
    endpoints = request.getfixturevalue("etcd").endpoints
    return lambda: EtcdCatalog(endpoints)


@pytest.fixture
def root() -> str:
    """A prefix that no other test uses: they share one etcd."""
    return f"/test/{os.getpid()}-{next(_roots)}/"


def test_what_is_published_is_found(connect: Open, root: str) -> None:
    async def test() -> None:
        async with connect() as ours, connect() as theirs:
            first = await ours.publish(root + "a", b"1")
            second = await theirs.publish(root + "b", b"2")
            again = await ours.publish(root + "a", b"3")
            assert first < second < again
            assert await theirs.get(root + "a") == Entry(root + "a", b"3", again)
            listing = await theirs.listing(root)
            assert [each.key for each in listing.entries] == [root + "a", root + "b"] and listing.whole
            assert listing.revision >= again
            assert await theirs.get(root + "c") is None and await theirs.get(root) is None
            assert await theirs.retract(root + "a") and not await theirs.retract(root + "a")
            assert await ours.get(root + "a") is None

    run(test)


def test_a_condition_that_does_not_hold_changes_nothing(connect: Open, root: str) -> None:
    async def test() -> None:
        async with connect() as ours, connect() as theirs:
            first = await ours.publish(root + "a", b"1", only_if=0)
            with pytest.raises(KeyTaken) as taken:
                await theirs.publish(root + "a", b"2", only_if=0)
            assert taken.value.entry == Entry(root + "a", b"1", first)
            second = await theirs.publish(root + "a", b"2", only_if=first)
            with pytest.raises(KeyTaken):
                await ours.publish(root + "a", b"3", only_if=first)
            with pytest.raises(KeyTaken) as taken:
                await ours.publish(root + "b", b"3", only_if=first)
            assert taken.value.entry is None
            assert not await ours.retract(root + "a", only_if=first)
            assert [each.value for each in (await ours.listing(root)).entries] == [b"2"]
            assert await ours.retract(root + "a", only_if=second)

    run(test)


def test_bad_input_names_its_field(connect: Open, root: str) -> None:
    async def test() -> None:
        async with connect() as catalog:
            for key in ("", "no/slash", "/" + "x" * KEY_BYTES_MAX, "/a\0b"):
                with pytest.raises(InvalidRequest, match="key"):
                    await catalog.publish(key, b"")
            with pytest.raises(InvalidRequest, match="value"):
                await catalog.publish(root + "a", bytes(VALUE_BYTES_MAX + 1))
            for ttl_s in (0.0, -1.0, float("nan"), 1e9):
                with pytest.raises(InvalidRequest, match="ttl_s"):
                    await catalog.open_session(ttl_s)
            assert not (await catalog.listing(root)).entries
            await catalog.publish(root + "a", bytes(VALUE_BYTES_MAX))

    run(test)


def test_a_session_keeps_its_entries_and_takes_them_along(connect: Open, root: str) -> None:
    async def test() -> None:
        async with connect() as ours, connect() as theirs:
            session = await ours.open_session(1.0)
            await ours.publish(root + "a", b"1", session)
            await ours.publish(root + "b", b"2")
            assert (await theirs.get(root + "a")).session == session.id  # type: ignore[union-attr]
            await asyncio.sleep(2.5 * session.ttl_s)
            assert session.alive and await theirs.get(root + "a"), "renewed in the background"
            await session.close()
            assert not session.alive and session.lost.is_set()
            assert [each.key for each in (await theirs.listing(root)).entries] == [root + "b"]
            with pytest.raises(SessionLost):
                await ours.publish(root + "c", b"3", session)
            assert await theirs.get(root + "c") is None

    run(test)


def test_a_successor_removes_the_entry_of_a_dead_process_at_once(connect: Open, root: str) -> None:
    """Under another name; a session of a dead process that nobody replaced ends after its time."""

    async def test() -> None:
        async with connect() as theirs, connect() as ours:
            session = await theirs.open_session(3600.0)
            await theirs.publish(root + "dead", b"1", session)
            presence = Presence(ours, 10.0)
            await presence.start({root + "next": b"2"}, former_key=root + "dead")
            assert [each.key for each in (await ours.listing(root)).entries] == [root + "next"]
            await presence.close()

    run(test)


def test_a_session_that_is_not_renewed_ends(connect: Open, root: str) -> None:
    async def test() -> None:
        async with connect() as ours, connect() as theirs:
            session = await ours.open_session(1.0)
            await ours.publish(root + "a", b"1", session)
            assert session._renewing is not None
            session._renewing.cancel()  # as a process that was stopped
            async with aclosing(theirs.watch(root)) as updates:
                assert await told(updates, lambda known: root + "a" in known)
                assert not await told(updates, lambda known: not known)
            assert not session.alive, "its owner knows it before anybody else"
            session.start(TaskHealth("session"))
            await asyncio.wait_for(session.lost.wait(), WAIT_S)
            with pytest.raises(SessionLost):
                await ours.publish(root + "a", b"2", session)

    run(test)


def test_a_watch_tells_all_there_is_and_then_each_change(connect: Open, root: str) -> None:
    async def test() -> None:
        async with connect() as ours, connect() as theirs:
            await ours.publish(root + "a", b"1")
            await ours.publish(root[:-1] + "-other/a", b"1")
            async with aclosing(theirs.watch(root)) as updates:
                first = await anext(updates)
                assert first.whole and [each.key for each in first.entries] == [root + "a"]
                seen = first.revision
                for number in range(20):
                    await ours.publish(root + f"n{number % 3}", b"%d" % number)
                await ours.retract(root + "a")
                known = {root + "a"}
                values: list[bytes] = []
                while root + "a" in known or b"19" not in values:
                    update = await asyncio.wait_for(anext(updates), WAIT_S)
                    assert not update.whole and update.revision > seen
                    seen = update.revision
                    values += [each.value for each in update.entries]
                    known = (known | {each.key for each in update.entries}) - set(update.removals)
                assert values == sorted(values, key=int), "in order"
            async with aclosing(theirs.watch(root + "none/")) as updates:
                assert await anext(updates) == Update((await ours.listing(root)).revision, whole=True)

    run(test)


def test_one_leader_at_a_time(connect: Open, root: str) -> None:
    async def test() -> None:
        async with connect() as catalog:
            leading: list[int] = []
            terms: list[int] = []

            async def candidate(number: int) -> None:
                session = await catalog.open_session(2.0)
                terms.append(await elect(catalog, root + "leader", b"%d" % number, session))
                leading.append(number)
                assert len(leading) == 1 and session.alive
                await asyncio.sleep(0.02)
                leading.remove(number)
                await session.close()

            async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
                for number in range(5):
                    group.create_task(candidate(number))
            assert len(terms) == 5 and terms == sorted(set(terms)), "each win has a larger number"

    run(test)


def test_presence_comes_back_and_the_second_of_a_name_is_refused(connect: Open, root: str) -> None:
    async def test() -> None:
        async with connect() as ours, connect() as theirs:
            presence = Presence(ours, 2.0)
            await presence.start({root + "a": b"mine", root + "b": b"mine"})
            with pytest.raises(NodeBusy, match="another name"):
                await Presence(theirs, 2.0).start({root + "c": b"other", root + "b": b"other"})
            assert [each.value for each in (await theirs.listing(root)).entries] == [b"mine"] * 2
            session = presence._session
            assert session is not None
            await theirs.retract(root + "a")
            async with aclosing(theirs.watch(root)) as updates:
                await presence.update(root + "b", b"changed")
                await told(updates, lambda known: known.get(root + "b") == b"changed")
                await session._end()  # as after an outage of the catalog: it ended, and its owner does not know
                await told(updates, lambda known: not known)
                await told(updates, lambda known: len(known) == 2)
            assert presence.published
            await presence.close()
            assert not (await theirs.listing(root)).entries

    run(test)
