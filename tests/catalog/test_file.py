"""The file catalog between processes: deaths, stops, hostile folders, damage."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import pytest

from kvstore.cluster.catalog.file import FileCatalog
from kvstore.cluster.catalog.task_health import TaskHealth
from kvstore.cluster.membership import Presence
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable, VersionMismatch
from tests.helpers.etcd import told
from tests.helpers.loops import run
from tests.helpers.nursery import ROOT

HOLDER = """
import asyncio, sys
from pathlib import Path
from kvstore.cluster.catalog.file import FileCatalog
async def main():
    async with FileCatalog(Path(sys.argv[1])) as catalog:
        session = await catalog.open_session(float(sys.argv[2]))
        await catalog.publish("/a/other", b"1", session)
        print("ready", flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


@contextmanager
def holder(folder: Path, ttl_s: float) -> Iterator[subprocess.Popen[str]]:
    """Another process with a session and an entry."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), str(ttl_s)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_is_gone_at_once_and_one_that_hangs_after_its_time(end: int, tmp_path: Path) -> None:
    async def test() -> None:
        hangs = end == signal.SIGSTOP
        async with FileCatalog(tmp_path / "c") as catalog, aclosing(catalog.watch("/a/")) as updates:
            with holder(tmp_path / "c", 2.0 if hangs else 3600.0) as process:
                await told(updates, lambda known: "/a/other" in known)
                process.send_signal(end)
                await told(updates, lambda known: not known)
        assert not list((tmp_path / "c" / "sessions").iterdir())

    asyncio.run(test())


def test_entries_without_a_session_outlive_all(tmp_path: Path) -> None:
    async def test() -> None:
        async with FileCatalog(tmp_path / "c") as catalog:
            session = await catalog.open_session(100.0)
            await catalog.publish("/a/wanted", b"1")
            await catalog.publish("/a/live", b"1", session)
        async with FileCatalog(tmp_path / "c") as catalog:
            assert {each.key for each in (await catalog.listing("/a/")).entries} == {"/a/wanted", "/a/live"}
        with sqlite3.connect(tmp_path / "c" / "catalog.sqlite") as database:
            database.execute("UPDATE about SET boot='another'")  # as after a restart of the machine
        async with FileCatalog(tmp_path / "c") as catalog:
            assert {each.key for each in (await catalog.listing("/a/")).entries} == {"/a/wanted"}

    asyncio.run(test())


def test_a_watch_that_is_far_behind_is_told_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.cluster.catalog.file.LOG_MAX", 4)

    async def test() -> None:
        async with FileCatalog(tmp_path / "c") as catalog, aclosing(catalog.watch("/a/")) as updates:
            await anext(updates)
            for number in range(8):
                await catalog.publish(f"/a/{number}", b"")
            await catalog.retract("/a/0")
            update = await anext(updates)
            assert update.whole and [each.key for each in update.entries] == [f"/a/{n}" for n in range(1, 8)]

    asyncio.run(test())


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "file").write_text("")
    for path in (open_to_all, tmp_path / "link", tmp_path / "file", Path("/proc/none")):
        with pytest.raises(InvalidRequest, match="catalog"):
            asyncio.run(FileCatalog(path).start())
    linked = tmp_path / "linked"
    linked.mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (linked / "catalog.sqlite").symlink_to(victim)
    with pytest.raises(Unavailable):
        asyncio.run(FileCatalog(linked).start())
    assert victim.read_text() == "precious"
    assert not list((tmp_path / "elsewhere").iterdir())


def test_damage_and_other_versions_are_named(tmp_path: Path) -> None:
    async def opened(folder: Path) -> None:
        async with FileCatalog(folder):
            pass

    (tmp_path / "damaged").mkdir(mode=0o700)
    (tmp_path / "damaged" / "catalog.sqlite").write_bytes(os.urandom(8192))
    with pytest.raises(InvalidRequest, match="damaged"):
        asyncio.run(opened(tmp_path / "damaged"))
    asyncio.run(opened(tmp_path / "newer"))
    with sqlite3.connect(tmp_path / "newer" / "catalog.sqlite") as database:
        database.execute("UPDATE about SET format=2")
    with pytest.raises(VersionMismatch, match="format 2"):
        asyncio.run(opened(tmp_path / "newer"))


def test_who_holds_the_database_costs_the_others_their_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.cluster.catalog.file.BUSY_S", 0.2)

    async def test() -> None:
        async with FileCatalog(tmp_path / "c") as catalog:
            await catalog.publish("/a/1", b"")
            blocker = sqlite3.connect(tmp_path / "c" / "catalog.sqlite", isolation_level=None)
            blocker.execute("BEGIN IMMEDIATE")
            with pytest.raises(Unavailable, match="locked"):
                await catalog.publish("/a/2", b"")
            blocker.execute("ROLLBACK")
            blocker.close()
            await catalog.publish("/a/3", b"")
            assert [each.key for each in (await catalog.listing("/a/")).entries] == ["/a/1", "/a/3"]

    asyncio.run(test())


def test_members_find_each_other_in_a_folder_that_was_put_in_place_of_theirs(tmp_path: Path) -> None:
    """Moved away, or damaged and then moved away: the next call opens what is there then."""

    async def test() -> None:
        folder = tmp_path / "c"
        async with FileCatalog(folder) as catalog, FileCatalog(folder) as other:
            presence = Presence(catalog, 2.0)
            await presence.start({"/a/n": b"me"})
            async with aclosing(other.watch("/a/")) as updates:
                await told(updates, lambda known: known == {"/a/n": b"me"})
                folder.rename(tmp_path / "away")
                async with FileCatalog(folder) as new:
                    for number in range(8):  # its revisions pass those of before
                        await new.publish(f"/a/{number}", b"")
                await told(updates, lambda known: len(known) == 9 and known["/a/n"] == b"me")
                (folder / "catalog.sqlite-wal").unlink(missing_ok=True)
                (folder / "catalog.sqlite").write_bytes(os.urandom(8192))
                health = TaskHealth("listing")
                while health.error == "":
                    try:
                        await other.listing("/a/")
                        await asyncio.sleep(0.1)
                    except KVStoreError as error:
                        health.note_failure(error)
                folder.rename(tmp_path / "damaged")
                await told(updates, lambda known: known == {"/a/n": b"me"})
            await presence.close()

    run(test)
