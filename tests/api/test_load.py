"""Many clients at once: deadlines hold, what is too much is refused with a hint, and all that was taken comes back."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from kvstore.errors import InvalidRequest, QuotaExceeded
from kvstore.pb import store_pb2 as pb
from kvstore.wire.grpc import RETRY_KEY, from_rpc
from tests.helpers import api
from tests.helpers.api import Client, pages_message
from tests.helpers.beacon import Beacon
from tests.helpers.content import LARGE, SMALL, chain, contents
from tests.helpers.processes import WAIT_S, Machine, wait_until
from tests.helpers.scraping import calls_under_way

Code = grpc.StatusCode

CLIENTS = 200
LOAD_S = 5.0
HANGS_S = 30.0
DEADLINES_S = (0.05, 0.2, 0.5, 1.0, 2.0)
LATE_S = 10.0  # after its deadline: a call that kept to none would end when its stream stalls, after 20
RPCS_MAX = 64
BUFFERS = 96 << 20
GROWTH_MAX = 2 * BUFFERS + (96 << 20)  # buffers, their messages on the way in and out, and 200 connections
PAGES = 16  # of 512 KiB
REFUSED = {Code.RESOURCE_EXHAUSTED, Code.CANCELLED}  # CANCELLED: by gRPC itself, before anybody looked at it
EXPECTED = {Code.OK, Code.DEADLINE_EXCEEDED, Code.ABORTED, *REFUSED}
LONG_S = 1.0  # deadlines that a call which was let in keeps
LATE_SHARE = 0.1  # of those that were let in, at most, on a machine that does not stall
LATE_SHARE_MAX = 0.5  # on any machine
# Where the machine is too slow to look at calls in time, more are refused than end late.
LATE_PER_REFUSED = 0.5
KEYS = chain(1, PAGES, LARGE)
STORED = pages_message(KEYS, LARGE)
PART = api.write_messages(pages_message(chain(2, 2, LARGE), LARGE), contents(chain(2, 2, LARGE), LARGE))


class Caller:
    """One client, with a connection of its own, that makes one call after the other."""

    def __init__(self, address: str, number: int) -> None:
        self.client = Client(address)
        self.number = number
        self.rng = random.Random(number)
        self.ended: Counter[Code] = Counter()
        self.long: Counter[Code] = Counter()  # those with a long deadline that do not stand still on purpose
        self.late_s = -1.0
        self.unhinted = 0
        mine = chain(100 + number, 2, LARGE)
        self.data = api.write_messages(pages_message(mine, LARGE), contents(mine, LARGE))
        self.few = pages_message(chain(100 + number, 2), SMALL)

    def work(self, stop: float) -> None:
        """Until then, one call at least."""
        while not self.ended or time.monotonic() < stop:
            deadline_s = self.rng.choice(DEADLINES_S)
            began = time.monotonic()
            code = self._one(deadline_s)
            self.late_s = max(self.late_s, time.monotonic() - began - deadline_s)
            self.ended[code] += 1
            if deadline_s >= LONG_S and self.number % 10 > 1:
                self.long[code] += 1
            if code in REFUSED:
                time.sleep(0.1)
        self.client.close()

    def _one(self, deadline_s: float) -> Code:
        if self.number % 10 == 0:
            return self._read_slowly(deadline_s)
        if self.number % 10 == 1:
            return self._stall(deadline_s)
        name, request = self.rng.choice(self._requests())
        return self._code(lambda: self.client.call(name, request, deadline_s))

    def _requests(self) -> list[tuple[str, Any]]:
        return [
            ("Write", self.data),
            ("Read", pb.ReadRequest(pages=STORED)),
            ("Lookup", pb.LookupRequest(pages=STORED)),
            ("Lease", pb.LeaseRequest(pages=STORED, ttl_ms=300)),
            ("Reserve", pb.ReserveRequest(pages=self.few, ttl_ms=300)),
            ("PutObject", api.put_messages(f"k{self.number}", bytes(300_000), replace=True)),
            ("GetObject", pb.GetObjectRequest(key=f"k{self.number}")),
            ("About", pb.AboutRequest()),
        ]

    def _read_slowly(self, deadline_s: float) -> Code:
        """Take the first reply, and nothing more until the deadline is over."""

        def read() -> None:
            over = time.monotonic() + deadline_s
            stream = self.client.stub.Read(pb.ReadRequest(pages=STORED), timeout=deadline_s)
            next(stream)
            time.sleep(max(0.0, over - time.monotonic()))
            for _ in stream:
                pass

        return self._code(read)

    def _stall(self, deadline_s: float) -> Code:
        """Send a part, and then nothing."""
        over = threading.Event()

        def messages() -> Iterator[pb.WriteRequest]:
            yield from PART[:3]
            over.wait(30)

        code = self._code(lambda: self.client.stub.Write(messages(), timeout=deadline_s))
        over.set()
        return code

    def _code(self, call: Any) -> Code:
        try:
            call()
        except grpc.RpcError as error:
            if error.code() is Code.RESOURCE_EXHAUSTED:
                hints = dict(error.trailing_metadata() or ())
                self.unhinted += not int(hints.get(RETRY_KEY, "0"))
            return error.code()
        return Code.OK


def wait_idle(client: Client, timeout_s: float = WAIT_S) -> None:
    """Nothing is held for anybody any more."""

    def idle() -> bool:
        stats = dict(client.call("Stats", pb.Empty()))
        frames = dict(dict(dict(stats["tiers"])["dram"])["frames"])
        held = sum(frames.get(state, 0) for state in ("reserved", "quarantined", "retiring"))
        return stats["leases"] + stats["reservations"] + held == 0

    wait_until("nothing is held any more", idle, timeout_s)


def test_two_hundred_clients(machine: Machine) -> None:
    settings = f"rpcs_max = {RPCS_MAX}\nrpc_buffers = {BUFFERS}"
    daemon, address = api.serve_with(machine, settings, dram="384MiB", http="127.0.0.1:0")
    first = Client(address)
    first.call("Write", api.write_messages(STORED, contents(KEYS, LARGE)))
    first.read(STORED)
    before = daemon.memory_bytes()
    callers = [Caller(address, number) for number in range(CLIENTS)]
    peak = 0
    with Beacon(threads=True) as beacon:
        stop = time.monotonic() + LOAD_S
        threads = [threading.Thread(target=caller.work, args=(stop,)) for caller in callers]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert time.monotonic() < stop + max(DEADLINES_S) + HANGS_S, "a client hangs"
            peak = max(peak, daemon.memory_bytes())
            time.sleep(0.05)
        stall_share = beacon.stall_s(stop - LOAD_S, stop) / LOAD_S
    ended = sum((caller.ended for caller in callers), Counter[Code]())
    late_s, growth = max(caller.late_s for caller in callers), peak - before
    long = sum((caller.long for caller in callers), Counter[Code]())
    shown = {code.name: count for code, count in ended.items()}
    print(f"\n{ended.total()} calls {shown}, at most {late_s:.2f} s late, {growth >> 20} MiB more")
    print(f"with long deadlines: { ({code.name: count for code, count in long.items()}) }")
    assert all(caller.ended.total() for caller in callers)
    assert set(ended) <= EXPECTED, shown
    assert ended[Code.OK] > 0 and sum(ended[code] for code in REFUSED) > 0, shown
    late, refused = long[Code.DEADLINE_EXCEEDED], sum(long[code] for code in REFUSED)
    let_in = long[Code.OK] + long[Code.ABORTED] + late
    # Of each second of a deadline, node and clients had what the beacon had.
    late_max = min(
        LATE_SHARE_MAX * let_in, max(LATE_SHARE * let_in, LATE_PER_REFUSED * refused) / max(0.1, 1 - stall_share)
    )
    print(f"{stall_share:.2f} of the time was a stall: at most {late_max:.0f} late calls are allowed")
    assert late < late_max, f"{late} calls were let in and not answered, {refused} refused"
    assert not any(caller.unhinted for caller in callers), "refused without a hint"
    assert late_s < LATE_S, f"a call ended {late_s:.2f} s after its deadline; {shown}"
    assert growth < GROWTH_MAX, f"grew by {growth >> 20} MiB"
    wait_idle(first)
    assert calls_under_way(daemon) == 0
    assert first.read(STORED) == contents(KEYS, LARGE).tobytes()
    assert list(dict(first.call("Verify", pb.Empty()))["findings"]) == []
    first.close()
    assert daemon.terminate() == 0
    assert "Traceback" not in daemon.trace(), daemon.trace()


def test_too_many_calls_are_refused_with_a_hint(machine: Machine) -> None:
    daemon, address = api.serve_with(machine, "rpcs_max = 2")
    client = Client(address)
    watches = [client.stub.Watch(pb.WatchRequest(), timeout=60) for _ in range(2)]
    for watch in watches:
        next(watch)
    for name, request in (("About", pb.AboutRequest()), ("Stats", pb.Empty())):
        with pytest.raises(grpc.RpcError) as refused:
            client.call(name, request)
        assert refused.value.code() is Code.RESOURCE_EXHAUSTED
        assert int(dict(refused.value.trailing_metadata())[RETRY_KEY]) > 0
    watches[0].cancel()
    wait_until("there is room again", lambda: client.code("About", pb.AboutRequest()) is Code.OK)
    watches[1].cancel()
    client.close()
    assert daemon.terminate() == 0


def test_a_tenant_at_its_quota_is_told_when_to_come_back(machine: Machine) -> None:
    daemon, address = api.serve_with(machine, 'quotas = ["t dram=4MiB"]', dram="64MiB")
    client = Client(address)
    keys = chain(20, 12, LARGE, "t")
    pages = pages_message(keys, LARGE, "t")
    written = client.call("Write", api.write_messages(pages, contents(keys, LARGE)))
    assert 0 < written.new_pages == written.pages < 12  # what fits is stored, and said
    client.call("Lease", pb.LeaseRequest(pages=pages, ttl_ms=60_000))
    more = chain(21, 2, LARGE, "t")
    wanted = pages_message(more, LARGE, "t")
    for name, request in (
        ("Write", api.write_messages(wanted, contents(more, LARGE))),
        ("Reserve", pb.ReserveRequest(pages=wanted)),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            client.call(name, request)
        assert refused.value.code() is Code.RESOURCE_EXHAUSTED, name
        error = from_rpc(refused.value)
        assert isinstance(error, QuotaExceeded) and error.retry_after_s > 0
    other = pages_message(chain(21, 2, LARGE), LARGE)
    assert client.call("Write", api.write_messages(other, contents(chain(21, 2, LARGE), LARGE))).new_pages == 2
    client.close()
    assert daemon.terminate() == 0


def test_messages_are_bounded_and_so_is_what_they_name(machine: Machine) -> None:
    daemon, address = api.serve_with(machine, "", dram="64MiB")
    client = Client(address)
    large = pb.Pages(layout=STORED.layout, tokens=bytes(5 << 20))
    with pytest.raises(grpc.RpcError) as refused:
        client.call("Lookup", pb.LookupRequest(pages=large))
    assert isinstance(from_rpc(refused.value), InvalidRequest)
    tiny = pb.Layout(model="tiny", layers=1, head_dim=8, dtype="uint8", page_tokens=1)
    many = pb.Pages(layout=tiny, tokens=bytes(4 * 65_536), whole_pages=True)
    assert len(client.call("Lookup", pb.LookupRequest(pages=many)).keys) == 65_536
    many.tokens += bytes(4)
    assert client.code("Lookup", pb.LookupRequest(pages=many)) is Code.INVALID_ARGUMENT
    assert client.code("ContainsObjects", pb.ObjectKeys(keys=["k"] * 16_385)) is Code.INVALID_ARGUMENT
    long = "s" * 1025  # salts are remembered
    assert client.code("GetObject", pb.GetObjectRequest(key="k", salt=long)) is Code.INVALID_ARGUMENT
    assert client.code("Lookup", pb.LookupRequest(pages=pages_message(KEYS, LARGE, long))) is Code.INVALID_ARGUMENT
    huge = pb.PutObjectRequest(begin=pb.PutObjectBegin(key="k", size_bytes=1 << 60))
    assert client.code("PutObject", [huge]) is Code.INVALID_ARGUMENT
    about = client.call("About", pb.AboutRequest())
    assert (about.message_bytes_max, about.object_bytes_max) == (4 << 20, 252 << 20)
    assert daemon.memory_bytes() < 512 << 20
    client.close()


def test_buffers_are_shared_and_come_back(machine: Machine) -> None:
    """A stream that waits for its caller holds all buffers: other calls are told when to retry, until it ends."""
    daemon, address = api.serve_with(
        machine, "rpc_buffers = 16777216\nextent = 4194304\nrpc_timeout_s_max = 300", dram="64MiB"
    )
    client = Client(address)
    client.call("Write", api.write_messages(STORED, contents(KEYS, LARGE)))
    over = threading.Event()

    def slowly() -> Iterator[pb.WriteRequest]:
        yield from PART[:2]
        while not over.wait(1.0):
            yield pb.WriteRequest()  # without data: a stream that sends nothing for 20 s is ended

    def hold() -> Any:
        return client.stub.Write.future(slowly(), timeout=300)

    held = hold()

    def refusal() -> grpc.RpcError | None:
        nonlocal held
        if held.done():  # it was refused: a slow read before it had the buffers for too long
            held = hold()
        try:
            client.read(STORED)
        except grpc.RpcError as error:
            return error
        return None

    refused = wait_until("the stream holds the buffers", refusal)
    assert refused.code() is Code.RESOURCE_EXHAUSTED and "buffers" in refused.details()
    assert int(dict(refused.trailing_metadata())[RETRY_KEY]) > 0
    assert client.code("Lookup", pb.LookupRequest(pages=STORED)) is Code.OK  # a call that needs none is answered
    with pytest.raises(grpc.RpcError) as too_large:
        client.call("PutObject", api.put_messages("large", bytes(17 << 20)))
    assert too_large.value.code() is Code.INVALID_ARGUMENT and "rpc_buffers" in too_large.value.details()
    assert not held.done(), held.details()
    held.cancel()
    over.set()
    wait_until("there is room again", lambda: client.code("Read", pb.ReadRequest(pages=STORED)) is Code.OK)
    client.close()
    assert daemon.terminate() == 0


def test_the_nodes_own_limit_bounds_a_call_without_a_deadline(machine: Machine) -> None:
    _, address = api.serve_with(machine, "rpc_timeout_s_max = 1.0")
    client = Client(address)
    over = threading.Event()

    def endless() -> Iterator[pb.WriteRequest]:
        yield pb.WriteRequest(begin=pb.WriteBegin(pages=STORED))
        over.wait(60)

    with pytest.raises(grpc.RpcError) as ended:
        client.stub.Write(endless())
    assert ended.value.code() is Code.DEADLINE_EXCEEDED
    over.set()
    list(client.stub.Watch(pb.WatchRequest()))  # ends well before the limit
    client.close()


def test_slow_readers_hold_nothing_but_buffers(machine: Machine) -> None:
    daemon, address = api.serve_api(machine, dram="128MiB")
    client = Client(address)
    keys = chain(5, 64, LARGE)
    pages = pages_message(keys, LARGE)
    client.call("Write", api.write_messages(pages, contents(keys, LARGE)))
    before = daemon.memory_bytes()
    slow = [Client(address) for _ in range(8)]
    streams = [reader.stub.Read(pb.ReadRequest(pages=pages), timeout=60) for reader in slow]
    for stream in streams:
        assert next(stream).match.pages == 64
    held = [before]

    def full() -> bool:  # it sends no more: what it has read waits for its readers
        time.sleep(0.1)
        held.append(daemon.memory_bytes())
        return len(held) > 4 and max(held[-3:]) - min(held[-3:]) < 1 << 20

    wait_until("nothing more is sent", full)
    assert max(held) - before < 8 * 16 << 20
    evicted = dict(client.call("Admin", api.struct(call="evict", pages=1 << 20)))
    assert evicted["pages"] == 64
    for stream in streams:
        replies = list(stream)
        data = b"".join(reply.data for reply in replies)
        assert contents(keys, LARGE).tobytes().startswith(data)
        assert replies[-1].match.pages == len(data) // LARGE.page_bytes < 64
    for reader in [client, *slow]:
        reader.close()
    assert daemon.terminate() == 0


def test_what_cancelled_calls_took_comes_back(machine: Machine) -> None:
    daemon, address = api.serve_api(machine, dram="128MiB")
    client = Client(address)
    keys = chain(6, 64, LARGE)
    pages = pages_message(keys, LARGE)
    client.call("Write", api.write_messages(pages, contents(keys, LARGE)))
    for _ in range(20):
        stream = client.stub.Read(pb.ReadRequest(pages=pages), timeout=60)
        next(stream)
        stream.cancel()
    # Some are cancelled before they are carried out, some while, some after; of these only the deadline ends.
    for number in range(60):
        wanted = pages_message(chain(10 + number, 2, LARGE), LARGE)
        for call in (
            client.stub.Reserve.future(pb.ReserveRequest(pages=wanted, ttl_ms=3000)),
            client.stub.Lease.future(pb.LeaseRequest(pages=pages, ttl_ms=3000)),
        ):
            time.sleep(0.0001 * (number % 20))
            if not call.cancel() and call.code() is Code.OK:
                reply = call.result()
                if isinstance(reply, pb.ReserveReply):
                    client.call("Revoke", pb.ReservationRequest(reservation=reply.reservation))
                else:
                    client.call("Release", pb.ReleaseRequest(lease=reply.lease))
    vanished = client.call("Reserve", pb.ReserveRequest(pages=pages_message(chain(7, 2, LARGE), LARGE), ttl_ms=300))
    assert len(vanished.wanted) == 2
    wait_idle(client)
    assert list(dict(client.call("Verify", pb.Empty()))["findings"]) == []
    client.close()
    assert daemon.terminate() == 0
