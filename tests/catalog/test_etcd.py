"""The etcd catalog against real servers that die, stop, forget, and refuse."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from kvstore.cluster.catalog import base
from kvstore.cluster.catalog.base import Catalog, boot_s
from kvstore.cluster.catalog.etcd import EtcdCatalog
from kvstore.cluster.catalog.etcd_channel import Credentials
from kvstore.cluster.catalog.task_health import TaskHealth
from kvstore.cluster.membership import Presence
from kvstore.errors import InvalidRequest, Unauthenticated, Unavailable
from tests.helpers.api import Certificates
from tests.helpers.etcd import Etcd, binary, told
from tests.helpers.processes import free_port

LONG_S = 60.0


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Etcd]:
    servers = Etcd(tmp_path / "etcd")
    yield servers
    servers.close()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Etcd]:
    servers = Etcd(tmp_path / "etcd", members=3)
    yield servers
    servers.close()


async def published(catalog: Catalog, key: str, value: bytes) -> None:
    """Publish, however long the catalog is away."""
    async with asyncio.timeout(LONG_S):
        while True:
            try:
                await catalog.publish(key, value)
                return
            except Unavailable:
                await asyncio.sleep(0.1)


def test_a_watch_goes_on_after_a_restart(one: Etcd) -> None:
    async def test() -> None:
        async with EtcdCatalog(one.endpoints) as catalog:
            await catalog.publish("/a/1", b"1")
            async with aclosing(catalog.watch("/a/")) as updates:
                assert (await anext(updates)).whole
                one.members[0].kill()
                catalog.call_s = 1.0
                with pytest.raises(Unavailable, match="did not answer"):
                    await catalog.publish("/a/2", b"2")
                one.restart()
                await published(catalog, "/a/3", b"3")
                seen = {}
                while "/a/3" not in seen:
                    update = await asyncio.wait_for(anext(updates), LONG_S)
                    assert not update.whole, "it goes on where it was"
                    seen.update({each.key: each.value for each in update.entries})

    asyncio.run(test())


def test_a_watch_begins_anew_where_etcd_has_forgotten(one: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.cluster.catalog.task_health.PAUSE_MIN_S", 3.0)  # it is away for long enough

    async def test() -> None:
        async with EtcdCatalog(one.endpoints) as catalog, EtcdCatalog(one.endpoints) as other:
            await catalog.publish("/a/old", b"")
            async with aclosing(catalog.watch("/a/")) as updates:
                await anext(updates)
                waiting = asyncio.create_task(told(updates, lambda known: known == {"/a/new": b"1"}))
                one.members[0].kill()
                one.restart()
                await published(other, "/a/new", b"1")
                await other.retract("/a/old")
                pb = other._pb
                request = pb.CompactionRequest(revision=(await other.listing("/a/")).revision, physical=True)
                await other._call("KV/Compact", request, pb.CompactionResponse)
                assert await waiting
            async with aclosing(catalog._changes("/a/", 1, TaskHealth("watch"))) as forgotten:
                assert await anext(forgotten) is None

    asyncio.run(test())


def test_presence_outlives_an_outage_longer_than_its_time_to_live(one: Etcd) -> None:
    async def test() -> None:
        async with EtcdCatalog(one.endpoints) as catalog:
            presence = Presence(catalog, 2.0)
            await presence.start({"/a/n": b"me"})
            one.members[0].kill()
            async with asyncio.timeout(LONG_S):
                while presence.published:
                    await asyncio.sleep(0.05)
            one.restart()
            async with asyncio.timeout(LONG_S):
                while not presence.published:
                    await asyncio.sleep(0.05)
            async with aclosing(catalog.watch("/a/")) as updates:
                assert await told(updates, lambda known: known == {"/a/n": b"me"})
            await presence.close()

    asyncio.run(test())


def test_etcd_that_has_lost_everything_is_told_anew(one: Etcd) -> None:
    """Made anew at the same address, its revisions begin again, and what it has is not what was known."""

    async def test() -> None:
        async with EtcdCatalog(one.endpoints) as catalog, EtcdCatalog(one.endpoints) as other:
            presence = Presence(catalog, 2.0)
            await presence.start({"/a/n": b"me"})
            for turn in range(20):
                await catalog.publish("/a/x", b"%d" % turn)
            async with aclosing(other.watch("/a/")) as updates:
                await anext(updates)
                one.members[0].kill()
                await asyncio.to_thread(one.begin_anew)
                assert await told(updates, lambda known: known == {"/a/n": b"me"}), "and x is gone"
                for turn in range(40):  # beyond the revisions of before
                    await published(catalog, "/a/y", b"%d" % turn)
                await told(updates, lambda known: known.get("/a/y") == b"39")
            await presence.close()

    asyncio.run(test())


def test_a_clock_of_half_the_speed_loses_no_session(one: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    began_s = boot_s()
    monkeypatch.setattr(base, "boot_s", lambda: began_s + (boot_s() - began_s) / 2)
    monkeypatch.setattr(base, "RENEWALS_PER_TTL", base.RENEWALS_PER_TTL / 2)  # asleep for twice as long

    async def test() -> None:
        async with EtcdCatalog(one.endpoints) as catalog:
            presence = Presence(catalog, 2.0)
            await presence.start({"/a/n": b"me"})
            session = presence._session
            until_s = boot_s() + 4.0
            while boot_s() < until_s:
                assert presence.published and presence._session is session
                assert await catalog.get("/a/n") is not None
                await asyncio.sleep(0.1)
            await presence.close()

    asyncio.run(test())


def test_one_of_three_members_may_die_or_hang(three: Etcd) -> None:
    async def test() -> None:
        async with EtcdCatalog(three.endpoints) as catalog:
            presence = Presence(catalog, 10.0)
            await presence.start({"/a/n": b"me"})
            session = presence._session
            async with aclosing(catalog.watch("/a/")) as updates:
                await anext(updates)
                for turn, member in enumerate((*three.members, *three.members)):
                    if turn % 2:
                        member.kill()
                    else:
                        member.pause()
                    began_s = boot_s()
                    await published(catalog, "/a/x", b"%d" % turn)
                    await told(updates, lambda known, turn=turn: known.get("/a/x") == b"%d" % turn)  # type: ignore[misc]
                    assert boot_s() - began_s < LONG_S
                    if turn % 2:
                        three.restart(three.members.index(member))
                    else:
                        member.resume()
                    await asyncio.to_thread(member.wait_serving)
            assert presence.published and presence._session is session, "no session was lost on the way"
            await presence.close()

    asyncio.run(test())


def test_a_member_without_the_others_does_not_answer_for_them(three: Etcd) -> None:
    async def test() -> None:
        async with EtcdCatalog(three.endpoints[:1]) as catalog:
            await catalog.publish("/a/x", b"1")
            catalog.call_s = 2.0
            for each in three.members[1:]:
                each.kill()
            with pytest.raises(Unavailable, match="did not answer"):
                await catalog.publish("/a/x", b"2")
            with pytest.raises(Unavailable):
                await catalog.listing("/a/")

    asyncio.run(test())


def test_user_and_password(one: Etcd, tmp_path: Path) -> None:
    """A token that the server has forgotten, as after its restart, is renewed."""
    wrong, right = (password_file(tmp_path / text, text) for text in ("wrong", "s3cret"))

    async def test() -> None:
        async with EtcdCatalog(one.endpoints) as plain:
            ctl(one, "user", "add", "root:s3cret")
            ctl(one, "user", "grant-role", "root", "root")
            ctl(one, "auth", "enable")
            with pytest.raises(Unauthenticated, match="user"):
                await plain.publish("/a/x", b"")
        with pytest.raises(Unauthenticated, match="refuses user 'root'"):
            await EtcdCatalog(one.endpoints, Credentials(user="root", password_file=wrong)).start()
        async with EtcdCatalog(one.endpoints, Credentials(user="root", password_file=right)) as known:
            presence = Presence(known, 10.0)
            await presence.start({"/a/n": b"me"})
            async with aclosing(known.watch("/a/")) as updates:
                await anext(updates)
                one.members[0].kill()
                one.restart()
                await published(known, "/a/x", b"1")
                await told(updates, lambda found: "/a/x" in found)
            await presence.close()

    asyncio.run(test())


def test_tls(tmp_path: Path) -> None:
    """With the right authority it connects; without, or in plain text, it does not. Both name the remedy."""
    made = Certificates(tmp_path).folder
    flags = (*("--cert-file", str(made / "server.pem"), "--key-file", str(made / "server.key")),)
    flags += ("--trusted-ca-file", str(made / "ca.pem"), "--client-cert-auth")
    servers = Etcd(tmp_path / "etcd", flags=flags, scheme="https")

    async def test() -> None:
        right = Credentials(made / "ca.pem", made / "client.pem", made / "client.key")
        async with EtcdCatalog(servers.endpoints, right) as catalog:
            await catalog.publish("/a/x", b"1")
            assert await catalog.get("/a/x")
        for wrong in (Credentials(), Credentials(made / "ca.pem")):
            with pytest.raises(Unavailable, match="file:PATH"):
                await EtcdCatalog(servers.endpoints, wrong, call_s=2.0).start()
        with pytest.raises(InvalidRequest, match="catalog_ca"):
            await EtcdCatalog(servers.endpoints, Credentials(tmp_path / "none.pem")).start()
        with pytest.raises(InvalidRequest, match="catalog_cert"):
            await EtcdCatalog(servers.endpoints, Credentials(certificate=made / "server.pem")).start()

    try:
        asyncio.run(test())
    finally:
        servers.close()


def test_nobody_there() -> None:
    with pytest.raises(Unavailable, match="Is etcd running there"):
        asyncio.run(EtcdCatalog([f"127.0.0.1:{free_port()}"], call_s=1.0).start())


def test_a_listing_of_many_pages_is_of_one_moment(etcd: Etcd) -> None:
    async def test() -> None:
        async with EtcdCatalog(etcd.endpoints) as catalog:
            for start in range(0, 2500, 100):
                await asyncio.gather(*(catalog.publish(f"/many/{n:05}", b"") for n in range(start, start + 100)))
            listing = await catalog.listing("/many/")
            assert [each.key for each in listing.entries] == [f"/many/{n:05}" for n in range(2500)]

    asyncio.run(test())


def password_file(path: Path, password: str) -> Path:
    path.write_text(password)
    path.chmod(0o600)
    return path


def ctl(servers: Etcd, *words: str) -> None:
    tool = binary().with_name("etcdctl")
    subprocess.run(
        [str(tool), "--endpoints", servers.endpoints[0], *words], check=True, capture_output=True, timeout=60
    )


def test_the_messages_are_those_of_the_package() -> None:
    from kvstore.cluster.catalog.etcd_channel import messages

    request = messages().PutRequest(key=b"k", value=b"v", lease=7)
    assert messages().PutRequest.FromString(request.SerializeToString()) == request
    with pytest.raises(AttributeError):
        assert messages().NoSuchMessage
    assert json.dumps([field.name for field in messages().LeaseGrantRequest.DESCRIPTOR.fields]) == '["TTL", "ID"]'
