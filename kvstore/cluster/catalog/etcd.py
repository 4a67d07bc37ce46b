"""EtcdCatalog: a catalog in etcd v3 (3.4 or later), over the messages of the etcd3 package."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final

import grpc

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
from kvstore.cluster.catalog.etcd_channel import Credentials, EtcdChannel, EtcdRefusal, is_stale_token
from kvstore.cluster.catalog.task_health import TaskHealth
from kvstore.errors import KVStoreError, Unauthenticated, Unavailable

PAGE: Final = 1000  # entries per answer of a listing
# WatchRequest{progress_request: {}}, which the messages of the package do not have. etcd 3.4 and later answers at once.
PROGRESS_REQUEST: Final = b"\x1a\x00"


class EtcdCatalog(Catalog):
    """A catalog over one or more endpoints (``host:port``) of one etcd cluster.

    ``publish`` is one transaction. A try without an answer may have succeeded. If the next try finds our value under
    our own session, that is a success.

    Attributes:
        call_s: how long a call waits for an answer from any endpoint.
    """

    def __init__(
        self, endpoints: Sequence[str], credentials: Credentials | None = None, call_s: float = CALL_S
    ) -> None:
        self.call_s = call_s
        self.url = "etcd://" + ",".join(endpoints)
        self._channel = EtcdChannel(endpoints, credentials or Credentials())
        self._pb = self._channel.messages
        self._cluster = 0  # the id of the etcd cluster that our revisions are from

    async def start(self) -> None:
        """See ``Catalog.start``."""
        self._channel.open()
        try:
            await self.listing("/kvstore-start/")
        except Unavailable as error:
            raise Unavailable(
                f"{self.url}: {error}. Is etcd running there? Without one, --catalog file:PATH serves the daemons of "
                "one machine, and --catalog memory a single daemon"
            ) from error

    async def close(self) -> None:
        """See ``Catalog.close``."""
        await self._channel.close()

    async def listing(self, prefix: str) -> Update:
        """See ``Catalog.listing``."""
        entries: list[Entry] = []
        key, end, revision = prefix.encode(), _end_of(prefix), 0
        while True:
            # All pages have one revision. If that was compacted in the meantime, the listing begins again.
            request = self._pb.RangeRequest(key=key, range_end=end, limit=PAGE, revision=revision)
            try:
                answer = await self._call("KV/Range", request, self._pb.RangeResponse)
            except EtcdRefusal as error:
                if error.code is not grpc.StatusCode.OUT_OF_RANGE:
                    raise
                entries, key, revision = [], prefix.encode(), 0
                continue
            revision, self._cluster = revision or answer.header.revision, answer.header.cluster_id
            entries += [_entry(each) for each in answer.kvs]
            if len(entries) > LISTING_MAX:
                raise Unavailable(f"{self.url} has more than {LISTING_MAX} entries below {prefix}")
            if not answer.more:
                return Update(revision, tuple(entries), whole=True)
            key = bytes(answer.kvs[-1].key) + b"\0"

    async def publish(self, key: str, value: bytes, session: Session | None = None, only_if: int | None = None) -> int:
        """See ``Catalog.publish``."""
        check_key(key), check_value(value)
        if session is not None and session.lost.is_set():
            raise SessionLost(f"session {session.id:x} has ended")
        pb, lease = self._pb, session.id if session else 0
        request = pb.TxnRequest(
            compare=self._condition(key, only_if),
            success=[pb.RequestOp(request_put=pb.PutRequest(key=key.encode(), value=value, lease=lease))],
            failure=[pb.RequestOp(request_range=pb.RangeRequest(key=key.encode()))],
        )
        try:
            answer = await self._call("KV/Txn", request, pb.TxnResponse)
        except EtcdRefusal as error:
            if error.code is grpc.StatusCode.NOT_FOUND:  # of the lease
                raise SessionLost(f"session {lease:x} has ended") from error
            raise
        if answer.succeeded:
            return int(answer.header.revision)
        entries = [_entry(each) for each in answer.responses[0].response_range.kvs]
        entry = entries[0] if entries else None
        if entry is not None and lease and (entry.session, entry.value) == (lease, value):
            return entry.revision
        raise KeyTaken(key, entry)

    async def retract(self, key: str, only_if: int | None = None) -> bool:
        """See ``Catalog.retract``."""
        pb = self._pb
        if only_if is None:  # unlike a transaction, this works even if etcd has no space left
            plain = pb.DeleteRangeRequest(key=check_key(key).encode())
            return bool((await self._call("KV/DeleteRange", plain, pb.DeleteRangeResponse)).deleted)
        request = pb.TxnRequest(
            compare=self._condition(check_key(key), only_if),
            success=[pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key.encode()))],
        )
        answer = await self._call("KV/Txn", request, pb.TxnResponse)
        return bool(answer.succeeded and answer.responses[0].response_delete_range.deleted)

    async def watch(self, prefix: str, health: TaskHealth | None = None) -> AsyncGenerator[Update, None]:
        """See ``Catalog.watch``."""
        health = health or TaskHealth("watch")
        revision: int | None = None
        while True:
            try:
                if revision is None:
                    listing = await self.listing(prefix)
                    revision = listing.revision
                    yield listing
                async with aclosing(self._changes(prefix, revision + 1, health)) as changes:
                    async for update in changes:
                        if update is None:  # etcd no longer has these changes
                            revision = None
                            break
                        revision = update.revision
                        yield update
            except KVStoreError as error:
                await asyncio.sleep(health.note_failure(error))

    async def open_session(self, ttl_s: float, health: TaskHealth | None = None) -> Session:
        """See ``Catalog.open_session``."""
        whole_s = math.ceil(check_ttl_s(ttl_s))
        started_s = boot_s()
        request = self._pb.LeaseGrantRequest(TTL=whole_s)
        answer = await self._call("Lease/LeaseGrant", request, self._pb.LeaseGrantResponse)
        session = _EtcdSession(self, answer.ID, float(answer.TTL), started_s)
        session.start(health or TaskHealth("session"))
        return session

    def _condition(self, key: str, only_if: int | None) -> list[Any]:
        if only_if is None:
            return []
        compare = self._pb.Compare
        return [compare(key=key.encode(), target=compare.MOD, result=compare.EQUAL, mod_revision=only_if)]

    async def _changes(self, prefix: str, revision: int, health: TaskHealth) -> AsyncGenerator[Update | None, None]:
        """Yield changes starting at ``revision``. Yields None if etcd has lost some of them, or is now another cluster
        (recreated, or restored from a backup), whose revisions cannot be compared with ours. Each answer is a sign of
        life. If nothing changes, etcd is asked for one."""
        pb = self._pb
        request = pb.WatchRequest(
            create_request=pb.WatchCreateRequest(
                key=prefix.encode(), range_end=_end_of(prefix), start_revision=revision, progress_notify=True
            )
        )
        stream = self._channel.stream("Watch/Watch", request, pb.WatchResponse, PROGRESS_REQUEST)
        async with aclosing(stream) as answers:
            async for answer in answers:
                header = answer.header
                if answer.compact_revision or header.cluster_id != self._cluster or header.revision < revision - 1:
                    yield None
                    return
                if answer.canceled:
                    raise self._error_of(answer.cancel_reason)
                health.note_success()
                if answer.events:
                    yield _update(answer)

    def _error_of(self, reason: str) -> KVStoreError:
        """Return the error for a watch that etcd cancelled, for example because it does not accept our token."""
        if is_stale_token(reason) or "permission denied" in reason:
            self._channel.forget_token()
            return Unauthenticated(f"etcd refuses a watch: {reason}")
        return Unavailable(f"etcd cancelled a watch: {reason}")

    async def _call(self, method: str, request: Any, answer: type[Any]) -> Any:
        return await self._channel.call(method, request, answer, self.call_s)

    async def _renew(self, session: int) -> bool:
        """Renew with one message in a new stream, so that a dead connection cannot delay it. etcd does not check
        passwords at a renewal, so sessions stay alive while the password is wrong."""
        pb = self._pb
        request = pb.LeaseKeepAliveRequest(ID=session)
        async with aclosing(
            self._channel.stream("Lease/LeaseKeepAlive", request, pb.LeaseKeepAliveResponse, token=False)
        ) as answers:
            async for answer in answers:
                return bool(answer.TTL > 0)
        raise Unavailable("etcd did not renew a session")

    async def _end(self, session: int) -> None:
        request = self._pb.LeaseRevokeRequest(ID=session)
        try:
            await self._call("Lease/LeaseRevoke", request, self._pb.LeaseRevokeResponse)
        except EtcdRefusal as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise


class _EtcdSession(Session):
    def __init__(self, catalog: EtcdCatalog, session_id: int, ttl_s: float, started_s: float) -> None:
        super().__init__(session_id, ttl_s, started_s)
        self._catalog = catalog

    async def _renew(self) -> bool:
        try:
            async with asyncio.timeout(min(2.0, self.ttl_s / 2)):
                return await self._catalog._renew(self.id)
        except TimeoutError:
            self._catalog._channel.next_endpoint(self._catalog._channel.endpoint)
            raise Unavailable(f"{self._catalog.url} did not renew a session in time") from None

    async def _end(self) -> None:
        await self._catalog._end(self.id)


def _update(answer: Any) -> Update:
    """Return the update in one answer of a watch. If one key changed several times, the last change counts."""
    entries: dict[str, Entry] = {}
    removals: dict[str, None] = {}
    for event in answer.events:
        key = event.kv.key.decode(errors="replace")
        entries.pop(key, None)
        removals.pop(key, None)
        if event.type == event.DELETE:
            removals[key] = None
        else:
            entries[key] = _entry(event.kv)
    return Update(int(answer.events[-1].kv.mod_revision), tuple(entries.values()), tuple(removals))


def _entry(kv: Any) -> Entry:
    return Entry(kv.key.decode(errors="replace"), bytes(kv.value), int(kv.mod_revision), int(kv.lease))


def _end_of(prefix: str) -> bytes:
    """Return the first key after all keys that start with ``prefix``: etcd's ``range_end``."""
    raw = bytearray(prefix.encode())
    while raw and raw[-1] == 0xFF:
        raw.pop()
    raw[-1] += 1
    return bytes(raw)
