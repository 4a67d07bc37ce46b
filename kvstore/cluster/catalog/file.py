"""FileCatalog: a catalog for several daemons on one machine, in a folder. It needs no server, no root and no etcd.

The folder holds a SQLite database and one locked file per session. A session ends when its time is up, or at once when
its process dies and its lock becomes free. Times count from the machine's start, so changes of the wall clock do not
end a session. A restart of the machine ends all sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
import stat
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from kvstore.cluster.catalog.base import (
    CALL_S,
    LISTING_MAX,
    Catalog,
    Entry,
    KeyTaken,
    Session,
    SessionLost,
    Update,
    boot_s,
    check_key,
    check_ttl_s,
    check_value,
)
from kvstore.cluster.catalog.task_health import TaskHealth
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable, VersionMismatch

T = TypeVar("T")

FORMAT: Final = 1
LOG_MAX: Final = 4096  # changes by which a watch can lag before it gets everything again
POLL_S: Final = 0.1
LOOK_S: Final = 1.0  # longest pause between two reads of a watch, its signs of life
LOCKS_EVERY: Final = 5  # polls between two checks for dead processes
BUSY_S: Final = 4.0  # how long to wait for another writer; less than CALL_S

_TABLES = """
CREATE TABLE about(format INTEGER NOT NULL, revision INTEGER NOT NULL, boot TEXT NOT NULL);
CREATE TABLE entries(key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL, session INTEGER NOT NULL)
    WITHOUT ROWID;
