"""Records of the log of puts that no client of this version writes, and a node that fails at one."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import Keys
from kvstore.client.local.publisher import PutLogReader
from kvstore.config import NodeConfig, Quota
from kvstore.errors import NodeUnavailable
from kvstore.model.replica import Address, FrameClass, Tier
from kvstore.node.book import NAMES
from kvstore.node.node import Node
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import DaemonState, Header
from kvstore.shm.put_log import PutLog
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.wire.control import BATCH_MAX, NO_REPLY, OBJECT, Op, encode, pack_addresses, pack_class
from tests.helpers.content import SMALL, chain

CLASS = FrameClass(SMALL.page_bytes, SMALL.page_tokens, SMALL.layers)
SESSION = 4711
LIMITED, QUOTA = "limited", 8 * SMALL.page_bytes


class Published:
    """A node without its threads, and a session that publishes there."""

    def __init__(self, shm_dir: Path) -> None:
        self.config = NodeConfig(name="n", shm_dir=shm_dir, dram=4 << 20, quotas=(Quota(LIMITED, QUOTA),))
        self.start()

    def start(self) -> None:
        self.node = Node.start(self.config)
        puts = self.node.performer.puts
        assert puts is not None
        self.log: PutLog = puts
        self.node.handle(ev.SessionOpened(time.monotonic_ns(), SESSION))
        self.slot = (self.node.puts.assign_slot(SESSION) or {})["slot"]

    def request(
        self,
        keys: Keys,
        op: int = Op.SEAL_GRANTED,
        flags: int = NO_REPLY,
        anchor: bytes | None = None,
        root: bytes = b"",
    ) -> bytes:
        """As a client makes it, in frames granted for it."""
        anchor = keys.parent if anchor is None else anchor
        grant = ev.Grant(time.monotonic_ns(), SESSION, CLASS, len(keys), False, anchor, root=root)
        addresses = sorted(self.node.handle(grant).addresses)
        assert len(addresses) == len(keys)
        body = keys.parent, pack_addresses(addresses), *keys.columns(0, len(keys))
        return encode(op, 0, count=len(keys), a=pack_class(CLASS), flags=flags, body=body)

    def frames(self) -> int:
        """How many there are for pages of this class."""
        addresses = self.node.handle(ev.Grant(time.monotonic_ns(), SESSION, CLASS, BATCH_MAX)).addresses
        self.node.handle(ev.Revoke(time.monotonic_ns(), SESSION, addresses))
        assert 8 < len(addresses) < BATCH_MAX
        return len(addresses)

    def publish(self, *requests: bytes) -> None:
        for request in requests:
            assert self.log.append(self.slot, SESSION, request)

    def has(self, keys: Keys) -> int:
        return self.node.performer.index._index.longest(Tier.DRAM, keys.hashes)[0]

    def counted(self, name: str) -> int:
        return self.node.state.counters[name]


@pytest.fixture
def published() -> Iterator[Published]:
    with tempfile.TemporaryDirectory(prefix="kvtest-", dir="/dev/shm") as path:
        made = Published(Path(path))
        yield made
        made.node.stop(remove=True)


def bad_requests(published: Published) -> dict[str, bytes]:
    good = published.request(chain(100, 2))
    return {
        "another verb": published.request(chain(102, 2), op=Op.REVOKE),
        "an object": published.request(chain(101, 2), flags=NO_REPLY | OBJECT),
        "objects that replace others": published.request(chain(105, 2), op=Op.SEAL_OBJECTS) + bytes(31) + b"1",
        "objects without what they replace": published.request(chain(106, 2), op=Op.SEAL_OBJECTS)[:-40],
        "too short for a header": good[:16],
        "rows are missing": good[:-40],
        "rows of what is begun are missing": published.request(chain(103, 2), op=Op.BEGIN)[:-40],
        "no pages": encode(Op.SEAL_GRANTED, 0, count=0, a=pack_class(CLASS), flags=NO_REPLY),
        "no class": encode(Op.SEAL_GRANTED, 0, count=1, a=0, flags=NO_REPLY, body=(bytes(400),)),
        "more pages than it has": encode(Op.SEAL_GRANTED, 0, count=60_000, a=pack_class(CLASS), body=(bytes(400),)),
    }


def test_a_record_that_makes_no_sense_is_passed_over(published: Published) -> None:
    for count, (what, request) in enumerate(bad_requests(published).items(), 1):
        before, after = chain(2 * count, 2), chain(2 * count + 1, 2)
        published.publish(published.request(before), request, published.request(after))
        published.node.puts.drain()
        assert (published.has(before), published.has(after)) == (2, 2), what
        assert published.counted("put_logs_damaged") == count, what
        assert published.log.is_drained, what
    assert published.node.verify() == []


def test_pages_named_twice_and_frames_of_nobody_are_refused(published: Published) -> None:
    keys = chain(1, 2)
    request = published.request(keys)
    columns = sum(map(len, keys.columns(0, 2)))
    first, second = request[-2 * 16 - columns :][:16], request[-columns - 16 :][:16]
    published.publish(request.replace(second, first), request, request)
    published.node.puts.drain()
    assert published.log.is_drained and published.has(keys) in (0, 2)
    assert published.counted("put_logs_damaged") == 0
    assert published.node.verify() == []


def test_frames_for_the_rest_of_a_put_are_not_those_of_what_it_has_published(published: Published) -> None:
    """Nor for another one like it, ahead. What a later put needs they are."""
    node, log, slot = published.node, published.log, published.slot
    keys = chain(1, published.frames())
    since = log.published(slot) + 1
    published.publish(published.request(keys))

    def granted(ahead: bool, since: int) -> int:
        grant = ev.Grant(time.monotonic_ns(), SESSION, CLASS, 8, ahead, keys.root, since)
        return len(node.handle(grant).addresses)

    assert granted(True, since) == granted(False, since) == 0
    assert published.has(keys) == len(keys)
    assert granted(False, log.published(slot) + 1) == 8
    assert len(keys) - 8 - published.has(keys) in (0, 1), "one frame in 256 may be freed in addition"
    assert node.verify() == []


@pytest.mark.parametrize("kills", [0, 1])
def test_a_quota_is_charged_with_frames_and_refuses_nothing_that_was_published(
    published: Published, kills: int
) -> None:
    """The next daemon does not know whose the frames are: what is too much then leaves again, coldest first."""
    first, second = chain(1, 5, SMALL, LIMITED), chain(2, 5, SMALL, LIMITED)

    def share() -> Any:
        return published.node.state.tenants.stats([LIMITED])[LIMITED]["dram"]

    def asked(count: int, ahead: bool) -> list[Address]:
        grant = ev.Grant(time.monotonic_ns(), SESSION, CLASS, count, ahead, second.root, root=second.root)
        return published.node.handle(grant).addresses

    published.node.handle(ev.NameRoot(time.monotonic_ns(), first.root, {"salt": LIMITED}))
    request = published.request(first, root=first.root)
    assert published.node.verify() == []
    assert len(asked(32, True)) == 0, "an eighth of the quota is not left"
    more = asked(32, False)
    assert len(more) == 3 and not asked(1, False)
    published.node.handle(ev.Revoke(time.monotonic_ns(), SESSION, more))
    published.publish(request)
    published.node.tick()
    assert (share()["bytes"], published.has(first)) == (5 * SMALL.page_bytes, 5)
    third = chain(3, 5, SMALL, LIMITED)
    requests = [published.request(second, root=second.root), published.request(third, anchor=b"")]
    assert published.has(first) == 3, "what does not fit beside them has left"
    if kills:
        published.node.stop()
        published.publish(*requests)
        published.start()
    else:
        published.publish(*requests)
    published.node.puts.drain()
    assert published.has(second) == published.has(third) == 5
    published.node.tick()
    assert share()["bytes"] <= QUOTA and published.counted("pages_published_in_vain") == 0
    assert published.node.verify() == []


def test_a_release_that_is_published_counts_before_anything_is_decided(published: Published) -> None:
    """Also between puts, which are taken in together before and after it."""
    node, before, after = published.node, chain(1, 2), chain(2, 2)
    published.publish(published.request(before))
    node.puts.drain()
    found = [node.performer.index.find(Tier.DRAM, key) for key in before.hashes]
    leased = [address for address in found if address is not None]
    lease = ev.TakeLease(time.monotonic_ns(), SESSION, 7, 10**12, leased)
    assert node.handle(lease).statuses == [0, 0]
    evict = ev.Evict(time.monotonic_ns(), 1, 0)
    assert node.handle(evict).detail["pages"] == 0
    release = encode(Op.RELEASE, 0, a=7, flags=NO_REPLY)
    requests = [published.request(chain(seed, 1)) for seed in (10, 11)]
    published.publish(requests[0], release, encode(Op.RELEASE, 0, a=99), requests[1], published.request(after))
    assert node.handle(ev.Evict(time.monotonic_ns(), 6, 0)).detail["pages"] == 6
    assert len(node.state.leases) == 0
    assert published.has(before) == 0 and published.counted("put_logs_damaged") == 0
    assert published.log.is_drained and node.verify() == []


def test_a_lease_that_is_published_counts_before_anything_is_decided(published: Published) -> None:
    """And the node can be seen to decide, as long as it does."""
    keys = chain(1, 2)
    published.publish(published.request(keys))
    published.node.puts.drain()
    found = [published.node.performer.index.find(Tier.DRAM, key) for key in keys.hashes]
    addresses = [address for address in found if address is not None]
    lease = encode(Op.LEASE, 0, count=2, a=7, b=10**6, flags=NO_REPLY, body=(pack_addresses(addresses),))
    published.publish(lease, lease)
    assert published.node.handle(ev.Evict(time.monotonic_ns(), 2, 0)).detail["pages"] == 0
    assert len(published.node.state.leases) == 1 and published.has(keys) == 2
    published.publish(encode(Op.RELEASE, 0, a=7, flags=NO_REPLY))
    assert published.node.look(lambda performer, state: published.log.deciding and len(state.leases) == 0)
    assert not published.log.deciding
    assert published.node.handle(ev.Evict(time.monotonic_ns(), 2, 0)).detail["pages"] == 2
    assert published.counted("put_logs_damaged") == 0
    assert published.log.is_drained and published.node.verify() == []


def test_a_record_that_fails_for_no_known_reason_fails_once(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at every decision, and not at every start."""
    keys, after = chain(1, 2), chain(2, 2)
    published.publish(published.request(keys), published.request(after))
    handle = published.node.state.handle

    def failing(event: ev.Event) -> list[do.Instruction]:
        if isinstance(event, ev.SealGranted) and event.rows[0].tobytes() in keys.identity_bytes:
            raise RuntimeError("a bug")
        return handle(event)

    monkeypatch.setattr(published.node.state, "handle", failing)
    with pytest.raises(RuntimeError):
        published.node.puts.drain()
    published.node.tick()
    assert (published.has(keys), published.has(after)) == (0, 2)
    monkeypatch.undo()
    published.node.stop()
    published.start()
    assert published.log.is_drained and published.has(after) == 2
    assert published.node.verify() == []


def test_what_is_published_before_a_stop_and_after_it_is_taken_in(published: Published) -> None:
    before, after = chain(1, 3), chain(2, 3)
    requests = [published.request(before), published.request(after)]
    published.publish(requests[0])
    published.node.stop()
    published.publish(requests[1])
    published.start()
    assert (published.has(before), published.has(after)) == (3, 3)
    assert published.node.verify() == []


@pytest.mark.parametrize("how", ["look", "count", "drain", "handle"])
def test_whoever_takes_a_put_in_writes_whose_it_is(published: Published, how: str) -> None:
    """A kill may come next; those that only look write it too."""
    node, keys = published.node, chain(1, 2)
    node.handle(ev.NameRoot(time.monotonic_ns(), keys.root, {"salt": "whose"}))
    published.publish(published.request(keys, anchor=b""))
    assert not (node.folder / NAMES).exists(), "nothing is stored of it"
    ways = {
        "look": lambda: node.look(lambda performer, state: None),
        "count": lambda: node.count("looks"),
        "drain": node.puts.drain,
        "handle": lambda: node.handle(ev.Tick(time.monotonic_ns())),
    }
    ways[how]()
    assert published.has(keys) == 2
    assert "whose" in (node.folder / NAMES).read_text()


def test_a_reader_that_one_daemon_did_not_answer_asks_the_next_one(published: Published) -> None:
    """At once, whether it has ticked or not: what was published just now is no miss because a node was down before."""
    header = Header.open(NodeFolder.at(published.node.folder))
    assert header is not None

    def ask(*_: Any, **__: Any) -> Any:
        if published.node.performer.header.state != DaemonState.READY:
            raise NodeUnavailable("it is starting")
        return SimpleNamespace(result=published.node.puts.drain)

    channel: Any = SimpleNamespace(request=ask)
    reads = PutLogReader(NodeFolder.at(published.node.folder), header)
    for number in range(3):
        down, up = chain(10 * number, 2), chain(10 * number + 1, 2)
        published.node.stop()
        published.start()
        published.publish(published.request(down))
        assert reads.look(lambda keys=down: keys.hashes, b"", channel) is None, "it does not answer yet"
        published.publish(published.request(up))
        published.node.enter(DaemonState.READY)
        assert reads.look(lambda keys=up: keys.hashes, b"", channel) is not None
        assert (published.has(down), published.has(up)) == (2, 2)