CREATE TABLE changes(revision INTEGER PRIMARY KEY, key TEXT NOT NULL);
CREATE TABLE sessions(id INTEGER PRIMARY KEY AUTOINCREMENT, ends_s REAL NOT NULL, ttl_s REAL NOT NULL);
"""


class FileCatalog(Catalog):
    """A catalog in folder ``path``, which is made with mode 0700 if it does not exist.

    Raises:
        InvalidRequest: the path is not a folder, is a link, belongs to another user, or is writable by other users
            (from ``start``).
    """

    def __init__(self, path: Path) -> None:
        self.url = f"file:{path}"
        self._database = _Database(path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-catalog")
        self._free = asyncio.Lock()  # one call at a time, so that no calls queue behind one that hangs
        self._bell = asyncio.Event()
        self._poller: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """See ``Catalog.start``."""
        await self._call(self._database.open)
        self._poller = asyncio.create_task(self._poll_always(), name="catalog file poll")

    async def close(self) -> None:
        """See ``Catalog.close``."""
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
            self._poller = None
            with contextlib.suppress(KVStoreError):
                await self._call(self._database.close)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def listing(self, prefix: str) -> Update:
        """See ``Catalog.listing``."""
        return await self._call(lambda: self._database.listing(prefix))

    async def publish(self, key: str, value: bytes, session: Session | None = None, only_if: int | None = None) -> int:
        """See ``Catalog.publish``."""
        check_key(key), check_value(value)
        if session is not None and session.lost.is_set():
            raise SessionLost(f"session {session.id:x} has ended")
        revision = await self._call(lambda: self._database.publish(key, value, session.id if session else 0, only_if))
        self._ring()
        return revision

    async def retract(self, key: str, only_if: int | None = None) -> bool:
        """See ``Catalog.retract``."""
        check_key(key)
        was_removed = await self._call(lambda: self._database.retract(key, only_if))
        self._ring()
        return was_removed

    async def watch(self, prefix: str, health: TaskHealth | None = None) -> AsyncGenerator[Update, None]:
        """See ``Catalog.watch``."""
        health = health or TaskHealth("watch")
        since, opening = 0, 0
        while True:
            bell = self._bell
            try:
                opening, update = await self._call(partial(self._database.changes, prefix, since, opening))
            except KVStoreError as error:
                await asyncio.sleep(health.note_failure(error))
                continue
            health.note_success()
            since = update.revision
            if update.whole or update.entries or update.removals:
                yield update
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await bell.wait()

    async def open_session(self, ttl_s: float, health: TaskHealth | None = None) -> Session:
        """See ``Catalog.open_session``."""
        check_ttl_s(ttl_s)
        started_s = boot_s()
        session_id, lock = await self._call(lambda: self._database.open_session(ttl_s))
        session = _FileSession(self, session_id, ttl_s, started_s, lock)
        session.start(health or TaskHealth("session"))
        return session

    async def _poll_always(self) -> None:
        """Ring the bell when another process has changed something, and end sessions whose process died. Errors are
        ignored here, because a watch reports the same errors."""
        last_version, polls = -1, 0
        while True:
            polls += 1
            look_at_locks = polls % LOCKS_EVERY == 0
            with contextlib.suppress(KVStoreError):
                version = await self._call(partial(self._database.version, look_at_locks))
                if version != last_version:
                    last_version = version
                    self._ring()
            await asyncio.sleep(POLL_S)

    async def _call(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the database's thread, for at most ``CALL_S``."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CALL_S):
                await self._free.acquire()
                future = loop.run_in_executor(self._thread, work)
                future.add_done_callback(lambda _: self._free.release())
                return await asyncio.shield(future)
        except TimeoutError:
            raise Unavailable(f"{self.url}: no answer in {CALL_S:g} s") from None
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise Unavailable(f"{self.url}: {error}") from error
            self._database.damaged = True
            raise InvalidRequest(
                "catalog", f"{self.url} is damaged: {error}. Move it away; nodes publish again"
            ) from error
        except OSError as error:
            raise Unavailable(f"{self.url}: {error}") from error

    def _ring(self) -> None:
        bell, self._bell = self._bell, asyncio.Event()
        bell.set()


class _FileSession(Session):
    def __init__(self, catalog: FileCatalog, session_id: int, ttl_s: float, started_s: float, lock: int) -> None:
        super().__init__(session_id, ttl_s, started_s)
        self._catalog = catalog
        self._lock = lock

    async def close(self) -> None:
        """See ``Catalog.close``."""
        await super().close()
        os.close(self._lock)

    async def _renew(self) -> bool:
        return await self._catalog._call(lambda: self._catalog._database.renew(self.id))

    async def _end(self) -> None:
        await self._catalog._call(lambda: self._catalog._database.end(self.id))
        self._catalog._ring()


class _Database:
    """The folder. Used by one thread. Every call is one transaction, and begins by ending expired sessions.

    If the database is damaged or was moved away, the next call opens it again. It uses a new folder in the old one's
    place, or makes one, and the other processes use this folder too.

    Attributes:
        damaged: whether SQLite reported damage.
        openings: how often the database was opened. Revisions of different openings cannot be compared.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path / "catalog.sqlite"
        self._sql: sqlite3.Connection | None = None
        self._open_file: os.stat_result | None = None  # the file that ``_sql`` has open
        self.damaged = False
        self.openings = 0

    def open(self) -> None:
        check_folder(self._path)
        file = self._file
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        (self._path / "sessions").mkdir(mode=0o700, exist_ok=True)
        # One thread uses the connection, but another thread may close it at the end.
        sql = sqlite3.connect(file, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            sql.execute("PRAGMA journal_mode=WAL")
            sql.execute("PRAGMA synchronous=FULL")
            self._check(sql)
        except BaseException:
            sql.close()
            raise
        self._sql, self._open_file, self.damaged = sql, os.stat(file), False
        self.openings += 1

    def _check(self, sql: sqlite3.Connection) -> None:
        """Make the tables if there are none, refuse those from another version, and end the sessions of an earlier
        boot."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        with _Transaction(sql):
            if not sql.execute("SELECT 1 FROM sqlite_master WHERE name='about'").fetchone():
                for statement in filter(str.strip, _TABLES.split(";")):
                    sql.execute(statement)
                sql.execute("INSERT INTO about VALUES(?,1,?)", (FORMAT, boot))
            file_format, last_boot = sql.execute("SELECT format,boot FROM about").fetchone()
            if file_format != FORMAT:
                raise VersionMismatch(
                    f"{self._path} has catalog format {file_format}, this version reads format {FORMAT}"
                )
            if last_boot != boot:
                for (session,) in sql.execute("SELECT id FROM sessions").fetchall():
                    self._end(sql, session)
                sql.execute("UPDATE about SET boot=?", (boot,))

    def close(self) -> None:
        self._shut()
        self._open_file = None

    def listing(self, prefix: str) -> Update:
        with self._begin() as sql:
            return Update(self._revision(sql), self._entries(sql, prefix), whole=True)

    def publish(self, key: str, value: bytes, session: int, only_if: int | None) -> int:
        with self._begin() as sql:
            if session and not sql.execute("SELECT 1 FROM sessions WHERE id=?", (session,)).fetchone():
                raise SessionLost(f"session {session:x} has ended")
            row = sql.execute("SELECT key,value,revision,session FROM entries WHERE key=?", (key,)).fetchone()
            entry = Entry(*row) if row else None
            if only_if is not None and only_if != (entry.revision if entry else 0):
                raise KeyTaken(key, entry)
            if entry is None and sql.execute("SELECT COUNT(*) FROM entries").fetchone()[0] >= LISTING_MAX:
                raise Unavailable(f"{self._path} has at most {LISTING_MAX} entries")
            revision = self._note_change(sql, key)
            sql.execute("INSERT OR REPLACE INTO entries VALUES(?,?,?,?)", (key, value, revision, session))
            return revision

    def retract(self, key: str, only_if: int | None) -> bool:
        with self._begin() as sql:
            row = sql.execute("SELECT revision FROM entries WHERE key=?", (key,)).fetchone()
            if row is None or only_if not in (None, row[0]):
                return False
            sql.execute("DELETE FROM entries WHERE key=?", (key,))
            self._note_change(sql, key)
            return True

    def changes(self, prefix: str, since: int, opening: int) -> tuple[int, Update]:
        """Return the current opening, and the changes under ``prefix`` since revision ``since`` of ``opening``. Returns
        everything if those changes are no longer known."""
        with self._begin() as sql:
            revision = self._revision(sql)
            oldest = sql.execute("SELECT MIN(revision) FROM changes").fetchone()[0] or revision + 1
            if opening != self.openings or since > revision or (since + 1 < oldest and since < revision):
                return self.openings, Update(revision, self._entries(sql, prefix), whole=True)
            low, high = prefix, prefix + chr(0x10FFFF)
            keys = {
                key
                for (key,) in sql.execute(
                    "SELECT DISTINCT key FROM changes WHERE revision>? AND key>=? AND key<?", (since, low, high)
                )
            }
            entries = [each for each in self._entries(sql, prefix) if each.key in keys]
            entries.sort(key=lambda each: each.revision)
            removals = tuple(sorted(keys - {each.key for each in entries}))
            return self.openings, Update(revision, tuple(entries), removals)

    def open_session(self, ttl_s: float) -> tuple[int, int]:
        """Open a session. Returns its id, and a descriptor that holds its lock. Also ends sessions of dead processes,
        so that their names are free."""
        with self._begin() as sql:
            for dead in self._dead(sql):
                self._end(sql, dead)
            sql.execute("INSERT INTO sessions(ends_s,ttl_s) VALUES(?,?)", (boot_s() + ttl_s, ttl_s))
            session = int(sql.execute("SELECT last_insert_rowid()").fetchone()[0])
            lock = os.open(self._lock_file(session), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return session, lock

    def renew(self, session: int) -> bool:
        with self._begin() as sql:
            result = sql.execute("UPDATE sessions SET ends_s=?+ttl_s WHERE id=?", (boot_s(), session))
            return result.rowcount == 1

    def end(self, session: int) -> None:
        with self._begin() as sql:
            self._end(sql, session)

    def version(self, look_at_locks: bool) -> int:
        """Return a number that changes with every commit of another process. Also ends expired sessions and, with
        ``look_at_locks``, sessions of dead processes."""
        sql = self._connection()
        expired = sql.execute("SELECT 1 FROM sessions WHERE ends_s<=? LIMIT 1", (boot_s(),)).fetchone()
        dead = self._dead(sql) if look_at_locks else []
        if expired or dead:
            with self._begin():
                for session in dead:
                    self._end(sql, session)
            return -2  # our own commit does not change the pragma
        return int(sql.execute("PRAGMA data_version").fetchone()[0])

    def _dead(self, sql: sqlite3.Connection) -> list[int]:
        """Sessions whose lock is free."""
        dead = []
        for (session,) in sql.execute("SELECT id FROM sessions").fetchall():
            try:
                lock = os.open(self._lock_file(session), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                dead.append(session)
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                dead.append(session)
            except BlockingIOError:
                pass
            finally:
                os.close(lock)
        return dead

    def _begin(self) -> _Transaction:
        """Return a transaction for writing, which first ends expired sessions."""
        transaction = _Transaction(self._connection())
        transaction.on_begin = self._end_expired
        return transaction

    def _end_expired(self, sql: sqlite3.Connection) -> None:
        for (session,) in sql.execute("SELECT id FROM sessions WHERE ends_s<=?", (boot_s(),)).fetchall():
            self._end(sql, session)

    def _end(self, sql: sqlite3.Connection, session: int) -> None:
        for (key,) in sql.execute("SELECT key FROM entries WHERE session=?", (session,)).fetchall():
            sql.execute("DELETE FROM entries WHERE key=?", (key,))
            self._note_change(sql, key)
        sql.execute("DELETE FROM sessions WHERE id=?", (session,))
        self._lock_file(session).unlink(missing_ok=True)

    def _note_change(self, sql: sqlite3.Connection, key: str) -> int:
        sql.execute("UPDATE about SET revision=revision+1")
        revision = self._revision(sql)
        sql.execute("INSERT INTO changes VALUES(?,?)", (revision, key))
        sql.execute("DELETE FROM changes WHERE revision<=?", (revision - LOG_MAX,))
        return revision

    def _revision(self, sql: sqlite3.Connection) -> int:
        return int(sql.execute("SELECT revision FROM about").fetchone()[0])

    def _entries(self, sql: sqlite3.Connection, prefix: str) -> tuple[Entry, ...]:
        rows = sql.execute(
            "SELECT key,value,revision,session FROM entries WHERE key>=? AND key<? ORDER BY key",
            (prefix, prefix + chr(0x10FFFF)),
        )
        return tuple(Entry(*row) for row in rows)

    def _lock_file(self, session: int) -> Path:
        return self._path / "sessions" / f"{session}"

    def _connection(self) -> sqlite3.Connection:
        if self._open_file is None:
            raise Unavailable(f"{self._path} is not open")
        if self._sql is None or self.damaged or not self._is_current():
            self._shut()
            self.open()
        assert self._sql is not None
        return self._sql

    def _is_current(self) -> bool:
        """Return whether the path still leads to the file that is open."""
        try:
            return self._open_file is not None and os.path.samestat(self._open_file, os.stat(self._file))
        except OSError:
            return False

    def _shut(self) -> None:
        if self._sql is not None:
            self._sql.close()
            self._sql = None


class _Transaction:
    """BEGIN IMMEDIATE to COMMIT, or ROLLBACK if the body raises."""

    def __init__(self, sql: sqlite3.Connection) -> None:
        self._sql = sql
        self.on_begin: Callable[[sqlite3.Connection], None] | None = None

    def __enter__(self) -> sqlite3.Connection:
        self._sql.execute("BEGIN IMMEDIATE")
        if self.on_begin is not None:
            self.on_begin(self._sql)
        return self._sql

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._sql.execute("COMMIT" if kind is None else "ROLLBACK")


def check_folder(path: Path) -> None:
    """Make the folder, or check that only this user can write to it.

    Raises:
        InvalidRequest: it is not a folder, is a link, belongs to another user, or is writable by other users.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise InvalidRequest("catalog", f"file:{path}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise InvalidRequest("catalog", f"file:{path} is not a folder")
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise InvalidRequest("catalog", f"file:{path} belongs to another user, or other users may write into it")
